//! A decay as biases of scores. The queries of a warpgroup take their scores relative to the span in which they
//! begin.
//!
//! The accumulators of scores start from biases over the scale of scores. Tensor cores then lose digits
//! of a bias: by emulation some 3e-7 of it, so that scores are off by 3e-3 where a key that still counts
//! lies 10,000 (natural logarithm) from the span's beginning. Only decays below −100 a token, token after
//! token, bring that about.

use cubecl::prelude::*;

use super::decay::{SPAN, Sums, bias};
use crate::attention::flash::decode::{KEYS_OF_A_WARP, WARPS};
use crate::attention::flash::hooks::Biases;
use crate::attention::flash::mask::{QueryBlock, QueryGroup};
use crate::attention::flash::problem::{Config, Problem};
use crate::tile::{Accumulator, LOG2_E, Pair};

// A tile of decoding is one span.
const _: () = assert!(WARPS * KEYS_OF_A_WARP == SPAN);

/// c_i − c_j, where c_t = Σ_{s ≤ t} ℓ_s.
pub struct DecayBiases;

/// For the queries of a warpgroup: what the biases of a tile's keys are made of.
#[derive(CubeType)]
pub struct OverKeys {
    /// Σ ℓ before the span in which the queries begin.
    own: f64,
    /// Σ ℓ before the span of the lane's keys.
    before: f64,
    /// Σ ℓ within that span, up to each of the lane's keys.
    within: Array<f32>,
    /// The biases of a tile's keys, for each warp.
    tile: SharedMemory<Pair>,
}

/// For a warp's keys: what their biases for a tile's queries are made of.
#[derive(CubeType)]
pub struct OverQueries {
    /// Σ ℓ before the queries' spans, then before that of the warp's keys.
    before: Array<f64>,
    /// Σ ℓ within that span, up to a lane's two keys.
    within: Array<f32>,
    /// The biases of a lane's two keys for each span of the tile's queries.
    biases: Array<f32>,
}

/// For a lane's two heads of one query.
#[derive(CubeType)]
pub struct OfDecode {
    rows: Array<usize>,
    /// Σ ℓ before the query's span.
    own: Array<f64>,
    /// Biases of a lane's four keys for each head.
    biases: Array<f32>,
}

/// Neighbouring pairs of keys whose biases a lane makes. All are in one span.
const fn pairs_of_a_lane(tile: usize) -> usize {
    (tile / 2).div_ceil(32)
}

/// Spans that a tile of queries lies in.
const fn spans_of(tile: usize) -> usize {
    tile.div_ceil(SPAN)
}

#[cube]
impl Biases for DecayBiases {
    type Args = Sums;
    type OverKeys = OverKeys;
    type OverQueries = OverQueries;
    type Decode = OfDecode;

    const SOME: bool = true;
    const SUMS: bool = true;

    fn over_keys(
        args: &Sums,
        problem: &Problem,
        block: &QueryBlock,
        group: &QueryGroup,
        #[comptime] config: Config,
    ) -> OverKeys {
        let first = min(group.first, problem.keys as usize - 1);
        let count = comptime!(config.warps * config.tile / 2);
        OverKeys {
            own: args.before_span(block.row, first),
            before: f64::cast_from(0f32),
            within: Array::<f32>::new(comptime!(2 * pairs_of_a_lane(config.tile))),
            tile: SharedMemory::<Pair>::new_aligned(count, 8usize),
        }
    }

    fn read_keys(
        state: &mut OverKeys,
        args: &Sums,
        problem: &Problem,
        block: &QueryBlock,
        column: usize,
        #[comptime] config: Config,
    ) {
        let (row, last) = (block.row, problem.keys as usize - 1);
        let count = comptime!(2 * pairs_of_a_lane(config.tile));
        let column = column + UNIT_POS_PLANE as usize * count;
        state.before = args.before_span(row, min(column, last));
        #[unroll]
        for i in 0..count {
            state.within[i] = args.within_span(row, min(column + i, last));
        }
    }

