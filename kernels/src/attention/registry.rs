//! The registry: one line a variant. It gives the configuration's enum, the dispatch and, in
//! tests, the conformance suite; no other `match` on the variant exists.
//!
//! The macro is expanded in the parent module, so that a variant's folder lies there.

macro_rules! registry {
    ($($(#[$doc:meta])* $name:ident = $kind:literal in $module:ident;)+) => {
        $($(#[$doc])* pub mod $module;)+

        /// The `[model.attention]` table: `kind` and that kind's own keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum AttentionConfig {
            $($(#[$doc])* #[serde(rename = $kind)] $name($module::Config),)+
        }

        /// What decoding keeps between calls, of any variant.
        #[derive(Clone, Debug)]
        pub enum AttentionState<B: OpBackend> {
            $($(#[$doc])* $name(<$module::Config as Variant>::State<B>),)+
        }

        impl AttentionConfig {
            /// Every registered kind.
            pub const KINDS: &[KindInfo] = &[
                $(KindInfo { kind: $kind, source: $module::Config::SOURCE },)+
            ];

            /// The value of `kind`.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)+ }
            }

            /// As [`Variant::validate`], for the table `model.attention`.
            pub fn validate(&self, shape: &AttentionShape, problems: &mut Problems) {
                match self { $(Self::$name(c) => c.validate("model.attention", shape, problems),)+ }
            }

            /// As [`Variant::gates`].
            pub fn gates(&self, shape: &AttentionShape) -> Vec<GateSpec> {
                match self { $(Self::$name(c) => c.gates(shape),)+ }
            }

            /// As [`Variant::parameters`].
            pub fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
                match self { $(Self::$name(c) => c.parameters(shape),)+ }
            }

            /// As [`Variant::attend`].
            pub fn attend<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
            ) -> Tensor<B, 4> {
                match self { $(Self::$name(c) => c.attend(shape, inputs, documents),)+ }
            }

            /// As [`Variant::start`].
            pub fn start<B: OpBackend>(&self, shape: &AttentionShape) -> AttentionState<B> {
                match self { $(Self::$name(c) => AttentionState::$name(c.start(shape)),)+ }
            }

            /// As [`Variant::extend`].
            ///
            /// # Panics
            /// When the state is another variant's.
            pub fn extend<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                state: &mut AttentionState<B>,
            ) -> Tensor<B, 4> {
                match (self, state) {
                    $((Self::$name(c), AttentionState::$name(s)) => c.extend(shape, inputs, s),)+
                    #[allow(unreachable_patterns)]
                    (config, _) => panic!("the decode state is not of kind {}", config.kind()),
                }
            }

            /// As [`Variant::flops_per_token`].
            pub fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
                match self { $(Self::$name(c) => c.flops_per_token(shape, seq_len),)+ }
            }

            /// As [`Variant::state_elements`].
            pub fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
                match self { $(Self::$name(c) => c.state_elements(shape, seq_len),)+ }
            }
        }

        #[cfg(test)]
        mod suites {
            $(super::conformance::suite!($module);)+
        }
    };
}

pub(super) use registry;
