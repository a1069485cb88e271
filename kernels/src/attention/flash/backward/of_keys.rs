//! What the kernels with a block per key block do alike: the query tiles they visit, and the way from
//! products to P and dS. Rows of their accumulators are keys and columns are queries.

use cubecl::prelude::*;

use super::super::hooks::{
    Biases, BiasesOf, Hooks, SavedRows, Score, ScoreArgs, ScoreOf, Weight, WeightOf,
    four_statistics,
};
use super::super::mask::{Mask, masked};
use super::super::problem::{KernelConfig, ProblemShape};
use super::query_tile::QueryTile;
use crate::tile::warpgroup::set_a_frag;
use crate::tile::{AFragments, Accumulator, LOG2_E, MASKED};

/// The query tiles that attend to some key of a block of keys, over all heads of the group.
#[derive(CubeType, Clone, Copy)]
pub struct Passes {
    /// The sequence.
    pub batch: usize,
    /// The kv head.
    pub kv_head: usize,
    /// Query heads per kv head.
    group: usize,
    /// The first tile of queries.
    from: usize,
    /// Tiles of a head.
    blocks: usize,
    /// Tiles of all heads.
    pub total: usize,
}

#[cube]
impl Passes {
    /// Those of the block from `first_column` on.
    pub fn new(
        problem: &ProblemShape,
        mask: &Mask,
        batch_kv_head: usize,
        first_column: usize,
        #[comptime] config: KernelConfig,
    ) -> Passes {
        let (heads, group) = (problem.heads as usize, problem.group as usize);
        let kv_heads = heads / group;
        let (batch, kv_head) = (batch_kv_head / kv_heads, batch_kv_head % kv_heads);
        let keys = problem.keys as usize;
        let offset = problem.offset();
        let mut from = 0usize;
        if first_column > offset {
            from = first_column - offset;
        }
        let from = from / config.tile;
        let last = min(first_column + comptime!(config.rows()), keys) - 1;
        let to = mask.end_of_queries(problem, batch, kv_head, last);
        let mut blocks = 0usize;
        if to > offset + from * config.tile {
            blocks = (to - offset - from * config.tile + config.tile - 1) / config.tile;
        }
        Passes { batch, kv_head, group, from, blocks, total: blocks * group }
    }

    /// The query head and the first query of the first iteration: the group's first head, and the last tile.
    pub fn start(&self, #[comptime] tile: usize) -> (usize, usize) {
        (self.kv_head * self.group, (self.from + self.blocks - 1) * tile)
    }

    /// Those of the iteration after the one of `head` and `first_query`: head by head, each from the last tile to the
    /// first; with `by_tile`, tile by tile from the last to the first, all heads at each.
    pub fn next(
        &self,
        head: usize,
        first_query: usize,
        #[comptime] by_tile: bool,
        #[comptime] tile: usize,
    ) -> (usize, usize) {
        let (mut next_head, mut next_query) = (head, first_query - tile);
        if by_tile {
            next_head += 1;
            if next_head < (self.kv_head + 1) * self.group {
                next_query = first_query;
            } else {
                next_head = self.kv_head * self.group;
            }
        } else if first_query == self.from * tile {
            next_head += 1;
            next_query = (self.from + self.blocks - 1) * tile;
        }
        (next_head, next_query)
    }

    /// The query head and the first query of an iteration: head by head, from the first tile to the last. In
    /// reverse: tile by tile from the last to the first, over all heads at each tile.
    pub fn head_and_query(
        &self,
        iteration: usize,
        #[comptime] in_reverse: bool,
        #[comptime] tile: usize,
    ) -> (usize, usize) {
        let (group, blocks) = (self.group as u32, self.blocks as u32);
        let mut head = iteration as u32 / blocks;
        let mut block = iteration as u32 % blocks;
        if in_reverse {
            head = iteration as u32 % group;
            block = blocks - 1 - iteration as u32 / group;
        }
        (self.kv_head * self.group + head as usize, (self.from + block as usize) * tile)
    }
}

/// As [`make_scores`](super::super::forward::make_scores) with products if the kind weighs them, where rows of
/// the accumulator are keys and columns queries.
#[cube]
pub fn make_scores_of_keys<A: Hooks>(
    s: &mut Accumulator,
    args: &ScoreArgs<A>,
    problem: &ProblemShape,
    head: &<A::Score as Score>::Head,
    row: u32,
    column: u32,
    mask: &Mask,
    query_tile: &QueryTile,
    slot: usize,
    edge: bool,
    #[comptime] config: KernelConfig,
) {
    let n_queries = comptime!(config.tile / 8);
    let products = comptime!(ScoreOf::<A>::WEIGHS_PRODUCTS);
    let hidden = comptime!(if products { 0f32 } else { MASKED });
    if comptime!(config.changes_scores && !products) {
        #[unroll]
        for n in 0..n_queries {
            #[unroll]
            for r in 0..2usize {
                let mut pair = s.index(n)[r];
                let column = column + comptime!((r * 8) as u32);
                #[unroll]
                for e in 0..2usize {
                    let row = row + comptime!((n * 8 + e) as u32);
                    pair[e] = ScoreOf::<A>::score(args, problem, head, pair[e], row, column);
                }
                s.index_mut(n)[r] = pair;
            }
        }
    }
    if edge {
        #[unroll]
        for n in 0..n_queries {
            let first = query_tile.first_keys(mask, slot, n, config);
            #[unroll]
            for r in 0..2usize {
                let mut pair = s.index(n)[r];
                let column = column + comptime!((r * 8) as u32);
                #[unroll]
                for e in 0..2usize {
                    let row = row + comptime!((n * 8 + e) as u32);
                    // Rows past the last query have no query.
                    let last = problem.last_key(row as usize, config) as u32;
                    let hide = masked(last, column, first[e]) | (row >= problem.positions);
                    pair[e] = select(hide, hidden, pair[e]);
                }
                s.index_mut(n)[r] = pair;
            }
        }
    }
}

