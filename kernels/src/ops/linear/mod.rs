//! The linear layer, y = x Wᵀ + b, alone and added to a residual stream.

mod cpu;
pub(super) mod cuda;
mod few_rows;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, NoGradOp, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::bias;
use crate::ops::matmul::MatMul;

/// y = x Wᵀ + b.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
/// - `bias`: `[out_features]`
///
/// Returns `[batch, seq_len, out_features]`.
///
/// # Panics
/// When the sizes do not match.
pub fn linear<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, 3> {
    let (x, weight) = (primitive(x), primitive(weight));
    tensor(match bias {
        None => B::run(&Linear, [x, weight], vec![]),
        Some(bias) => B::run(&Linear, [x, weight, primitive(bias)], vec![]),
    })
}

/// y = r + x Wᵀ, fused where the device supports it.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
/// - `residual`: `[batch, seq_len, out_features]`
///
/// Returns `[batch, seq_len, out_features]`.
///
/// # Panics
/// When the sizes do not match.
pub fn linear_add<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    residual: Tensor<B, 3>,
) -> Tensor<B, 3> {
    let inputs = [primitive(x), primitive(weight), primitive(residual)];
    tensor(B::run(&LinearAdd, inputs, vec![]))
}

/// y = x Wᵀ in f32, even for x and W in bf16. Without a gradient.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
///
/// Returns `[batch, seq_len, out_features]`.
///
/// # Panics
/// When the sizes do not match.
pub fn linear_f32<B: OpBackend>(x: Tensor<B, 3>, weight: Tensor<B, 2>) -> Tensor<B, 3> {
    tensor(B::run_no_grad(&LinearF32, [primitive(x), primitive(weight)]))
}

/// The operation of [`linear_f32`]: inputs x and W.
#[derive(Clone, Debug)]
pub struct LinearF32;

impl NoGradOp for LinearF32 {
    type Inputs<T> = [T; 2];
    type Outputs<T> = T;

    fn reference<B: OpBackend>(&self, inputs: [FloatTensor<B>; 2]) -> FloatTensor<B> {
        B::run(&Linear, inputs.map(B::to_f32), vec![])
    }

    fn cuda(&self, [x, weight]: [CudaTensor; 2]) -> CudaTensor {
        if x.dtype == DType::BF16 && weight.dtype == DType::BF16 {
            cuda::forward_f32(&x, &weight)
        } else {
            self.reference::<crate::Cuda>([x, weight])
        }
    }
}

/// The operation: inputs x, W and, with three inputs, b.
#[derive(Clone, Debug)]
pub struct Linear;

/// The operation of [`linear_add`]: inputs x, W and r.
#[derive(Clone, Debug)]
pub struct LinearAdd;

impl Op<3> for LinearAdd {
    fn reference<B: OpBackend>(
        &self,
        [x, weight, residual]: [FloatTensor<B>; 3],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        B::float_add(residual, B::run(&Linear, [x, weight], vec![]))
    }

    fn cuda_forward(
        &self,
        [x, weight, residual]: &[CudaTensor; 3],
        _ints: &[CudaTensor],
        _needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        Some(cuda::forward(x, weight, cuda::LinearEpilogue::Add(residual)))
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 3],
        [x_accum, weight_accum, ..]: &mut [Option<CudaTensor>; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [dx, dw, _] =
            cuda::backward(&saved, &grad, [needs[0], needs[1], false], [x_accum, weight_accum]);
        [dx, dw, Some(grad)]
    }
}

impl<const N: usize> Op<N> for Linear {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight, bias) = bias::inputs(&inputs);
        let (x, weight) = (tensor::<B, 3>(x.clone()), tensor::<B, 2>(weight.clone()));
        let [batch, seq_len, features] = x.dims();
        let outputs = weight.dims()[0];
        let y = x.reshape([batch * seq_len, features]).mm(weight.transpose());
        let y = y.reshape([batch, seq_len, outputs]);
        primitive(match bias {
            None => y,
            Some(bias) => y + tensor::<B, 1>(bias.clone()).unsqueeze(),
        })
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        _needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(cpu::forward(x, weight, bias))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        bias::gradients(cpu::backward(&saved, &grad, bias::needs(needs)))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        _needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(cuda::forward(
            x,
            weight,
            bias.map_or(cuda::LinearEpilogue::Nothing, cuda::LinearEpilogue::Bias),
        ))
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let [x_accum, weight_accum, ..] = &mut grad_accum[..] else { unreachable!("x and W") };
        let needs = bias::needs(needs);
        bias::gradients(cuda::backward(&saved, &grad, needs, [x_accum, weight_accum]))
    }
}

#[cfg(test)]
mod tests;
