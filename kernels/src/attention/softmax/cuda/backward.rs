//! The backward pass, without atomics: one kernel makes dq, block of queries by block of queries,
//! another dk and dv, block of keys by block of keys, over all query heads of the kv head (Dao,
//! "FlashAttention-2", 2023, algorithm 2, split in two). Both recompute
//! P = exp(S − lse) and dS = P ⊙ (dO·Vᵀ − D), D = rowsum(dO ⊙ O).

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::decay::{SPAN, add_biases, bias, biases, sum_before, sum_between};
use super::gates::{TILE, gate_pairs, powers, scale_columns};
use super::scores::{
    Options, Problem, cap_slope, first_key, full_score, hidden, make_scores, rest_of_scale,
};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, Rows, add_abt, add_pb, add_tile_abt, bytes, define_exp2, exp2, lefts,
    load_rows, release_tile, store_rows, zeros,
};

/// Lanes that share a row of [`row_sums`].
pub const LANES_OF_A_ROW: usize = 8;

/// D_i = Σ_c dO_ic O_ic, `[batch, heads, queries]`.
///
/// Grid: blocks of rows, batch · heads.
#[cube(launch_unchecked)]
pub fn row_sums<E: Numeric, V: Size>(
    o: &Array<Vector<E, V>>,
    grad: &Array<Vector<E, V>>,
    sums: &mut Array<f32>,
    heads: u32,
    queries: u32,
    o_rows: Rows,
    grad_rows: Rows,
    #[comptime] chunks: usize,
) {
    let rows = CUBE_DIM as usize / LANES_OF_A_ROW;
    let row = CUBE_POS_X as usize * rows + UNIT_POS as usize / LANES_OF_A_ROW;
    let lane = UNIT_POS as usize % LANES_OF_A_ROW;
    let batch = CUBE_POS_Y as usize / heads as usize;
    let head = CUBE_POS_Y as usize % heads as usize;
    // Lanes past the last row repeat it: all lanes meet in the shuffles.
    let from = min(row, queries as usize - 1);
    let o_at = o_rows.base(batch, head) + from * o_rows.row as usize;
    let grad_at = grad_rows.base(batch, head) + from * grad_rows.row as usize;
    let mut sum = 0f32;
    #[unroll]
    for i in 0..comptime!(chunks.div_ceil(LANES_OF_A_ROW)) {
        let chunk = i * LANES_OF_A_ROW + lane;
        if comptime!(chunks.is_multiple_of(LANES_OF_A_ROW)) || chunk < chunks {
            let o = Vector::<f32, V>::cast_from(o[o_at + chunk]);
            let grad = Vector::<f32, V>::cast_from(grad[grad_at + chunk]);
            #[unroll]
            for e in 0..CHUNK {
                sum += o[e] * grad[e];
            }
        }
    }
    sum += plane_shuffle_xor(sum, 1);
    sum += plane_shuffle_xor(sum, 2);
    sum += plane_shuffle_xor(sum, 4);
    if (lane == 0) & (row < queries as usize) {
        sums[CUBE_POS_Y as usize * queries as usize + row] = sum;
    }
}

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
    dq: &mut Array<Vector<O, W>>,
    problem: Problem,
    dq_rows: Rows,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, m, span, gated, .. } = comptime!(options);
    let rows = comptime!(options.rows());
    let chunks = comptime!(dim / CHUNK);
    let real = comptime!(options.real / CHUNK);
    let steps = comptime!(dim / 16);
    let (n_keys, n_dim) = comptime!((span / 8, dim / 8));

    let lane = UNIT_POS_PLANE as usize;
    let unit = UNIT_POS as usize;
    let warp = unit / 32;
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
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);

    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    // Two tiles of K and of V, by turns.
    let mut q_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut grad_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let size!(N2) = 2usize;
    let mut bias_tile = SharedMemory::<Vector<f32, N2>>::new_aligned(span, 8usize);
    // By turns too: the gates' factors of q, and those that bring dq so far to the tile's units.
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(gate_pairs(2 * gated)), 16usize);
    let mut gate_steps =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(gate_pairs(2 * gated)), 16usize);
    sync_cube();

    let last_row = offset + min(first_row + rows, queries) - 1;
    let from = first_key(&problem, documents, batch, offset + first_row, options) / span;
    let all_from = first_key(&problem, documents, batch, last_row, options);
    let all_to = offset + first_row;
    let blocks = last_row / span + 1 - from;

    let pair = comptime!(2 * bytes(span, dim));
    if UNIT_POS == 0 {
        let column = from * span;
        ready.arrive_and_expect_tx(1, comptime!(2 * bytes(rows, dim) + pair));
        load_rows::<E, V>(&ready, q, batch, head, first_row, &mut q_tile, 0, rows, dim);
        load_rows::<E, V>(&ready, grad, batch, head, first_row, &mut grad_tile, 0, rows, dim);
        load_rows::<E, V>(&ready, k, batch, kv_head, column, &mut k_tile, 0, span, dim);
        load_rows::<E, V>(&ready, v, batch, kv_head, column, &mut v_tile, 0, span, dim);
    }
    ready.wait_parity(0);
    let own = warp * comptime!(16 * m);
    let q_lefts = lefts::<E, V, NA>(&def, &q_tile, 0, own, m, steps, rows);
    let grad_lefts = lefts::<E, V, NA>(&def, &grad_tile, 0, own, m, steps, rows);

    let mut dq_acc = zeros::<NC>(comptime!(m * n_dim));
    let mut row_lse = Array::<f32>::new(comptime!(2 * m));
    let mut row_sum = Array::<f32>::new(comptime!(2 * m));
    let mut first = Array::<u32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        let row = first_row + own + r * 8 + lane / 4;
        let at = CUBE_POS_Y as usize * queries + min(row, queries - 1);
        row_lse[r] = lse[at];
        row_sum[r] = sums[at];
        first[r] = first_key(&problem, documents, batch, offset + row, options) as u32;
    }
    let mut slope = 0f32;
    if options.alibi {
        slope = slopes[head];
    }
    let mut scale = rest_of_scale(&problem, options);
    let factor = scale;
    let mut own_sum = f64::cast_from(0f32);
    if options.decay {
        own_sum = sum_before(before, CUBE_POS_Y as usize, keys, offset + first_row);
        scale = 1f32;
        if unit < comptime!(span / 2) {
            let column = from * span + unit * 2;
            bias_tile[unit] =
                biases::<N2>(own_sum, before, within, CUBE_POS_Y as usize, keys, column);
        }
    }
    let mut ds_sum = Array::<f32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        ds_sum[r] = 0f32;
    }

    let ends_at = (batch * (problem.heads / problem.group) as usize + kv_head)
        * ((keys + TILE - 1) / TILE + 1)
        * dim;
    let own_end = first_row / TILE;
    if comptime!(gated > 0) && unit < comptime!(gated * 8) {
        let to = from * span / TILE + 1;
        gate_factors[unit] = powers::<E, NA>(ends, ends_at, own_end, to, unit * 2, dim);
        gate_steps[unit] = Vector::cast_from(0f32);
    }

    for block in 0..blocks {
        let first_column = (from + block) * span;
        let turn = (block & 1) * comptime!(span * chunks);
        let bias_at = (block & 1) * comptime!(span / 2);
        ready.wait_parity((block & 1) as u32);
        // Nobody reads the other tile any more.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let (next, to) = (first_column + span, comptime!(span * chunks) - turn);
            ready.arrive_and_expect_tx(1, pair);
            load_rows::<E, V>(&ready, k, batch, kv_head, next, &mut k_tile, to, span, dim);
            load_rows::<E, V>(&ready, v, batch, kv_head, next, &mut v_tile, to, span, dim);
        }

        let mut s = zeros::<NC>(comptime!(m * n_keys));
        let mut dp = zeros::<NC>(comptime!(m * n_keys));
        let gate_at = (block & 1) * comptime!(gated * 8);
        if comptime!(gated > 0) {
            add_tile_abt::<E, V, NA, NB, NC>(
                &def,
                &q_tile,
                own,
                rows,
                &gate_factors,
                gate_at,
                gated,
                &k_tile,
                turn,
                &mut s,
                m,
                n_keys,
                steps,
            );
        } else {
            add_abt::<E, V, NA, NB, NC>(&def, &q_lefts, &k_tile, turn, &mut s, m, n_keys, steps);
        }
        add_abt::<E, V, NA, NB, NC>(&def, &grad_lefts, &v_tile, turn, &mut dp, m, n_keys, steps);

        if options.decay {
            add_biases::<NC, N2>(&mut s, &bias_tile, bias_at, factor, m, n_keys);
        }
        let edge = (first_column + span > all_to + 1) | (first_column < all_from);
        let lane_row = (offset + first_row + own + lane / 4) as u32;
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
        #[unroll]
        for i in 0..m {
            #[unroll]
            for r in 0..2usize {
                let state = comptime!(i * 2 + r);
                #[unroll]
                for n in 0..n_keys {
                    let fragment = s.index_mut(comptime!(i * n_keys + n));
                    let mut pair = fragment[r];
                    let grads = dp.index(comptime!(i * n_keys + n))[r];
                    #[unroll]
                    for e in 0..2usize {
                        let p = exp2(fma(pair[e], scale, -row_lse[state]));
                        let mut ds = p * (grads[e] - row_sum[state]);
                        if options.softcap {
                            let row = lane_row + comptime!((i * 16 + r * 8) as u32);
                            let column = lane_column + comptime!((n * 8 + e) as u32);
                            ds *= cap_slope(pair[e], &problem, slope, row, column, options);
                        }
                        if options.decay {
                            ds_sum[state] += ds;
                        }
                        pair[e] = ds;
                    }
                    fragment[r] = pair;
                }
            }
        }
        // On their way during the last product.
        let mut next_biases = Vector::<f32, N2>::empty();
        if comptime!(options.decay) && (unit < comptime!(span / 2)) & (block + 1 < blocks) {
            let column = first_column + span + unit * 2;
            next_biases = biases::<N2>(own_sum, before, within, CUBE_POS_Y as usize, keys, column);
        }
        let mut next_factors = Vector::<E, NA>::empty();
        let mut next_steps = Vector::<f32, N2>::empty();
        if comptime!(gated > 0) {
            if (unit < comptime!(gated * 8)) & (block + 1 < blocks) {
                let (now, next) = (first_column / TILE + 1, (first_column + span) / TILE + 1);
                next_factors = powers::<E, NA>(ends, ends_at, own_end, next, unit * 2, dim);
                next_steps = powers::<f32, N2>(ends, ends_at, next, now, unit * 2, dim);
            }
            scale_columns::<N2, NC>(&mut dq_acc, &gate_steps, gate_at, m, n_dim, gated);
        }
        add_pb::<E, V, NA, NB, NC>(&def, &s, &k_tile, turn, &mut dq_acc, m, n_keys, n_dim);
        if comptime!(options.decay) && unit < comptime!(span / 2) {
            bias_tile[comptime!(span / 2) - bias_at + unit] = next_biases;
        }
        if comptime!(gated > 0) && unit < comptime!(gated * 8) {
            gate_factors[comptime!(gated * 8) - gate_at + unit] = next_factors;
            gate_steps[comptime!(gated * 8) - gate_at + unit] = next_steps;
        }
    }

    if options.decay {
        #[unroll]
        for r in 0..comptime!(2 * m) {
            let row = first_row + own + r * 8 + lane / 4;
            let total = sum_of_four(ds_sum[r]);
            if (lane % 4 == 0) & (row < queries) {
                d_rows[CUBE_POS_Y as usize * keys + offset + row] = total;
            }
        }
    }
    let mut factors = Array::<f32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        factors[r] = problem.scale;
        if gated > 0 {
            factors[r] = 1f32;
        }
    }
    let base = dq_rows.base(batch, head);
    store_rows::<O, W, NC>(
        &dq_acc,
        &factors,
        dq,
        base,
        dq_rows.row as usize,
        first_row + own,
        queries,
        m,
        n_dim,
        real,
    );
}

