//! Decoding: one query a head against a long cache. The keys are split among blocks, a block's tiles
//! among its warps, and all query heads of a kv head share what is loaded (Dao et al.,
//! "Flash-Decoding", 2023). A second kernel joins the warps' parts.

use burn::tensor::{DType, bf16};
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::decay::{SPAN, Sums, SumsLaunch, bias};
use super::forward::add_tile_softmax;
use super::gates::{TILE, bring_lefts, copy_ends, gate_pairs, read_ends};
use super::scores::{Options, Problem, first_key, full_score, rest_of_scale};
use super::{Call, Heads, SHAPES, number};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{
    ALIGN, CHUNK, HIDDEN, LOG2_E, Rows, add_abt_of_rows, add_pb_of_rows, bytes, define_exp2, exp2,
    lefts, load_rows, release_tile, sum_of_four, zeros,
};

/// Fewest keys that one block of [`split`] reads, as long as there are as many.
const KEYS_OF_A_SPLIT: usize = 256;

/// Bytes of a Hopper multiprocessor's shared memory that blocks can use.
const SHARED_MEMORY: usize = 227 << 10;

/// Parts that the keys are split into, up to `most`, where each makes `rows` blocks: few, and hardly
/// any of the device's `slots` for blocks is empty while the last ones run.
fn splits(rows: usize, slots: usize, most: usize) -> usize {
    let full = |splits: usize| {
        let blocks = rows * splits;
        blocks as f64 / blocks.next_multiple_of(slots) as f64
    };
    let choices = 1..=most.min(4 * slots.div_ceil(rows));
    let best = choices.clone().map(full).fold(0.0, f64::max);
    choices.into_iter().find(|&splits| full(splits) >= best - 0.05).unwrap_or(1)
}

/// Keys of a split where most may be pruned.
const KEYS_OF_A_PRUNED_SPLIT: usize = 1024;

/// o and lse of one query a head; with `starts`, `[batch, heads]`, of the keys from there on.
pub(super) fn decode(call: &Call, starts: Option<&CudaTensor>) -> [CudaTensor; 2] {
    let [batch, heads, _, head_dim] = call.q.dims;
    let [_, kv_heads, keys, _] = call.k.dims;
    let client = &call.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(ROWS);
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132);
    let warps = WARPS;
    let span = warps * KEYS_OF_A_WARP;
    let options = Options { warps, span, prune: starts.is_some(), ..call.options(SHAPES) };
    // A tile of q, and two of k and of v, in bf16.
    let tiles = (ROWS + 4 * span) * options.dim * 2;
    let resident = (SHARED_MEMORY / (tiles + ALIGN)).clamp(1, 4);
    let slots = processors as usize * resident;
    let splits = splits(rows, slots, keys.div_ceil(KEYS_OF_A_SPLIT));
    // Most may have nothing to do where keys are pruned.
    let splits = starts.map_or(splits, |_| splits.max(keys.div_ceil(KEYS_OF_A_PRUNED_SPLIT)));
    let of_a_split = keys.div_ceil(splits).next_multiple_of(span);
    let splits = keys.div_ceil(of_a_split);
    let count = splits * warps;
    let parts = empty(&call.q.tensor, &[count, batch, heads, head_dim], DType::F32);
    let lse = empty(&call.q.tensor, &[count, batch, heads], DType::F32);
    // Heads take the rows' place: [batch, 1, heads, head_dim].
    let mut q = call.q.tensor.clone();
    q.meta.swap(1, 2);
    let q = Heads::new(&q);
    let [within, before] = call.decay();
    let sums = call.decay.as_ref().map_or(SumsLaunch::new(0, 0, 0), |decay| decay.sums(keys));
    let ends = call.gates.as_ref().map_or(0, |gates| gates.ends.meta.strides()[1] / options.dim);
    let layout = LayoutLaunch::new(sums, number(ends), number(kv_heads / call.v.dims[1]));
    // SAFETY: as in `attend`.
    unsafe {
        split::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static(splits as u32, rows as u32, 1),
            CubeDim::new_1d(32 * warps as u32),
            CHUNK,
            q.map(ROWS),
            call.k.map(span),
            call.v.map(span),
            call.documents(),
            call.slopes(),
            within,
            before,
            call.ends(),
            buffer(starts.unwrap_or(&call.q.tensor), 1),
            buffer(&parts, 1),
            buffer(&lse, 1),
            call.problem(),
            layout,
            of_a_split as u32,
            options,
        );
    }
    let (o, o_lse) = (call.q.like(), call.statistic());
    // SAFETY: as in `attend`.
    unsafe {
        join::launch_unchecked::<bf16, CudaRuntime>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(head_dim.next_multiple_of(32) as u32),
            buffer(&parts, 1),
            buffer(&lse, 1),
            buffer(&o.tensor, 1),
            buffer(&o_lse, 1),
            count as u32,
            heads as u32,
            o.rows(),
            head_dim,
        );
    }
    [o.tensor, o_lse]
}

