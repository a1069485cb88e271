//! Power attention (Gelada et al., "Scaling context requires rethinking attention", 2025, §4,
//! appendix F).
//!
//! a_ij = (scale · q_iᵀk_j)^p · exp(Σ_{s=j+1..i} ℓ_s) with p even (equation 7, with the gate of
//! §2), o_i = Σ_j a_ij v_j / Σ_j a_ij. ℓ_t = ln σ(w·x_t + b) per kv head, initially b = 6.9; q and k
//! are rotated. Two equivalent forms:
//!
//! - attention: every key up to the query's, in log space, p·ln(|s| + ε), with the row maximum
//!   subtracted (F.1);
//! - chunked: (qᵀk)^p = φ(q)ᵀφ(k) with the tiled symmetric power φ (§4.1.1), so that older tokens
//!   are two sums, S = Σ_j decay_j φ(k_j)v_jᵀ and z = Σ_j decay_j φ(k_j) (F.2, F.3), which a query
//!   reads as φ(q)ᵀS and φ(q)ᵀz (F.4). φ has D = C(⌈d/t⌉ + p − 1, p)·t^p channels with tiles of
//!   t = 8 channels for p = 2 and 4 for p = 4: 2,304 and 992,256 for 64 channels.
//!
//! Parameters: only the projection `gate` (kv_heads features, bias 6.9).
//!
//! # Choices where the source is silent
//! - The paper has one gate per head. Here it is one per kv head, so that the heads of a group share
//!   one state; with kv_heads = heads the two agree.
//! - The scale cancels in the ratio, and so does the norm of a query, which is divided out first.
//! - A chunk reads itself *and the chunk before it* key by key, and only older tokens through φ. Sums
//!   through φ cancel where a query is nearly orthogonal to the keys that matter: with strong gates
//!   those are the few most recent ones. Reading these exactly keeps both forms equal up to rounding,
//!   and costs less than the sums themselves. A total below 2^-24 of the state's largest possible total
//!   is replaced by that bound.
//! - ε = 1e-37 does not change scores of 1e-30 and above. A query whose scores are all exactly 0 has no
//!   defined output: it gets 0 in both forms, and no gradient.
//! - A window needs the attention form: a state cannot forget a single token.
//!
//! # Decoding
//! Below `switch_len`, or always with `form = "attention"`: keys, values and log decays,
//! 2·kv_heads·head_dim + kv_heads elements per token. Above: per kv head D·(head_dim + 1) + 1
//! elements in f32 for S, z and their bound, and the tokens of the last one to two chunks; a chunk
//! enters the sums once the next chunk is complete. The size then no longer grows. A token costs
//! 2·D·(head_dim + 1) FLOPs per query head, as many per kv head when its chunk enters the sums, and
//! attention over one to two chunks.
//!
//! # Kernels
//! On the CPU, both forms, in f32. On CUDA in bf16, on tensor cores: the attention form, and the chunked form with
//! p = 2, heads of 32, 64 or 128 channels and chunks of a multiple of 128 tokens (`docs/power.md`); the reference
//! computes it elsewhere. Where the chunked form has kernels, so has decoding from its sums, in f32; else single
//! tokens after `switch_len`, and all decoding with `form = "chunked"`, run the reference. Decoding on CUDA keeps the
//! decay's sums for each query head, and for each kv head S and Σ_j decay_j k_j k_jᵀ instead of z and its bound. A
//! score below 2^-126 has no weight on CUDA, where ε is 0, nor has a sum of far weights below 10^-30; sums of squared
//! scores must stay below 10^38.

mod cpu;
mod cuda;
mod expansion;
mod op;
mod reference;
mod state;
#[cfg(test)]
mod tests;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_flex::FlexTensor;
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::expansion::Expansion;
use self::op::{PowerAttention, power_attention};
use self::reference::PowerInputs;
use self::state::{CudaState, Folding, TensorState};
use super::flash;
use super::recurrent::forget_at_starts;
use super::rotation::{Rotation, Scaling};
use super::saved::Channels;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, ProjectionSpec, Variant,
    VariantSpec,
};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::device::DeviceKind;
use crate::ops::activation::log_sigmoid;

pub use self::state::State;

/// Elements of the largest state per kv head, 1 GiB in f32.
const MOST_ELEMENTS: usize = 1 << 28;

/// The form in which outputs are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The attention form up to `switch_len` tokens and with a window, the chunked form above.
    #[default]
    Auto,
    /// Every query against every key: quadratic cost.
    Attention,
    /// Older tokens through a constant-size state: linear cost.
    Chunked,
}

