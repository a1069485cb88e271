//! What attention's weights look like, measured for a thorough probe.
//!
//! The weight a_ij of key j is what query i gives for a value that is 1 at key j and 0 elsewhere. As many keys as
//! values have channels are measured in one call of the operation itself, on the path that serves it, so that memory
//! grows with seq_len, not with its square. Kernels in bf16 give weights in bf16.

#[cfg(test)]
pub(super) mod tests;

use burn::tensor::{FloatDType, Tensor};

use super::probe::{Metric, Probe};
use crate::backend::OpBackend;

/// The largest |a_ij|.
pub const LARGEST_WEIGHT: Metric = Metric("largest_weight");

/// The effective entropy of a query in nats: that of |a_ij| / Σ_j |a_ij| (Huang et al., 2026, section 3); the mean over
/// the queries with a weight.
pub const ENTROPY: Metric = Metric("entropy");

/// The effective entropy over its largest value, the logarithm of the visible keys; the mean over the queries with a
/// weight that see two keys or more. Attention is dispersive where this approaches 1 (Huang et al., section 3).
pub const RELATIVE_ENTROPY: Metric = Metric("relative_entropy");

/// gSinkRatio(1): the mean share of the first key in Σ_j |a_ij| over the queries that see it, as a multiple of its
/// share under equal weights (Huang et al., section 3). A query without a weight counts as 0.
pub const SINK_RATIO: Metric = Metric("sink_ratio");

/// Pearson's correlation of the weights of two views, over all visible pairs; not a number where a view has equal
/// weights everywhere.
pub const VIEW_CORRELATION: Metric = Metric("view_correlation");

/// What [`report`] reports of `views` views.
pub fn metrics(views: usize) -> Vec<Metric> {
    let mut metrics = vec![LARGEST_WEIGHT, ENTROPY, RELATIVE_ENTROPY, SINK_RATIO];
    if views == 2 {
        metrics.push(VIEW_CORRELATION);
    }
    metrics
}

/// Sums over the keys of each query, `[batch, views · heads, tokens, 1]` in f32.
struct RowSums<B: OpBackend> {
    /// Σ |a|
    total: Tensor<B, 4>,
    /// Σ |a| ln |a|
    log: Tensor<B, 4>,
    /// max |a|
    largest: Tensor<B, 4>,
    /// |a| of the first key.
    first: Tensor<B, 4>,
}

impl<B: OpBackend> RowSums<B> {
    /// Of the weights `a` of some keys, `[batch, views · heads, tokens, keys]`.
    fn new(a: Tensor<B, 4>) -> Self {
        let a = a.abs();
        RowSums {
            total: a.clone().sum_dim(3),
            // 0 ln 0 = 0
            log: (a.clone() * a.clone().clamp_min(f32::MIN_POSITIVE).log()).sum_dim(3),
            largest: a.clone().max_dim(3),
            first: a.narrow(3, 0, 1),
        }
    }

    /// With those of later keys.
    fn join(self, later: Self) -> Self {
        RowSums {
            total: self.total + later.total,
            log: self.log + later.log,
            largest: self.largest.max_pair(later.largest),
            first: self.first,
        }
    }
}

/// Σ x, Σ y, Σ x², Σ y² and Σ xy of pairs.
#[derive(Clone, Copy, Debug, Default)]
struct Moments([f64; 5]);

impl Moments {
    /// Pearson's correlation of `pairs` pairs, all others of which are (0, 0).
    fn correlation(self, pairs: f64) -> f64 {
        let [x, y, xx, yy, xy] = self.0.map(|sum| sum / pairs);
        (xy - x * y) / ((xx - x * x) * (yy - y * y)).sqrt()
    }
}

