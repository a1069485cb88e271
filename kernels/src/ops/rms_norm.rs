//! Root-mean-square normalisation over the last dimension.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};

use crate::backend::{Op, OpBackend, primitive, tensor};

/// y = x / √(mean(x²) + eps) · weight, with the mean over the last dimension (Zhang and Sennrich,
/// 2019, equation 4).
///
/// - `x`: `[…, width]`; a view with strides is read as it lies
/// - `weight`: `[width]`
///
/// Returns the shape of `x`, in the memory order of `x`.
///
/// # Panics
/// When the sizes do not fit.
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
    fn reference<B: Backend>(
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
}
