//! Both forms of power attention in plain tensor operations.
//!
//! A row is one kv head of one sequence: `rows` is batch · kv_heads, `group` the query heads per kv
//! head. Every output is a ratio of two sums, so a factor common to a query's weights cancels: queries
//! have unit norm, and weights are divided by exp(peak) of their query.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::Power;
use super::expansion::Expansion;
use crate::attention::blocks::sums_after;
use crate::attention::blocks::{
    Block, MASKED, attention_mask, by_query_blocks, decay_between, query_blocks,
};
use crate::backend::OpBackend;
use crate::ops::matmul::MatMul;

/// ε of p·ln(|s| + ε): small enough not to change scores of 1e-30 and above.
pub(super) const EPSILON: f32 = 1e-37;

/// Totals of at most this are treated as 0: those of scores that are 0, or nearly (with p = 2 below
/// 4e-30), see [`Power::floor`].
pub(super) const LEAST_TOTAL: f32 = 1e-30;

/// The resolution of a sum over older tokens, relative to its largest possible value.
pub(super) const RESOLUTION: f32 = 1.0 / (1 << 24) as f32;

/// q `[rows, group, queries, head_dim]`, k `[rows, keys, head_dim]`, v `[rows, keys, value_dim]`
/// and the log decay of each step `[rows, keys]`. The queries are those of the last keys.
#[derive(Clone, Debug)]
pub(super) struct PowerInputs<B: OpBackend> {
    pub q: Tensor<B, 4>,
    pub k: Tensor<B, 3>,
    pub v: Tensor<B, 3>,
    pub log_decay: Tensor<B, 2>,
}

/// Sums over the tokens that a chunk reads through φ, decayed to the last of them.
#[derive(Clone, Debug)]
pub(super) struct StateSums<B: OpBackend> {
    /// Σ_j decay_j φ(k_j) [v_j, 1]ᵀ, `[rows, D, value_dim + 1]`: state and normaliser.
    pub sums: Tensor<B, 3>,
    /// Σ_j decay_j |k_j|^p, `[rows, 1, 1]`: the largest total weight a query can get.
    pub mass: Tensor<B, 3>,
}

/// `[rows, group, queries, channels]` as `[rows, group · queries, channels]`.
fn fold_group<B: OpBackend>(x: Tensor<B, 4>) -> Tensor<B, 3> {
    let [rows, group, queries, channels] = x.dims();
    x.reshape([rows, group * queries, channels])
}

impl<B: OpBackend> PowerInputs<B> {
    /// From q `[batch, heads, seq_len, head_dim]`, which is brought to unit length, k and v
    /// `[batch, kv_heads, seq_len, head_dim]`, and log decays `[batch, kv_heads, seq_len, 1]`.
    pub(super) fn of_heads([q, k, v]: [Tensor<B, 4>; 3], log_decay: Tensor<B, 4>) -> Self {
        let [batch, heads, seq_len, head_dim] = q.dims();
        let kv_heads = k.dims()[1];
        let rows = batch * kv_heads;
        let length = (q.clone() * q.clone()).sum_dim(3).sqrt().detach();
        let q = q / (length + EPSILON);
        PowerInputs {
            q: q.reshape([rows, heads / kv_heads, seq_len, head_dim]),
            k: k.reshape([rows, seq_len, head_dim]),
            v: v.reshape([rows, seq_len, head_dim]),
            log_decay: log_decay.reshape([rows, seq_len]),
        }
    }

    /// The inputs of a block.
    fn of(&self, block: &Block) -> Self {
        let keys = self.k.dims()[1];
        let (first, n) = (block.keys.start, block.keys.len());
        PowerInputs {
            q: block.queries_of(&self.q, keys),
            k: self.k.clone().narrow(1, first, n),
            v: self.v.clone().narrow(1, first, n),
            log_decay: self.log_decay.clone().narrow(1, first, n),
        }
    }

    /// Keys, values and log decays of `range`, as [`Power::fold`] takes them.
    pub(super) fn tokens(&self, range: std::ops::Range<usize>) -> [Tensor<B, 3>; 3] {
        let log_decay = self.log_decay.clone().unsqueeze_dim::<3>(2);
        [&self.k, &self.v, &log_decay].map(|x| x.clone().narrow(1, range.start, range.len()))
    }

    fn block(&self) -> Block {
        let (keys, queries) = (self.k.dims()[1], self.q.dims()[2]);
        Block { queries: keys - queries..keys, keys: 0..keys }
    }
}

impl Power {
    /// φ of the operation's power.
    pub(super) fn expansion(&self) -> Arc<Expansion> {
        Expansion::shared(self.p, self.head_dim)
    }

    /// The lower bound of the peak: it makes the weights of scores that are exactly 0, ε^p, vanish.
    pub(super) fn floor(&self) -> f32 {
        self.p as f32 * EPSILON.ln() + 104.0
    }

