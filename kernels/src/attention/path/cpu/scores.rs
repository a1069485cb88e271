//! Scores to weights, and the gradients of the scores, for queries and keys of one row.

use std::ops::Range;

use super::{PathRow, Sizes};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::math;

/// The outputs of a row while keys are added: an online softmax.
pub(super) struct Online<'a> {
    /// Σ exp(score − max) v, `[group, seq_len, value_dim]`.
    pub o: &'a mut [f32],
    /// The largest score so far, `[group, seq_len]`.
    pub max: Vec<f32>,
    /// Σ exp(score − max), `[group, seq_len]`.
    pub sum: Vec<f32>,
}

impl Online<'_> {
    /// Divides by the sums; writes each query's log-sum-exp.
    pub fn finish(self, lse: &mut [f32]) {
        let values = self.o.len() / lse.len();
        let rows = self.o.chunks_exact_mut(values).zip(lse).zip(self.max).zip(self.sum);
        for (((o, lse), max), sum) in rows {
            let inverse = 1.0 / sum;
            o.iter_mut().for_each(|o| *o *= inverse);
            *lse = max + sum.ln();
        }
    }
}

/// What the backward pass reads beside the inputs: o and its gradient `[group, seq_len, value_dim]`, the
/// log-sum-exp `[group, seq_len]`.
#[derive(Clone, Copy)]
pub(super) struct Upstream<'a> {
    pub o: &'a [f32],
    pub grad: &'a [f32],
    pub lse: &'a [f32],
}

/// The gradients that weights and biases give.
pub(super) struct WeightGrads<'a> {
    /// `[seq_len, value_dim]`.
    pub v: &'a mut [f32],
    /// Of Σ_{s≤t} ℓ_s, `[group, seq_len]`; empty without a forget gate.
    pub decay: Vec<f64>,
}

/// Queries of one head and the keys whose scores are formed.
#[derive(Clone)]
pub(super) struct Pairing {
    pub head: usize,
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

impl PathRow<'_> {
    /// Queries with those of the keys that any of them sees; `None` if there is none.
    pub fn pairing(
        &self,
        head: usize,
        queries: Range<usize>,
        keys: Range<usize>,
    ) -> Option<Pairing> {
        // The first visible key never falls from one query to the next.
        let first = self.starts[queries.start].max(keys.start);
        (first < keys.end).then_some(Pairing { head, queries, keys: first..keys.end })
    }

    /// The columns of keys that query `i` sees.
    fn visible(&self, i: usize, keys: &Range<usize>) -> Range<usize> {
        let end = (i + 1).min(keys.end);
        self.starts[i].clamp(keys.start, end) - keys.start..end - keys.start
    }

    /// Adds Σ ℓ over the tokens after each key, up to query `i`.
    fn add_decay(&self, head: usize, i: usize, first_key: usize, scores: &mut [f32]) {
        if self.decay.is_empty() {
            return;
        }
        let sums = &self.decay[head * self.sizes.seq_len..][..self.sizes.seq_len];
        let at = sums[i];
        for (score, before) in scores.iter_mut().zip(&sums[first_key..]) {
            *score += (at - before) as f32;
        }
    }

    fn values(&self, keys: &Range<usize>) -> Mat<'_> {
        let d = self.sizes.value_dim;
        Mat::new(&self.v[keys.start * d..keys.end * d], keys.len(), d, d)
    }

    /// Adds keys with these scores `[queries, keys]`, without biases, which become weights.
    pub fn weigh(&self, at: &Pairing, scores: &mut [f32], online: &mut Online) {
        let Pairing { head, queries, keys } = at;
        let values = self.sizes.value_dim;
        let first = head * self.sizes.seq_len + queries.start;
        let o = &mut online.o[first * values..][..queries.len() * values];
        let rows = scores.chunks_exact_mut(keys.len()).zip(o.chunks_exact_mut(values));
        for (row, (scores, o)) in rows.enumerate() {
            let i = queries.start + row;
            let visible = self.visible(i, keys);
            scores[..visible.start].fill(0.0);
            scores[visible.end..].fill(0.0);
            if visible.is_empty() {
                continue;
            }
            let first_key = keys.start + visible.start;
            let scores = &mut scores[visible];
            self.add_decay(*head, i, first_key, scores);
            let (old, sum) = (online.max[first + row], &mut online.sum[first + row]);
            let max = old.max(math::max(scores));
            let kept = math::exp(old - max);
            *sum = *sum * kept + math::exp_shifted(scores, max);
            online.max[first + row] = max;
            o.iter_mut().for_each(|o| *o *= kept);
        }
        let weights = Mat::new(scores, queries.len(), keys.len(), keys.len());
        gemm(o, values, 1.0, weights, self.values(keys), 1.0);
    }

    /// The gradients of scores `[queries, keys]`, without biases, which become weights; zero where a key is
    /// masked. Adds to the gradients of v and of the decays.
    pub fn weigh_backward(
        &self,
        at: &Pairing,
        scores: &mut [f32],
        d_scores: &mut Vec<f32>,
        upstream: Upstream,
        grads: &mut WeightGrads,
    ) {
        let Pairing { head, queries, keys } = at;
        let Sizes { value_dim: values, seq_len, .. } = self.sizes;
        let (n, cols, first) = (queries.len(), keys.len(), head * seq_len + queries.start);
        for (row, scores) in scores.chunks_exact_mut(cols).enumerate() {
            let i = queries.start + row;
            let visible = self.visible(i, keys);
            scores[..visible.start].fill(0.0);
            scores[visible.end..].fill(0.0);
            let first_key = keys.start + visible.start;
            let scores = &mut scores[visible];
            self.add_decay(*head, i, first_key, scores);
            let lse = upstream.lse[first + row];
            scores.iter_mut().for_each(|s| *s = math::exp(*s - lse));
        }
        let of = |x| Mat::new(x, n, values, values);
        let grad = &upstream.grad[first * values..][..n * values];
        let d_v = &mut grads.v[keys.start * values..keys.end * values];
        gemm(d_v, values, 1.0, Mat::new(scores, n, cols, cols).t(), of(grad), 1.0);
        d_scores.resize(n * cols, 0.0);
        gemm(d_scores, cols, 1.0, of(grad), self.values(keys).t(), 0.0);
        let o = upstream.o[first * values..].chunks_exact(values);
        let rows = d_scores.chunks_exact_mut(cols).zip(scores.chunks_exact(cols));
        for (row, ((ds, weights), (o, grad))) in
            rows.zip(o.zip(grad.chunks_exact(values))).enumerate()
        {
            let delta = math::dot(o, grad);
            ds.iter_mut().zip(weights).for_each(|(ds, weight)| *ds = weight * (*ds - delta));
            if grads.decay.is_empty() {
                continue;
            }
            let mut sum = 0.0;
            let decay = &mut grads.decay[head * seq_len..][..seq_len];
            for (ds, decay) in ds.iter().zip(&mut decay[keys.start..]) {
                *decay -= f64::from(*ds);
                sum += f64::from(*ds);
            }
            decay[queries.start + row] += sum;
        }
    }
}
