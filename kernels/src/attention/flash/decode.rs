//! Decoding: one query per head against a long cache. The keys are split among blocks, a block's tiles
//! among its warps, and all query heads of a kv head share the loaded tiles (Dao et al.,
//! "Flash-Decoding", 2023). A second kernel combines the warps' partial results.

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
use super::problem::{KernelConfig, ProblemShape};
use super::{FORWARD_SHAPES, FlashAttention, Heads, as_u32};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{
    ALIGN, CHUNK, Chunk, MASKED, RowStrides, add_abt_of_rows, add_pb_of_rows, bytes, define_exp2,
    load_a_frags, load_rows, release_tile, wait_parity, zeros,
};

/// Fewest keys per split.
const KEYS_PER_SPLIT: usize = 256;

/// Bytes of shared memory that blocks can use on a Hopper multiprocessor.
const SHARED_MEMORY: usize = 227 << 10;

/// The number of splits of the keys, up to `most`, where each split adds `rows` blocks: the fewest that keep
/// almost all of the device's `slots` for blocks busy in the last wave.
fn splits(rows: usize, slots: usize, most: usize) -> usize {
    let full = |splits: usize| {
        let blocks = rows * splits;
        blocks as f64 / blocks.next_multiple_of(slots) as f64
    };
    let choices = 1..=most.min(4 * slots.div_ceil(rows));
    let best = choices.clone().map(full).fold(0.0, f64::max);
    choices.into_iter().find(|&splits| full(splits) >= best - 0.05).unwrap_or(1)
}

/// Keys per split where most may be pruned.
const KEYS_PER_PRUNED_SPLIT: usize = 1024;

/// o `[batch, heads, 1, head_dim]` and each row's statistic, `[batch, heads, 1]` (for softmax its log-sum-exp,
/// base 2), of one query per head.
///
/// - `first_keys`: the first key of each query after pruning, 32-bit integers `[batch, heads]`
///
/// Several heads of k may share one head of v.
pub fn decode<A: Hooks>(
    flash: &FlashAttention<A>,
    first_keys: Option<&CudaTensor>,
) -> [CudaTensor; 2] {
    let [batch, heads, _, head_dim] = flash.q.dims;
    let [_, kv_heads, keys, _] = flash.k.dims;
    let client = &flash.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(HEADS_PER_BLOCK);
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132);
    let config =
        KernelConfig { warps: WARPS, tile: WARPS * KEYS_PER_WARP, ..flash.config(FORWARD_SHAPES) };
    let tile = config.tile;
    // A tile of q, and two of k and of v, in bf16.
    let tiles = (HEADS_PER_BLOCK + 4 * tile) * config.padded_head_dim * 2;
    let resident = (SHARED_MEMORY / (tiles + ALIGN)).clamp(1, 4);
    let slots = processors as usize * resident;
    let splits = splits(rows, slots, keys.div_ceil(KEYS_PER_SPLIT));
    // With pruning, most splits may have nothing to do: use more of them.
    let splits = first_keys.map_or(splits, |_| splits.max(keys.div_ceil(KEYS_PER_PRUNED_SPLIT)));
    let keys_per_split = keys.div_ceil(splits).next_multiple_of(tile);
    let splits = keys.div_ceil(keys_per_split);
    let count = splits * WARPS;
    let partials = empty(&flash.q.tensor, &[count, batch, heads, head_dim], DType::F32);
    let statistics = empty(&flash.q.tensor, &[count, batch, heads], DType::F32);
    // Heads become rows: [batch, 1, heads, head_dim].
    let mut q = flash.q.tensor.clone();
    q.meta.swap(1, 2);
    let q = Heads::new(&q);
    // SAFETY: as in `FlashAttention::forward`.
    unsafe {
        split::launch_unchecked::<A, CudaRuntime>(
            client,
            CubeCount::Static(splits as u32, rows as u32, 1),
            CubeDim::new_1d(config.threads() as u32),
            QkvLaunch::new(
                q.tensor_map(HEADS_PER_BLOCK),
                flash.k.tensor_map(tile),
                flash.v.tensor_map(tile),
            ),
            flash.decode_mask(),
            flash.hooks.operands(),
            flash.hooks.biases(),
            flash.hooks.score(),
            SplitOutputsLaunch::new(buffer(&partials, 1), buffer(&statistics, 1)),
            first_keys.map(|x| buffer(x, 1)).into(),
            flash.problem(),
            keys_per_split as u32,
            as_u32(kv_heads / flash.v.dims[1]),
            config,
            first_keys.is_some(),
        );
    }
    let (o, statistic) = (flash.q.like(), flash.statistic());
    // SAFETY: as in `FlashAttention::forward`.
    unsafe {
        combine::launch_unchecked::<A, CudaRuntime>(
            client,
            CubeCount::Static((batch * heads) as u32, 1, 1),
            CubeDim::new_1d(head_dim.next_multiple_of(32) as u32),
            SplitOutputsLaunch::new(buffer(&partials, 1), buffer(&statistics, 1)),
            flash.hooks.biases(),
            flash.hooks.weight(),
            buffer(&o.tensor, 1),
            buffer(&statistic, 1),
            flash.problem(),
            count as u32,
            o.row_strides(),
            config,
        );
    }
    [o.tensor, statistic]
}

