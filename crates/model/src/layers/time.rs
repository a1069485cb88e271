//! Short convolutions and token shifts: what a layer reads from earlier tokens outside attention.

use burn::tensor::{Int, Tensor, s};
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::short_conv::short_conv;

use super::span::SharedRows;

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
        let (n, kept) = (x.dims()[1], held.dims()[1]);
        let all = Tensor::cat(vec![held, x], 1);
        let starts = starts_after(documents, kept);
        self.0 = Some(last_inputs(&all, kept, &starts));
        short_conv(all, weight, silu, starts).narrow(1, kept, n)
    }
}

/// The convolution of this rank's part of shared rows, `x` `[batch, n, channels]`, after the last inputs of the part
/// before.
fn conv_part<B: OpBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    silu: bool,
    rows: &SharedRows<B>,
) -> Tensor<B, 3> {
    let (n, kept) = (x.dims()[1], weight.dims()[1] - 1);
    let held = rows.of_part_before(last_inputs(&x, kept, rows.own_documents()));
    let starts = starts_after(rows.own_documents(), kept);
    short_conv(Tensor::cat(vec![held, x], 1), weight, silu, starts).narrow(1, kept, n)
}

/// The last `kept` inputs of `x`, 0 before the document of the last one; `starts` are places in `x`, or below 0 before
/// it.
fn last_inputs<B: OpBackend>(
    x: &Tensor<B, 3>,
    kept: usize,
    starts: &DocumentStarts<B>,
) -> Tensor<B, 3> {
    let [batch, len, _] = x.dims();
    let last = x.clone().narrow(1, len - kept, kept);
    let Some(starts) = starts else { return last };
    let last_start = starts.clone().narrow(1, len - 1, 1).expand([batch, kept]);
    let places = Tensor::<B, 1, Int>::arange((len - kept) as i64..len as i64, &last.device());
    let places = places.cast(starts.dtype()).unsqueeze::<2>().expand([batch, kept]);
    last.mask_fill(places.lower(last_start).unsqueeze_dim(2), 0.0)
}

/// `documents` as places in rows with `kept` inputs before them. A document that began before a row may have begun
/// before all of those.
fn starts_after<B: OpBackend>(documents: &DocumentStarts<B>, kept: usize) -> DocumentStarts<B> {
    let starts = documents.as_ref()?;
    let before = starts.clone().lower_elem(0);
    let places = (starts.clone() + kept as i64).mask_fill(before, 0);
    let options = (&places.device(), places.dtype());
    let held = Tensor::<B, 2, Int>::zeros([starts.dims()[0], kept], options);
    Some(Tensor::cat(vec![held, places], 1))
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
    /// Those of the part before, on another rank: the call has a part of these rows.
    Part(&'a SharedRows<B>),
}

impl<B: OpBackend, H> Preceding<'_, B, H> {
    /// The same for one part of the layer, with the histories that `part` selects.
    pub fn part<P>(&mut self, part: impl FnOnce(&mut H) -> &mut P) -> Preceding<'_, B, P> {
        match self {
            Preceding::Nothing(documents) => Preceding::Nothing(documents),
            Preceding::Held(histories) => Preceding::Held(part(histories)),
            Preceding::Rows(documents, histories) => Preceding::Rows(documents, part(histories)),
            Preceding::Part(rows) => Preceding::Part(rows),
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
            Preceding::Part(rows) => conv_part(x, weight, silu, rows),
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
