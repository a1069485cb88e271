//! The output projection fused with the cross-entropy loss, so that the logits of a whole batch
//! never exist.

use burn::tensor::activation::log_softmax;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::embedding::token_ids;
use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cpu::gemm::{Mat, matmul_into};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};
use crate::cuda::CudaTensor;
use crate::ops::cuda::cross_entropy as cuda;
use crate::ops::matmul::MatMul;

/// Σ weights · (ln Σ_v exp(z_v) − z_target) with z = x Wᵀ, in nats.
///
/// - `x`: `[batch, seq_len, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`: `[batch, seq_len]`, each in `0..vocab`
/// - `weights`: `[batch, seq_len]`, for example 1 / (number of tokens) for a mean, 0 to leave a
///   position out; no gradient flows to it
///
/// Returns `[1]`. Where a gradient is wanted, it is computed together with the loss, from one
/// chunk of logits at a time, and the backward pass only scales it. Positions of weight 0 are not
/// computed at all on the CPU; their targets must be in the vocabulary all the same. On CUDA, a
/// target outside the vocabulary makes the loss NaN; the loss and the gradient of `weight` are f32
/// whatever the inputs' types.
///
/// # Panics
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
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
/// When the sizes do not fit; on the CPU, when a target is outside the vocabulary.
pub fn token_cross_entropy<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 2> {
    let inputs = [primitive(constant(x)), primitive(constant(weight))];
    tensor(B::run(&TokenCrossEntropy, inputs, vec![targets.into_primitive()]))
}

/// `tensor` outside the graph. Detaching alone leaves a parameter wanting its gradient.
fn constant<B: OpBackend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.detach().set_require_grad(false)
}

/// The operation of [`linear_cross_entropy`]: inputs x, weight, weights; integer input targets.
#[derive(Clone, Debug)]
pub struct LinearCrossEntropy;

/// The operation of [`token_cross_entropy`]: inputs x, weight; integer input targets.
#[derive(Clone, Debug)]
pub struct TokenCrossEntropy;

/// The loss of every token, `[batch, seq_len]`, by way of all logits.
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
        let (x, weight, weights) = (contiguous(x), contiguous(weight), contiguous(weights));
        let targets = targets(&x, &weight, &ints[0]);
        let width = dims(&weight)[1];
        let row_weights = slice(&weights);
        assert_eq!(
            dims(&weights),
            dims(&ints[0]),
            "shapes of the cross-entropy's weights and targets"
        );
        // A NaN weight is not 0, so it counts and shows.
        let counted: Vec<usize> =
            (0..targets.len()).filter(|&row| row_weights[row] != 0.0).collect();
        let picked: Vec<f32>;
        let rows = if counted.len() == targets.len() {
            slice(&x)
        } else {
            picked =
                counted.iter().flat_map(|&row| row_of(slice(&x), row, width)).copied().collect();
            &picked
        };
        let pass = Pass::run(
            rows,
            slice(&weight),
            width,
            &counted.iter().map(|&row| targets[row]).collect::<Vec<_>>(),
            &counted.iter().map(|&row| row_weights[row]).collect::<Vec<_>>(),
            [needs[0], needs[1]],
        );
        let terms = pass.losses.iter().zip(&counted);
        let loss: f64 = terms.map(|(loss, &row)| f64::from(loss * row_weights[row])).sum();
        let dx = pass.dx.map(|dx| from_vec(spread(dx, &counted, targets.len(), width), &dims(&x)));
        let dw = pass.dw.map(|dw| from_vec(dw, &dims(&weight)));
        Some(Forward {
            output: from_vec(vec![loss as f32], &[1]),
            saved: dx.into_iter().chain(dw).collect(),
        })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let factor = slice(&contiguous(&grad))[0];
        let mut saved = saved.into_iter().map(|grad| scaled(grad, factor));
        let [x, weight, _] = needs;
        let mut next = |wanted: bool| wanted.then(|| saved.next().expect("a gradient per need"));
        [next(x), next(weight), None]
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
        let (x, weight) = (contiguous(x), contiguous(weight));
        let targets = targets(&x, &weight, &ints[0]);
        let width = dims(&weight)[1];
        let pass = Pass::run(slice(&x), slice(&weight), width, &targets, &[], [false; 2]);
        Some(Forward { output: from_vec(pass.losses, &dims(&ints[0])), saved: vec![] })
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