    /// Attention over whole sequences.
    pub(super) fn forward<B: OpBackend>(&self, rows: &PowerInputs<B>) -> Tensor<B, 4> {
        let seq_len = rows.q.dims()[2];
        let Some(chunk) = self.chunk else { return self.attend_last(rows, None) };
        let mut past = None;
        let parts = (0..seq_len).step_by(chunk).map(|start| {
            if start >= 2 * chunk {
                let tokens = rows.tokens(start - 2 * chunk..start - chunk);
                past = Some(self.fold(past.take(), tokens));
            }
            let end = (start + chunk).min(seq_len);
            let block = Block { queries: start..end, keys: start.saturating_sub(chunk)..end };
            self.attend(&rows.of(&block), past.as_ref())
        });
        Tensor::cat(parts.collect(), 2)
    }

    /// Outputs of the queries of `rows` over all its keys, and over `past`, the sums of the tokens before
    /// these keys.
    pub(super) fn attend_last<B: OpBackend>(
        &self,
        rows: &PowerInputs<B>,
        past: Option<&StateSums<B>>,
    ) -> Tensor<B, 4> {
        let [n, group, queries, _] = rows.q.dims();
        let blocks = query_blocks(n * group, queries, rows.k.dims()[1], self.window);
        by_query_blocks(blocks, |block| self.attend(&rows.of(&block), past))
    }

    /// [`Power::attend_last`] for one block of queries.
    fn attend<B: OpBackend>(
        &self,
        rows: &PowerInputs<B>,
        past: Option<&StateSums<B>>,
    ) -> Tensor<B, 4> {
        let [n, group, queries, _] = rows.q.dims();
        let q = fold_group(rows.q.clone());
        let scores = q.clone().mm(rows.k.clone().transpose());
        let logs = self.logs(scores, rows);
        let mut peak = logs.clone().detach().max_dim(2).clamp_min(self.floor());
        let reach = past.map(|past| {
            let reach = self.reach(rows);
            let most = (past.mass.clone() + LEAST_TOTAL).log() + reach.clone().detach();
            peak = peak.clone().max_pair(most);
            reach
        });
        let weights = (logs - peak.clone()).exp();
        let mut total = weights.clone().sum_dim(2);
        let mut sum = weights.mm(rows.v.clone());
        if let (Some(past), Some(reach)) = (past, reach) {
            let values = sum.dims()[2];
            let factor = (reach - peak.clone()).exp();
            let read = self.expansion().apply(&q, &past.sums) * factor.clone();
            sum = sum + read.clone().narrow(2, 0, values);
            // Rounding can make a nearly vanishing sum of even powers negative.
            let least = factor.detach() * past.mass.clone() * RESOLUTION;
            total = (total + read.narrow(2, values, 1)).max_pair(least);
        }
        // An empty sum stays 0; dividing it by 1 passes no gradient.
        let nothing = total.clone().lower_equal_elem(LEAST_TOTAL);
        let total = total.mask_fill(nothing, 1.0);
        let values = sum.dims()[2];
        (sum / total).reshape([n, group, queries, values])
    }

    /// p·ln(|s| + ε) + decay for `scores` `[rows, group · queries, keys]`.
    fn logs<B: OpBackend>(&self, scores: Tensor<B, 3>, rows: &PowerInputs<B>) -> Tensor<B, 3> {
        let [n, group, queries, _] = rows.q.dims();
        let keys = rows.k.dims()[1];
        let block = rows.block();
        let decay = decay_between(&rows.log_decay.clone().unsqueeze_dim::<3>(1), &block);
        let mask = attention_mask(&block, self.window, None, &decay.device()).expand(decay.shape());
        let decay = decay.mask_fill(mask, MASKED);
        let powers = (scores.abs() + EPSILON).log() * self.p as f32;
        (powers.reshape([n, group, queries, keys]) + decay).reshape([n, group * queries, keys])
    }

    /// Σ of the log decays from the first key to each query, `[rows, group · queries, 1]`.
    fn reach<B: OpBackend>(&self, rows: &PowerInputs<B>) -> Tensor<B, 3> {
        let [n, group, queries, _] = rows.q.dims();
        let sums = rows.log_decay.clone().cumsum(1).unsqueeze_dim::<3>(1);
        let of_queries = sums.narrow(2, rows.block().queries.start, queries);
        of_queries.repeat_dim(1, group).reshape([n, group * queries, 1])
    }

    /// Adds tokens to `past`: k, v and log decays, `[rows, n, channels]`.
    pub(super) fn fold<B: OpBackend>(
        &self,
        past: Option<StateSums<B>>,
        [k, v, log_decay]: [Tensor<B, 3>; 3],
    ) -> StateSums<B> {
        let weight = sums_after(log_decay.clone(), 1).exp();
        let ones = weight.ones_like();
        let sums = self.expansion().collect(&k, &(Tensor::cat(vec![v, ones], 2) * weight.clone()));
        let k = k.detach();
        let powers = (k.clone() * k).sum_dim(2).powi_scalar(self.p as i32 / 2);
        let mass = (powers * weight.detach()).sum_dim(1);
        match past {
            None => StateSums { sums, mass },
            Some(past) => {
                let decay_over_chunk = log_decay.sum_dim(1).exp();
                StateSums {
                    sums: past.sums * decay_over_chunk.clone() + sums,
                    mass: past.mass * decay_over_chunk.detach() + mass,
                }
            }
        }
    }
}
