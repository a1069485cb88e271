//! Decoding: one query a head against a long cache. The keys are split among blocks, a block's tiles
//! among its warps, and all query heads of a kv head share what is loaded (Dao et al.,
//! "Flash-Decoding", 2023). A second kernel joins the warps' parts.

use burn::tensor::{DType, bf16};
use cubecl::cmma::MmaDefinition;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::forward::{Qkv, QkvLaunch};
use super::hooks::{
    BiasArgs, Biases, BiasesOf, Hooks, OperandArgs, Operands, OperandsOf, Score, ScoreArgs,
    ScoreOf, Weight, WeightArgs, WeightOf,
};
use super::mask::Mask;
use super::problem::{Config, Problem};
use super::{Call, Heads, SHAPES, number};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{
    ALIGN, CHUNK, Chunk, MASKED, Rows, add_abt_of_rows, add_pb_of_rows, bytes, define_exp2,
    load_a_frags, load_rows, release_tile, zeros,
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

/// o `[batch, heads, 1, head_dim]` and each row's statistic, `[batch, heads, 1]` (of softmax the logarithm of
/// its sum to base 2), of one query a head.
///
/// - `first_keys`: where pruning lets each query begin, 32-bit integers `[batch, heads]`
///
/// Heads of k may share one of v.
pub fn decode<A: Hooks>(call: &Call<A>, first_keys: Option<&CudaTensor>) -> [CudaTensor; 2] {
    let [batch, heads, _, head_dim] = call.q.dims;
    let [_, kv_heads, keys, _] = call.k.dims;
    let client = &call.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(ROWS);
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132);
    let config = Config { warps: WARPS, tile: WARPS * KEYS_OF_A_WARP, ..call.config(SHAPES) };
    let tile = config.tile;
    // A tile of q, and two of k and of v, in bf16.
    let tiles = (ROWS + 4 * tile) * config.padded_head_dim * 2;
    let resident = (SHARED_MEMORY / (tiles + ALIGN)).clamp(1, 4);
    let slots = processors as usize * resident;
    let splits = splits(rows, slots, keys.div_ceil(KEYS_OF_A_SPLIT));
    // Most may have nothing to do where keys are pruned.
    let splits = first_keys.map_or(splits, |_| splits.max(keys.div_ceil(KEYS_OF_A_PRUNED_SPLIT)));
    let keys_of_a_split = keys.div_ceil(splits).next_multiple_of(tile);
    let splits = keys.div_ceil(keys_of_a_split);
    let count = splits * WARPS;
    let parts = empty(&call.q.tensor, &[count, batch, heads, head_dim], DType::F32);
    let statistics = empty(&call.q.tensor, &[count, batch, heads], DType::F32);
    // Heads take the rows' place: [batch, 1, heads, head_dim].
    let mut q = call.q.tensor.clone();
    q.meta.swap(1, 2);
    let q = Heads::new(&q);
    // SAFETY: as in `Call::forward`.
    unsafe {
        split::launch_unchecked::<A, CudaRuntime>(
            client,
            CubeCount::Static(splits as u32, rows as u32, 1),
            CubeDim::new_1d(config.threads() as u32),
            QkvLaunch::new(q.map(ROWS), call.k.map(tile), call.v.map(tile)),
            call.mask_of_decoding(),
            call.hooks.operands(),
            call.hooks.biases(),
            call.hooks.score(),
            PartsLaunch::new(buffer(&parts, 1), buffer(&statistics, 1)),
            first_keys.map(|x| buffer(x, 1)).into(),
            call.problem(),
            keys_of_a_split as u32,
            number(kv_heads / call.v.dims[1]),
            config,
            first_keys.is_some(),
        );
    }
    let (o, statistic) = (call.q.like(), call.statistic());
    // SAFETY: as in `Call::forward`.
    unsafe {
        join::launch_unchecked::<A, CudaRuntime>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(head_dim.next_multiple_of(32) as u32),
            PartsLaunch::new(buffer(&parts, 1), buffer(&statistics, 1)),
            call.hooks.biases(),
            call.hooks.weight(),
            buffer(&o.tensor, 1),
            buffer(&statistic, 1),
            call.problem(),
            count as u32,
            o.rows(),
            config,
        );
    }
    [o.tensor, statistic]
}

/// Query heads that a block serves: rows of one fragment.
pub const ROWS: usize = 16;

/// Warps of a block.
pub const WARPS: usize = 4;

/// Keys of a tile that one warp works on.
pub const KEYS_OF_A_WARP: usize = 16;

