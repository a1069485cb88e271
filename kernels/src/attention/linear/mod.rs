//! Gated linear attention (Yang et al., "Gated linear attention transformers with
//! hardware-efficient training", 2024; Katharopoulos et al., "Transformers are RNNs", 2020).
//!
//! S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ, y_t = S_tᵀ q_t / √head_dim (Yang et al., equation 3), and
//! o_t = RMSNorm(y_t) per head with one learned scale per channel (§4.4). The gate α is
//!
//! - `diagonal`: per kv head and key channel, ln α_t = ln σ(W_b W_a x_t + b)/16, of rank 16, initially
//!   b = 0 (§4.4);
//! - `scalar`: per kv head, ln α_t = ln σ(w·x_t + b), as in Mamba-2;
//! - `none`: α = 1 (Katharopoulos et al., equation 18).
//!
//! With `feature_map = "elu"`, φ(x) = elu(x) + 1 of q and k takes their places, and with `normalise` the weights of
//! values sum to 1 (Katharopoulos et al., equations 7 and 9; the authors add 1e-6 to the sum):
//! o_t = Σ_{s≤t} w_ts v_s / (Σ_{s≤t} w_ts + 1e-6), where w_ts = Σ_n φ(q_t)_n φ(k_s)_n α_{s+1,n} ⋯ α_{t,n}. The sum is
//! that of one more channel of values, which is 1.
//!
//! Training runs in chunks (§4.1). Chunks are halved recursively: at each level the queries of a second
//! half read the keys of the first half, both decayed to the boundary between the halves. Every factor is
//! at most 1 and log decays are only added, so any decay is accurate to rounding; §4.3 does this at two
//! levels and with a bounded decay.
//!
//! Parameters: the projection `gate`; `norm`, head_dim elements, initially 1, without `normalise`.
//!
//! # Choices where the sources are silent
//! - The scalar gate starts at the decays of retention (Sun et al., 2023, equation 8): 1 − 2^(−5−n)
//!   for the kv heads, n spread evenly over 0…7.
//! - RMSNorm adds 1e-5 to the mean square.
//!
//! On CUDA kernels serve all gates in bf16 (`docs/chunked.md`).
//!
//! Decoding keeps S, kv_heads · head_dim² elements at any length, with `normalise` kv_heads · head_dim ·
//! (head_dim + 1). A token costs 2·head_dim² FLOPs per query head and 3·head_dim² per kv head.

pub(super) mod cpu;
mod mean;
mod op;
pub(super) mod reference;
#[cfg(test)]
mod tests;

use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::mean::LinearMean;
pub(super) use self::op::GatedLinear;
use self::reference::LinearInputs;
use super::chunked::{self, Decays};
use super::per_token::channel_decay::decay_of_gate;
use super::recurrent::{forget_at_starts, validate_chunk};
use super::rotation::{Rotation, Scaling, rotate};
use super::saved::Channels;
use super::{
    AttentionShape, DecodeState, DocumentStarts, ExecPath, Init, Inputs, Kernel, LowRankActivation,
    ParameterSpec, ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::activation::elu_plus_one;
use crate::ops::rms_norm::rms_norm;

/// Added to the mean square of an output.
const EPS: f32 = 1e-5;

/// τ, the temperature of the diagonal gate (Yang et al., §4.4).
const TEMPERATURE: f32 = 16.0;

/// Inner channels of the diagonal gate's projection (Yang et al., §4.4).
const RANK: usize = 16;

/// Added to the sum of weights, as in the released code of Katharopoulos et al.
const SUM_EPS: f32 = 1e-6;

/// What projects q and k.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeatureMap {
    /// Nothing.
    #[default]
    Identity,
    /// elu(x) + 1, which is positive.
    Elu,
}

/// The gate that decays the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gate {
    /// No decay.
    None,
    /// A learned factor per token and kv head.
    Scalar,
    /// A learned factor per token, kv head and key channel.
    #[default]
    Diagonal,
}

