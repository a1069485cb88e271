//! A block's MLP with GELU, added to the residual stream.

mod cuda;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::cuda::blas::rounding;
use crate::ops::activation::Activation;
use crate::ops::linear::{Linear, LinearAdd};

/// y = r + GELU(x Uᵀ) Dᵀ, GELU in its tanh form. GELU and the sum are fused into the products where the
/// device supports it.
///
/// - `x`, `residual`: `[batch, seq_len, width]`
/// - `up`: U, `[hidden, width]`
/// - `down`: D, `[width, hidden]`
///
/// Returns `[batch, seq_len, width]`.
///
/// # Panics
/// When the sizes do not match.
pub fn gelu_mlp<B: OpBackend>(
    x: Tensor<B, 3>,
    up: Tensor<B, 2>,
    down: Tensor<B, 2>,
    residual: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let inputs = [primitive(x), primitive(up), primitive(down), primitive(residual)];
    tensor(B::run(&GeluMlp, inputs, vec![]))
}

/// The operation of [`gelu_mlp`]: inputs x, U, D and r.
#[derive(Clone, Debug)]
pub struct GeluMlp;

impl Op<4> for GeluMlp {
    fn reference<B: OpBackend>(
        &self,
        [x, up, down, residual]: [FloatTensor<B>; 4],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let hidden = B::run(&Activation::Gelu, [B::run(&Linear, [x, up], vec![])], vec![]);
        B::run(&LinearAdd, [hidden, down, residual], vec![])
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; 4],
        _ints: &[CudaTensor],
        needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(inputs, rounding(), needs.contains(&true))
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 4],
        grad_accum: &mut [Option<CudaTensor>; 4],
    ) -> [Option<CudaTensor>; 4] {
        cuda::backward(saved, grad, needs, grad_accum)
    }
}

#[cfg(test)]
mod tests;
