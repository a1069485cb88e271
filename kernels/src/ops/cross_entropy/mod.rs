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

/// What [`linear_cross_entropy`] returns.
#[derive(Clone, Debug)]
pub struct Loss<B: OpBackend> {
    /// Σ weights · (cross-entropy + z-loss), `[1]`: what training minimises.
    pub total: Tensor<B, 1>,
    /// Σ weights · cross-entropy and Σ weights · z-loss, `[2]`, without gradients; if z-loss is off, only the
    /// first, `[1]`.
    pub terms: Tensor<B, 1>,
}

/// Σ weights · (ln S − z_target + z_loss · ln² S) with S = Σ_v exp(z_v) and z = x Wᵀ, in nats.
///
/// The cross-entropy, and the z-loss (PaLM: Chowdhery et al. 2022, section 5), which draws the normaliser S
/// towards 1. With a softcap c, z = c·tanh(x Wᵀ / c) (Gemma 2: Gemma Team 2024, section 2).
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
/// - `weights`: `[batch, seq_len]`, for example 1 / (number of tokens) for a mean, 0 to exclude a
///   position; it gets no gradient
///
/// If gradients are needed, they are computed together with the loss, from one chunk of logits at a time,
/// and the backward pass only scales them. On the CPU, positions of weight 0 are skipped, but their
/// targets must be in the vocabulary. On CUDA, a target outside the vocabulary makes the loss NaN, and the
/// loss and the gradient of `weight` are f32 for all input types.
///
/// # Panics
/// When the sizes do not match; on the CPU, when a target is outside the vocabulary.
pub fn linear_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
    op: LinearCrossEntropy,
) -> Loss<B> {
    let inputs = [primitive(x), primitive(weight), primitive(constant(weights))];
    let terms: Tensor<B, 1> = tensor(B::run(&op, inputs, vec![targets.into_primitive()]));
    let total = if op.z_loss == 0.0 { terms.clone() } else { terms.clone().sum() };
    Loss { total, terms: constant(terms) }
}

/// ln Σ_v exp(z_v) − z_target with z = x Wᵀ, or c·tanh(x Wᵀ / c) with a softcap c, for every token, in nats,
/// without gradients.
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
    softcap: Option<f32>,
) -> Tensor<B, 2> {
    let inputs = [primitive(constant(x)), primitive(constant(weight))];
    tensor(B::run(&TokenCrossEntropy { softcap }, inputs, vec![targets.into_primitive()]))
}

/// c·tanh(z / c) of logits z with a softcap c; z without one.
pub fn capped<B: OpBackend, const D: usize>(
    logits: Tensor<B, D>,
    softcap: Option<f32>,
) -> Tensor<B, D> {
    match softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    }
}

/// `tensor` without a gradient. Detaching alone would leave a parameter's gradient requirement.
fn constant<B: OpBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.detach().set_require_grad(false)
}

/// The operation of [`linear_cross_entropy`]: inputs x, weight, weights; integer input targets. Its result is
/// [`Loss::terms`], of which only the sum may be differentiated: both terms have the same upstream gradient.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinearCrossEntropy {
    /// c above 0, where logits are c·tanh(x Wᵀ / c).
    pub softcap: Option<f32>,
    /// Coefficient of ln² Σ exp(z); 0 turns it off.
    pub z_loss: f32,
}

/// The operation of [`token_cross_entropy`]: inputs x, weight; integer input targets.
#[derive(Clone, Debug)]
pub struct TokenCrossEntropy {
    /// As in [`LinearCrossEntropy`].
    pub softcap: Option<f32>,
}

/// The cross-entropy ln Σ exp(z) − z_target of every token, and ln Σ exp(z), from all logits z; each
/// `[batch, seq_len]`.
fn token_losses<B: OpBackend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: &IntTensor<B>,
    softcap: Option<f32>,
) -> [Tensor<B, 2>; 2] {
    let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
    let [batch, seq_len, width] = x.dims();
    let rows = batch * seq_len;
    let targets = int_tensor::<B, 2>(targets.clone()).reshape([rows, 1]);
    let logits = capped(x.reshape([rows, width]).mm(weight.transpose()), softcap);
    let losses = log_softmax(logits.clone(), 1).gather(1, targets.clone()).neg();
    let log_sums = losses.clone() + logits.gather(1, targets);
    [losses, log_sums].map(|x| x.reshape([batch, seq_len]))
}

impl Op<3> for LinearCrossEntropy {
    fn reference<B: OpBackend>(
        &self,
        [x, weight, weights]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let [losses, log_sums] = token_losses::<B>(x, weight, &ints[0], self.softcap);
        let weights = tensor::<B, 2>(weights);
        let loss = (losses * weights.clone()).sum();
        if self.z_loss == 0.0 {
            return primitive(loss);
        }
        let z_loss = (log_sums.clone() * log_sums * weights).sum() * self.z_loss;
        primitive(Tensor::cat(vec![loss, z_loss], 0))
    }

    fn cpu_forward(
        &self,
        [x, weight, weights]: &[FlexTensor; 3],
        ints: &[FlexTensor],
        needs: [bool; 3],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::weighted(*self, x, weight, &ints[0], weights, [needs[0], needs[1]]))
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
        cuda::weighted(*self, x, weight, &ints[0], weights, [needs[0], needs[1]], chunk)
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
        let [losses, _] = token_losses::<B>(x, weight, &ints[0], self.softcap);
        primitive(losses)
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
        let op = LinearCrossEntropy { softcap: self.softcap, z_loss: 0.0 };
        Some(Forward { output: cpu::per_token(op, x, weight, &ints[0]), saved: vec![] })
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
        let op = LinearCrossEntropy { softcap: self.softcap, z_loss: 0.0 };
        Some(Forward { output: cuda::per_token(op, x, weight, &ints[0])?, saved: vec![] })
    }
}

#[cfg(test)]
mod tests;