/// `[model.attention]` with `kind = "power"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The power: 2 (default) or 4.
    pub p: u32,
    /// Decay older tokens with a learned gate; default true.
    pub gate: bool,
    /// Rotate q and k; default true.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Change of the angles for long contexts; default none.
    pub scaling: Scaling,
    /// `"auto"` (default), `"attention"` or `"chunked"`.
    pub form: Form,
    /// Tokens per chunk, 128 to 1,024; CUDA's kernels take multiples of 128. Default: 128 for D below 1,000,
    /// 256 below 5,000, 512 below 20,000, else 1,024. Larger chunks cost more attention inside them, smaller
    /// ones more memory, for a state per chunk.
    pub chunk: Option<usize>,
    /// Longest sequence that `form = "auto"` computes in the attention form, at least 1. Default: 2·D, or
    /// two chunks if that is longer. Forward and backward pass together took as much processor time in
    /// either form near 1,500 tokens for 32 channels, 3,500 for 64 and 15,000 for 128 with p = 2 (D = 640,
    /// 2,304 and 8,704), and near 16,000 for 16 channels with p = 4 (D = 8,960); measured on the CPU at 4,096
    /// to 16,384 tokens, where the attention form's time was taken to grow in proportion to the length. On CUDA
    /// the forms cross near 2,100, 5,700 and 21,000 tokens with p = 2 (`docs/performance.md`).
    pub switch_len: Option<usize>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            p: 2,
            gate: true,
            rope: true,
            theta: 10_000.0,
            scaling: Scaling::None {},
            form: Form::Auto,
            chunk: None,
            switch_len: None,
        }
    }
}

impl Config {
    /// Tokens per chunk.
    fn chunk(&self, shape: &AttentionShape) -> usize {
        self.chunk.unwrap_or(match Expansion::size(self.p, shape.head_dim) {
            0..1_000 => 128,
            1_000..5_000 => 256,
            5_000..20_000 => 512,
            _ => 1024,
        })
    }

    /// Elements per kv head of the sums over older tokens: S, z and their bound. At most `usize::MAX`.
    fn sums_elements(&self, shape: &AttentionShape) -> usize {
        let size = Expansion::size(self.p, shape.head_dim);
        size.saturating_mul(shape.head_dim + 1).saturating_add(1)
    }

    /// Tokens above which the chunked form is used; `None` for never.
    fn chunked_above(&self, shape: &AttentionShape) -> Option<usize> {
        let default = || {
            let size = Expansion::size(self.p, shape.head_dim);
            size.saturating_mul(2).max(2 * self.chunk(shape))
        };
        match self.form {
            _ if shape.window.is_some() => None,
            Form::Attention => None,
            Form::Chunked => Some(0),
            Form::Auto => Some(self.switch_len.unwrap_or_else(default)),
        }
    }

    /// When tokens being decoded leave the cache for the sums; `None` for never.
    fn folding(&self, shape: &AttentionShape) -> Option<Folding> {
        let switch = self.chunked_above(shape)?;
        Some(Folding { chunk: self.chunk(shape), switch })
    }

    /// Records a problem if the state is too large.
    fn validate_state(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        // With the default switch_len, no sequence is long enough to use such a state.
        let uses_sums = self.chunked_above(shape).is_some()
            && (self.form == Form::Chunked || self.switch_len.is_some());
        let state = self.sums_elements(shape);
        problems.check(
            !uses_sums || state <= MOST_ELEMENTS,
            "model.head_dim",
            shape.head_dim,
            format!("a state of up to {MOST_ELEMENTS} elements per kv head, not {state}"),
            format!("set {key}.p = 2, {key}.form = \"attention\", or more heads"),
        );
    }

    /// The operation for sequences of `seq_len` tokens.
    fn op(&self, shape: &AttentionShape, seq_len: usize) -> Power {
        let chunked = self.chunked_above(shape).is_some_and(|switch| seq_len > switch);
        Power {
            p: self.p,
            window: shape.window,
            chunk: chunked.then(|| self.chunk(shape)),
            head_dim: shape.head_dim,
        }
    }

    /// The rotation of q and k with `rope`.
    fn rotation(&self) -> Option<Rotation> {
        let Config { rope, theta, scaling, .. } = *self;
        rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
    }