/// Parts of a row that blocks' warps make of their keys.
#[derive(CubeType, CubeLaunch)]
pub struct Parts {
    /// Of o, each normalised on its own, `[splits · warps, batch, heads, head_dim]`.
    pub o: Array<f32>,
    /// Of the row's statistic, `[splits · warps, batch, heads]`; [`MASKED`] where a part has no key.
    pub statistics: Array<f32>,
}

/// See [`Parts`].
///
/// Grid: splits, batch · kv_heads · blocks of [`ROWS`] query heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn split<A: Hooks>(
    qkv: &Qkv,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    parts: &mut Parts,
    first_keys: &ComptimeOption<Array<i32>>,
    problem: Problem,
    keys_of_a_split: u32,
    heads_of_a_value: u32,
    #[comptime] config: Config,
    #[comptime] pruned: bool,
) {
    define_exp2();
    let Config { padded_head_dim: dim, tile, .. } = comptime!(config);
    let chunks = comptime!(dim / CHUNK);
    let (steps, n_dim) = comptime!((dim / 16, dim / 8));
    let biased = comptime!(BiasesOf::<A>::SOME);

    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let blocks_of_group = (group + ROWS - 1) / ROWS;
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / (kv_heads * blocks_of_group);
    let rest = CUBE_POS_Y as usize % (kv_heads * blocks_of_group);
    let kv_head = rest / blocks_of_group;
    let first_head = kv_head * group + rest % blocks_of_group * ROWS;
    let value_head = kv_head / heads_of_a_value as usize;
    let keys = problem.keys as usize;
    let position = keys - 1;

    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(ROWS * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * chunks), ALIGN);
    sync_cube();

    let mut first = mask.first_key(&problem, batch, position);
    if pruned {
        let head = min(first_head + lane % ROWS, (kv_head + 1) * group - 1);
        let own = first_keys.as_ref().unwrap()[batch * heads + head];
        first = max(first, plane_min(own) as usize);
    }
    let from = max(first, CUBE_POS_X as usize * keys_of_a_split as usize) / tile;
    let to = min(keys, (CUBE_POS_X as usize + 1) * keys_of_a_split as usize);
    let mut blocks = 0usize;
    if to > from * tile {
        blocks = (to - from * tile + tile - 1) / tile;
    }
    // From the last tile to the first, as some operands want it.
    let mut last_column = from * tile;
    if blocks > 0 {
        last_column += (blocks - 1) * tile;
    }
    let pair = comptime!(2 * bytes(tile, dim));
    if UNIT_POS == 0 {
        let mut expected = comptime!(bytes(ROWS, dim)).runtime();
        if blocks > 0 {
            expected += pair;
        }
        ready.arrive_and_expect_tx(1, expected);
        load_rows(&ready, &qkv.q, batch, 0, first_head, &mut q_tile, 0, ROWS, dim);
        if blocks > 0 {
            let column = last_column;
            load_rows(&ready, &qkv.k, batch, kv_head, column, &mut k_tile, 0, tile, dim);
            load_rows(&ready, &qkv.v, batch, value_head, column, &mut v_tile, 0, tile, dim);
        }
    }
    ready.wait_parity(0);
    let mut q_frags = load_a_frags(&def, &q_tile, 0, steps, ROWS);

    let mut o_acc = zeros(n_dim);
    let mut of_rows = WeightOf::<A>::rows();
    // Rows without a head repeat the group's last, so that they read nothing else.
    let mut rows = Array::<usize>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let head = min(first_head + r * 8 + lane / 4, (kv_head + 1) * group - 1);
        rows[r] = batch * heads + head;
    }
    let of_one = ScoreOf::<A>::head(score, rows[0] - batch * heads);
    let of_other = ScoreOf::<A>::head(score, rows[1] - batch * heads);
    let mut of_biases = BiasesOf::<A>::decode(biases, &problem, &rows);
    let kv_row = batch * kv_heads + kv_head;
    let mut of_operands = OperandsOf::<A>::decode(operands, &problem, kv_row, last_column, config);
    let mut scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::UNIT;
    let factor = scale;
    if biased {
        scale = 1f32;
    }
    let own = warp * KEYS_OF_A_WARP;
    for block in 0..blocks {
        let first_column = last_column - block * tile;
        let at = (block & 1) * comptime!(tile * chunks);
        // Read before the tile is waited for.
        BiasesOf::<A>::read_biases(
            &mut of_biases,
            biases,
            &problem,
            first_column,
            first_column + own,
        );
        ready.wait_parity((block & 1) as u32);
        // Nobody reads the other tile any more.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let (next, to) = (first_column - tile, comptime!(tile * chunks) - at);
            ready.arrive_and_expect_tx(1, pair);
            load_rows(&ready, &qkv.k, batch, kv_head, next, &mut k_tile, to, tile, dim);
            load_rows(&ready, &qkv.v, batch, value_head, next, &mut v_tile, to, tile, dim);
        }
        OperandsOf::<A>::rescale_q(
            &mut of_operands,
            operands,
            &mut q_frags,
            warp,
            first_column - tile,
            block + 1 < blocks,
            config,
        );
        let mut s = zeros(2usize);
        add_abt_of_rows(&def, &q_frags, &k_tile, at, own, tile, &mut s, steps);
        #[unroll]
        for n in 0..2usize {
            #[unroll]
            for r in 0..2usize {
                let mut scores = s.index(n)[r];
                #[unroll]
                for e in 0..2usize {
                    let column = first_column + own + comptime!(n * 8 + e) + (lane % 4) * 2;
                    let mut value = scores[e];
                    if biased {
                        let bias = BiasesOf::<A>::bias(&of_biases, r, n, e);
                        value = fma(value, factor, bias);
                    }
                    if comptime!(config.changes_scores) {
                        let (row, key) = (position as u32, column as u32);
                        if comptime!(r == 0) {
                            value = ScoreOf::<A>::score(score, &problem, &of_one, value, row, key);
                        } else {
                            value =
                                ScoreOf::<A>::score(score, &problem, &of_other, value, row, key);
                        }
                    }
                    let hide = (column < first) | (column >= to);
                    scores[e] = select(hide, MASKED, value);
                }
                s.index_mut(n)[r] = scores;
            }
        }
        WeightOf::<A>::add_tile(&mut of_rows, &mut s, &mut o_acc, scale, 2usize, n_dim);
        add_pb_of_rows(&def, &s, &v_tile, at, own, tile, &mut o_acc, n_dim);
    }

    let batches = CUBE_COUNT_Y as usize / (kv_heads * blocks_of_group);
    let part = (CUBE_POS_X as usize * comptime!(config.warps) + warp) * batches + batch;
    #[unroll]
    for r in 0..2usize {
        let (factor, statistic) = WeightOf::<A>::finish_part(&of_rows, scale, r);
        let head = first_head + r * 8 + lane / 4;
        if head < (kv_head + 1) * group {
            let at = part * heads + head;
            if lane % 4 == 0 {
                parts.statistics[at] = statistic;
            }
            #[unroll]
            for n in 0..comptime!(config.head_dim / 8) {
                let value = o_acc.index(n)[r];
                let to = at * config.head_dim + n * 8 + (lane % 4) * 2;
                parts.o[to] = value[0] * factor;
                parts.o[to + 1] = value[1] * factor;
            }
        }
    }
}

