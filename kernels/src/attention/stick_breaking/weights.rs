//! The weights of one row, and their gradient.

use burn::tensor::activation::sigmoid;
use burn::tensor::{Bool, Tensor};

use super::cuda;
use crate::attention::blocks::{MASKED, sums_after};
use crate::attention::rowwise::{Rowwise, Weights};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::activation::Activation;

/// A_j = σ(s_j) Π_{j<m<i} (1 − σ(s_m)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StickBreaking;

/// The exclusive prefix sum Σ_{m<j} x_m for each key j.
fn sum_before<B: OpBackend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, queries, keys] = x.dims();
    let zero = Tensor::zeros([batch, heads, queries, 1], &x.device());
    if keys == 1 {
        return zero;
    }
    Tensor::cat(vec![zero, x.narrow(3, 0, keys - 1).cumsum(3)], 3)
}

impl Weights for StickBreaking {
    const SEES_ITSELF: bool = false;

    fn weigh<B: OpBackend>(&self, scores: Tensor<B, 4>, mask: Tensor<B, 4, Bool>) -> Tensor<B, 4> {
        let log_sigmoid = |x: Tensor<B, 4>| -> Tensor<B, 4> {
            tensor(Activation::LogSigmoid.reference::<B>([primitive(x)], &[]))
        };
        // ln(1 − σ(s)) = ln σ(−s).
        let passed = log_sigmoid(scores.clone().neg()).mask_fill(mask.clone(), 0.0);
        // Added rather than filled in: the first token sees no key, but a NaN in it must propagate.
        (log_sigmoid(scores) + sums_after(passed, 3) + mask.float() * MASKED).exp()
    }

    /// With g = A dA: s_j enters its own weight with ∂ ln A_j/∂s_j = 1 − σ(s_j), and the weights of all
    /// keys before it with −σ(s_j).
    fn vjp<B: OpBackend>(
        &self,
        scores: Tensor<B, 4>,
        mask: Tensor<B, 4, Bool>,
        d_weights: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 2] {
        let taken = sigmoid(scores.clone());
        let left = sigmoid(scores.clone().neg());
        let weights = self.weigh(scores, mask.clone());
        let g = weights.clone() * d_weights;
        let d_scores = g.clone() * left - sum_before(g) * taken;
        [weights, d_scores.mask_fill(mask, 0.0)]
    }

    fn cuda_forward(
        op: &Rowwise<Self>,
        inputs: [&CudaTensor; 3],
        offsets: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        needs: bool,
    ) -> Option<Forward<CudaTensor>> {
        // No kernel subtracts offsets.
        offsets.is_none().then(|| cuda::forward(op, inputs, documents, needs)).flatten()
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
