//! The output projection fused with the cross-entropy loss, so that the logits of a whole batch
//! never exist.

use burn::tensor::activation::log_softmax;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

use crate::backend::{Op, OpBackend, int_tensor, primitive, tensor};

/// Σ weights · (ln Σ_v exp(z_v) − z_target) with z = x Wᵀ, in nats.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
/// - `weights`: `[batch, seq_len]`, for example 1 / (number of tokens) for a mean, 0 to leave a
///   position out; no gradient flows to it
///
/// Returns `[1]`.
///
/// # Panics
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
pub fn linear_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
    weights: Tensor<B, 2>,
) -> Tensor<B, 1> {
    let inputs = [primitive(x), primitive(weight), primitive(weights.detach())];
    tensor(B::run(
        &LinearCrossEntropy,
        inputs,
        vec![targets.into_primitive()],
    ))
}

/// ln Σ_v exp(z_v) − z_target with z = x Wᵀ for every token, in nats, without gradients.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len]`.
///
/// # Panics
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
pub fn token_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 2> {
    let inputs = [primitive(x.detach()), primitive(weight.detach())];
    tensor(B::run(
        &TokenCrossEntropy,
        inputs,
        vec![targets.into_primitive()],
    ))
}

/// The operation of [`linear_cross_entropy`]: inputs x, weight, weights; integer input targets.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy;

/// The operation of [`token_cross_entropy`]: inputs x, weight; integer input targets.
#[derive(Clone, Debug)]
pub struct TokenCrossEntropy;

/// The loss of every token, `[batch, seq_len]`, by way of all logits.
fn token_losses<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    targets: &IntTensor<B>,
) -> Tensor<B, 2> {
    let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
    let [batch, seq_len, width] = x.dims();
    let rows = batch * seq_len;
    let targets = int_tensor::<B, 2>(targets.clone()).reshape([rows, 1]);
    let logits = x.reshape([rows, width]).matmul(weight.transpose());
    let picked = log_softmax(logits, 1).gather(1, targets);
    picked.neg().reshape([batch, seq_len])
}

impl Op<3> for LinearCrossEntropy {
    fn reference<B: Backend>(
        &self,
        [x, weight, weights]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let losses = token_losses::<B>(x, weight, &ints[0]);
        primitive((losses * tensor::<B, 2>(weights)).sum())
    }
}

impl Op<2> for TokenCrossEntropy {
    fn reference<B: Backend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(token_losses::<B>(x, weight, &ints[0]))
    }
}
