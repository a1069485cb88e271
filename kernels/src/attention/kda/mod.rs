//! Kimi delta attention (Kimi Team, "Kimi Linear: an expressive, efficient attention architecture", 2025, equation 1
//! and §4; flash-linear-attention's layer `KimiDeltaAttention` where the report is silent).
//!
//! [`gated_delta_net`](super::gated_delta_net) with a decay per channel of k. Per kv head, with a state S of
//! head_dim × value_dim:
//!
//! - q and k are divided by their norms, and q multiplied by 1/√head_dim
//! - Δ_t = softplus(W_b W_a x_t + b) per channel of k, ln α_t = −e^A Δ_t, with A learned per head, b per channel
//! - β_t = σ(w·x_t); with `negative_eigenvalues` 2σ(w·x_t)
//! - S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ, from S = 0: the decay comes before the correction
//!
//! and per query head y_t = S_tᵀ q_t, o_t = RMSNorm(y_t) ⊙ σ(W_d W_c x_t + c), where the norm has one learned scale
//! per channel, shared by all heads.
//!
//! A causal convolution with SiLU precedes q, k and v unless `short_conv` is false. There are no positions and no
//! window. `delta_rule` derives the chunked form.
//!
//! | tensor | elements | initial value |
//! |---|---|---|
//! | projection `decay`, W_b W_a x, of rank `rank` | kv_heads · head_dim | as all matrices |
//! | projection `beta`, w·x | kv_heads | as all matrices |
//! | projection `gate`, W_d W_c x + c, of rank `rank` | heads · value_dim | as all matrices; c = 0 |
//! | `decay_rate`, A | kv_heads | ln of a uniform number from 1 to 16 |
//! | `decay_bias`, b | kv_heads · head_dim | 0 |
//! | `norm`, the norm's scale | value_dim | 1 |
//!
//! # Choices
//! - b starts at 0, as in the layer's released versions. Decays then start between e^−0.7 and e^−11 per token: the
//!   matrices must learn to remember.
//! - With grouped heads, which the report does not have, the query heads of a group read one state.
//! - ‖·‖ is √(Σ x² + 10⁻⁶), and the norm adds 10⁻⁵ to the mean square, as in the layer.
//! - Without `short_conv`, the layer still applies SiLU to q, k and v; here they stay linear.
//!
//! Decoding keeps S, kv_heads · head_dim · value_dim elements at any length.

#[cfg(test)]
mod tests;

use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, FloatDType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::chunked::{self, Decays};
use super::delta_rule::{DeltaInputs, DeltaRule};
use super::per_token::channel_decay::decay_of_step_logits;
use super::per_token::gated_norm::gated_norm;
use super::recurrent::{State, decay_of_steps, step_size, validate_chunk, validate_value_dim};
use super::saved::Channels;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, LowRankActivation,
    ParameterSpec, ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::activation::GateActivation;

/// Added to the mean square of an output.
const EPS: f32 = 1e-5;

/// `[model.attention]` with `kind = "kda"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Channels of a head's values, from 1 to 4096; default head_dim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Inner channels of the projections to the decay and to the output gate, 1 to `width`; default the channels
    /// of a head's values, at most `width`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// β in (0, 2) instead of (0, 1); default false.
    pub negative_eigenvalues: bool,
    /// A short convolution with SiLU on q, k and v; default true.
    pub short_conv: bool,
    /// Tokens per chunk, a power of two from 16 to 256; default 64. It changes speed and memory, not
    /// results. Kernels on CUDA have chunks of 64.
    pub chunk: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            value_dim: None,
            rank: None,
            negative_eigenvalues: false,
            short_conv: true,
            chunk: 64,
        }
    }
}

impl Config {
    fn rule(&self) -> DeltaRule {
        DeltaRule { chunk: self.chunk, decays: Decays::PerChannel }
    }

    fn rank(&self, shape: &AttentionShape) -> usize {
        self.rank.unwrap_or(VariantSpec::value_dim(self, shape).min(shape.width))
    }

