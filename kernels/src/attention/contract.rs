//! The contract of an attention kind: [`VariantSpec`] describes it, [`Variant`] runs it.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use longwall_config::Problems;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::dispatch::{ExecPath, Kernel};
use super::probe::{Metric, Probe};
use super::saved::Channels;
use crate::backend::OpBackend;

/// The sizes of one attention layer, and its place among the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Width of the layer's input.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// With a window w, a token attends to itself and the w − 1 tokens before it.
    pub window: Option<usize>,
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Layers of the model, at least 1.
    pub layers: usize,
}

impl AttentionShape {
    /// The shape of a single-layer model without a window.
    pub fn new(width: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        AttentionShape { width, heads, kv_heads, head_dim, window: None, layer: 0, layers: 1 }
    }

    /// The softmax scale, 1/√head_dim.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Mean number of keys a query sees in a causal sequence of `seq_len` tokens.
    pub fn mean_keys(&self, seq_len: usize) -> f64 {
        let (t, w) = (seq_len as f64, self.window.unwrap_or(seq_len).min(seq_len) as f64);
        // The first w queries see 1, 2, … w keys, the rest w.
        (w * (w + 1.0) / 2.0 + (t - w) * w) / t
    }

    /// The layer with one of `parts` equal parts of the heads.
    ///
    /// # Panics
    /// When `parts` does not divide `kv_heads`.
    pub fn part_of_heads(&self, parts: usize) -> Self {
        assert!(self.kv_heads.is_multiple_of(parts), "{parts} parts of {} heads", self.kv_heads);
        AttentionShape { heads: self.heads / parts, kv_heads: self.kv_heads / parts, ..*self }
    }

    /// Tokens that a [`KvCache`](super::cache::KvCache) holds after `seq_len` single steps: those
    /// that left the window are dropped in batches of one window.
    pub fn cached_tokens(&self, seq_len: usize) -> usize {
        self.window.map_or(seq_len, |w| seq_len.min(2 * w))
    }
}

/// The initial values of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// One value everywhere.
    Constant(f32),
    /// These values.
    Values(Vec<f32>),
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// ln a, where a is uniform between `low` and `high`.
    LnUniform {
        /// At least 0.
        low: f32,
        /// Above `low`.
        high: f32,
    },
    /// ln(e^Δ − 1), whose softplus is Δ, where ln Δ is uniform between ln `low` and ln `high`.
    SoftplusLogUniform {
        /// Above 0.
        low: f32,
        /// Above `low`.
        high: f32,
    },
}

impl Init {
    /// The value that `u`, uniform in (0, 1], gives an element.
    ///
    /// # Panics
    /// When the values are constant, listed or normal.
    pub fn quantile(&self, u: f32) -> f32 {
        let between = |low: f32, high: f32| low + (high - low) * u;
        match self {
            Init::LnUniform { low, high } => between(*low, *high).ln(),
            Init::SoftplusLogUniform { low, high } => {
                between(low.ln(), high.ln()).exp().exp_m1().ln()
            }
            other => panic!("{other:?} is not drawn from a uniform variable"),
        }
    }
}

/// An elementwise function between the two matrices of a [`LowRank`] projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowRankActivation {
    /// x
    Identity,
    /// tanh x
    Tanh,
    /// σ(x)
    Sigmoid,
}

/// A low-rank projection, W_b f(W_a x).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRank {
    /// Inner channels.
    pub rank: usize,
    /// f.
    pub activation: LowRankActivation,
}

impl LowRank {
    /// About `channels`, to the nearest multiple of 32, at least 32 and at most `width` (Peng et al.,
    /// "RWKV-7", 2025, table 16).
    pub fn default_rank(channels: f64, width: usize) -> usize {
        (((channels / 32.0).round() as usize).max(1) * 32).min(width)
    }
}

/// A projection of the layer's input that a variant takes beside q, k and v.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectionSpec {
    /// Name, for example `forget_gate`.
    pub name: &'static str,
    /// Output features.
    pub features: usize,
    /// Initial bias; `None` for no bias.
    pub bias: Option<Init>,
    /// Rank and inner activation; `None` for a full matrix.
    pub low_rank: Option<LowRank>,
    /// Taps of a causal depthwise convolution over time after the projection; the last tap
    /// multiplies the current token.
    pub conv: Option<usize>,
    /// In models with token shift: the exponent e of the initial μ, 1 − (c / width)^(e · r) for
    /// channel c, where r falls from 1 to 0 with depth.
    pub shift: f64,
}

impl ProjectionSpec {
    /// A full-rank projection without a bias. Its shift is 0.9, as for RWKV-7's decay and rate.
    pub fn new(name: &'static str, features: usize) -> Self {
        ProjectionSpec { name, features, bias: None, low_rank: None, conv: None, shift: 0.9 }
    }

    /// Adds a bias.
    pub fn bias(self, init: Init) -> Self {
        ProjectionSpec { bias: Some(init), ..self }
    }

    /// Makes the projection low-rank.
    pub fn low_rank(self, rank: usize, activation: LowRankActivation) -> Self {
        ProjectionSpec { low_rank: Some(LowRank { rank, activation }), ..self }
    }

