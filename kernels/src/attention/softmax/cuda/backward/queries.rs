//! dq.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::super::decay::{TileSums, sum_before};
use super::super::gates::{
    TILE, bring_lefts, copy_ends, gate_pairs, powers, read_ends, scale_columns,
};
use super::super::scores::{Options, Problem, cap_slope, make_scores, rest_of_scale};
use super::super::sight::QueryBlock;
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Stages, as_lefts, start_abt, start_pb, start_tile_abt, unset, wait,
};
use crate::tile::{
    ALIGN, CHUNK, LOG2_E, Rows, bytes, define_exp2, exp2, lefts, store_rows, sum_of_four,
    write_notes, zeros,
};

/// dq, with gates relative to 2^(p_i − E_I) and without the scale; with a decay, also Σ_j dS_ij of each
/// query at its position in `d_rows`, `[batch, heads, keys]`.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn queries<E: Numeric, O: Numeric, V: Size, W: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    grad: &TensorMap<E, Tiled>,
    lse: &Array<f32>,
    sums: &Array<f32>,
    documents: &Array<i32>,
    slopes: &Array<f32>,
    within: &Array<f32>,
    before: &Array<f64>,
    d_rows: &mut Array<f32>,
    ends: &Array<i32>,
    starts: &Array<i32>,
    bounds: &Array<i32>,
    dq: &mut Array<Vector<O, W>>,
    problem: Problem,
    dq_rows: Rows,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, warps, span, gated, .. } = comptime!(options);
    let rows = comptime!(options.rows());
    let chunks = comptime!(dim / CHUNK);
    let real = comptime!(options.real / CHUNK);
    let (n_keys, n_dim) = comptime!((span / 8, dim / 8));

    let lane = UNIT_POS_PLANE as usize;
    // Shuffled, the compiler knows that it is one for the warp.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, documents, bounds, options);
    let (batch, kv_head, row) = (block.batch, block.kv_head, block.row);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let (queries, keys) = (problem.queries as usize, problem.keys as usize);

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);

    let stages = Stages::new();
    sync_async_proxy_shared();
    // Two tiles of K and of V, by turns.
    let mut q_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut grad_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    // Each warp's own: biases of a tile's keys, the gates' factors of q for a tile, and those that bring
    // dq so far to the tile's units.
    let size!(N2) = 2usize;
    let mut bias_tile =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(warps * span / 2), 8usize);
    let pairs = comptime!(gate_pairs(gated));
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(warps * pairs), 16usize);
    let mut gate_steps =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(warps * pairs), 16usize);
    sync_cube();

    if UNIT_POS == 0 {
        for turn in 0..2usize {
            if turn < tiles {
                let mut others = 0u32;
                if turn == 0 {
                    others += comptime!(2 * bytes(rows, dim));
                }
                let column = (from + turn) * span;
                stages.fill::<E, V>(
                    turn,
                    k,
                    v,
                    batch,
                    kv_head,
                    column,
                    &mut k_tile,
                    &mut v_tile,
                    others,
                    span,
                    dim,
                );
                if turn == 0 {
                    let (first, at) = (block.first_query, 0usize);
                    stages.load::<E, V>(
                        turn,
                        q,
                        batch,
                        block.head,
                        first,
                        &mut q_tile,
                        at,
                        rows,
                        dim,
                    );
                    stages.load::<E, V>(
                        turn,
                        grad,
                        batch,
                        block.head,
                        first,
                        &mut grad_tile,
                        at,
                        rows,
                        dim,
                    );
                }
            }
        }
    }

    let group = block.of_group(&problem, documents, bounds, warp, options);
    let own = block.first_query + warp * 16;

    let mut dq_acc = zeros::<NC>(n_dim);
    let mut row_lse = Array::<f32>::new(2usize);
    let mut row_sum = Array::<f32>::new(2usize);
    let first = block.first_keys(&problem, documents, starts, own, options);
    let mut ds_sum = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let at = row * queries + min(own + r * 8 + lane / 4, queries - 1);
        row_lse[r] = lse[at];
        row_sum[r] = sums[at];
        ds_sum[r] = 0f32;
    }
    let mut slope = 0f32;
    if options.alibi {
        slope = slopes[block.head];
    }
    let scale = rest_of_scale(&problem, options);
    // The first tile that the warpgroup sees, and which of the block's it sees.
    let start = group.from / span * span;
    let mut seen_from = start / span - from;
    let mut seen_to = group.last / span + 1 - from;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }
    let mut own_sum = f64::cast_from(0f32);
    let mut tile_sums = TileSums::new(span);
    let mut s = unset::<NC>(n_keys);
    let mut dp = unset::<NC>(n_keys);
    if options.decay {
        own_sum = sum_before(before, row, keys, min(group.first, keys - 1));
        tile_sums.read(before, within, row, keys, start, span);
        tile_sums.start_from_biases::<NC, N2>(
            &mut s,
            &mut bias_tile,
            own_sum,
            LOG2_E / scale,
            warp,
            span,
        );
        if start + span <= group.last {
            tile_sums.read(before, within, row, keys, start + span, span);
        }
    }
    let ends_at = block.gates_at(&problem, (keys + TILE - 1) / TILE + 1, options);
    // Where the gates of q are, of dq so far, and of the next tile.
    let mut own_ends = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut here = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut there = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    if comptime!(gated > 0) {
        read_ends::<N2>(ends, ends_at, group.first / TILE, &mut own_ends, pairs, dim);
        read_ends::<N2>(ends, ends_at, start / TILE + 1, &mut here, pairs, dim);
        read_ends::<N2>(ends, ends_at, start / TILE + 1, &mut there, pairs, dim);
    }

    for turn in 0..tiles {
        let first_column = (from + turn) * span;
        let at = turn % 2 * comptime!(span * chunks);
        stages.wait(turn);
        if (turn >= seen_from) & (turn < seen_to) {
            if turn == seen_from {
                start_scores::<E, V, NA, NC, N2>(
                    &def,
                    &mut s,
                    &mut dp,
                    &q_tile,
                    &grad_tile,
                    &k_tile,
                    &v_tile,
                    at,
                    &mut gate_factors,
                    &own_ends,
                    &there,
                    warp,
                    options,
                );
            }
            if comptime!(gated > 0) {
                let steps_to = powers::<f32, N2, N2>(&there, &here, pairs);
                write_notes::<f32, N2>(&mut gate_steps, &steps_to, warp, pairs);
                copy_ends::<N2>(&there, &mut here, pairs);
                if first_column + span <= group.last {
                    let next = (first_column + span) / TILE + 1;
                    read_ends::<N2>(ends, ends_at, next, &mut there, pairs, dim);
                }
            }
            wait::<NC>(&mut s, 1usize);

            let lane_row = (offset + own + lane / 4) as u32;
            let lane_column = (first_column + (lane % 4) * 2) as u32;
            make_scores::<NC>(
                &mut s,
                &problem,
                slope,
                lane_row,
                lane_column,
                &first,
                group.at_edge(first_column, span),
                n_keys,
                options,
            );
            // s becomes P, with a cap times its slope.
            #[unroll]
            for n in 0..n_keys {
                #[unroll]
                for r in 0..2usize {
                    let mut pair = s.index(n)[r];
                    #[unroll]
                    for e in 0..2usize {
                        let mut p = exp2(fma(pair[e], scale, -row_lse[r]));
                        if options.softcap {
                            let row = lane_row + comptime!((r * 8) as u32);
                            let column = lane_column + comptime!((n * 8 + e) as u32);
                            p *= cap_slope(pair[e], &problem, slope, row, column, options);
                        }
                        pair[e] = p;
                    }
                    s.index_mut(n)[r] = pair;
                }
            }
            wait::<NC>(&mut dp, 0usize);
            #[unroll]
            for n in 0..n_keys {
                #[unroll]
                for r in 0..2usize {
                    let mut pair = s.index(n)[r];
                    let grads = dp.index(n)[r];
                    #[unroll]
                    for e in 0..2usize {
                        let ds = pair[e] * (grads[e] - row_sum[r]);
                        if options.decay {
                            ds_sum[r] += ds;
                        }
                        pair[e] = ds;
                    }
                    s.index_mut(n)[r] = pair;
                }
            }
            if comptime!(gated > 0) {
                scale_columns::<N2, NC>(&mut dq_acc, &gate_steps, warp * pairs, gated);
            }
            let ds = as_lefts::<E, NA, NC>(&s, n_keys);
            start_pb::<E, V, NA, NC>(&ds, &k_tile, at, &mut dq_acc);
            // The next tile's scores are under way before this tile's product is waited for.
            if turn + 1 < seen_to {
                if options.decay {
                    tile_sums.start_from_biases::<NC, N2>(
                        &mut s,
                        &mut bias_tile,
                        own_sum,
                        LOG2_E / scale,
                        warp,
                        span,
                    );
                }
                stages.wait(turn + 1);
                let next_at = comptime!(span * chunks) - at;
                start_scores::<E, V, NA, NC, N2>(
                    &def,
                    &mut s,
                    &mut dp,
                    &q_tile,
                    &grad_tile,
                    &k_tile,
                    &v_tile,
                    next_at,
                    &mut gate_factors,
                    &own_ends,
                    &there,
                    warp,
                    options,
                );
                let next = first_column + 2 * span;
                if comptime!(options.decay) && next <= group.last {
                    tile_sums.read(before, within, row, keys, next, span);
                }
                wait::<NC>(&mut dq_acc, 2usize);
            } else {
                wait::<NC>(&mut dq_acc, 0usize);
            }
        }
        if stages.leave(turn, warps) & (turn + 2 < tiles) {
            let column = first_column + 2 * span;
            stages.fill::<E, V>(
                turn + 2,
                k,
                v,
                batch,
                kv_head,
                column,
                &mut k_tile,
                &mut v_tile,
                0u32,
                span,
                dim,
            );
        }
    }

    if options.decay {
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + lane / 4;
            let total = sum_of_four(ds_sum[r]);
            if (lane % 4 == 0) & (query < queries) {
                d_rows[row * keys + offset + query] = total;
            }
        }
    }
    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        factors[r] = problem.scale;
        if gated > 0 {
            factors[r] = 1f32;
        }
    }
    let base = dq_rows.base(batch, block.head);
    let stride = dq_rows.row as usize;
    store_rows::<O, W, NC>(&dq_acc, &factors, dq, base, stride, own, queries, n_dim, real);
}

