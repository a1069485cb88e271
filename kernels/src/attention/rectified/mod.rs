//! What the rectified variants share: the weights max(s − τ, 0)^p, normalised queries and keys, and
//! the difference of two views.

mod cuda;

use burn::tensor::{Bool, Tensor};
use longwall_config::Problems;

use super::rowwise::{Rowwise, Weights, positive, power};
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
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(op, inputs, documents, needs)
    }

    fn cuda_backward(
        op: &Rowwise<Self>,
        saved: [CudaTensor; 3],
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
    ) -> [CudaTensor; 3] {
        cuda::backward(op, &saved, documents, grad)
    }
}

/// Added to Σ x² / head_dim under the root of the L2 norm: a zero vector stays zero and has a finite
/// gradient.
const L2_EPSILON: f32 = 1e-12;

/// Added to the mean square by the RMS norm of outputs: a zero row stays zero.
const NORM_EPSILON: f32 = 1e-6;

/// The largest power: with weights below 1, higher ones leave f32's range within a few keys.
const LARGEST_POWER: u32 = 16;

/// x / ‖x‖₂ over the last dimension: the RMS norm with weights 1/√head_dim.
pub fn l2_normalise<B: OpBackend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let head_dim = x.dims()[3];
    let weight = Tensor::full([head_dim], 1.0 / (head_dim as f32).sqrt(), &x.device());
    rms_norm(x, weight, L2_EPSILON)
}

/// The RMS norm of outputs, with the learned `weight` `[value_dim]`.
pub fn normalise_outputs<B: OpBackend>(o: Tensor<B, 4>, weight: Tensor<B, 1>) -> Tensor<B, 4> {
    rms_norm(o, weight, NORM_EPSILON)
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

/// Repeats the values that both views share: `[batch, kv_heads, …]` to `[batch, 2 · kv_heads, …]`.
pub fn repeat_for_views<B: OpBackend>(v: Tensor<B, 4>) -> Tensor<B, 4> {
    Tensor::cat(vec![v.clone(), v], 1)
}

/// O⁽¹⁾ − λ O⁽²⁾ from the outputs of both views, `[batch, 2 · heads, …]` to `[batch, heads, …]`;
/// `lambda` is `[1]`.
pub fn difference<B: OpBackend>(o: Tensor<B, 4>, lambda: Tensor<B, 1>) -> Tensor<B, 4> {
    let heads = o.dims()[1] / 2;
    o.clone().narrow(1, 0, heads) - o.narrow(1, heads, heads) * lambda.reshape([1, 1, 1, 1])
}

/// The initial value of a learned λ.
pub const LAMBDA_INIT: f32 = 0.5;

/// λ clamped to [0, 1] with a straight-through gradient: with the clamp's own gradient, 0 outside, a
/// λ that has left the range would never move again.
pub fn clamp_lambda<B: OpBackend>(lambda: Tensor<B, 1>) -> Tensor<B, 1> {
    let correction = lambda.clone().clamp(0.0, 1.0) - lambda.clone();
    lambda + correction.detach()
}
