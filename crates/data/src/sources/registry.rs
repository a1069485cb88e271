//! The registry: one line per kind of source. It generates the configuration enum and, in tests, the
//! suite that every kind must pass; no other code matches on the kind.
//!
//! The macro is expanded in the parent module, which declares the kinds' modules.

macro_rules! registry {
    ($($(#[$doc:meta])* $name:ident = $kind:literal in $module:ident;)+) => {
        /// One `[[data.sources]]` table: `kind`, `weight` and that kind's own keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum SourceConfig {
            $($(#[$doc])* #[serde(rename = $kind)] $name(Weighted<$module::Config>),)+
        }

        impl SourceConfig {
            /// Every registered kind, as the configuration spells it.
            pub const KINDS: &[&str] = &[$($kind,)+];

            /// The source's kind, as the configuration spells it.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)+ }
            }

            /// The source's share of the rows, relative to the other sources' weights.
            pub fn weight(&self) -> f64 {
                match self { $(Self::$name(table) => table.weight,)+ }
            }

            /// The kind's own part.
            pub(crate) fn source(&self) -> &dyn Source {
                match self { $(Self::$name(table) => &table.source,)+ }
            }
        }

        $(impl From<$module::Config> for SourceConfig {
            fn from(source: $module::Config) -> Self {
                Self::$name(source.into())
            }
        })+

        #[cfg(test)]
        mod suites {
            $(super::conformance::suite!($module);)+
        }
    };
}

pub(super) use registry;