/// Starts a tile's scores, from q brought to the gates of the tile's keys, and dO·Vᵀ.
#[cube]
fn start_scores<E: Numeric, V: Size, NA: Size, NC: Size, N2: Size>(
    def: &MmaDefinition<E, E, f32>,
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    dp: &mut Sequence<Array<Vector<f32, NC>>>,
    q_tile: &SharedMemory<Vector<E, V>>,
    grad_tile: &SharedMemory<Vector<E, V>>,
    k_tile: &SharedMemory<Vector<E, V>>,
    v_tile: &SharedMemory<Vector<E, V>>,
    at: usize,
    gate_factors: &mut SharedMemory<Vector<E, NA>>,
    own_ends: &Array<Vector<i32, N2>>,
    ends_of_tile: &Array<Vector<i32, N2>>,
    warp: usize,
    #[comptime] options: Options,
) {
    let Options { dim, span, gated, .. } = comptime!(options);
    let (rows, steps, n_keys) = comptime!((options.rows(), dim / 16, span / 8));
    let row = warp / GROUP_WARPS * GROUP_ROWS;
    if comptime!(gated > 0) {
        let mut q_lefts = lefts::<E, V, NA>(def, q_tile, warp * 16, steps, rows);
        bring_lefts::<E, NA, N2>(&mut q_lefts, own_ends, ends_of_tile, gate_factors, warp, gated);
        start_abt::<E, V, NA, NC>(&q_lefts, k_tile, at, s, true, n_keys);
    } else {
        let fresh = comptime!(!options.decay);
        start_tile_abt::<E, V, NC>(q_tile, row, rows, k_tile, at, s, fresh, n_keys, steps);
    }
    start_tile_abt::<E, V, NC>(grad_tile, row, rows, v_tile, at, dp, true, n_keys, steps);
}