    /// Adds a short convolution of `taps` taps.
    pub fn conv(self, taps: usize) -> Self {
        ProjectionSpec { conv: Some(taps), ..self }
    }

    /// Sets the exponent of the initial token shift.
    pub fn shift(self, shift: f64) -> Self {
        ProjectionSpec { shift, ..self }
    }
}

/// A learned vector of the variant's own.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Name, for example `beta`.
    pub name: &'static str,
    /// Number of elements.
    pub elements: usize,
    /// Initial values.
    pub init: Init,
}

/// The inputs of a variant's operation.
#[derive(Clone, Debug)]
pub struct Inputs<B: OpBackend> {
    /// Queries, `[batch, views · query_heads, seq_len, head_dim]`: all heads of the first view, then
    /// all of the second.
    pub q: Tensor<B, 4>,
    /// Keys, `[batch, views · key_heads, seq_len, head_dim]`, in the same order and of q's type.
    pub k: Tensor<B, 4>,
    /// Values, `[batch, kv_heads, seq_len, value_dim]`, of q's type.
    pub v: Tensor<B, 4>,
    /// The outputs of [`VariantSpec::projections`], `[batch, seq_len, features]` each.
    pub projections: Vec<Tensor<B, 3>>,
    /// The learned vectors of [`VariantSpec::parameters`].
    pub parameters: Vec<Tensor<B, 1>>,
}

impl<B: OpBackend> Inputs<B> {
    /// The inputs with bf16 tensors cast to f32.
    pub(super) fn in_f32(self) -> Self {
        fn f32<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
            if x.dtype() == DType::BF16 { x.cast(FloatDType::F32) } else { x }
        }
        Inputs {
            q: f32(self.q),
            k: f32(self.k),
            v: f32(self.v),
            projections: self.projections.into_iter().map(f32).collect(),
            parameters: self.parameters.into_iter().map(f32).collect(),
        }
    }
}

/// Index in its row of the first token of each position's document, `[batch, seq_len]`; `None`
/// when each row is one document.
pub type DocumentStarts<B> = Option<Tensor<B, 2, Int>>;

/// The state that decoding keeps between calls.
pub trait DecodeState: Clone + std::fmt::Debug {
    /// Elements allocated now in all buffers, for the whole batch.
    fn elements(&self) -> usize;

    /// Reports what the last step measured of itself: a call of several tokens measures nothing.
    fn observe(&self, probe: &mut Probe) {
        let _ = probe;
    }
}

