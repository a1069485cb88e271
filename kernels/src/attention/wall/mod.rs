//! Wall attention (Pai et al., "Wall Attention: Diagonal Gates for Softmax Attention", 2026).
//!
//! S_ij = scale · Σ_n exp(P_{i,n} − P_{j,n}) q_{i,n} k_{j,n}, P_t = Σ_{u≤t} g_u (definition in
//! section 2): a softmax whose keys forget channel by channel. Per channel ĝ_t = ln σ(W_g x_t + b)
//! and g_t = −g_max (1 − e^(ĝ_t / g_max)), a soft clamp to (−g_max, 0] (section 3, appendix G).
//!
//! # Parameters
//! `gate` projects the layer's input to gate_heads · outputs logits with an initial bias of 7: gates
//! start open, as plain softmax without positions; outputs is gate_dims, or with `gate_form = "scalar"` one, which
//! all gated channels of a head share. With `gate_source = "key"` there is no projection:
//! g_t is computed from the key (section 3, decode, approach 2) with `key_gate_weight`, W
//! `[kv_heads, head_dim, outputs]`, initially normal with standard deviation 0.02, and `key_gate_bias`,
//! b `[kv_heads, outputs]`, initially 7 (the text has a vector gate, its listing a scalar one).
//!
//! With `sinks = true`, `sinks` `[heads]`, initially 0, are logits in the softmax's denominator.
//!
//! # Forget gate
//! With `forget_gate = true` scores also have the decay of forgetting attention ([`fox`](super::fox), Lin et al.,
//! 2025): S_ij + F_i − F_j, F_t = Σ_{s≤t} ℓ_s, ℓ_t = ln σ(w_fᵀx_t + b_f) per query head. The scale does not apply to
//! it. The projection `forget_gate` has an initial bias of `forget_bias_init`. The two gates differ in what they
//! forget: in a channel that Wall's gate has closed, scores become 0 and weights e⁰; the forget gate takes a key's
//! weight to 0. The paper does not combine them.
//!
//! # Numerics
//! exp(−P_j) is never formed. The factor exp(P_i − P_j) of a query and a key is split at an anchor
//! between them, into two factors of at most 1 (section 3, per-tile anchors; appendix D). Within a
//! sub-block of 16 rows the anchor is the first row, and factors stay below exp(15 · g_max). On CUDA
//! anchors are powers of two at the ends of tiles of 64 tokens, and factors stay below
//! exp(64 · g_max), which bf16 holds ([`LARGEST_G_MAX`]).
//!
//! # Decoding
//! Section 3, approach 1: the cache holds k_j · exp(R_c − P_j) with one anchor R_c per chunk of 128
//! tokens, and a query is rescaled by exp(P_t − R_c) once per chunk. The paper anchors at the
//! chunk's start, where a factor can reach exp(128 · g_max); here the anchor is the chunk's end, so
//! that both factors are at most 1, and the open chunk keeps keys and g as they came. Anchors are
//! stored relative to the newest one, so that P itself, which grows with the sequence, is never stored. A
//! token takes kv_heads · head_dim · (2 + 1/128) elements, in the open chunk kv_heads · head_dim more. With
//! `gate_heads = "query"` each query head needs its own rescaled keys:
//! head_dim · (heads · (1 + 1/128) + kv_heads), and heads · head_dim more in the open chunk. With
//! `gate_source = "key"` a token takes only 2 · kv_heads · head_dim: g is recomputed from all cached keys
//! at every step, which costs 2 · head_dim · outputs FLOPs per cached token and kv head.
//!
//! On CUDA, in bf16, keys are instead relative to the starts of tiles of 64 tokens, up to
//! exp(64 · g_max), which bf16 holds: no key is written twice, there is no open chunk, and one kernel
//! computes a step's keys, queries and running P. With `gate_source = "key"` g is computed once, from the
//! new key. A token takes kv_heads · head_dim · (2 + 1/64) elements for either source, with
//! `gate_heads = "query"` head_dim · (heads · (1 + 1/64) + kv_heads).
//!
//! A forget gate adds heads elements per token, and but for `gate_source = "key"` heads per chunk; on CUDA, for either
//! source, 2 · heads per tile.
//!
//! Appendix E evicts forgotten keys "at no cost". But a forgotten key has score 0, not −∞: it keeps the
//! weight e⁰ in the softmax, and many of them together can outweigh the rest. So `evict_below` keeps their
//! number and the mean of their values, which enter the softmax with score 0. The threshold then bounds
//! the error of a score by evict_below · scale · Σ_n |q_n k_n|. Whole chunks (on CUDA tiles) are evicted when a
//! chunk completes, by each kv head of each sequence on its own: a chunk goes once all gates of its kv head have
//! forgotten it. On CUDA the gates at the starts of tiles, 1/64 of keys and values, stay as long as any head holds the
//! tile; and to append several tokens at once after an eviction, each head gets all tokens back that any head holds,
//! until the call ends. Under a forget gate forgotten keys differ in weight, by head and by query: `evict_below` and
//! `prune` then exclude it.
//!
//! # Pruning
//! With `prune`, the CUDA kernels for whole rows skip key tiles that have decayed below 2⁻¹²⁷ in every
//! channel: their scores are so near 0 that the exponentials are 1 in f32. Their part of the softmax, their
//! number and the sum of their values, is added afterwards. Results change only by the order of sums and by
//! one more rounding of outputs and of dv. On other paths `prune` has no effect.
//!
//! # Choices
//! - With `rope`, q and k are rotated first, then gated. Scores then depend on more than the distance
//!   (the two channels of a pair may decay differently), so positions count from the document's start.
//! - The key gate reads the key as it is cached, rotated with `rope`: in the listing, W_g multiplies the
//!   same tile whose rescaled copy is multiplied with the query.
//! - The key gate belongs to the kv head, whose key it reads; W is not shared between heads.
//! - A scalar gate with gate_dims below head_dim decays the first gate_dims channels.