    fn start_from_biases(
        state: &mut OverKeys,
        s: &mut Accumulator,
        factor: f32,
        warp: usize,
        #[comptime] config: Config,
    ) {
        let count = comptime!(config.tile / 2);
        let pairs = comptime!(pairs_of_a_lane(config.tile));
        let between = state.own - state.before;
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
        #[unroll]
        for n in 0..comptime!(config.tile / 8) {
            let place = warp * count + comptime!(n * 4) + UNIT_POS_PLANE as usize % 4;
            let biases = state.tile[place];
            #[unroll]
            for r in 0..2usize {
                let mut pair = Pair::empty();
                pair[0] = biases[0];
                pair[1] = biases[1];
                s.index_mut(n)[r] = pair;
            }
        }
    }

    fn shift(args: &Sums, _problem: &Problem, row: usize, first: usize, position: usize) -> f32 {
        f32::cast_from(args.at(row, position) - args.before_span(row, first))
    }

    fn over_queries(#[comptime] config: Config) -> OverQueries {
        let spans = comptime!(spans_of(config.tile));
        OverQueries {
            before: Array::<f64>::new(comptime!(spans + 1)),
            within: Array::<f32>::new(2usize),
            biases: Array::<f32>::new(comptime!(2 * spans)),
        }
    }

    fn read_queries(
        state: &mut OverQueries,
        args: &Sums,
        problem: &Problem,
        row: usize,
        first_query: usize,
        column: usize,
        #[comptime] config: Config,
    ) {
        let spans = comptime!(spans_of(config.tile));
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let offset = keys - queries;
        #[unroll]
        for i in 0..spans {
            let query = min(first_query / SPAN * SPAN + i * SPAN, queries - 1);
            state.before[i] = args.before_span(row, offset + query);
        }
        state.before[spans] = args.before_span(row, min(column, keys - 1));
        #[unroll]
        for r in 0..2usize {
            let column = column + r * 8 + UNIT_POS_PLANE as usize / 4;
            state.within[r] = args.within_span(row, min(column, keys - 1));
        }
    }

    fn begin_tile(state: &mut OverQueries, #[comptime] config: Config) {
        let spans = comptime!(spans_of(config.tile));
        #[unroll]
        for i in 0..spans {
            let between = state.before[i] - state.before[spans];
            state.biases[i * 2] = bias(between, state.within[0], LOG2_E);
            state.biases[i * 2 + 1] = bias(between, state.within[1], LOG2_E);
        }
    }

    fn bias_of_key(
        state: &OverQueries,
        #[comptime] n: usize,
        #[comptime] r: usize,
        #[comptime] _config: Config,
    ) -> f32 {
        state.biases[comptime!(n * 8 / SPAN * 2 + r)]
    }

    fn decode(args: &Sums, problem: &Problem, rows: &Array<usize>) -> OfDecode {
        let position = problem.keys as usize - 1;
        let mut own_rows = Array::<usize>::new(2usize);
        let mut own = Array::<f64>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            own_rows[r] = rows[r];
            own[r] = args.before_span(rows[r], position);
        }
        OfDecode { rows: own_rows, own, biases: Array::<f32>::new(8usize) }
    }

    fn read_biases(
        state: &mut OfDecode,
        args: &Sums,
        problem: &Problem,
        tile: usize,
        column: usize,
    ) {
        let last = problem.keys as usize - 1;
        #[unroll]
        for r in 0..2usize {
            let row = state.rows[r];
            let between = state.own[r] - args.before_span(row, tile);
            #[unroll]
            for i in 0..4usize {
                let column =
                    column + comptime!(i / 2 * 8 + i % 2) + (UNIT_POS_PLANE as usize % 4) * 2;
                let within = args.within_span(row, min(column, last));
                state.biases[r * 4 + i] = bias(between, within, LOG2_E);
            }
        }
    }

    fn bias(
        state: &OfDecode,
        #[comptime] r: usize,
        #[comptime] n: usize,
        #[comptime] e: usize,
    ) -> f32 {
        state.biases[comptime!(r * 4 + n * 2 + e)]
    }
}
