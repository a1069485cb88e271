//! The forward pass: one block for 16·warps queries of a head, which passes over the keys from the
//! last to the first (Dao, "FlashAttention-2", 2023, algorithm 1). Each warpgroup works on 64 queries, at
//! its own pace, and has the next tile's scores computed while it waits for this tile's product (Shah et
//! al., "FlashAttention-3", 2024, section 3).

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::decay::{TileSums, sum_before};
use super::gates::{TILE, bring_lefts, copy_ends, gate_pairs, read_ends};
use super::scores::{Options, Problem, make_scores, rest_of_scale};
use super::sight::QueryBlock;
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Stages, as_lefts, start_abt, start_pb, start_tile_abt, unset, wait,
};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, LOG2_E, Rows, bytes, define_exp2, exp2, lefts, store_rows, sum_of_four,
    zeros,
};

/// o, and lse `[batch, heads, queries]`, the logarithm of the softmax's sum to base 2; with a decay,
/// relative to the sum before the span in which its warpgroup's queries begin.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn forward<E: Numeric, V: Size, W: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    documents: &Array<i32>,
    slopes: &Array<f32>,
    within: &Array<f32>,
    before: &Array<f64>,
    ends: &Array<i32>,
    starts: &Array<i32>,
    bounds: &Array<i32>,
    o: &mut Array<Vector<E, W>>,
    lse: &mut Array<f32>,
    problem: Problem,
    o_rows: Rows,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, warps, span, gated, .. } = comptime!(options);
    let rows = comptime!(options.rows());
    let chunks = comptime!(dim / CHUNK);
    let real = comptime!(options.real / CHUNK);
    let steps = comptime!(dim / 16);
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
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    // Each warp's own: biases of a tile's keys, and the factors by which q goes on to a tile.
    let size!(N2) = 2usize;
    let mut bias_tile =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(warps * span / 2), 8usize);
    let pairs = comptime!(gate_pairs(gated));
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(warps * pairs), 16usize);
    sync_cube();

    let last = from + tiles - 1;
    if UNIT_POS == 0 {
        for back in 0..2usize {
            if back < tiles {
                let mut others = 0u32;
                if back == 0 {
                    others += comptime!(bytes(rows, dim));
                }
                let column = (last - back) * span;
                stages.fill::<E, V>(
                    back,
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
                if back == 0 {
                    stages.load::<E, V>(
                        back,
                        q,
                        batch,
                        block.head,
                        block.first_query,
                        &mut q_tile,
                        0,
                        rows,
                        dim,
                    );
                }
            }
        }
    }

    let group = block.of_group(&problem, documents, bounds, warp, options);
    let own = block.first_query + warp * 16;
    let mut q_lefts = if comptime!(gated > 0) {
        stages.wait(0);
        lefts::<E, V, NA>(&def, &q_tile, warp * 16, steps, rows)
    } else {
        Sequence::<Array<Vector<E, NA>>>::new()
    };

    let mut o_acc = zeros::<NC>(n_dim);
    let mut highest = Array::<f32>::new(2usize);
    let mut sum = Array::<f32>::new(2usize);
    let first = block.first_keys(&problem, documents, starts, own, options);
    #[unroll]
    for r in 0..2usize {
        highest[r] = HIDDEN;
        sum[r] = 0f32;
    }
    let mut slope = 0f32;
    if options.alibi {
        slope = slopes[block.head];
    }
    let scale = rest_of_scale(&problem, options);
    // The first tile that the warpgroup sees, and which of the block's it sees.
    let start = group.last / span * span;
    let mut seen_from = last - start / span;
    let mut seen_to = last + 1 - group.from / span;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }
    let mut own_sum = f64::cast_from(0f32);
    let mut sums = TileSums::new(span);
    let mut s = unset::<NC>(n_keys);
    if options.decay {
        own_sum = sum_before(before, row, keys, min(group.first, keys - 1));
        sums.read(before, within, row, keys, start, span);
        sums.start_from_biases::<NC, N2>(
            &mut s,
            &mut bias_tile,
            own_sum,
            LOG2_E / scale,
            warp,
            span,
        );
        if start > group.from {
            sums.read(before, within, row, keys, start - span, span);
        }
    }
    // The starts of tiles go up to the one that the next token is in.
    let mut ends_of_row = keys / TILE + 1;
    if comptime!(!options.from_starts) {
        ends_of_row = (keys + TILE - 1) / TILE + 1;
    }
    let ends_at = block.gates_at(&problem, ends_of_row, options);
    // Where q's gates are, and where they go for the next tile: to its end, or its start.
    let anchor = comptime!(if options.from_starts { 0usize } else { 1usize });
    let mut here = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut there = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    if comptime!(gated > 0) {
        read_ends::<N2>(ends, ends_at, group.first / TILE, &mut here, pairs, dim);
        read_ends::<N2>(ends, ends_at, start / TILE + anchor, &mut there, pairs, dim);
    }

    pass_by::<E, V>(
        &stages,
        0usize,
        seen_from,
        tiles,
        k,
        v,
        batch,
        kv_head,
        last,
        &mut k_tile,
        &mut v_tile,
        options,
    );
    if seen_from < seen_to {
        stages.wait(seen_from);
        let at = seen_from % 2 * comptime!(span * chunks);
        start_scores::<E, V, NA, NC, N2>(
            &mut s,
            &mut q_lefts,
            &q_tile,
            &k_tile,
            at,
            &mut gate_factors,
            &mut here,
            &there,
            warp,
            options,
        );
        if comptime!(gated > 0) && start > group.from {
            read_ends::<N2>(ends, ends_at, (start - span) / TILE + anchor, &mut there, pairs, dim);
        }
    }
    for back in seen_from..seen_to {
        let first_column = (last - back) * span;
        let at = back % 2 * comptime!(span * chunks);
        wait::<NC>(&mut s, 0usize);

        make_scores::<NC>(
            &mut s,
            &problem,
            slope,
            (offset + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            group.at_edge(first_column, span),
            n_keys,
            options,
        );
        add_tile_softmax::<NC>(&mut s, &mut o_acc, &mut highest, &mut sum, scale, n_keys, n_dim);
        let p = as_lefts::<E, NA, NC>(&s, n_keys);
        start_pb::<E, V, NA, NC>(&p, &v_tile, at, &mut o_acc);
        // The next tile's scores are under way before this tile's product is waited for.
        if back + 1 < seen_to {
            let next = first_column - span;
            if options.decay {
                sums.start_from_biases::<NC, N2>(
                    &mut s,
                    &mut bias_tile,
                    own_sum,
                    LOG2_E / scale,
                    warp,
                    span,
                );
            }
            stages.wait(back + 1);
            let next_at = comptime!(span * chunks) - at;
            start_scores::<E, V, NA, NC, N2>(
                &mut s,
                &mut q_lefts,
                &q_tile,
                &k_tile,
                next_at,
                &mut gate_factors,
                &mut here,
                &there,
                warp,
                options,
            );
            if next > group.from {
                if options.decay {
                    sums.read(before, within, row, keys, next - span, span);
                }
                if comptime!(gated > 0) {
                    let end = (next - span) / TILE + anchor;
                    read_ends::<N2>(ends, ends_at, end, &mut there, pairs, dim);
                }
            }
            wait::<NC>(&mut o_acc, 1usize);
        } else {
            wait::<NC>(&mut o_acc, 0usize);
        }
        if stages.leave(back, warps) & (back + 2 < tiles) {
            let column = first_column - 2 * span;
            stages.fill::<E, V>(
                back + 2,
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
    pass_by::<E, V>(
        &stages,
        seen_to,
        tiles,
        tiles,
        k,
        v,
        batch,
        kv_head,
        last,
        &mut k_tile,
        &mut v_tile,
        options,
    );

    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let total = sum_of_four(sum[r]);
        factors[r] = 1f32 / total;
        let at = own + r * 8 + lane / 4;
        if (lane % 4 == 0) & (at < queries) {
            lse[row * queries + at] = fma(highest[r], scale, Log::ln(total) * LOG2_E);
        }
    }
    let base = o_rows.base(batch, block.head);
    let stride = o_rows.row as usize;
    store_rows::<E, W, NC>(&o_acc, &factors, o, base, stride, own, queries, n_dim, real);
}

/// Passes by tiles that the warpgroup does not see.
#[cube]
fn pass_by<E: Numeric, V: Size>(
    stages: &Stages,
    from: usize,
    to: usize,
    tiles: usize,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    batch: usize,
    kv_head: usize,
    last: usize,
    k_tile: &mut SharedMemory<Vector<E, V>>,
    v_tile: &mut SharedMemory<Vector<E, V>>,
    #[comptime] options: Options,
) {
    let Options { dim, warps, span, .. } = comptime!(options);
    for back in from..to {
        stages.wait(back);
        if stages.leave(back, warps) & (back + 2 < tiles) {
            let (next, column) = (back + 2, (last - back - 2) * span);
            stages
                .fill::<E, V>(next, k, v, batch, kv_head, column, k_tile, v_tile, 0u32, span, dim);
        }
    }
}

/// Starts a tile's scores; with gates, after q has been brought to its keys' gates.
#[cube]
fn start_scores<E: Numeric, V: Size, NA: Size, NC: Size, N2: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    q_lefts: &mut Sequence<Array<Vector<E, NA>>>,
    q_tile: &SharedMemory<Vector<E, V>>,
    k_tile: &SharedMemory<Vector<E, V>>,
    at: usize,
    gate_factors: &mut SharedMemory<Vector<E, NA>>,
    here: &mut Array<Vector<i32, N2>>,
    there: &Array<Vector<i32, N2>>,
    warp: usize,
    #[comptime] options: Options,
) {
    let Options { dim, span, gated, .. } = comptime!(options);
    let n_keys = comptime!(span / 8);
    if comptime!(gated > 0) {
        bring_lefts::<E, NA, N2>(q_lefts, here, there, gate_factors, warp, gated);
        copy_ends::<N2>(there, here, comptime!(gate_pairs(gated)));
        start_abt::<E, V, NA, NC>(q_lefts, k_tile, at, s, true, n_keys);
    } else {
        let row = warp / GROUP_WARPS * GROUP_ROWS;
        let fresh = comptime!(!options.decay);
        let (rows, steps) = comptime!((options.rows(), dim / 16));
        start_tile_abt::<E, V, NC>(q_tile, row, rows, k_tile, at, s, fresh, n_keys, steps);
    }
}

/// How far scores, to base 2, may grow above what exponentials are relative to.
const GROWTH: f32 = 8.0;

/// One step of the online softmax (Milakov and Gimelshein, 2018, algorithm 3): scores become
/// exponentials relative to `highest`. Where a score has outgrown that by [`GROWTH`], `highest` becomes
/// the highest so far, and what was summed before is brought down to it.
#[cube]
pub fn add_tile_softmax<NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    o: &mut Sequence<Array<Vector<f32, NC>>>,
    highest: &mut Array<f32>,
    sum: &mut Array<f32>,
    scale: f32,
    #[comptime] n_keys: usize,
    #[comptime] n_dim: usize,
) {
    let mut tops = Array::<f32>::new(2usize);
    let mut grown = false;
    #[unroll]
    for r in 0..2usize {
        let mut top = highest[r];
        #[unroll]
        for n in 0..n_keys {
            let pair = s.index(n)[r];
            top = max(top, max(pair[0], pair[1]));
        }
        top = max(top, plane_shuffle_xor(top, 1));
        top = max(top, plane_shuffle_xor(top, 2));
        grown |= (top - highest[r]) * scale > GROWTH;
        tops[r] = top;
    }
    if plane_any(grown) {
        #[unroll]
        for r in 0..2usize {
            let down = exp2((highest[r] - tops[r]) * scale);
            highest[r] = tops[r];
            sum[r] *= down;
            #[unroll]
            for n in 0..n_dim {
                let fragment = o.index_mut(n);
                let mut pair = fragment[r];
                pair[0] *= down;
                pair[1] *= down;
                fragment[r] = pair;
            }
        }
    }
    #[unroll]
    for r in 0..2usize {
        // A row that has seen no key yet: a shift of HIDDEN's size would not cancel in rounding.
        let shift = select(highest[r] > HIDDEN, highest[r] * scale, 0f32);
        let mut total = sum[r];
        #[unroll]
        for n in 0..n_keys {
            let fragment = s.index_mut(n);
            let mut pair = fragment[r];
            pair[0] = exp2(fma(pair[0], scale, -shift));
            pair[1] = exp2(fma(pair[1], scale, -shift));
            total += pair[0] + pair[1];
            fragment[r] = pair;
        }
        sum[r] = total;
    }
}
