//! The registry: one line a variant. It gives the configuration's enum, the dispatch and, in
//! tests, the conformance suite; no other `match` on the variant exists.
//!
//! The macro is expanded in the parent module, which declares the variants' modules.

macro_rules! registry {
    ($($(#[$doc:meta])* $name:ident = $kind:literal in $module:ident;)+) => {
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

        impl<B: OpBackend> DecodeState for AttentionState<B> {
            fn elements(&self) -> usize {
                match self { $(Self::$name(state) => state.elements(),)+ }
            }

            fn reserve(&mut self, tokens: usize) {
                match self { $(Self::$name(state) => state.reserve(tokens),)+ }
            }

            fn share_left_out(&self) -> Option<f64> {
                match self { $(Self::$name(state) => state.share_left_out(),)+ }
            }
        }

        impl AttentionConfig {
            /// Every registered kind.
            pub const KINDS: &[KindInfo] = &[
                $(KindInfo {
                    kind: $kind,
                    source: $module::Config::SOURCE,
                    kernels: $module::Config::KERNELS,
                    keys: keys::of::<$module::Config>,
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

            /// As [`Variant::validate`], for the table `model.attention`; rejects a window that
            /// the variant does not allow.
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

            /// As [`Variant::allows_window`].
            pub fn allows_window(&self) -> bool {
                match self { $(Self::$name(c) => c.allows_window(),)+ }
            }

            /// As [`Variant::views`].
            pub fn views(&self) -> usize {
                match self { $(Self::$name(c) => c.views(),)+ }
            }

            /// As [`Variant::value_dim`].
            pub fn value_dim(&self, shape: &AttentionShape) -> usize {
                match self { $(Self::$name(c) => c.value_dim(shape),)+ }
            }

            /// As [`Variant::projections`].
            pub fn projections(&self, shape: &AttentionShape) -> Vec<Projection> {
                match self { $(Self::$name(c) => c.projections(shape),)+ }
            }

            /// As [`Variant::parameters`].
            pub fn parameters(&self, shape: &AttentionShape) -> Vec<Parameter> {
                match self { $(Self::$name(c) => c.parameters(shape),)+ }
            }

            /// As [`Variant::attend`].
            pub fn attend<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
            ) -> Tensor<B, 4> {
                let (inputs, dtype) = self.widened(inputs);
                let o = match self { $(Self::$name(c) => c.attend(shape, inputs, documents),)+ };
                o.cast(dtype)
            }

            /// As [`Variant::KERNELS`].
            fn kernels(&self) -> &'static [&'static str] {
                match self { $(Self::$name(_) => $module::Config::KERNELS,)+ }
            }

            /// Whether the kernel of `device` (as in [`KindInfo::kernels`]) runs for `batch`
            /// sequences with q, k and v of type `dtype`; else the reference runs.
            pub fn runs_kernel(
                &self,
                device: &str,
                shape: &AttentionShape,
                batch: usize,
                dtype: DType,
            ) -> bool {
                // Kernels for CUDA are all made of the softmax core's.
                self.kernels().contains(&device)
                    && (device != "cuda"
                        || softmax::cuda_serves(dtype, batch * shape.heads, shape.head_dim))
            }

            /// The type of what decoding keeps of inputs of type `dtype`: f32 where the variant has
            /// no kernel for CUDA.
            pub fn state_type(&self, dtype: DType) -> DType {
                if self.kernels().contains(&"cuda") { dtype } else { DType::F32 }
            }

            /// As [`Variant::init_state`].
            pub fn init_state<B: OpBackend>(&self, shape: &AttentionShape) -> AttentionState<B> {
                match self { $(Self::$name(c) => AttentionState::$name(c.init_state(shape)),)+ }
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
                let (inputs, dtype) = self.widened(inputs);
                let o = match (self, state) {
                    $((Self::$name(c), AttentionState::$name(s)) => c.extend(shape, inputs, s),)+
                    #[allow(unreachable_patterns)]
                    (config, _) => panic!("the decode state is not of kind {}", config.kind()),
                };
                o.cast(dtype)
            }

            /// The inputs as the variant takes them, in f32 where it has no kernel for CUDA, and the
            /// type that its output is to have.
            fn widened<B: OpBackend>(&self, inputs: Inputs<B>) -> (Inputs<B>, DType) {
                let dtype = inputs.q.dtype();
                let cuda = self.kernels().contains(&"cuda");
                let inputs = if cuda { inputs } else { inputs.widened() };
                (inputs, dtype)
            }

            /// As [`Variant::flops_per_token`].
            pub fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
                match self { $(Self::$name(c) => c.flops_per_token(shape, seq_len),)+ }
            }

            /// As [`Variant::prunes`].
            pub fn prunes(&self) -> bool {
                match self { $(Self::$name(c) => c.prunes(),)+ }
            }

            /// As [`Variant::share_left_out`].
            pub fn share_left_out<B: OpBackend>(
                &self,
                shape: &AttentionShape,
                inputs: Inputs<B>,
                documents: DocumentStarts<B>,
            ) -> Option<f64> {
                match self { $(Self::$name(c) => c.share_left_out(shape, inputs, documents),)+ }
            }

            /// As [`Variant::weight_flops_per_token`].
            pub fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
                match self { $(Self::$name(c) => c.weight_flops_per_token(shape),)+ }
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