/// `[model.attention]` with `kind = "linear"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `"diagonal"` (default), `"scalar"` or `"none"`.
    pub gate: Gate,
    /// Tokens per chunk, a power of two from 16 to 256; default 64. It changes speed and memory, not
    /// results. Kernels on CUDA have chunks of 64.
    pub chunk: usize,
    /// What projects q and k after their rotation: `"identity"` (default) or `"elu"`, elu(x) + 1.
    pub feature_map: FeatureMap,
    /// Divide by the sum of the weights of values, in place of RMSNorm; default false. Needs a positive
    /// feature map.
    pub normalise: bool,
    /// Rotate q and k; default false.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Change of the angles for long contexts; default none.
    pub scaling: Scaling,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            gate: Gate::Diagonal,
            chunk: 64,
            feature_map: FeatureMap::Identity,
            normalise: false,
            rope: false,
            theta: 10_000.0,
            scaling: Scaling::None {},
        }
    }
}

/// S after the tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    /// `[batch · kv_heads, head_dim, value_dim]`; `None` before the first token.
    sums: Option<Tensor<B, 3>>,
    /// The position of the next token.
    position: usize,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        self.sums.as_ref().map_or(0, |sums| sums.shape().num_elements())
    }
}

impl Config {
    /// The rotation of q and k with `rope`.
    fn rotation(&self) -> Option<Rotation> {
        let Config { rope, theta, scaling, .. } = *self;
        rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
    }

    fn decays(&self) -> Decays {
        if self.gate == Gate::Diagonal { Decays::PerChannel } else { Decays::PerToken }
    }

    fn op(&self) -> GatedLinear {
        GatedLinear { chunk: self.chunk }
    }

    /// The operation with `normalise`.
    fn mean(&self) -> LinearMean {
        LinearMean { linear: self.op() }
    }

    /// ℓ of the gate's logits `[batch, seq_len, kv_heads · channels]`: `[batch, kv_heads, seq_len, channels]`; it
    /// clears the state at the first token of each of the `documents`.
    fn log_decay<B: OpBackend>(
        &self,
        kv_heads: usize,
        logits: Tensor<B, 3>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let temperature = if self.gate == Gate::Diagonal { TEMPERATURE } else { 1.0 };
        decay_of_gate(logits, kv_heads, temperature, documents)
    }

