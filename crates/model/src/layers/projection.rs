use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use longwall_kernels::attention::{LowRankActivation, ProjectionSpec};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::activation::sigmoid;
use longwall_kernels::ops::linear::linear;

use super::Linear;
use super::carried::Carried;
use super::time::{History, Preceding};
use crate::init::WeightInit;

/// A projection of an attention layer's input x, with token shift and convolution:
///
/// 1. token shift, x_t + μ ⊙ (x_{t−1} − x_t);
/// 2. y = W x + b, or with low rank y = W f(W_a x) + b;
/// 3. a causal depthwise convolution of y over time, optionally with SiLU.
///
/// Steps 1 and 3 are optional.
#[derive(Module, Debug)]
pub struct Projection<B: OpBackend> {
    /// W, `[features, width]`, or `[features, rank]` with low rank.
    pub weight: Param<Tensor<B, 2>>,
    /// b, `[features]`.
    pub bias: Option<Param<Tensor<B, 1>>>,
    /// W_a of a low-rank projection, `[rank, width]`.
    pub inner: Option<Linear<B>>,
    /// Taps of the convolution, `[features, taps]`.
    pub conv: Option<Param<Tensor<B, 2>>>,
    /// μ of the token shift, `[width]`.
    pub shift: Option<Param<Tensor<B, 1>>>,
    /// f.
    #[module(skip)]
    activation: LowRankActivation,
    /// Whether SiLU follows the convolution.
    #[module(skip)]
    silu: bool,
}

/// What decoding keeps of a projection.
#[derive(Clone, Debug)]
pub(super) struct ProjectionHistory<B: OpBackend> {
    /// Inputs of the token shift.
    pub shift: History<B>,
    /// Inputs of the convolution.
    pub conv: History<B>,
}

impl<B: OpBackend> ProjectionHistory<B> {
    /// Before the first token.
    pub fn new() -> Self {
        ProjectionHistory { shift: History::new(), conv: History::new() }
    }

    /// The next parts of what rows hand over.
    pub fn next_of(parts: &mut Carried<B>, shapes: [[usize; 2]; 2], dtype: DType) -> Self {
        let [shift, conv] = shapes.map(|shape| parts.next_history(shape, dtype));
        ProjectionHistory { shift, conv }
    }

    /// The inverse of [`ProjectionHistory::next_of`].
    pub fn replace_in(self, parts: &mut Carried<B>) {
        parts.replace_history(self.shift);
        parts.replace_history(self.conv);
    }

    /// Elements held.
    pub fn elements(&self) -> usize {
        self.shift.elements() + self.conv.elements()
    }
}

impl<B: OpBackend> Projection<B> {
    /// Only W x + b.
    pub(super) fn new(linear: Linear<B>) -> Self {
        let Linear { weight, bias } = linear;
        let activation = LowRankActivation::Identity;
        Projection { weight, bias, inner: None, conv: None, shift: None, activation, silu: false }
    }

    /// A projection that an attention kind asks for besides q, k and v.
    pub(super) fn extra(init: &WeightInit<B>, width: usize, spec: &ProjectionSpec) -> Self {
        let rank = spec.low_rank.map(|low_rank| low_rank.rank);
        let outer = Linear::new(&init.part("outer"), rank.unwrap_or(width), spec.features, false);
        let bias = |values| init.part("bias").variant_vector(spec.features, values);
        Projection {
            bias: spec.bias.as_ref().map(bias),
            inner: rank.map(|rank| Linear::new(&init.part("inner"), width, rank, false)),
            conv: spec.conv.map(|taps| conv_taps(&init.part("conv"), spec.features, taps)),
            activation: spec
                .low_rank
                .map_or(LowRankActivation::Identity, |low_rank| low_rank.activation),
            ..Projection::new(outer)
        }
    }

    /// Adds a convolution with these taps and SiLU, if there are taps.
    pub(super) fn with_silu_conv(self, taps: Option<Param<Tensor<B, 2>>>) -> Self {
        Projection { conv: taps, silu: true, ..self }
    }

    /// Adds a token shift with this μ, if there is one.
    pub(super) fn with_shift(self, mu: Option<Param<Tensor<B, 1>>>) -> Self {
        Projection { shift: mu, ..self }
    }

    /// `[batch, n, width]` to `[batch, n, features]`.
    pub(super) fn forward(
        &self,
        x: &Tensor<B, 3>,
        mut preceding: Preceding<B, ProjectionHistory<B>>,
    ) -> Tensor<B, 3> {
        let x = self.shifted(x, preceding.part(|history| &mut history.shift));
        self.convolved(self.linear(x), preceding.part(|history| &mut history.conv))
    }

    /// Inputs that the token shift and the convolution need of earlier tokens, as `[tokens, channels]`.
    pub(super) fn history_shapes(&self) -> [[usize; 2]; 2] {
        let shift = self.shift.as_ref().map_or([0, 0], |mu| [1, mu.dims()[0]]);
        let conv = self.conv.as_ref().map_or([0, 0], |taps| {
            let [channels, taps] = taps.dims();
            [taps - 1, channels]
        });
        [shift, conv]
    }

    /// Step 1: `x` and the result are `[batch, n, width]`.
    pub(super) fn shifted(
        &self,
        x: &Tensor<B, 3>,
        preceding: Preceding<B, History<B>>,
    ) -> Tensor<B, 3> {
        match &self.shift {
            Some(mu) => preceding.shift(x.clone(), mu.val()),
            None => x.clone(),
        }
    }

    /// Whether step 2 is W x + b of the layer's own input: no token shift, and no low rank.
    pub(super) fn reads_input(&self) -> bool {
        self.shift.is_none() && self.inner.is_none()
    }

    /// W and b.
    pub(super) fn tensors(&self) -> (Tensor<B, 2>, Option<Tensor<B, 1>>) {
        (self.weight.val(), self.bias.as_ref().map(Param::val))
    }

    /// Step 2, `[batch, n, width]` to `[batch, n, features]`.
    pub(super) fn linear(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let x = match &self.inner {
            None => x,
            Some(inner) => match (inner.forward(x), self.activation) {
                (x, LowRankActivation::Identity) => x,
                (x, LowRankActivation::Tanh) => x.tanh(),
                (x, LowRankActivation::Sigmoid) => sigmoid(x),
            },
        };
        linear(x, self.weight.val(), self.bias.as_ref().map(Param::val))
    }

    /// Step 3: `y` and the result are `[batch, n, features]`.
    pub(super) fn convolved(
        &self,
        y: Tensor<B, 3>,
        preceding: Preceding<B, History<B>>,
    ) -> Tensor<B, 3> {
        match &self.conv {
            Some(taps) => preceding.conv(y, taps.val(), self.silu),
            None => y,
        }
    }
}

/// Initial taps `[channels, taps]`: normal, with the standard deviation of the usual uniform
/// initialisation in ±1/√taps.
pub(super) fn conv_taps<B: OpBackend>(
    init: &WeightInit<B>,
    channels: usize,
    taps: usize,
) -> Param<Tensor<B, 2>> {
    init.normal([channels, taps], 1.0 / (3.0 * taps as f32).sqrt())
}
