//! The output projection fused with the cross-entropy loss: the logits of a whole batch are never
//! materialised.

mod cpu;
mod cuda;
mod kernel;

pub use self::cuda::workspace_bytes as cuda_workspace_bytes;
use burn::tensor::activation::log_softmax;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::matmul::MatMul;

/// Σ weights · (ln Σ_v exp(z_v) − z_target) with z = x Wᵀ, in nats.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
/// - `weights`: `[batch, seq_len]`, for example 1 / (number of tokens) for a mean, 0 to exclude a
///   position; it gets no gradient
///
/// Returns `[1]`. If gradients are needed, they are computed together with the loss, from one chunk of
/// logits at a time, and the backward pass only scales them. On the CPU, positions of weight 0 are
/// skipped, but their targets must be in the vocabulary. On CUDA, a target outside the vocabulary makes
/// the loss NaN, and the loss and the gradient of `weight` are f32 for all input types.
///
/// # Panics
/// When the sizes do not match; on the CPU, when a target is outside the vocabulary.
pub fn linear_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
) -> Tensor<B, 1> {
    let inputs = [primitive(x), primitive(weight), primitive(constant(weights))];
    tensor(B::run(&LinearCrossEntropy, inputs, vec![targets.into_primitive()]))
}

/// ln Σ_v exp(z_v) − z_target with z = x Wᵀ for every token, in nats, without gradients.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len]`; on CUDA in f32, and NaN for a target outside the vocabulary.
///
/// # Panics
/// When the sizes do not match; on the CPU, when a target is outside the vocabulary.
pub fn token_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 2> {
    let inputs = [primitive(constant(x)), primitive(constant(weight))];
    tensor(B::run(&TokenCrossEntropy, inputs, vec![targets.into_primitive()]))
}

/// `tensor` without a gradient. Detaching alone would leave a parameter's gradient requirement.
fn constant<B: OpBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.detach().set_require_grad(false)
}

/// The operation of [`linear_cross_entropy`]: inputs x, weight, weights; integer input targets.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy;

/// The operation of [`token_cross_entropy`]: inputs x, weight; integer input targets.
#[derive(Clone, Debug)]
pub struct TokenCrossEntropy;

/// The loss of every token, `[batch, seq_len]`, from all logits.
fn token_losses<B: OpBackend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: &IntTensor<B>,
) -> Tensor<B, 2> {
    let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
    let [batch, seq_len, width] = x.dims();
    let rows = batch * seq_len;
    let targets = int_tensor::<B, 2>(targets.clone()).reshape([rows, 1]);
    let logits = x.reshape([rows, width]).mm(weight.transpose());
    let picked = log_softmax(logits, 1).gather(1, targets);
    picked.neg().reshape([batch, seq_len])
}

impl Op<3> for LinearCrossEntropy {
    fn reference<B: OpBackend>(
        &self,
        [x, weight, weights]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let losses = token_losses::<B>(x, weight, &ints[0]);
        primitive((losses * tensor::<B, 2>(weights)).sum())
    }

    fn cpu_forward(
        &self,
        [x, weight, weights]: &[FlexTensor; 3],
        ints: &[FlexTensor],
        needs: [bool; 3],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::weighted(x, weight, &ints[0], weights, [needs[0], needs[1]]))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [dx, dw] = cpu::backward(saved, &grad, [needs[0], needs[1]]);
        [dx, dw, None]
    }

    fn cuda_forward(
        &self,
        [x, weight, weights]: &[CudaTensor; 3],
        ints: &[CudaTensor],
        needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        let chunk = cuda::chunk_rows(weight.meta.shape()[0]);
        cuda::weighted(x, weight, &ints[0], weights, [needs[0], needs[1]], chunk)
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [dx, dw] = cuda::backward(saved, &grad, [needs[0], needs[1]]);
        [dx, dw, None]
    }
}

impl Op<2> for TokenCrossEntropy {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(token_losses::<B>(x, weight, &ints[0]))
    }

    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        ints: &[FlexTensor],
        needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        if needs != [false; 2] {
            return None;
        }
        Some(Forward { output: cpu::per_token(x, weight, &ints[0]), saved: vec![] })
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        ints: &[CudaTensor],
        needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        if needs != [false; 2] {
            return None;
        }
        Some(Forward { output: cuda::per_token(x, weight, &ints[0])?, saved: vec![] })
    }
}

#[cfg(test)]
mod tests;