/// o and the rows' statistics, `[batch, heads]`, from their parts.
///
/// Grid: batch · heads; a unit for each channel.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn join<A: Hooks>(
    parts: &Parts,
    biases: &BiasArgs<A>,
    weight: &WeightArgs<A>,
    o: &mut Array<bf16>,
    statistic: &mut Array<f32>,
    problem: Problem,
    count: u32,
    o_rows: Rows,
    #[comptime] config: Config,
) {
    define_exp2();
    let head_dim = config.head_dim;
    let row = CUBE_POS_X as usize;
    let rows = CUBE_COUNT_X as usize;
    let (batch, head) = (row / problem.heads as usize, row % problem.heads as usize);
    let mut top = f32::cast_from(MASKED);
    for part in 0..count as usize {
        top = max(top, parts.statistics[part * rows + row]);
    }
    let position = problem.keys as usize - 1;
    let shift = BiasesOf::<A>::shift(biases, &problem, row, position, position);
    let base = o_rows.base(batch, head) * CHUNK;
    let mut channel = UNIT_POS as usize;
    while channel < head_dim {
        let mut total = 0f32;
        let mut value = 0f32;
        for part in 0..count as usize {
            let factor = WeightOf::<A>::part(parts.statistics[part * rows + row], top);
            total += factor;
            value += factor * parts.o[(part * rows + row) * head_dim + channel];
        }
        let (factor, all) = WeightOf::<A>::join(weight, head, top, total, shift);
        o[base + channel] = bf16::cast_from(value * factor);
        if channel == 0 {
            statistic[row] = all;
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