#[allow(clippy::duplicate_underscore_argument)] // Device code.
mod cuda;
mod decode;
mod forget;
mod gate;
mod past;
mod piece;
mod prune;
mod reference;
#[cfg(test)]
mod tests;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Int, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

pub use self::decode::State;
use super::blocks::repeat_heads;
use super::decay;
use super::flash;
use super::probe::{Metric, PRUNED_FRACTION, Probe};
use super::rotation::{Rotation, Scaling};
use super::saved::Channels;
use super::softmax::sinks;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, ParameterSpec, ProjectionSpec,
    Variant, VariantSpec,
};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The heads that have a gate of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateHeads {
    /// One per key head, shared by the query heads of its group.
    #[default]
    Kv,
    /// One per query head.
    Query,
}

/// The input that gates are computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateSource {
    /// A projection of the layer's input.
    #[default]
    Hidden,
    /// The key, so that decoding caches nothing for gates.
    Key,
}

/// The outputs of a gate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GateForm {
    /// One per gated channel.
    #[default]
    Vector,
    /// One for all gated channels of a head.
    Scalar,
}

/// `[model.attention]` with `kind = "wall"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The heads with a gate of their own: `"kv"` (default) or `"query"`; the paper finds both equally good.
    pub gate_heads: GateHeads,
    /// Number of channels with a gate, the first ones of each head, 1 to head_dim; default head_dim. Fewer
    /// were worse in the paper.
    pub gate_dims: Option<usize>,
    /// Initial bias of the gate's logits, finite; default 7, usually 6 to 8.
    pub bias_init: f32,
    /// Largest decay of one step, above 0 and up to [`LARGEST_G_MAX`]; default 0.86, near the paper's bound of 0.87 for
    /// tiles of 128 × 64 scores in f32 (appendix G); looser is better.
    pub g_max: f32,
    /// Rotate q and k too; default false.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Change of the angles for long contexts; default none.
    pub scaling: Scaling,
    /// What gates are computed from: `"hidden"` (default) or `"key"`.
    pub gate_source: GateSource,
    /// One gate per channel, `"vector"` (default), or one for all gated channels of a head, `"scalar"`. `key_gate` is
    /// its former name.
    #[serde(alias = "key_gate")]
    pub gate_form: GateForm,
    /// Decoding evicts keys that have decayed below this factor in every channel, above 0 and
    /// below 1; default none. Needs a gate in every channel, and no window.
    pub evict_below: Option<f32>,
    /// On CUDA, skip in training and evaluation the tiles of 64 keys that have decayed below 2⁻¹²⁷ in every
    /// channel, which changes results only by rounding; default false. Needs a gate in every channel, and no
    /// window.
    pub prune: bool,
    /// Attention sinks: a learned logit per head in the softmax's denominator; default false.
    pub sinks: bool,
    /// Add a forget gate per query head, as in forgetting attention; default false. Not with `evict_below` or `prune`.
    pub forget_gate: bool,
    /// Only with `forget_gate`: its initial bias, finite; default 0.
    pub forget_bias_init: Option<f32>,
}

