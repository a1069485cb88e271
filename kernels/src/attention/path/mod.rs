//! PaTH, attention with positions by accumulated Householder transforms, and PaTH-FoX (Yang et al.,
//! "PaTH attention", 2025, sections 2.2 and 3).
//!
//! H_t = I − β_t w_t w_tᵀ; S_ij = scale · k_jᵀ (H_{j+1} H_{j+2} ⋯ H_i) q_i + Σ_{s=j+1..i} ℓ_s: the
//! query's own transform is applied to it first, then those before it. The sum is PaTH-FoX's forget gate
//! (`forget_gate = true`); the scale does not apply to it.
//!
//! - w_t, one direction per kv head: a projection of rank `rank`, a causal convolution over 3 tokens,
//!   then w / √(Σ w² + 1e-6).
//! - β_t = 2σ(u·x_t + b) in (0, 2), per kv head.
//! - ℓ_t = ln σ(w_f·x_t + b_f), per query head.
//!
//! Paper and released code differ: the paper's text has no activation between convolution and normalisation, and a
//! projection of rank 32; the released layer applies SiLU there (`w_activation = "silu"`), and with grouped heads
//! projects by one matrix (`rank = "full"`). The defaults are the paper's.
//!
//! Not specified by the paper, chosen here: b and b_f start at 0, so that β is near 1,
//! where H_t removes the direction w_t; the normalisation's 1e-6 keeps w = 0 and its gradient finite.
//! Each direction is normalised over its head's channels. Transforms cross document boundaries, but a
//! query sees no key before its document's start, so none has an effect across it.
//!
//! Numerics: no transform, and no product here, lengthens a vector, so that f32 scores are accurate to
//! rounding at any length. Only one near-reflection repeated at tens of thousands of tokens (one w, β
//! within 1e-6 of 2) accumulates rounding, just as it accumulates the last digit of β.
//!
//! Decoding keeps 2 · kv_heads · head_dim elements per token (+ heads with the forget gate), and
//! kv_heads · head_dim² (+ heads) for the transforms of the newest tokens, up to 63. A step costs as much
//! as plain softmax attention, plus kv_heads · head_dim²/64 multiply-adds per cached token to update the
//! keys (once in 64 tokens), plus up to kv_heads · head_dim² · (head_dim + 63) for the newest transforms
//! and keys, at any length.
//!
//! On CUDA the keys are in parts of 64, 128, 256, … tokens, each of which keeps its transform: an addition of
//! kv_heads · head_dim² for each part, but a key is moved once for each doubling rather than every 64 tokens.
//!
//! Memory: the kernels save inputs, outputs and a number per query for the backward pass. `docs/path.md` derives the
//! kernels' scheme and its gradients.

mod cpu;
mod cuda;
mod decode;
mod householder;
mod op;
mod reference;
#[cfg(test)]
mod tests;
mod token_blocks;

use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, FloatDType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::cuda::PathKvCache;
use self::decode::TensorState;
use self::op::{Path, PathInputs, path_attention};
use self::reference::{BLOCK, Visible};
use super::decay;
use super::flash::capacity;
use super::saved::Channels;
use super::{
    AttentionShape, DecodeState, DocumentStarts, ExecPath, Init, Inputs, Kernel, LowRankActivation,
    ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::{OpBackend, tensor};
use crate::device::DeviceKind;
use crate::ops::activation::silu;
use crate::ops::rms_norm::rms_norm;

/// Added to Σ w² before the root.
const EPS: f32 = 1e-6;

/// Taps of the convolution on w (section 2.2).
const TAPS: usize = 3;

/// `[model.attention]` with `kind = "path"`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// PaTH-FoX: add a forget gate per query head; default false.
    pub forget_gate: bool,
    /// The projection to w: its inner channels, 1 to the model's width, or `"full"` for one matrix; default 32, or
    /// the width where that is smaller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<Rank>,
    /// What w passes through between its convolution and its normalisation; default none.
    pub w_activation: WActivation,
}

/// The rank of a projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a number of channels, or \"full\"")]
pub enum Rank {
    /// A product of two matrices with this many inner channels.
    Channels(usize),
    /// One matrix.
    Full(FullRank),
}

