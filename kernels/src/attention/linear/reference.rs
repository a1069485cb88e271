//! Chunked gated linear attention in plain tensor operations.
//!
//! A row is one kv head of one sequence: `rows` is batch · kv_heads, `group` the query heads per kv
//! head. A *segment* is a run of consecutive tokens in one matrix product: a chunk for the state, a half
//! at each level inside a chunk.

use burn::tensor::Tensor;

use super::GatedLinear;
use crate::attention::blocks::sums_after;
use crate::attention::chunked::diagonal::Corrections;
use crate::attention::recurrent::step::Token;
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// q `[batch, heads, seq_len, head_dim]`, k `[batch, kv_heads, seq_len, head_dim]`, v `[batch, kv_heads, seq_len,
/// value_dim]` and log decays `[batch, kv_heads, seq_len, 1 or head_dim]`.
#[derive(Clone, Debug)]
pub struct LinearInputs<B: OpBackend> {
    pub q: Tensor<B, 4>,
    pub k: Tensor<B, 4>,
    pub v: Tensor<B, 4>,
    pub log_decay: Tensor<B, 4>,
}

impl<B: OpBackend> LinearInputs<B> {
    /// The shape of their states, `[batch · kv_heads, head_dim, value_dim]`.
    pub fn state_shape(&self) -> [usize; 3] {
        let ([batch, kv_heads, _, d], [.., values]) = (self.k.dims(), self.v.dims());
        [batch * kv_heads, d, values]
    }

    /// By row.
    pub fn by_row(self) -> RowInputs<B> {
        let LinearInputs { q, k, v, log_decay } = self;
        let ([batch, heads, seq_len, d], kv_heads) = (q.dims(), k.dims()[1]);
        let of = |x: Tensor<B, 4>| {
            let channels = x.dims()[3];
            x.reshape([batch * kv_heads, seq_len, channels])
        };
        RowInputs {
            q: q.reshape([batch * kv_heads, heads / kv_heads, seq_len, d]),
            k: of(k),
            v: of(v),
            log_decay: of(log_decay),
        }
    }
}

/// [`LinearInputs`] by row: q `[rows, group, seq_len, head_dim]`, the others `[rows, seq_len, …]`.
pub struct RowInputs<B: OpBackend> {
    pub q: Tensor<B, 4>,
    pub k: Tensor<B, 3>,
    pub v: Tensor<B, 3>,
    pub log_decay: Tensor<B, 3>,
}

/// The segments of `size` tokens at index `side` in each run of `of` segments:
/// `[rows · runs, group · size, channels]` of a tensor `[rows, group, seq_len, channels]`.
fn segments<B: OpBackend>(x: &Tensor<B, 4>, size: usize, of: usize, side: usize) -> Tensor<B, 3> {
    let [rows, group, seq_len, channels] = x.dims();
    let runs = seq_len / (of * size);
    let x = x.clone().reshape([rows, group, runs, of, size * channels]).narrow(3, side, 1);
    x.swap_dims(1, 2).reshape([rows * runs, group * size, channels])
}

/// The inverse of [`segments`], with zeros at the other indices.
fn join_segments<B: OpBackend>(
    x: Tensor<B, 3>,
    [rows, group, size]: [usize; 3],
    of: usize,
    side: usize,
) -> Tensor<B, 4> {
    let channels = x.dims()[2];
    let runs = x.dims()[0] / rows;
    let x = x.reshape([rows, runs, group, 1, size * channels]).swap_dims(1, 2);
    let mut sides = vec![x.zeros_like(); of];
    sides[side] = x;
    Tensor::cat(sides, 3).reshape([rows, group, runs * of * size, channels])
}

/// [`segments`] of a tensor without a group, `[rows, seq_len, channels]`.
pub fn segments_of<B: OpBackend>(
    x: &Tensor<B, 3>,
    size: usize,
    of: usize,
    side: usize,
) -> Tensor<B, 3> {
    segments(&x.clone().unsqueeze_dim::<4>(1), size, of, side)
}

/// `x` `[n, group · size, …]` times `factor` `[n, size, channels]` for each head of a group.
fn scaled<B: OpBackend>(x: Tensor<B, 3>, factor: &Tensor<B, 3>) -> Tensor<B, 3> {
    let [n, size, channels] = factor.dims();
    let [_, rows, width] = x.dims();
    let factor = factor.clone().reshape([n, 1, size, channels]);
    (x.reshape([n, rows / size, size, width]) * factor).reshape([n, rows, width])
}

/// exp of the sums of log decays: from a segment's start to each token, and from each token to the
/// segment's end.
pub fn decays<B: OpBackend>(log_decay: &Tensor<B, 3>) -> [Tensor<B, 3>; 2] {
    [log_decay.clone().cumsum(1).exp(), sums_after(log_decay.clone(), 1).exp()]
}

/// The chunks for the state: q decayed to the chunk's start and k to its end, v, and the decay over the
/// whole chunk, `[chunks, 1, 1 or head_dim]`.
struct DecayedChunks<B: OpBackend> {
    q: Tensor<B, 3>,
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
    chunk_decay: Tensor<B, 3>,
}