    /// Applies the delta rule to the inputs by `rule`, then the norm and the gate.
    fn run<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        rule: impl FnOnce(DeltaInputs<B>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let [decay, beta, gate] = &projections[..] else { panic!("decay, beta and gate") };
        let [rate, bias, norm] = &parameters[..] else { panic!("three vectors") };
        let most = if self.negative_eigenvalues { 2.0 } else { 1.0 };
        let beta = sigmoid(beta.clone().cast(FloatDType::F32)) * most;
        let log_decay = decay_of_step_logits(decay.clone(), bias.clone(), rate.clone(), documents);
        let y = rule(DeltaInputs::new(shape, [q, k, v], beta, log_decay));
        gated_norm(y, norm.clone(), gate.clone(), GateActivation::Sigmoid, EPS)
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "Kimi delta attention (Kimi Team, 2025)";

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, _batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => {
                let values = VariantSpec::value_dim(self, shape);
                chunked::serves(kernel.dtype, shape.head_dim, values)
            }
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_value_dim(key, self.value_dim, problems);
        problems.check(
            self.rank.is_none_or(|rank| (1..=shape.width).contains(&rank)),
            format!("{key}.rank"),
            self.rank.unwrap_or_default(),
            format!("a whole number from 1 to model.width, {}", shape.width),
            "leave it out for the default",
        );
        validate_chunk(key, self.chunk, problems);
    }

    fn allows_window(&self) -> bool {
        false
    }

    fn value_dim(&self, shape: &AttentionShape) -> usize {
        self.value_dim.unwrap_or(shape.head_dim)
    }

    fn short_conv(&self) -> bool {
        self.short_conv
    }

    fn carries_state(&self) -> bool {
        true
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let (rank, identity) = (self.rank(shape), LowRankActivation::Identity);
        let outputs = shape.heads * VariantSpec::value_dim(self, shape);
        vec![
            ProjectionSpec::new("decay", shape.kv_heads * shape.head_dim).low_rank(rank, identity),
            ProjectionSpec::new("beta", shape.kv_heads),
            ProjectionSpec::new("gate", outputs)
                .low_rank(rank, identity)
                .bias(Init::Constant(0.0))
                .shift(0.2),
        ]
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let (kv_heads, channels) = (shape.kv_heads, shape.kv_heads * shape.head_dim);
        let rate = Init::LnUniform { low: 1.0, high: 16.0 };
        let norm = VariantSpec::value_dim(self, shape);
        vec![
            ParameterSpec { name: "decay_rate", elements: kv_heads, init: rate },
            ParameterSpec { name: "decay_bias", elements: channels, init: Init::Constant(0.0) },
            ParameterSpec { name: "norm", elements: norm, init: Init::Constant(1.0) },
        ]
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        // y before the norm, and the gate; the decay's logits and logarithms.
        let size = path.saved_size(dtype);
        let around = size * (2.0 * channels.o + channels.k) + 4.0 * channels.k;
        around + self.rule().saved_bytes_per_token(&channels, shape, seq_len, path)
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        self.rule().flops_per_token(shape, VariantSpec::value_dim(self, shape), seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, _seq_len: usize) -> u64 {
        DeltaRule::state_elements(shape, VariantSpec::value_dim(self, shape))
    }

    fn state_dtype(&self, _path: ExecPath, _dtype: DType) -> DType {
        DType::F32
    }
}

impl Variant for Config {
    type State<B: OpBackend> = State<B>;

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        self.run(shape, inputs, documents, |inputs| self.rule().attend(inputs, None, path))
    }

    fn attend_from<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        state: &mut Tensor<B, 2>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let rule = self.rule();
        self.run(shape, inputs, documents, |inputs| rule.attend(inputs, Some(state), path))
    }

    fn log_retention<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let Inputs { projections, parameters, .. } = inputs.in_f32();
        let steps = step_size(projections[0].clone(), parameters[1].clone());
        Some(decay_of_steps(steps, parameters[0].clone()))
    }

    fn init_state<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        _path: ExecPath,
        _capacity: usize,
    ) -> State<B> {
        State::default()
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        self.run(shape, inputs, None, |inputs| self.rule().extend(inputs, state, path))
    }
}
