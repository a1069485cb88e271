//! The kernel of dk and dv.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::heads::HeadQuads;
use super::super::hooks::{
    BiasArgs, Biases, BiasesOf, GradientOf, Hooks, OperandArgs, Operands, OperandsOf, SavedRows,
    Score, ScoreArgs, ScoreOf, Weight, WeightOf, four_statistics, sums_of_columns,
};
use super::super::mask::Mask;
use super::super::problem::{Causality, KernelConfig, ProblemShape};
use super::BackwardInputs;
use super::of_keys::{Passes, make_scores_of_keys, slopes_to_ds, weigh_scores};
use super::query_tile::QueryTile;
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Pipeline, start_pb, start_tile_abt, to_a_frags, uninit,
    uninit_a_frags, wait,
};
use crate::tile::{ALIGN, CHUNK, Chunk, bytes, define_exp2, sum_of_four, zeros};

/// The outputs of a launch of [`dkv`]: registers hold both accumulators only for heads of up to 128 channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DkvOutputs {
    Both,
    Dk,
    Dv,
}

/// The outputs of the kernel.
#[derive(CubeType, CubeLaunch)]
pub struct KeyGradients<O: Numeric> {
    /// `[batch, kv_heads, keys, head_dim]`
    pub dk: HeadQuads<O>,
    /// `[batch, kv_heads, keys, value_dim]`: the part of each head of k, also where several share their values.
    pub dv: HeadQuads<bf16>,
    /// With [`sums_of_columns`], Σ_i dS_ij of each key, `[batch, heads, keys]`, zero-initialised.
    pub ds_columns: ComptimeOption<Array<f32>>,
}

/// [`KeyGradients`] of a kind.
pub type KeyGradientsOf<A> = KeyGradients<GradientOf<A>>;

