//! The default hooks. Their bodies are written out, as cubecl's traits have no default bodies.

use std::marker::PhantomData;

use burn::tensor::{Element, bf16};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::{Biases, Operands, Score, TileQueries};
use crate::attention::flash::mask::{QueryBlock, QueryGroup};
use crate::attention::flash::problem::{KernelConfig, ProblemShape};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, RowsAt, start_abt, start_panels_atb, start_tile_abt, wait,
};
use crate::tile::{AFragments, Accumulator, Chunk, Pair, load_a_frags};

/// q and k unchanged, but for the queries of the forward pass and of decoding, which are `T`'s; `G` is the type of dq
/// and dk.
pub struct PlainOperands<G: Numeric + Element = bf16, T: TileQueries = SameQueries>(
    PhantomData<(G, T)>,
);

#[cube]
impl<G: Numeric + Element, T: TileQueries> Operands for PlainOperands<G, T> {
    type Args = T::Args;
    type Gradient = G;
    type Forward = ();
    type Dq = ();
    type Dkv = ();
    type DqParts = ();
    type Decode = T::State;

    const Q_IN_REGISTERS: bool = false;
    const CHANGES_QUERIES: bool = T::CHANGES_QUERIES;
    const DK_IN_REVERSE: bool = false;
    const NEEDS_EQUAL_DS: bool = false;
    const SCALES_GRADIENTS: bool = true;

