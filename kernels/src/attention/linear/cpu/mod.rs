//! Gated linear attention on the CPU: one task per row (one kv head of one sequence), with the reference's
//! chunks and recursive halves.

mod backward;
pub mod decays;

use std::ops::Range;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::backward::Grads;
use self::decays::{Decays, product, scale_rows};
use super::GatedLinear;
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};

/// One row's inputs: q `[group, seq_len, head_dim]`, k `[seq_len, head_dim]`, v
/// `[seq_len, value_dim]`, and the log decays.
struct LinearRow<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decays: Decays<'a>,
    sizes: RowSizes,
}

/// Sizes of the inputs.
#[derive(Clone, Copy)]
struct RowSizes {
    rows: usize,
    group: usize,
    seq_len: usize,
    head_dim: usize,
    value_dim: usize,
    /// Log decays per token: one, or one for each channel of k.
    channels: usize,
    chunk: usize,
}

/// The two halves at one level: the keys, and the queries after them, both decayed to the boundary.
struct HalfPair {
    keys: Range<usize>,
    queries: Range<usize>,
}

/// Buffers that a task reuses.
#[derive(Default)]
struct Buffers {
    /// Decay factors of queries and keys, and the decayed queries and keys, `[tokens, head_dim]`.
    q_factors: Vec<f32>,
    k_factors: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    scores: Vec<f32>,
    d_scores: Vec<f32>,
    d_q: Vec<f32>,
    d_k: Vec<f32>,
    /// Gradients of the queries' exponents, summed over the group.
    d_from: Vec<f32>,
}

