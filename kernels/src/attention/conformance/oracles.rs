//! Building blocks of oracles.

use crate::attention::AttentionShape;
use crate::attention::rotation::Scaling;
use crate::ops::rotary::tests::scaled_frequencies;
use crate::testing::Tensor64;

/// A scaling that multiplies what rotates, too.
pub const YARN: Scaling = Scaling::Yarn {
    factor: 4.0,
    original_len: 64,
    beta_fast: 4.0,
    beta_slow: 1.0,
    attention_factor: None,
};

/// q or k by the definition of rotary positions, for oracles: half-split pairs among the first
/// `dims` channels.
pub fn rotated(x: &Tensor64, theta: f64, dims: usize) -> Tensor64 {
    rotated_and_scaled(x, theta, Scaling::None {}, dims)
}

/// As [`rotated`], with scaled angles.
pub fn rotated_and_scaled(x: &Tensor64, theta: f64, scaling: Scaling, dims: usize) -> Tensor64 {
    let half = dims / 2;
    let (omega, amplitude) = scaled_frequencies(theta, scaling, dims);
    Tensor64::from_fn(&x.shape, |at| {
        let [b, h, t, n] = at[..] else { panic!("q and k have 4 dimensions") };
        if n >= dims {
            return x.at(at);
        }
        let pair = n % half;
        let angle = t as f64 * omega[pair];
        let [first, second] = [pair, pair + half].map(|n| amplitude * x.at(&[b, h, t, n]));
        if n < half {
            first * angle.cos() - second * angle.sin()
        } else {
            second * angle.cos() + first * angle.sin()
        }
    })
}

/// Softmax attention by its definition, for oracles: `score(b, h, i, j)` over the visible keys.
pub fn softmax_oracle(
    shape: &AttentionShape,
    [q, v]: [&Tensor64; 2],
    sinks: Option<&Tensor64>,
    documents: &[Vec<usize>],
    score: impl Fn(usize, usize, usize, usize) -> f64,
) -> Tensor64 {
    let group = shape.heads / shape.kv_heads;
    let mut out = Tensor64::from_fn(&q.shape, |_| 0.0);
    let [batch, heads, seq_len, head_dim] = q.shape[..] else { panic!("q has 4 dimensions") };
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..seq_len {
                let window = shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let keys = documents[b][i].max(window)..i + 1;
                let scores: Vec<f64> = keys.clone().map(|j| score(b, h, i, j)).collect();
                let sink = sinks.map(|sinks| sinks.data[h]);
                let all = || scores.iter().copied().chain(sink);
                let max = all().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = all().map(|s| (s - max).exp()).sum();
                for n in 0..head_dim {
                    let value = |j: usize| v.at(&[b, h / group, j, n]);
                    let sum: f64 = scores
                        .iter()
                        .zip(keys.clone())
                        .map(|(s, j)| (s - max).exp() * value(j))
                        .sum();
                    out.data[((b * heads + h) * seq_len + i) * head_dim + n] = sum / total;
                }
            }
        }
    }
    out
}