/// Query heads that a block serves: rows of one fragment.
pub const ROWS: usize = 16;

/// Warps of a block.
pub const WARPS: usize = 4;

/// Keys of a tile that one warp works on.
pub const KEYS_OF_A_WARP: usize = 16;

// A tile is one span of decays and one tile of gates.
const _: () = assert!(WARPS * KEYS_OF_A_WARP == SPAN && SPAN == TILE);

/// How what is kept lies that a kind needs beside keys and values.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Layout {
    /// A decay's sums.
    pub sums: Sums,
    /// Tiles of gates, from one row to the next.
    pub ends: u32,
    /// Heads of k that share one of v.
    pub share: u32,
}

/// Parts of o, `[splits · warps, batch, heads, head_dim]`, each normalised on its own, and of lse,
/// `[splits · warps, batch, heads]`, to base 2; a part that sees no key has lse [`HIDDEN`].
///
/// With gates, q is relative to the start of its tile, k to the start of its own, and `ends` holds E at the
/// starts of tiles, see [`gates`](super::gates). With pruning, `starts` has each query head's first key.
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
    ends: &Array<i32>,
    starts: &Array<i32>,
    parts: &mut Array<f32>,
    lse: &mut Array<f32>,
    problem: Problem,
    layout: Layout,
    keys_of_a_split: u32,
    #[comptime] options: Options,
) {
    define_exp2();
    let Options { dim, warps, gated, .. } = comptime!(options);
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
    let value_head = kv_head / layout.share as usize;
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
    let size!(N2) = 2usize;
    let pairs = comptime!(gate_pairs(gated));
    let mut gate_factors =
        SharedMemory::<Vector<E, NA>>::new_aligned(comptime!(warps * pairs), 16usize);
    sync_cube();

    let mut first = first_key(&problem, documents, batch, row, options);
    if options.prune {
        let head = min(first_head + lane % ROWS, (kv_head + 1) * group - 1);
        first = max(first, plane_min(starts[batch * heads + head]) as usize);
    }
    let from = max(first, CUBE_POS_X as usize * keys_of_a_split as usize) / span;
    let to = min(keys, (CUBE_POS_X as usize + 1) * keys_of_a_split as usize);
    let mut blocks = 0usize;
    if to > from * span {
        blocks = (to - from * span + span - 1) / span;
    }
    // From the last tile to the first, as gates want it.
    let mut last_column = from * span;
    if blocks > 0 {
        last_column += (blocks - 1) * span;
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
            load_rows::<E, V>(&ready, k, batch, kv_head, last_column, &mut k_tile, 0, span, dim);
            load_rows::<E, V>(&ready, v, batch, value_head, last_column, &mut v_tile, 0, span, dim);
        }
    }
    ready.wait_parity(0);
    let mut q_lefts = lefts::<E, V, NA>(&def, &q_tile, 0, steps, ROWS);

    let mut o_acc = zeros::<NC>(n_dim);
    let mut highest = Array::<f32>::new(2usize);
    let mut sum = Array::<f32>::new(2usize);
    let mut slope = Array::<f32>::new(2usize);
    // Of a decay: where a row's sums lie, and that before the query's span.
    let mut within_at = Array::<usize>::new(2usize);
    let mut before_at = Array::<usize>::new(2usize);
    let mut own_sum = Array::<f64>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        highest[r] = HIDDEN;
        sum[r] = 0f32;
        slope[r] = 0f32;
        if options.alibi {
            slope[r] = slopes[min(first_head + r * 8 + lane / 4, heads - 1)];
        }
        if options.decay {
            // Rows without a head repeat the group's last, so that they read nothing else.
            let head = min(first_head + r * 8 + lane / 4, (kv_head + 1) * group - 1);
            let decay_row = batch * heads + head;
            within_at[r] = decay_row * layout.sums.within as usize;
            before_at[r] = decay_row * layout.sums.before as usize;
            own_sum[r] = before[before_at[r] + row / SPAN];
        }
    }
    // Of gates: where q's are, and those of the next tile.
    let ends_at = (batch * kv_heads + kv_head) * layout.ends as usize * dim;
    let mut here = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    let mut there = Array::<Vector<i32, N2>>::new(comptime!(pairs.div_ceil(32)));
    if comptime!(gated > 0) {
        read_ends::<N2>(ends, ends_at, row / TILE, &mut here, pairs, dim);
        read_ends::<N2>(ends, ends_at, last_column / TILE, &mut there, pairs, dim);
    }
    let mut scale = rest_of_scale(&problem, options);
    let factor = scale;
    if options.decay {
        scale = 1f32;
    }
    let own = warp * KEYS_OF_A_WARP;
    for block in 0..blocks {
        let first_column = last_column - block * span;
        let turn = (block & 1) * comptime!(span * chunks);
        // Read before the tile is waited for.
        let mut biases = Array::<f32>::new(8usize);
        if options.decay {
            #[unroll]
            for r in 0..2usize {
                let between = own_sum[r] - before[before_at[r] + first_column / SPAN];
                #[unroll]
                for i in 0..4usize {
                    let column = first_column + own + comptime!(i / 2 * 8 + i % 2) + (lane % 4) * 2;
                    let within = within[within_at[r] + min(column, keys - 1)];
                    biases[r * 4 + i] = bias(between, within, LOG2_E);
                }
            }
        }
        ready.wait_parity((block & 1) as u32);
        // Nobody reads the other tile any more.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let (next, to) = (first_column - span, comptime!(span * chunks) - turn);
            ready.arrive_and_expect_tx(1, pair);
            load_rows::<E, V>(&ready, k, batch, kv_head, next, &mut k_tile, to, span, dim);
            load_rows::<E, V>(&ready, v, batch, value_head, next, &mut v_tile, to, span, dim);
        }
        if comptime!(gated > 0) {
            bring_lefts::<E, NA, N2>(&mut q_lefts, &here, &there, &mut gate_factors, warp, gated);
            copy_ends::<N2>(&there, &mut here, pairs);
            if block + 1 < blocks {
                read_ends::<N2>(ends, ends_at, first_column / TILE - 1, &mut there, pairs, dim);
            }
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
                #[unroll]
                for e in 0..2usize {
                    let column = first_column + own + comptime!(n * 8 + e) + (lane % 4) * 2;
                    if options.decay {
                        scores[e] = fma(scores[e], factor, biases[comptime!(r * 4 + n * 2 + e)]);
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

/// o from its parts, and the logarithm of the softmax's sum to base 2, `[batch, heads]`.
///
/// Grid: batch · heads; a unit for each channel.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn join<E: Numeric>(
    parts: &Array<f32>,
    lse: &Array<f32>,
    o: &mut Array<E>,
    o_lse: &mut Array<f32>,
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
        if channel == 0 {
            o_lse[row] = top + Log::ln(total) * LOG2_E;
        }
        channel += CUBE_DIM as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_split_so_that_blocks_fill_the_device() {
        // Rows of blocks, slots, most splits: splits.
        for (rows, slots, most, want) in [
            (128, 396, 128, 3), // 384 blocks at once.
            (128, 396, 2, 2),   // A short cache.
            (16, 396, 512, 24),
            (200, 396, 100, 5), // 1,000 blocks in three rounds.
            (512, 396, 100, 3), // 1,536 in four.
        ] {
            assert_eq!(splits(rows, slots, most), want, "{rows} rows, {slots} slots, {most}");
        }
    }
}
