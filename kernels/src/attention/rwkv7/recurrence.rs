//! The recurrence in plain tensor operations, chunk by chunk.
//!
//! With P_t = Σ_{s≤t} ln w_s from a chunk's start and u_t = S_{t−1} κ̂_tᵀ, unrolling
//! S_t = S_{t−1} diag(w_t) − u_tᵀ b_t + v_tᵀ k̃_t (b = a ⊙ κ̂) over a chunk that starts in S gives
//!
//! - u_t = (κ̂_t ⊙ e^{P_{t−1}}) Sᵀ + Σ_{s<t} (A_ts v_s − B_ts u_s), where
//!   A_ts = Σ_n κ̂_t k̃_s e^{P_{t−1}−P_s} and B_ts the same with b_s
//! - o_t = (r_t ⊙ e^{P_t}) Sᵀ + Σ_{s≤t} (C_ts v_s − D_ts u_s), likewise with r_t and e^{P_t−P_s}
//! - the state after it: S diag(e^{P_end}) + Σ_s (v_sᵀ k̃_s − u_sᵀ b_s) diag(e^{P_end−P_s})
//!
//! so that the rows of u solve (I + B) u = (κ̂ ⊙ e^P) Sᵀ + A v, a unit triangular system per chunk.
//! With its inverse X, u = W Sᵀ + Y v where W = X (κ̂ ⊙ e^P) and Y = X A, and so
//!
//! - o = (r ⊙ e^P − D W) Sᵀ + (C − D Y) v
//! - S' = S diag(e^{P_end}) − (W Sᵀ)ᵀ b̃ + vᵀ (k̃ − Yᵀ b̃), where k̃ and b̃ are decayed to the end
//!
//! Terms that cancel (similar keys that replace each other) are combined before they are multiplied by
//! values and summed. All but the state's recurrence over chunks is computed for many chunks at once.
//!
//! The exponents are split as e^{P_t} · e^{−P_s}, relative to the chunk's start: ln w of a step is at least
//! −e^−½, so the second factor stays below e^{0.61 · CHUNK_SIZE}, well inside f32's range.
use burn::tensor::{Int, Tensor};

use super::masks::{Masks, mask, masked};
use crate::attention::chunked::diagonal::Corrections;
use crate::attention::recurrent::one_by_one;
use crate::attention::recurrent::step::Token;
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// Tokens per chunk, a power of two.
pub(super) const CHUNK_SIZE: usize = 16;

/// Most elements of a tensor `[batch, heads, tokens, head_dim]` that are computed at once, unless a single
/// chunk has more.
const SEGMENT_ELEMENTS: usize = 1 << 19;

/// The inputs of the recurrence.
#[derive(Clone, Debug)]
pub(super) struct WkvInputs<B: OpBackend> {
    /// Receptances r, `[batch, heads, seq_len, head_dim]`.
    pub r: Tensor<B, 4>,
    /// ln w, `[batch, kv_heads, seq_len, head_dim]`, in [−e^−½, 0].
    pub log_decay: Tensor<B, 4>,
    /// κ̂, in the same shape.
    pub removal: Tensor<B, 4>,
    /// a ⊙ κ̂, in the same shape.
    pub correction: Tensor<B, 4>,
    /// k̃, in the same shape.
    pub key: Tensor<B, 4>,
    /// Values, `[batch, kv_heads, seq_len, value_dim]`.
    pub v: Tensor<B, 4>,
}

impl<B: OpBackend> WkvInputs<B> {
    fn map(&self, f: impl Fn(&Tensor<B, 4>) -> Tensor<B, 4>) -> Self {
        WkvInputs {
            r: f(&self.r),
            log_decay: f(&self.log_decay),
            removal: f(&self.removal),
            correction: f(&self.correction),
            key: f(&self.key),
            v: f(&self.v),
        }
    }
}

/// r_t S_tᵀ of every token, `[batch, heads, seq_len, value_dim]`, and Sᵀ after the last,
/// `[batch, kv_heads, head_dim, value_dim]`. `state` is Sᵀ before the first token, 0 if `None`;
/// `documents` `[batch, seq_len]` has each token's document start, −1 if that was before the first token.
pub(super) fn wkv<B: OpBackend>(
    inputs: WkvInputs<B>,
    documents: Option<Tensor<B, 2, Int>>,
    state: Option<Tensor<B, 4>>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let [batch, kv_heads, seq_len, head_dim] = inputs.key.dims();
    let value_dim = inputs.v.dims()[3];
    let state = match state {
        Some(state) if seq_len == 1 && documents.is_none() => return step(inputs, state),
        state => state,
    };
    let mut state = state
        .unwrap_or_else(|| {
            Tensor::zeros([batch, kv_heads, head_dim, value_dim], &inputs.v.device())
        })
        .reshape([batch * kv_heads, head_dim, value_dim]);
    let mut outputs = vec![];
    segments(inputs, documents, 0, &mut state, &mut outputs);
    let o = if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 2) };
    (o, state.reshape([batch, kv_heads, head_dim, value_dim]))
}

