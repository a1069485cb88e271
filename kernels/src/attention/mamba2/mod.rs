//! Mamba-2's state-space duality layer (Dao and Gu, "Transformers are SSMs", 2024, §2.1, §6 and §7; its released code
//! `Mamba2` where the paper is silent).
//!
//! In the words of attention, q is C, k is B, v is x, and head_dim is the state size N. Per kv head, with a state S
//! of head_dim × value_dim:
//!
//! - Δ_t = softplus(a·x_t + b), ln α_t = −e^A Δ_t, with A and b learned per head
//! - S_t = α_t S_{t−1} + Δ_t k_t v_tᵀ, from S = 0: gated linear attention with the values Δ_t v_t
//!
//! and per query head y_t = S_tᵀ q_t + D v_t with D learned per head, without a softmax scale. All heads of a head of
//! k are normalised together: o_t = RMSNorm(y_t ⊙ SiLU(W_z x_t)), with one learned scale per channel of each head.
//!
//! One head of q and k serves all heads of v by default (§7.2's multi-value attention; `ngroups = 1` in the released
//! code): `key_heads` is the number of groups. A causal convolution with SiLU precedes q, k and v unless `short_conv`
//! is false. There are no positions and no window.
//!
//! | tensor | elements | initial value |
//! |---|---|---|
//! | projection `step`, a·x | kv_heads | as all matrices |
//! | projection `gate`, W_z x | heads · value_dim | as all matrices |
//! | `decay_rate`, A | kv_heads | ln of a uniform number from 1 to 16 |
//! | `step_bias`, b | kv_heads | such that softplus(b) is log-uniform from 0.001 to 0.1 |
//! | `skip`, D | heads | 1 |
//! | `norm`, the norm's scale | heads · value_dim | 1 |
//!
//! # Choices
//! - Values have head_dim channels by default. The paper's model has heads of 64 channels, a state of 128, twice the
//!   width in all heads together, and no MLPs: with those, `heads` · `value_dim` = 2 · width.
//! - The convolution has no bias; the released code has one.
//! - With several query heads per kv head, which the paper does not have, they read one state.
//!
//! `docs/chunked.md` derives the CUDA kernels' chunked form.
//!
//! Decoding keeps S, kv_heads · head_dim · value_dim elements at any length.

#[cfg(test)]
mod tests;

use burn::tensor::{DType, FloatDType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::blocks::{repeat_groups, repeat_heads};
use super::chunked::{self, Decays};
use super::linear::GatedLinear;
use super::linear::reference::LinearInputs;
use super::per_token::channel_decay::decay_of_step_logits;
use super::per_token::gated_skip::gated_skip;
use super::per_token::head_steps::step_size_of_logits;
use super::recurrent::{
    STEP_BIAS, State, by_head, by_token, decay_of_steps, step_size, validate_chunk,
    validate_key_heads, validate_value_dim,
};
use super::saved::Channels;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, ParameterSpec, ProjectionSpec,
    Variant, VariantSpec,
};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::rms_norm::rms_norm;

/// Added to the mean square of an output.
const EPS: f32 = 1e-5;

/// `[model.attention]` with `kind = "mamba2"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Channels of a head's values, from 1 to 4096; default head_dim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Heads of k, a divisor of `kv_heads`; default 1.
    pub key_heads: usize,
    /// A short convolution with SiLU on q, k and v; default true.
    pub short_conv: bool,
    /// Tokens per chunk, a power of two from 16 to 256; default 64. It changes speed and memory, not
    /// results. Kernels on CUDA have chunks of 64.
    pub chunk: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config { value_dim: None, key_heads: 1, short_conv: true, chunk: 64 }
    }
}

impl Config {
    fn linear(&self) -> GatedLinear {
        GatedLinear { chunk: self.chunk }
    }

