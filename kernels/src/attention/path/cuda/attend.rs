//! Attention over the keys of all levels, in one pass of the flash core.
//!
//! A query of block b meets a key of block j < b at the level of the highest bit in which b and j differ. From the last
//! key to the first the levels rise, and at each new one the queries turn to their versions of that level.

use std::marker::PhantomData;

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::blocks::{BLOCK, OwnAttention};
use super::levels::{Masks, Moved};
use crate::attention::decay::{DecayBiases, DecaySums, OptionalDecay};
use crate::attention::flash::hooks::{
    Hooks, LaunchOf, NoBiases, PlainOperands, ScaledScore, TileQueries,
};
use crate::attention::flash::mask::QueryBlock;
use crate::attention::flash::problem::{KernelConfig, ProblemShape};
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxOutput, SoftmaxWeight, after};
use crate::attention::flash::{FlashAttention, as_u32};
use crate::cuda::{CudaTensor, reshaped};
use crate::ops::cuda::dims;
use crate::tile::AFragments;
use crate::tile::warpgroup::{GROUP_ROWS, RowsAt};

/// Softmax attention over all keys, which goes on from that over each query's own block. The shapes of q, k and v are
/// those of the call, `[batch, heads or kv_heads, tokens, head_dim]`. Returns o, `[batch, heads, tokens, head_dim]` in
/// bf16, and lse, `[batch, heads, tokens]`.
pub fn attend(
    inputs: [&CudaTensor; 3],
    own: OwnAttention,
    moved: &Moved,
    masks: &Masks,
) -> SoftmaxOutput {
    match masks.decay {
        Some(_) => attend_with::<DecayBiases>(inputs, own, moved, masks),
        None => attend_with::<NoBiases>(inputs, own, moved, masks),
    }
}

fn attend_with<B: OptionalDecay>(
    inputs: [&CudaTensor; 3],
    OwnAttention { mut o, lse }: OwnAttention,
    moved: &Moved,
    masks: &Masks,
) -> SoftmaxOutput {
    let [batch, _, tokens, _]: [usize; 4] = inputs[0].meta.shape().dims();
    let rows = [&moved.q, &moved.k].map(|x| {
        let mut x = reshaped(x, &[&[1], &dims(x)[..]].concat());
        x.meta.swap(1, 2);
        x
    });
    o.meta.swap(1, 2);
    // Kernels count rows in 32 bits, with their sign.
    let most = rows.iter().map(|x| x.meta.shape()[2]).max().unwrap_or_default();
    assert!(i32::try_from(most).is_ok(), "{most} rows of all levels");
    let layout = [batch, tokens.div_ceil(BLOCK)];
    let hooks = AcrossBlocks::<B> { layout, decay: masks.decay.clone(), lse, biases: PhantomData };
    // Queries include the scale.
    let flash = FlashAttention::new(inputs, 1.0, hooks)
        .rows_in(rows.each_ref())
        .before_blocks()
        .window(masks.window)
        .documents(masks.documents.as_ref());
    flash.softmax_after(&o)
}

/// The hooks, with biases `B`.
struct AcrossBlocks<B> {
    /// Sequences, and blocks of each.
    layout: [usize; 2],
    decay: Option<DecaySums>,
    /// Of the softmax over the queries' own blocks.
    lse: CudaTensor,
    biases: PhantomData<B>,
}

impl<B: OptionalDecay> Hooks for AcrossBlocks<B> {
    type Operands = PlainOperands<bf16, QueriesOfLevels>;
    type Biases = B;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) -> LaunchOf<LevelLayout> {
        let [batch, blocks] = self.layout.map(as_u32);
        LevelLayoutLaunch::new(batch, blocks)
    }

    fn biases(&self) -> LaunchOf<B::Args> {
        B::launch(self.decay.as_ref())
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        after(&self.lse)
    }
}

/// The rows of all levels as [`Moved`] has them: one level after the other, each `[batch, pairs, part]`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct LevelLayout {
    /// Sequences.
    batch: u32,
    /// Blocks of a sequence.
    blocks: u32,
}

#[cube]
impl LevelLayout {
    /// The row of the first token of a block at `level`, of its half of the parts.
    fn row(&self, sequence: usize, block: u32, level: u32) -> usize {
        let (mut parts, mut before) = (self.blocks, 0u32);
        for below in 0..level {
            before += (self.batch * (parts / 2)) << below;
            parts = (parts + 1) / 2;
        }
        let pair = sequence as u32 * (parts / 2) + (block >> (level + 1));
        let in_part = block & ((1u32 << level) - 1);
        (before + (pair << level) + in_part) as usize * comptime!(BLOCK)
    }
}

// A block of queries is a warpgroup's rows.
const _: () = assert!(BLOCK == GROUP_ROWS);

/// The last block of a thread block's queries.
#[cube]
fn last_block(block: &QueryBlock, #[comptime] config: KernelConfig) -> u32 {
    (block.first_query / BLOCK) as u32 + comptime!((config.rows() / BLOCK) as u32 - 1)
}

/// The level at which the thread block's queries meet the keys from `column` on. Only its last block has queries that
/// meet keys of the thread block's own blocks: there are at most two, and two in a tile of keys.
#[cube]
fn level_of(block: &QueryBlock, column: usize, #[comptime] config: KernelConfig) -> u32 {
    comptime!(assert!(config.rows() <= 2 * BLOCK && config.tile <= 2 * BLOCK));
    31u32 - u32::leading_zeros(last_block(block, config) ^ (column / BLOCK) as u32)
}

/// Queries of their versions at each level.
struct QueriesOfLevels;

#[cube]
impl TileQueries for QueriesOfLevels {
    type Args = LevelLayout;
    type State = ();

    const CHANGES_QUERIES: bool = true;

    fn queries_at(
        args: &LevelLayout,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt {
        let last = last_block(block, config);
        let row = args.row(block.batch, last, level_of(block, column, config));
        // At the first level only the last block has queries. The rows before them are another pair's, or there are
        // none, which gives 0; their warpgroup leaves this tile out.
        RowsAt {
            batch: 0usize.runtime(),
            head: block.head,
            row: row - comptime!(config.rows() - BLOCK),
        }
    }

    fn keys_at(
        args: &LevelLayout,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt {
        let level = level_of(block, column, config);
        let row = args.row(block.batch, (column / BLOCK) as u32, level);
        RowsAt { batch: 0usize.runtime(), head: block.kv_head, row }
    }

    fn changes_queries(
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> bool {
        level_of(block, column, config) != level_of(block, column + config.tile, config)
    }

    fn begin(
        _args: &LevelLayout,
        _problem: &ProblemShape,
        _batch_heads: &Array<usize>,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn turn_to_tile(
        _state: &mut (),
        _args: &LevelLayout,
        _q: &mut AFragments,
        _next: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }
}
