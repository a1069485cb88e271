//! The forget gate in plain tensor operations: Σ_{s=j+1..i} ℓ_s is the sum of a query's term, since an anchor, and a
//! key's term, up to it. No sums are subtracted, which would cancel.

use burn::tensor::{Bool, Tensor};

use super::piece::{halves, join, split};
use crate::attention::blocks::sums_after;
use crate::backend::OpBackend;

/// Adds the terms of queries, `[n, group, blocks, rows, 1]`, and of keys, `[n, group, blocks, keys, 1]`, to scores,
/// `[n, group, blocks, rows, keys]`.
pub(super) fn add_terms<B: OpBackend>(
    scores: Tensor<B, 5>,
    of_queries: Tensor<B, 5>,
    of_keys: Tensor<B, 5>,
) -> Tensor<B, 5> {
    scores + of_queries + of_keys.swap_dims(3, 4)
}

/// The terms of a piece's own queries and keys, level by level as the scores of its [`parts`](super::piece).
pub(super) struct ForgetTerms<B: OpBackend> {
    /// Σ ℓ from a block's first row up to each query, `[n, group, blocks, rows, 1]`.
    of_queries: Tensor<B, 5>,
    /// Σ ℓ after each key up to its block's last row, likewise.
    of_keys: Tensor<B, 5>,
    /// Σ ℓ of each block, `[n, group, blocks, 1, 1]`.
    of_blocks: Tensor<B, 5>,
}

impl<B: OpBackend> ForgetTerms<B> {
    /// Those of sub-blocks with ℓ, `[n, group, blocks, rows, 1]`.
    pub fn new(log_forget: Tensor<B, 5>) -> Self {
        let rows = log_forget.dims()[3];
        let of_keys = sums_after(log_forget.clone(), 3);
        let of_queries = log_forget.cumsum(3);
        let of_blocks = of_queries.clone().narrow(3, rows - 1, 1);
        ForgetTerms { of_queries, of_keys, of_blocks }
    }

    /// Adds Σ_{s=j+1..i} ℓ_s to scores of later halves' queries with earlier halves' keys, of `half` rows each, and
    /// joins the halves.
    pub fn add_to_later_half(&mut self, scores: Tensor<B, 5>, half: usize) -> Tensor<B, 5> {
        let [queries, keys] =
            [&self.of_queries, &self.of_keys].map(|x| halves(split(x.clone(), 2 * half)));
        let ([early_queries, late_queries], [early_keys, late_keys]) = (queries, keys);
        let scores = add_terms(scores, late_queries.clone(), early_keys.clone());
        let [early, late] = halves(split(self.of_blocks.clone(), 2));
        self.of_queries = join(early_queries, late_queries + early.clone());
        self.of_keys = join(early_keys + late.clone(), late_keys);
        self.of_blocks = early + late;
        scores
    }

    /// The queries' terms.
    pub fn into_queries(self) -> Tensor<B, 5> {
        self.of_queries
    }
}

/// Σ_{s=j+1..i} ℓ_s of the rows i and j of each sub-block, `[n, group, blocks, rows, rows]`; 0 for j > i.
pub(super) fn of_diagonal<B: OpBackend>(log_forget: Tensor<B, 5>) -> Tensor<B, 5> {
    let [n, group, blocks, rows, _] = log_forget.dims();
    let shape = [n, group, blocks, rows, rows];
    // Row s, column j: ℓ_s where s > j. The mask is false in the strict lower triangle.
    let before = Tensor::<B, 2, Bool>::tril_mask([rows, rows], -1, &log_forget.device());
    let before = before.reshape([1, 1, 1, rows, rows]).expand(shape);
    log_forget.expand(shape).mask_fill(before, 0.0).cumsum(3)
}
