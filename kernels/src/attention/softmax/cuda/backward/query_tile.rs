//! What the kernel of dk and dv needs to know of a tile's queries beside their rows.

use cubecl::prelude::*;

use super::super::decay::{SPAN, sum_before};
use super::super::gates::{TILE, gate_pairs, read_ends};
use super::super::prune::start_of;
use super::super::scores::{Options, Problem, first_key};

/// Spans of a decay that a tile of `span` queries lies in.
pub const fn spans_of(span: usize) -> usize {
    span.div_ceil(SPAN)
}

/// Registers of pairs of queries, a lane each.
const fn lanes(options: Options) -> usize {
    (options.span / 2).div_ceil(32)
}

/// What a tile's queries bring along, up to two neighbours a lane; read while the tile before is worked on.
#[derive(CubeType)]
pub struct QueryTile<N4: Size, N2: Size> {
    /// lse of two queries, then their row sums.
    pub statistics: Array<Vector<f32, N4>>,
    /// The first keys that they see, where keys are hidden.
    pub first_keys: Array<Vector<u32, N2>>,
    /// With gates, E where the tile begins.
    pub ends: Array<Vector<i32, N2>>,
    /// With a decay, its sums before the queries' spans, then before that of the warp's keys.
    pub before: Array<f64>,
    /// With a decay, its sums within that span, up to a lane's two keys.
    pub within: Array<f32>,
}

#[cube]
impl<N4: Size, N2: Size> QueryTile<N4, N2> {
    /// Nothing read yet.
    pub fn new(#[comptime] options: Options) -> QueryTile<N4, N2> {
        let pairs = comptime!(gate_pairs(options.gated).div_ceil(32));
        QueryTile::<N4, N2> {
            statistics: Array::<Vector<f32, N4>>::new(comptime!(lanes(options))),
            first_keys: Array::<Vector<u32, N2>>::new(comptime!(lanes(options))),
            ends: Array::<Vector<i32, N2>>::new(pairs),
            before: Array::<f64>::new(comptime!(spans_of(options.span) + 1)),
            within: Array::<f32>::new(2usize),
        }
    }

    /// Reads those of the tile from `first_query` on, for a warp's keys from `column` on.
    ///
    /// - `ends_at`: where the gates of the kv head begin
    pub fn read(
        &mut self,
        lse: &Array<f32>,
        sums: &Array<f32>,
        documents: &Array<i32>,
        starts: &Array<i32>,
        ends: &Array<i32>,
        before: &Array<f64>,
        within: &Array<f32>,
        problem: &Problem,
        batch: usize,
        head: usize,
        ends_at: usize,
        first_query: usize,
        column: usize,
        #[comptime] options: Options,
    ) {
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let (offset, last) = (keys - queries, queries - 1);
        let row = batch * problem.heads as usize + head;
        #[unroll]
        for i in 0..comptime!(lanes(options)) {
            let query = first_query + (i * 32 + UNIT_POS_PLANE as usize) * 2;
            let (one, two) = (min(query, last), min(query + 1, last));
            let mut four = Vector::<f32, N4>::empty();
            four[0] = lse[row * queries + one];
            four[1] = lse[row * queries + two];
            four[2] = sums[row * queries + one];
            four[3] = sums[row * queries + two];
            self.statistics[i] = four;
            if comptime!(options.hides()) {
                let mut pair = Vector::<u32, N2>::empty();
                #[unroll]
                for e in 0..2usize {
                    let own = min(query + e, last);
                    let first = first_key(problem, documents, batch, offset + own, options);
                    pair[e] = first as u32;
                    if options.prune {
                        pair[e] = max(pair[e], start_of(starts, row, own, queries));
                    }
                }
                self.first_keys[i] = pair;
            }
        }
        if comptime!(options.gated > 0) {
            let (pairs, dim) = comptime!((gate_pairs(options.gated), options.dim));
            read_ends::<N2>(ends, ends_at, first_query / TILE, &mut self.ends, pairs, dim);
        }
        if options.decay {
            let spans = comptime!(spans_of(options.span));
            #[unroll]
            for i in 0..spans {
                let query = min(first_query / SPAN * SPAN + i * SPAN, last);
                self.before[i] = sum_before(before, row, keys, offset + query);
            }
            self.before[spans] = sum_before(before, row, keys, min(column, keys - 1));
            #[unroll]
            for r in 0..2usize {
                let column = column + r * 8 + UNIT_POS_PLANE as usize / 4;
                self.within[r] = within[row * keys + min(column, keys - 1)];
            }
        }
    }

    /// The least and the most of a lane's first keys.
    pub fn least_and_most(&self, #[comptime] options: Options) -> (u32, u32) {
        let (mut least, mut most) = (self.first_keys[0][0], self.first_keys[0][0]);
        #[unroll]
        for i in 0..comptime!(lanes(options)) {
            least = min(least, min(self.first_keys[i][0], self.first_keys[i][1]));
            most = max(most, max(self.first_keys[i][0], self.first_keys[i][1]));
        }
        (least, most)
    }
}
