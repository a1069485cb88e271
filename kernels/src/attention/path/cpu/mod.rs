//! The operation on the CPU, one task per row (one kv head of one sequence), with the halves of
//! `docs/path.md`: tiles of 16 tokens are transformed by forward substitution and merged in pairs, again and
//! again. At each level the queries of a pair's second half meet the keys of its first half, both moved to the
//! boundary between them, so that a score is one dot product.
//!
//! Between the passes only inputs, outputs and log-sum-exps are kept. The forward pass holds the vectors of
//! one level at a time; the backward pass holds those of all ⌈log₂(seq_len / 16)⌉ levels, of one row for each
//! thread, and scores of 64 queries.

mod block;
mod levels;
mod scores;
mod tile;

use std::ops::Range;

use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::block::{BLOCK, Moved, RowGrads, TokenBlock, mat};
use self::levels::{Level, LevelGrads};
use self::scores::{Online, Pairing, Upstream, WeightGrads};
use super::op::Path;
use crate::attention::softmax::cpu::{prefix_sums, suffix_sums};
use crate::backend::Forward;
use crate::cpu::gemm::gemm;
use crate::cpu::{buffer, contiguous, dims, from_vec, int_vec, slice};

/// Sizes of a row.
#[derive(Clone, Copy)]
struct Sizes {
    group: usize,
    seq_len: usize,
    head_dim: usize,
    value_dim: usize,
}

impl Sizes {
    /// The elements of these tokens in `[group, seq_len, head_dim]`, for each head.
    fn heads(self, tokens: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let Sizes { group, seq_len, head_dim: d, .. } = self;
        let Range { start, end } = *tokens;
        (0..group).map(move |h| (h * seq_len + start) * d..(h * seq_len + end) * d)
    }
}

/// One row's inputs: q `[group, seq_len, head_dim]`, k and w `[seq_len, head_dim]`, v `[seq_len, value_dim]`,
/// β `[seq_len]`.
struct PathRow<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    w: &'a [f32],
    beta: &'a [f32],
    /// Σ_{s≤t} ℓ_s, `[group, seq_len]`, in f64: differences stay exact at any length. Empty without a gate.
    decay: Vec<f64>,
    /// The first key that each query sees.
    starts: Vec<usize>,
    sizes: Sizes,
}

/// The gradients of a row's inputs, zero at first.
struct Grads<'a> {
    inputs: RowGrads<'a>,
    v: &'a mut [f32],
    /// `[group, seq_len]`, or empty.
    log_decay: &'a mut [f32],
}