/// Query heads per block: the rows of one fragment.
pub const HEADS_PER_BLOCK: usize = 16;

/// Warps per block.
pub const WARPS: usize = 4;

/// Keys of a tile per warp.
pub const KEYS_PER_WARP: usize = 16;

/// The partial results of splits: one for each warp of each split.
#[derive(CubeType, CubeLaunch)]
pub struct SplitOutputs {
    /// o over the warp's keys, normalised on its own, `[splits · warps, batch, heads, head_dim]`.
    pub o: Array<f32>,
    /// The row's statistic over these keys, `[splits · warps, batch, heads]`; [`MASKED`] without a visible key.
    pub statistics: Array<f32>,
}

/// Writes the [`SplitOutputs`].
///
/// Grid: splits, batch · kv_heads · blocks of [`HEADS_PER_BLOCK`] query heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn split<A: Hooks>(
    qkv: &Qkv,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    partials: &mut SplitOutputs,
    first_keys: &ComptimeOption<Array<i32>>,
    problem: ProblemShape,
    keys_per_split: u32,
    k_heads_per_v_head: u32,
    #[comptime] config: KernelConfig,
    #[comptime] pruned: bool,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, tile, .. } = comptime!(config);
    let chunks = comptime!(dim / CHUNK);
    let (steps, n_dim) = comptime!((dim / 16, dim / 8));
    let biased = comptime!(BiasesOf::<A>::ENABLED);

    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let blocks_of_group = (group + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK;
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / (kv_heads * blocks_of_group);
    let rest = CUBE_POS_Y as usize % (kv_heads * blocks_of_group);
    let kv_head = rest / blocks_of_group;
    let first_head = kv_head * group + rest % blocks_of_group * HEADS_PER_BLOCK;
    let value_head = kv_head / k_heads_per_v_head as usize;
    let keys = problem.keys as usize;
    let position = keys - 1;

    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(HEADS_PER_BLOCK * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * chunks), ALIGN);
    sync_cube();

    let mut first = mask.first_key(&problem, batch, position);
    if pruned {
        let head = min(first_head + lane % HEADS_PER_BLOCK, (kv_head + 1) * group - 1);
        let own = first_keys.as_ref().unwrap()[batch * heads + head];
        first = max(first, plane_min(own) as usize);
    }
    let from = max(first, CUBE_POS_X as usize * keys_per_split as usize) / tile;
    let to = min(keys, (CUBE_POS_X as usize + 1) * keys_per_split as usize);
    let mut blocks = 0usize;
    if to > from * tile {
        blocks = (to - from * tile + tile - 1) / tile;
    }
    // From the last tile to the first, as `Operands::decode` requires.
    let mut last_column = from * tile;
    if blocks > 0 {
        last_column += (blocks - 1) * tile;
    }
    let pair = comptime!(2 * bytes(tile, dim));
    if UNIT_POS == 0 {
        let mut expected = comptime!(bytes(HEADS_PER_BLOCK, dim)).runtime();
        if blocks > 0 {
            expected += pair;
        }
        ready.arrive_and_expect_tx(1, expected);
        load_rows(&ready, &qkv.q, batch, 0, first_head, &mut q_tile, 0, HEADS_PER_BLOCK, dim);
        if blocks > 0 {
            let column = last_column;
            load_rows(&ready, &qkv.k, batch, kv_head, column, &mut k_tile, 0, tile, dim);
            load_rows(&ready, &qkv.v, batch, value_head, column, &mut v_tile, 0, tile, dim);
        }
    }
    wait_parity(&ready, 0u32);
    let mut q_frags = load_a_frags(&def, &q_tile, 0, steps, HEADS_PER_BLOCK);

    let mut o_acc = zeros(n_dim);
    let mut row_state = WeightOf::<A>::init_rows();
    // Rows without a head repeat the group's last head, to read nothing out of bounds.
    let mut batch_heads = Array::<usize>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let head = min(first_head + r * 8 + lane / 4, (kv_head + 1) * group - 1);
        batch_heads[r] = batch * heads + head;
    }
    let head_params_0 = ScoreOf::<A>::head(score, batch_heads[0] - batch * heads);
    let head_params_1 = ScoreOf::<A>::head(score, batch_heads[1] - batch * heads);
    let mut bias_state = BiasesOf::<A>::decode(biases, &problem, &batch_heads);
    let batch_kv_head = batch * kv_heads + kv_head;
    let mut operand_state =
        OperandsOf::<A>::decode(operands, &problem, batch_kv_head, last_column, config);
    let mut scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let factor = scale;
    if biased {
        scale = 1f32;
    }
    let own = warp * KEYS_PER_WARP;
    for block in 0..blocks {
        let first_column = last_column - block * tile;
        let at = (block & 1) * comptime!(tile * chunks);
        // Read before the tile is waited for.
        BiasesOf::<A>::read_biases(
            &mut bias_state,
            biases,
            &problem,
            first_column,
            first_column + own,
        );
        wait_parity(&ready, (block & 1) as u32);
        // All warps have finished with the other tile.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let (next, to) = (first_column - tile, comptime!(tile * chunks) - at);
            ready.arrive_and_expect_tx(1, pair);
            load_rows(&ready, &qkv.k, batch, kv_head, next, &mut k_tile, to, tile, dim);
            load_rows(&ready, &qkv.v, batch, value_head, next, &mut v_tile, to, tile, dim);
        }
        OperandsOf::<A>::rescale_q(
            &mut operand_state,
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
                        let bias = BiasesOf::<A>::bias(&bias_state, r, n, e);
                        value = fma(value, factor, bias);
                    }
                    if comptime!(config.changes_scores) {
                        let (row, key) = (position as u32, column as u32);
                        if comptime!(r == 0) {
                            value = ScoreOf::<A>::score(
                                score,
                                &problem,
                                &head_params_0,
                                value,
                                row,
                                key,
                            );
                        } else {
                            value = ScoreOf::<A>::score(
                                score,
                                &problem,
                                &head_params_1,
                                value,
                                row,
                                key,
                            );
                        }
                    }
                    let hide = (column < first) | (column >= to);
                    scores[e] = select(hide, MASKED, value);
                }
                s.index_mut(n)[r] = scores;
            }
        }
        WeightOf::<A>::add_tile(&mut row_state, &mut s, &mut o_acc, scale, 2usize, n_dim);
        add_pb_of_rows(&def, &s, &v_tile, at, own, tile, &mut o_acc, n_dim);
    }

    let batches = CUBE_COUNT_Y as usize / (kv_heads * blocks_of_group);
    let part = (CUBE_POS_X as usize * comptime!(config.warps) + warp) * batches + batch;
    #[unroll]
    for r in 0..2usize {
        let (factor, statistic) = WeightOf::<A>::finish_split(&row_state, scale, r);
        let head = first_head + r * 8 + lane / 4;
        if head < (kv_head + 1) * group {
            let at = part * heads + head;
            if lane % 4 == 0 {
                partials.statistics[at] = statistic;
            }
            #[unroll]
            for n in 0..comptime!(config.head_dim / 8) {
                let value = o_acc.index(n)[r];
                let to = at * config.head_dim + n * 8 + (lane % 4) * 2;
                partials.o[to] = value[0] * factor;
                partials.o[to + 1] = value[1] * factor;
            }
        }
    }
}