/// dk and dv, with gates dk relative to 2^(E_{J−1} − p_j) and without the scale; with a decay, also
/// Σ_i dS_ij of each key in `d_columns`, `[batch, heads, keys]`, which holds zeros before. Here a warp's rows are keys, and columns are queries: what is computed is Sᵀ.
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
    dk: &mut Array<Vector<O, W>>,
    dv: &mut Array<Vector<E, W>>,
    problem: Problem,
    dk_rows: Rows,
    dv_rows: Rows,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, m, span, gated, .. } = comptime!(options);
    let rows = comptime!(options.rows());
    let chunks = comptime!(dim / CHUNK);
    let real = comptime!(options.real / CHUNK);
    let steps = comptime!(dim / 16);
    let (n_queries, n_dim) = comptime!((span / 8, dim / 8));

    let lane = UNIT_POS_PLANE as usize;
    let unit = UNIT_POS as usize;
    let warp = unit / 32;
    let group = problem.group as usize;
    let kv_heads = problem.heads as usize / group;
    let batch = CUBE_POS_Y as usize / kv_heads;
    let kv_head = CUBE_POS_Y as usize % kv_heads;
    let queries = problem.queries as usize;
    let keys = problem.keys as usize;
    let first_column = CUBE_POS_X as usize * rows;
    let last_column = min(first_column + rows, keys) - 1;
    let offset = keys - queries;

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);

    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(rows * chunks), ALIGN);
    // Two tiles of q and of dO, by turns.
    let mut q_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut grad_tile =
        SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    // lse of two queries, then their row sums.
    let size!(N4) = 4usize;
    let mut statistics = SharedMemory::<Vector<f32, N4>>::new_aligned(span, 16usize);
    let mut row_first = SharedMemory::<u32>::new(comptime!(2 * span));
    // By turns too: the gates' factors of k, and those that bring dk so far to the tile's units.
    let size!(N2) = 2usize;
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(gate_pairs(2 * gated)), 16usize);
    let mut gate_steps =
        SharedMemory::<Vector<f32, N2>>::new_aligned(comptime!(gate_pairs(2 * gated)), 16usize);
    sync_cube();

    // Queries that see some key of the block.
    let mut from = 0usize;
    if first_column > offset {
        from = first_column - offset;
    }
    let from = from / span;
    let to = end_of_sight(&problem, documents, batch, last_column, options);
    let mut blocks = 0usize;
    if to > offset + from * span {
        blocks = (to - offset - from * span + span - 1) / span;
    }
    let total = blocks * group;

    let own = warp * comptime!(16 * m);
    let mut dk_acc = zeros::<NC>(comptime!(m * n_dim));
    let mut dv_acc = zeros::<NC>(comptime!(m * n_dim));
    let scale = rest_of_scale(&problem, options);
    let mut ds_sum = Array::<f32>::new(comptime!(2 * m));
    let mut key_bias = Array::<f32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        ds_sum[r] = 0f32;
        key_bias[r] = 0f32;
    }

    let ends_at = CUBE_POS_Y as usize * ((keys + TILE - 1) / TILE + 1) * dim;
    let own_end = first_column / TILE + 1;

    // The tile that is loaded next, and the one that is worked on. With gates heads take turns, and
    // queries come from the last to the first.
    let mut next_head = kv_head * group;
    let mut next_block = 0usize;
    if comptime!(gated > 0) && blocks > 0 {
        next_block = blocks - 1;
    }
    let mut head_now = next_head;
    let mut row_now = 0usize;
    for turn_of in 0..total + 1 {
        if turn_of > 0 {
            ready.wait_parity(((turn_of - 1) & 1) as u32);
        }
        // Nobody reads the other tile any more.
        release_tile();
        let turn = turn_of & 1;
        let row = (from + next_block) * span;
        // On their way while the tile before is worked on.
        let mut pair = Vector::<f32, N4>::empty();
        let mut first_of_row = 0u32;
        let mut next_factors = Vector::<E, NA>::empty();
        let mut next_steps = Vector::<f32, N2>::empty();
        if turn_of < total {
            if comptime!(gated > 0) && unit < comptime!(gated * 8) {
                let (next, now) = (row / TILE, row_now / TILE);
                next_factors = powers::<E, NA>(ends, ends_at, next, own_end, unit * 2, dim);
                next_steps = powers::<f32, N2>(ends, ends_at, now, next, unit * 2, dim);
            }
            let head = next_head;
            if comptime!(options.window || options.documents) && unit < span {
                let row = offset + min(row + unit, queries - 1);
                first_of_row = first_key(&problem, documents, batch, row, options) as u32;
            }
            if unit < comptime!(span / 2) {
                let at = (batch * problem.heads as usize + head) * queries;
                let one = at + min(row + 2 * unit, queries - 1);
                let two = at + min(row + 2 * unit + 1, queries - 1);
                pair[0] = lse[one];
                pair[1] = lse[two];
                pair[2] = sums[one];
                pair[3] = sums[two];
            }
            if unit == 0 {
                let to = turn * comptime!(span * chunks);
                let mut expected = comptime!(2 * bytes(span, dim)).runtime();
                if turn_of == 0 {
                    expected += comptime!(2 * bytes(rows, dim));
                }
                ready.arrive_and_expect_tx(1, expected);
                if turn_of == 0 {
                    load_rows::<E, V>(
                        &ready,
                        k,
                        batch,
                        kv_head,
                        first_column,
                        &mut k_tile,
                        0,
                        rows,
                        dim,
                    );
                    load_rows::<E, V>(
                        &ready,
                        v,
                        batch,
                        kv_head,
                        first_column,
                        &mut v_tile,
                        0,
                        rows,
                        dim,
                    );
                }
                load_rows::<E, V>(&ready, q, batch, head, row, &mut q_tile, to, span, dim);
                load_rows::<E, V>(&ready, grad, batch, head, row, &mut grad_tile, to, span, dim);
            }
        }
        if turn_of > 0 {
            let first_row = row_now;
            let tile = (1 - turn) * span;
            let at = (1 - turn) * comptime!(span * chunks);
            let mut slope = 0f32;
            if options.alibi {
                slope = slopes[head_now];
            }

            let decay_row = batch * problem.heads as usize + head_now;
            if options.decay {
                // Where the forward pass's block of this query begins.
                let begin = offset + first_row / SPAN * SPAN;
                let own_sum = sum_before(before, decay_row, keys, begin);
                let between = sum_between(own_sum, before, decay_row, keys, first_column);
                #[unroll]
                for r in 0..comptime!(2 * m) {
                    let column = first_column + own + r * 8 + lane / 4;
                    key_bias[r] = bias(between, within, decay_row, keys, column);
                }
            }

            let mut s = zeros::<NC>(comptime!(m * n_queries));
            let mut dp = zeros::<NC>(comptime!(m * n_queries));
            let gate_at = (1 - turn) * comptime!(gated * 8);
            add_tile_abt::<E, V, NA, NB, NC>(
                &def,
                &k_tile,
                own,
                rows,
                &gate_factors,
                gate_at,
                gated,
                &q_tile,
                at,
                &mut s,
                m,
                n_queries,
                steps,
            );
            add_tile_abt::<E, V, NA, NB, NC>(
                &def,
                &v_tile,
                own,
                rows,
                &gate_factors,
                0,
                0usize,
                &grad_tile,
                at,
                &mut dp,
                m,
                n_queries,
                steps,
            );

            let last_row = first_row + span - 1;
            let edge = (last_column > offset + first_row)
                | (last_row >= queries)
                | (row_first[tile + span - 1] as usize > first_column);
            let lane_row = (offset + first_row + (lane % 4) * 2) as u32;
            let lane_column = (first_column + own + lane / 4) as u32;
            make_scores_of_keys::<NC>(
                &mut s,
                &problem,
                slope,
                lane_row,
                lane_column,
                &row_first,
                tile,
                edge,
                n_queries,
                options,
            );
            // dp becomes dS, s becomes P.
            #[unroll]
            for n in 0..n_queries {
                let statistic = statistics[tile / 2 + comptime!(n * 4) + lane % 4];
                #[unroll]
                for i in 0..m {
                    let fragment = comptime!(i * n_queries + n);
                    #[unroll]
                    for r in 0..2usize {
                        let mut scores = s.index(fragment)[r];
                        let mut grads = dp.index(fragment)[r];
                        #[unroll]
                        for e in 0..2usize {
                            let mut shift = -statistic[e];
                            if options.decay {
                                shift += key_bias[comptime!(i * 2 + r)];
                            }
                            let p = exp2(fma(scores[e], scale, shift));
                            let mut ds = p * (grads[e] - statistic[comptime!(e + 2)]);
                            if options.softcap {
                                let row = lane_row + comptime!((n * 8 + e) as u32);
                                let column = lane_column + comptime!((i * 16 + r * 8) as u32);
                                ds *= cap_slope(scores[e], &problem, slope, row, column, options);
                            }
                            if options.decay {
                                ds_sum[comptime!(i * 2 + r)] += ds;
                            }
                            scores[e] = p;
                            grads[e] = ds;
                        }
                        s.index_mut(fragment)[r] = scores;
                        dp.index_mut(fragment)[r] = grads;
                    }
                }
            }
            add_pb::<E, V, NA, NB, NC>(&def, &s, &grad_tile, at, &mut dv_acc, m, n_queries, n_dim);
            if comptime!(gated > 0) {
                scale_columns::<N2, NC>(&mut dk_acc, &gate_steps, gate_at, m, n_dim, gated);
            }
            add_pb::<E, V, NA, NB, NC>(&def, &dp, &q_tile, at, &mut dk_acc, m, n_queries, n_dim);
            if options.decay {
                // After the head's last tile.
                let done = (turn_of == total) | (next_head > head_now);
                #[unroll]
                for r in 0..comptime!(2 * m) {
                    let column = first_column + own + r * 8 + lane / 4;
                    let sum = sum_of_four(ds_sum[r]);
                    if done & (lane % 4 == 0) & (column < keys) {
                        d_columns[decay_row * keys + column] = sum;
                    }
                    ds_sum[r] = select(done, 0f32, ds_sum[r]);
                }
            }
        }
        if unit < comptime!(span / 2) {
            statistics[turn * comptime!(span / 2) + unit] = pair;
        }
        if unit < span {
            row_first[turn * span + unit] = first_of_row;
        }
        if comptime!(gated > 0) && unit < comptime!(gated * 8) {
            gate_factors[turn * comptime!(gated * 8) + unit] = next_factors;
            gate_steps[turn * comptime!(gated * 8) + unit] = next_steps;
        }
        head_now = next_head;
        row_now = row;
        if comptime!(gated > 0) {
            next_head += 1;
            if next_head == (kv_head + 1) * group {
                next_head = kv_head * group;
                if next_block > 0 {
                    next_block -= 1;
                }
            }
        } else {
            next_block += 1;
            if next_block == blocks {
                next_block = 0;
                next_head += 1;
            }
        }
    }

    let mut factors = Array::<f32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        factors[r] = 1f32;
    }
    let row = first_column + own;
    let dv_base = dv_rows.base(batch, kv_head);
    store_rows::<E, W, NC>(
        &dv_acc,
        &factors,
        dv,
        dv_base,
        dv_rows.row as usize,
        row,
        keys,
        m,
        n_dim,
        real,
    );
    #[unroll]
    for r in 0..comptime!(2 * m) {
        factors[r] = problem.scale;
        if gated > 0 {
            factors[r] = 1f32;
        }
    }
    let dk_base = dk_rows.base(batch, kv_head);
    store_rows::<O, W, NC>(
        &dk_acc,
        &factors,
        dk,
        dk_base,
        dk_rows.row as usize,
        row,
        keys,
        m,
        n_dim,
        real,
    );
}