/// dk and dv, over all query heads of the kv head. A warp's rows are keys and columns are queries: it
/// computes Sᵀ.
///
/// Grid: blocks of keys, batch · kv_heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn dkv<A: Hooks>(
    inputs: &BackwardInputs,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    saved: &SavedRows<A>,
    gradients: &mut KeyGradientsOf<A>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
    #[comptime] outputs: DkvOutputs,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, warps, tile, .. } =
        comptime!(config);
    let (with_dk, with_dv) = comptime!((outputs != DkvOutputs::Dv, outputs != DkvOutputs::Dk));
    let with_sums = comptime!(sums_of_columns::<A>() && with_dk);
    let rows = comptime!(config.rows());
    let n_queries = comptime!(tile / 8);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let queries = problem.queries as usize;
    let keys = problem.keys as usize;
    let first_column = CUBE_POS_X as usize * rows;
    let offset = problem.offset();

    // Double-buffered tiles of q and dO.
    let mut pipeline = Pipeline::new(tile, (dim, value_dim), warps);
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * value_dim / CHUNK), ALIGN);
    let mut query_tile = QueryTile::new(warps, comptime!(four_statistics::<A>()), config);
    sync_cube();

    let passes = Passes::new(&problem, mask, CUBE_POS_Y as usize, first_column, config);
    let (batch, kv_head, total) = (passes.batch, passes.kv_head, passes.total);
    let in_reverse = comptime!(OperandsOf::<A>::DK_IN_REVERSE);
    if UNIT_POS == 0 {
        for iteration in 0..2usize {
            if iteration < total {
                let mut others = 0u32;
                if iteration == 0 {
                    others += comptime!(bytes(rows, dim) + bytes(rows, value_dim));
                }
                let (head, row) = passes.head_and_query(iteration, in_reverse, tile);
                let heads = (head, head);
                pipeline.load(iteration, &inputs.q, &inputs.grad, batch, heads, row, others);
                if iteration == 0 {
                    let (k, v, first) = (&inputs.k, &inputs.v, first_column);
                    let value_head = problem.value_head(kv_head, config);
                    pipeline.load_also(0usize, k, batch, kv_head, first, &mut k_tile, rows, dim);
                    pipeline.load_also(
                        0usize,
                        v,
                        batch,
                        value_head,
                        first,
                        &mut v_tile,
                        rows,
                        value_dim,
                    );
                }
            }
        }
    }

    // The warpgroup's keys.
    let group_row = warp / GROUP_WARPS * GROUP_ROWS;
    let group_column = first_column + group_row;
    let group_last = min(group_column + GROUP_ROWS, keys) - 1;
    let own = first_column + warp * 16;

    let mut dk_acc = zeros(comptime!(dim / 8));
    let mut dv_acc = zeros(comptime!(value_dim / 8));
    let mut s = uninit(n_queries);
    let mut dp = uninit(n_queries);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let mut ds_sum = Array::<f32>::new(2usize);
    ds_sum[0] = 0f32;
    ds_sum[1] = 0f32;
    let batch_kv_head = CUBE_POS_Y as usize;
    let mut operand_state =
        OperandsOf::<A>::dkv(operands, &problem, batch_kv_head, group_column, warp, config);
    let mut bias_state = BiasesOf::<A>::init_query_loop(config);

    if total > 0 {
        let (head, first_query) = passes.head_and_query(0usize, in_reverse, tile);
        query_tile.read::<A>(saved, mask, &problem, batch, head, first_query, config);
        OperandsOf::<A>::read_queries(
            &mut operand_state,
            operands,
            first_query,
            warp,
            true,
            config,
        );
        let batch_head = batch * problem.heads as usize + head;
        BiasesOf::<A>::read_queries(
            &mut bias_state,
            biases,
            &problem,
            batch_head,
            first_query,
            own,
            config,
        );
    }
    for iteration in 0..total {
        let (head, first_query) = passes.head_and_query(iteration, in_reverse, tile);
        let ahead = iteration + 1 < total;
        let next = min(iteration + 1, total - 1);
        let (next_head, next_query) = passes.head_and_query(next, in_reverse, tile);
        let (q_at, grad_at) = (pipeline.first_tile(iteration), pipeline.second_tile(iteration));

        // The minimum and maximum first key of the tile's queries.
        let mut tile_from = 0usize;
        let mut tile_all_from = 0usize;
        query_tile.put::<A>(mask, warp, config);
        if comptime!(mask.limits.any()) {
            let (least, most) = query_tile.min_and_max_first_key(config);
            tile_from = least;
            tile_all_from = most;
        }
        OperandsOf::<A>::begin_tile_of_dkv(&mut operand_state, warp, config);
        BiasesOf::<A>::begin_tile(&mut bias_state, config);
        // Read the next tile's data while this one is computed.
        if ahead {
            query_tile.read::<A>(saved, mask, &problem, batch, next_head, next_query, config);
            OperandsOf::<A>::read_queries(
                &mut operand_state,
                operands,
                next_query,
                warp,
                false,
                config,
            );
            let batch_head = batch * problem.heads as usize + next_head;
            BiasesOf::<A>::read_queries(
                &mut bias_state,
                biases,
                &problem,
                batch_head,
                next_query,
                own,
                config,
            );
        }

        pipeline.wait(iteration);
        let seen = (offset + first_query + tile > group_column) & (tile_from <= group_last);
        if seen & (group_column < keys) {
            OperandsOf::<A>::start_scores_of_dkv(
                &mut operand_state,
                &mut s,
                &k_tile,
                &pipeline.first_tiles,
                q_at,
                warp,
                config,
            );
            if with_dk {
                start_tile_abt(
                    &v_tile,
                    group_row,
                    rows,
                    &pipeline.second_tiles,
                    grad_at,
                    &mut dp,
                    true,
                    n_queries,
                    comptime!(value_dim / 16),
                );
            }
            let head_params = ScoreOf::<A>::head(score, head);
            wait(&mut s, comptime!(usize::from(with_dk)));

            let mut edge = (group_last > offset + first_query) | (first_query + tile > queries);
            if comptime!(config.causality == Causality::AllKeys) {
                edge |= group_column + GROUP_ROWS > keys;
            }
            edge |= tile_all_from > group_column;
            let lane_row = (offset + first_query + (lane % 4) * 2) as u32;
            let lane_column = (own + lane / 4) as u32;
            make_scores_of_keys::<A>(
                &mut s,
                score,
                &problem,
                &head_params,
                lane_row,
                lane_column,
                mask,
                &query_tile,
                warp,
                edge,
                config,
            );
            let mut p = uninit_a_frags(comptime!(n_queries / 2));
            weigh_scores::<A>(
                &mut s,
                &mut p,
                saved,
                score,
                &problem,
                &head_params,
                lane_row,
                lane_column,
                scale,
                &bias_state,
                &query_tile,
                warp,
                with_dv,
                config,
            );
            if with_dv {
                start_pb(&p, &pipeline.second_tiles, grad_at, &mut dv_acc);
            }
            if with_dk {
                wait(&mut dp, comptime!(usize::from(with_dv)));
                slopes_to_ds::<A>(
                    &s,
                    &mut dp,
                    saved,
                    &query_tile,
                    warp,
                    &mut ds_sum,
                    with_sums,
                    config,
                );
                OperandsOf::<A>::rescale_dk(&operand_state, &mut dk_acc, warp, config);
                let ds = to_a_frags(&dp, n_queries);
                start_pb(&ds, &pipeline.first_tiles, q_at, &mut dk_acc);
                wait(&mut dk_acc, 0usize);
            }
            if with_dv {
                wait(&mut dv_acc, 0usize);
            }
        }
        if pipeline.release(iteration) & (iteration + 2 < total) {
            let (head, row) = passes.head_and_query(iteration + 2, in_reverse, tile);
            let heads = (head, head);
            pipeline.load(iteration + 2, &inputs.q, &inputs.grad, batch, heads, row, 0u32);
        }
        if with_sums {
            // After the head's last tile; in reverse, where the heads of a group take turns, after each of its tiles.
            let done = (iteration + 1 == total) | (next_head != head);
            #[unroll]
            for r in 0..2usize {
                let column = own + r * 8 + lane / 4;
                let sum = sum_of_four(ds_sum[r]);
                if done & (lane % 4 == 0) & (column < keys) {
                    let at = (batch * problem.heads as usize + head) * keys + column;
                    let mut all = sum;
                    if in_reverse {
                        all += gradients.ds_columns.as_ref().unwrap()[at];
                    }
                    gradients.ds_columns.as_mut().unwrap()[at] = all;
                }
                ds_sum[r] = select(done, 0f32, ds_sum[r]);
            }
        }
    }

    let mut factors = Array::<f32>::new(2usize);
    if with_dv {
        factors[0] = 1f32;
        factors[1] = 1f32;
        gradients.dv.store(&dv_acc, &factors, batch, kv_head, own, keys, config.value_dim);
    }
    if with_dk {
        #[unroll]
        for r in 0..2usize {
            factors[r] = 1f32;
            if comptime!(OperandsOf::<A>::SCALES_GRADIENTS) {
                factors[r] = problem.scale;
            }
        }
        gradients.dk.store(&dk_acc, &factors, batch, kv_head, own, keys, config.head_dim);
    }
}
