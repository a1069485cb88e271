//! The difference of the outputs of two views, as in differential attention.

mod cuda;
mod kernel;
pub mod lambda;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// O⁽¹⁾ − λ O⁽²⁾ (Ye et al., "Differential Transformer", 2025, equation 1).
///
/// - `o`: `[batch, 2 · heads, tokens, channels]`, the heads of the first view, then those of the second
/// - `lambda`: `[1]`, in f32 also where `o` is bf16
///
/// Returns `[batch, heads, tokens, channels]`, of o's type.
///
/// # Panics
/// When the number of heads is odd.
pub fn view_difference<B: OpBackend>(o: Tensor<B, 4>, lambda: Tensor<B, 1>) -> Tensor<B, 4> {
    assert!(o.dims()[1].is_multiple_of(2), "{:?} of two views", o.dims());
    tensor(B::run(&ViewDifference, [primitive(o), primitive(lambda)], vec![]))
}

/// The operation: inputs o, lambda.
#[derive(Clone, Debug)]
pub struct ViewDifference;

impl Op<2> for ViewDifference {
    fn reference<B: OpBackend>(
        &self,
        [o, lambda]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (o, lambda) = (tensor::<B, 4>(o), tensor::<B, 1>(lambda));
        let heads = o.dims()[1] / 2;
        let [first, second] = [0, heads].map(|from| o.clone().narrow(1, from, heads));
        primitive(first - second * lambda.reshape([1, 1, 1, 1]))
    }

    fn cuda_forward(
        &self,
        [o, lambda]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(o, lambda)
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [o, lambda] = &saved[..] else { unreachable!("o and lambda are saved") };
        cuda::backward(o, lambda, &grad).map(Some)
    }
}

#[cfg(test)]
mod tests;
