//! The kernel of dk and dv for weights that depend on the keys after them.
//!
//! Unlike in [`dkv`](super::dkv), a warp's rows are queries: weights are computed along a row, from its carry. The
//! weights and dS of a pair of tiles go to shared memory, from where products take them transposed.

use cubecl::prelude::*;

use super::super::forward::make_scores;
use super::super::hooks::{Hooks, Score, ScoreArgs, ScoreOf, Weight, WeightOf};
use super::super::in_order::Carries;
use super::super::mask::{Mask, QueryBlock};
use super::super::problem::{KernelConfig, ProblemShape};
use super::BackwardInputs;
use super::dkv::{DkvOutputs, KeyGradientsOf};
use super::of_keys::Passes;
use crate::tile::warpgroup::{
    Pipeline, start_panels_atb, start_tile_abt, store_a_frags, to_a_frags, uninit, uninit_a_frags,
    wait,
};
use crate::tile::{ALIGN, CHUNK, Chunk, PANEL, bytes, define_exp2, zeros};

/// dk and dv, over all query heads of the kv head. A block is one warpgroup, and its keys and the tiles of queries
/// are 64 rows each.
///
/// Grid: blocks of keys, batch · kv_heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn dkv_in_order<A: Hooks>(
    inputs: &BackwardInputs,
    mask: &Mask,
    score: &ScoreArgs<A>,
    carries: &Carries,
    gradients: &mut KeyGradientsOf<A>,
    problem: ProblemShape,
    #[comptime] config: KernelConfig,
    #[comptime] outputs: DkvOutputs,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, warps, tile, .. } =
        comptime!(config);
    let (with_dk, with_dv) = comptime!((outputs != DkvOutputs::Dv, outputs != DkvOutputs::Dk));
    let n_keys = comptime!(tile / 8);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let keys = problem.keys as usize;
    let first_column = CUBE_POS_X as usize * tile;
    let offset = problem.offset();

    // Double-buffered tiles of q and dO.
    let mut pipeline = Pipeline::new(tile, (dim, value_dim), warps);
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(tile * dim / CHUNK), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(tile * value_dim / CHUNK), ALIGN);
    // The weights and dS of the current tiles, a row for each query.
    let mut p_tile = SharedMemory::<Chunk>::new_aligned(comptime!(tile * tile / CHUNK), ALIGN);
    let mut ds_tile = SharedMemory::<Chunk>::new_aligned(comptime!(tile * tile / CHUNK), ALIGN);
    if UNIT_POS == 0 {
        // cubecl places what it sees used.
        p_tile[0] = Chunk::cast_from(0f32);
        ds_tile[0] = Chunk::cast_from(0f32);
    }
    sync_cube();

    let passes = Passes::new(&problem, mask, CUBE_POS_Y as usize, first_column, config);
    let (batch, kv_head, total) = (passes.batch, passes.kv_head, passes.total);
    if UNIT_POS == 0 {
        for iteration in 0..2usize {
            if iteration < total {
                let mut others = 0u32;
                if iteration == 0 {
                    others += comptime!(bytes(tile, dim) + bytes(tile, value_dim));
                }
                let (head, row) = passes.head_and_query(iteration, false, tile);
                let heads = (head, head);
                pipeline.load(iteration, &inputs.q, &inputs.grad, batch, heads, row, others);
                if iteration == 0 {
                    let (k, v, first) = (&inputs.k, &inputs.v, first_column);
                    let value_head = problem.value_head(kv_head, config);
                    pipeline.load_also(0usize, k, batch, kv_head, first, &mut k_tile, tile, dim);
                    pipeline.load_also(
                        0usize,
                        v,
                        batch,
                        value_head,
                        first,
                        &mut v_tile,
                        tile,
                        value_dim,
                    );
                }
            }
        }
    }

    let mut dk_acc = zeros(comptime!(dim / 8));
    let mut dv_acc = zeros(comptime!(value_dim / 8));
    let mut s = uninit(n_keys);
    let mut dp = uninit(n_keys);
    let scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let mut row_carries = Array::<f32>::new(2usize);
    let mut row_sums = Array::<f32>::new(2usize);
    let key_tile = CUBE_POS_X as usize;

    for iteration in 0..total {
        let (head, first_query) = passes.head_and_query(iteration, false, tile);
        let batch_head = batch * problem.heads as usize + head;
        let zero = usize::cast_from(0u32);
        let block = QueryBlock {
            batch,
            head,
            kv_head,
            value_head: problem.value_head(kv_head, config),
            batch_head,
            first_query,
            offset,
            from: zero,
            tiles: zero,
        };
        pipeline.wait(iteration);
        let (q_at, grad_at) = (pipeline.first_tile(iteration), pipeline.second_tile(iteration));
        start_tile_abt(
            &pipeline.first_tiles,
            q_at / PANEL,
            tile,
            &k_tile,
            0usize,
            &mut s,
            true,
            n_keys,
            comptime!(dim / 16),
        );
        start_tile_abt(
            &pipeline.second_tiles,
            grad_at / PANEL,
            tile,
            &v_tile,
            0usize,
            &mut dp,
            true,
            n_keys,
            comptime!(value_dim / 16),
        );
        // The warp's queries.
        let own = first_query + warp * 16;
        let group = block.group(&problem, mask, warp, config);
        carries.read(&mut row_carries, &problem, batch_head, own, key_tile);
        carries.read_sums(&mut row_sums, &problem, batch_head, own, key_tile);
        // The forward pass wrote nothing for tiles that it did not visit.
        let visited = (first_column + tile > group.from) & (first_column <= group.last_key);
        #[unroll]
        for r in 0..2usize {
            row_carries[r] = select(visited, row_carries[r], 0f32);
            row_sums[r] = select(visited, row_sums[r], 0f32);
        }
        let first = block.first_keys(&problem, mask, own);
        let head_params = ScoreOf::<A>::head(score, head);
        wait(&mut s, 1usize);
        make_scores::<A>(
            &mut s,
            score,
            &problem,
            &head_params,
            (offset + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            group.at_edge(first_column, tile, WeightOf::<A>::SEES_ITSELF),
            false,
            config,
        );
        wait(&mut dp, 0usize);
        let mut p = uninit_a_frags(comptime!(n_keys / 2));
        WeightOf::<A>::gradients_in_order(
            &mut s,
            &mut dp,
            &mut p,
            &row_carries,
            &mut row_sums,
            scale,
            with_dv,
            n_keys,
        );
        // The products of the tiles before have ended in all warps.
        sync_cube();
        if with_dv {
            store_a_frags(&p, &mut p_tile, zero, warp * 16, tile);
        }
        if with_dk {
            let ds = to_a_frags(&s, n_keys);
            store_a_frags(&ds, &mut ds_tile, zero, warp * 16, tile);
        }
        sync_async_proxy_shared();
        sync_cube();
        if with_dv {
            let grads = &pipeline.second_tiles;
            start_panels_atb(&p_tile, zero, grads, grad_at, &mut dv_acc, false, tile);
        }
        if with_dk {
            let q = &pipeline.first_tiles;
            start_panels_atb(&ds_tile, zero, q, q_at, &mut dk_acc, false, tile);
            wait(&mut dk_acc, 0usize);
        }
        if with_dv {
            wait(&mut dv_acc, 0usize);
        }
        if pipeline.release(iteration) & (iteration + 2 < total) {
            let (head, row) = passes.head_and_query(iteration + 2, false, tile);
            let heads = (head, head);
            pipeline.load(iteration + 2, &inputs.q, &inputs.grad, batch, heads, row, 0u32);
        }
    }

    // The warp's keys.
    let own = first_column + warp * 16;
    let mut factors = Array::<f32>::new(2usize);
    if with_dv {
        factors[0] = 1f32;
        factors[1] = 1f32;
        gradients.dv.store(&dv_acc, &factors, batch, kv_head, own, keys, config.value_dim);
    }
    if with_dk {
        factors[0] = problem.scale;
        factors[1] = problem.scale;
        gradients.dk.store(&dk_acc, &factors, batch, kv_head, own, keys, config.head_dim);
    }
}