/// [`wkv`] of one token.
fn step<B: OpBackend>(inputs: WkvInputs<B>, state: Tensor<B, 4>) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let WkvInputs { r: q, log_decay, removal, correction, key: k, v } = inputs;
    let shape = state.dims();
    let [batch, kv_heads, head_dim, value_dim] = shape;
    let corrections = Corrections::Vectors { removal, correction };
    let token = Token { q, k, v, log_decay, corrections };
    let (y, end) = token.advance(state.reshape([batch * kv_heads, head_dim, value_dim]));
    (y, end.reshape(shape))
}

/// Halves the tokens recursively until they fit, and runs the parts in order. (Slicing parts off one by
/// one would make the gradient's cost quadratic: the gradient of a slice is as large as the whole.)
fn segments<B: OpBackend>(
    inputs: WkvInputs<B>,
    documents: Option<Tensor<B, 2, Int>>,
    first: usize,
    state: &mut Tensor<B, 3>,
    outputs: &mut Vec<Tensor<B, 4>>,
) {
    let [batch, heads, tokens, head_dim] = inputs.r.dims();
    if tokens <= CHUNK_SIZE || batch * heads * tokens * head_dim <= SEGMENT_ELEMENTS {
        outputs.push(segment(inputs, documents, first, state));
        return;
    }
    let half = tokens.div_ceil(2).next_multiple_of(CHUNK_SIZE);
    for range in [0..half, half..tokens] {
        let part = inputs.map(|x| x.clone().narrow(2, range.start, range.len()));
        let documents = documents.clone().map(|x| x.narrow(1, range.start, range.len()));
        segments(part, documents, first + range.start, state, outputs);
    }
}

/// Outputs of a segment whose first token is at position `first`; advances the state past it.
fn segment<B: OpBackend>(
    inputs: WkvInputs<B>,
    documents: Option<Tensor<B, 2, Int>>,
    first: usize,
    state: &mut Tensor<B, 3>,
) -> Tensor<B, 4> {
    let [batch, heads, tokens, _] = inputs.r.dims();
    let kv_heads = inputs.key.dims()[1];
    let group = heads / kv_heads;
    let size = CHUNK_SIZE.min(tokens.next_power_of_two());
    let masks = match documents {
        None => Masks::causal(size, group, &inputs.r.device()),
        Some(starts) => Masks::of_documents(starts, first, size, kv_heads, group),
    };
    // The zeros that fill the last chunk neither decay nor change the state.
    let inputs = inputs.map(|x| into_chunks(x, size));
    let WkvInputs { r, log_decay, removal, correction, key, v } = inputs;
    let sums = |keep: fn(usize, usize) -> bool| {
        mask::<B>(size, &log_decay.device(), keep).mm(log_decay.clone())
    };
    let p = sums(|t, s| s <= t);
    let rest = sums(|t, s| s > t).exp();
    let end = p.clone().narrow(2, size - 1, 1);
    let removal = removal * sums(|t, s| s < t).exp();
    let r = scale_groups(group_rows(r, group), p.clone().exp());
    let grow = p.neg().exp();
    let key_in = (key.clone() * grow.clone()).transpose();
    let correction_in = (correction.clone() * grow).transpose();

    let b = masked(removal.clone().mm(correction_in.clone()), &masks.before);
    let a = masked(removal.clone().mm(key_in.clone()), &masks.before);
    let inverse = unit_lower_inverse(b);
    let from_values = inverse.clone().mm(a);
    let from_state = inverse.mm(masks.carry(removal));
    let correction_out = masks.keep(rest.clone() * correction);
    let key_out = masks.keep(rest * key);
    let key_out = key_out - from_values.clone().transpose().mm(correction_out.clone());
    let parts = ChunkUpdates {
        decay: masks.carry_to_end(end.exp()).transpose(),
        from_state: from_state.clone(),
        correction: correction_out,
        added: key_out.transpose().mm(v.clone()),
    };
    let states = scan(parts, state);

    let c = masked(r.clone().mm(key_in), &masks.up_to);
    let d = masked(r.clone().mm(correction_in), &masks.up_to);
    let r = masks.carry_groups(r) - d.clone().mm(from_state);
    let o = r.mm(states) + (c - d.mm(from_values)).mm(v);
    from_chunks(o, group, [batch, heads, tokens])
}