/// The largest [`Config::g_max`]: over a tile of 64 tokens, decays stay above 2⁻⁹³. Products of dS and keys then stay
/// far enough above the least f32, 2⁻¹²⁶, for tensor cores to keep their digits: with 1.2, single gradients were off by
/// 2 %.
pub const LARGEST_G_MAX: f32 = 1.0;

const _: () = assert!(cuda::TILE as f32 * LARGEST_G_MAX * std::f32::consts::LOG2_E < 93.0);

impl Default for Config {
    fn default() -> Self {
        Config {
            gate_heads: GateHeads::Kv,
            gate_dims: None,
            bias_init: 7.0,
            g_max: 0.86,
            rope: false,
            theta: 10_000.0,
            scaling: Scaling::None {},
            gate_source: GateSource::Hidden,
            gate_form: GateForm::Vector,
            evict_below: None,
            prune: false,
            sinks: false,
            forget_gate: false,
            forget_bias_init: None,
        }
    }
}

impl Config {
    fn gate_heads_of(&self, shape: &AttentionShape) -> usize {
        match self.gate_heads {
            GateHeads::Kv => shape.kv_heads,
            GateHeads::Query => shape.heads,
        }
    }

    fn gate_dims_of(&self, shape: &AttentionShape) -> usize {
        self.gate_dims.unwrap_or(shape.head_dim)
    }

    /// Outputs of the gate per gate head.
    fn gate_outputs(&self, shape: &AttentionShape) -> usize {
        match self.gate_form {
            GateForm::Vector => self.gate_dims_of(shape),
            GateForm::Scalar => 1,
        }
    }

    /// The sinks, the last of the layer's parameters.
    fn sinks_of<B: OpBackend>(&self, parameters: &[Tensor<B, 1>]) -> Option<Tensor<B, 1>> {
        parameters.last().filter(|_| self.sinks).cloned()
    }

    /// ℓ, `[batch, heads, seq_len]` in f32, with `forget_gate`, whose logits are the last of the layer's projections.
    fn log_forget<B: OpBackend>(&self, projections: &[Tensor<B, 3>]) -> Option<Tensor<B, 3>> {
        projections.last().filter(|_| self.forget_gate).cloned().map(decay::log_decay)
    }

    /// The rotation of q and k with `rope`.
    fn rotation(&self) -> Option<Rotation> {
        let Config { rope, theta, scaling, .. } = *self;
        rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
    }

    /// q or k of whole rows, rotated by positions in documents with `rope`.
    fn rotate_in_documents<B: OpBackend>(
        &self,
        x: Tensor<B, 4>,
        documents: &DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        match self.rotation() {
            Some(rotation) => rotation.apply_in_documents(x, documents),
            None => x,
        }
    }