impl<B: OpBackend> DecayedChunks<B> {
    fn new(rows: &RowInputs<B>, size: usize) -> Self {
        let log_decay = segments_of(&rows.log_decay, size, 1, 0);
        let [to_query, to_end] = decays(&log_decay);
        DecayedChunks {
            q: scaled(segments(&rows.q, size, 1, 0), &to_query),
            k: scaled(segments_of(&rows.k, size, 1, 0), &to_end),
            v: segments_of(&rows.v, size, 1, 0),
            chunk_decay: log_decay.sum_dim(1).exp(),
        }
    }

    /// S before each chunk, `[chunks, head_dim, value_dim]`, and after the last,
    /// `[rows, head_dim, value_dim]`.
    fn states(&self, rows: usize, start: Option<Tensor<B, 3>>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let new = self.k.clone().transpose().mm(self.v.clone());
        let [chunks, d, values] = new.dims();
        let n = chunks / rows;
        let new = new.reshape([rows, n, d, values]);
        let chunk_decay = self.chunk_decay.clone().reshape([rows as i64, n as i64, -1, 1]);
        let at = |x: &Tensor<B, 4>, chunk| x.clone().narrow(1, chunk, 1);
        let mut state = match start {
            Some(start) => start.reshape([rows, 1, d, values]),
            None => at(&new, 0).zeros_like(),
        };
        let mut before = Vec::with_capacity(n);
        for chunk in 0..n {
            before.push(state.clone());
            state = state * at(&chunk_decay, chunk) + at(&new, chunk);
        }
        let before = Tensor::cat(before, 1).reshape([chunks, d, values]);
        (before, state.reshape([rows, d, values]))
    }
}

/// `x` `[…, tokens, channels]` with zeros up to `seq_len` tokens.
pub fn pad<B: OpBackend, const D: usize>(x: Tensor<B, D>, seq_len: usize) -> Tensor<B, D> {
    let time = D - 2;
    let mut shape = x.dims();
    shape[time] = seq_len - shape[time];
    if shape[time] == 0 {
        return x;
    }
    let zeros = Tensor::zeros(shape, &x.device());
    Tensor::cat(vec![x, zeros], time)
}

impl<B: OpBackend> RowInputs<B> {
    /// Pads to `seq_len` with zero tokens, which neither decay nor enter the state.
    fn padded(self, seq_len: usize) -> Self {
        RowInputs {
            q: pad(self.q, seq_len),
            k: pad(self.k, seq_len),
            v: pad(self.v, seq_len),
            log_decay: pad(self.log_decay, seq_len),
        }
    }
}

impl GatedLinear {
    /// Tokens per chunk for a sequence of `seq_len`, a power of two.
    pub fn size(&self, seq_len: usize) -> usize {
        self.chunk.min(seq_len.next_power_of_two())
    }

    /// y `[batch, heads, seq_len, value_dim]` and the state after the last token, where `start` is the state before the
    /// first; states are `[batch · kv_heads, head_dim, value_dim]`.
    pub fn forward<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        start: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let ([batch, heads, seq_len, _], [.., values]) = (inputs.q.dims(), inputs.v.dims());
        let start = match start {
            Some(state) if seq_len == 1 => {
                let LinearInputs { q, k, v, log_decay } = inputs;
                let token = Token { q, k, v, log_decay, corrections: Corrections::None };
                return token.advance(state);
            }
            start => start,
        };
        let (y, state) = self.forward_rows(inputs.by_row(), start);
        (y.reshape([batch, heads, seq_len, values]), state)
    }

    /// As [`GatedLinear::forward`], by row: y is `[rows, group, seq_len, value_dim]`.
    pub fn forward_rows<B: OpBackend>(
        &self,
        rows: RowInputs<B>,
        start: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let [n, group, seq_len, _] = rows.q.dims();
        let size = self.size(seq_len);
        let rows = rows.padded(seq_len.next_multiple_of(size));
        let chunks = DecayedChunks::new(&rows, size);
        let (before, last) = chunks.states(n, start);
        let mut y = join_segments(chunks.q.mm(before), [n, group, size], 1, 0);

        // Each token's own key, without decay.
        let own = rows.k.clone().unsqueeze_dim::<4>(1);
        let score = (rows.q.clone() * own).sum_dim(3);
        y = y + score * rows.v.clone().unsqueeze_dim::<4>(1);

        let mut half = size / 2;
        while half > 0 {
            let [to_query, _] = decays(&segments_of(&rows.log_decay, half, 2, 1));
            let [_, to_end] = decays(&segments_of(&rows.log_decay, half, 2, 0));
            let q = scaled(segments(&rows.q, half, 2, 1), &to_query);
            let k = scaled(segments_of(&rows.k, half, 2, 0), &to_end);
            let v = segments_of(&rows.v, half, 2, 0);
            // 1 × 1 matrix products would be slow.
            let read = match half {
                1 => (q * k).sum_dim(2) * v,
                _ => q.mm(k.transpose()).mm(v),
            };
            y = y + join_segments(read, [n, group, half], 2, 1);
            half /= 2;
        }
        (y.narrow(2, 0, seq_len), last)
    }
}
