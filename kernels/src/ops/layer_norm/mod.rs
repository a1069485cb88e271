//! Layer normalisation over the last dimension.

mod cpu;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;
use crate::ops::bias;
use crate::ops::cuda::norm::Norm;

/// y = (x − mean(x)) / √(var(x) + eps) · weight + bias, with mean and variance over the last
/// dimension (Ba et al., 2016, equation 4). The variance is the biased one.
///
/// - `x`: `[…, width]`; on CUDA, a strided view is read without a copy
/// - `weight`, `bias`: `[width]`
///
/// Returns the shape of `x`; on CUDA, in the memory order of `x`.
///
/// # Panics
/// When the sizes do not match.
pub fn layer_norm<B: OpBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    bias: Option<Tensor<B, 1>>,
    eps: f32,
) -> Tensor<B, D> {
    let op = LayerNorm { eps };
    let (x, weight) = (primitive(x), primitive(weight));
    tensor(match bias {
        None => B::run(&op, [x, weight], vec![]),
        Some(bias) => B::run(&op, [x, weight, primitive(bias)], vec![]),
    })
}

/// The operation: inputs x, weight and, with three inputs, bias.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm {
    fn cuda(&self) -> Norm {
        Norm { centred: true, eps: self.eps }
    }
}

impl<const N: usize> Op<N> for LayerNorm {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight, bias) = bias::inputs(&inputs);
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width;
        let x = tensor::<B, 2>(B::float_reshape(x.clone(), [rows, width].into()));
        let centred = x.clone() - x.mean_dim(1);
        let variance = (centred.clone() * centred.clone()).mean_dim(1);
        let weight = tensor::<B, 1>(weight.clone());
        let y = centred / (variance + self.eps).sqrt() * weight.unsqueeze();
        let y = match bias {
            None => y,
            Some(bias) => y + tensor::<B, 1>(bias.clone()).unsqueeze(),
        };
        B::float_reshape(primitive(y), shape)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        _needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        Some(cpu::forward(self, x, weight, bias))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        bias::gradients(cpu::backward(self, &saved, &grad, bias::needs(needs)))
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        _needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (x, weight, bias) = bias::inputs(inputs);
        self.cuda().forward(x, weight, bias)
    }

    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let gradients = self.cuda().backward(&saved, &grad, N == 3, &mut grad_accum[0]);
        let needs = bias::needs(needs);
        let mut wanted = gradients.into_iter().zip(needs).map(|(dx, needs)| needs.then_some(dx));
        std::array::from_fn(|_| wanted.next().flatten())
    }
}

#[cfg(test)]
mod tests;