    /// q or k, rotated as positions `first`, `first` + 1, … with `rope`.
    fn rotate<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        match self.rotation() {
            Some(rotation) => rotation.apply(x, first),
            None => x,
        }
    }

    /// The operation's inputs, from position `first` on.
    fn rows<B: OpBackend>(
        &self,
        Inputs { q, k, v, projections, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
        first: usize,
    ) -> PowerInputs<B> {
        let ([batch, kv_heads, seq_len, _], device) = (k.dims(), k.device());
        let [q, k] = [q, k].map(|x| self.rotate(x, first));
        let log_decay = match projections.into_iter().next() {
            Some(logits) => log_sigmoid(logits).unsqueeze_dim::<4>(3).swap_dims(1, 2),
            None => Tensor::zeros([batch, kv_heads, seq_len, 1], &device),
        };
        PowerInputs::of_heads([q, k, v], forget_at_starts(log_decay, documents))
    }

    /// The inputs of [`power_attention`], from position `first` on.
    fn heads<B: OpBackend>(
        &self,
        Inputs { q, k, v, projections, .. }: Inputs<B>,
        first: usize,
    ) -> ([Tensor<B, 4>; 3], Option<Tensor<B, 3>>) {
        let [q, k] = [q, k].map(|x| self.rotate(x, first));
        let logits = projections.into_iter().next();
        let log_decay = logits.map(|x| log_sigmoid(x.cast(FloatDType::F32)).swap_dims(1, 2));
        ([q, k, v], log_decay)
    }

    /// The attention form as an operation on heads.
    fn attention(&self, shape: &AttentionShape) -> PowerAttention {
        PowerAttention { p: self.p, window: shape.window, chunk: None }
    }

    /// Attention over whole sequences on CUDA.
    fn whole<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let Power { p, window, chunk, .. } = self.op(shape, inputs.q.dims()[2]);
        let (qkv, log_decay) = self.heads(inputs, 0);
        power_attention(&PowerAttention { p, window, chunk }, qkv, log_decay, documents, path)
    }

    /// Whether CUDA has kernels for the chunked form.
    fn serves_chunks(&self, shape: &AttentionShape) -> bool {
        cuda::chunked::serves(self.p, shape.head_dim, self.chunk(shape))
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "power attention (Gelada et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim),
        }
    }

    /// On CUDA, the kernels have the attention form, and for some shapes the chunked one.
    fn serves_length(
        &self,
        kernel: Kernel,
        shape: &AttentionShape,
        seq_len: Option<usize>,
    ) -> bool {
        match (kernel.device, self.chunked_above(shape)) {
            (DeviceKind::Cpu, _) | (_, None) => true,
            (DeviceKind::Cuda, Some(switch)) => {
                // Decoding may begin in the attention form.
                let attention = seq_len.map_or(switch > 0, |seq_len| seq_len <= switch);
                attention || self.serves_chunks(shape)
            }
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        problems.check(
            [2, 4].contains(&self.p),
            format!("{key}.p"),
            self.p,
            "2 or 4",
            "set p = 2; only even powers give positive weights",
        );
        // With an invalid power the size of the state could overflow.
        if [2, 4].contains(&self.p) {
            self.validate_state(key, shape, problems);
        }
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "rope = false", shape.head_dim, problems);
        }
        problems.check(
            self.chunk.is_none_or(|chunk| (128..=1024).contains(&chunk)),
            format!("{key}.chunk"),
            self.chunk.unwrap_or_default(),
            "128 to 1024",
            "leave it out, or set chunk = 256",
        );
        problems.check(
            self.switch_len != Some(0),
            format!("{key}.switch_len"),
            self.switch_len.unwrap_or_default(),
            "at least 1",
            "leave it out, or set form = \"chunked\" to never use the attention form",
        );
    }

    fn allows_window(&self) -> bool {
        self.form != Form::Chunked
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let gate = ProjectionSpec::new("gate", shape.kv_heads).bias(Init::Constant(6.9));
        if self.gate { vec![gate] } else { vec![] }
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        let chunked = self.chunked_above(shape).is_some_and(|switch| seq_len > switch);
        match path {
            ExecPath::Kernel(DeviceKind::Cuda) if chunked => {
                channels.by_kernel(dtype) + cuda::chunked::saved_bytes(shape.heads, shape.kv_heads)
            }
            ExecPath::Kernel(_) => channels.by_kernel(dtype),
            ExecPath::Reference if chunked => {
                // The expanded queries and keys, the scores of a chunk and the one before, and the states.
                let (chunk, heads) =
                    (self.chunk(shape) as f64, (shape.heads + shape.kv_heads) as f64);
                let expanded = Expansion::size(self.p, shape.head_dim) as f64;
                let state = shape.kv_heads as f64 * expanded * (shape.head_dim + 1) as f64 / chunk;
                let scores = channels.scores(3.0, 1.5 * chunk);
                channels.in_f32() + scores + 4.0 * (heads * expanded + 2.0 * state)
            }
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }

    /// The states of chunks or their gradients, and two tensors as large as q.
    fn temporary_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let chunked = self.chunked_above(shape).is_some_and(|switch| seq_len > switch);
        if path != ExecPath::Kernel(DeviceKind::Cuda) || !chunked {
            return 0.0;
        }
        let state = cuda::chunked::state_elements(shape.head_dim) * shape.kv_heads;
        let weighted = 2 * shape.heads * shape.head_dim;
        dtype.size() as f64 * (state as f64 / self.chunk(shape) as f64 + weighted as f64)
    }

    fn has_retention(&self) -> bool {
        self.gate
    }

    /// The source's state FLOPs (§3.2): scores and weighted values of the keys read directly, and updating
    /// and querying the sums. Expansions of q and k are not counted.
    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        let (d, heads) = (shape.head_dim as f64, shape.heads as f64);
        if self.chunked_above(shape).is_none_or(|switch| seq_len <= switch) {
            return 4.0 * d * heads * shape.mean_keys(seq_len);
        }
        // Key by key, a token reads half of its own chunk and the chunk before.
        let (c, t) = (self.chunk(shape) as f64, seq_len as f64);
        let near = if t <= 2.0 * c { (t + 1.0) / 2.0 } else { (3.0 * c + 1.0) / 2.0 };
        let far = (t - 2.0 * c).max(0.0) / t;
        let state = 2.0 * Expansion::size(self.p, shape.head_dim) as f64 * (d + 1.0);
        4.0 * d * heads * near + far * state * (heads + shape.kv_heads as f64)
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let token = 2 * shape.head_dim + 1;
        let elements = match self.folding(shape) {
            None => token * shape.cached_tokens(seq_len),
            Some(folding) => {
                let near = folding.near(seq_len);
                let sums = if near < seq_len { self.sums_elements(shape) } else { 0 };
                (token * near).saturating_add(sums)
            }
        };
        elements.saturating_mul(shape.kv_heads) as u64
    }

    /// The sums are in f32.
    fn state_bytes(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> u64 {
        let all = self.state_elements(shape, seq_len);
        let sums = match self.folding(shape) {
            Some(folding) if folding.near(seq_len) < seq_len => {
                self.sums_elements(shape).saturating_mul(shape.kv_heads) as u64
            }
            _ => 0,
        };
        let near = (all - sums).saturating_mul(self.state_dtype(path, dtype).size() as u64);
        near.saturating_add(sums.saturating_mul(4))
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
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            return self.whole(shape, inputs, documents, path);
        }
        let dims = inputs.q.dims();
        let rows = self.rows(inputs, documents, 0);
        self.op(shape, dims[2]).of_rows(rows, path).reshape(dims)
    }

    fn log_retention<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let (_, log_decay) = self.heads(inputs, 0);
        log_decay.map(|log_decay| log_decay.unsqueeze_dim(3))
    }

    fn init_state<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> State<B> {
        match path {
            ExecPath::Kernel(DeviceKind::Cuda) => State::Cuda(CudaState::new(capacity)),
            _ => State::Tensors(TensorState::new(shape.window)),
        }
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let (dims, first) = (inputs.q.dims(), state.position());
        let folding = self.folding(shape);
        let (inputs, path) = match path {
            ExecPath::Kernel(DeviceKind::Cuda) => {
                let served = folding.filter(|_| self.serves_chunks(shape));
                let whole = folding.is_none_or(|folding| first + dims[2] <= folding.switch);
                if whole || served.is_some() {
                    let (qkv, log_decay) = self.heads(inputs, first);
                    let op = self.attention(shape);
                    return state.on_cuda().extend(&op, served, qkv, log_decay);
                }
                (inputs.in_f32(), ExecPath::Reference)
            }
            _ => (inputs, path),
        };
        let rows = self.rows(inputs, None, first);
        let op = self.op(shape, dims[2]);
        state.as_tensors().extend(&op, rows, folding, path).reshape(dims)
    }
}

