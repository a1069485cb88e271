//! The registry: one line per kind. It generates the configuration enum and the dispatch; no other
//! code matches on the kind.
//!
//! The macro is expanded in the parent module, which declares the kinds' modules.

macro_rules! registry {
    ($($(#[$doc:meta])* $name:ident = $kind:literal in $module:ident;)+) => {
        /// The table `[train.optimiser]`, or `optimiser` of a group: `kind` and that kind's own keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum OptimiserConfig {
            $($(#[$doc])* #[serde(rename = $kind)] $name($module::Config),)+
        }

        impl OptimiserConfig {
            /// Every registered kind with its default settings, in the registry's order.
            pub fn defaults() -> Vec<Self> {
                vec![$(Self::$name(<$module::Config as Default>::default()),)+]
            }

            /// The kind.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)+ }
            }

            /// Every kind's [`OptimiserKind::STATE_KEYS`].
            pub(crate) fn state_keys() -> Vec<&'static str> {
                [$(<$module::Config as OptimiserKind>::STATE_KEYS,)+].concat()
            }

            /// As [`OptimiserKind::method`].
            pub fn method(&self, parameter: &Parameter) -> Method {
                match self { $(Self::$name(c) => c.method(parameter),)+ }
            }

            /// As [`OptimiserKind::validate`].
            pub fn validate(&self, table: &str, problems: &mut Problems) {
                match self { $(Self::$name(c) => c.validate(table, problems),)+ }
            }

            /// As [`OptimiserKind::state`].
            pub(crate) fn state(&self, parameter: &Parameter) -> Vec<StateTensor> {
                match self { $(Self::$name(c) => c.state(parameter),)+ }
            }

            /// As [`OptimiserKind::update_flops`].
            pub(crate) fn update_flops(&self, parameter: &Parameter) -> f64 {
                match self { $(Self::$name(c) => c.update_flops(parameter),)+ }
            }

            /// As [`OptimiserKind::step_all`].
            fn step_all<B: OpBackend>(&self, steps: Vec<Step<'_, B>>) -> Vec<StepOutputs<B>> {
                match self { $(Self::$name(c) => c.step_all(steps),)+ }
            }
        }
    };
}

pub(super) use registry;
