//! PaTH on CUDA's tensor cores, in bf16, in memory linear in seq_len but for a logarithm (`docs/path.md`): kernels for
//! blocks of 64 tokens, moves to the levels above them by products with transforms, and attention on the flash core,
//! forward over all levels at once, backward level by level.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod attend;
mod blocks;
mod decode;
mod levels;
mod moves;
mod moves_back;
mod parts;
mod split;
mod sums;

use burn::tensor::DType;

use self::attend::attend;
use self::blocks::{BLOCK, BlockGrads, BlockUpstream, Blocks};
pub use self::decode::{PathKvCache, Tokens};
use self::levels::{Masks, Moved, MovedGradients, Saved, middle};
use self::parts::{Half, Level};
use self::sums::sum_of_levels;
use super::op::Path;
use crate::attention::decay::{self, DecaySums};
use crate::attention::flash::weight::SoftmaxOutput;
use crate::attention::flash::{self, Heads, row_dots};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, reshaped, zeros};
use crate::ops::cuda::{dims, integers};

/// Whether the kernels serve `batch` sequences with `heads` query heads of `head_dim` channels.
pub fn serves(dtype: DType, batch: usize, heads: usize, head_dim: usize) -> bool {
    flash::serves(dtype, batch * heads, head_dim) && Blocks::serve(dtype, head_dim)
}

/// The most sequences of `seq_len` tokens, with [query heads, kv heads] of `head_dim` channels, in one call: a grid has
/// at most 65,535 blocks along its second dimension, where in the backward pass a level's pairs of parts are sequences of
/// their own; and see [`Blocks::most_tokens`].
pub fn most_sequences(heads: [usize; 2], head_dim: usize, seq_len: usize) -> usize {
    let of_grid = 65_535 / (heads[0] * seq_len.div_ceil(2 * BLOCK).max(1));
    let of_blocks = Blocks::most_tokens(heads, head_dim) / seq_len.next_multiple_of(BLOCK).max(1);
    of_grid.min(of_blocks)
}

/// Bytes that a sequence of `seq_len` tokens, with [query heads, kv heads] of `head_dim` channels, keeps for the
/// backward pass beside inputs and outputs: G, R, and the queries and keys of all levels.
pub fn saved_bytes([heads, kv_heads]: [usize; 2], head_dim: usize, seq_len: usize) -> usize {
    let padded = seq_len.next_multiple_of(BLOCK);
    let levels = Level::all(1, padded, BLOCK);
    let rows: usize = levels.iter().map(|level| level.sequences() * level.part).sum();
    let parts = padded / BLOCK + middle(&levels).iter().map(Level::parts).sum::<usize>();
    let of_vectors = rows * (heads + kv_heads) * head_dim;
    let sums_of_two = kv_heads * (parts * head_dim * head_dim + padded * BLOCK);
    DType::BF16.size() * (of_vectors + 2 * sums_of_two)
}

/// One call: its blocks, and the levels above them.
struct Call {
    blocks: Blocks,
    masks: Masks,
    levels: Vec<Level>,
}

