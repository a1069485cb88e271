//! dk and dv.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::super::decay::{SPAN, bias};
use super::super::gates::{
    TILE, copy_ends, gate_pairs, powers, read_ends, scale_columns, scale_lefts,
};
use super::super::prune::end_of_queries;
use super::super::scores::{
    Options, Problem, cap_slope, first_above, full_score, hidden, rest_of_scale,
};
use super::query_tile::{QueryTile, spans_of};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_WARPS, Stages, as_lefts, set_left, start_abt, start_pb, start_tile_abt,
    unset, unset_lefts, wait,
};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, LOG2_E, Rows, bytes, define_exp2, exp2, lefts, store_rows, sum_of_four,
    write_notes, zeros,
};

/// What a launch of [`keys`] makes: registers hold both for heads of up to 128 channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parts {
    Both,
    Dk,
    Dv,
}

/// dk and dv, with gates dk relative to 2^(E_{J−1} − p_j) and without the scale; with a decay, also
/// Σ_i dS_ij of each key in `d_columns`, `[batch, heads, keys]`, which holds zeros before. Here a warp's
/// rows are keys, and columns are queries: what is computed is Sᵀ.
///
/// Grid: blocks of keys, batch · kv_heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn keys<E: Numeric, O: Numeric, V: Size, W: Size>(
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
    d_columns: &mut Array<f32>,
    ends: &Array<i32>,
    starts: &Array<i32>,
    least: &Array<i32>,
    dk: &mut Array<Vector<O, W>>,
    dv: &mut Array<Vector<E, W>>,
    problem: Problem,
    dk_rows: Rows,
    dv_rows: Rows,
    #[comptime] options: Options,
    #[comptime] parts: Parts,
) {
    define_exp2();
    let Options { dim, warps, span, gated, .. } = comptime!(options);
    let (with_dk, with_dv) = comptime!((parts != Parts::Dv, parts != Parts::Dk));
    let rows = comptime!(options.rows());
    let chunks = comptime!(dim / CHUNK);
    let real = comptime!(options.real / CHUNK);
    let steps = comptime!(dim / 16);
    let (n_queries, n_dim) = comptime!((span / 8, dim / 8));

    let lane = UNIT_POS_PLANE as usize;
    // Shuffled, the compiler knows that it is one for the warp.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / kv_heads;
    let kv_head = CUBE_POS_Y as usize % kv_heads;
    let queries = problem.queries as usize;
    let keys = problem.keys as usize;
    let first_column = CUBE_POS_X as usize * rows;
    let offset = keys - queries;

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);

    let stages = Stages::new();
    sync_async_proxy_shared();
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    // Two tiles of q and of dO, by turns.
    let mut q_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut grad_tile =
        SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    // Each warp's own: lse of two queries, then their row sums; the first keys that they see; the
    // gates' factors of k for a tile, and those that bring dk so far to the tile's units.
    let size!(N2) = 2usize;
    let size!(N4) = 4usize;
    let mut statistics =
        SharedMemory::<Vector<f32, N4>>::new_aligned(comptime!(warps * span / 2), 16usize);
    let mut row_first =
        SharedMemory::<Vector<u32, N2>>::new_aligned(comptime!(warps * span / 2), 8usize);
    let pairs = comptime!(gate_pairs(gated));
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(warps * pairs), 16usize);
    let mut gate_steps =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(warps * pairs), 16usize);
    sync_cube();

    // The tiles with queries that see some key of the block.
    let mut from = 0usize;
    if first_column > offset {
        from = first_column - offset;
    }
    let from = from / span;
    let block_last = min(first_column + rows, keys) - 1;
    let mut to = end_of_sight(&problem, documents, batch, block_last, options);
    if options.prune {
        let mut end = 0usize;
        for head in kv_head * group..(kv_head + 1) * group {
            let row = batch * heads + head;
            end = max(end, end_of_queries(least, row, queries, block_last));
        }
        to = min(to, offset + end);
    }
    let mut blocks = 0usize;
    if to > offset + from * span {
        blocks = (to - offset - from * span + span - 1) / span;
    }
    let total = blocks * group;

    if UNIT_POS == 0 {
        for turn in 0..2usize {
            if turn < total {
                let mut others = 0u32;
                if turn == 0 {
                    others += comptime!(2 * bytes(rows, dim));
                }
                let head = head_of(turn, kv_head, group, blocks, gated);
                let row = (from + block_of(turn, group, blocks, gated)) * span;
                stages.fill::<E, V>(
                    turn,
                    q,
                    grad,
                    batch,
                    head,
                    row,
                    &mut q_tile,
                    &mut grad_tile,
                    others,
                    span,
                    dim,
                );
                if turn == 0 {
                    let (row, at) = (first_column, 0usize);
                    stages.load::<E, V>(turn, k, batch, kv_head, row, &mut k_tile, at, rows, dim);
                    stages.load::<E, V>(turn, v, batch, kv_head, row, &mut v_tile, at, rows, dim);
                }
            }
        }
    }

    // The warpgroup's keys.
    let of_group = warp / GROUP_WARPS * GROUP_ROWS;
    let group_column = first_column + of_group;
    let group_last = min(group_column + GROUP_ROWS, keys) - 1;
    let own = first_column + warp * 16;

    let mut dk_acc = zeros::<NC>(n_dim);
    let mut dv_acc = zeros::<NC>(n_dim);
    let mut s = unset::<NC>(n_queries);
    let mut dp = unset::<NC>(n_queries);
    let scale = rest_of_scale(&problem, options);
    let mut ds_sum = Array::<f32>::new(2usize);
    // Of each span of the tile's queries.
    let spans = comptime!(spans_of(span));
    let mut key_bias = Array::<f32>::new(comptime!(2 * spans));
    ds_sum[0] = 0f32;
    ds_sum[1] = 0f32;
    let ends_at = CUBE_POS_Y as usize * ((keys + TILE - 1) / TILE + 1) * dim;
    let own_end = group_column / TILE + 1;
    let mut next_tile = QueryTile::<N4, N2>::new(options);
    // Where the gates of k are, and of dk so far.
    let mut own_ends = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut here = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));

    if total > 0 {
        let head = head_of(0usize, kv_head, group, blocks, gated);
        let row = (from + block_of(0usize, group, blocks, gated)) * span;
        next_tile.read(
            lse, sums, documents, starts, ends, before, within, &problem, batch, head, ends_at,
            row, own, options,
        );
        if comptime!(gated > 0) {
            read_ends::<N2>(ends, ends_at, own_end, &mut own_ends, pairs, dim);
            copy_ends::<N2>(&next_tile.ends, &mut here, pairs);
        }
    }
    for turn in 0..total {
        let head = head_of(turn, kv_head, group, blocks, gated);
        let first_row = (from + block_of(turn, group, blocks, gated)) * span;
        let ahead = turn + 1 < total;
        let next = min(turn + 1, total - 1);
        let next_head = head_of(next, kv_head, group, blocks, gated);
        let next_row = (from + block_of(next, group, blocks, gated)) * span;
        let tile = turn % 2 * comptime!(span * chunks);
        let place = warp * comptime!(span / 2);

        // Keys that some and that all of the tile's queries see.
        let mut tile_from = 0usize;
        let mut tile_all_from = 0usize;
        write_notes::<f32, N4>(&mut statistics, &next_tile.statistics, warp, span / 2);
        if comptime!(options.hides()) {
            write_notes::<u32, N2>(&mut row_first, &next_tile.first_keys, warp, span / 2);
            let (least, most) = next_tile.least_and_most(options);
            // Shuffled, as the warp's number is.
            tile_from = plane_shuffle(plane_min(least), 0u32) as usize;
            tile_all_from = plane_shuffle(plane_max(most), 0u32) as usize;
        }
        if comptime!(gated > 0) {
            let factors = powers::<E, NA, N2>(&next_tile.ends, &own_ends, pairs);
            let steps_to = powers::<f32, N2, N2>(&here, &next_tile.ends, pairs);
            write_notes::<E, NA>(&mut gate_factors, &factors, warp, pairs);
            write_notes::<f32, N2>(&mut gate_steps, &steps_to, warp, pairs);
            copy_ends::<N2>(&next_tile.ends, &mut here, pairs);
        }
        if options.decay {
            #[unroll]
            for i in 0..spans {
                let between = next_tile.before[i] - next_tile.before[spans];
                key_bias[i * 2] = bias(between, next_tile.within[0], LOG2_E);
                key_bias[i * 2 + 1] = bias(between, next_tile.within[1], LOG2_E);
            }
        }
        // On their way while this tile is worked on.
        if ahead {
            next_tile.read(
                lse, sums, documents, starts, ends, before, within, &problem, batch, next_head,
                ends_at, next_row, own, options,
            );
        }

        stages.wait(turn);
        let seen = (offset + first_row + span > group_column) & (tile_from <= group_last);
        if seen & (group_column < keys) {
            if comptime!(gated > 0) {
                let mut k_lefts = lefts::<E, V, NA>(&def, &k_tile, warp * 16, steps, rows);
                scale_lefts::<E, NA>(&mut k_lefts, &gate_factors, warp * pairs, gated);
                start_abt::<E, V, NA, NC>(&k_lefts, &q_tile, tile, &mut s, true, n_queries);
            } else {
                start_tile_abt::<E, V, NC>(
                    &k_tile, of_group, rows, &q_tile, tile, &mut s, true, n_queries, steps,
                );
            }
            if with_dk {
                start_tile_abt::<E, V, NC>(
                    &v_tile, of_group, rows, &grad_tile, tile, &mut dp, true, n_queries, steps,
                );
            }
            let mut slope = 0f32;
            if options.alibi {
                slope = slopes[head];
            }
            wait::<NC>(&mut s, comptime!(usize::from(with_dk)));

            let mut edge = (group_last > offset + first_row) | (first_row + span > queries);
            edge |= tile_all_from > group_column;
            let lane_row = (offset + first_row + (lane % 4) * 2) as u32;
            let lane_column = (own + lane / 4) as u32;
            make_scores_of_keys::<NC, N2>(
                &mut s,
                &problem,
                slope,
                lane_row,
                lane_column,
                &row_first,
                place,
                edge,
                n_queries,
                options,
            );
            // s becomes P, with a cap times its slope, and p what dv takes.
            let mut p = unset_lefts::<E, NA>(comptime!(n_queries / 2));
            #[unroll]
            for n in 0..n_queries {
                let statistic = statistics[place + comptime!(n * 4) + lane % 4];
                #[unroll]
                for r in 0..2usize {
                    let scores = s.index(n)[r];
                    let mut pair = scores;
                    #[unroll]
                    for e in 0..2usize {
                        let mut shift = -statistic[e];
                        if options.decay {
                            shift += key_bias[comptime!(n * 8 / SPAN * 2 + r)];
                        }
                        pair[e] = exp2(fma(scores[e], scale, shift));
                    }
                    if with_dv {
                        set_left::<E, NA, NC>(&mut p, n, r, pair);
                    }
                    if options.softcap {
                        #[unroll]
                        for e in 0..2usize {
                            let row = lane_row + comptime!((n * 8 + e) as u32);
                            let column = lane_column + comptime!((r * 8) as u32);
                            pair[e] *= cap_slope(scores[e], &problem, slope, row, column, options);
                        }
                    }
                    s.index_mut(n)[r] = pair;
                }
            }
            if with_dv {
                start_pb::<E, V, NA, NC>(&p, &grad_tile, tile, &mut dv_acc);
            }
            if with_dk {
                wait::<NC>(&mut dp, comptime!(usize::from(with_dv)));
                // dp becomes dS.
                #[unroll]
                for n in 0..n_queries {
                    let statistic = statistics[place + comptime!(n * 4) + lane % 4];
                    #[unroll]
                    for r in 0..2usize {
                        let p = s.index(n)[r];
                        let mut pair = dp.index(n)[r];
                        #[unroll]
                        for e in 0..2usize {
                            let ds = p[e] * (pair[e] - statistic[comptime!(e + 2)]);
                            if options.decay {
                                ds_sum[r] += ds;
                            }
                            pair[e] = ds;
                        }
                        dp.index_mut(n)[r] = pair;
                    }
                }
                if comptime!(gated > 0) {
                    scale_columns::<N2, NC>(&mut dk_acc, &gate_steps, warp * pairs, gated);
                }
                let ds = as_lefts::<E, NA, NC>(&dp, n_queries);
                start_pb::<E, V, NA, NC>(&ds, &q_tile, tile, &mut dk_acc);
                wait::<NC>(&mut dk_acc, 0usize);
            }
            if with_dv {
                wait::<NC>(&mut dv_acc, 0usize);
            }
        }
        if stages.leave(turn, warps) & (turn + 2 < total) {
            let head = head_of(turn + 2, kv_head, group, blocks, gated);
            let row = (from + block_of(turn + 2, group, blocks, gated)) * span;
            stages.fill::<E, V>(
                turn + 2,
                q,
                grad,
                batch,
                head,
                row,
                &mut q_tile,
                &mut grad_tile,
                0u32,
                span,
                dim,
            );
        }
        if comptime!(options.decay && with_dk) {
            // After the head's last tile.
            let done = (turn + 1 == total) | (next_head > head);
            #[unroll]
            for r in 0..2usize {
                let column = own + r * 8 + lane / 4;
                let sum = sum_of_four(ds_sum[r]);
                if done & (lane % 4 == 0) & (column < keys) {
                    d_columns[(batch * heads + head) * keys + column] = sum;
                }
                ds_sum[r] = select(done, 0f32, ds_sum[r]);
            }
        }
    }

    let mut factors = Array::<f32>::new(2usize);
    if with_dv {
        factors[0] = 1f32;
        factors[1] = 1f32;
        let (base, stride) = (dv_rows.base(batch, kv_head), dv_rows.row as usize);
        store_rows::<E, W, NC>(&dv_acc, &factors, dv, base, stride, own, keys, n_dim, real);
    }
    if with_dk {
        #[unroll]
        for r in 0..2usize {
            factors[r] = problem.scale;
            if gated > 0 {
                factors[r] = 1f32;
            }
        }
        let (base, stride) = (dk_rows.base(batch, kv_head), dk_rows.row as usize);
        store_rows::<O, W, NC>(&dk_acc, &factors, dk, base, stride, own, keys, n_dim, real);
    }
}

