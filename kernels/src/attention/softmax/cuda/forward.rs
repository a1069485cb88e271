//! The forward pass: one block for 16·m·warps queries of a head, which passes over the keys from
//! the last to the first (Dao, "FlashAttention-2", 2023, algorithm 1). The next tiles of K and V are
//! loaded while one is worked on.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::decay::{add_biases, biases, sum_before};
use super::gates::{TILE, gate_pairs, powers, scale_lefts};
use super::scores::{Options, Problem, first_key, make_scores, rest_of_scale};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, LOG2_E, Rows, add_abt, add_pb, bytes, define_exp2, exp2, lefts,
    load_rows, release_tile, store_rows, zeros,
};

/// o, and lse `[batch, heads, queries]`, the logarithm of the softmax's sum to base 2; with a decay,
/// relative to the sum before the span in which the block of queries begins.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
#[allow(arithmetic_overflow)] // CUBE_POS_X and the like are no constants on the device.
pub fn forward<E: Numeric, V: Size, W: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    documents: &Array<i32>,
    slopes: &Array<f32>,
    within: &Array<f32>,
    before: &Array<f64>,
    ends: &Array<i32>,
    o: &mut Array<Vector<E, W>>,
    lse: &mut Array<f32>,
    problem: Problem,
    o_rows: Rows,
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
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let size!(N2) = 2usize;
    let mut bias_tile = SharedMemory::<Vector<f32, N2>>::new_aligned(span, 8usize);
    // By turns too: the gates' factors, by which q goes on to the next tile.
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(gate_pairs(2 * gated)), 16usize);
    sync_cube();

    // Keys that some query of the block sees, and those that all see.
    let last_row = offset + min(first_row + rows, queries) - 1;
    let from = first_key(&problem, documents, batch, offset + first_row, options) / span;
    let all_from = first_key(&problem, documents, batch, last_row, options);
    let all_to = offset + first_row;
    let blocks = last_row / span + 1 - from;

    let last = from + blocks - 1;
    let pair = comptime!(2 * bytes(span, dim));
    if UNIT_POS == 0 {
        let column = last * span;
        ready.arrive_and_expect_tx(1, comptime!(bytes(rows, dim) + pair));
        load_rows::<E, V>(&ready, q, batch, head, first_row, &mut q_tile, 0, rows, dim);
        load_rows::<E, V>(&ready, k, batch, kv_head, column, &mut k_tile, 0, span, dim);
        load_rows::<E, V>(&ready, v, batch, kv_head, column, &mut v_tile, 0, span, dim);
    }
    ready.wait_parity(0);
    let own = warp * comptime!(16 * m);
    let mut q_lefts = lefts::<E, V, NA>(&def, &q_tile, 0, own, m, steps, rows);

    let mut o_acc = zeros::<NC>(comptime!(m * n_dim));
    let mut highest = Array::<f32>::new(comptime!(2 * m));
    let mut sum = Array::<f32>::new(comptime!(2 * m));
    let mut first = Array::<u32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        highest[r] = HIDDEN;
        sum[r] = 0f32;
        let row = offset + first_row + own + r * 8 + lane / 4;
        first[r] = first_key(&problem, documents, batch, row, options) as u32;
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
            let column = last * span + unit * 2;
            bias_tile[unit] =
                biases::<N2>(own_sum, before, within, CUBE_POS_Y as usize, keys, column);
        }
    }

    let ends_at = (batch * (problem.heads / problem.group) as usize + kv_head)
        * ((keys + TILE - 1) / TILE + 1)
        * dim;
    if comptime!(gated > 0) && unit < comptime!(gated * 8) {
        let (from, to) = (first_row / TILE, last * span / TILE + 1);
        gate_factors[unit] = powers::<E, NA>(ends, ends_at, from, to, unit * 2, dim);
    }

    for back in 0..blocks {
        let first_column = (last - back) * span;
        let turn = (back & 1) * comptime!(span * chunks);
        let bias_at = (back & 1) * comptime!(span / 2);
        ready.wait_parity((back & 1) as u32);
        // Nobody reads the other tile any more.
        release_tile();
        if (UNIT_POS == 0) & (back + 1 < blocks) {
            let (next, to) = (first_column - span, comptime!(span * chunks) - turn);
            ready.arrive_and_expect_tx(1, pair);
            load_rows::<E, V>(&ready, k, batch, kv_head, next, &mut k_tile, to, span, dim);
            load_rows::<E, V>(&ready, v, batch, kv_head, next, &mut v_tile, to, span, dim);
        }

        let gate_at = (back & 1) * comptime!(gated * 8);
        if comptime!(gated > 0) {
            // Unless the tile of gates is the one before's.
            if (back == 0) | ((first_column + span) % TILE == 0) {
                scale_lefts::<E, NA>(&mut q_lefts, &gate_factors, gate_at, m, steps, gated);
            }
        }
        let mut s = zeros::<NC>(comptime!(m * n_keys));
        add_abt::<E, V, NA, NB, NC>(&def, &q_lefts, &k_tile, turn, &mut s, m, n_keys, steps);

        if options.decay {
            add_biases::<NC, N2>(&mut s, &bias_tile, bias_at, factor, m, n_keys);
        }
        let edge = (first_column + span > all_to + 1) | (first_column < all_from);
        make_scores::<NC>(
            &mut s,
            &problem,
            slope,
            (offset + first_row + own + lane / 4) as u32,
            (first_column + (lane % 4) * 2) as u32,
            &first,
            edge,
            n_keys,
            options,
        );
        add_tile_softmax::<NC>(&mut s, &mut o_acc, &mut highest, &mut sum, scale, m, n_keys, n_dim);
        // On their way during the last product.
        let mut next_biases = Vector::<f32, N2>::empty();
        if comptime!(options.decay) && (unit < comptime!(span / 2)) & (back + 1 < blocks) {
            let column = first_column - span + unit * 2;
            next_biases = biases::<N2>(own_sum, before, within, CUBE_POS_Y as usize, keys, column);
        }
        let mut next_factors = Vector::<E, NA>::empty();
        if comptime!(gated > 0) && (unit < comptime!(gated * 8)) & (back + 1 < blocks) {
            let (from, to) = (first_column / TILE + 1, (first_column - span) / TILE + 1);
            next_factors = powers::<E, NA>(ends, ends_at, from, to, unit * 2, dim);
        }
        add_pb::<E, V, NA, NB, NC>(&def, &s, &v_tile, turn, &mut o_acc, m, n_keys, n_dim);
        if comptime!(options.decay) && unit < comptime!(span / 2) {
            bias_tile[comptime!(span / 2) - bias_at + unit] = next_biases;
        }
        if comptime!(gated > 0) && unit < comptime!(gated * 8) {
            gate_factors[comptime!(gated * 8) - gate_at + unit] = next_factors;
        }
    }

    let mut factors = Array::<f32>::new(comptime!(2 * m));
    #[unroll]
    for r in 0..comptime!(2 * m) {
        let mut total = sum[r];
        total += plane_shuffle_xor(total, 1);
        total += plane_shuffle_xor(total, 2);
        factors[r] = 1f32 / total;
        let row = first_row + own + r * 8 + lane / 4;
        if (lane % 4 == 0) & (row < queries) {
            lse[CUBE_POS_Y as usize * queries + row] =
                fma(highest[r], scale, Log::ln(total) * LOG2_E);
        }
    }
    let row = first_row + own;
    let o_base = o_rows.base(batch, head);
    store_rows::<E, W, NC>(
        &o_acc,
        &factors,
        o,
        o_base,
        o_rows.row as usize,
        row,
        queries,
        m,
        n_dim,
        real,
    );
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
    #[comptime] m: usize,
    #[comptime] n_keys: usize,
    #[comptime] n_dim: usize,
) {
    let mut tops = Array::<f32>::new(comptime!(2 * m));
    let mut grown = false;
    #[unroll]
    for i in 0..m {
        #[unroll]
        for r in 0..2usize {
            let state = comptime!(i * 2 + r);
            let mut top = highest[state];
            #[unroll]
            for n in 0..n_keys {
                let pair = s.index(comptime!(i * n_keys + n))[r];
                top = max(top, max(pair[0], pair[1]));
            }
            top = max(top, plane_shuffle_xor(top, 1));
            top = max(top, plane_shuffle_xor(top, 2));
            grown |= (top - highest[state]) * scale > GROWTH;
            tops[state] = top;
        }
    }
    if plane_any(grown) {
        #[unroll]
        for i in 0..m {
            #[unroll]
            for r in 0..2usize {
                let state = comptime!(i * 2 + r);
                let down = exp2((highest[state] - tops[state]) * scale);
                highest[state] = tops[state];
                sum[state] *= down;
                #[unroll]
                for n in 0..n_dim {
                    let fragment = o.index_mut(comptime!(i * n_dim + n));
                    let mut pair = fragment[r];
                    pair[0] *= down;
                    pair[1] *= down;
                    fragment[r] = pair;
                }
            }
        }
    }
    #[unroll]
    for i in 0..m {
        #[unroll]
        for r in 0..2usize {
            let state = comptime!(i * 2 + r);
            // A row that has seen no key yet: a shift of HIDDEN's size would not cancel in rounding.
            let shift = select(highest[state] > HIDDEN, highest[state] * scale, 0f32);
            let mut total = sum[state];
            #[unroll]
            for n in 0..n_keys {
                let fragment = s.index_mut(comptime!(i * n_keys + n));
                let mut pair = fragment[r];
                pair[0] = exp2(fma(pair[0], scale, -shift));
                pair[1] = exp2(fma(pair[1], scale, -shift));
                total += pair[0] + pair[1];
                fragment[r] = pair;
            }
            sum[state] = total;
        }
    }
}