/// Turns scores into dP/d(scale · q·k) in place, and sets `p` to the weights if `with_p`. With
/// [`four_statistics`], turns them into what [`Weight::ds_of`] reads.
#[cube]
pub fn weigh_scores<A: Hooks>(
    s: &mut Accumulator,
    p: &mut AFragments,
    saved: &SavedRows<A>,
    score: &ScoreArgs<A>,
    problem: &ProblemShape,
    head: &<A::Score as Score>::Head,
    lane_row: u32,
    lane_column: u32,
    scale: f32,
    bias_state: &<A::Biases as Biases>::QueryLoop,
    query_tile: &QueryTile,
    slot: usize,
    #[comptime] with_p: bool,
    #[comptime] config: KernelConfig,
) {
    let n_queries = comptime!(config.tile / 8);
    let products = comptime!(ScoreOf::<A>::WEIGHS_PRODUCTS);
    #[unroll]
    for n in 0..n_queries {
        let statistics = query_tile.statistics::<A>(slot, n, config);
        let more = query_tile.more_statistics::<A>(slot, n, config);
        #[unroll]
        for r in 0..2usize {
            let scores = s.index(n)[r];
            let mut pair = scores;
            let mut slopes = scores;
            #[unroll]
            for e in 0..2usize {
                let mut shift = -statistics[e];
                if comptime!(BiasesOf::<A>::ENABLED) {
                    let bias = BiasesOf::<A>::bias_of_key(bias_state, n, r, config);
                    shift = fma(bias, LOG2_E, shift);
                }
                if comptime!(four_statistics::<A>()) {
                    let four = four_of_query(statistics, more, e);
                    let (weight, kept) = WeightOf::<A>::weight_of(saved, scores[e], scale, four);
                    pair[e] = weight;
                    slopes[e] = kept;
                } else if products {
                    let (weight, slope) = ScoreOf::<A>::weigh(score, scores[e], shift);
                    pair[e] = weight;
                    slopes[e] = slope;
                } else {
                    let (weight, slope) = WeightOf::<A>::weigh(saved, scores[e], scale, shift);
                    pair[e] = weight;
                    slopes[e] = slope;
                    if comptime!(config.nonlinear_scores) {
                        let row = lane_row + comptime!((n * 8 + e) as u32);
                        let column = lane_column + comptime!((r * 8) as u32);
                        let score_slope =
                            ScoreOf::<A>::slope(score, problem, head, scores[e], row, column);
                        slopes[e] *= score_slope;
                    }
                }
            }
            if with_p {
                set_a_frag(p, n, r, pair);
            }
            s.index_mut(n)[r] = slopes;
        }
    }
}

/// The four statistics of one of a lane's two queries.
#[cube]
fn four_of_query(
    statistics: Vector<f32, Const<4>>,
    more: Vector<f32, Const<4>>,
    #[comptime] e: usize,
) -> Vector<f32, Const<4>> {
    let mut four = Vector::<f32, Const<4>>::empty();
    four[0] = statistics[e];
    four[1] = statistics[comptime!(e + 2)];
    four[2] = more[e];
    four[3] = more[comptime!(e + 2)];
    four
}

/// Turns dP into dS in place, with the slopes that [`weigh_scores`] gives. Adds dS to the sums of a lane's two
/// keys if `with_sums`.
#[cube]
pub fn slopes_to_ds<A: Hooks>(
    slopes: &Accumulator,
    dp: &mut Accumulator,
    saved: &SavedRows<A>,
    query_tile: &QueryTile,
    slot: usize,
    sums: &mut Array<f32>,
    #[comptime] with_sums: bool,
    #[comptime] config: KernelConfig,
) {
    let n_queries = comptime!(config.tile / 8);
    #[unroll]
    for n in 0..n_queries {
        let statistics = query_tile.statistics::<A>(slot, n, config);
        let more = query_tile.more_statistics::<A>(slot, n, config);
        #[unroll]
        for r in 0..2usize {
            let pair_slopes = slopes.index(n)[r];
            let mut pair = dp.index(n)[r];
            #[unroll]
            for e in 0..2usize {
                let mut ds = pair_slopes[e] * (pair[e] - statistics[comptime!(e + 2)]);
                if comptime!(four_statistics::<A>()) {
                    let four = four_of_query(statistics, more, e);
                    ds = WeightOf::<A>::ds_of(saved, pair_slopes[e], four, pair[e]);
                }
                if with_sums {
                    sums[r] += ds;
                }
                pair[e] = ds;
            }
            dp.index_mut(n)[r] = pair;
        }
    }
}
