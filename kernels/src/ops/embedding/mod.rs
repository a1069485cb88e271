//! The embedding table: rows of a matrix by token id.

mod cpu;
mod cuda;
mod kernel;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;

pub(super) use self::cpu::token_ids;
use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cuda::CudaTensor;

/// y_bt = row tokens_bt of `weight`.
///
/// - `weight`: `[vocab, width]`
/// - `tokens`: `[batch, seq_len]`, each in `0..vocab`
///
/// Returns `[batch, seq_len, width]`. The gradient of `weight` is dense, and has equal bits at every run;
/// on CUDA it is f32 for all types of `weight`. On CUDA the row of a token id outside the vocabulary is
/// NaN.
///
/// # Panics
/// On the CPU, when a token id is outside the vocabulary.
pub fn embedding<B: OpBackend>(weight: Tensor<B, 2>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    tensor(B::run(&Embedding, [primitive(weight)], vec![tokens.into_primitive()]))
}

/// The operation: input weight; integer input tokens.
#[derive(Clone, Debug)]
pub struct Embedding;

impl Op<1> for Embedding {
    fn reference<B: OpBackend>(
        &self,
        [weight]: [FloatTensor<B>; 1],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let weight = tensor::<B, 2>(weight);
        let tokens = int_tensor::<B, 2>(ints[0].clone());
        let ([batch, seq_len], [_, width]) = (tokens.dims(), weight.dims());
        let y = weight.select(0, tokens.reshape([batch * seq_len]));
        primitive(y.reshape([batch, seq_len, width]))
    }

    fn cpu_forward(
        &self,
        [weight]: &[FlexTensor; 1],
        ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        let (output, weight) = cpu::gather(weight, &ints[0]);
        Some(Forward { output, saved: vec![weight] }) // For its shape; it is alive anyway.
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(cpu::backward(&saved[0], &ints[0], &grad))]
    }

    fn cuda_forward(
        &self,
        [weight]: &[CudaTensor; 1],
        ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let output = cuda::gather(weight, &ints[0])?;
        Some(Forward { output, saved: vec![weight.clone()] }) // For its shape.
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [Some(cuda::backward(saved[0].meta.shape()[0], &ints[0], &grad))]
    }
}

#[cfg(test)]
mod tests;