impl Call {
    fn new(
        op: &Path,
        [q, k, v, w, beta]: [&CudaTensor; 5],
        decay: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
    ) -> Self {
        let [batch, kv_heads, tokens, _] = dims(beta)[..] else {
            unreachable!("beta has four dimensions")
        };
        let beta = reshaped(beta, &[batch, kv_heads, tokens]);
        let documents = documents.map(|x| integers(x, &[batch, tokens], "document starts"));
        let decay = decay.map(DecaySums::new);
        let blocks = Blocks::new([q, k, v, w], &beta, op.scale)
            .window(op.window)
            .documents(documents.as_ref())
            .decay(decay.as_ref());
        let masks = Masks { window: op.window, documents, decay };
        let levels = Level::all(batch, tokens.next_multiple_of(BLOCK), BLOCK);
        Call { blocks, masks, levels }
    }
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub(super) fn forward(
    op: &Path,
    inputs: [&CudaTensor; 5],
    decay: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    let [batch, heads, tokens, head_dim] = dims(inputs[0])[..] else {
        unreachable!("q has four dimensions")
    };
    let served = serves(inputs[0].dtype, batch, heads, head_dim)
        && batch <= most_sequences([heads, dims(inputs[1])[1]], head_dim, tokens)
        && inputs.iter().all(|x| !dims(x).contains(&0));
    if !served {
        return None;
    }
    let call = Call::new(op, inputs, decay, documents);
    let (of_blocks, own) = call.blocks.forward();
    let moved = Moved::new(&call.levels, &of_blocks);
    let [q, k, v, ..] = inputs;
    let SoftmaxOutput { o: output, lse, .. } = attend([q, k, v], own, &moved, &call.masks);
    let mut saved = vec![];
    if needs {
        let Moved { q, k, blocks, above } = &moved;
        let kept = [&output, &lse, &of_blocks.inverses, q, k, blocks, above];
        saved = inputs.into_iter().chain(decay).chain(kept).cloned().collect();
    }
    Some(Forward { output, saved })
}

/// The gradients of q, k, v, w, β and, if there is one, the log decay, from what [`forward`] saved.
pub(super) fn backward(
    op: &Path,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, w, beta, decay @ .., output, lse, inverses, moved_q, moved_k, blocks, above] =
        saved
    else {
        unreachable!("the forward pass saves its inputs, o and lse, and what it has moved")
    };
    let call = Call::new(op, [q, k, v, w, beta], decay.first(), documents);
    let delta = row_dots(&Heads::new(output), &Heads::new(grad));
    let saved = Saved { grad, lse, delta: &delta };
    let [moved_q, moved_k, blocks, above] = [moved_q, moved_k, blocks, above].map(Clone::clone);
    let moved = Moved { q: moved_q, k: moved_k, blocks, above };
    let [batch, heads, tokens, head_dim] = dims(q)[..] else {
        unreachable!("q has four dimensions")
    };
    let kv_heads = dims(k)[1];
    let padded = tokens.next_multiple_of(BLOCK);
    let of_queries = [batch, heads, tokens];
    let sums = decay.first().map(|x| [(); 2].map(|()| zeros(x, &of_queries, DType::F32)));
    let of_vectors = [heads, kv_heads].map(|heads| [batch, padded, heads, head_dim]);
    let mut gradients: Option<MovedGradients> = None;
    let mut of_values = Vec::with_capacity(call.levels.len());
    for (i, level) in call.levels.iter().enumerate().rev() {
        let rows = moved.rows(&call.levels, i, v);
        let of_scores = call.masks.backward(level, &rows, &saved);
        if let (Some([ds_rows, ds_columns]), Some([rows, columns])) = (&sums, &of_scores.sums) {
            level.add_rows(ds_rows, rows, level.half(Half::Second), level.part);
            level.add_rows(ds_columns, columns, level.half(Half::First), 0);
        }
        gradients = Some(match gradients {
            Some(next) => {
                let transforms = moved.transforms(&call.levels, i);
                next.retreat(level, &rows, &of_scores, &transforms)
            }
            None => MovedGradients::last(q, of_vectors, Some((level, &of_scores))),
        });
        of_values.push(of_scores.dv);
    }
    of_values.reverse();
    let d_v = sum_of_levels(q, of_vectors[1], &of_values);
    let gradients = gradients.unwrap_or_else(|| MovedGradients::last(q, of_vectors, None));
    let BlockGrads { q, k, v, w, beta } = call.blocks.backward(
        inverses,
        &BlockUpstream {
            d_o: grad,
            lse,
            delta: &delta,
            d_q: &gradients.q,
            d_k: &gradients.k,
            d_v: &d_v,
            d_r: &gradients.transforms,
            ds: sums.as_ref().map(|sums| sums.each_ref()),
        },
    );
    let beta = reshaped(&beta, &[batch, kv_heads, tokens, 1]);
    let log_decay = sums.map(|[rows, columns]| decay::gradient(rows, columns));
    [q, k, v, w, beta].into_iter().chain(log_decay).collect()
}