/// o and the rows' statistics, `[batch, heads]`, from the partial results.
///
/// Grid: batch · heads; a unit for each channel.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn combine<A: Hooks>(
    partials: &SplitOutputs,
    biases: &BiasArgs<A>,
    weight: &WeightArgs<A>,
    o: &mut Array<bf16>,
    statistic: &mut Array<f32>,
    problem: ProblemShape,
    count: u32,
    o_strides: RowStrides,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let head_dim = config.head_dim;
    let batch_head = CUBE_POS_X as usize;
    let batch_heads = CUBE_COUNT_X as usize;
    let (batch, head) = (batch_head / problem.heads as usize, batch_head % problem.heads as usize);
    let mut max_statistic = f32::cast_from(MASKED);
    for part in 0..count as usize {
        max_statistic = max(max_statistic, partials.statistics[part * batch_heads + batch_head]);
    }
    let position = problem.keys as usize - 1;
    let shift = BiasesOf::<A>::shift(biases, &problem, batch_head, position, position);
    let base = o_strides.base(batch, head) * CHUNK;
    let mut channel = UNIT_POS as usize;
    while channel < head_dim {
        let mut total = 0f32;
        let mut value = 0f32;
        for part in 0..count as usize {
            let factor = WeightOf::<A>::split_factor(
                partials.statistics[part * batch_heads + batch_head],
                max_statistic,
            );
            total += factor;
            value += factor * partials.o[(part * batch_heads + batch_head) * head_dim + channel];
        }
        let (factor, all) = WeightOf::<A>::combine(weight, head, max_statistic, total, shift);
        o[base + channel] = bf16::cast_from(value * factor);
        if channel == 0 {
            statistic[batch_head] = all;
        }
        channel += CUBE_DIM as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_split_so_that_blocks_fill_the_device() {
        // Rows, slots, most splits: expected splits.
        for (rows, slots, most, want) in [
            (128, 396, 128, 3), // 384 blocks in one wave.
            (128, 396, 2, 2),   // A short cache.
            (16, 396, 512, 24),
            (200, 396, 100, 5), // 1,000 blocks in three waves.
            (512, 396, 100, 3), // 1,536 in four.
        ] {
            assert_eq!(splits(rows, slots, most), want, "{rows} rows, {slots} slots, {most}");
        }
    }
}
