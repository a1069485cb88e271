//! Power attention on the CPU: one task per row (one kv head of one sequence), which loops over tiles of
//! queries.
//!
//! Weights are formed without logarithms, as p-th powers of t_ij = s_ij · exp(decay_ij / p) divided
//! by the query's largest |t|, its *root*: a weight is (t/root)^p, and its derivative by the score
//! p·(t/root)^(p−1)·exp(decay/p)/root, with no division by s. Sums of log decays are in f64.
//!
//! The forward pass saves outputs, roots and totals. The backward pass recomputes the sums over older
//! tokens chunk by chunk, then visits the chunks from the last: memory is linear in the sequence length,
//! and φ is expanded for one tile at a time.

mod backward;
mod expansion;
mod forward;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::backward::{Grads, Upstream};
use self::expansion::ExpansionScratch;
use self::forward::Output;
use super::Power;
use crate::backend::Forward;
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};

/// Tokens per tile: queries, or tokens that enter the sums.
const TILE_TOKENS: usize = 64;

/// One row's inputs: q `[group, seq_len, head_dim]`, k `[seq_len, head_dim]`, v
/// `[seq_len, value_dim]`.
struct PowerRow<'a> {
    op: &'a Power,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// Element t: Σ_{s<t} ℓ_s.
    sums: Vec<f64>,
    sizes: RowSizes,
}

/// Sizes of the inputs.
#[derive(Clone, Copy)]
struct RowSizes {
    group: usize,
    seq_len: usize,
    head_dim: usize,
    value_dim: usize,
}

/// Sums over older tokens: `[D, value_dim + 1]`, see [`super::reference::StateSums`].
#[derive(Clone)]
struct RowSums {
    sums: Vec<f32>,
    mass: f32,
}

/// `n` queries from `first` on, and the keys from `lo` on that they read directly.
#[derive(Clone, Copy)]
struct TokenTile {
    first: usize,
    n: usize,
    lo: usize,
    /// The first key that is not in the sums.
    near: usize,
}

impl TokenTile {
    fn cols(&self) -> usize {
        self.first + self.n - self.lo
    }
}

/// Buffers that a task reuses from tile to tile.
#[derive(Default)]
struct Buffers {
    /// exp(decay / p) of each query and key of a tile, 0 where the key is masked.
    decay: Vec<f32>,
    weights: Vec<f32>,
    slopes: Vec<f32>,
    /// Gradients of the weights' logarithms, summed over a group.
    d_logs: Vec<f32>,
    d_weights: Vec<f32>,
    read: Vec<f32>,
    /// Gradients of a tile's sums and totals.
    d_read: Vec<f32>,
    /// Gradients of the decay from the sums to each query, summed over a group.
    d_reach: Vec<f32>,
    expansion: ExpansionScratch,
}

fn powered(x: f32, p: u32) -> f32 {
    if p == 2 { x * x } else { (x * x) * (x * x) }
}

/// The elements of `row` of a tensor whose first dimension has `rows` rows.
fn part(data: &[f32], rows: usize, row: usize) -> &[f32] {
    let n = data.len() / rows;
    &data[row * n..][..n]
}