impl LinearRow<'_> {
    fn chunks(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let RowSizes { chunk, seq_len, .. } = self.sizes;
        (0..seq_len).step_by(chunk).map(move |first| first..(first + chunk).min(seq_len))
    }

    /// The recursive halves of a chunk, at all levels.
    fn pairs(&self, chunk: Range<usize>) -> Vec<HalfPair> {
        let mut pairs = vec![];
        let mut half = self.sizes.chunk / 2;
        while half > 0 {
            for first in chunk.clone().step_by(2 * half) {
                let middle = first + half;
                if middle < chunk.end {
                    let end = (middle + half).min(chunk.end);
                    pairs.push(HalfPair { keys: first..middle, queries: middle..end });
                }
            }
            half /= 2;
        }
        pairs
    }

    fn k_of(&self, tokens: &Range<usize>) -> &[f32] {
        let d = self.sizes.head_dim;
        &self.k[tokens.start * d..tokens.end * d]
    }

    fn q_at(&self, head: usize, tokens: &Range<usize>) -> Range<usize> {
        let first = head * self.sizes.seq_len;
        (first + tokens.start) * self.sizes.head_dim..(first + tokens.end) * self.sizes.head_dim
    }

    fn o_at(&self, head: usize, tokens: &Range<usize>) -> Range<usize> {
        let first = head * self.sizes.seq_len;
        (first + tokens.start) * self.sizes.value_dim..(first + tokens.end) * self.sizes.value_dim
    }

    fn v_at(&self, tokens: &Range<usize>) -> Range<usize> {
        tokens.start * self.sizes.value_dim..tokens.end * self.sizes.value_dim
    }

    fn v_of(&self, tokens: &Range<usize>) -> Mat<'_> {
        let d = self.sizes.value_dim;
        Mat::new(&self.v[self.v_at(tokens)], tokens.len(), d, d)
    }

    /// Writes y, and advances the state `[head_dim, value_dim]` past the row.
    fn forward(&self, y: &mut [f32], state: &mut [f32]) {
        let RowSizes { group, head_dim: d, value_dim: values, .. } = self.sizes;
        let mut buffers = Buffers::default();
        for chunk in self.chunks() {
            self.decays.since_start(&chunk, &mut buffers.q_factors);
            for head in 0..group {
                product(&mut buffers.q, &self.q[self.q_at(head, &chunk)], &buffers.q_factors);
                let y = &mut y[self.o_at(head, &chunk)];
                let q = Mat::new(&buffers.q, chunk.len(), d, d);
                gemm(y, values, 1.0, q, Mat::new(state, d, values, values), 0.0);
                self.add_own(head, &chunk, y);
            }
            for pair in self.pairs(chunk.clone()) {
                self.forward_pair(&pair, &mut buffers, y);
            }
            self.advance(&chunk, state, &mut buffers);
        }
    }

    /// Each token's own key, without decay.
    fn add_own(&self, head: usize, chunk: &Range<usize>, y: &mut [f32]) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let q = self.q[self.q_at(head, chunk)].chunks_exact(d);
        let v = self.v[self.v_at(chunk)].chunks_exact(values);
        let keys = self.k_of(chunk).chunks_exact(d);
        for (((q, k), v), y) in q.zip(keys).zip(v).zip(y.chunks_exact_mut(values)) {
            let score = math::dot(q, k);
            y.iter_mut().zip(v).for_each(|(y, v)| *y += score * v);
        }
    }

    fn forward_pair(&self, pair: &HalfPair, buffers: &mut Buffers, y: &mut [f32]) {
        let RowSizes { group, head_dim: d, value_dim: values, .. } = self.sizes;
        let (n, m) = (pair.queries.len(), pair.keys.len());
        self.decays.since_start(&pair.queries, &mut buffers.q_factors);
        self.decays.until_end(&pair.keys, &mut buffers.k_factors);
        product(&mut buffers.k, self.k_of(&pair.keys), &buffers.k_factors);
        buffers.scores.resize(n * m, 0.0);
        let k = Mat::new(&buffers.k, m, d, d);
        for head in 0..group {
            product(&mut buffers.q, &self.q[self.q_at(head, &pair.queries)], &buffers.q_factors);
            gemm(&mut buffers.scores, m, 1.0, Mat::new(&buffers.q, n, d, d), k.t(), 0.0);
            let y = &mut y[self.o_at(head, &pair.queries)];
            let scores = Mat::new(&buffers.scores, n, m, m);
            gemm(y, values, 1.0, scores, self.v_of(&pair.keys), 1.0);
        }
    }

    /// The state after a chunk.
    fn advance(&self, chunk: &Range<usize>, state: &mut [f32], buffers: &mut Buffers) {
        let RowSizes { head_dim: d, value_dim: values, .. } = self.sizes;
        let chunk_decay = self.decays.until_end(chunk, &mut buffers.k_factors);
        product(&mut buffers.k, self.k_of(chunk), &buffers.k_factors);
        scale_rows(state, &chunk_decay);
        let k = Mat::new(&buffers.k, chunk.len(), d, d);
        gemm(state, values, 1.0, k.t(), self.v_of(chunk), 1.0);
    }
}

impl GatedLinear {
    fn sizes(&self, inputs: &[FlexTensor]) -> RowSizes {
        let [batch, heads, seq_len, head_dim] = dims(&inputs[0])[..] else {
            panic!("q of 4 dimensions")
        };
        let (kv_heads, value_dim, channels) =
            (dims(&inputs[1])[1], dims(&inputs[2])[3], dims(&inputs[3])[3]);
        let (rows, group) = (batch * kv_heads, heads / kv_heads);
        RowSizes { rows, group, seq_len, head_dim, value_dim, channels, chunk: self.size(seq_len) }
    }

    /// y, and the state after the last token; `before` is that before the first, 0 if `None`. States are
    /// `[batch · kv_heads, head_dim, value_dim]`.
    pub fn run(&self, inputs: &[FlexTensor; 4], before: Option<&FlexTensor>) -> [FlexTensor; 2] {
        let inputs = [0, 1, 2, 3].map(|at| contiguous(&inputs[at]));
        let sizes = self.sizes(&inputs);
        let RowSizes { rows, group, seq_len, head_dim, value_dim, .. } = sizes;
        let mut y = buffer(rows * group * seq_len * value_dim);
        let mut states = first_states(before, rows * head_dim * value_dim);
        y.par_chunks_mut(group * seq_len * value_dim)
            .zip(states.par_chunks_mut(head_dim * value_dim))
            .enumerate()
            .for_each(|(row, (y, state))| row_of(&inputs, row, sizes).forward(y, state));
        let [batch, heads, ..] = dims(&inputs[0])[..] else { unreachable!("4 dimensions") };
        let y = from_vec(y, &[batch, heads, seq_len, value_dim]);
        [y, from_vec(states, &[rows, head_dim, value_dim])]
    }

