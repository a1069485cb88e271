//! Settings with a few values, each with a name.

/// Declares an enum whose values have the names given, in configurations and on the command line.
macro_rules! choices {
    ($(#[$doc:meta])* pub enum $name:ident { $($(#[$of:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$of])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// All values.
            pub const ALL: [$name; [$($text),+].len()] = [$($name::$variant),+];

            /// Its name in configurations and on the command line.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let found = Self::ALL.into_iter().find(|value| value.name() == text);
                found.ok_or_else(|| format!("allowed: {}", Self::ALL.map(Self::name).join(", ")))
            }
        }
    };
}

pub(crate) use choices;