/// The query head of a turn. Tiles come head by head; with gates heads take turns at each tile.
#[cube]
fn head_of(
    turn: usize,
    kv_head: usize,
    group: usize,
    blocks: usize,
    #[comptime] gated: usize,
) -> usize {
    let mut own = turn as u32 / blocks as u32;
    if gated > 0 {
        own = turn as u32 % group as u32;
    }
    kv_head * group + own as usize
}

/// The tile of a turn, from the first to the last; with gates from the last to the first.
#[cube]
fn block_of(turn: usize, group: usize, blocks: usize, #[comptime] gated: usize) -> usize {
    let mut block = turn as u32 % blocks as u32;
    if gated > 0 {
        block = blocks as u32 - 1 - turn as u32 / group as u32;
    }
    block as usize
}

/// As [`make_scores`](super::super::scores::make_scores), where rows of the accumulator are keys and
/// columns queries. The first keys that queries see are in `row_first`, from `place` on.
#[cube]
fn make_scores_of_keys<NC: Size, N2: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    problem: &Problem,
    slope: f32,
    row: u32,
    column: u32,
    row_first: &SharedMemory<Vector<u32, N2>>,
    place: usize,
    edge: bool,
    #[comptime] n_queries: usize,
    #[comptime] options: Options,
) {
    if comptime!(options.softcap || options.alibi) {
        #[unroll]
        for n in 0..n_queries {
            #[unroll]
            for r in 0..2usize {
                let mut pair = s.index(n)[r];
                let column = column + comptime!((r * 8) as u32);
                #[unroll]
                for e in 0..2usize {
                    let row = row + comptime!((n * 8 + e) as u32);
                    pair[e] = full_score(pair[e], problem, slope, row, column, options);
                }
                s.index_mut(n)[r] = pair;
            }
        }
    }
    if edge {
        #[unroll]
        for n in 0..n_queries {
            let mut first = Vector::<u32, N2>::cast_from(0u32);
            if comptime!(options.hides()) {
                first = row_first[place + comptime!(n * 4) + UNIT_POS_PLANE as usize % 4];
            }
            #[unroll]
            for r in 0..2usize {
                let mut pair = s.index(n)[r];
                let column = column + comptime!((r * 8) as u32);
                #[unroll]
                for e in 0..2usize {
                    let row = row + comptime!((n * 8 + e) as u32);
                    // Past the last query there is nothing to see from.
                    let hide = hidden(row, column, first[e]) | (row >= problem.keys);
                    pair[e] = select(hide, HIDDEN, pair[e]);
                }
                s.index_mut(n)[r] = pair;
            }
        }
    }
}

/// One past the last position whose query sees a key at or before `column`.
#[cube]
fn end_of_sight(
    problem: &Problem,
    documents: &Array<i32>,
    batch: usize,
    column: usize,
    #[comptime] options: Options,
) -> usize {
    let keys = problem.keys as usize;
    let mut end = keys;
    if options.window {
        end = min(end, column + problem.window as usize);
    }
    if options.documents {
        end = first_above(documents, batch * keys, column, column + 1, end);
    }
    end
}
