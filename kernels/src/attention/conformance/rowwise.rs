//! What the oracles of several variants share, in f64 and by their definitions.

use std::ops::Range;

use crate::attention::AttentionShape;
use crate::testing::Tensor64;

/// Σ_j weight_j v_j, where `weights(b, h, i, keys)` gives the weights of the keys that query i of
/// head h in row b sees.
pub fn weighted(
    shape: &AttentionShape,
    v: &Tensor64,
    documents: &[Vec<usize>],
    weights: impl Fn(usize, usize, usize, Range<usize>) -> Vec<f64>,
) -> Tensor64 {
    let [batch, kv_heads, seq_len, value_dim] = v.shape[..] else { panic!("v has 4 dimensions") };
    let group = shape.heads / kv_heads;
    let mut data = vec![];
    for (b, documents) in documents.iter().enumerate() {
        for h in 0..shape.heads {
            for i in 0..seq_len {
                let window = shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let keys = documents[i].max(window)..i + 1;
                let weights = weights(b, h, i, keys.clone());
                data.extend((0..value_dim).map(|n| -> f64 {
                    let value = |j: usize| v.at(&[b, h / group, j, n]);
                    weights.iter().zip(keys.clone()).map(|(a, j)| a * value(j)).sum()
                }));
            }
        }
    }
    Tensor64::new(&[batch, shape.heads, seq_len, value_dim], data)
}

/// Keeps the sums over keys well above rounding, which a following norm would amplify: q and k get the
/// common mean `mean`, so that every query selects keys, and the channels of v get means of ±1.5, so that
/// sums seldom cancel.
pub fn away_from_zero(inputs: &mut [Tensor64], mean: f64) {
    let [q, k, v, ..] = inputs else { panic!("q, k and v") };
    for x in [q, k] {
        x.data.iter_mut().for_each(|x| *x += mean);
    }
    for (at, x) in v.data.iter_mut().enumerate() {
        *x += if at % 2 == 0 { 1.5 } else { -1.5 };
    }
}

/// q_iᵀk_j of head h in a view.
pub fn dot(shape: &AttentionShape, [q, k]: [&Tensor64; 2], [view, b, h, i, j]: [usize; 5]) -> f64 {
    let group = shape.heads / shape.kv_heads;
    let (query_head, key_head) = (view * shape.heads + h, view * shape.kv_heads + h / group);
    (0..shape.head_dim).map(|n| q.at(&[b, query_head, i, n]) * k.at(&[b, key_head, j, n])).sum()
}

/// As [`dot`], for the vectors divided by their norms.
pub fn cosine(shape: &AttentionShape, [q, k]: [&Tensor64; 2], at: [usize; 5]) -> f64 {
    let [view, b, h, i, j] = at;
    let group = shape.heads / shape.kv_heads;
    let norm = |x: &Tensor64, head: usize, t: usize| -> f64 {
        (0..shape.head_dim).map(|n| x.at(&[b, head, t, n]).powi(2)).sum::<f64>().sqrt()
    };
    let query = norm(q, view * shape.heads + h, i);
    dot(shape, [q, k], at) / query / norm(k, view * shape.kv_heads + h / group, j)
}

/// exp(s_j) / Σ exp(s).
pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    scores.iter().map(|s| (s - max).exp() / total).collect()
}

/// Applies `f` to each row of the last dimension.
pub fn rows(x: &Tensor64, f: impl Fn(&[f64]) -> Vec<f64>) -> Tensor64 {
    let width = x.shape[x.shape.len() - 1];
    Tensor64::new(&x.shape, x.data.chunks_exact(width).flat_map(f).collect())
}

/// The RMS norm of a row.
pub fn rms_norm(row: &[f64], weight: &Tensor64, eps: f64) -> Vec<f64> {
    let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter().zip(&weight.data).map(|(x, w)| x / (square + eps).sqrt() * w).collect()
}

/// The layer norm of a row.
pub fn layer_norm(row: &[f64], weight: &Tensor64, bias: &Tensor64, eps: f64) -> Vec<f64> {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
    let scaled =
        row.iter().zip(&weight.data).map(|(x, w)| (x - mean) / (variance + eps).sqrt() * w);
    scaled.zip(&bias.data).map(|(x, b)| x + b).collect()
}
