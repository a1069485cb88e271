//! The linear layer, y = x Wᵀ + b, alone and added to a residual stream.
//!
//! With [`Rounding::E4m3`](crate::cuda::blas::Rounding) its three products are in e4m3 on CUDA, where x and W
//! are in bf16, there are more than 64 rows, and all sizes are multiples of 16.

mod cpu;
pub(super) mod cuda;
pub(super) mod e4m3;
mod few_rows;
mod row_norm;
mod several;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

use self::row_norm::NormTensors;
use self::several::{LayerTensors, LayersInput, serves_layers};
use crate::backend::{Forward, NoGradOp, Op, OpBackend, primitive, tensor};
use crate::cuda::blas::rounding;
use crate::cuda::{CudaTensor, reshaped};
use crate::ops::bias;
use crate::ops::layer_norm::layer_norm;
use crate::ops::matmul::MatMul;
use crate::ops::rms_norm::rms_norm;

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

/// The norm of a layer's input.
#[derive(Clone, Debug)]
pub struct InputNorm<B: OpBackend> {
    /// `[in_features]`
    pub weight: Tensor<B, 1>,
    /// `[in_features]`, only of a layer norm.
    pub bias: Option<Tensor<B, 1>>,
    /// Whether it is a layer norm, which subtracts the mean, rather than an RMS norm.
    pub centred: bool,
    /// Added to the mean square.
    pub eps: f32,
}

impl<B: OpBackend> InputNorm<B> {
    /// `x` normalised, in the same shape.
    pub fn forward<const D: usize>(self, x: Tensor<B, D>) -> Tensor<B, D> {
        let InputNorm { weight, bias, centred, eps } = self;
        if centred { layer_norm(x, weight, bias, eps) } else { rms_norm(x, weight, eps) }
    }

    /// The norm on CUDA; `None` on other devices, and under autodiff.
    fn on_cuda(&self) -> Option<NormTensors> {
        let of = |x: &Tensor<B, 1>| B::into_cuda(primitive(x.clone()));
        let (weight, bias) = (of(&self.weight)?, self.bias.as_ref().map(of));
        let InputNorm { centred, eps, .. } = *self;
        Some(NormTensors { weight, bias: bias.flatten(), centred, eps })
    }
}

/// y_i = x̂ W_iᵀ + b_i for each layer (W_i, b_i), where x̂ is x or its norm. Where the device supports it, a few rows
/// without a gradient take one launch for up to four layers and the norm.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - W_i: `[out_features, in_features]`
/// - b_i: `[out_features]`
///
/// Returns `[batch, seq_len, out_features]` of each layer.
///
/// # Panics
/// When the sizes do not match.
pub fn linears<B: OpBackend>(
    x: Tensor<B, 3>,
    norm: Option<InputNorm<B>>,
    layers: Vec<(Tensor<B, 2>, Option<Tensor<B, 1>>)>,
) -> Vec<Tensor<B, 3>> {
    if let Some(outputs) = layers_of_few_rows(&x, norm.as_ref(), &layers, false) {
        return outputs;
    }
    match norm {
        Some(norm) => linears(norm.forward(x), None, layers),
        None => layers.into_iter().map(|(weight, bias)| linear(x.clone(), weight, bias)).collect(),
    }
}

/// GELU(x̂ Wᵀ) in its tanh form, where x̂ is x or its norm, by one launch; `None` unless the device supports that, the
/// rows are few, and no gradient is needed.
///
/// - `x`: `[batch, seq_len, in_features]`
/// - `weight`: `[out_features, in_features]`
///
/// Returns `[batch, seq_len, out_features]`.
pub fn gelu_of_few_rows<B: OpBackend>(
    x: &Tensor<B, 3>,
    norm: Option<&InputNorm<B>>,
    weight: Tensor<B, 2>,
) -> Option<Tensor<B, 3>> {
    layers_of_few_rows(x, norm, &[(weight, None)], true)?.pop()
}

/// The layers' outputs, or their GELU, by one kernel; `None` if it does not serve them.
fn layers_of_few_rows<B: OpBackend>(
    x: &Tensor<B, 3>,
    norm: Option<&InputNorm<B>>,
    layers: &[(Tensor<B, 2>, Option<Tensor<B, 1>>)],
    gelu: bool,
) -> Option<Vec<Tensor<B, 3>>> {
    let rows = cuda::as_rows(&B::into_cuda(primitive(x.clone()))?);
    let norm = match norm {
        Some(norm) => Some(norm.on_cuda()?),
        None => None,
    };
    let of = |(weight, bias): &(Tensor<B, 2>, Option<Tensor<B, 1>>)| {
        let bias = bias.as_ref().map(|bias| B::into_cuda(primitive(bias.clone())));
        Some((B::into_cuda(primitive(weight.clone()))?, bias.flatten()))
    };
    let layers = layers.iter().map(of).collect::<Option<Vec<_>>>()?;
    let layers: Vec<_> =
        layers.iter().map(|(weight, bias)| LayerTensors { weight, bias: bias.as_ref() }).collect();
    let input = LayersInput { x: &rows, norm: norm.as_ref() };
    if !serves_layers(&input, &layers) {
        return None;
    }
    let [batch, seq_len, _] = x.dims();
    let outputs = several::layers(&input, &layers, gelu).into_iter().map(|y| {
        let shape = [batch, seq_len, y.meta.shape()[1]];
        tensor(B::from_cuda(reshaped(&y, &shape)))
    });
    Some(outputs.collect())
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
        needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        let then = cuda::LinearEpilogue::Add(residual);
        Some(cuda::forward(x, weight, then, rounding(), needs.contains(&true)))
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
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        let then = bias.map_or(cuda::LinearEpilogue::Nothing, cuda::LinearEpilogue::Bias);
        Some(cuda::forward(x, weight, then, rounding(), needs.contains(&true)))
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
