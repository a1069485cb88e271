//! The loads of the forward pass. Keys and values have two stages; queries, of which some kinds have others for some
//! tiles of keys, one: a warp takes them to registers before it releases the tile before.

use cubecl::prelude::*;

use super::Qkv;
use crate::attention::flash::hooks::{Hooks, OperandArgs, Operands, OperandsOf};
use crate::attention::flash::mask::QueryBlock;
use crate::attention::flash::problem::KernelConfig;
use crate::tile::warpgroup::{Pipeline, RowsAt};
use crate::tile::{Accumulator, Chunk, bytes};

/// The block's tiles in shared memory.
#[derive(CubeType)]
pub struct Tiles {
    /// Double-buffered tiles of keys and values.
    pub pipeline: Pipeline,
    /// The tile of queries.
    pub queries: SharedMemory<Chunk>,
}

/// Whether iteration `back`, not the first one, has other queries than the one before.
#[cube]
pub fn changes_queries<A: Hooks>(
    block: &QueryBlock,
    back: usize,
    #[comptime] config: KernelConfig,
) -> bool {
    let mut changes = false;
    if comptime!(OperandsOf::<A>::CHANGES_QUERIES) {
        changes = OperandsOf::<A>::changes_queries(block, block.column(back, config.tile), config);
    }
    changes
}

/// Starts the loads of an iteration's keys and values; `with_queries` says whether it also waits for queries.
#[cube]
pub fn load<A: Hooks>(
    tiles: &mut Tiles,
    qkv: &Qkv,
    operands: &OperandArgs<A>,
    block: &QueryBlock,
    back: usize,
    with_queries: bool,
    #[comptime] config: KernelConfig,
) {
    let column = block.column(back, config.tile);
    let keys = OperandsOf::<A>::keys_at(operands, block, column, config);
    let values = block.values_at(column);
    let mut others = 0u32;
    if with_queries {
        others += comptime!(bytes(config.rows(), config.padded_head_dim));
    }
    tiles.pipeline.load_each(back, &qkv.k, &keys, &qkv.v, &values, others);
}

/// Starts the load of the queries that an iteration waits for.
#[cube]
pub fn load_queries<A: Hooks>(
    tiles: &mut Tiles,
    qkv: &Qkv,
    operands: &OperandArgs<A>,
    block: &QueryBlock,
    back: usize,
    #[comptime] config: KernelConfig,
) {
    let (rows, dim) = comptime!((config.rows(), config.padded_head_dim));
    let column = block.column(back, config.tile);
    let RowsAt { batch, head, row } = OperandsOf::<A>::queries_at(operands, block, column, config);
    tiles.pipeline.load_also(back, &qkv.q, batch, head, row, &mut tiles.queries, rows, dim);
}

/// Starts all loads of iteration `back`, whose stage has been released: all warps have started the scores of the
/// iteration before, and so taken its queries.
#[cube]
pub fn load_later<A: Hooks>(
    tiles: &mut Tiles,
    qkv: &Qkv,
    operands: &OperandArgs<A>,
    block: &QueryBlock,
    back: usize,
    #[comptime] config: KernelConfig,
) {
    let changes = changes_queries::<A>(block, back, config);
    load::<A>(tiles, qkv, operands, block, back, changes, config);
    if changes {
        load_queries::<A>(tiles, qkv, operands, block, back, config);
    }
}

/// Starts the scores of iteration `back`, the first that a warpgroup takes part in; if `ahead`, its next tile is at
/// `next`.
#[cube]
pub fn start_first<A: Hooks>(
    tiles: &Tiles,
    state: &mut <A::Operands as Operands>::Forward,
    s: &mut Accumulator,
    operands: &OperandArgs<A>,
    back: usize,
    next: usize,
    ahead: bool,
    warp: usize,
    #[comptime] fresh: bool,
    #[comptime] config: KernelConfig,
) {
    tiles.pipeline.wait(back);
    let at = tiles.pipeline.first_tile(back);
    let (queries, keys) = (&tiles.queries, &tiles.pipeline.first_tiles);
    OperandsOf::<A>::start_scores(state, s, queries, keys, at, warp, fresh, config);
    if ahead {
        OperandsOf::<A>::read_ahead(state, operands, next, config);
    }
}

/// Releases tiles that the warpgroup does not attend to, loading later ones for the others.
#[cube]
pub fn skip_tiles<A: Hooks>(
    tiles: &mut Tiles,
    qkv: &Qkv,
    operands: &OperandArgs<A>,
    block: &QueryBlock,
    from: usize,
    to: usize,
    #[comptime] config: KernelConfig,
) {
    for back in from..to {
        tiles.pipeline.wait(back);
        if tiles.pipeline.release(back) & (back + 2 < block.tiles) {
            load_later::<A>(tiles, qkv, operands, block, back + 2, config);
        }
    }
}
