//! The kernel of dq.

use cubecl::prelude::*;

use super::super::forward::make_scores;
use super::super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, SavedRows, Score,
    ScoreArgs, ScoreOf, Weight, WeightOf,
};
use super::super::mask::{Mask, QueryBlock};
use super::super::problem::{KernelConfig, ProblemShape};
use super::{BackwardInputs, GradientOutput};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Pipeline, start_pb, start_tile_abt, to_a_frags, uninit, wait,
};
use crate::tile::{ALIGN, CHUNK, Chunk, bytes, define_exp2, sum_of_four, zeros};

/// dq and, with [`Biases::NEEDS_DS_SUMS`], Σ_j dS_ij of each query at its position in `ds_rows`,
/// `[batch, heads, keys]`.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn dq<A: Hooks>(
    inputs: &BackwardInputs,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    saved: &SavedRows<A>,
    dq: &mut GradientOutput<A>,
    ds_rows: &mut ComptimeOption<Array<f32>>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, warps, tile, .. } = comptime!(config);
    let rows = comptime!(config.rows());
    let (n_keys, n_dim) = comptime!((tile / 8, dim / 8));
    let biased = comptime!(BiasesOf::<A>::ENABLED);
    let fresh = comptime!(!biased);
    let with_sums = comptime!(BiasesOf::<A>::NEEDS_DS_SUMS);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, kv_head, batch_head) = (block.batch, block.kv_head, block.batch_head);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let (queries, keys) = (problem.queries as usize, problem.keys as usize);

    // Double-buffered tiles of K and V.
    let mut pipeline = Pipeline::new(tile, dim, warps);
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    let mut grad_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    sync_cube();

    if UNIT_POS == 0 {
        for iteration in 0..2usize {
            if iteration < tiles {
                let mut others = 0u32;
                if iteration == 0 {
                    others += comptime!(2 * bytes(rows, dim));
                }
                let column = (from + iteration) * tile;
                pipeline.load(iteration, &inputs.k, &inputs.v, batch, kv_head, column, others);
                if iteration == 0 {
                    let (head, first) = (block.head, block.first_query);
                    pipeline.load_also(0usize, &inputs.q, batch, head, first, &mut q_tile, rows);
                    let grad = &inputs.grad;
                    pipeline.load_also(0usize, grad, batch, head, first, &mut grad_tile, rows);
                }
            }
        }
    }

    let group = block.group(&problem, mask, warp);
    let own = block.first_query + warp * 16;
    let group_row = warp / GROUP_WARPS * GROUP_ROWS;
    // The warpgroup's first tile, and the range of the block's iterations that it takes part in.
    let start = group.from / tile * tile;
    let mut seen_from = start / tile - from;
    let mut seen_to = group.last / tile + 1 - from;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }

    let mut dq_acc = zeros(n_dim);
    let mut row_shift = Array::<f32>::new(2usize);
    let mut row_delta = Array::<f32>::new(2usize);
    let mut ds_sum = Array::<f32>::new(2usize);
    let first = block.first_keys(&problem, mask, own);
    #[unroll]
    for r in 0..2usize {
        let at = batch_head * queries + min(own + r * 8 + lane / 4, queries - 1);
        let (lse, delta) = WeightOf::<A>::saved(saved, at);
        row_shift[r] = -lse;
        row_delta[r] = delta;
        ds_sum[r] = 0f32;
    }
    let head_params = ScoreOf::<A>::head(score, block.head);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let inverse = WeightOf::<A>::SCORE_FACTOR / scale;
    let mut operand_state = OperandsOf::<A>::dq(operands, &problem, &block, &group, start, config);
    let mut bias_state = BiasesOf::<A>::init_key_loop(biases, &problem, &block, &group, config);
    let mut s = uninit(n_keys);
    let mut dp = uninit(n_keys);
    if biased {
        BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, start, config);
        BiasesOf::<A>::start_from_biases(&mut bias_state, &mut s, inverse, warp, config);
        let next = start + tile;
        if next <= group.last {
            BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, next, config);
        }
    }

    for iteration in 0..tiles {
        let first_column = (from + iteration) * tile;
        let at = pipeline.stage_offset(iteration);
        pipeline.wait(iteration);
        if (iteration >= seen_from) & (iteration < seen_to) {
            if iteration == seen_from {
                OperandsOf::<A>::start_scores_of_dq(
                    &mut operand_state,
                    &mut s,
                    &q_tile,
                    &pipeline.first_tiles,
                    at,
                    warp,
                    fresh,
                    config,
                );
                start_tile_abt(
                    &grad_tile,
                    group_row,
                    rows,
                    &pipeline.second_tiles,
                    at,
                    &mut dp,
                    true,
                    n_keys,
                    comptime!(dim / 16),
                );
            }
            let next = first_column + tile;
            OperandsOf::<A>::begin_tile_of_dq(
                &mut operand_state,
                operands,
                warp,
                next,
                next <= group.last,
                config,
            );
            wait(&mut s, 1usize);

            let lane_row = (offset + own + lane / 4) as u32;
            let lane_column = (first_column + (lane % 4) * 2) as u32;
            make_scores::<A>(
                &mut s,
                score,
                &problem,
                &head_params,
                lane_row,
                lane_column,
                &first,
                group.at_edge(first_column, tile),
                config,
            );
            // s = dP/d(scale · q·k) of each weight.
            #[unroll]
            for n in 0..n_keys {
                #[unroll]
                for r in 0..2usize {
                    let mut pair = s.index(n)[r];
                    #[unroll]
                    for e in 0..2usize {
                        let weight = WeightOf::<A>::weigh(pair[e], scale, row_shift[r]);
                        let mut slope = WeightOf::<A>::slope(pair[e], weight);
                        if comptime!(config.nonlinear_scores) {
                            let row = lane_row + comptime!((r * 8) as u32);
                            let column = lane_column + comptime!((n * 8 + e) as u32);
                            let score_slope = ScoreOf::<A>::slope(
                                score,
                                &problem,
                                &head_params,
                                pair[e],
                                row,
                                column,
                            );
                            slope *= score_slope;
                        }
                        pair[e] = slope;
                    }
                    s.index_mut(n)[r] = pair;
                }
            }
            wait(&mut dp, 0usize);
            #[unroll]
            for n in 0..n_keys {
                #[unroll]
                for r in 0..2usize {
                    let mut pair = s.index(n)[r];
                    let grads = dp.index(n)[r];
                    #[unroll]
                    for e in 0..2usize {
                        pair[e] *= grads[e] - row_delta[r];
                    }
                    if with_sums {
                        // In pairs: half as many additions wait for one another.
                        ds_sum[r] += pair[0] + pair[1];
                    }
                    s.index_mut(n)[r] = pair;
                }
            }
            OperandsOf::<A>::rescale_dq(&operand_state, &mut dq_acc, warp, config);
            let ds = to_a_frags(&s, n_keys);
            start_pb(&ds, &pipeline.first_tiles, at, &mut dq_acc);
            // Start the next tile's scores before waiting for this tile's product.
            if iteration + 1 < seen_to {
                if biased {
                    BiasesOf::<A>::start_from_biases(
                        &mut bias_state,
                        &mut s,
                        inverse,
                        warp,
                        config,
                    );
                }
                pipeline.wait(iteration + 1);
                let next_at = pipeline.stage_offset(iteration + 1);
                OperandsOf::<A>::start_scores_of_dq(
                    &mut operand_state,
                    &mut s,
                    &q_tile,
                    &pipeline.first_tiles,
                    next_at,
                    warp,
                    fresh,
                    config,
                );
                start_tile_abt(
                    &grad_tile,
                    group_row,
                    rows,
                    &pipeline.second_tiles,
                    next_at,
                    &mut dp,
                    true,
                    n_keys,
                    comptime!(dim / 16),
                );
                let after = next + tile;
                if biased && after <= group.last {
                    BiasesOf::<A>::read_keys(
                        &mut bias_state,
                        biases,
                        &problem,
                        &block,
                        after,
                        config,
                    );
                }
                wait(&mut dq_acc, 2usize);
            } else {
                wait(&mut dq_acc, 0usize);
            }
        }
        if pipeline.release(iteration) & (iteration + 2 < tiles) {
            let column = first_column + 2 * tile;
            pipeline.load(iteration + 2, &inputs.k, &inputs.v, batch, kv_head, column, 0u32);
        }
    }

    if with_sums {
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + lane / 4;
            let total = sum_of_four(ds_sum[r]);
            if (lane % 4 == 0) & (query < queries) {
                ds_rows.as_mut().unwrap()[batch_head * keys + offset + query] = total;
            }
        }
    }
    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        factors[r] = 1f32;
        if comptime!(OperandsOf::<A>::SCALES_GRADIENTS) {
            factors[r] = problem.scale;
        }
    }
    dq.store(&dq_acc, &factors, batch, block.head, own, queries, config);
}