impl<'a> PowerRow<'a> {
    fn new(op: &'a Power, [q, k, v, log_decay]: [&'a [f32]; 4], sizes: RowSizes) -> Self {
        let mut sum = 0.0;
        let steps = log_decay.iter().map(|&step| {
            sum += f64::from(step);
            sum
        });
        let sums = std::iter::once(0.0).chain(steps).collect();
        PowerRow { op, q, k, v, sums, sizes }
    }

    /// Tokens per chunk; the whole row in the attention form.
    fn chunk(&self) -> usize {
        self.op.chunk.unwrap_or(self.sizes.seq_len)
    }

    /// The tiles of the chunk that starts at `start`.
    fn tiles(&self, start: usize) -> impl Iterator<Item = TokenTile> + use<> {
        let (chunk, window) = (self.chunk(), self.op.window);
        let near = start.saturating_sub(chunk);
        let end = (start + chunk).min(self.sizes.seq_len);
        (start..end).step_by(TILE_TOKENS).map(move |first| {
            let seen = window.map_or(0, |w| (first + 1).saturating_sub(w));
            TokenTile { first, n: TILE_TOKENS.min(end - first), lo: near.max(seen), near }
        })
    }

    /// Query rows of a tile of one head.
    fn at(&self, head: usize, tile: &TokenTile) -> std::ops::Range<usize> {
        let first = head * self.sizes.seq_len + tile.first;
        first..first + tile.n
    }

    fn q_of(&self, head: usize, tile: &TokenTile) -> &'a [f32] {
        let (at, d) = (self.at(head, tile), self.sizes.head_dim);
        &self.q[at.start * d..at.end * d]
    }

    fn keys(&self, tile: &TokenTile) -> Mat<'a> {
        let d = self.sizes.head_dim;
        Mat::new(&self.k[tile.lo * d..], tile.cols(), d, d)
    }

    fn values(&self, tile: &TokenTile) -> Mat<'a> {
        let d = self.sizes.value_dim;
        Mat::new(&self.v[tile.lo * d..], tile.cols(), d, d)
    }

    /// exp(Σ ℓ / p) over the steps after token `from` up to `to`.
    fn decay_root(&self, from: usize, to: usize) -> f32 {
        math::exp(((self.sums[to] - self.sums[from]) / f64::from(self.op.p)) as f32)
    }

    /// The factor on the sums over older tokens for query `i` of a tile.
    fn factor(&self, tile: &TokenTile, i: usize, root: f32) -> f32 {
        powered(self.decay_root(tile.near, tile.first + i + 1) / root, self.op.p)
    }

    /// Computes [`Buffers::decay`] for a tile.
    fn decays(&self, tile: &TokenTile, decay: &mut Vec<f32>) {
        let (cols, share) = (tile.cols(), 1.0 / f64::from(self.op.p));
        decay.resize(tile.n * cols, 0.0);
        for (i, decay) in decay.chunks_exact_mut(cols).enumerate() {
            let i = tile.first + i;
            let to = self.sums[i + 1];
            let seen = self.op.window.map_or(tile.lo, |w| (i + 1).saturating_sub(w).max(tile.lo));
            let (visible, after) = decay.split_at_mut(i + 1 - tile.lo);
            for (decay, from) in visible.iter_mut().zip(&self.sums[tile.lo + 1..]) {
                *decay = math::exp(((to - from) * share) as f32);
            }
            visible[..seen - tile.lo].fill(0.0);
            after.fill(0.0);
        }
    }

    /// t = s · exp(decay / p) of a tile of one head into `t`.
    fn roots_of_weights(&self, head: usize, tile: &TokenTile, decay: &[f32], t: &mut Vec<f32>) {
        let (cols, d) = (tile.cols(), self.sizes.head_dim);
        t.resize(tile.n * cols, 0.0);
        let q = Mat::new(self.q_of(head, tile), tile.n, d, d);
        gemm(t, cols, 1.0, q, self.keys(tile).t(), 0.0);
        // Masked by a product with 0, which propagates NaNs.
        t.iter_mut().zip(decay).for_each(|(t, decay)| *t *= decay);
    }

    /// Adds a chunk's tokens, `first` to `end`, to the sums.
    fn fold(
        &self,
        past: Option<&RowSums>,
        first: usize,
        end: usize,
        buffers: &mut Buffers,
    ) -> RowSums {
        let (d, values) = (self.sizes.head_dim, self.sizes.value_dim);
        let width = values + 1;
        let mut new = match past {
            Some(past) => {
                let decay_over_chunk = powered(self.decay_root(first, end), self.op.p);
                let sums = past.sums.iter().map(|x| x * decay_over_chunk).collect();
                RowSums { sums, mass: past.mass * decay_over_chunk }
            }
            None => RowSums { sums: vec![0.0; self.op.expansion().dim() * width], mass: 0.0 },
        };
        let mut mass = 0.0;
        for first in (first..end).step_by(TILE_TOKENS) {
            let n = TILE_TOKENS.min(end - first);
            let k = &self.k[first * d..][..n * d];
            self.entered(first, n, end, &mut buffers.read);
            for (k, entered) in k.chunks_exact(d).zip(buffers.read.chunks_exact(width)) {
                mass += math::dot(k, k).powi(self.op.p as i32 / 2) * entered[values];
            }
            let scratch = &mut buffers.expansion;
            self.op.expansion().add_collected(k, &buffers.read, &mut new.sums, scratch);
        }
        new.mass += mass;
        new
    }

    /// decay_j [v_j, 1] of `n` tokens from `first` on, decayed to `end`.
    fn entered(&self, first: usize, n: usize, end: usize, entered: &mut Vec<f32>) {
        let values = self.sizes.value_dim;
        entered.resize(n * (values + 1), 0.0);
        for (j, entered) in entered.chunks_exact_mut(values + 1).enumerate() {
            let token = first + j;
            let decay = powered(self.decay_root(token + 1, end), self.op.p);
            let v = &self.v[token * values..][..values];
            entered[..values].iter_mut().zip(v).for_each(|(x, v)| *x = v * decay);
            entered[values] = decay;
        }
    }
}