impl PathRow<'_> {
    fn q_of(&self, head: usize, tokens: &Range<usize>) -> &[f32] {
        let Sizes { seq_len, head_dim: d, .. } = self.sizes;
        &self.q[(head * seq_len + tokens.start) * d..(head * seq_len + tokens.end) * d]
    }

    fn k_of(&self, tokens: &Range<usize>) -> &[f32] {
        let d = self.sizes.head_dim;
        &self.k[tokens.start * d..tokens.end * d]
    }

    fn w_of(&self, tokens: &Range<usize>) -> &[f32] {
        let d = self.sizes.head_dim;
        &self.w[tokens.start * d..tokens.end * d]
    }

    /// Blocks of tokens after their own transforms.
    fn blocks(&self) -> impl Iterator<Item = TokenBlock> {
        let len = self.sizes.seq_len;
        let starts = (0..len).step_by(BLOCK);
        starts.map(move |first| TokenBlock::new(self, first..(first + BLOCK).min(len)))
    }

    fn forward(&self, o: &mut [f32], lse: &mut [f32]) {
        let (max, sum) = (vec![f32::NEG_INFINITY; lse.len()], vec![0.0; lse.len()]);
        let mut online = Online { o, max, sum };
        let mut scores = vec![];
        let mut level = Level::of_no_blocks(self.sizes);
        for block in self.blocks() {
            level.push(self, &block);
            let n = block.tokens.len();
            for (head, of_head) in block.scores.chunks_exact(n * n).enumerate() {
                scores.clear();
                scores.extend_from_slice(of_head);
                let tokens = block.tokens.clone();
                let at = Pairing { head, queries: tokens.clone(), keys: tokens };
                self.weigh(&at, &mut scores, &mut online);
            }
        }
        let mut level = Some(level);
        while let Some(this) = level {
            for at in self.pairings(&this) {
                self.scores(&this, &at, &mut scores);
                self.weigh(&at, &mut scores, &mut online);
            }
            level = this.merged(self.sizes);
        }
        online.finish(lse);
    }

    /// Queries of second halves and keys of first halves, in tiles of queries.
    fn pairings<'a>(&'a self, level: &Level) -> impl Iterator<Item = Pairing> + use<'a> {
        level.halves(self.sizes.seq_len).flat_map(move |halves| {
            let queries = halves.queries.clone().step_by(BLOCK);
            let tiles = queries.map(move |first| first..(first + BLOCK).min(halves.queries.end));
            let keys = halves.keys;
            tiles.flat_map(move |tile| {
                let keys = keys.clone();
                (0..self.sizes.group)
                    .filter_map(move |head| self.pairing(head, tile.clone(), keys.clone()))
            })
        })
    }

    /// The moved queries and keys of a pairing.
    fn moved<'a>(&self, level: &'a Level, at: &Pairing) -> [&'a [f32]; 2] {
        let [queries, keys] = self.elements(at);
        [&level.q[queries], &level.k[keys]]
    }

    /// The elements of a pairing's queries and keys in a [`Level`].
    fn elements(&self, Pairing { head, queries, keys }: &Pairing) -> [Range<usize>; 2] {
        let Sizes { seq_len, head_dim: d, .. } = self.sizes;
        let first = head * seq_len;
        [(first + queries.start) * d..(first + queries.end) * d, keys.start * d..keys.end * d]
    }

    fn scores(&self, level: &Level, at: &Pairing, scores: &mut Vec<f32>) {
        let d = self.sizes.head_dim;
        let [q, k] = self.moved(level, at).map(|x| mat(x, d));
        scores.resize(at.queries.len() * at.keys.len(), 0.0);
        gemm(scores, at.keys.len(), 1.0, q, k.t(), 0.0);
    }

    fn backward(&self, upstream: Upstream, grads: &mut Grads) {
        let blocks: Vec<_> = self.blocks().collect();
        let mut levels = vec![Level::of_no_blocks(self.sizes)];
        blocks.iter().for_each(|block| levels[0].push(self, block));
        while let Some(next) = levels[levels.len() - 1].merged(self.sizes) {
            levels.push(next);
        }
        let decay = vec![0.0; self.decay.len()];
        let mut of_weights = WeightGrads { v: &mut *grads.v, decay };
        let mut above: Option<LevelGrads> = None;
        for level in levels.iter().rev() {
            let mut of_level = match above {
                Some(above) => level.merge_backward(self.sizes, above),
                None => level.zero_grads(),
            };
            self.level_backward(level, upstream, &mut of_level, &mut of_weights);
            above = Some(of_level);
        }
        drop(levels);
        let of_level = above.expect("at least the level of the blocks");
        for (at, block) in blocks.iter().enumerate() {
            let into = &mut grads.inputs;
            self.block_backward((at, block), upstream, &of_level, &mut of_weights, into);
        }
        let len = self.sizes.seq_len;
        let heads = of_weights.decay.chunks_exact(len).zip(grads.log_decay.chunks_exact_mut(len));
        for (decay, log_decay) in heads {
            log_decay.iter_mut().zip(suffix_sums(decay.to_vec())).for_each(|(x, sum)| *x = sum);
        }
    }

    /// Adds the gradients of one level's scores.
    fn level_backward(
        &self,
        level: &Level,
        upstream: Upstream,
        of_level: &mut LevelGrads,
        of_weights: &mut WeightGrads,
    ) {
        let d = self.sizes.head_dim;
        let (mut scores, mut d_scores) = (vec![], vec![]);
        for at in self.pairings(level) {
            self.scores(level, &at, &mut scores);
            self.weigh_backward(&at, &mut scores, &mut d_scores, upstream, of_weights);
            let d_scores = mat(&d_scores, at.keys.len());
            let [q, k] = self.moved(level, &at).map(|x| mat(x, d));
            let [queries, keys] = self.elements(&at);
            gemm(&mut of_level.q[queries], d, 1.0, d_scores, k, 1.0);
            gemm(&mut of_level.k[keys], d, 1.0, d_scores.t(), q, 1.0);
        }
    }

    /// The gradients of a block's inputs; those of its moved queries and keys and of its transform are in
    /// `of_level`.
    fn block_backward(
        &self,
        (number, block): (usize, &TokenBlock),
        upstream: Upstream,
        of_level: &LevelGrads,
        of_weights: &mut WeightGrads,
        grads: &mut RowGrads,
    ) {
        let (d, n, tokens) = (self.sizes.head_dim, block.tokens.len(), block.tokens.clone());
        let (mut scores, mut d_scores) = (vec![], vec![]);
        let mut of_heads = Vec::with_capacity(block.scores.len());
        for (head, of_head) in block.scores.chunks_exact(n * n).enumerate() {
            scores.clear();
            scores.extend_from_slice(of_head);
            let at = Pairing { head, queries: tokens.clone(), keys: tokens.clone() };
            self.weigh_backward(&at, &mut scores, &mut d_scores, upstream, of_weights);
            of_heads.extend_from_slice(&d_scores);
        }
        let q = self.sizes.heads(&tokens).flat_map(|head| of_level.q[head].iter().copied());
        let k = of_level.k[tokens.start * d..tokens.end * d].to_vec();
        let mut moved = Moved { q: q.collect(), k, y: vec![0.0; n * d] };
        if let Some(of_removed) = of_level.removed.get(number) {
            let of_removed = mat(of_removed, d);
            let dw = &mut grads.w[tokens.start * d..tokens.end * d];
            gemm(&mut moved.y, d, 1.0, mat(self.w_of(&tokens), d), of_removed.t(), 0.0);
            gemm(dw, d, 1.0, mat(&block.last().y, d), of_removed, 1.0);
        }
        block.backward(self, moved, &of_heads, grads);
    }
}

