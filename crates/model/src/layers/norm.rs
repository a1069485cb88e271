use burn::module::{Module, Param};
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::linear::{InputNorm, gelu_of_few_rows, linears};

use crate::config::NormKind;
use crate::init::WeightInit;

/// ε of all norms, added to the variance or to the mean square.
pub(crate) const NORM_EPS: f32 = 1e-5;

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
        self.of_input().forward(x)
    }

    fn of_input(&self) -> InputNorm<B> {
        InputNorm {
            weight: self.weight.val(),
            bias: self.bias.as_ref().map(Param::val),
            centred: self.kind == NormKind::LayerNorm,
            eps: NORM_EPS,
        }
    }
}

/// What attention or an MLP reads: x, or the norm of x, which a product of few rows applies itself.
pub(super) struct Input<'a, B: OpBackend> {
    /// `[batch, n, width]`
    x: Tensor<B, 3>,
    norm: Option<&'a Norm<B>>,
}

impl<'a, B: OpBackend> Input<'a, B> {
    /// x itself.
    pub fn of(x: Tensor<B, 3>) -> Self {
        Input { x, norm: None }
    }

    /// The norm of x.
    pub fn normed(x: Tensor<B, 3>, norm: &'a Norm<B>) -> Self {
        Input { x, norm: Some(norm) }
    }

    /// `[batch, n, width]`. Each call computes the norm.
    pub fn value(&self) -> Tensor<B, 3> {
        match self.norm {
            Some(norm) => norm.forward(self.x.clone()),
            None => self.x.clone(),
        }
    }

    /// The outputs of linear layers, weights and biases.
    pub fn linears(&self, layers: Vec<(Tensor<B, 2>, Option<Tensor<B, 1>>)>) -> Vec<Tensor<B, 3>> {
        linears(self.x.clone(), self.norm.map(Norm::of_input), layers)
    }

    /// As [`gelu_of_few_rows`].
    pub fn gelu_of_few_rows(&self, weight: Tensor<B, 2>) -> Option<Tensor<B, 3>> {
        gelu_of_few_rows(&self.x, self.norm.map(Norm::of_input).as_ref(), weight)
    }
}