/// The sum over the four lanes that share a row of an accumulator.
#[cube]
fn sum_of_four(x: f32) -> f32 {
    let sum = x + plane_shuffle_xor(x, 1);
    sum + plane_shuffle_xor(sum, 2)
}

/// As [`make_scores`](super::scores::make_scores), where rows of the accumulator are keys and columns
/// queries. The first keys that queries see are in `row_first`, from `tile` on.
#[cube]
fn make_scores_of_keys<NC: Size>(
    s: &mut Sequence<Array<Vector<f32, NC>>>,
    problem: &Problem,
    slope: f32,
    row: u32,
    column: u32,
    row_first: &SharedMemory<u32>,
    tile: usize,
    edge: bool,
    #[comptime] n_queries: usize,
    #[comptime] options: Options,
) {
    if comptime!(options.softcap || options.alibi) {
        #[unroll]
        for at in 0..comptime!(options.m * n_queries) {
            let (i, n) = comptime!((at / n_queries, at % n_queries));
            #[unroll]
            for r in 0..2usize {
                let mut pair = s.index(at)[r];
                let column = column + comptime!((i * 16 + r * 8) as u32);
                #[unroll]
                for e in 0..2usize {
                    let row = row + comptime!((n * 8 + e) as u32);
                    pair[e] = full_score(pair[e], problem, slope, row, column, options);
                }
                s.index_mut(at)[r] = pair;
            }
        }
    }
    if edge {
        #[unroll]
        for n in 0..n_queries {
            #[unroll]
            for e in 0..2usize {
                let row = row + comptime!((n * 8 + e) as u32);
                let lane = (UNIT_POS_PLANE % 4) as usize;
                let first = row_first[tile + comptime!(n * 8 + e) + lane * 2];
                #[unroll]
                for i in 0..options.m {
                    let at = comptime!(i * n_queries + n);
                    #[unroll]
                    for r in 0..2usize {
                        let mut pair = s.index(at)[r];
                        let column = column + comptime!((i * 16 + r * 8) as u32);
                        // Past the last query there is nothing to see from.
                        let hide = hidden(row, column, first) | (row >= problem.keys);
                        pair[e] = select(hide, HIDDEN, pair[e]);
                        s.index_mut(at)[r] = pair;
                    }
                }
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
        // Starts never fall: halve the range in which they pass the column.
        let mut low = column + 1;
        let mut high = end;
        while low < high {
            let middle = (low + high) / 2;
            if documents[batch * keys + middle] as usize > column {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        end = low;
    }
    end
}