/// Reports [`metrics`] of each head in each view over all sequences, with values like `v`,
/// `[batch, kv_heads, tokens, value_dim]`. `weigh` gives Σ_j a_ij v_j, `[batch, views · heads, tokens, value_dim]`.
pub fn report<B: OpBackend>(
    views: usize,
    v: &Tensor<B, 4>,
    window: Option<usize>,
    probe: &mut Probe,
    weigh: impl Fn(Tensor<B, 4>) -> Tensor<B, 4>,
) {
    let [_, _, tokens, channels] = v.dims();
    let (mut sums, mut moments) = (None, vec![]);
    for first in (0..tokens).step_by(channels) {
        let keys = channels.min(tokens - first);
        let a = weigh(one_hot(v, first, keys)).cast(FloatDType::F32).narrow(3, 0, keys);
        if views == 2 {
            add_moments(&mut moments, a.clone());
        }
        let new = RowSums::new(a);
        sums = Some(match sums {
            None => new,
            Some(old) => RowSums::join(old, new),
        });
    }
    let RowSums { total, log, largest, first } = sums.expect("a token");
    let all_heads = total.dims()[1];
    let heads = all_heads / views;
    let visible = |query: usize| window.map_or(query + 1, |w| w.min(query + 1)) as f64;
    let [total, log, largest, first] =
        [total, log, largest, first].map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>());
    let of_head = |head: usize| {
        let rows = (0..total.len()).filter(move |at| at / tokens % all_heads == head);
        rows.map(|at| (at, at % tokens))
    };
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let entropy = |at: usize| (total[at].ln() - log[at] / total[at]).max(0.0);
    let mut report = |metric, of: &dyn Fn(usize) -> f64| {
        let all: Vec<f64> = (0..all_heads).map(of).collect();
        probe.report_heads(metric, all.chunks(heads).map(<[f64]>::to_vec).collect());
    };
    report(LARGEST_WEIGHT, &|head| of_head(head).map(|(at, _)| largest[at]).fold(0.0, f64::max));
    let weighs = |at: usize| total[at] > 0.0;
    report(ENTROPY, &|head| {
        mean(of_head(head).filter(|(at, _)| weighs(*at)).map(|(at, _)| entropy(at)).collect())
    });
    report(RELATIVE_ENTROPY, &|head| {
        let rows = of_head(head).filter(|(at, query)| weighs(*at) && visible(*query) > 1.0);
        mean(rows.map(|(at, query)| entropy(at) / visible(query).ln()).collect())
    });
    report(SINK_RATIO, &|head| {
        let rows: Vec<_> =
            of_head(head).filter(|(_, query)| window.is_none_or(|w| *query < w)).collect();
        let share = |at: usize| if weighs(at) { first[at] / total[at] } else { 0.0 };
        let equal = mean(rows.iter().map(|(_, query)| 1.0 / visible(*query)).collect());
        mean(rows.iter().map(|(at, _)| share(*at)).collect()) / equal
    });
    if views == 2 {
        let pairs = (0..tokens).map(visible).sum::<f64>() * v.dims()[0] as f64;
        let of = |moments: &Moments| moments.correlation(pairs);
        probe.report_heads(VIEW_CORRELATION, vec![moments.iter().map(of).collect()]);
    }
}

/// Values like `v` that are 1 in channel i of key `first` + i, for the next `keys` keys, and 0 elsewhere.
fn one_hot<B: OpBackend>(v: &Tensor<B, 4>, first: usize, keys: usize) -> Tensor<B, 4> {
    let [batch, kv_heads, tokens, channels] = v.dims();
    let device = v.device();
    let some = Tensor::<B, 2>::eye(channels, &device).narrow(0, 0, keys);
    let zeros = |rows| Tensor::<B, 2>::zeros([rows, channels], &device);
    let mut parts = vec![some];
    if first > 0 {
        parts.insert(0, zeros(first));
    }
    if first + keys < tokens {
        parts.push(zeros(tokens - first - keys));
    }
    let one = Tensor::cat(parts, 0).reshape([1, 1, tokens, channels]);
    one.repeat_dim(0, batch).repeat_dim(1, kv_heads).cast(v.dtype())
}

/// Adds the pairs of both views' weights `a`, `[batch, 2 · heads, tokens, keys]`, to those of each head.
fn add_moments<B: OpBackend>(moments: &mut Vec<Moments>, a: Tensor<B, 4>) {
    let heads = a.dims()[1] / 2;
    let [x, y] = [0, heads].map(|first| a.clone().narrow(1, first, heads));
    moments.resize(heads, Moments::default());
    let products = [x.clone(), y.clone(), x.clone() * x.clone(), y.clone() * y.clone(), x * y];
    for (which, product) in products.into_iter().enumerate() {
        let sums = product.sum_dim(3).sum_dim(2).sum_dim(0).into_data();
        for (moments, sum) in moments.iter_mut().zip(sums.iter::<f64>()) {
            moments.0[which] += sum;
        }
    }
}