/// `[batch, heads, tokens, channels]` to `[batch · heads, chunks, size, channels]`, zeros at the
/// end.
fn into_chunks<B: OpBackend>(x: &Tensor<B, 4>, size: usize) -> Tensor<B, 4> {
    let [batch, heads, tokens, channels] = x.dims();
    let missing = tokens.next_multiple_of(size) - tokens;
    let x = if missing == 0 {
        x.clone()
    } else {
        let zeros = Tensor::zeros([batch, heads, missing, channels], &x.device());
        Tensor::cat(vec![x.clone(), zeros], 2)
    };
    x.reshape([batch * heads, (tokens + missing) / size, size, channels])
}

/// `[rows · group, chunks, size, channels]` to `[rows, chunks, group · size, channels]`.
fn group_rows<B: OpBackend>(x: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    let [rows, chunks, size, channels] = x.dims();
    if group == 1 {
        return x;
    }
    x.reshape([rows / group, group, chunks, size, channels]).swap_dims(1, 2).reshape([
        rows / group,
        chunks,
        group * size,
        channels,
    ])
}

/// Undoes [`group_rows`] and [`into_chunks`].
fn from_chunks<B: OpBackend>(
    x: Tensor<B, 4>,
    group: usize,
    [batch, heads, tokens]: [usize; 3],
) -> Tensor<B, 4> {
    let [rows, chunks, all, channels] = x.dims();
    x.reshape([rows, chunks, group, all / group, channels])
        .swap_dims(1, 2)
        .reshape([batch, heads, chunks * all / group, channels])
        .narrow(2, 0, tokens)
}

/// Multiplies `[rows, chunks, group · size, channels]` by factors `[.., .., size, .. or 1]`, the
/// same for all of a group.
pub(super) fn scale_groups<B: OpBackend>(x: Tensor<B, 4>, factor: Tensor<B, 4>) -> Tensor<B, 4> {
    let [rows, chunks, all, channels] = x.dims();
    let [_, _, size, width] = factor.dims();
    if all == size {
        return x * factor;
    }
    let x = x.reshape([rows, chunks, all / size, size, channels]);
    (x * factor.reshape([rows, chunks, 1, size, width])).reshape([rows, chunks, all, channels])
}

/// The updates of the state over each chunk, `[rows, chunks, …]`.
struct ChunkUpdates<B: OpBackend> {
    /// The state's decay over the chunk, `[…, head_dim, 1]`.
    decay: Tensor<B, 4>,
    /// W: times the state, the state's part of u, `[…, size, head_dim]`.
    from_state: Tensor<B, 4>,
    /// b̃: its transpose times u is subtracted from the state, `[…, size, head_dim]`.
    correction: Tensor<B, 4>,
    /// The contribution of the chunk's values, `[…, head_dim, value_dim]`.
    added: Tensor<B, 4>,
}

/// Advances the state `[rows, head_dim, value_dim]` over all chunks; returns the state before each,
/// `[rows, chunks, head_dim, value_dim]`.
fn scan<B: OpBackend>(parts: ChunkUpdates<B>, state: &mut Tensor<B, 3>) -> Tensor<B, 4> {
    let ChunkUpdates { decay, from_state, correction, added } = parts;
    let [decay, from_state, correction, added] =
        [decay, from_state, correction, added].map(|x| one_by_one(x).into_iter());
    let mut states = vec![];
    for (((decay, from_state), correction), added) in
        decay.zip(from_state).zip(correction).zip(added)
    {
        let taken = correction.transpose().mm(from_state.mm(state.clone()));
        let next = state.clone() * decay - taken + added;
        states.push(std::mem::replace(state, next));
    }
    Tensor::stack(states, 1)
}

/// (I + L)⁻¹ of strictly lower triangular matrices `[…, …, size, size]`, size a power of two.
///
/// By blocks: where the diagonal blocks of half the size have the inverses X₁ and X₂ and L₂₁ lies
/// below them, the inverse has −X₂ L₂₁ X₁ there. All intermediate values are parts of the result, whereas
/// a power series would cancel terms that grow with binomial coefficients.
fn unit_lower_inverse<B: OpBackend>(lower: Tensor<B, 4>) -> Tensor<B, 4> {
    let size = lower.dims()[3];
    let device = lower.device();
    let mut inverse = Tensor::<B, 2>::eye(size, &device).reshape([1, 1, size, size]);
    let mut half = 1;
    while half < size {
        let below = masked(
            lower.clone(),
            &mask(size, &device, |i, j| i / (2 * half) == j / (2 * half) && i / half > j / half),
        );
        inverse = if half == 1 {
            inverse - below
        } else {
            inverse.clone() - inverse.clone().mm(below).mm(inverse)
        };
        half *= 2;
    }
    inverse
}
