//! The weights of one row, and their gradient.

use burn::tensor::activation::sigmoid;
use burn::tensor::{Bool, Tensor};

use super::cuda;
use crate::attention::rowwise::{Rowwise, Weights, positive, power};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::activation::Activation;

/// Rows with at most this many visible keys have offset 0.
pub(super) const UNSHIFTED: f32 = 3.0;

/// How far above the row's mean its largest weight must be (in units of the mean) for the row to
/// select anything. Below, f32 cannot tell the keys apart.
pub(super) const MIN_EXCESS: f32 = 1e-5;

/// The weights R_ij / Σ_j R_ij of LSSAR: softplus, normalise, shift, rectify, raise to p, normalise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lssar {
    /// p, at least 1.
    pub power: u32,
}

/// Intermediate values of a row that both passes need.
struct RowTerms<B: OpBackend> {
    /// Softplus of the scores over its mean in the row, 0 where masked.
    share: Tensor<B, 4>,
    /// That mean, `[…, 1]`.
    mean: Tensor<B, 4>,
    /// Number of visible keys, `[…, 1]`.
    seen: Tensor<B, 4>,
    /// max(share − offset, 0) over its maximum in the row.
    excess: Tensor<B, 4>,
    /// That maximum, `[…, 1]`, without a gradient; 1 where the row selects nothing.
    row_max: Tensor<B, 4>,
}

impl Lssar {
    fn row<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> RowTerms<B> {
        let seen = mask.clone().bool_not().float().sum_dim(3);
        // ln(1 + eˣ) = −ln σ(−x).
        let log_sigmoid = Activation::LogSigmoid.reference::<B>([primitive(scores.neg())], &[]);
        let softplus = tensor::<B, 4>(log_sigmoid).neg().mask_fill(mask.clone(), 0.0);
        let mean = softplus.clone().sum_dim(3) / seen.clone();
        let share = softplus / mean.clone();
        let offset = seen.clone().greater_elem(UNSHIFTED).float();
        let excess = positive(share.clone() - offset, mask);
        // The weights do not depend on the maximum: it only keeps high powers in range.
        // On CUDA a maximum ignores NaNs; adding 0 times the sum propagates them.
        let values = excess.clone().detach();
        let row_max = values.clone().max_dim(3) + values.sum_dim(3) * 0.0;
        let flat = row_max.clone().lower_elem(MIN_EXCESS);
        let row_max = row_max.mask_fill(flat.clone(), 1.0);
        let excess = excess.clone().mask_fill(flat.expand(excess.dims()), 0.0) / row_max.clone();
        RowTerms { share, mean, seen, excess, row_max }
    }
}

/// Σ_j x_j, or 1 for a row of zeros.
fn total<B: OpBackend>(x: &Tensor<B, 4>) -> Tensor<B, 4> {
    let sum = x.clone().sum_dim(3);
    let empty = sum.clone().equal_elem(0.0);
    sum.mask_fill(empty, 1.0)
}

impl Weights for Lssar {
    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
        let sharp = power(self.row(scores, mask).excess, self.power);
        let total = total(&sharp);
        sharp / total
    }

    /// With u = softplus / mean, r = max(u − offset, 0) / row_max, W = rᵖ / Σrᵖ, by the chain rule:
    /// du_j = p r_j^{p−1} / (row_max Σrᵖ) · (dW_j − Σ W dW) where r_j > 0,
    /// dS_j = σ(S_j) / mean · (du_j − Σ u du / seen).
    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        let slope = sigmoid(scores.clone());
        let row = self.row(scores, mask.clone());
        let sharp = power(row.excess.clone(), self.power);
        let total = total(&sharp);
        let weights = sharp / total.clone();
        let common = (weights.clone() * d_weights.clone()).sum_dim(3);
        let none = row.excess.clone().equal_elem(0.0);
        let d_excess = match self.power {
            1 => d_weights - common,
            p => (d_weights - common) * power(row.excess, p - 1) * p as f32,
        };
        let d_share = (d_excess / (row.row_max * total)).mask_fill(none, 0.0);
        let common = (row.share * d_share.clone()).sum_dim(3) / row.seen;
        let d_scores = (d_share - common) * slope / row.mean;
        [weights, d_scores.mask_fill(mask, 0.0)]
    }

    fn cuda_forward(
        op: &Rowwise<Self>,
        inputs: [&CudaTensor; 3],
        offsets: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        if offsets.is_some() { None } else { cuda::forward(op, inputs, documents, needs) }
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
