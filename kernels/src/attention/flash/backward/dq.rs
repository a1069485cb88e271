//! The kernel of dq.

use cubecl::prelude::*;

use super::super::forward::{make_scores, start_from_biases};
use super::super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, SavedRows, Score,
    ScoreArgs, ScoreOf, Weight, WeightOf, four_statistics, sums_of_rows,
};
use super::super::in_order::Carries;
use super::super::mask::{Mask, QueryBlock};
use super::super::problem::{KernelConfig, ProblemShape};
use super::{BackwardInputs, GradientOutput};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Pipeline, start_pb, start_tile_abt, to_a_frags, uninit,
    uninit_a_frags, wait,
};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, LOG2_E, Pair, bytes, define_exp2, sum_of_four, zeros,
};

/// dq and, with [`sums_of_rows`], Σ_j dS_ij of each query at its position in `ds_rows`,
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
    carries: &mut ComptimeOption<Carries>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, warps, tile, .. } =
        comptime!(config);
    let rows = comptime!(config.rows());
    let (n_keys, n_dim) = comptime!((tile / 8, dim / 8));
    let with_biases = comptime!(BiasesOf::<A>::ENABLED);
    let biases_after = comptime!(adds_biases_after::<A>(config));
    let biased = comptime!(with_biases && !biases_after);
    let fresh = comptime!(!biased);
    let products = comptime!(ScoreOf::<A>::WEIGHS_PRODUCTS);
    let with_sums = comptime!(sums_of_rows::<A>());
    let in_order = comptime!(WeightOf::<A>::IN_ORDER);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, kv_head, batch_head) = (block.batch, block.kv_head, block.batch_head);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let queries = problem.queries as usize;
    let kv_heads = (kv_head, problem.value_head(kv_head, config));

    // Double-buffered tiles of K and V.
    let mut pipeline = Pipeline::new(tile, (dim, value_dim), warps);
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    let mut grad_tile =
        SharedMemory::<Chunk>::new_aligned(comptime!(rows * value_dim / CHUNK), ALIGN);
    sync_cube();

    if UNIT_POS == 0 {
        for iteration in 0..2usize {
            if iteration < tiles {
                let mut others = 0u32;
                if iteration == 0 {
                    others += comptime!(bytes(rows, dim) + bytes(rows, value_dim));
                }
                let column = (from + iteration) * tile;
                pipeline.load(iteration, &inputs.k, &inputs.v, batch, kv_heads, column, others);
                if iteration == 0 {
                    let (head, first) = (block.head, block.first_query);
                    let (q, grad) = (&inputs.q, &inputs.grad);
                    pipeline.load_also(0usize, q, batch, head, first, &mut q_tile, rows, dim);
                    pipeline.load_also(
                        0usize,
                        grad,
                        batch,
                        head,
                        first,
                        &mut grad_tile,
                        rows,
                        value_dim,
                    );
                }
            }
        }
    }

    let group = block.group(&problem, mask, warp, config);
    let own = block.first_query + warp * 16;
    let group_row = warp / GROUP_WARPS * GROUP_ROWS;
    // The warpgroup's first tile, and the range of the block's iterations that it takes part in.
    let start = group.from / tile * tile;
    let mut seen_from = start / tile - from;
    let mut seen_to = group.last_key / tile + 1 - from;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }

    let mut dq_acc = zeros(n_dim);
    let mut row_shift = Array::<f32>::new(2usize);
    let mut row_delta = Array::<f32>::new(2usize);
    let mut row_more = Array::<Vector<f32, Const<4>>>::new(2usize);
    let mut ds_sum = Array::<f32>::new(2usize);
    let first = block.first_keys(&problem, mask, own);
    #[unroll]
    for r in 0..2usize {
        let at = batch_head * queries + min(own + r * 8 + lane / 4, queries - 1);
        row_shift[r] = 0f32;
        row_delta[r] = 0f32;
        if !in_order {
            let (lse, delta) = WeightOf::<A>::saved(saved, at);
            row_shift[r] = -lse;
            row_delta[r] = delta;
            if comptime!(four_statistics::<A>()) {
                let (third, fourth) = WeightOf::<A>::saved_more(saved, at);
                let mut four = Vector::<f32, Const<4>>::empty();
                four[0] = lse;
                four[1] = delta;
                four[2] = third;
                four[3] = fourth;
                row_more[r] = four;
            }
        }
        ds_sum[r] = 0f32;
    }
    // Of the lane's rows: the carries of the current tile, and the sums over the tiles before it.
    let mut row_carries = Array::<f32>::new(2usize);
    let mut row_sums = Array::<f32>::new(2usize);
    row_sums[0] = 0f32;
    row_sums[1] = 0f32;
    let head_params = ScoreOf::<A>::head(score, block.head);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let inverse = WeightOf::<A>::SCORE_FACTOR / scale;
    let mut operand_state = OperandsOf::<A>::dq(operands, &problem, &block, &group, start, config);
    let mut bias_state = BiasesOf::<A>::init_key_loop(biases, &problem, &block, &group, config);
    let mut s = uninit(n_keys);
    let mut dp = uninit(n_keys);
    if with_biases {
        BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, start, config);
    }
    if biased {
        start_from_biases::<A>(&mut bias_state, &mut s, inverse, warp, config);
        let next = start + tile;
        if next <= group.last_key {
            BiasesOf::<A>::read_keys(&mut bias_state, biases, &problem, &block, next, config);
        }
    }

    for iteration in 0..tiles {
        let first_column = (from + iteration) * tile;
        let (k_at, v_at) = (pipeline.first_tile(iteration), pipeline.second_tile(iteration));
        pipeline.wait(iteration);
        if (iteration >= seen_from) & (iteration < seen_to) {
            if iteration == seen_from {
                OperandsOf::<A>::start_scores_of_dq(
                    &mut operand_state,
                    &mut s,
                    &q_tile,
                    &pipeline.first_tiles,
                    k_at,
                    warp,
                    fresh,
                    config,
                );
                start_tile_abt(
                    &grad_tile,
                    group_row,
                    rows,
                    &pipeline.second_tiles,
                    v_at,
                    &mut dp,
                    true,
                    n_keys,
                    comptime!(value_dim / 16),
                );
            }
            let next = first_column + tile;
            if in_order {
                let carries = carries.as_mut().unwrap();
                let key_tile = first_column / tile;
                carries.read(&mut row_carries, &problem, batch_head, own, key_tile);
                carries.write_sums(&row_sums, &problem, batch_head, own, key_tile);
            }
            OperandsOf::<A>::begin_tile_of_dq(
                &mut operand_state,
                operands,
                warp,
                next,
                next <= group.last_key,
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
                group.at_edge(first_column, tile, WeightOf::<A>::SEES_ITSELF),
                products,
                config,
            );
            if biases_after {
                BiasesOf::<A>::begin_keys(&mut bias_state, 1f32, warp, config);
                if next <= group.last_key {
                    BiasesOf::<A>::read_keys(
                        &mut bias_state,
                        biases,
                        &problem,
                        &block,
                        next,
                        config,
                    );
                }
            }
            if in_order {
                wait(&mut dp, 0usize);
                let mut no_p = uninit_a_frags(0usize);
                WeightOf::<A>::gradients_in_order(
                    &mut s,
                    &mut dp,
                    &mut no_p,
                    &row_carries,
                    &mut row_sums,
                    scale,
                    false,
                    n_keys,
                );
            } else {
                scores_to_slopes::<A>(
                    &mut s,
                    saved,
                    score,
                    &problem,
                    &head_params,
                    lane_row,
                    lane_column,
                    scale,
                    &row_shift,
                    &row_more,
                    &bias_state,
                    warp,
                    config,
                );
                wait(&mut dp, 0usize);
                slopes_to_ds::<A>(&mut s, &dp, saved, &row_delta, &row_more, &mut ds_sum, n_keys);
            }
            OperandsOf::<A>::rescale_dq(&operand_state, &mut dq_acc, warp, config);
            let ds = to_a_frags(&s, n_keys);
            start_pb(&ds, &pipeline.first_tiles, k_at, &mut dq_acc);
            // Start the next tile's scores before waiting for this tile's product.
            if iteration + 1 < seen_to {
                if biased {
                    start_from_biases::<A>(&mut bias_state, &mut s, inverse, warp, config);
                }
                pipeline.wait(iteration + 1);
                OperandsOf::<A>::start_scores_of_dq(
                    &mut operand_state,
                    &mut s,
                    &q_tile,
                    &pipeline.first_tiles,
                    pipeline.first_tile(iteration + 1),
                    warp,
                    fresh,
                    config,
                );
                start_tile_abt(
                    &grad_tile,
                    group_row,
                    rows,
                    &pipeline.second_tiles,
                    pipeline.second_tile(iteration + 1),
                    &mut dp,
                    true,
                    n_keys,
                    comptime!(value_dim / 16),
                );
                let after = next + tile;
                if biased && after <= group.last_key {
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
            pipeline.load(iteration + 2, &inputs.k, &inputs.v, batch, kv_heads, column, 0u32);
        }
    }

    if with_sums {
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + lane / 4;
            let total = sum_of_four(ds_sum[r]);
            if (lane % 4 == 0) & (query < queries) {
                let at = batch_head * problem.positions as usize + offset + query;
                ds_rows.as_mut().unwrap()[at] = total;
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
    dq.store(&dq_acc, &factors, batch, block.head, own, queries, config.head_dim);
}

/// Whether biases are added to finished products, rather than products to biases.
const fn adds_biases_after<A: Hooks>(config: KernelConfig) -> bool {
    BiasesOf::<A>::ENABLED && (config.changes_scores || OperandsOf::<A>::NEEDS_EQUAL_DS)
}

/// Turns scores into dP/d(scale · q·k) of each weight in place, with [`four_statistics`] into what [`Weight::ds_of`]
/// reads. `lane_row` and `lane_column` are a lane's first row and column, `row_shift` and `row_more` the shifts and
/// the four statistics of its two rows.
#[cube]
fn scores_to_slopes<A: Hooks>(
    s: &mut Accumulator,
    saved: &SavedRows<A>,
    score: &ScoreArgs<A>,
    problem: &ProblemShape,
    head: &<A::Score as Score>::Head,
    lane_row: u32,
    lane_column: u32,
    scale: f32,
    row_shift: &Array<f32>,
    row_more: &Array<Vector<f32, Const<4>>>,
    bias_state: &<A::Biases as Biases>::KeyLoop,
    warp: usize,
    #[comptime] config: KernelConfig,
) {
    let biases_after = comptime!(adds_biases_after::<A>(config));
    let products = comptime!(ScoreOf::<A>::WEIGHS_PRODUCTS);
    #[unroll]
    for n in 0..comptime!(config.tile / 8) {
        let mut key_biases = Pair::cast_from(0f32);
        if biases_after {
            key_biases = BiasesOf::<A>::of_keys(bias_state, warp, n, config);
        }
        #[unroll]
        for r in 0..2usize {
            let mut pair = s.index(n)[r];
            #[unroll]
            for e in 0..2usize {
                let mut shift = row_shift[r];
                if biases_after {
                    shift = fma(key_biases[e], LOG2_E, shift);
                }
                if products {
                    let (_, slope) = ScoreOf::<A>::weigh(score, pair[e], shift);
                    pair[e] = slope;
                } else if comptime!(four_statistics::<A>()) {
                    let (_, kept) = WeightOf::<A>::weight_of(saved, pair[e], scale, row_more[r]);
                    pair[e] = kept;
                } else {
                    let (_, weight_slope) = WeightOf::<A>::weigh(saved, pair[e], scale, shift);
                    let mut slope = weight_slope;
                    if comptime!(config.nonlinear_scores) {
                        let row = lane_row + comptime!((r * 8) as u32);
                        let column = lane_column + comptime!((n * 8 + e) as u32);
                        let score_slope =
                            ScoreOf::<A>::slope(score, problem, head, pair[e], row, column);
                        slope *= score_slope;
                    }
                    pair[e] = slope;
                }
            }
            s.index_mut(n)[r] = pair;
        }
    }
}

/// Turns the results of [`scores_to_slopes`] into dS in place, and adds them to the `sums` of a lane's two rows with
/// [`sums_of_rows`]. `row_delta` is subtracted from the gradients of weights; `row_more` are the rows' statistics
/// with [`four_statistics`].
#[cube]
fn slopes_to_ds<A: Hooks>(
    s: &mut Accumulator,
    dp: &Accumulator,
    saved: &SavedRows<A>,
    row_delta: &Array<f32>,
    row_more: &Array<Vector<f32, Const<4>>>,
    sums: &mut Array<f32>,
    #[comptime] n_keys: usize,
) {
    #[unroll]
    for n in 0..n_keys {
        #[unroll]
        for r in 0..2usize {
            let mut pair = s.index(n)[r];
            let grads = dp.index(n)[r];
            #[unroll]
            for e in 0..2usize {
                if comptime!(four_statistics::<A>()) {
                    pair[e] = WeightOf::<A>::ds_of(saved, pair[e], row_more[r], grads[e]);
                } else {
                    pair[e] *= grads[e] - row_delta[r];
                }
            }
            if comptime!(sums_of_rows::<A>()) {
                // In pairs: half as many additions wait for one another.
                sums[r] += pair[0] + pair[1];
            }
            s.index_mut(n)[r] = pair;
        }
    }
}
