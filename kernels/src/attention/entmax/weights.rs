//! 1.5-entmax of one row, and its gradient.
use burn::tensor::{Bool, ElementConversion, Tensor};

use super::cuda;
use crate::attention::blocks::MASKED;
use crate::attention::rowwise::{Rowwise, Weights, positive};
use crate::backend::{Forward, OpBackend};
use crate::cuda::CudaTensor;

/// Most Newton steps. Convergence is quadratic near the root; rows of a million keys take about ten.
const STEPS: usize = 40;

/// The search stops at a Newton step this small, which is below f32's resolution.
const CONVERGED: f32 = 1e-6;

/// p_j = max(s_j/2 − τ, 0)², with τ such that Σ p = 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entmax;

/// s/2, shifted so that each row's maximum is 0; [`MASKED`] where masked. The shift is detached: its
/// gradient would cancel against τ's.
fn shifted<B: OpBackend>(scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
    let z = (scores * 0.5).mask_fill(mask, MASKED);
    let max = z.clone().detach().max_dim(3);
    z - max
}

/// τ `[batch, heads, queries, 1]` for [`shifted`] scores, by Newton's method for ‖max(z − τ, 0)‖₂ = 1.
///
/// The norm is convex and decreasing in τ, and at least 1 at τ = −1: from there the steps approach the
/// root from below without overshooting.
fn threshold<B: OpBackend>(z: &Tensor<B, 4>, mask: &Tensor<B, 4, Bool>) -> Tensor<B, 4> {
    let [batch, heads, queries, _] = z.dims();
    let mut tau = Tensor::full([batch, heads, queries, 1], -1.0, &z.device());
    for _ in 0..STEPS {
        let excess = positive(z.clone() - tau.clone(), mask.clone());
        let norm = (excess.clone() * excess.clone()).sum_dim(3).sqrt();
        let step = (norm.clone() - 1.0) * norm / excess.sum_dim(3);
        tau = tau + step.clone();
        let largest: f32 = step.abs().max().into_scalar().elem();
        // A NaN also ends the search; it propagates to the weights.
        if largest <= CONVERGED || largest.is_nan() {
            break;
        }
    }
    tau
}

impl Weights for Entmax {
    /// τ is found without a gradient. One more Newton step with a detached slope then has the gradient
    /// of the implicit function theorem: dτ = Σ r dz / Σ r with r = max(z − τ, 0).
    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
        let z = shifted(scores, mask.clone());
        let tau = threshold(&z.clone().detach(), &mask);
        let excess = positive(z.clone() - tau.clone(), mask.clone());
        let slope = excess.clone().detach().sum_dim(3) * 2.0;
        let tau = tau + ((excess.clone() * excess).sum_dim(3) - 1.0) / slope;
        let excess = positive(z - tau, mask);
        excess.clone() * excess
    }

    /// dS = r ⊙ (dW − Σ r dW / Σ r): entmax's Jacobian (Peters et al., 2019) for
    /// α = 1.5, where p_j^{2−α} = r_j.
    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        let z = shifted(scores, mask.clone());
        let tau = threshold(&z, &mask);
        let excess = positive(z - tau, mask);
        let common = (excess.clone() * d_weights.clone()).sum_dim(3) / excess.clone().sum_dim(3);
        [excess.clone() * excess.clone(), excess * (d_weights - common)]
    }

    fn cuda_forward(
        op: &Rowwise<Self>,
        inputs: [&CudaTensor; 3],
        offsets: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        // The weights do not depend on an offset, but the operation's gradients include its zeros.
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
