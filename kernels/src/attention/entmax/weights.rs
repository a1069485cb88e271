//! 1.5-entmax of one row, and its gradient.
use burn::tensor::{Bool, ElementConversion, Tensor};

use crate::attention::blocks::HIDDEN;
use crate::attention::rowwise::{Weights, positive};
use crate::backend::OpBackend;

/// Newton steps at most. The distance to the threshold is squared by each once it is small; rows
/// of a million keys take about ten.
const STEPS: usize = 40;

/// A Newton step this small changes nothing that f32 shows: scores span at least 1.
const CONVERGED: f32 = 1e-6;

/// p_j = max(s_j/2 − τ, 0)², with τ such that Σ p = 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entmax;

/// s/2, shifted so that each row's maximum is 0; far below where hidden. The shift has no
/// gradient, and needs none: it cancels against τ's.
fn shifted<B: OpBackend>(scores: Tensor<B, 4>, hidden: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
    let z = (scores * 0.5).mask_fill(hidden, HIDDEN);
    let max = z.clone().detach().max_dim(3);
    z - max
}

/// τ `[batch, heads, queries, 1]` for [`shifted`] scores, by Newton's method for ‖max(z − τ, 0)‖₂ = 1.
///
/// The norm is convex and falls with τ, and is at least 1 at τ = −1: from there the steps approach
/// the root from below and never pass it.
fn threshold<B: OpBackend>(z: &Tensor<B, 4>, hidden: &Tensor<B, 4, Bool>) -> Tensor<B, 4> {
    let [batch, heads, queries, _] = z.dims();
    let mut tau = Tensor::full([batch, heads, queries, 1], -1.0, &z.device());
    for _ in 0..STEPS {
        let rest = positive(z.clone() - tau.clone(), hidden.clone());
        let norm = (rest.clone() * rest.clone()).sum_dim(3).sqrt();
        let step = (norm.clone() - 1.0) * norm / rest.sum_dim(3);
        tau = tau + step.clone();
        let largest: f32 = step.abs().max().into_scalar().elem();
        // A NaN, which the weights will show, ends the search too.
        if largest <= CONVERGED || largest.is_nan() {
            break;
        }
    }
    tau
}

impl Weights for Entmax {
    /// τ is found without a gradient; one more Newton step, whose slope is constant, has the
    /// gradient that the implicit function theorem gives: dτ = Σ r dz / Σ r with r = max(z − τ, 0).
    fn weigh<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        hidden: Tensor<B, 4, Bool>,
    ) -> Tensor<B, 4> {
        let z = shifted(scores, hidden.clone());
        let tau = threshold(&z.clone().detach(), &hidden);
        let rest = positive(z.clone() - tau.clone(), hidden.clone());
        let slope = rest.clone().detach().sum_dim(3) * 2.0;
        let tau = tau + ((rest.clone() * rest).sum_dim(3) - 1.0) / slope;
        let rest = positive(z - tau, hidden);
        rest.clone() * rest
    }

    /// dS = r ⊙ (dW − Σ r dW / Σ r): entmax's Jacobian (Peters et al., 2019) for
    /// α = 1.5, where p_j^{2−α} = r_j.
    fn pull_back<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        hidden: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        let z = shifted(scores, hidden.clone());
        let tau = threshold(&z, &hidden);
        let rest = positive(z - tau, hidden);
        let common = (rest.clone() * d_weights.clone()).sum_dim(3) / rest.clone().sum_dim(3);
        [rest.clone() * rest.clone(), rest * (d_weights - common)]
    }
}
