//! Gated DeltaNet (Yang, Kautz and Hatamizadeh, "Gated delta networks: improving Mamba2 with delta rule", 2025,
//! §3.1 and §3.4; flash-linear-attention's layer `GatedDeltaNet` where the paper is silent).
//!
//! Per kv head, with a state S of head_dim × value_dim (the transpose of the paper's):
//!
//! - q and k are divided by their norms, and q multiplied by 1/√head_dim
//! - Δ_t = softplus(a·x_t + b), ln α_t = −e^A Δ_t, with A and b learned per head, as in Mamba-2
//! - β_t = σ(w·x_t); with `negative_eigenvalues` 2σ(w·x_t), so that the transition's eigenvalue along k_t, 1 − β_t,
//!   lies in (−1, 1) (Grazzi et al., "Unlocking state-tracking in linear RNNs through negative eigenvalues", 2025)
//! - S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, from S = 0
//!
//! and per query head y_t = S_tᵀ q_t, o_t = RMSNorm(y_t) ⊙ SiLU(W_g x_t), where the norm has one learned scale per
//! channel, shared by all heads; without `output_gate`, o_t = RMSNorm(y_t).
//!
//! A causal convolution with SiLU precedes q, k and v unless `short_conv` is false. There are no positions and no
//! window. `delta_rule` derives the chunked form.
//!
//! | tensor | elements | initial value |
//! |---|---|---|
//! | projection `decay`, a·x | kv_heads | as all matrices |
//! | projection `beta`, w·x | kv_heads | as all matrices |
//! | projection `gate`, W_g x | heads · value_dim | as all matrices |
//! | `decay_rate`, A | kv_heads | ln of a uniform number from 0 to 16 |
//! | `decay_bias`, b | kv_heads | such that softplus(b) is log-uniform from 0.001 to 0.1 |
//! | `norm`, the norm's scale | value_dim | 1 |
//!
//! # Choices
//! - Values have 2 · head_dim channels by default, as in the layer's `expand_v = 2`; with queries and keys of
//!   half the width and these values, the layer has about as many weights as softmax attention.
//! - `key_heads` below kv_heads is the layer's grouped value attention (`num_v_heads`): Qwen3-Next has half as many
//!   heads of q and k as of v. Its dual, several query heads per kv head, is not in the paper; they read one state.
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
use super::recurrent::{
    STEP_BIAS, State, decay_of_steps, step_size, validate_chunk, validate_key_heads,
    validate_value_dim,
};
use super::saved::Channels;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, ParameterSpec, ProjectionSpec,
    Variant, VariantSpec,
};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::activation::GateActivation;
use crate::ops::rms_norm::rms_norm;

/// Added to the mean square of an output.
const EPS: f32 = 1e-5;

/// `[model.attention]` with `kind = "gated_delta_net"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Channels of a head's values, from 1 to 4096; default 2 · head_dim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Heads of k, a divisor of `kv_heads`; default `kv_heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_heads: Option<usize>,
    /// β in (0, 2) instead of (0, 1); default false.
    pub negative_eigenvalues: bool,
    /// A short convolution with SiLU on q, k and v; default true.
    pub short_conv: bool,
    /// A gate on the outputs; default true.
    pub output_gate: bool,
    /// Tokens per chunk, a power of two from 16 to 256; default 64. It changes speed and memory, not
    /// results. Kernels on CUDA have chunks of 64.
    pub chunk: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            value_dim: None,
            key_heads: None,
            negative_eigenvalues: false,
            short_conv: true,
            output_gate: true,
            chunk: 64,
        }
    }
}

impl Config {
    fn rule(&self) -> DeltaRule {
        DeltaRule { chunk: self.chunk, decays: Decays::PerToken }
    }

    /// Applies the delta rule to the inputs by `rule`, then the norm and the gate.
    fn run<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        rule: impl FnOnce(DeltaInputs<B>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let [decay, beta, gate @ ..] = &projections[..] else { panic!("decay and beta") };
        let [rate, bias, norm] = &parameters[..] else { panic!("three vectors") };
        let most = if self.negative_eigenvalues { 2.0 } else { 1.0 };
        let beta = sigmoid(beta.clone().cast(FloatDType::F32)) * most;
        let log_decay = decay_of_step_logits(decay.clone(), bias.clone(), rate.clone(), documents);
        let y = rule(DeltaInputs::new(shape, [q, k, v], beta, log_decay));
        let norm = norm.clone();
        match gate {
            [gate] => gated_norm(y, norm, gate.clone(), GateActivation::Silu, EPS),
            _ => rms_norm(y, norm, EPS),
        }
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "Gated DeltaNet (Yang et al., 2025)";

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, _batch: usize) -> bool {
        let values = VariantSpec::value_dim(self, shape);
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => chunked::serves(kernel.dtype, shape.head_dim, values),
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_value_dim(key, self.value_dim, problems);
        validate_key_heads(key, self.key_heads(shape), shape, problems);
        validate_chunk(key, self.chunk, problems);
    }

    fn allows_window(&self) -> bool {
        false
    }

    fn value_dim(&self, shape: &AttentionShape) -> usize {
        self.value_dim.unwrap_or(2 * shape.head_dim)
    }

    fn key_heads(&self, shape: &AttentionShape) -> usize {
        self.key_heads.unwrap_or(shape.kv_heads)
    }

    fn part_of_heads(&self, parts: usize) -> Option<Self> {
        let key_heads = match self.key_heads {
            None | Some(1) => self.key_heads,
            Some(heads) if heads.is_multiple_of(parts) => Some(heads / parts),
            Some(_) => return None,
        };
        Some(Config { key_heads, ..self.clone() })
    }

    fn short_conv(&self) -> bool {
        self.short_conv
    }

    fn carries_state(&self) -> bool {
        true
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let mut specs = vec![
            ProjectionSpec::new("decay", shape.kv_heads),
            ProjectionSpec::new("beta", shape.kv_heads),
        ];
        if self.output_gate {
            let outputs = shape.heads * VariantSpec::value_dim(self, shape);
            specs.push(ProjectionSpec::new("gate", outputs).shift(0.2));
        }
        specs
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let rate = Init::LnUniform { low: 0.0, high: 16.0 };
        let norm = VariantSpec::value_dim(self, shape);
        vec![
            ParameterSpec { name: "decay_rate", elements: shape.kv_heads, init: rate },
            ParameterSpec { name: "decay_bias", elements: shape.kv_heads, init: STEP_BIAS },
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
        // y before the norm, and the gate.
        let outputs = 2.0 * channels.o * path.saved_size(dtype);
        outputs + self.rule().saved_bytes_per_token(&channels, shape, seq_len, path)
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
