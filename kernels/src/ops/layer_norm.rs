//! Layer normalisation over the last dimension.

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};

use crate::backend::{Op, OpBackend, primitive, tensor};

/// y = (x − mean(x)) / √(var(x) + eps) · weight + bias, with mean and variance over the last
/// dimension (Ba et al., 2016, equation 4). The variance is the biased one.
///
/// - `x`: `[…, width]`
/// - `weight`, `bias`: `[width]`
///
/// Returns the shape of `x`.
///
/// # Panics
/// When the sizes do not fit.
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
    fn plain<B: Backend>(
        &self,
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: Option<FloatTensor<B>>,
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let width = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / width;
        let x = tensor::<B, 2>(B::float_reshape(x, [rows, width].into()));
        let centred = x.clone() - x.mean_dim(1);
        let variance = (centred.clone() * centred.clone()).mean_dim(1);
        let y = centred / (variance + self.eps).sqrt() * tensor::<B, 1>(weight).unsqueeze();
        let y = match bias {
            None => y,
            Some(bias) => y + tensor::<B, 1>(bias).unsqueeze(),
        };
        B::float_reshape(primitive(y), shape)
    }
}

impl Op<2> for LayerNorm {
    fn reference<B: Backend>(
        &self,
        [x, weight]: [FloatTensor<B>; 2],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        self.plain::<B>(x, weight, None)
    }
}

impl Op<3> for LayerNorm {
    fn reference<B: Backend>(
        &self,
        [x, weight, bias]: [FloatTensor<B>; 3],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        self.plain::<B>(x, weight, Some(bias))
    }
}
