//! What the rows of a stream hand over to the rows that continue them.

use burn::tensor::{DType, FloatDType, Tensor};
use longwall_kernels::backend::OpBackend;

use super::time::History;

/// The parts of what a block's rows hand over, `[rows, elements]` in f32: read in order, and replaced in the same order.
pub(super) struct Carried<'a, B: OpBackend> {
    all: &'a mut Tensor<B, 2>,
    /// Elements that are read.
    read: usize,
    replaced: Vec<Tensor<B, 2>>,
}

impl<'a, B: OpBackend> Carried<'a, B> {
    /// Before the first part.
    pub fn of(all: &'a mut Tensor<B, 2>) -> Self {
        Carried { all, read: 0, replaced: vec![] }
    }

    /// The next `elements` of each row, if that is not 0.
    pub fn next(&mut self, elements: usize) -> Option<Tensor<B, 2>> {
        if elements == 0 {
            return None;
        }
        let first = self.read;
        self.read += elements;
        Some(self.all.clone().narrow(1, first, elements))
    }

    /// The next history, of `tokens` inputs of `channels` in the type `dtype`.
    pub fn next_history(&mut self, [tokens, channels]: [usize; 2], dtype: DType) -> History<B> {
        let rows = self.all.dims()[0];
        let held = self.next(tokens * channels);
        History::of(held.map(|x| x.reshape([rows, tokens, channels]).cast(dtype)))
    }

    /// Replaces the next part, if there is one.
    pub fn replace(&mut self, part: Option<Tensor<B, 2>>) {
        self.replaced.extend(part);
    }

    /// Replaces the next part by a history.
    pub fn replace_history(&mut self, history: History<B>) {
        let flat = history.into_held().map(|x| {
            let [rows, tokens, channels] = x.dims();
            x.reshape([rows, tokens * channels]).cast(FloatDType::F32)
        });
        self.replace(flat);
    }

    /// Joins the parts that were replaced, without a gradient.
    ///
    /// # Panics
    /// When they have other sizes than those that were read.
    pub fn finish(self) {
        let after = Tensor::cat(self.replaced, 1).detach();
        assert_eq!(after.dims(), self.all.dims(), "what rows hand over");
        assert_eq!(after.dims()[1], self.read, "elements that were read");
        *self.all = after;
    }
}