    /// Records problems with the sizes and constants of the gate.
    fn validate_gate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let dims = self.gate_dims_of(shape);
        problems.check(
            (1..=shape.head_dim).contains(&dims),
            format!("{key}.gate_dims"),
            dims,
            format!("1 to head_dim, {}", shape.head_dim),
            "leave it out to gate every channel",
        );
        problems.check(
            self.bias_init.is_finite(),
            format!("{key}.bias_init"),
            self.bias_init,
            "a finite number",
            "set bias_init = 7.0; 6 to 8 start with open gates",
        );
        problems.check(
            self.g_max > 0.0 && self.g_max <= LARGEST_G_MAX,
            format!("{key}.g_max"),
            self.g_max,
            format!("above 0, up to {LARGEST_G_MAX}"),
            "set g_max = 0.86",
        );
    }

    /// Records problems with the forget gate.
    fn validate_forget_gate(&self, key: &str, problems: &mut Problems) {
        if let Some(bias) = self.forget_bias_init {
            problems.check(
                self.forget_gate,
                format!("{key}.forget_bias_init"),
                bias,
                "only with forget_gate = true",
                "leave forget_bias_init out, or set forget_gate = true",
            );
            problems.check(
                bias.is_finite(),
                format!("{key}.forget_bias_init"),
                bias,
                "a finite number",
                "leave it out to start at 0; above 0, the gates start more open",
            );
        }
        let prune = self.prune.then(|| true.to_string());
        let evict_below = self.evict_below.map(|threshold| threshold.to_string());
        for (name, value) in [("prune", prune), ("evict_below", evict_below)] {
            let Some(value) = value else { continue };
            problems.check(
                !self.forget_gate,
                format!("{key}.{name}"),
                value,
                "only without forget_gate: keys that every channel has forgotten then do not weigh alike",
                format!("leave forget_gate or {name} out"),
            );
        }
    }

    /// Records options that exclude each other.
    fn validate_options(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let from_key = self.gate_source == GateSource::Key;
        problems.check(
            !from_key || self.gate_heads == GateHeads::Kv,
            format!("{key}.gate_heads"),
            "\"query\"",
            "\"kv\" with gate_source = \"key\": the gate belongs to the key's head",
            "leave gate_heads out, or set gate_source = \"hidden\"",
        );
        problems.check(
            !self.prune || self.gate_dims_of(shape) >= shape.head_dim,
            format!("{key}.prune"),
            true,
            "only with a gate in every channel: the others never decay",
            "leave gate_dims or prune out",
        );
        let Some(threshold) = self.evict_below else { return };
        problems.check(
            threshold > 0.0 && threshold < 1.0,
            format!("{key}.evict_below"),
            threshold,
            "above 0 and below 1",
            "leave it out to keep every key, or set evict_below = 1e-6",
        );
        problems.check(
            self.gate_dims_of(shape) >= shape.head_dim,
            format!("{key}.evict_below"),
            threshold,
            "only with a gate in every channel: the others never decay",
            "leave gate_dims or evict_below out",
        );
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "Wall attention (Pai et al., 2026)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CUDA_BF16];

    const MATRICES: &'static [&'static str] = &["key_gate_weight"];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim)
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "rope = false", shape.head_dim, problems);
        }
        self.validate_gate(key, shape, problems);
        self.validate_options(key, shape, problems);
        self.validate_forget_gate(key, problems);
    }

    /// Not with `evict_below` or `prune`: forgotten tokens are summarised in a sum, from which tokens that
    /// leave the window could not be removed.
    fn allows_window(&self) -> bool {
        self.evict_below.is_none() && !self.prune
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let features = self.gate_heads_of(shape) * self.gate_outputs(shape);
        let gate = (self.gate_source == GateSource::Hidden)
            .then(|| ProjectionSpec::new("gate", features).bias(Init::Constant(self.bias_init)));
        let bias = self.forget_bias_init.unwrap_or(0.0);
        let forget_gate = self.forget_gate.then(|| decay::forget_gate(shape, bias));
        gate.into_iter().chain(forget_gate).collect()
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        let sinks = self.sinks.then(|| sinks(shape));
        if self.gate_source == GateSource::Hidden {
            return sinks.into_iter().collect();
        }
        let features = shape.kv_heads * self.gate_outputs(shape);
        let of_gate = [
            ParameterSpec {
                name: "key_gate_weight",
                elements: features * shape.head_dim,
                init: Init::Normal(0.02),
            },
            ParameterSpec {
                name: "key_gate_bias",
                elements: features,
                init: Init::Constant(self.bias_init),
            },
        ];
        of_gate.into_iter().chain(sinks).collect()
    }

    fn metrics(&self) -> Vec<Metric> {
        if self.prune { vec![PRUNED_FRACTION] } else { vec![] }
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        let gates = (self.gate_heads_of(shape) * self.gate_dims_of(shape)) as f64;
        // Of the forget gate, its logits in f32 and ℓ or its sums.
        let forget = if self.forget_gate { 8.0 * shape.heads as f64 } else { 0.0 };
        match path {
            // The gates by head, those from keys as f32 logits before and after the bias; the sums at the ends of
            // tiles are few.
            ExecPath::Kernel(_) => {
                let size = match self.gate_source {
                    GateSource::Hidden => dtype.size() as f64,
                    GateSource::Key => 8.0,
                };
                channels.by_kernel(dtype) + gates * size + forget
            }
            ExecPath::Reference => {
                channels.by_reference(shape.mean_keys(seq_len)) + 8.0 * gates + forget
            }
        }
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        let (d, heads) = (shape.head_dim as f64, shape.heads as f64);
        // qᵀk and p·v, two multiply-adds per channel and key; a query is rescaled once per chunk.
        let keys =
            (4.0 + 1.0 / reference::TRAIN_CHUNK as f64) * d * heads * shape.mean_keys(seq_len);
        // Rescaling at the levels inside a chunk: its 16 rows, then 4 doublings to 256.
        let factors = 6.0 * d * (heads + self.gate_heads_of(shape) as f64);
        // The addition to each score.
        let forget = if self.forget_gate { heads * shape.mean_keys(seq_len) } else { 0.0 };
        keys + factors + forget + self.weight_flops_per_token(shape)
    }

    fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
        match self.gate_source {
            GateSource::Hidden => 0.0,
            GateSource::Key => {
                (2 * shape.head_dim * shape.kv_heads * self.gate_outputs(shape)) as f64
            }
        }
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        decode::state_elements(self, shape, seq_len) as u64
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
        let [q, k] = [q, k].map(|x| self.rotate_in_documents(x, &documents));
        let gate = primitive(self.logits(shape, k.clone(), &projections, &parameters));
        // Each gate has its own keys.
        let gate_heads = self.gate_heads_of(shape);
        let [k, v] = [k, v].map(|x| repeat_heads(x, gate_heads / shape.kv_heads));
        let shape = AttentionShape { kv_heads: gate_heads, ..*shape };
        let op = Wall { config: self.clone(), shape };
        let ints = documents.into_iter().map(Tensor::into_primitive).collect();
        let [q, k, v] = [q, k, v].map(primitive);
        let log_forget = self.log_forget(&projections).map(primitive);
        let sinks = self.sinks_of(&parameters).map(primitive);
        tensor(match (log_forget, sinks) {
            (None, None) => path.run::<B, _, 4>(&op, [q, k, v, gate], ints),
            (Some(one), None) | (None, Some(one)) => {
                path.run::<B, _, 5>(&op, [q, k, v, gate, one], ints)
            }
            (Some(log_forget), Some(sinks)) => {
                path.run::<B, _, 6>(&op, [q, k, v, gate, log_forget, sinks], ints)
            }
        })
    }

    fn observe<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
        probe: &mut Probe,
    ) {
        // The reference prunes nothing.
        let prunes = (Wall { config: self.clone(), shape: *shape }).prunes();
        if path == ExecPath::Reference || !prunes {
            return;
        }
        let Inputs { k, projections, parameters, .. } = inputs.in_f32();
        let k = self.rotate_in_documents(k, &documents);
        let logits = self.logits(shape, k, &projections, &parameters);
        let log_decay = self.log_decay(shape, logits);
        probe.report(PRUNED_FRACTION, prune::pruned_fraction(log_decay, documents));
    }

    fn log_retention<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let Inputs { k, projections, parameters, .. } = inputs.in_f32();
        let k = self.rotate_in_documents(k, &None);
        let logits = self.logits(shape, k, &projections, &parameters);
        Some(self.log_decay(shape, logits))
    }

    fn init_state<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> State<B> {
        State::new(self, shape, path, capacity)
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut State<B>,
        _path: ExecPath,
    ) -> Tensor<B, 4> {
        decode::extend(self, shape, inputs, state)
    }
}

