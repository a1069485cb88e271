use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::linear::{linear, linear_add};

use crate::init::WeightInit;

/// y = x Wᵀ + b.
#[derive(Module, Debug)]
pub struct Linear<B: OpBackend> {
    /// W, `[out_features, in_features]`.
    pub weight: Param<Tensor<B, 2>>,
    /// b, `[out_features]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
}

impl<B: OpBackend> Linear<B> {
    pub(crate) fn new(init: &WeightInit<B>, inputs: usize, outputs: usize, bias: bool) -> Self {
        let bias = bias.then(|| init.constant(outputs, 0.0));
        Linear { weight: init.weight([outputs, inputs]), bias }
    }

    /// A projection into the residual stream: the deeper the model, the smaller its initial weights.
    pub(crate) fn residual(
        init: &WeightInit<B>,
        inputs: usize,
        outputs: usize,
        bias: bool,
    ) -> Self {
        let bias = bias.then(|| init.constant(outputs, 0.0));
        Linear { weight: init.residual_weight([outputs, inputs]), bias }
    }

    /// `[batch, seq_len, in_features]` to `[batch, seq_len, out_features]`.
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        linear(x, self.weight.val(), self.bias.as_ref().map(Param::val))
    }

    /// W and b.
    pub(super) fn tensors(&self) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
        (self.weight.val(), self.bias.as_ref().map(Param::val))
    }

    /// [`Linear::forward`], added to `residual` `[batch, seq_len, out_features]` if there is one.
    pub(super) fn forward_onto(
        &self,
        x: Tensor<B, 3>,
        residual: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 3> {
        match residual {
            None => self.forward(x),
            Some(residual) if self.bias.is_none() => linear_add(x, self.weight.val(), residual),
            Some(residual) => residual + self.forward(x),
        }
    }
}
