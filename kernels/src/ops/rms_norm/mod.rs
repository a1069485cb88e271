//! Root-mean-square normalisation over the last dimension.

mod cpu;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::cuda::norm::Norm;

/// y = x / √(mean(x²) + eps) · weight, with the mean over the last dimension (Zhang and Sennrich,
/// 2019, equation 4).
///
/// - `x`: `[…, width]`; a strided view is read without a copy
/// - `weight`: `[width]`
///
/// Returns the shape of `x`, in the memory order of `x`.
///
/// # Panics
/// When the sizes do not match.
pub fn rms_norm<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    eps: f32,
) -> Tensor<B, D> {
    let op = RmsNorm { eps };
    tensor(B::run(&op, [primitive(x), primitive(weight)], vec![]))
}

/// The operation: inputs x, weight.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f32,
}

impl Op<2> for RmsNorm {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width;
        let x = tensor::<B, 2>(B::float_reshape(x, [rows, width].into()));
        let square = (x.clone() * x.clone()).mean_dim(1);
        let y = x / (square + self.eps).sqrt() * tensor::<B, 1>(weight).unsqueeze();
        B::float_reshape(primitive(y), shape)
    }

    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        _ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::forward(self, x, weight))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        cpu::backward(self, &saved, &grad, needs)
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        _ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        self.cuda().forward(x, weight, None)
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
        [grad_accum, ..]: &mut [Option<CudaTensor>; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [dx, dw, _] = self.cuda().backward(&saved, &grad, false, grad_accum);
        [needs[0].then_some(dx), needs[1].then_some(dw)]
    }
}

impl RmsNorm {
    fn cuda(&self) -> Norm {
        Norm { centred: false, eps: self.eps }
    }
}

#[cfg(test)]
mod tests;
