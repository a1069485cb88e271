//! The decay as biases of scores. The scores of a warpgroup's queries are relative to the span in which the
//! queries begin.
//!
//! Where accumulators of scores start from biases, they are initialised with biases / scale. Tensor cores then lose
//! digits of a bias: in emulation about 3e-7 of it, so that scores are off by 3e-3 for a key that still matters at a
//! distance of 10,000 (natural logarithm) from the span's start. Only decays below −100 per token, over many tokens,
//! cause that.

use cubecl::prelude::*;

use super::{DecaySums, SPAN, Sums, bias, difference};
use crate::attention::flash::decode::{KEYS_PER_WARP, WARPS};
use crate::attention::flash::hooks::{Biases, LaunchOf, NoBiases};
use crate::attention::flash::mask::{QueryBlock, QueryGroup};
use crate::attention::flash::problem::{KernelConfig, ProblemShape};
use crate::tile::{LOG2_E, Pair};

// A key tile of decoding is one span.
const _: () = assert!(WARPS * KEYS_PER_WARP == SPAN);

/// c_i − c_j, where c_t = Σ_{s ≤ t} ℓ_s. With `DS_SUMS`, ℓ's gradient comes from the sums of dS.
pub struct DecayBiases<const DS_SUMS: bool = true>;

/// The biases of a kind whose decay is optional: [`DecayBiases`] with one, else [`NoBiases`].
pub trait OptionalDecay: Biases + Sized {
    /// Their arguments; `decay` has the sums of the decay, if there is one.
    fn launch(decay: Option<&DecaySums>) -> LaunchOf<Self::Args>;
}

impl OptionalDecay for NoBiases {
    fn launch(_decay: Option<&DecaySums>) {}
}

impl OptionalDecay for DecayBiases {
    fn launch(decay: Option<&DecaySums>) -> LaunchOf<Sums> {
        decay.expect("a decay's biases have sums").launch()
    }
}

/// The state for the queries of a warpgroup: prefix sums for the biases of a tile's keys.
#[derive(CubeType)]
pub struct KeyLoopState {
    /// Σ ℓ before the span in which the queries begin.
    own: Pair,
    /// Σ ℓ before the span of the lane's keys.
    before: Pair,
    /// Σ ℓ within that span, up to each of the lane's keys.
    within: Array<f32>,
    /// The biases of a tile's keys, for each warp.
    tile: SharedMemory<Pair>,
}

/// The state for a warp's keys: prefix sums for their biases with a tile's queries.
#[derive(CubeType)]
pub struct QueryLoopState {
    /// Σ ℓ before the queries' spans, then before the span of the warp's keys.
    before: Array<Pair>,
    /// Σ ℓ within that span, up to a lane's two keys.
    within: Array<f32>,
    /// The biases of a lane's two keys for each span of the tile's queries.
    biases: Array<f32>,
}

/// The state for a lane's two heads of one query.
#[derive(CubeType)]
pub struct DecodeBiases {
    batch_heads: Array<usize>,
    /// Σ ℓ before the query's span.
    own: Array<Pair>,
    /// The biases of a lane's four keys for each head.
    biases: Array<f32>,
}

/// Adjacent pairs of keys whose biases one lane computes, all in one span.
const fn pairs_per_lane(tile: usize) -> usize {
    (tile / 2).div_ceil(32)
}

/// Number of spans in a query tile.
const fn spans_of(tile: usize) -> usize {
    tile.div_ceil(SPAN)
}

#[cube]
impl<const DS_SUMS: bool> Biases for DecayBiases<DS_SUMS> {
    type Args = Sums;
    type KeyLoop = KeyLoopState;
    type QueryLoop = QueryLoopState;
    type Decode = DecodeBiases;

    const ENABLED: bool = true;
    const NEEDS_DS_SUMS: bool = DS_SUMS;

    fn init_key_loop(
        args: &Sums,
        problem: &ProblemShape,
        block: &QueryBlock,
        group: &QueryGroup,
        #[comptime] config: KernelConfig,
    ) -> KeyLoopState {
        let first = min(group.first, problem.positions as usize - 1);
        let count = comptime!(config.warps * config.tile / 2);
        KeyLoopState {
            own: args.before_span(block.batch_head, first),
            before: Pair::cast_from(0f32),
            within: Array::<f32>::new(comptime!(2 * pairs_per_lane(config.tile))),
            tile: SharedMemory::<Pair>::new_aligned(count, 8usize),
        }
    }

    fn read_keys(
        state: &mut KeyLoopState,
        args: &Sums,
        problem: &ProblemShape,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: KernelConfig,
    ) {
        let (batch_head, last) = (block.batch_head, problem.keys as usize - 1);
        let count = comptime!(2 * pairs_per_lane(config.tile));
        let column = column + UNIT_POS_PLANE as usize * count;
        state.before = args.before_span(batch_head, min(column, last));
        #[unroll]
        for i in 0..count {
            state.within[i] = args.within_span(batch_head, min(column + i, last));
        }
    }