/// The word for one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FullRank {
    /// One matrix.
    Full,
}

/// An elementwise function on w.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WActivation {
    /// w
    #[default]
    None,
    /// w σ(w)
    Silu,
}

impl Config {
    /// Inner channels of the projection to w; none for one matrix.
    fn rank(&self, width: usize) -> Option<usize> {
        match self.rank {
            None => Some(width.min(32)),
            Some(Rank::Channels(channels)) => Some(channels),
            Some(Rank::Full(FullRank::Full)) => None,
        }
    }

    /// The operation's inputs from the layer's.
    fn inputs<B: OpBackend>(&self, shape: &AttentionShape, inputs: Inputs<B>) -> PathInputs<B> {
        let Inputs { q, k, v, projections, .. } = inputs;
        let mut projections = projections.into_iter();
        let mut next = || projections.next().expect("w and beta are projected");
        let (w, beta) = (by_heads(next(), shape.kv_heads), by_heads(next(), shape.kv_heads));
        let w = match self.w_activation {
            WActivation::None => w,
            WActivation::Silu => silu(w),
        };
        let log_decay = projections.next().map(decay::log_decay);
        PathInputs { q, k, v, w: normalised(w), beta: sigmoid(beta) * 2.0, log_decay }
    }
}

/// `[batch, seq_len, heads · channels]` as `[batch, heads, seq_len, channels]` in f32.
fn by_heads<B: OpBackend>(x: Tensor<B, 3>, heads: usize) -> Tensor<B, 4> {
    let [batch, len, features] = x.dims();
    x.cast(FloatDType::F32).reshape([batch, len, heads, features / heads]).swap_dims(1, 2)
}