    /// The operation's inputs, from position `first` on.
    fn inputs<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        [q, k, v]: [Tensor<B, 4>; 3],
        logits: Option<Tensor<B, 3>>,
        documents: DocumentStarts<B>,
        first: usize,
    ) -> LinearInputs<B> {
        let [batch, kv_heads, seq_len, _] = v.dims();
        let [mut q, mut k] = rotate(self.rotation(), [q, k], first);
        if self.feature_map == FeatureMap::Elu {
            [q, k] = [q, k].map(elu_plus_one);
        }
        if !self.normalise {
            q = q * shape.scale();
        }
        let log_decay = match logits {
            Some(logits) => self.log_decay(kv_heads, logits, documents),
            None => {
                let options = (&q.device(), DType::F32);
                forget_at_starts(Tensor::zeros([batch, kv_heads, seq_len, 1], options), documents)
            }
        };
        LinearInputs { q, k, v, log_decay }
    }

    /// Channels of values with that for the sum of their weights.
    fn channels(&self, shape: &AttentionShape) -> usize {
        shape.head_dim + usize::from(self.normalise)
    }

    /// The kind's outputs over whole rows of the operation's inputs, as [`GatedLinear::attend`].
    fn outputs<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        parameters: &[Tensor<B, 1>],
        state: Option<&mut Tensor<B, 2>>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        if self.normalise {
            return self.mean().attend(inputs, state, path);
        }
        rms_norm(self.op().attend(inputs, None, state, path), parameters[0].clone(), EPS)
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "gated linear attention (Yang et al., 2024)";

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, _batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => {
                let values = shape.head_dim;
                let values = if self.normalise { mean::channels(values) } else { values };
                chunked::serves(kernel.dtype, shape.head_dim, values)
            }
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        validate_chunk(key, self.chunk, problems);
        problems.check(
            !self.normalise || self.feature_map != FeatureMap::Identity,
            format!("{key}.normalise"),
            self.normalise,
            "false with feature_map = \"identity\", whose weights may be negative",
            "set feature_map = \"elu\"",
        );
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "rope = false", shape.head_dim, problems);
        }
    }

    fn allows_window(&self) -> bool {
        false
    }

    /// Keys that are rotated by their positions in a row mean nothing to the next row's queries.
    fn carries_state(&self) -> bool {
        !self.rope
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let kv_heads = shape.kv_heads;
        match self.gate {
            Gate::None => vec![],
            Gate::Scalar => {
                let last = (kv_heads - 1).max(1) as f32;
                // σ(b) = 1 − 2^(−5−n), so b = ln(2^(5+n) − 1).
                let bias = |head| (2f32.powf(5.0 + 7.0 * head as f32 / last) - 1.0).ln();
                let init = Init::Values((0..kv_heads).map(bias).collect());
                vec![ProjectionSpec::new("gate", kv_heads).bias(init)]
            }
            Gate::Diagonal => {
                let gate = ProjectionSpec::new("gate", kv_heads * shape.head_dim);
                vec![gate.low_rank(RANK, LowRankActivation::Identity).bias(Init::Constant(0.0))]
            }
        }
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let norm =
            ParameterSpec { name: "norm", elements: shape.head_dim, init: Init::Constant(1.0) };
        if self.normalise { vec![] } else { vec![norm] }
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let mut channels = Channels::of(self, shape);
        let mut around = 0.0;
        if self.feature_map != FeatureMap::Identity {
            // What the feature map is applied to.
            around += channels.q + channels.k;
        }
        // On CUDA the kernels save their inputs alone, which are those of the whole operation.
        let recomputes = self.normalise && path == ExecPath::Kernel(DeviceKind::Cuda);
        if self.normalise && !recomputes {
            // The quotient.
            around += channels.o;
            channels.v += shape.kv_heads as f64;
            channels.o += shape.heads as f64;
        }
        let around = around * path.saved_size(dtype);
        if let ExecPath::Kernel(device) = path {
            let decays = self.decays();
            let saved = match recomputes {
                true => 0.0,
                false => self.op().saved_by_kernel(decays, &channels, shape, device),
            };
            // The logits of channels, and their decays in f32.
            let gates = match decays {
                Decays::PerChannel => (dtype.size() as f64 + 4.0) * channels.k,
                Decays::PerToken => 0.0,
            };
            return channels.by_kernel(dtype) + saved + gates + around;
        }
        around + channels.in_f32() + self.op().saved_by_reference(&channels, shape, seq_len)
    }

    /// With `normalise` on CUDA, what the forward pass saves when it runs again, and y, its gradient and parts of them.
    fn temporary_bytes_per_token(
        &self,
        shape: &AttentionShape,
        _seq_len: usize,
        path: ExecPath,
        _dtype: DType,
    ) -> f64 {
        if !self.normalise || path != ExecPath::Kernel(DeviceKind::Cuda) {
            return 0.0;
        }
        let values = mean::channels(shape.head_dim);
        let (of_heads, of_values) =
            ((shape.heads * values) as f64, (shape.kv_heads * values) as f64);
        let mut channels = Channels::of(self, shape);
        channels.v = of_values;
        let saved = self.op().saved_by_kernel(self.decays(), &channels, shape, DeviceKind::Cuda);
        saved + 10.0 * of_heads + 6.0 * of_values
    }

    fn has_retention(&self) -> bool {
        self.gate != Gate::None
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        self.op().flops_per_token(shape, self.channels(shape), seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, _seq_len: usize) -> u64 {
        (shape.kv_heads * shape.head_dim * self.channels(shape)) as u64
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
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let logits = projections.into_iter().next();
        let inputs = self.inputs(shape, [q, k, v], logits, documents, 0);
        self.outputs(inputs, &parameters, None, path)
    }

    fn attend_from<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        state: &mut Tensor<B, 2>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let logits = projections.into_iter().next();
        let inputs = self.inputs(shape, [q, k, v], logits, documents, 0);
        self.outputs(inputs, &parameters, Some(state), path)
    }

    fn log_retention<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let logits = inputs.projections.into_iter().next();
        logits.map(|logits| self.log_decay(shape.kv_heads, logits, None))
    }

    fn init_state<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        _path: ExecPath,
        _capacity: usize,
    ) -> State<B> {
        State { sums: None, position: 0 }
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let tokens = q.dims()[2];
        let logits = projections.into_iter().next();
        let inputs = self.inputs(shape, [q, k, v], logits, None, state.position);
        let before = state.sums.take();
        let (o, sums) = if self.normalise {
            self.mean().extend(inputs, before, path)
        } else {
            let (y, sums) = self.op().extend(inputs, None, before, path);
            (rms_norm(y, parameters[0].clone(), EPS), sums)
        };
        *state = State { sums: Some(sums), position: state.position + tokens };
        o
    }
}
