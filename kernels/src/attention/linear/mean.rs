//! The mean of values on CUDA, from their weighted sum and the sum of the weights.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};

use super::SUM_EPS;
use crate::Cuda;
use crate::attention::flash::{Heads, row_dots};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// Channels of ones after those of values: the gradient of the sum of weights has one for each of its two parts.
pub const ONES: usize = 2;

/// o = y / (n + 1e-6), `[batch, heads, seq_len, values]` in bf16, where y `[batch, heads, seq_len, channels]` in f32 has
/// the weighted sum in its first channels, and the sum of weights n in the next [`ONES`].
///
/// With g = do / n, the gradient of a weight is g·v − g·o: less than either where values are alike. So g is rounded to
/// bf16 first, and g·o is exact beside it: rounded to bf16 in the first channel of ones, with the rest in the second.
#[derive(Clone, Debug)]
pub struct Mean {
    /// Channels of a value.
    pub values: usize,
}

impl Mean {
    /// The quotient, and its divisor.
    pub fn of<B: OpBackend>(&self, y: Tensor<B, 4>) -> [Tensor<B, 4>; 2] {
        let sum = y.clone().narrow(3, self.values, 1) + SUM_EPS;
        [y.narrow(3, 0, self.values) / sum.clone(), sum]
    }
}

impl Op<1> for Mean {
    fn reference<B: OpBackend>(
        &self,
        [y]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let [o, _] = self.of(tensor::<B, 4>(y));
        primitive(o)
    }

    fn cuda_forward(
        &self,
        [y]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        let [o, sum] = self.of(tensor::<Cuda, 4>(y.clone()));
        let output = primitive(o.cast(DType::BF16));
        let saved = if needs[0] { vec![output.clone(), primitive(sum)] } else { vec![] };
        Some(Forward { output, saved })
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        let [o, sum] = &saved[..] else { unreachable!("two tensors saved") };
        let g = tensor::<Cuda, 4>(grad).cast(DType::F32) / tensor::<Cuda, 4>(sum.clone());
        let g = g.cast(DType::BF16);
        let [batch, heads, seq_len, values] = g.dims();
        let dots = row_dots(&Heads::new(&primitive(g.clone())), &Heads::new(o));
        let of_sum = -tensor::<Cuda, 3>(dots).reshape([batch, heads, seq_len, 1]);
        let first = of_sum.clone().cast(DType::BF16);
        let second = (of_sum - first.clone().cast(DType::F32)).cast(DType::BF16);
        let others = [batch, heads, seq_len, channels(values) - values - ONES];
        let others = Tensor::zeros(others, (&g.device(), DType::BF16));
        [Some(primitive(Tensor::cat(vec![g, first, second, others], 3)))]
    }
}

/// Channels of values with those of ones, and zeros up to a number that CUDA's core serves well.
pub fn channels(values: usize) -> usize {
    (values + ONES).next_multiple_of(32)
}