/// Each head's directions divided by their norms: w / √(w·w + EPS), an RMS norm with the weight 1/√head_dim.
fn normalised<B: OpBackend>(w: Tensor<B, 4>) -> Tensor<B, 4> {
    let channels = w.dims()[3];
    let weight = Tensor::full([channels], 1.0 / (channels as f32).sqrt(), &w.device());
    rms_norm(w, weight, EPS / channels as f32)
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "PaTH and PaTH-FoX (Yang et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => cuda::serves(kernel.dtype, batch, shape.heads, shape.head_dim),
        }
    }

    fn serves_length(
        &self,
        kernel: Kernel,
        shape: &AttentionShape,
        seq_len: Option<usize>,
    ) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => {
                let heads = [shape.heads, shape.kv_heads];
                let most = |len| cuda::most_sequences(heads, shape.head_dim, len);
                seq_len.is_none_or(|len| most(len) > 0)
            }
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let Some(rank) = self.rank(shape.width) else { return };
        problems.check(
            (1..=shape.width).contains(&rank),
            format!("{key}.rank"),
            rank,
            format!("1 to the model's width, {}, or \"full\"", shape.width),
            "leave it out for its default",
        );
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let mut w = ProjectionSpec::new("w", shape.kv_heads * shape.head_dim).conv(TAPS);
        if let Some(rank) = self.rank(shape.width) {
            w = w.low_rank(rank, LowRankActivation::Identity);
        }
        let beta = ProjectionSpec::new("beta", shape.kv_heads).bias(Init::Constant(0.0));
        let gate = self.forget_gate.then(|| decay::forget_gate(shape, 0.0));
        [w, beta].into_iter().chain(gate).collect()
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        // The directions in f32, before and after their normalisation.
        let by_kernel = channels.by_kernel(dtype) + 2.0 * 4.0 * channels.k;
        match path {
            ExecPath::Kernel(DeviceKind::Cpu) => by_kernel,
            ExecPath::Kernel(DeviceKind::Cuda) => {
                let heads = [shape.heads, shape.kv_heads];
                let moved = cuda::saved_bytes(heads, shape.head_dim, seq_len);
                by_kernel + moved as f64 / seq_len as f64
            }
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
    }

    fn has_retention(&self) -> bool {
        self.forget_gate
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        let (d, block) = (shape.head_dim as f64, BLOCK as f64);
        let keys = shape.mean_keys(seq_len);
        // qᵀk and p·v, and the query's transform over each block of keys.
        let attention = shape.heads as f64 * keys * (4.0 * d + 2.0 * d * d / block);
        // Merging the block: three products per query and four per direction, over all lengths of
        // tiles together block · head_dim multiply-adds each; and the block's transform.
        let queries = shape.heads as f64 * 6.0 * block * d;
        let directions = shape.kv_heads as f64 * (8.0 * block * d + 2.0 * d * d);
        let gate = if self.forget_gate { shape.heads as f64 * keys } else { 0.0 };
        attention + queries + directions + gate
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let [closed, open] = decode::held(seq_len, shape.window);
        let gates = if self.forget_gate { shape.heads } else { 0 };
        let per_token = 2 * shape.kv_heads * shape.head_dim + gates;
        let transform = shape.kv_heads * shape.head_dim * shape.head_dim + gates;
        (per_token * (closed + open) + if open > 0 { transform } else { 0 }) as u64
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
        attend(&Path::of(shape), self.inputs(shape, inputs), documents, path)
    }

    fn log_retention<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        let logits = inputs.projections.into_iter().nth(2);
        logits.map(|logits| decay::log_decay(logits).unsqueeze_dim(3))
    }

    fn init_state<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> State<B> {
        match path {
            ExecPath::Kernel(DeviceKind::Cuda) => State::Cuda(None, capacity),
            _ => State::Tensors(TensorState::default()),
        }
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        inputs: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let [batch, heads, len, head_dim] = inputs.q.dims();
        let inputs = self.inputs(shape, inputs);
        let op = Path::of(shape);
        match state {
            State::Tensors(state) => {
                let window = shape.window;
                let visible = Visible { window, documents: None, kv_heads: shape.kv_heads };
                let outputs = state.extend(&inputs.rows(op.scale), &visible);
                outputs.reshape([batch, heads, len, head_dim])
            }
            State::Cuda(Some(cache), _) => {
                tensor(B::from_cuda(cache.extend(&op, &inputs.tokens())))
            }
            State::Cuda(cache, reserved) => {
                let tokens = inputs.clone().tokens();
                let capacity = capacity(op.window, *reserved, len);
                let cache = cache.insert(Box::new(PathKvCache::new(&tokens, capacity)));
                let most = cuda::most_sequences([heads, shape.kv_heads], head_dim, len);
                if len == 1 || most == 0 {
                    return tensor(B::from_cuda(cache.extend(&op, &tokens)));
                }
                cache.fill(&op, &tokens, most);
                attend(&op, inputs, None, path)
            }
        }
    }
}

/// The outputs of whole sequences, `[batch, heads, seq_len, head_dim]`, in as few calls as the path allows.
fn attend<B: OpBackend>(
    op: &Path,
    inputs: PathInputs<B>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    let [batch, heads, len, head_dim] = inputs.q.dims();
    let heads = [heads, inputs.k.dims()[1]];
    let most = match path {
        ExecPath::Kernel(DeviceKind::Cuda) => cuda::most_sequences(heads, head_dim, len),
        _ => batch,
    };
    let outputs = (0..batch).step_by(most).map(|first| {
        let count = most.min(batch - first);
        let documents = documents.clone().map(|x| x.narrow(0, first, count));
        path_attention(op, inputs.narrow(first, count), documents, path)
    });
    one_after_another(outputs.collect(), 0)
}

/// Tensors one after another along a dimension. A single one is not copied.
fn one_after_another<B: OpBackend, const D: usize>(
    mut tensors: Vec<Tensor<B, D>>,
    dim: usize,
) -> Tensor<B, D> {
    if tensors.len() == 1 { tensors.remove(0) } else { Tensor::cat(tensors, dim) }
}

/// The tokens so far.
#[derive(Clone, Debug)]
pub enum State<B: OpBackend> {
    /// In plain tensors.
    Tensors(TensorState<B>),
    /// The cache of the CUDA kernels, from the first token on, and the tokens to reserve room for.
    Cuda(Option<Box<PathKvCache>>, usize),
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match self {
            State::Tensors(state) => state.elements(),
            State::Cuda(cache, _) => cache.as_ref().map_or(0, |cache| cache.elements()),
        }
    }
}
