//! PaTH on CUDA's tensor cores, in bf16, in memory linear in seq_len (`docs/path.md`): kernels for blocks of 64
//! tokens, and for each level above them attention on the flash core and moves by products with transforms.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod blocks;
mod decode;
mod join;
mod levels;
mod moves;
mod moves_back;
mod parts;
mod split;

use burn::tensor::DType;

use self::blocks::{BLOCK, BlockGrads, BlockUpstream, Blocks, OwnAttention};
pub use self::decode::{PathKvCache, Tokens};
use self::join::join_attention;
use self::levels::{Masks, Moved, MovedGradients, Saved};
use self::parts::{Half, Level};
use super::op::Path;
use crate::attention::decay::{self, DecaySums};
use crate::attention::flash::{self, Heads, row_dots};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, reshaped, zeros};
use crate::ops::cuda::{dims, integers};

/// Whether the kernels serve `batch` sequences with `heads` query heads of `head_dim` channels.
pub fn serves(dtype: DType, batch: usize, heads: usize, head_dim: usize) -> bool {
    flash::serves(dtype, batch * heads, head_dim) && Blocks::serve(dtype, head_dim)
}

/// The most sequences of `seq_len` tokens and `heads` query heads in one call: a grid has at most 65,535 blocks along
/// its second dimension, and a level's pairs of parts are sequences of their own.
pub fn most_sequences(heads: usize, seq_len: usize) -> usize {
    65_535 / (heads * seq_len.div_ceil(2 * BLOCK).max(1))
}

/// One call: its blocks, and the levels above them.
struct Call<'a> {
    v: &'a CudaTensor,
    blocks: Blocks,
    masks: Masks,
    levels: Vec<Level>,
}

impl<'a> Call<'a> {
    fn new(
        op: &Path,
        [q, k, v, w, beta]: [&'a CudaTensor; 5],
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
        Call { v, blocks, masks, levels }
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
        && batch <= most_sequences(heads, tokens)
        && inputs.iter().all(|x| !dims(x).contains(&0));
    if !served {
        return None;
    }
    let call = Call::new(op, inputs, decay, documents);
    let (moved, OwnAttention { o, lse }) = call.blocks.forward();
    let moved = Moved::new(&call.levels, moved);
    let of_levels = call.levels.iter().enumerate().map(|(i, level)| {
        let rows = moved.rows(i, level, call.v);
        call.masks.attend(level, &rows)
    });
    let of_levels: Vec<_> = of_levels.collect();
    let mut output = join_attention(&o, &lse, &call.levels, &of_levels);
    output.meta.swap(1, 2);
    let saved = match needs {
        true => inputs.into_iter().chain(decay).chain([&output, &lse]).cloned().collect(),
        false => vec![],
    };
    Some(Forward { output, saved })
}

/// The gradients of q, k, v, w, β and, if there is one, the log decay, from what [`forward`] saved.
pub(super) fn backward(
    op: &Path,
    saved: &[CudaTensor],
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Vec<CudaTensor> {
    let [q, k, v, w, beta, decay @ .., output, lse] = saved else {
        unreachable!("the forward pass saves its inputs, o and lse")
    };
    let call = Call::new(op, [q, k, v, w, beta], decay.first(), documents);
    let delta = row_dots(&Heads::new(output), &Heads::new(grad));
    let saved = Saved { grad, lse, delta: &delta };

    let moved = call.blocks.moved();
    let inverses = moved.inverses.clone();
    let moved = Moved::new(&call.levels, moved);
    let [batch, heads, tokens, head_dim] = dims(q)[..] else {
        unreachable!("q has four dimensions")
    };
    let kv_heads = dims(k)[1];
    let padded = tokens.next_multiple_of(BLOCK);
    let dv = zeros(q, &[batch, padded, kv_heads, head_dim], DType::F32);
    let of_queries = [batch, heads, tokens];
    let sums = decay.first().map(|x| [(); 2].map(|()| zeros(x, &of_queries, DType::F32)));
    let of_vectors = [heads, kv_heads].map(|heads| [batch, padded, heads, head_dim]);
    let mut gradients: Option<MovedGradients> = None;
    for (i, level) in call.levels.iter().enumerate().rev() {
        let rows = moved.rows(i, level, v);
        let of_scores = call.masks.backward(level, &rows, &saved);
        level.add(&dv, &of_scores.dv, Half::First);
        if let (Some([ds_rows, ds_columns]), Some([rows, columns])) = (&sums, &of_scores.sums) {
            level.add_rows(ds_rows, rows, level.half(Half::Second), level.part);
            level.add_rows(ds_columns, columns, level.half(Half::First), 0);
        }
        gradients = Some(match (gradients, moved.transforms(i)) {
            (Some(next), Some(transforms)) => next.retreat(level, &rows, &of_scores, transforms),
            _ => MovedGradients::last(q, of_vectors, Some((level, &of_scores))),
        });
    }
    let gradients = gradients.unwrap_or_else(|| MovedGradients::last(q, of_vectors, None));
    let BlockGrads { q, k, v, w, beta } = call.blocks.backward(
        &inverses,
        &BlockUpstream {
            d_o: grad,
            lse,
            delta: &delta,
            d_q: &gradients.q,
            d_k: &gradients.k,
            d_v: &dv,
            d_r: &gradients.transforms,
            ds: sums.as_ref().map(|sums| sums.each_ref()),
        },
    );
    let beta = reshaped(&beta, &[batch, kv_heads, tokens, 1]);
    let log_decay = sums.map(|[rows, columns]| decay::gradient(rows, columns));
    [q, k, v, w, beta].into_iter().chain(log_decay).collect()
}
