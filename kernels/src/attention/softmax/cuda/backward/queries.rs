//! dq.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::super::decay::{TileSums, start_from_biases, sum_before};
use super::super::gates::{TILE, gate_pairs, powers, read_ends, scale_columns, scale_lefts};
use super::super::prune::{bounds_of_group, least_of_block, start_of};
use super::super::scores::{Options, Problem, cap_slope, first_key, make_scores, rest_of_scale};
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
#[allow(arithmetic_overflow)] // CUBE_POS_X and the like are no constants on the device.
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
    let batch = CUBE_POS_Y as usize / problem.heads as usize;
    let head = CUBE_POS_Y as usize % problem.heads as usize;
    let kv_head = head / problem.group as usize;
    let queries = problem.queries as usize;
    let keys = problem.keys as usize;
    // The longest first.
    let first_row = (CUBE_COUNT_X - 1 - CUBE_POS_X) as usize * rows;
    let offset = keys - queries;

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

    // The tiles with keys that some query of the block sees.
    let block_last = offset + min(first_row + rows, queries) - 1;
    let mut from = first_key(&problem, documents, batch, offset + first_row, options);
    if options.prune {
        from = max(from, least_of_block(bounds, CUBE_POS_Y as usize, first_row, queries, warps));
    }
    let from = from / span;
    let blocks = block_last / span + 1 - from;

    if UNIT_POS == 0 {
        for block in 0..2usize {
            if block < blocks {
                let mut others = 0u32;
                if block == 0 {
                    others += comptime!(2 * bytes(rows, dim));
                }
                let column = (from + block) * span;
                stages.fill::<E, V>(
                    block,
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
                if block == 0 {
                    let (row, at) = (first_row, 0usize);
                    stages.load::<E, V>(block, q, batch, head, row, &mut q_tile, at, rows, dim);
                    stages.load::<E, V>(
                        block,
                        grad,
                        batch,
                        head,
                        row,
                        &mut grad_tile,
                        at,
                        rows,
                        dim,
                    );
                }
            }
        }
    }

    // The warpgroup's queries, and the keys that some and that all of them see.
    let group_row = first_row + warp / GROUP_WARPS * GROUP_ROWS;
    let all_to = offset + group_row;
    let group_last = offset + min(group_row + GROUP_ROWS, queries) - 1;
    let mut group_from = first_key(&problem, documents, batch, all_to, options);
    let mut all_from = first_key(&problem, documents, batch, group_last, options);
    if options.prune {
        let (least, most) = bounds_of_group(bounds, CUBE_POS_Y as usize, group_row, queries);
        group_from = max(group_from, least);
        all_from = max(all_from, most);
    }
    // Shuffled, as the warp's number is.
    let group_from = plane_shuffle(group_from as u32, 0u32) as usize;
    let own = first_row + warp * 16;
    let row = CUBE_POS_Y as usize;

    let mut dq_acc = zeros::<NC>(n_dim);
    let mut row_lse = Array::<f32>::new(2usize);
    let mut row_sum = Array::<f32>::new(2usize);
    let mut first = Array::<u32>::new(2usize);
    let mut ds_sum = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let query = own + r * 8 + lane / 4;
        let at = row * queries + min(query, queries - 1);
        row_lse[r] = lse[at];
        row_sum[r] = sums[at];
        first[r] = first_key(&problem, documents, batch, offset + query, options) as u32;
        if options.prune {
            first[r] = max(first[r], start_of(starts, row, query, queries));
        }
        ds_sum[r] = 0f32;
    }
    let mut slope = 0f32;
    if options.alibi {
        slope = slopes[head];
    }
    let scale = rest_of_scale(&problem, options);
    // The first tile that the warpgroup sees, and which of the block's it sees.
    let start = group_from / span * span;
    let mut seen_from = start / span - from;
    let mut seen_to = group_last / span + 1 - from;
    if group_row >= queries {
        seen_from = blocks;
        seen_to = blocks;
    }
    let mut own_sum = f64::cast_from(0f32);
    let mut tile_sums = TileSums::new(span);
    let mut s = unset::<NC>(n_keys);
    let mut dp = unset::<NC>(n_keys);
    if options.decay {
        own_sum = sum_before(before, row, keys, min(all_to, keys - 1));
        tile_sums.read(before, within, row, keys, start, span);
        let biases = tile_sums.biases::<N2>(own_sum, LOG2_E / scale, span);
        write_notes::<f32, N2>(&mut bias_tile, &biases, warp, span / 2);
        start_from_biases::<NC, N2>(&mut s, &bias_tile, warp * span / 2, n_keys);
        if start + span <= group_last {
            tile_sums.read(before, within, row, keys, start + span, span);
        }
    }
    let ends_at = (batch * (problem.heads / problem.group) as usize + kv_head)
        * ((keys + TILE - 1) / TILE + 1)
        * dim;
    // Where the gates of q are, of dq so far, and of the next tile.
    let mut own_ends = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut here = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut there = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    if comptime!(gated > 0) {
        read_ends::<N2>(ends, ends_at, all_to / TILE, &mut own_ends, pairs, dim);
        read_ends::<N2>(ends, ends_at, start / TILE + 1, &mut here, pairs, dim);
        read_ends::<N2>(ends, ends_at, start / TILE + 1, &mut there, pairs, dim);
    }

    for block in 0..blocks {
        let first_column = (from + block) * span;
        let at = block % 2 * comptime!(span * chunks);
        stages.wait(block);
        if (block >= seen_from) & (block < seen_to) {
            if block == seen_from {
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
                #[unroll]
                for i in 0..comptime!(pairs.div_ceil(32)) {
                    here[i] = there[i];
                }
                if first_column + span <= group_last {
                    let next = (first_column + span) / TILE + 1;
                    read_ends::<N2>(ends, ends_at, next, &mut there, pairs, dim);
                }
            }
            wait::<NC>(&mut s, 1usize);

            let edge = (first_column + span > all_to + 1) | (first_column < all_from);
            let lane_row = (offset + own + lane / 4) as u32;
            let lane_column = (first_column + (lane % 4) * 2) as u32;
            make_scores::<NC>(
                &mut s,
                &problem,
                slope,
                lane_row,
                lane_column,
                &first,
                edge,
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
            if block + 1 < seen_to {
                if options.decay {
                    let biases = tile_sums.biases::<N2>(own_sum, LOG2_E / scale, span);
                    write_notes::<f32, N2>(&mut bias_tile, &biases, warp, span / 2);
                    start_from_biases::<NC, N2>(&mut s, &bias_tile, warp * span / 2, n_keys);
                }
                stages.wait(block + 1);
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
                if comptime!(options.decay) && next <= group_last {
                    tile_sums.read(before, within, row, keys, next, span);
                }
                wait::<NC>(&mut dq_acc, 2usize);
            } else {
                wait::<NC>(&mut dq_acc, 0usize);
            }
        }
        if stages.leave(block, warps) & (block + 2 < blocks) {
            let column = first_column + 2 * span;
            stages.fill::<E, V>(
                block + 2,
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
    let base = dq_rows.base(batch, head);
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
        let pairs = comptime!(gate_pairs(gated));
        let factors = powers::<E, NA, N2>(own_ends, ends_of_tile, pairs);
        write_notes::<E, NA>(gate_factors, &factors, warp, pairs);
        let mut q_lefts = lefts::<E, V, NA>(def, q_tile, warp * 16, steps, rows);
        scale_lefts::<E, NA>(&mut q_lefts, gate_factors, warp * pairs, gated);
        start_abt::<E, V, NA, NC>(&q_lefts, k_tile, at, s, true, n_keys);
    } else {
        let fresh = comptime!(!options.decay);
        start_tile_abt::<E, V, NC>(q_tile, row, rows, k_tile, at, s, fresh, n_keys, steps);
    }
    start_tile_abt::<E, V, NC>(grad_tile, row, rows, v_tile, at, dp, true, n_keys, steps);
}
