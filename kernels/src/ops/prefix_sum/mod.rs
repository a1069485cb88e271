//! Prefix sums along the last dimension.

mod cpu;
pub(crate) mod cuda;
pub(crate) mod kernel;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// y_i = Σ_{j ≤ i} x_j along the last dimension, with an error close to that of rounding the result for
/// any number of terms.
///
/// - `x`: `[…, n]`, f32
///
/// Returns the shape of `x`.
pub fn prefix_sum<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::run(&PrefixSum, [primitive(x)], vec![]))
}

/// The operation: input x.
#[derive(Clone, Debug)]
pub struct PrefixSum;

impl Op<1> for PrefixSum {
    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let len = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / len;
        let x = tensor::<B, 2>(B::float_reshape(x, [rows, len].into()));
        B::float_reshape(primitive(x.cumsum(1)), shape)
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: cpu::prefix_sum(x, false), saved: vec![] })
    }

    /// dx_i = Σ_{j ≥ i} dy_j.
    fn cpu_backward(
        &self,
        _saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(cpu::prefix_sum(&grad, true))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: cuda::prefix_sum(x, false)?, saved: vec![] })
    }

    fn cuda_backward(
        &self,
        _saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [cuda::prefix_sum(&grad, true)]
    }
}

#[cfg(test)]
mod tests;
