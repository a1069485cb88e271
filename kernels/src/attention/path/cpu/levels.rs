//! Blocks merged in pairs, again and again, up to the whole sequence: at each level the queries of a pair's
//! second half meet the keys of its first half, both moved to the boundary between them.

use std::ops::Range;

use super::block::{BLOCK, TokenBlock, mat};
use super::{PathRow, Sizes};
use crate::cpu::gemm::gemm;
use crate::cpu::math;

/// A row's queries and keys, moved to the ends of the parts of one length.
pub(super) struct Level {
    /// Tokens per part, the last part may have fewer.
    pub size: usize,
    /// At the start of their part, `[group, seq_len, head_dim]`; only right for second halves.
    pub q: Vec<f32>,
    /// At the end of their part, `[seq_len, head_dim]`; only right for first halves.
    pub k: Vec<f32>,
    /// I − P of each part, `[head_dim, head_dim]` each, if the next level's queries and keys need them.
    removed: Vec<Vec<f32>>,
}

/// The gradients of a [`Level`].
pub(super) struct LevelGrads {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    /// Of each part's I − P, as many as the level has.
    pub removed: Vec<Vec<f32>>,
}

/// Two neighbouring parts: number of the first, and the tokens of both.
pub(super) struct Halves {
    at: usize,
    pub keys: Range<usize>,
    pub queries: Range<usize>,
}

impl Level {
    /// The level of the blocks, without any.
    pub fn of_no_blocks(sizes: Sizes) -> Self {
        let Sizes { group, seq_len, head_dim: d, .. } = sizes;
        let k = Vec::with_capacity(seq_len * d);
        Level { size: BLOCK, q: vec![0.0; group * seq_len * d], k, removed: vec![] }
    }

    /// Adds the next block.
    pub fn push(&mut self, row: &PathRow, block: &TokenBlock) {
        let d = row.sizes.head_dim;
        let moved = block.last().q.chunks_exact(block.tokens.len() * d);
        for (head, moved) in row.sizes.heads(&block.tokens).zip(moved) {
            self.q[head].copy_from_slice(moved);
        }
        self.k.extend_from_slice(&block.last().k);
        // A single pair needs no transforms.
        if 2 * BLOCK < row.sizes.seq_len {
            self.removed.push(block.removed(row));
        }
    }

    pub fn halves(&self, seq_len: usize) -> impl Iterator<Item = Halves> + use<> {
        let size = self.size;
        (0..seq_len).step_by(2 * size).filter(move |first| first + size < seq_len).map(
            move |first| {
                let middle = first + size;
                let end = (middle + size).min(seq_len);
                Halves { at: first / size, keys: first..middle, queries: middle..end }
            },
        )
    }

    /// The level of parts twice as long; `None` where this one's last pair is the whole sequence.
    pub fn merged(&self, sizes: Sizes) -> Option<Level> {
        let Sizes { head_dim: d, seq_len, .. } = sizes;
        let size = 2 * self.size;
        if size >= seq_len {
            return None;
        }
        let (mut q, mut k) = (self.q.clone(), self.k.clone());
        for Halves { at, keys, queries } in self.halves(seq_len) {
            // Queries of the first part meet no older keys, keys of the last no later queries.
            if at > 0 {
                for head in sizes.heads(&queries) {
                    let old = mat(&self.q[head.clone()], d);
                    gemm(&mut q[head], d, -1.0, old, mat(&self.removed[at], d).t(), 1.0);
                }
            }
            if queries.end < seq_len {
                let keys = keys.start * d..keys.end * d;
                let old = mat(&self.k[keys.clone()], d);
                gemm(&mut k[keys], d, -1.0, old, mat(&self.removed[at + 1], d), 1.0);
            }
        }
        let removed = if 2 * size < seq_len { self.merged_transforms(d) } else { vec![] };
        Some(Level { size, q, k, removed })
    }

    /// I − P₁P₂ = R₁ + R₂ − R₁R₂ for each pair, with R = I − P.
    fn merged_transforms(&self, d: usize) -> Vec<Vec<f32>> {
        let merged = |pair: &[Vec<f32>]| {
            let mut both = pair[0].clone();
            if let [first, second] = pair {
                math::add_to(&mut both, second);
                gemm(&mut both, d, -1.0, mat(first, d), mat(second, d), 1.0);
            }
            both
        };
        self.removed.chunks(2).map(merged).collect()
    }

    /// The gradients of the top level, before any is added.
    pub fn zero_grads(&self) -> LevelGrads {
        let removed = self.removed.iter().map(|x| vec![0.0; x.len()]).collect();
        LevelGrads { q: vec![0.0; self.q.len()], k: vec![0.0; self.k.len()], removed }
    }

    /// The gradients of this level from those of the next one.
    pub fn merge_backward(&self, sizes: Sizes, above: LevelGrads) -> LevelGrads {
        let Sizes { head_dim: d, seq_len, .. } = sizes;
        let mut grads = LevelGrads { removed: vec![], ..above };
        grads.removed = self.transforms_backward(d, &above.removed);
        for Halves { at, keys, queries } in self.halves(seq_len) {
            if at > 0 {
                for head in sizes.heads(&queries) {
                    let after = grads.q[head.clone()].to_vec();
                    let old = mat(&self.q[head.clone()], d);
                    let removed = mat(&self.removed[at], d);
                    gemm(&mut grads.removed[at], d, -1.0, mat(&after, d).t(), old, 1.0);
                    gemm(&mut grads.q[head], d, -1.0, mat(&after, d), removed, 1.0);
                }
            }
            if queries.end < seq_len {
                let keys = keys.start * d..keys.end * d;
                let after = grads.k[keys.clone()].to_vec();
                let old = mat(&self.k[keys.clone()], d);
                let removed = mat(&self.removed[at + 1], d).t();
                gemm(&mut grads.removed[at + 1], d, -1.0, old.t(), mat(&after, d), 1.0);
                gemm(&mut grads.k[keys], d, -1.0, mat(&after, d), removed, 1.0);
            }
        }
        grads
    }

    /// The gradients of [`Level::merged_transforms`]; zero where the next level has none.
    fn transforms_backward(&self, d: usize, above: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut grads: Vec<_> = self.removed.iter().map(|x| vec![0.0; x.len()]).collect();
        for ((pair, grads), above) in self.removed.chunks(2).zip(grads.chunks_mut(2)).zip(above) {
            grads.iter_mut().for_each(|x| x.copy_from_slice(above));
            if let ([first, second], [d_first, d_second]) = (pair, grads) {
                gemm(d_first, d, -1.0, mat(above, d), mat(second, d).t(), 1.0);
                gemm(d_second, d, -1.0, mat(first, d).t(), mat(above, d), 1.0);
            }
        }
        grads
    }
}
