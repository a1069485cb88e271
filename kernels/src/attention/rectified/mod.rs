//! What the rectified variants share: the weights max(s − τ, 0)^p, normalised queries and keys, and
//! what joins two views.

mod cuda;
#[cfg(test)]
mod tests;

use burn::tensor::{Bool, Tensor};
use longwall_config::Problems;

use super::kv_cache_variant::Prepared;
use super::rowwise::{Rowwise, RowwiseCall, Weights, positive, power};
use super::{AttentionShape, DocumentStarts};
use crate::attention::blocks::positions_in_documents;
use crate::backend::{Forward, OpBackend};
use crate::cuda::CudaTensor;
use crate::ops::rms_norm::rms_norm;

/// a_ij = max(S_ij, 0)^p; the threshold is already subtracted from the scores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rectified {
    /// p, at least 1.
    pub power: u32,
}

impl Weights for Rectified {
    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
        power(positive(scores, mask), self.power)
    }

    /// dS = p · max(S, 0)^(p−1) · dW; 0 at S = 0, also for p = 1.
    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        let excess = positive(scores, mask);
        if self.power == 1 {
            let none = excess.clone().equal_elem(0.0);
            return [excess, d_weights.mask_fill(none, 0.0)];
        }
        let slope = power(excess.clone(), self.power - 1);
        let d_scores = d_weights * slope.clone() * self.power as f32;
        [slope * excess, d_scores]
    }

    fn cuda_forward(
        op: &Rowwise<Self>,
        inputs: [&CudaTensor; 3],
        offsets: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(op, inputs, offsets, documents, needs)
    }

    fn cuda_backward(
        op: &Rowwise<Self>,
        saved: &[CudaTensor],
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
    ) -> Vec<CudaTensor> {
        cuda::backward(op, saved, documents, grad)
    }
}

/// Attention with the weights max(scale · q_iᵀk_j, 0).
pub fn rectified<B: OpBackend>(
    shape: &AttentionShape,
    Prepared { q, k, v, documents, path, .. }: Prepared<'_, B>,
) -> RowwiseCall<B, Rectified> {
    let weights = Rectified { power: 1 };
    let op = Rowwise { weights, scale: shape.scale(), window: shape.window };
    RowwiseCall { op, q, k, v, offsets: None, documents, path }
}

/// Added to Σ x² / head_dim under the root of the L2 norm: a zero vector stays zero and has a finite
/// gradient.
const L2_EPSILON: f32 = 1e-12;

/// What the RMS norm of outputs adds to the mean square by default: a zero row stays zero.
pub const NORM_EPS: f32 = 1e-6;

/// The largest power: with weights below 1, higher ones leave f32's range within a few keys.
const LARGEST_POWER: u32 = 16;

/// x / ‖x‖₂ over the last dimension: the RMS norm with weights 1/√head_dim.
pub fn l2_normalise<B: OpBackend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let head_dim = x.dims()[3];
    let weight = Tensor::full([head_dim], 1.0 / (head_dim as f32).sqrt(), &x.device());
    rms_norm(x, weight, L2_EPSILON)
}

/// τ_i = β · sqrt(2 · ln((i+1)/κ) / head_dim) with i the position in the document, 0 where the
/// logarithm is negative (Huang et al., 2026, equation 1 and appendix C).
///
/// - `beta`: `[1]`
/// - `queries`, `first`: the number of queries, and the position of the first
///
/// Returns `[batch or 1, queries]`. Only β has a gradient; it is finite everywhere, and 0 for rows
/// with τ = 0.
pub fn thresholds<B: OpBackend>(
    shape: &AttentionShape,
    kappa: f32,
    beta: Tensor<B, 1>,
    queries: usize,
    first: usize,
    documents: &DocumentStarts<B>,
) -> Tensor<B, 2> {
    let positions = positions_in_documents(queries, first, documents.as_ref(), &beta.device());
    let log = ((positions + 1.0).log() - kappa.ln()).clamp_min(0.0);
    (log * (2.0 / shape.head_dim as f32)).sqrt() * beta.reshape([1, 1])
}

/// Splits a kind's learned vectors into β, the first of them, and the others. A β that is not learned is
/// `fixed`, on the device of the others.
pub fn beta_and_others<B: OpBackend>(
    learned: bool,
    fixed: f32,
    parameters: &[Tensor<B, 1>],
) -> (Tensor<B, 1>, &[Tensor<B, 1>]) {
    let (first, others) = parameters.split_first().expect("the norm's weight at least");
    if learned {
        return (first.clone(), others);
    }
    (Tensor::full([1], fixed, &first.device()), parameters)
}

/// Records every problem of a table's keys `p`, `kappa` and `beta`; `key` is the table's path.
pub fn validate_threshold(key: &str, p: u32, kappa: f32, beta: f32, problems: &mut Problems) {
    problems.check(
        (1..=LARGEST_POWER).contains(&p),
        format!("{key}.p"),
        p,
        format!("a whole number from 1 to {LARGEST_POWER}"),
        "set p = 2",
    );
    for (name, value) in [("kappa", kappa), ("beta", beta)] {
        problems.check(
            value > 0.0 && value.is_finite(),
            format!("{key}.{name}"),
            value,
            "a number above 0",
            format!("set {name} = 1.0"),
        );
    }
}

/// The initial value of a learned λ.
pub const LAMBDA_INIT: f32 = 0.5;

/// λ clamped to [0, 1] with a straight-through gradient: with the clamp's own gradient, 0 outside, a
/// λ that has left the range would never move again.
pub fn clamp_lambda<B: OpBackend>(lambda: Tensor<B, 1>) -> Tensor<B, 1> {
    let correction = lambda.clone().clamp(0.0, 1.0) - lambda.clone();
    lambda + correction.detach()
}
