//! Pruning under a decay: which keys still matter to a query.

use burn::tensor::{FloatDType, Tensor};

use super::cpu::prefix_sums;
use super::{PRUNED, Softmax};
use crate::attention::DocumentStarts;
use crate::attention::blocks::starts_of_documents;
use crate::backend::OpBackend;

/// The first key that still matters to each of the last queries.
///
/// With U_i = |scale| · |q_i| · max_{j ≤ i} |k_j| no score before its decay is above U_i or below −U_i. So
/// key j weighs at most exp(2 U_i + c_i − c_j) of what the query's own key does, c being the decay's
/// prefix sum, and all keys before j, which are fewer than i + 1 and decayed further, so many times that.
/// Those that together weigh at most [`PRUNED`] of the row are left out (as in Lin et al., "Adaptive
/// Computation Pruning for the Forgetting Transformer", 2025, with a bound for each row in place of one
/// for all). No later token has a part in it.
///
/// - `q_norms`, `k_norms`: |q_i| and |k_j| of the queries and the keys of one head
/// - `decay`: c, of each key; it never rises
pub fn first_keys(
    op: &Softmax,
    q_norms: impl ExactSizeIterator<Item = f32>,
    k_norms: impl ExactSizeIterator<Item = f32>,
    decay: &[f64],
) -> Vec<usize> {
    let largest = k_norms.scan(0f32, |largest, norm| {
        *largest = largest.max(norm);
        Some(*largest)
    });
    let offset = decay.len() - q_norms.len();
    let first_key = |(i, (q_norm, largest)): (usize, (f32, f32))| {
        let i = offset + i;
        // A little more than the bound, for what rounding takes from it.
        let bound = 2.001 * op.scale.abs() * q_norm * largest;
        let least = f64::from(PRUNED.ln() - bound - (i as f32 + 1.0).ln());
        decay[..i].partition_point(|before| decay[i] - before <= least)
    };
    q_norms.zip(largest.skip(offset)).enumerate().map(first_key).collect()
}

/// The fraction, 0 to 1, of visible (query, key) pairs that pruning leaves out.
///
/// - `q`: `[batch, heads, tokens, head_dim]`, `k`: `[batch, kv_heads, tokens, head_dim]`
/// - `log_decay`: ℓ, `[batch, heads, tokens]`
/// - `documents`: `[batch, tokens]`
pub fn pruned_fraction<B: OpBackend>(
    op: &Softmax,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    log_decay: Tensor<B, 3>,
    documents: DocumentStarts<B>,
) -> f64 {
    let [batch, heads, tokens, _] = q.dims();
    let kv_heads = k.dims()[1];
    let window = op.window.unwrap_or(tokens);
    let starts = starts_of_documents(documents, batch, tokens);
    let [q, k] = [q, k].map(|x| {
        let x = x.cast(FloatDType::F32);
        let norms = (x.clone() * x).sum_dim(3).sqrt().into_data();
        norms.iter::<f32>().collect::<Vec<_>>()
    });
    let log_decay: Vec<f32> = log_decay.cast(FloatDType::F32).into_data().iter::<f32>().collect();
    let (mut left_out, mut pairs) = (0, 0);
    for (row, decay) in prefix_sums(&log_decay, tokens).iter().enumerate() {
        let kv_row = row / heads * kv_heads + row % heads / (heads / kv_heads);
        let of = |row: usize| row * tokens..(row + 1) * tokens;
        let [q, k] = [&q[of(row)], &k[of(kv_row)]].map(|x| x.iter().copied());
        let starts = &starts[of(row / heads)];
        for (i, (first, &start)) in first_keys(op, q, k, decay).into_iter().zip(starts).enumerate()
        {
            let seen_from = start.max((i + 1).saturating_sub(window));
            left_out += first.saturating_sub(seen_from);
            pairs += i + 1 - seen_from;
        }
    }
    left_out as f64 / pairs as f64
}