/// The operation: inputs q `[rows, group, seq_len, head_dim]` of unit length, k and v
/// `[rows, seq_len, head_dim]`, log decays `[rows, seq_len]`; the output is shaped as q.
#[derive(Clone, Debug)]
struct Power {
    p: u32,
    window: Option<usize>,
    /// Tokens per chunk; `None` for the attention form.
    chunk: Option<usize>,
    head_dim: usize,
}

impl Power {
    /// Attention over whole sequences.
    fn of_rows<B: OpBackend>(
        &self,
        PowerInputs { q, k, v, log_decay }: PowerInputs<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let inputs = [primitive(q), primitive(k), primitive(v), primitive(log_decay)];
        tensor(path.run::<B, _, 4>(self, inputs, vec![]))
    }
}

fn rows<B: OpBackend>([q, k, v, log_decay]: [FloatTensor<B>; 4]) -> PowerInputs<B> {
    PowerInputs { q: tensor(q), k: tensor(k), v: tensor(v), log_decay: tensor(log_decay) }
}

impl Op<4> for Power {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.forward(&rows::<B>(inputs)))
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; 4],
        _ints: &[FlexTensor],
        needs: [bool; 4],
    ) -> Option<Forward<FlexTensor>> {
        Some(self.run(inputs, needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 4],
    ) -> [Option<FlexTensor>; 4] {
        self.gradients(saved, grad).map(Some)
    }
}
