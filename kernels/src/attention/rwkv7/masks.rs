//! The masks inside a chunk, and those of documents between chunks.
use burn::tensor::{Int, Tensor, TensorData};

use super::recurrence::scale_groups;
use crate::backend::OpBackend;

/// 1 where `keep(row, column)`, else 0: `[1, 1, size, size]`.
pub(super) fn mask<B: OpBackend>(
    size: usize,
    device: &B::Device,
    keep: impl Fn(usize, usize) -> bool,
) -> Tensor<B, 4> {
    let values: Vec<f32> =
        (0..size * size).map(|at| f32::from(u8::from(keep(at / size, at % size)))).collect();
    Tensor::from_data(TensorData::new(values, [1, 1, size, size]), device)
}

/// Multiplies every matrix of `x` by `mask`, which is one matrix `[1, 1, …]` for all or one for each.
pub(super) fn masked<B: OpBackend>(x: Tensor<B, 4>, mask: &Tensor<B, 4>) -> Tensor<B, 4> {
    let shape = x.dims();
    let [rows, chunks, height, width] = mask.dims();
    // Flattened to rows, so that a mask for all is one broadcast row.
    let x = x.reshape([-1, (height * width) as i32]);
    (x * mask.clone().reshape([rows * chunks, height * width])).reshape(shape)
}

/// The masks inside a chunk, as factors 0 and 1.
pub(super) struct Masks<B: OpBackend> {
    /// Earlier tokens, `[rows or 1, chunks or 1, size, size]`.
    pub(super) before: Tensor<B, 4>,
    /// Earlier tokens and the token itself, `[…, …, group · size, size]`.
    pub(super) up_to: Tensor<B, 4>,
    /// Only with documents.
    ends: Option<DocumentEnds<B>>,
}

/// The masks of documents between chunks.
struct DocumentEnds<B: OpBackend> {
    /// Tokens whose document started before the chunk, `[rows, chunks, size, 1]`.
    carried: Tensor<B, 4>,
    /// Tokens of the document that the chunk ends in, `[rows, chunks, size, 1]`.
    sees_end: Tensor<B, 4>,
}

impl<B: OpBackend> Masks<B> {
    pub(super) fn causal(size: usize, group: usize, device: &B::Device) -> Self {
        let before = mask(size, device, |i, j| j < i);
        let up_to = mask::<B>(size, device, |i, j| j <= i).repeat_dim(2, group);
        Masks { before, up_to, ends: None }
    }

    /// The masks for document starts `[batch, tokens]` of the tokens from `first` on.
    pub(super) fn of_documents(
        starts: Tensor<B, 2, Int>,
        first: usize,
        size: usize,
        kv_heads: usize,
        group: usize,
    ) -> Self {
        let [batch, tokens] = starts.dims();
        let count = tokens.div_ceil(size);
        let missing = count * size - tokens;
        // Tokens that fill the last chunk belong to its last document.
        let starts = if missing == 0 {
            starts
        } else {
            let last = starts.clone().narrow(1, tokens - 1, 1).repeat_dim(1, missing);
            Tensor::cat(vec![starts, last], 1)
        };
        let rows = batch * kv_heads;
        let starts = starts
            .reshape([batch, 1, count * size])
            .repeat_dim(1, kv_heads)
            .reshape([rows, count, size, 1]);

        let square = [rows, count, size, size];
        let of_column = starts.clone().swap_dims(2, 3).expand(square);
        let same = starts.clone().expand(square).equal(of_column).float();
        let device = same.device();
        let begins = Tensor::<B, 1, Int>::arange(0..count as i64, &device) * size as i64;
        let begins = (begins + first as i64).cast(starts.dtype()).reshape([1, count, 1, 1]);
        let end = starts.clone().narrow(2, size - 1, 1).expand(starts.dims());
        let causal = Masks::causal(size, group, &device);
        Masks {
            before: masked(same.clone(), &causal.before),
            up_to: masked(same.repeat_dim(2, group), &causal.up_to),
            ends: Some(DocumentEnds {
                carried: starts.clone().lower(begins.expand(starts.dims())).float(),
                sees_end: starts.equal(end).float(),
            }),
        }
    }

    /// Zeros the rows whose document starts inside the chunk, which do not see the state before it.
    pub(super) fn carry(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.ends {
            None => x,
            Some(ends) => x * ends.carried.clone(),
        }
    }

    /// As [`Masks::carry`], for the rows of a group of heads.
    pub(super) fn carry_groups(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.ends {
            None => x,
            Some(ends) => scale_groups(x, ends.carried.clone()),
        }
    }

    /// Zeros the rows whose document ends before the chunk does.
    pub(super) fn keep(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.ends {
            None => x,
            Some(ends) => x * ends.sees_end.clone(),
        }
    }

    /// The decay `[rows, chunks, 1, head_dim]` over the whole chunk, 0 where its end does not see
    /// the state before it.
    pub(super) fn carry_to_end(&self, decay: Tensor<B, 4>) -> Tensor<B, 4> {
        match &self.ends {
            None => decay,
            Some(ends) => {
                let last = ends.carried.dims()[2] - 1;
                decay * ends.carried.clone().narrow(2, last, 1)
            }
        }
    }
}
