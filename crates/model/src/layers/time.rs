//! Short convolutions and token shifts: what a layer reads from earlier tokens outside attention.

use burn::tensor::{Int, Tensor, s};
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::short_conv::short_conv;

/// What decoding keeps of a causal convolution: its last inputs, `[batch, up to taps − 1, channels]`;
/// `None` before the first token.
#[derive(Clone, Debug)]
pub(super) struct History<B: OpBackend>(Option<Tensor<B, 3>>);

impl<B: OpBackend> History<B> {
    /// The history before the first token.
    pub fn new() -> Self {
        History(None)
    }

    /// The history that holds these inputs.
    pub fn of(held: Option<Tensor<B, 3>>) -> Self {
        History(held)
    }

    /// The inputs held.
    pub fn into_held(self) -> Option<Tensor<B, 3>> {
        self.0
    }

    /// Elements held.
    pub fn elements(&self) -> usize {
        self.0.as_ref().map_or(0, |x| x.shape().num_elements())
    }

    /// The convolution of new inputs `x` `[batch, n, channels]` after those held; `weight` is
    /// `[channels, taps]`.
    fn conv(&mut self, x: Tensor<B, 3>, weight: Tensor<B, 2>, silu: bool) -> Tensor<B, 3> {
        let (n, taps) = (x.dims()[1], weight.dims()[1]);
        let all = match self.0.take() {
            Some(held) => Tensor::cat(vec![held, x], 1),
            None => x,
        };
        let len = all.dims()[1];
        self.0 = Some(all.clone().slice(s![.., len.saturating_sub(taps - 1)..]));
        short_conv(all, weight, silu, None).slice(s![.., len - n..])
    }

    /// As [`History::conv`], over whole rows of documents that start at `documents`, those that began before their row at −1.
    /// All taps − 1 inputs are held, 0 before a document's first token.
    fn conv_rows(
        &mut self,
        x: Tensor<B, 3>,
        weight: Tensor<B, 2>,
        silu: bool,
        documents: &DocumentStarts<B>,
    ) -> Tensor<B, 3> {
        let Some(held) = self.0.take() else {
            return short_conv(x, weight, silu, documents.clone());
        };
        let ([batch, n, _], kept) = (x.dims(), held.dims()[1]);
        let all = Tensor::cat(vec![held, x], 1);
        let mut last = all.clone().narrow(1, n, kept);
        // Places in `all`. A document that began before the row may have begun before all that is held.
        let starts = documents.as_ref().map(|starts| {
            let before = starts.clone().lower_elem(0);
            let places = (starts.clone() + kept as i64).mask_fill(before, 0);
            let options = (&places.device(), places.dtype());
            let held = Tensor::<B, 2, Int>::zeros([batch, kept], options);
            Tensor::cat(vec![held, places], 1)
        });
        if let Some(starts) = &starts {
            let last_start = starts.clone().narrow(1, n + kept - 1, 1).expand([batch, kept]);
            let places = Tensor::<B, 1, Int>::arange(n as i64..(n + kept) as i64, &last.device());
            let places = places.cast(starts.dtype()).unsqueeze::<2>().expand([batch, kept]);
            last = last.mask_fill(places.lower(last_start).unsqueeze_dim(2), 0.0);
        }
        self.0 = Some(last);
        short_conv(all, weight, silu, starts).narrow(1, kept, n)
    }
}

/// The tokens before those of a call.
pub(super) enum Preceding<'a, B: OpBackend, H> {
    /// None: the call has whole rows, of one or several packed documents.
    Nothing(&'a DocumentStarts<B>),
    /// Those of earlier decoding calls, in the layer's histories `H`.
    Held(&'a mut H),
    /// Those of the rows that the call's rows continue, in the layer's histories `H`. Documents that began before their
    /// row start at −1.
    Rows(&'a DocumentStarts<B>, &'a mut H),
}

impl<B: OpBackend, H> Preceding<'_, B, H> {
    /// The same for one part of the layer, with the histories that `part` selects.
    pub fn part<P>(&mut self, part: impl FnOnce(&mut H) -> &mut P) -> Preceding<'_, B, P> {
        match self {
            Preceding::Nothing(documents) => Preceding::Nothing(documents),
            Preceding::Held(histories) => Preceding::Held(part(histories)),
            Preceding::Rows(documents, histories) => Preceding::Rows(documents, part(histories)),
        }
    }
}

impl<B: OpBackend> Preceding<'_, B, History<B>> {
    /// A causal depthwise convolution: `x` `[batch, n, channels]`, `weight` `[channels, taps]`, whose
    /// last tap multiplies the current token; then SiLU, if `silu`.
    pub fn conv(self, x: Tensor<B, 3>, weight: Tensor<B, 2>, silu: bool) -> Tensor<B, 3> {
        match self {
            Preceding::Nothing(documents) => short_conv(x, weight, silu, documents.clone()),
            Preceding::Held(history) => history.conv(x, weight, silu),
            Preceding::Rows(documents, history) => history.conv_rows(x, weight, silu, documents),
        }
    }

    /// The token shift of `x` `[batch, n, width]`: x_t + μ ⊙ (x_{t−1} − x_t), a convolution with the
    /// taps μ and 1 − μ. Before a document's first token, x is 0.
    pub fn shift(self, x: Tensor<B, 3>, mu: Tensor<B, 1>) -> Tensor<B, 3> {
        let here = mu.ones_like() - mu.clone();
        let taps = Tensor::stack::<2>(vec![mu, here], 1).cast(x.dtype());
        self.conv(x, taps, false)
    }
}
