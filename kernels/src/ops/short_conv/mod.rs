//! The short depthwise causal convolution over time.

mod cpu;
mod cuda;
mod kernel;

use burn::tensor::activation::silu;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};
use burn_flex::FlexTensor;

use crate::backend::{Forward, Op, OpBackend, int_tensor, primitive, tensor};
use crate::cuda::CudaTensor;

/// The depthwise convolution y_tc = f(Σ_{j < taps} weight_cj · x_{t − taps + 1 + j, c}), with f = SiLU or
/// the identity.
///
/// The last tap multiplies the current row; rows before the first, or before the document's start,
/// are 0. To decode, run it on the last taps − 1 rows followed by the new ones, and keep the results of
/// the new ones.
///
/// - `x`: `[batch, seq_len, channels]`
/// - `weight`: `[channels, taps]`
/// - `silu`: whether f is SiLU
/// - `document_starts`: `[batch, seq_len]`, the row at which each position's document starts,
///   non-decreasing along a sequence
///
/// Returns the shape of `x`.
///
/// # Panics
/// When the sizes do not match.
pub fn short_conv<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    silu: bool,
    document_starts: Option<Tensor<B, 2, Int>>,
) -> Tensor<B, 3> {
    let ints = document_starts.map(Tensor::into_primitive);
    tensor(B::run(
        &ShortConv { silu },
        [primitive(x), primitive(weight)],
        ints.into_iter().collect(),
    ))
}

/// The operation: inputs x, weight; optional integer input document starts.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// Whether SiLU follows the convolution.
    pub silu: bool,
}

impl Op<2> for ShortConv {
    fn reference<B: OpBackend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let (x, weight) = (tensor::<B, 3>(x), tensor::<B, 2>(weight));
        let [batch, seq_len, channels] = x.dims();
        let taps = weight.dims()[1];
        let starts = ints.first().map(|starts| int_tensor::<B, 2>(starts.clone()));
        let mut y = x.zeros_like();
        for back in 0..taps.min(seq_len) {
            let mut shifted = x.clone();
            if back > 0 {
                let zeros = x.zeros_like().narrow(1, 0, back);
                shifted = Tensor::cat(vec![zeros, x.clone().narrow(1, 0, seq_len - back)], 1);
            }
            if let Some(starts) = &starts {
                let source = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &x.device());
                let source = source.cast(starts.dtype()).unsqueeze::<2>() - back as i64;
                let outside = source.expand([batch, seq_len]).lower(starts.clone());
                shifted = shifted.mask_fill(outside.unsqueeze_dim(2), 0.0);
            }
            let tap = weight.clone().narrow(1, taps - 1 - back, 1);
            y = y + shifted * tap.reshape([1, 1, channels]);
        }
        primitive(if self.silu { silu(y) } else { y })
    }

    fn cpu_forward(
        &self,
        [x, weight]: &[FlexTensor; 2],
        ints: &[FlexTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::forward(x, weight, ints, self.silu))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        cpu::backward(&saved, ints, &grad, self.silu, needs)
    }

    fn cuda_forward(
        &self,
        [x, weight]: &[CudaTensor; 2],
        ints: &[CudaTensor],
        _needs: [bool; 2],
    ) -> Option<Forward<CudaTensor>> {
        let [output, x, weight] = cuda::forward(x, weight, ints, self.silu)?;
        Some(Forward { output, saved: vec![x, weight] })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; 2],
    ) -> [Option<CudaTensor>; 2] {
        let [dx, dw] = cuda::backward(&saved[0], &saved[1], ints, self.silu, &grad);
        [needs[0].then_some(dx), needs[1].then_some(dw)]
    }
}

#[cfg(test)]
mod tests;