    /// Applies gated linear attention to the inputs and the weights of values by `linear`, then the skip, the gate and
    /// the norm.
    fn run<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        linear: impl FnOnce(LinearInputs<B>, Tensor<B, 4>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let [step, gate] = &projections[..] else { panic!("step and gate") };
        let [rate, bias, skip, norm] = &parameters[..] else { panic!("four vectors") };
        let [batch, kv_heads, seq_len, values] = v.dims();
        let (heads, group, serves) = (shape.heads, shape.group(), kv_heads / self.key_heads);
        // In f32, so that the two gradients of a step are added before they are rounded.
        let step = step.clone().cast(FloatDType::F32);
        let steps = step_size_of_logits(step.clone(), bias.clone());
        let log_decay = decay_of_step_logits(step, bias.clone(), rate.clone(), documents);
        let (q, k) = (repeat_groups(q, group, serves), repeat_heads(k, serves));
        let y = linear(LinearInputs { q, k, v: v.clone(), log_decay }, steps);
        let y = by_token(gated_skip(y, repeat_heads(v, group), skip.clone(), gate.clone()));
        // The heads that share a head of k are normalised together; each has scales of its own.
        let o = if self.key_heads == 1 {
            rms_norm(y, norm.clone(), EPS)
        } else {
            let width = heads * values / self.key_heads;
            let together = y.reshape([batch, seq_len, self.key_heads, width]);
            let o = rms_norm(together, Tensor::ones([width], &norm.device()), EPS);
            o.reshape([batch, seq_len, heads * values]) * norm.clone().reshape([1, 1, -1])
        };
        by_head(o, heads)
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "Mamba-2's state-space duality (Dao and Gu, 2024)";

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
        validate_key_heads(key, self.key_heads, shape, problems);
        validate_chunk(key, self.chunk, problems);
    }

    fn allows_window(&self) -> bool {
        false
    }

    fn value_dim(&self, shape: &AttentionShape) -> usize {
        self.value_dim.unwrap_or(shape.head_dim)
    }

    fn key_heads(&self, _shape: &AttentionShape) -> usize {
        self.key_heads
    }

    /// The norm needs all heads that share a head of k.
    fn part_of_heads(&self, parts: usize) -> Option<Self> {
        let key_heads = self.key_heads / parts;
        (key_heads * parts == self.key_heads).then(|| Config { key_heads, ..self.clone() })
    }

    fn short_conv(&self) -> bool {
        self.short_conv
    }

    fn carries_state(&self) -> bool {
        true
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let outputs = shape.heads * VariantSpec::value_dim(self, shape);
        vec![
            ProjectionSpec::new("step", shape.kv_heads),
            ProjectionSpec::new("gate", outputs).shift(0.2),
        ]
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        let rate = Init::LnUniform { low: 1.0, high: 16.0 };
        let outputs = heads * VariantSpec::value_dim(self, shape);
        vec![
            ParameterSpec { name: "decay_rate", elements: kv_heads, init: rate },
            ParameterSpec { name: "step_bias", elements: kv_heads, init: STEP_BIAS },
            ParameterSpec { name: "skip", elements: heads, init: Init::Constant(1.0) },
            ParameterSpec { name: "norm", elements: outputs, init: Init::Constant(1.0) },
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
        let keys = ((shape.heads + shape.kv_heads) * shape.head_dim) as f64;
        let saved = match path {
            ExecPath::Kernel(device) => {
                self.linear().saved_by_kernel(Decays::PerToken, &channels, shape, device)
            }
            ExecPath::Reference => self.linear().saved_by_reference(&channels, shape, seq_len),
        };
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            // q and k for every head of v, v for every head and, if heads share one, as it comes, y, the gate and the
            // result; in f32 the norm's input and, where heads are normalised by groups, its result before the scales.
            let shared = if shape.group() > 1 { channels.v } else { 0.0 };
            let elements = keys + shared + 4.0 * channels.o;
            let norms = if self.key_heads == 1 { 1.0 } else { 2.0 };
            return dtype.size() as f64 * elements + 4.0 * norms * channels.o + saved;
        }
        // q and k for every head of v; in f32 v, for Δ or the skip, and y at each step from the skip to the norm.
        let steps = path.saved_size(dtype) * keys + 4.0 * (channels.v + 4.0 * channels.o);
        let inputs = channels.in_f32() / 4.0 * path.saved_size(dtype);
        inputs + steps + saved
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        self.linear().flops_per_token(shape, VariantSpec::value_dim(self, shape), seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, _seq_len: usize) -> u64 {
        (shape.kv_heads * shape.head_dim * VariantSpec::value_dim(self, shape)) as u64
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
        self.run(shape, inputs, documents, |inputs, steps| {
            self.linear().attend(inputs, Some(steps), None, path)
        })
    }

    fn attend_from<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        state: &mut Tensor<B, 2>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        self.run(shape, inputs, documents, |inputs, steps| {
            self.linear().attend(inputs, Some(steps), Some(state), path)
        })
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
        self.run(shape, inputs, None, |inputs, steps| {
            let (y, end) = self.linear().extend(inputs, Some(steps), state.s.take(), path);
            state.s = Some(end);
            y
        })
    }
}