/// The targets as indices, with every size checked.
fn targets(x: &FlexTensor, weight: &FlexTensor, targets: &FlexTensor) -> Vec<usize> {
    let (x, weight) = (dims(x), dims(weight));
    let (width, rows) = x.split_last().expect("x has dimensions");
    assert_eq!(*width, weight[1], "width of x {x:?} and weight {weight:?}");
    assert_eq!(rows, dims(targets), "rows of x {x:?} and shape of the targets");
    token_ids(targets, weight[0], "target")
}

fn row_of(matrix: &[f32], row: usize, width: usize) -> &[f32] {
    &matrix[row * width..][..width]
}

/// The rows of `dx` at their places among `rows`, zeros elsewhere.
fn spread(dx: Vec<f32>, places: &[usize], rows: usize, width: usize) -> Vec<f32> {
    if places.len() == rows {
        return dx;
    }
    let mut whole = buffer(rows * width);
    for (row, &place) in dx.chunks_exact(width).zip(places) {
        whole[place * width..][..width].copy_from_slice(row);
    }
    whole
}

/// `factor` · `grad`, in place.
fn scaled(mut grad: FlexTensor, factor: f32) -> FlexTensor {
    if factor != 1.0 {
        let scale = |part: &mut [f32]| part.iter_mut().for_each(|x| *x *= factor);
        grad.storage_mut::<f32>().par_chunks_mut(1 << 14).for_each(scale);
    }
    grad
}

/// Rows of logits that exist at a time: at most 32 MiB of them, so that they stay near the
/// processor at small vocabularies, and enough rows for the products' speed at large ones.
///
/// Depends on the vocabulary alone, so that sums over chunks have one order.
fn chunk_rows(vocab: usize) -> usize {
    ((1 << 23) / vocab).next_multiple_of(64).clamp(256, 1024)
}

/// What one pass over the rows gives.
struct Pass {
    /// The unweighted loss of each row.
    losses: Vec<f32>,
    /// Σ weights · d loss / dx, where wanted.
    dx: Option<Vec<f32>>,
    /// Σ weights · d loss / dW, where wanted.
    dw: Option<Vec<f32>>,
}

impl Pass {
    /// Losses of the rows of `x`, and the gradients wanted for x and W under `row_weights`, which
    /// may be empty when none is.
    fn run(
        x: &[f32],
        weight: &[f32],
        width: usize,
        targets: &[usize],
        row_weights: &[f32],
        [want_dx, want_dw]: [bool; 2],
    ) -> Self {
        let (rows, vocab) = (targets.len(), weight.len() / width);
        let w = Mat::new(weight, vocab, width, width);
        let chunk = chunk_rows(vocab).min(rows);
        let mut logits = buffer(chunk * vocab);
        let mut losses = buffer(rows);
        let mut dx = want_dx.then(|| buffer(rows * width));
        let mut dw = want_dw.then(|| buffer(vocab * width));
        for first in (0..rows).step_by(chunk.max(1)) {
            let rows = chunk.min(rows - first);
            let part = first..first + rows;
            let x = Mat::new(&x[first * width..], rows, width, width);
            let logits = &mut logits[..rows * vocab];
            matmul_into(logits, x, w.t(), 0.0);
            let row_weights = (want_dx || want_dw).then(|| &row_weights[part.clone()]);
            softmax_rows(logits, vocab, &targets[part.clone()], row_weights, &mut losses[part]);
            let d_logits = Mat::new(logits, rows, vocab, vocab);
            if let Some(dx) = &mut dx {
                matmul_into(&mut dx[first * width..][..rows * width], d_logits, w, 0.0);
            }
            if let Some(dw) = &mut dw {
                let beta = if first == 0 { 0.0 } else { 1.0 };
                matmul_into(dw, d_logits.t(), x, beta);
            }
        }
        Pass { losses, dx, dw }
    }
}

/// The loss of every row of logits. With weights, the logits become the gradients with respect to
/// them, weight · (softmax(z) − onehot(target)).
fn softmax_rows(
    logits: &mut [f32],
    vocab: usize,
    targets: &[usize],
    row_weights: Option<&[f32]>,
    losses: &mut [f32],
) {
    logits.par_chunks_mut(vocab).zip(losses.par_iter_mut().enumerate()).for_each(
        |(z, (row, loss))| {
            let target = targets[row];
            let shift = math::max(z);
            let picked = z[target] - shift;
            let sum = math::exp_shifted(z, shift);
            *loss = sum.ln() - picked;
            if let Some(weights) = row_weights {
                let factor = weights[row] / sum;
                z.iter_mut().for_each(|z| *z *= factor);
                z[target] -= weights[row];
            }
        },
    );
}

#[cfg(test)]
mod tests;
