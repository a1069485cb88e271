use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::layer_norm::layer_norm;
use longwall_kernels::ops::rms_norm::rms_norm;

use crate::config::NormKind;
use crate::init::WeightInit;

const EPS: f32 = 1e-5;

/// Layer norm or RMS norm over the last dimension.
#[derive(Module, Debug)]
pub struct Norm<B: OpBackend> {
    /// Scale, `[width]`.
    pub weight: Param<Tensor<B, 1>>,
    /// Shift of a layer norm, `[width]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    #[module(skip)]
    kind: NormKind,
}

impl<B: OpBackend> Norm<B> {
    pub(crate) fn new(init: &WeightInit<B>, kind: NormKind, width: usize, bias: bool) -> Self {
        let bias = (bias && kind == NormKind::LayerNorm).then(|| init.constant(width, 0.0));
        Norm { weight: init.constant(width, 1.0), bias, kind }
    }

    /// `x` normalised, in the same shape.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        match self.kind {
            NormKind::LayerNorm => {
                layer_norm(x, self.weight.val(), self.bias.as_ref().map(Param::val), EPS)
            }
            NormKind::RmsNorm => rms_norm(x, self.weight.val(), EPS),
        }
    }
}
