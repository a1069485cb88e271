use burn::tensor::{Tensor, s};
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::short_conv::short_conv;

/// The last inputs of each causal convolution of a layer, `[batch, up to taps − 1, channels]`;
/// `None` before the first token.
pub(super) type History<B> = Vec<Option<Tensor<B, 3>>>;

/// Elements held.
pub(super) fn history_elements<B: OpBackend>(history: &History<B>) -> usize {
    history.iter().flatten().map(|x| x.shape().num_elements()).sum()
}

/// What stands before a layer's input in time.
pub(super) enum Past<'a, B: OpBackend> {
    /// Nothing: the input is whole rows, of one document each or packed.
    Rows(&'a DocumentStarts<B>),
    /// The tokens of earlier calls.
    Earlier(&'a mut History<B>),
}

impl<B: OpBackend> Past<'_, B> {
    /// The causal convolution number `slot` of the layer: `x` `[batch, n, channels]`, `weight`
    /// `[channels, taps]`.
    pub fn conv(
        &mut self,
        slot: usize,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        silu: bool,
    ) -> Tensor<B, 3> {
        let history = match self {
            Past::Rows(documents) => return short_conv(x, weight, silu, (*documents).clone()),
            Past::Earlier(history) => &mut history[slot],
        };
        let (n, taps) = (x.dims()[1], weight.dims()[1]);
        let all = match history.take() {
            Some(old) => Tensor::cat(vec![old, x], 1),
            None => x,
        };
        let len = all.dims()[1];
        *history = Some(all.clone().slice(s![.., len.saturating_sub(taps - 1)..]));
        short_conv(all, weight, silu, None).slice(s![.., len - n..])
    }

    /// Token shift: x_t + μ ⊙ (x_{t−1} − x_t), a convolution with the taps μ and 1 − μ; x before
    /// the first token is 0.
    pub fn shift(&mut self, slot: usize, x: Tensor<B, 3>, mu: Tensor<B, 1>) -> Tensor<B, 3> {
        let here = mu.ones_like() - mu.clone();
        let taps = Tensor::stack::<2>(vec![mu, here], 1).cast(x.dtype());
        self.conv(slot, x, taps, false)
    }
}