/// The operation on q, k, v and the gate's logits, `[batch, kv_heads, seq_len, gate_dims]`, where each head
/// of k and v has its own gate.
#[derive(Clone, Debug)]
struct Wall {
    config: Config,
    shape: AttentionShape,
}

impl Wall {
    /// Whether tiles of keys may be left out.
    fn prunes(&self) -> bool {
        let every = self.config.gate_dims_of(&self.shape) >= self.shape.head_dim;
        self.config.prune && every && self.shape.window.is_none()
    }
}

/// q, k, v, the gate and, where the configuration has them, the log decays of the forget gate, `[batch, heads,
/// seq_len]`, and the sinks.
impl<const N: usize> Op<N> for Wall {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("q, k, v and the gate");
        let ([q, k, v], gate) = ([(); 3].map(|()| tensor::<B, 4>(next())), next());
        let log_forget = self.config.forget_gate.then(|| tensor::<B, 3>(next()));
        let sinks = inputs.next().map(tensor::<B, 1>);
        let log_decay = self.config.log_decay(&self.shape, tensor(gate));
        let documents = ints.first().map(|x| Tensor::<B, 2, Int>::from_primitive(x.clone()));
        let kvg = [k, v, log_decay];
        primitive(reference::attend(&self.shape, q, kvg, log_forget, sinks, documents.as_ref()))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        _needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, gate, ..] = inputs.each_ref()[..] else { unreachable!("N is 4 to 6") };
        let log_forget = inputs.get(4).filter(|_| self.config.forget_gate);
        let sinks = inputs.last().filter(|_| self.config.sinks);
        cuda::forward(self, [q, k, v, gate], log_forget, sinks, ints.first())
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let cuda::Gradients { q, k, v, gate, log_forget, sinks } =
            cuda::backward(self, saved, ints.first(), &grad);
        let mut all = [q, k, v, gate].into_iter().chain(log_forget).chain(sinks);
        std::array::from_fn(|_| all.next())
    }
}