fn sizes(inputs: &[FlexTensor]) -> (usize, RowSizes) {
    let [rows, group, seq_len, head_dim] = dims(&inputs[0])[..] else {
        panic!("q of 4 dimensions")
    };
    let value_dim = dims(&inputs[2])[2];
    (rows, RowSizes { group, seq_len, head_dim, value_dim })
}

impl Power {
    /// The forward pass; saves inputs, outputs, roots and totals if `save`.
    pub(super) fn run(&self, inputs: &[FlexTensor; 4], save: bool) -> Forward<FlexTensor> {
        let inputs = [0, 1, 2, 3].map(|at| contiguous(&inputs[at]));
        let (rows, sizes) = sizes(&inputs);
        let RowSizes { group, seq_len, value_dim, .. } = sizes;
        let data = [0, 1, 2, 3].map(|at| slice(&inputs[at]));
        let queries = group * seq_len;
        let mut o = buffer(rows * queries * value_dim);
        let [mut root, mut total] = [buffer(rows * queries), buffer(rows * queries)];
        o.par_chunks_mut(queries * value_dim)
            .zip(root.par_chunks_mut(queries))
            .zip(total.par_chunks_mut(queries))
            .enumerate()
            .for_each(|(row, ((o, root), total))| {
                let inputs = data.map(|x| part(x, rows, row));
                PowerRow::new(self, inputs, sizes).forward(&mut Output { o, root, total });
            });
        let output = from_vec(o, &[rows, group, seq_len, value_dim]);
        let mut saved = vec![];
        if save {
            let statistic = |x| from_vec(x, &[rows, group, seq_len]);
            saved.extend(inputs);
            saved.extend([output.clone(), statistic(root), statistic(total)]);
        }
        Forward { output, saved }
    }

    /// The gradients of q, k, v and the log decays from what [`Power::run`] saved.
    pub(super) fn gradients(&self, saved: Vec<FlexTensor>, grad: FlexTensor) -> [FlexTensor; 4] {
        let grad = contiguous(&grad);
        let (rows, sizes) = sizes(&saved);
        let inputs = [0, 1, 2, 3].map(|at| slice(&saved[at]));
        let mut grads = inputs.map(|x| vec![0.0; x.len()]);
        let [d_q, d_k, d_v, d_decay] = &mut grads;
        let each = |x: &Vec<f32>| x.len() / rows;
        let sizes_of = [each(d_q), each(d_k), each(d_v), each(d_decay)];
        d_q.par_chunks_mut(sizes_of[0])
            .zip(d_k.par_chunks_mut(sizes_of[1]))
            .zip(d_v.par_chunks_mut(sizes_of[2]))
            .zip(d_decay.par_chunks_mut(sizes_of[3]))
            .enumerate()
            .for_each(|(row, (((q, k), v), log_decay))| {
                let of = |x| part(slice(x), rows, row);
                let [o, root, total] = [4, 5, 6].map(|at| of(&saved[at]));
                let upstream = Upstream { o, root, total, grad: of(&grad) };
                let row = PowerRow::new(self, inputs.map(|x| part(x, rows, row)), sizes);
                row.backward(&upstream, &mut Grads { q, k, v, log_decay });
            });
        let mut shapes = saved.iter().map(dims);
        grads.map(|x| from_vec(x, &shapes.next().expect("a shape for each input")))
    }
}