    fn begin_keys(
        state: &mut KeyLoopState,
        factor: f32,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) {
        let count = comptime!(config.tile / 2);
        let pairs = comptime!(pairs_per_lane(config.tile));
        let between = difference(state.own, state.before);
        let first = UNIT_POS_PLANE as usize * pairs;
        sync_plane();
        if comptime!(count.is_multiple_of(32)) || first < count {
            #[unroll]
            for i in 0..pairs {
                let mut pair = Pair::empty();
                pair[0] = bias(between, state.within[i * 2], factor);
                pair[1] = bias(between, state.within[i * 2 + 1], factor);
                state.tile[warp * count + first + i] = pair;
            }
        }
        sync_plane();
    }

    fn of_keys(
        state: &KeyLoopState,
        warp: usize,
        #[comptime] n: usize,
        #[comptime] config: KernelConfig,
    ) -> Pair {
        state.tile
            [warp * comptime!(config.tile / 2) + comptime!(n * 4) + UNIT_POS_PLANE as usize % 4]
    }

    fn shift(
        args: &Sums,
        _problem: &ProblemShape,
        batch_head: usize,
        first: usize,
        position: usize,
    ) -> f32 {
        let (own, start) =
            (args.before_span(batch_head, position), args.before_span(batch_head, first));
        difference(own, start) + args.within_span(batch_head, position)
    }

    fn init_query_loop(#[comptime] config: KernelConfig) -> QueryLoopState {
        let spans = comptime!(spans_of(config.tile));
        QueryLoopState {
            before: Array::<Pair>::new(comptime!(spans + 1)),
            within: Array::<f32>::new(2usize),
            biases: Array::<f32>::new(comptime!(2 * spans)),
        }
    }

    fn read_queries(
        state: &mut QueryLoopState,
        args: &Sums,
        problem: &ProblemShape,
        batch_head: usize,
        first_query: usize,
        column: usize,
        #[comptime] config: KernelConfig,
    ) {
        let spans = comptime!(spans_of(config.tile));
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let offset = problem.offset();
        #[unroll]
        for i in 0..spans {
            let query = min(first_query / SPAN * SPAN + i * SPAN, queries - 1);
            state.before[i] = args.before_span(batch_head, offset + query);
        }
        state.before[spans] = args.before_span(batch_head, min(column, keys - 1));
        #[unroll]
        for r in 0..2usize {
            let column = column + r * 8 + UNIT_POS_PLANE as usize / 4;
            state.within[r] = args.within_span(batch_head, min(column, keys - 1));
        }
    }

    fn begin_tile(state: &mut QueryLoopState, #[comptime] config: KernelConfig) {
        let spans = comptime!(spans_of(config.tile));
        #[unroll]
        for i in 0..spans {
            let between = difference(state.before[i], state.before[spans]);
            state.biases[i * 2] = between - state.within[0];
            state.biases[i * 2 + 1] = between - state.within[1];
        }
    }

    fn bias_of_key(
        state: &QueryLoopState,
        #[comptime] n: usize,
        #[comptime] r: usize,
        #[comptime] _config: KernelConfig,
    ) -> f32 {
        state.biases[comptime!(n * 8 / SPAN * 2 + r)]
    }

    fn decode(args: &Sums, problem: &ProblemShape, batch_heads: &Array<usize>) -> DecodeBiases {
        let position = problem.keys as usize - 1;
        let mut own_heads = Array::<usize>::new(2usize);
        let mut own = Array::<Pair>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            own_heads[r] = batch_heads[r];
            own[r] = args.before_span(batch_heads[r], position);
        }
        DecodeBiases { batch_heads: own_heads, own, biases: Array::<f32>::new(8usize) }
    }

    fn read_biases(
        state: &mut DecodeBiases,
        args: &Sums,
        problem: &ProblemShape,
        tile: usize,
        column: usize,
    ) {
        let last = problem.keys as usize - 1;
        #[unroll]
        for r in 0..2usize {
            let batch_head = state.batch_heads[r];
            let between = difference(state.own[r], args.before_span(batch_head, tile));
            #[unroll]
            for i in 0..4usize {
                let column =
                    column + comptime!(i / 2 * 8 + i % 2) + (UNIT_POS_PLANE as usize % 4) * 2;
                let within = args.within_span(batch_head, min(column, last));
                state.biases[r * 4 + i] = bias(between, within, LOG2_E);
            }
        }
    }

    fn bias(
        state: &DecodeBiases,
        #[comptime] r: usize,
        #[comptime] n: usize,
        #[comptime] e: usize,
    ) -> f32 {
        state.biases[comptime!(r * 4 + n * 2 + e)]
    }
}
