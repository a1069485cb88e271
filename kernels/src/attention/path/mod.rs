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
//! Not specified by the paper, chosen here: there is no activation between convolution and
//! normalisation; the rank is 32 for any number of kv heads; b and b_f start at 0, so that β is near 1,
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
//! Memory: the CPU kernel saves inputs, outputs and a number per query for the backward pass. Training
//! through plain operations, as on GPUs, saves all scores: memory grows with seq_len². `docs/path.md` derives
//! the kernel's scheme and its gradients.

mod cpu;
mod decode;
mod householder;
mod op;
mod reference;
#[cfg(test)]
mod tests;
mod token_blocks;

use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, Tensor};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::op::{Path, path_attention};
use self::reference::{BLOCK, Tokens, Visible};
use super::saved::Channels;
use super::{
    AttentionShape, DocumentStarts, ExecPath, Init, Inputs, Kernel, LowRankActivation,
    ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::OpBackend;
use crate::ops::activation::log_sigmoid;

pub use self::decode::State;

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
    /// Inner channels of the projection to w, 1 to the model's width; default 32, or the width
    /// where that is smaller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
}

impl Config {
    fn rank(&self, width: usize) -> usize {
        self.rank.unwrap_or(width.min(32))
    }
}

/// w `[batch, seq_len, kv_heads · head_dim]`, each head's direction divided by its norm:
/// `[batch · kv_heads, 1, seq_len, head_dim]`.
fn directions<B: OpBackend>(shape: &AttentionShape, w: Tensor<B, 3>) -> Tensor<B, 4> {
    let [batch, len, _] = w.dims();
    let w = w.reshape([batch, len, shape.kv_heads, shape.head_dim]).swap_dims(1, 2);
    let length = ((w.clone() * w.clone()).sum_dim(3) + EPS).sqrt();
    (w / length).reshape([batch * shape.kv_heads, 1, len, shape.head_dim])
}

/// The operation's inputs from the layer's.
fn tokens<B: OpBackend>(shape: &AttentionShape, inputs: Inputs<B>) -> Tokens<B> {
    let Inputs { q, k, v, projections, .. } = inputs;
    let [w, beta, gate @ ..] = &projections[..] else { panic!("w and beta are projected") };
    let [batch, _, len, head_dim] = q.dims();
    let rows = batch * shape.kv_heads;
    let log_decay = gate.first().map(|logits| {
        log_sigmoid(logits.clone()).swap_dims(1, 2).reshape([rows, shape.group(), len])
    });
    let beta = sigmoid(beta.clone()) * 2.0;
    Tokens {
        q: (q * shape.scale()).reshape([rows, shape.group(), len, head_dim]),
        k: k.reshape([rows, 1, len, head_dim]),
        v: v.reshape([rows, 1, len, head_dim]),
        w: directions(shape, w.clone()),
        beta: beta.swap_dims(1, 2).reshape([rows, 1, len, 1]),
        log_decay,
    }
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "PaTH and PaTH-FoX (Yang et al., 2025)";

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32];

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        let rank = self.rank(shape.width);
        problems.check(
            (1..=shape.width).contains(&rank),
            format!("{key}.rank"),
            rank,
            format!("1 to the model's width, {}", shape.width),
            "leave it out for its default",
        );
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        let w = ProjectionSpec::new("w", shape.kv_heads * shape.head_dim)
            .low_rank(self.rank(shape.width), LowRankActivation::Identity)
            .conv(TAPS);
        let beta = ProjectionSpec::new("beta", shape.kv_heads).bias(Init::Constant(0.0));
        let gate = ProjectionSpec::new("forget_gate", shape.heads).bias(Init::Constant(0.0));
        [w, beta].into_iter().chain(self.forget_gate.then_some(gate)).collect()
    }

    fn saved_bytes_per_token(
        &self,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
        dtype: DType,
    ) -> f64 {
        let channels = Channels::of(self, shape);
        match path {
            // The directions, before and after their division by the norm, and what gives their gradient.
            ExecPath::Kernel(_) => channels.by_kernel(dtype) + 4.0 * 4.0 * channels.k,
            ExecPath::Reference => channels.by_reference(shape.mean_keys(seq_len)),
        }
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
        let dims = inputs.q.dims();
        let op = Path { window: shape.window, kv_heads: shape.kv_heads };
        path_attention(&op, tokens(shape, inputs), documents, path).reshape(dims)
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
        _path: ExecPath,
    ) -> Tensor<B, 4> {
        let dims = inputs.q.dims();
        let visible = Visible { window: shape.window, documents: None, kv_heads: shape.kv_heads };
        state.extend(&tokens(shape, inputs), &visible).reshape(dims)
    }
}