    /// The gradients of the inputs, where `grad` is that of y and `before` as in [`GatedLinear::run`]; without
    /// `own_keys`, that of y_t − (q_t · k_t) v_t, in which queries read only the keys before theirs.
    pub fn gradients(
        &self,
        inputs: &[FlexTensor],
        before: Option<&FlexTensor>,
        grad: &FlexTensor,
        own_keys: bool,
    ) -> [FlexTensor; 4] {
        let inputs = [0, 1, 2, 3].map(|at| contiguous(&inputs[at]));
        let grad = contiguous(grad);
        let sizes = self.sizes(&inputs);
        let mut grads = [0, 1, 2, 3].map(|at| buffer(slice(&inputs[at]).len()));
        let [q, k, v, log_decay] = &mut grads;
        let part = |x: &Vec<f32>| x.len() / sizes.rows;
        let parts = [part(q), part(k), part(v), part(log_decay)];
        let of_state = sizes.head_dim * sizes.value_dim;
        let states = first_states(before, sizes.rows * of_state);
        q.par_chunks_mut(parts[0])
            .zip(k.par_chunks_mut(parts[1]))
            .zip(v.par_chunks_mut(parts[2]))
            .zip(log_decay.par_chunks_mut(parts[3]))
            .zip(states.par_chunks(of_state))
            .enumerate()
            .for_each(|(row, ((((q, k), v), log_decay), state))| {
                let grad = part_of(&grad, row, sizes.rows);
                let grads = &mut Grads { q, k, v, log_decay };
                row_of(&inputs, row, sizes).backward(state, grad, own_keys, grads);
            });
        let mut shapes = inputs.iter().map(dims);
        grads.map(|x| from_vec(x, &shapes.next().expect("a shape for each input")))
    }
}

/// The states before the first tokens of all rows, `elements` in all; 0 without `before`.
pub fn first_states(before: Option<&FlexTensor>, elements: usize) -> Vec<f32> {
    before.map_or_else(|| buffer(elements), |before| slice(&contiguous(before)).to_vec())
}

/// β v.
pub fn weighted(v: &FlexTensor, beta: &FlexTensor) -> FlexTensor {
    let [v, beta] = [v, beta].map(contiguous);
    let rows = slice(&v).chunks_exact(dims(&v)[3]).zip(slice(&beta));
    let weighted = rows.flat_map(|(v, beta)| v.iter().map(move |v| beta * v)).collect();
    from_vec(weighted, &dims(&v))
}

/// The gradients of v and β, where `grad` is that of β v.
pub fn gradients_of_weights(
    v: &FlexTensor,
    beta: &FlexTensor,
    grad: &FlexTensor,
) -> [FlexTensor; 2] {
    let [v, beta] = [v, beta].map(contiguous);
    let values = dims(&v)[3];
    let rows = slice(grad).chunks_exact(values);
    let of_beta = rows.clone().zip(slice(&v).chunks_exact(values));
    let of_beta = of_beta.map(|(grad, v)| math::dot(grad, v)).collect();
    let of_v = rows.zip(slice(&beta));
    let of_v = of_v.flat_map(|(grad, beta)| grad.iter().map(move |x| beta * x)).collect();
    [from_vec(of_v, &dims(&v)), from_vec(of_beta, &dims(&beta))]
}

/// Row `row` of a tensor of `rows` rows.
pub fn part_of(tensor: &FlexTensor, row: usize, rows: usize) -> &[f32] {
    let data = slice(tensor);
    &data[row * (data.len() / rows)..][..data.len() / rows]
}

fn row_of(inputs: &[FlexTensor; 4], row: usize, sizes: RowSizes) -> LinearRow<'_> {
    let [q, k, v, log_decay] = inputs.each_ref().map(|x| part_of(x, row, sizes.rows));
    let RowSizes { channels, head_dim, .. } = sizes;
    LinearRow { q, k, v, decays: Decays { log_decay, channels, head_dim }, sizes }
}