    fn forward(
        _args: &T::Args,
        _problem: &ProblemShape,
        _block: &QueryBlock,
        _group: &QueryGroup,
        _q_tile: &SharedMemory<Chunk>,
        _column: usize,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn start_scores(
        _state: &mut (),
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: KernelConfig,
    ) {
        if comptime!(T::CHANGES_QUERIES) {
            let queries = own_queries(q_tile, warp, config);
            start_abt(&queries, k_tile, at, s, fresh, comptime!(config.tile / 8));
        } else {
            start_plain_scores(s, q_tile, k_tile, at, warp, fresh, config);
        }
    }

    fn queries_at(
        args: &T::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt {
        T::queries_at(args, block, column, config)
    }

    fn keys_at(
        args: &T::Args,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> RowsAt {
        T::keys_at(args, block, column, config)
    }

    fn changes_queries(
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> bool {
        T::changes_queries(block, column, config)
    }

    fn read_ahead(
        _state: &mut (),
        _args: &T::Args,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn dq(
        _args: &T::Args,
        _problem: &ProblemShape,
        _block: &QueryBlock,
        _group: &QueryGroup,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn start_scores_of_dq(
        _state: &mut (),
        s: &mut Accumulator,
        q_tile: &SharedMemory<Chunk>,
        k_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] fresh: bool,
        #[comptime] config: KernelConfig,
    ) {
        start_plain_scores(s, q_tile, k_tile, at, warp, fresh, config);
    }

    fn begin_tile_of_dq(
        _state: &mut (),
        _args: &T::Args,
        _warp: usize,
        _next: usize,
        _ahead: bool,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn rescale_dq(
        _state: &(),
        _dq: &mut Accumulator,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn dkv(
        _args: &T::Args,
        _problem: &ProblemShape,
        _batch_kv_head: usize,
        _column: usize,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn read_queries(
        _state: &mut (),
        _args: &T::Args,
        _first_query: usize,
        _warp: usize,
        #[comptime] _first: bool,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn begin_tile_of_dkv(_state: &mut (), _warp: usize, #[comptime] _config: KernelConfig) {}

    fn start_scores_of_dkv(
        _state: &mut (),
        s: &mut Accumulator,
        k_tile: &SharedMemory<Chunk>,
        q_tile: &SharedMemory<Chunk>,
        at: usize,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) {
        start_plain_scores(s, k_tile, q_tile, at, warp, true, config);
    }

    fn rescale_dk(
        _state: &(),
        _dk: &mut Accumulator,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn dq_parts(
        _args: &T::Args,
        _batch_kv_head: usize,
        _first_column: usize,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn read_queries_of_dq(
        _state: &mut (),
        _args: &T::Args,
        _first_query: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn begin_dq_part(
        _state: &mut (),
        _first_query: usize,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn start_dq_part(
        _state: &(),
        dq: &mut Accumulator,
        ds_tiles: &SharedMemory<Chunk>,
        ds_at: usize,
        k_tile: &SharedMemory<Chunk>,
        k_at: usize,
        _warp: usize,
        #[comptime] config: KernelConfig,
    ) {
        start_panels_atb(ds_tiles, ds_at, k_tile, k_at, dq, true, comptime!(config.rows()));
    }

    fn finish_dq_part(
        _state: &(),
        dq: &mut Accumulator,
        _warp: usize,
        #[comptime] _config: KernelConfig,
    ) {
        wait(dq, 1usize);
    }

    fn decode(
        args: &T::Args,
        problem: &ProblemShape,
        _batch_kv_head: usize,
        batch_heads: &Array<usize>,
        column: usize,
        #[comptime] config: KernelConfig,
    ) -> T::State {
        T::begin(args, problem, batch_heads, column, config)
    }

    fn rescale_q(
        state: &mut T::State,
        args: &T::Args,
        q: &mut AFragments,
        _warp: usize,
        next: usize,
        _ahead: bool,
        #[comptime] config: KernelConfig,
    ) {
        T::turn_to_tile(state, args, q, next, config);
    }
}

/// The same queries for all tiles of keys.
pub struct SameQueries;

#[cube]
impl TileQueries for SameQueries {
    type Args = ();
    type State = ();

    const CHANGES_QUERIES: bool = false;

    fn queries_at(
        _args: &(),
        block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.queries_at()
    }

    fn keys_at(
        _args: &(),
        block: &QueryBlock,
        column: usize,
        #[comptime] _config: KernelConfig,
    ) -> RowsAt {
        block.keys_at(column)
    }

    fn changes_queries(
        _block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) -> bool {
        false.runtime()
    }

    fn begin(
        _args: &(),
        _problem: &ProblemShape,
        _batch_heads: &Array<usize>,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn turn_to_tile(
        _state: &mut (),
        _args: &(),
        _q: &mut AFragments,
        _next: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }
}

/// A warp's queries of the block's tile.
#[cube]
fn own_queries(
    q_tile: &SharedMemory<Chunk>,
    warp: usize,
    #[comptime] config: KernelConfig,
) -> AFragments {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let (steps, rows) = comptime!((config.padded_head_dim / 16, config.rows()));
    load_a_frags(&def, q_tile, warp * 16, steps, rows)
}

/// Starts the product of a warpgroup's 64 rows of the block's tile and the tile at chunk `at`.
#[cube]
pub fn start_plain_scores(
    s: &mut Accumulator,
    block_tile: &SharedMemory<Chunk>,
    tile: &SharedMemory<Chunk>,
    at: usize,
    warp: usize,
    #[comptime] fresh: bool,
    #[comptime] config: KernelConfig,
) {
    let row = warp / GROUP_WARPS * GROUP_ROWS;
    let (rows, n, steps) = comptime!((config.rows(), config.tile / 8, config.padded_head_dim / 16));
    start_tile_abt(block_tile, row, rows, tile, at, s, fresh, n, steps);
}

/// No biases.
pub struct NoBiases;

#[cube]
impl Biases for NoBiases {
    type Args = ();
    type KeyLoop = ();
    type QueryLoop = ();
    type Decode = ();

    const ENABLED: bool = false;
    const NEEDS_DS_SUMS: bool = false;

    fn init_key_loop(
        _args: &(),
        _problem: &ProblemShape,
        _block: &QueryBlock,
        _group: &QueryGroup,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn read_keys(
        _state: &mut (),
        _args: &(),
        _problem: &ProblemShape,
        _block: &QueryBlock,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn begin_keys(_state: &mut (), _factor: f32, _warp: usize, #[comptime] _config: KernelConfig) {}

    fn of_keys(
        _state: &(),
        _warp: usize,
        #[comptime] _n: usize,
        #[comptime] _config: KernelConfig,
    ) -> Pair {
        Pair::cast_from(0f32)
    }

    fn shift(
        _args: &(),
        _problem: &ProblemShape,
        _batch_head: usize,
        _first: usize,
        _position: usize,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn init_query_loop(#[comptime] _config: KernelConfig) {}

    fn read_queries(
        _state: &mut (),
        _args: &(),
        _problem: &ProblemShape,
        _batch_head: usize,
        _first_query: usize,
        _column: usize,
        #[comptime] _config: KernelConfig,
    ) {
    }

    fn begin_tile(_state: &mut (), #[comptime] _config: KernelConfig) {}

    fn bias_of_key(
        _state: &(),
        #[comptime] _n: usize,
        #[comptime] _r: usize,
        #[comptime] _config: KernelConfig,
    ) -> f32 {
        f32::cast_from(0u32)
    }

    fn decode(_args: &(), _problem: &ProblemShape, _batch_heads: &Array<usize>) {}

    fn read_biases(
        _state: &mut (),
        _args: &(),
        _problem: &ProblemShape,
        _tile: usize,
        _column: usize,
    ) {
    }

    fn bias(
        _state: &(),
        #[comptime] _r: usize,
        #[comptime] _n: usize,
        #[comptime] _e: usize,
    ) -> f32 {
        f32::cast_from(0u32)
    }
}

/// scale · q·k.
pub struct ScaledScore;

#[cube]
impl Score for ScaledScore {
    type Args = ();
    type Head = ();

    const WEIGHS_PRODUCTS: bool = false;

    fn head(_args: &(), _head: usize) {}

    fn scale(_args: &(), problem: &ProblemShape) -> f32 {
        problem.scale
    }

    fn score(
        _args: &(),
        _problem: &ProblemShape,
        _head: &(),
        product: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        product
    }

    fn slope(
        _args: &(),
        _problem: &ProblemShape,
        _head: &(),
        _score: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        f32::cast_from(1u32)
    }

    fn weigh(_args: &(), _product: f32, _shift: f32) -> (f32, f32) {
        (f32::cast_from(0u32), f32::cast_from(0u32))
    }
}