/// The contiguous inputs of a call, and what its rows share.
struct Call<'a> {
    op: &'a Path,
    /// q, k, v, w, β and perhaps the log decay.
    inputs: Vec<FlexTensor>,
    documents: Option<Vec<i32>>,
    rows: usize,
    sizes: Sizes,
}

impl<'a> Call<'a> {
    fn new(op: &'a Path, inputs: &[FlexTensor], documents: Option<&FlexTensor>) -> Self {
        let inputs: Vec<_> = inputs.iter().map(contiguous).collect();
        let [rows, group, seq_len, head_dim] = dims(&inputs[0])[..] else {
            panic!("q of 4 dimensions")
        };
        let value_dim = dims(&inputs[2])[3];
        let sizes = Sizes { group, seq_len, head_dim, value_dim };
        Call { op, inputs, documents: documents.map(int_vec), rows, sizes }
    }

    /// The part of a tensor that belongs to one row.
    fn part<'b>(&self, x: &'b FlexTensor, row: usize) -> &'b [f32] {
        let data = slice(x);
        let each = data.len() / self.rows;
        &data[row * each..][..each]
    }

    fn row(&self, row: usize) -> PathRow<'_> {
        let len = self.sizes.seq_len;
        let documents = self.documents.as_ref().map(|starts| {
            // Rows of a sequence have its documents.
            let sequence = row * starts.len() / (self.rows * len);
            &starts[sequence * len..][..len]
        });
        let start = |i: usize| {
            let window = self.op.window.map_or(0, |w| (i + 1).saturating_sub(w));
            window.max(documents.map_or(0, |starts| starts[i] as usize))
        };
        let input = |n: usize| self.part(&self.inputs[n], row);
        let decay = (self.inputs.len() > 5).then(|| prefix_sums(input(5), len));
        PathRow {
            q: input(0),
            k: input(1),
            v: input(2),
            w: input(3),
            beta: input(4),
            decay: decay.map_or(vec![], |heads| heads.concat()),
            starts: (0..len).map(start).collect(),
            sizes: self.sizes,
        }
    }
}

/// The output `[rows, group, seq_len, value_dim]`; if `save`, also what [`backward`] needs.
pub(super) fn forward(
    op: &Path,
    inputs: &[FlexTensor],
    documents: Option<&FlexTensor>,
    save: bool,
) -> Forward<FlexTensor> {
    let call = Call::new(op, inputs, documents);
    let Sizes { group, seq_len, value_dim, .. } = call.sizes;
    let queries = group * seq_len;
    let (mut o, mut lse) = (buffer(call.rows * queries * value_dim), buffer(call.rows * queries));
    o.par_chunks_mut(queries * value_dim)
        .zip(lse.par_chunks_mut(queries))
        .enumerate()
        .for_each(|(row, (o, lse))| call.row(row).forward(o, lse));
    let output = from_vec(o, &[call.rows, group, seq_len, value_dim]);
    let mut saved = vec![];
    if save {
        let lse = from_vec(lse, &[call.rows, group, seq_len]);
        saved = call.inputs;
        saved.extend([output.clone(), lse]);
    }
    Forward { output, saved }
}

/// The gradients of all inputs, from what [`forward`] saved.
pub(super) fn backward(
    op: &Path,
    mut saved: Vec<FlexTensor>,
    documents: Option<&FlexTensor>,
    grad: &FlexTensor,
) -> Vec<FlexTensor> {
    let statistics = saved.split_off(saved.len() - 2);
    let call = Call::new(op, &saved, documents);
    let grad = contiguous(grad);
    let mut grads: Vec<Vec<f32>> = saved.iter().map(|x| buffer(slice(x).len())).collect();
    {
        let each: Vec<usize> = grads.iter().map(|x| x.len() / call.rows).collect();
        let mut parts: Vec<_> =
            grads.iter_mut().zip(&each).map(|(x, &each)| x.chunks_exact_mut(each)).collect();
        let mut next = |n: usize| parts.get_mut(n).and_then(Iterator::next);
        let mut row_grads = || {
            let mut input = |n| next(n).expect("a part for each row");
            let [q, k, v, w, beta] = [0, 1, 2, 3, 4].map(&mut input);
            let log_decay = next(5).unwrap_or_default();
            Grads { inputs: RowGrads { q, k, w, beta }, v, log_decay }
        };
        let rows: Vec<_> = (0..call.rows).map(|_| row_grads()).collect();
        rows.into_par_iter().enumerate().for_each(|(row, mut grads)| {
            let of = |x| call.part(x, row);
            let upstream =
                Upstream { o: of(&statistics[0]), lse: of(&statistics[1]), grad: of(&grad) };
            call.row(row).backward(upstream, &mut grads);
        });
    }
    let shapes = saved.iter().map(dims);
    grads.into_iter().zip(shapes).map(|(x, shape)| from_vec(x, &shape)).collect()
}
