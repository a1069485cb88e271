use burn::module::{Module, Param};
use burn::tensor::{Tensor, activation};
use longwall_kernels::attention::{Activation, Projection};
use longwall_kernels::backend::OpBackend;

use super::Linear;
use super::time::Past;
use crate::init::Init;

/// What a variant projects beside q, k and v: W x + b or W f(W_a x) + b, then perhaps a short
/// convolution.
#[derive(Module, Debug)]
pub struct SideProjection<B: OpBackend> {
    /// W_a, into the inner channels of a low-rank projection.
    pub inner: Option<Linear<B>>,
    /// W and b.
    pub outer: Linear<B>,
    /// Taps of the convolution, `[features, taps]`.
    pub conv: Option<Param<Tensor<B, 2>>>,
    #[module(skip)]
    activation: Activation,
}

impl<B: OpBackend> SideProjection<B> {
    pub(crate) fn new(init: &Init<B>, width: usize, spec: &Projection) -> Self {
        let rank = spec.low_rank.map(|low_rank| low_rank.rank);
        let mut outer =
            Linear::new(&init.part("outer"), rank.unwrap_or(width), spec.features, false);
        outer.bias = spec.bias.as_ref().map(|start| init.part("bias").start(spec.features, start));
        SideProjection {
            inner: rank.map(|rank| Linear::new(&init.part("inner"), width, rank, false)),
            outer,
            conv: spec.conv.map(|taps| conv_taps(&init.part("conv"), spec.features, taps)),
            activation: spec.low_rank.map_or(Activation::Identity, |low_rank| low_rank.activation),
        }
    }

    /// `[batch, n, width]` to `[batch, n, features]`; `slot` is the convolution's.
    pub(super) fn forward(&self, slot: usize, x: Tensor<B, 3>, past: &mut Past<B>) -> Tensor<B, 3> {
        let x = match &self.inner {
            None => x,
            Some(inner) => match (inner.forward(x), self.activation) {
                (x, Activation::Identity) => x,
                (x, Activation::Tanh) => x.tanh(),
                (x, Activation::Sigmoid) => activation::sigmoid(x),
            },
        };
        let y = self.outer.forward(x);
        match &self.conv {
            Some(taps) => past.conv(slot, y, taps.val(), false),
            None => y,
        }
    }
}

/// Initial taps `[channels, taps]`. Uniform in ±1/√taps would be a convolution's usual start; this
/// is a normal of that spread.
pub(super) fn conv_taps<B: OpBackend>(
    init: &Init<B>,
    channels: usize,
    taps: usize,
) -> Param<Tensor<B, 2>> {
    init.normal([channels, taps], 1.0 / (3.0 * taps as f32).sqrt())
}
