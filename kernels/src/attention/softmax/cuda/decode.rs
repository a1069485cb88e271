//! Decoding: one query a head against a long cache. The keys are split among blocks, a block's tiles
//! among its warps, and all query heads of a kv head share what is loaded (Dao et al.,
//! "Flash-Decoding", 2023). A second kernel joins the warps' parts.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::decay::{bias, sum_before, sum_between};
use super::forward::add_tile_softmax;
use super::scores::{Options, Problem, first_key, full_score, rest_of_scale};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, LOG2_E, Rows, add_abt_of_rows, add_pb_of_rows, bytes, define_exp2, exp2,
    lefts, load_rows, release_tile, sum_of_four, zeros,
};

/// Query heads that a block serves: rows of one fragment.
pub const ROWS: usize = 16;

/// Warps of a block.
pub const WARPS: usize = 4;

/// Keys of a tile that one warp works on.
pub const KEYS_OF_A_WARP: usize = 16;

/// Parts of o, `[splits · warps, batch, heads, head_dim]`, each normalised on its own, and of lse,
/// `[splits · warps, batch, heads]`, to base 2; a part that sees no key has lse [`HIDDEN`].
///
/// Grid: splits, batch · kv_heads · blocks of [`ROWS`] query heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn split<E: Numeric, V: Size>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    documents: &Array<i32>,
    slopes: &Array<f32>,
    within: &Array<f32>,
    before: &Array<f64>,
    parts: &mut Array<f32>,
    lse: &mut Array<f32>,
    problem: Problem,
    keys_of_a_split: u32,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, warps, .. } = comptime!(options);
    let span = comptime!(warps * KEYS_OF_A_WARP);
    let chunks = comptime!(dim / CHUNK);
    let (steps, n_dim) = comptime!((dim / 16, dim / 8));

    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let blocks_of_group = (group + ROWS - 1) / ROWS;
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / (kv_heads * blocks_of_group);
    let rest = CUBE_POS_Y as usize % (kv_heads * blocks_of_group);
    let kv_head = rest / blocks_of_group;
    let first_head = kv_head * group + rest % blocks_of_group * ROWS;
    let keys = problem.keys as usize;
    let row = keys - 1;

    let def = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let size!(NB) = def.vector_size(MatrixIdent::B);
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);

    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    let mut q_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(ROWS * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Vector<E, V>>::new_aligned(comptime!(2 * span * chunks), ALIGN);
    sync_cube();

    let first = first_key(&problem, documents, batch, row, options);
    let from = max(first, CUBE_POS_X as usize * keys_of_a_split as usize) / span;
    let to = min(keys, (CUBE_POS_X as usize + 1) * keys_of_a_split as usize);
    let mut blocks = 0usize;
    if to > from * span {
        blocks = (to - from * span + span - 1) / span;
    }
    let pair = comptime!(2 * bytes(span, dim));
    if UNIT_POS == 0 {
        let mut expected = comptime!(bytes(ROWS, dim)).runtime();
        if blocks > 0 {
            expected += pair;
        }
        ready.arrive_and_expect_tx(1, expected);
        load_rows::<E, V>(&ready, q, batch, 0, first_head, &mut q_tile, 0, ROWS, dim);
        if blocks > 0 {
            load_rows::<E, V>(&ready, k, batch, kv_head, from * span, &mut k_tile, 0, span, dim);
            load_rows::<E, V>(&ready, v, batch, kv_head, from * span, &mut v_tile, 0, span, dim);
        }
    }
    ready.wait_parity(0);
    let q_lefts = lefts::<E, V, NA>(&def, &q_tile, 0, steps, ROWS);

    let mut o_acc = zeros::<NC>(n_dim);
    let mut highest = Array::<f32>::new(2usize);
    let mut sum = Array::<f32>::new(2usize);
    let mut slope = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        highest[r] = HIDDEN;
        sum[r] = 0f32;
        slope[r] = 0f32;
        if options.alibi {
            slope[r] = slopes[min(first_head + r * 8 + lane / 4, heads - 1)];
        }
    }
    let mut scale = rest_of_scale(&problem, options);
    let factor = scale;
    if options.decay {
        scale = 1f32;
    }
    let own = warp * KEYS_OF_A_WARP;
    for block in 0..blocks {
        let first_column = (from + block) * span;
        let turn = (block & 1) * comptime!(span * chunks);
        ready.wait_parity((block & 1) as u32);
        // Nobody reads the other tile any more.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let (next, to) = (first_column + span, comptime!(span * chunks) - turn);
            ready.arrive_and_expect_tx(1, pair);
            load_rows::<E, V>(&ready, k, batch, kv_head, next, &mut k_tile, to, span, dim);
            load_rows::<E, V>(&ready, v, batch, kv_head, next, &mut v_tile, to, span, dim);
        }
        let mut s = zeros::<NC>(2usize);
        add_abt_of_rows::<E, V, NA, NB, NC>(
            &def, &q_lefts, &k_tile, turn, own, span, &mut s, steps,
        );
        #[unroll]
        for n in 0..2usize {
            #[unroll]
            for r in 0..2usize {
                let mut scores = s.index(n)[r];
                // Rows without a head repeat the group's last, so that they read nothing else.
                let head = min(first_head + r * 8 + lane / 4, (kv_head + 1) * group - 1);
                let decay_row = batch * heads + head;
                let mut between = 0f32;
                if options.decay {
                    let own_sum = sum_before(before, decay_row, keys, row);
                    between = sum_between(own_sum, before, decay_row, keys, first_column);
                }
                #[unroll]
                for e in 0..2usize {
                    let column = first_column + own + comptime!(n * 8 + e) + (lane % 4) * 2;
                    if options.decay {
                        let bias = bias(between, within, decay_row, keys, column);
                        scores[e] = fma(scores[e], factor, bias);
                    }
                    let score = full_score(
                        scores[e],
                        &problem,
                        slope[r],
                        row as u32,
                        column as u32,
                        options,
                    );
                    let hide = (column < first) | (column >= to);
                    scores[e] = select(hide, HIDDEN, score);
                }
                s.index_mut(n)[r] = scores;
            }
        }
        add_tile_softmax::<NC>(&mut s, &mut o_acc, &mut highest, &mut sum, scale, 2usize, n_dim);
        add_pb_of_rows::<E, V, NA, NB, NC>(&def, &s, &v_tile, turn, own, span, &mut o_acc, n_dim);
    }

    let batches = CUBE_COUNT_Y as usize / (kv_heads * blocks_of_group);
    let part = (CUBE_POS_X as usize * comptime!(warps) + warp) * batches + batch;
    #[unroll]
    for r in 0..2usize {
        let total = sum_of_four(sum[r]);
        let head = first_head + r * 8 + lane / 4;
        if head < (kv_head + 1) * group {
            let seen = highest[r] > HIDDEN;
            let factor = select(seen, 1f32 / total, 0f32);
            let at = part * heads + head;
            if lane % 4 == 0 {
                let sum = fma(highest[r], scale, Log::ln(total) * LOG2_E);
                lse[at] = select(seen, sum, HIDDEN);
            }
            #[unroll]
            for n in 0..comptime!(options.real / 8) {
                let value = o_acc.index(n)[r];
                let to = at * options.real + n * 8 + (lane % 4) * 2;
                parts[to] = value[0] * factor;
                parts[to + 1] = value[1] * factor;
            }
        }
    }
}

/// o from its parts.
///
/// Grid: batch · heads; a unit for each channel.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn join<E: Numeric>(
    parts: &Array<f32>,
    lse: &Array<f32>,
    o: &mut Array<E>,
    count: u32,
    heads: u32,
    o_rows: Rows,
    #[comptime] real: usize,
) {
    define_exp2();
    let row = CUBE_POS_X as usize;
    let rows = CUBE_COUNT_X as usize;
    let mut top = f32::cast_from(HIDDEN);
    for part in 0..count as usize {
        top = max(top, lse[part * rows + row]);
    }
    let base = o_rows.base(row / heads as usize, row % heads as usize) * CHUNK;
    let mut channel = UNIT_POS as usize;
    while channel < real {
        let mut total = 0f32;
        let mut value = 0f32;
        for part in 0..count as usize {
            let weight = exp2(lse[part * rows + row] - top);
            total += weight;
            value += weight * parts[(part * rows + row) * real + channel];
        }
        o[base + channel] = E::cast_from(value / total);
        channel += CUBE_DIM as usize;
    }
}
