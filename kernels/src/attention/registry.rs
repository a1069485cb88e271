//! The registry: one line per kind. The macro generates the configuration enum, its methods and, in
//! tests, the conformance suites. No other `match` on the kind exists.
//!
//! The macro is expanded in the parent module, which declares the kinds' modules. A line names the
//! kind, its module and the types that its CUDA kernels take, if it has any; each type gets a suite
//! of tests.

macro_rules! registry {
    ($(
        $(#[$doc:meta])* $name:ident = $kind:literal in $module:ident
        $(, kernels for cuda in $($precision:ident)+)?;
    )+) => {
        /// The `[model.attention]` table: `kind` and that kind's own keys.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum AttentionConfig {
            $($(#[$doc])* #[serde(rename = $kind)] $name($module::Config),)+
        }

        /// The state that decoding keeps between calls, of any kind.
        #[derive(Clone, Debug)]
        pub enum AttentionState<B: OpBackend> {
            $($(#[$doc])* $name(dispatch::State<$module::Config, B>),)+
        }

        impl<B: OpBackend> DecodeState for AttentionState<B> {
            fn elements(&self) -> usize {
                match self { $(Self::$name(state) => state.elements(),)+ }
            }

            fn observe(&self, probe: &mut Probe) {
                match self { $(Self::$name(state) => state.observe(probe),)+ }
            }
        }

        impl AttentionConfig {
            /// Every registered kind.
            pub const KINDS: &[KindInfo] = &[
                $(KindInfo {
                    kind: $kind,
                    source: $module::Config::SOURCE,
                    kernels: $module::Config::KERNELS,
                    keys: longwall_config::keys_of::<$module::Config>,
                },)+
            ];

            /// Every registered kind with its default settings, in the order of
            /// [`AttentionConfig::KINDS`].
            pub fn defaults() -> Vec<Self> {
                vec![$(Self::$name(<$module::Config as Default>::default()),)+]
            }

            /// The value of `kind`.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$name(_) => $kind,)+ }
            }

            /// As [`VariantSpec::validate`], for the table `model.attention`; rejects a window that
            /// the kind does not allow.
            pub fn validate(&self, shape: &AttentionShape, problems: &mut Problems) {
                problems.check(
                    shape.window.is_none_or(|w| (1..=MOST_TOKENS).contains(&w)),
                    "model.window",
                    shape.window.unwrap_or_default(),
                    format!("from 1 to {MOST_TOKENS}"),
                    "set a window of at least 1, or leave model.window out",
                );
                problems.check(
                    shape.window.is_none() || self.allows_window(),
                    "model.window",
                    shape.window.unwrap_or_default(),
                    format!("no window with this configuration of kind = \"{}\"", self.kind()),
                    "leave model.window out",
                );
                match self { $(Self::$name(c) => c.validate("model.attention", shape, problems),)+ }
            }

            /// As [`VariantSpec::allows_window`].
            pub fn allows_window(&self) -> bool {
                match self { $(Self::$name(c) => c.allows_window(),)+ }
            }

            /// As [`VariantSpec::views`].
            pub fn views(&self) -> usize {
                match self { $(Self::$name(c) => c.views(),)+ }
            }

            /// As [`VariantSpec::value_dim`].
            pub fn value_dim(&self, shape: &AttentionShape) -> usize {
                match self { $(Self::$name(c) => c.value_dim(shape),)+ }
            }

            /// As [`VariantSpec::key_heads`].
            pub fn key_heads(&self, shape: &AttentionShape) -> usize {
                match self { $(Self::$name(c) => c.key_heads(shape),)+ }
            }

            /// As [`VariantSpec::query_heads`].
            pub fn query_heads(&self, shape: &AttentionShape) -> usize {
                match self { $(Self::$name(c) => c.query_heads(shape),)+ }
            }

            /// As [`HeadParts::of`].
            pub fn head_parts(
                &self,
                shape: &AttentionShape,
                parts: usize,
            ) -> Option<HeadParts<Self>> {
                match self {
                    $(Self::$name(c) => Some(HeadParts::of(c, shape, parts)?.map(Self::$name)),)+
                }
            }

            /// As [`VariantSpec::short_conv`].
            pub fn short_conv(&self) -> bool {
                match self { $(Self::$name(c) => c.short_conv(),)+ }
            }

            /// As [`VariantSpec::carries_state`].
            pub fn carries_state(&self) -> bool {
                match self { $(Self::$name(c) => c.carries_state(),)+ }
            }

            /// As [`VariantSpec::projections`].
            pub fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
                match self { $(Self::$name(c) => c.projections(shape),)+ }
            }

            /// As [`VariantSpec::parameters`].
            pub fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
                match self { $(Self::$name(c) => c.parameters(shape),)+ }
            }

            /// As [`VariantSpec::MATRICES`].
            pub fn matrices(&self) -> &'static [&'static str] {
                match self { $(Self::$name(_) => $module::Config::MATRICES,)+ }
            }

            /// As [`ExecPath::of`].
            pub fn path(
                &self,
                kernel: Kernel,
                shape: &AttentionShape,
                batch: usize,
                seq_len: Option<usize>,
            ) -> ExecPath {
                match self { $(Self::$name(c) => ExecPath::of(c, kernel, shape, batch, seq_len),)+ }
            }

            /// As [`dispatch::attend`].
            pub fn attend<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
            ) -> Tensor<B, 4> {
                match self {
                    $(Self::$name(c) => dispatch::attend(c, shape, inputs, documents),)+
                }
            }

            /// As [`dispatch::attend_from`].
            ///
            /// # Panics
            /// When the kind carries no state, or `state` has another shape.
            pub fn attend_from<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
                state: &mut Tensor<B, 2>,
            ) -> Tensor<B, 4> {
                match self {
                    $(Self::$name(c) => dispatch::attend_from(c, shape, inputs, documents, state),)+
                }
            }

            /// As [`dispatch::observe`].
            pub fn observe<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
                probe: &mut Probe,
            ) {
                match self {
                    $(Self::$name(c) => dispatch::observe(c, shape, inputs, documents, probe),)+
                }
            }

            /// The state before the first token, as [`dispatch::State::new`].
            pub fn init_state<B: OpBackend>(&self, capacity: usize) -> AttentionState<B> {
                match self {
                    $(Self::$name(_) => AttentionState::$name(dispatch::State::new(capacity)),)+
                }
            }

            /// As [`dispatch::extend`].
            ///
            /// # Panics
            /// When the state belongs to another kind or another path.
            pub fn extend<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                state: &mut AttentionState<B>,
            ) -> Tensor<B, 4> {
                match (self, state) {
                    $((Self::$name(c), AttentionState::$name(state)) => {
                        dispatch::extend(c, shape, inputs, state)
                    })+
                    #[allow(unreachable_patterns)]
                    (config, _) => panic!("the decode state is not of kind {}", config.kind()),
                }
            }

            /// As [`VariantSpec::flops_per_token`].
            pub fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
                match self { $(Self::$name(c) => c.flops_per_token(shape, seq_len),)+ }
            }

            /// As [`VariantSpec::metrics`].
            pub fn metrics(&self) -> Vec<Metric> {
                match self { $(Self::$name(c) => c.metrics(),)+ }
            }

            /// What [`AttentionConfig::observe`] can report to a [thorough](crate::attention::probe::Probe::thorough)
            /// probe.
            pub fn thorough_metrics(&self) -> Vec<Metric> {
                match self { $(Self::$name(c) => dispatch::thorough_metrics(c),)+ }
            }

            /// As [`VariantSpec::weight_flops_per_token`].
            pub fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
                match self { $(Self::$name(c) => c.weight_flops_per_token(shape),)+ }
            }

            /// As [`VariantSpec::saved_bytes_per_token`], on the path that serves `batch` sequences: `kernel`
            /// if the kind has it, else the reference.
            pub fn saved_bytes_per_token(
                &self,
                kernel: Kernel,
                shape: &AttentionShape,
                batch: usize,
                seq_len: usize,
            ) -> f64 {
                let path = self.path(kernel, shape, batch, Some(seq_len));
                match self {
                    $(Self::$name(c) => {
                        c.saved_bytes_per_token(shape, seq_len, path, kernel.dtype)
                    })+
                }
            }

            /// As [`VariantSpec::temporary_bytes_per_token`], on the same path.
            pub fn temporary_bytes_per_token(
                &self,
                kernel: Kernel,
                shape: &AttentionShape,
                batch: usize,
                seq_len: usize,
            ) -> f64 {
                let path = self.path(kernel, shape, batch, Some(seq_len));
                match self {
                    $(Self::$name(c) => {
                        c.temporary_bytes_per_token(shape, seq_len, path, kernel.dtype)
                    })+
                }
            }

            /// As [`VariantSpec::state_elements`].
            pub fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
                match self { $(Self::$name(c) => c.state_elements(shape, seq_len),)+ }
            }

            /// As [`VariantSpec::state_bytes`].
            pub fn state_bytes(
                &self,
                shape: &AttentionShape,
                seq_len: usize,
                path: ExecPath,
                dtype: burn::tensor::DType,
            ) -> u64 {
                match self { $(Self::$name(c) => c.state_bytes(shape, seq_len, path, dtype),)+ }
            }
        }

        #[cfg(test)]
        mod suites {
            $(super::conformance::suites!($module $($($precision)+)?);)+
        }
    };
}

pub(super) use registry;