/// The description of an attention kind: its configuration, what it needs from the layer, its cost
/// and its kernels. Every kind's `Config` implements this and [`Variant`].
pub trait VariantSpec:
    Clone + std::fmt::Debug + Default + PartialEq + Serialize + DeserializeOwned
{
    /// Title and source, for tables.
    const SOURCE: &'static str;

    /// The learned vectors that hold a matrix: weight decay applies to them by default, as to projections.
    const MATRICES: &'static [&'static str] = &[];

    /// Whether outputs are made of weighted sums of values, those of [`Variant::weigh_values`].
    const WEIGHS_VALUES: bool = false;

    /// The kernels of the kind's own operation. Every other call runs the reference, in f32.
    const KERNELS: &'static [Kernel] = &[];

    /// Whether `kernel`, one of [`VariantSpec::KERNELS`], serves `batch` sequences of this layer.
    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        let _ = (kernel, shape, batch);
        true
    }

    /// Whether `kernel`, which serves the layer, serves sequences of `seq_len` tokens; `None` for decoding,
    /// whose sequences grow.
    fn serves_length(
        &self,
        kernel: Kernel,
        shape: &AttentionShape,
        seq_len: Option<usize>,
    ) -> bool {
        let _ = (kernel, shape, seq_len);
        true
    }

    /// Records every problem of the configuration for a layer of this shape; `key` is the path of
    /// the variant's table.
    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems);

    /// Whether the operation can be limited to a window.
    fn allows_window(&self) -> bool {
        true
    }

    /// Sets of queries and keys per head: 2 for differential attention, else 1.
    fn views(&self) -> usize {
        1
    }

    /// Channels of a head's values and outputs.
    fn value_dim(&self, shape: &AttentionShape) -> usize {
        shape.head_dim
    }

    /// Heads of the keys, which divide `kv_heads`. With fewer than `kv_heads`, each serves
    /// `kv_heads / key_heads` consecutive heads of values: multi-value attention.
    fn key_heads(&self, shape: &AttentionShape) -> usize {
        shape.kv_heads
    }

    /// Heads of the queries, `heads / kv_heads` for each head of the keys.
    fn query_heads(&self, shape: &AttentionShape) -> usize {
        self.key_heads(shape) * shape.group()
    }

    /// The configuration for one of `parts` equal parts of the layer's heads, which are computed apart as by
    /// [`HeadParts`](super::HeadParts); `None` if outputs of one part depend on another, or on which part it is. By
    /// default the same configuration.
    fn part_of_heads(&self, parts: usize) -> Option<Self> {
        let _ = parts;
        Some(self.clone())
    }

    /// Whether q, k and v pass a short convolution with SiLU even if `model.short_conv` is false.
    fn short_conv(&self) -> bool {
        false
    }

    /// Whether all that outputs depend on of the tokens before a row is a state in f32 of
    /// [`VariantSpec::state_elements`], at any length, from which [`Variant::attend_from`] goes on.
    fn carries_state(&self) -> bool {
        false
    }

    /// The projections that the layer computes for this variant beside q, k and v.
    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let _ = shape;
        vec![]
    }

    /// The variant's own learned vectors.
    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let _ = shape;
        vec![]
    }

    /// What [`Variant::observe`] can report with this configuration.
    fn metrics(&self) -> Vec<Metric> {
        vec![]
    }

    /// Whether gates decide how much of the past is retained, as [`Variant::log_retention`] gives it.
    fn has_retention(&self) -> bool {
        false
    }

    /// FLOPs of the operation's forward pass per token (projections apart), averaged over a causal
    /// sequence of `seq_len` tokens. By default those of qᵀk and a·v in each view, a multiply-add
    /// per channel and visible key.
    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        let channels = self.views() * (shape.head_dim + self.value_dim(shape));
        (2 * channels * shape.heads) as f64 * shape.mean_keys(seq_len)
    }

    /// The part of [`VariantSpec::flops_per_token`] that multiplies by the variant's own parameters.
    fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
        let _ = shape;
        0.0
    }

    /// Bytes per token that a training step keeps of the operation, and of what prepares its inputs, between the
    /// forward and the backward pass, if `path` serves sequences of `seq_len` tokens whose q, k and v are of type
    /// `dtype`. An estimate. By default what a kernel of flash attention saves, or what automatic differentiation
    /// keeps of a reference that forms the scores of all visible keys.
    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        match path {
            ExecPath::Kernel(_) => channels.by_kernel(dtype),
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }

    /// Bytes per token that the operation's backward pass needs temporarily, beside its inputs, results and gradients.
    /// An estimate; 0 by default. The arguments are those of [`VariantSpec::saved_bytes_per_token`].
    fn temporary_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let _ = (shape, seq_len, path, dtype);
        0.0
    }

    /// Elements that decoding keeps per sequence after `seq_len` single-token steps. Buffers may be
    /// up to twice as large. By default those of a [`KvCache`](super::cache::KvCache) with the keys
    /// of all views and the values.
    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let channels = self.views() * shape.head_dim + self.value_dim(shape);
        (channels * shape.kv_heads * shape.cached_tokens(seq_len)) as u64
    }

    /// The type of those elements on `path`, for q, k and v of type `dtype`.
    fn state_dtype(&self, path: ExecPath, dtype: DType) -> DType {
        path.dtype(dtype)
    }

    /// Bytes of those elements: by default all have [`state_dtype`](Self::state_dtype).
    fn state_bytes(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> u64 {
        let of_one = self.state_dtype(path, dtype).size() as u64;
        self.state_elements(shape, seq_len).saturating_mul(of_one)
    }
}

/// The execution of an attention kind. Callers use the functions of [`dispatch`](super::dispatch),
/// which choose the [`ExecPath`] and pass it on; implementations do not inspect the device.
pub trait Variant: VariantSpec {
    /// The state that decoding keeps between calls.
    type State<B: OpBackend>: DecodeState;

    /// Causal attention over whole rows: `[batch, heads, seq_len, value_dim]`.
    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4>;

    /// As [`Variant::attend`], for a kind that [carries a state](VariantSpec::carries_state): rows go on from `state`,
    /// `[batch, state_elements]`, 0 before the first token of all, which becomes that after their last tokens. It has
    /// no gradient. Documents that began before their row start at −1; any other start clears the state.
    fn attend_from<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        state: &mut Tensor<B, 2>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let _ = (shape, inputs, documents, state, path);
        unreachable!("{self:?} carries no state")
    }

    /// The state before the first token, for this path. `capacity` is the expected number of tokens:
    /// growing buffers may reserve room for them.
    fn init_state<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> Self::State<B>;

    /// Appends the inputs' tokens (one or more) to the sequences in `state`, which was made for the
    /// same path, and returns their outputs. Serves both prefill and single-token steps.
    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut Self::State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4>;

    /// Reports the [`VariantSpec::metrics`] of [`Variant::attend`] with the same arguments, those
    /// that this path has.
    fn observe<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
        probe: &mut Probe,
    ) {
        let _ = (shape, inputs, documents, path, probe);
    }

    /// Σ_j a_ij v_j of each view, `[batch, views · heads, seq_len, value_dim]`, one view after the other, before norms
    /// and differences of views: linear in v, with [`VariantSpec::WEIGHS_VALUES`]. By default the output.
    fn weigh_values<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        self.attend(shape, inputs, documents, path)
    }

    /// The logarithms of the factors by which gates multiply the past at each token,
    /// `[batch, heads, seq_len, channels]`, with [`VariantSpec::has_retention`].
    fn log_retention<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let _ = (shape, inputs);
        None
    }
}
