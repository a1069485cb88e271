//! PaTH on CUDA's tensor cores, in bf16, in memory linear in seq_len (`docs/path.md`): kernels for blocks of 64
//! tokens, and for each level above them attention on the flash core and moves by products with transforms.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod blocks;
mod levels;
mod moves;
mod moves_back;
mod parts;
mod split;

use burn::tensor::DType;

use self::blocks::{BlockForward, BlockInputs, BlockUpstream};
use self::levels::{LevelRows, Masks, MovedGradients, Saved};
use self::parts::{Half, Level, rounded};
use super::op::Path;
use crate::attention::decay::DecaySums;
use crate::attention::flash::{self, Heads, row_dots};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, zeros};
use crate::ops::cuda::dims;
use crate::ops::prefix_sum::cuda::prefix_sum;

/// Tokens of a block.
const BLOCK: usize = 64;

/// Whether the kernels serve `batch` sequences with `heads` query heads of `head_dim` channels.
pub fn serves(dtype: DType, batch: usize, heads: usize, head_dim: usize) -> bool {
    flash::serves(dtype, batch * heads, head_dim) && head_dim.is_multiple_of(16) && head_dim <= 128
}

/// The most sequences of `seq_len` tokens and `heads` query heads in one call: a grid has at most 65,535 blocks along
/// its second dimension, and a level's pairs of parts are sequences of their own.
pub fn most_sequences(heads: usize, seq_len: usize) -> usize {
    65_535 / (heads * seq_len.div_ceil(2 * BLOCK).max(1))
}

/// The inputs of a call.
struct Call<'a> {
    blocks: BlockInputs<'a>,
    masks: Masks,
    levels: Vec<Level>,
}

impl<'a> Call<'a> {
    fn new(
        op: &Path,
        [q, k, v, w, beta]: [&'a CudaTensor; 5],
        decay: Option<&CudaTensor>,
        documents: Option<&'a CudaTensor>,
    ) -> Self {
        let [batch, _, tokens, _] = dims(q)[..] else { unreachable!("q has four dimensions") };
        let masks = Masks {
            window: op.window,
            documents: documents.cloned(),
            decay: decay.map(DecaySums::new),
        };
        let padded = tokens.next_multiple_of(BLOCK);
        let blocks = BlockInputs { q, k, v, w, beta, scale: op.scale };
        Call { blocks, masks, levels: Level::all(batch, padded, BLOCK) }
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
    let BlockForward { mut moved, o, lse } = blocks::forward(&call.blocks, &call.masks);
    for (i, level) in call.levels.iter().enumerate() {
        let rows = moved.rows(level, call.blocks.v, false);
        level.add_attention(&o, &lse, &call.masks.attend(level, &rows));
        if i + 1 < call.levels.len() {
            moved.advance(level);
        }
    }
    let mut output = rounded(&o);
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

    // The moves again, keeping what each level's gradients need.
    let BlockForward { mut moved, .. } = blocks::forward(&call.blocks, &call.masks);
    let mut kept: Vec<(LevelRows, CudaTensor)> = vec![];
    for (i, level) in call.levels.iter().enumerate() {
        kept.push((moved.rows(level, v, true), moved.transforms.clone()));
        if i + 1 < call.levels.len() {
            moved.advance(level);
        }
    }

    let [batch, heads, tokens, head_dim] = dims(q)[..] else {
        unreachable!("q has four dimensions")
    };
    let kv_heads = dims(k)[1];
    let dv = zeros(q, &[batch, tokens, kv_heads, head_dim], DType::F32);
    let sums = decay.first().map(|x| [(); 2].map(|()| zeros(x, &[batch, heads, tokens], DType::F32)));
    let top = call.levels.last().map_or(1, |level| level.parts().div_ceil(2));
    let mut gradients = MovedGradients::zeros(&moved, top);
    for level in call.levels.iter().rev() {
        let (rows, transforms) = kept.pop().expect("each level keeps its rows");
        let of_scores = call.masks.backward(level, &rows, &saved);
        level.add(&dv, &of_scores.dv, Half::First);
        if let (Some([ds_rows, ds_columns]), Some([rows, columns])) = (&sums, &of_scores.sums) {
            level.add_rows(ds_rows, rows, level.half(Half::Second), level.part);
            level.add_rows(ds_columns, columns, level.half(Half::First), 0);
        }
        gradients = gradients.retreat(level, &rows, &of_scores, &transforms);
    }
    let upstream = BlockUpstream { saved, moved: gradients, dv, sums: sums.as_ref() };
    let mut results = blocks::backward(&call.blocks, &call.masks, &upstream).to_vec();
    if let Some([ds_rows, ds_columns]) = &sums {
        // ℓ_t enters the scores of all queries at t or later with keys before t.
        let sums = burn_cubecl::ops::numeric::sub(ds_rows.clone(), ds_columns.clone());
        results.push(prefix_sum(&sums, true).expect("f32 has prefix sums"));
    }
    results
}
