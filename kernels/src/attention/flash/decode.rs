//! Decoding: one query per head against a long cache. The keys are split among blocks, a block's tiles
//! among its warps, and all query heads of a kv head share the loaded tiles (Dao et al.,
//! "Flash-Decoding", 2023). Where a block has all keys of its heads, it combines its warps' partial results and
//! writes the output; else a second kernel does.

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
use super::ragged::RaggedKv;
use super::{FORWARD_SHAPES, FlashAttention, Heads};
use crate::cuda::{CudaTensor, buffer, empty, multiprocessors};
use crate::tile::{
    ALIGN, CHUNK, Chunk, MASKED, RowStrides, add_abt_of_rows, add_pb_of_rows, bytes, define_exp2,
    load_a_frags, load_rows, release_tile, wait_parity, zeros,
};

/// Up to this many keys are not split: the output comes from one kernel.
const KEYS_OF_ONE_SPLIT: usize = 512;

/// Fewest keys per split of more keys.
const KEYS_PER_SPLIT: usize = 256;

/// The most splits of the keys.
fn most_splits(keys: usize) -> usize {
    if keys <= KEYS_OF_ONE_SPLIT { 1 } else { keys.div_ceil(KEYS_PER_SPLIT) }
}

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

/// o `[batch, heads, 1, value_dim]` and each row's statistic, `[batch, heads, 1]` (for softmax its log-sum-exp,
/// base 2), of one query per head.
///
/// - `first_keys`: the first key of each query after pruning, 32-bit integers `[batch, heads]`
///
/// # Panics
/// For ragged heads, which have first keys of their own, with others.
pub fn decode<A: Hooks>(
    flash: &FlashAttention<A>,
    first_keys: Option<&CudaTensor>,
) -> [CudaTensor; 2] {
    let [batch, heads, ..] = flash.q.dims;
    let value_dim = flash.v.dims[3];
    let [_, kv_heads, keys, _] = flash.k.dims;
    let client = &flash.q.tensor.client;
    let rows = batch * kv_heads * (heads / kv_heads).div_ceil(HEADS_PER_BLOCK);
    let processors = multiprocessors(client);
    let config =
        KernelConfig { warps: WARPS, tile: WARPS * KEYS_PER_WARP, ..flash.config(FORWARD_SHAPES) };
    let tile = config.tile;
    let keys_per_load = keys_per_load::<A>(tile);
    // A tile of q, and two of k and of v, in bf16.
    let of_q_and_k = (HEADS_PER_BLOCK + 2 * tile) * config.padded_head_dim * 2;
    let tiles = of_q_and_k + 2 * tile * config.padded_value_dim * 2;
    let resident = (SHARED_MEMORY / (tiles + ALIGN)).clamp(1, 4);
    let slots = processors * resident;
    let splits = splits(rows, slots, most_splits(keys));
    // With pruning, most splits may have nothing to do: use more of them.
    let splits = first_keys.map_or(splits, |_| splits.max(keys.div_ceil(KEYS_PER_PRUNED_SPLIT)));
    let keys_per_split = keys.div_ceil(splits).next_multiple_of(tile);
    let splits = keys.div_ceil(keys_per_split);
    let (o, statistic) = (flash.output(), flash.statistic());
    let outputs =
        || RowOutputsLaunch::new(buffer(&o.tensor, 1), buffer(&statistic, 1), o.row_strides());
    let count = splits * WARPS;
    let partials = (splits > 1).then(|| {
        [&[count, batch, heads, value_dim][..], &[count, batch, heads]]
            .map(|shape| empty(&flash.q.tensor, shape, DType::F32))
    });
    let parts = |[o, statistics]: [&CudaTensor; 2]| {
        SplitOutputsLaunch::new(buffer(o, 1), buffer(statistics, 1))
    };
    // A single split does not access the partial results.
    let split_outputs =
        partials.as_ref().map_or([&statistic, &statistic], |partials| partials.each_ref());
    let ragged = flash.ragged.as_ref();
    assert!(ragged.is_none() || first_keys.is_none(), "pruning of ragged heads");
    let first_keys = first_keys.or(ragged.map(RaggedKv::first_keys));
    // The rows of ragged heads are those of one head.
    let map = |x: &Heads| match ragged {
        None => x.tensor_map(keys_per_load),
        Some(_) => Heads::new(&x.tensor).tensor_map(keys_per_load),
    };
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
            QkvLaunch::new(q.tensor_map(HEADS_PER_BLOCK), map(&flash.k), map(&flash.v)),
            flash.decode_mask(),
            flash.hooks.operands(),
            flash.hooks.biases(),
            flash.hooks.score(),
            flash.hooks.weight(),
            parts(split_outputs),
            outputs(),
            first_keys.map(|x| buffer(x, 1)).into(),
            ragged.map(|x| buffer(x.bases(), 1)).into(),
            flash.problem(),
            keys_per_split as u32,
            config,
            first_keys.is_some(),
            ragged.is_some(),
            splits == 1,
        );
    }
    if let Some(partials) = &partials {
        // SAFETY: as in `FlashAttention::forward`.
        unsafe {
            combine::launch_unchecked::<A, CudaRuntime>(
                client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(value_dim.next_multiple_of(32) as u32),
                parts(partials.each_ref()),
                flash.hooks.biases(),
                flash.hooks.weight(),
                outputs(),
                flash.problem(),
                count as u32,
                config,
            );
        }
    }
    [o.tensor, statistic]
}

/// Query heads per block: the rows of one fragment.
pub const HEADS_PER_BLOCK: usize = 16;

/// Warps per block.
pub const WARPS: usize = 4;

/// Keys of a tile per warp.
pub const KEYS_PER_WARP: usize = 16;

/// Keys of a tile that are loaded at once: those of a warp, if it has keys of its own.
const fn keys_per_load<A: Hooks>(tile: usize) -> usize {
    if <A::Weight as Weight>::IN_ORDER { KEYS_PER_WARP } else { tile }
}

/// Where the keys and values of a block are.
#[derive(CubeType, Clone, Copy)]
struct Source {
    batch: usize,
    k_head: usize,
    v_head: usize,
    /// The row of key 0 in the head.
    k_row: usize,
    /// The row of its value.
    v_row: usize,
}

/// Starts to load a tile of keys and one of values into the tiles at the chunks `to`: all rows from `column` on, or
/// those of each warp, which are `of_warp` keys apart.
#[cube]
fn load_keys<A: Hooks>(
    ready: &Barrier,
    qkv: &Qkv,
    of_kv: &Source,
    column: usize,
    of_warp: usize,
    k_tile: &mut SharedMemory<Chunk>,
    v_tile: &mut SharedMemory<Chunk>,
    to: (usize, usize),
    #[comptime] config: KernelConfig,
) {
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, tile, .. } =
        comptime!(config);
    let rows = comptime!(keys_per_load::<A>(tile));
    #[unroll]
    for part in 0..comptime!(tile / rows) {
        let first = column + part * of_warp;
        let (k_row, v_row) = (of_kv.k_row + first, of_kv.v_row + first);
        let to_k = to.0 + comptime!(part * rows * dim / CHUNK);
        let to_v = to.1 + comptime!(part * rows * value_dim / CHUNK);
        load_rows(ready, &qkv.k, of_kv.batch, of_kv.k_head, k_row, k_tile, to_k, rows, dim);
        load_rows(ready, &qkv.v, of_kv.batch, of_kv.v_head, v_row, v_tile, to_v, rows, value_dim);
    }
}

/// The partial results of splits: one for each warp of each split, in the order of their keys.
#[derive(CubeType, CubeLaunch)]
pub struct SplitOutputs {
    /// o over the warp's keys, normalised on its own, `[splits · warps, batch, heads, value_dim]`.
    pub o: Array<f32>,
    /// The row's statistic over these keys, `[splits · warps, batch, heads]`; [`MASKED`] without a visible key.
    pub statistics: Array<f32>,
}

/// The results of all keys.
#[derive(CubeType, CubeLaunch)]
pub struct RowOutputs {
    /// `[batch, heads, 1, value_dim]`
    pub o: Array<bf16>,
    /// The rows' statistics, `[batch, heads]`.
    pub statistic: Array<f32>,
    /// The strides of o.
    pub strides: RowStrides,
}

/// Writes the [`SplitOutputs`], or, if it is the `only` split, the [`RowOutputs`].
///
/// Grid: splits, batch · kv_heads · blocks of [`HEADS_PER_BLOCK`] query heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn split<A: Hooks>(
    qkv: &Qkv,
    mask: &Mask,
    operands: &OperandArgs<A>,
    biases: &BiasArgs<A>,
    score: &ScoreArgs<A>,
    weight: &WeightArgs<A>,
    partials: &mut SplitOutputs,
    outputs: &mut RowOutputs,
    first_keys: &ComptimeOption<Array<i32>>,
    bases: &ComptimeOption<Array<i32>>,
    problem: ProblemShape,
    keys_per_split: u32,
    #[comptime] config: KernelConfig,
    #[comptime] pruned: bool,
    #[comptime] ragged: bool,
    #[comptime] only: bool,
) {
    define_exp2();
    let KernelConfig { padded_head_dim: dim, padded_value_dim: value_dim, tile, .. } =
        comptime!(config);
    let (chunks, value_chunks) = comptime!((dim / CHUNK, value_dim / CHUNK));
    let (steps, n_dim) = comptime!((dim / 16, value_dim / 8));
    let biased = comptime!(BiasesOf::<A>::ENABLED);
    let in_order = comptime!(WeightOf::<A>::IN_ORDER);

    let lane = UNIT_POS_PLANE as usize;
    let warp = UNIT_POS as usize / 32;
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let blocks_of_group = (group + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK;
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / (kv_heads * blocks_of_group);
    let rest = CUBE_POS_Y as usize % (kv_heads * blocks_of_group);
    let kv_head = rest / blocks_of_group;
    let first_head = kv_head * group + rest % blocks_of_group * HEADS_PER_BLOCK;
    let mut of_kv = Source {
        batch,
        k_head: kv_head,
        v_head: problem.value_head(kv_head, config),
        k_row: usize::cast_from(0u32),
        v_row: usize::cast_from(0u32),
    };
    if ragged {
        let bases = bases.as_ref().unwrap();
        let at = (batch * kv_heads + kv_head) * 2;
        of_kv.batch = usize::cast_from(0u32);
        of_kv.k_head = usize::cast_from(0u32);
        of_kv.v_head = usize::cast_from(0u32);
        of_kv.k_row = usize::cast_from(bases[at]);
        of_kv.v_row = usize::cast_from(bases[at + 1]);
    }
    let keys = problem.keys as usize;
    let position = keys - 1;

    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let ready = Barrier::shared(1, UNIT_POS == 0);
    sync_async_proxy_shared();
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(HEADS_PER_BLOCK * chunks), ALIGN);
    let mut k_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * chunks), ALIGN);
    let mut v_tile = SharedMemory::<Chunk>::new_aligned(comptime!(2 * tile * value_chunks), ALIGN);
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
    // The distances between a warp's keys in successive tiles, and between the keys of successive warps.
    let step = comptime!(keys_per_load::<A>(tile));
    let mut of_warp = usize::cast_from(KEYS_PER_WARP as u32);
    if in_order {
        // A warp goes through keys of its own, as only those of whole splits are combined.
        of_warp = blocks * KEYS_PER_WARP;
    }
    // From the last tile to the first, as `Operands::decode` requires.
    let mut last_column = from * tile;
    if blocks > 0 {
        last_column += (blocks - 1) * step;
    }
    let pair = comptime!(bytes(tile, dim) + bytes(tile, value_dim));
    if UNIT_POS == 0 {
        let mut expected = comptime!(bytes(HEADS_PER_BLOCK, dim)).runtime();
        if blocks > 0 {
            expected += pair;
        }
        ready.arrive_and_expect_tx(1, expected);
        load_rows(&ready, &qkv.q, batch, 0, first_head, &mut q_tile, 0, HEADS_PER_BLOCK, dim);
        if blocks > 0 {
            let to = (usize::cast_from(0u32), usize::cast_from(0u32));
            load_keys::<A>(
                &ready,
                qkv,
                &of_kv,
                last_column,
                of_warp,
                &mut k_tile,
                &mut v_tile,
                to,
                config,
            );
        }
    }
    wait_parity(&ready, 0u32);
    let mut q_frags = load_a_frags(&def, &q_tile, 0, steps, HEADS_PER_BLOCK);

    let mut o_acc = zeros(n_dim);
    // Rows without a head repeat the group's last head, to read nothing out of bounds.
    let mut batch_heads = Array::<usize>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        let head = min(first_head + r * 8 + lane / 4, (kv_head + 1) * group - 1);
        batch_heads[r] = batch * heads + head;
    }
    let mut scale = ScoreOf::<A>::scale(score, &problem) * WeightOf::<A>::SCORE_FACTOR;
    let factor = scale;
    if biased {
        scale = 1f32;
    }
    let mut row_state = WeightOf::<A>::init_rows(weight, &batch_heads, scale);
    let head_params_0 = ScoreOf::<A>::head(score, batch_heads[0] - batch * heads);
    let head_params_1 = ScoreOf::<A>::head(score, batch_heads[1] - batch * heads);
    let mut bias_state = BiasesOf::<A>::decode(biases, &problem, &batch_heads);
    let batch_kv_head = batch * kv_heads + kv_head;
    let mut operand_state = OperandsOf::<A>::decode(
        operands,
        &problem,
        batch_kv_head,
        &batch_heads,
        last_column,
        config,
    );
    let own = warp * KEYS_PER_WARP;
    for block in 0..blocks {
        let first_column = last_column - block * step;
        let own_column = first_column + warp * of_warp;
        let at = (block & 1) * comptime!(tile * chunks);
        let value_at = (block & 1) * comptime!(tile * value_chunks);
        // Read before the tile is waited for.
        BiasesOf::<A>::read_biases(&mut bias_state, biases, &problem, first_column, own_column);
        wait_parity(&ready, (block & 1) as u32);
        // All warps have finished with the other tile.
        release_tile();
        if (UNIT_POS == 0) & (block + 1 < blocks) {
            let next = first_column - step;
            let to = (comptime!(tile * chunks) - at, comptime!(tile * value_chunks) - value_at);
            ready.arrive_and_expect_tx(1, pair);
            load_keys::<A>(
                &ready,
                qkv,
                &of_kv,
                next,
                of_warp,
                &mut k_tile,
                &mut v_tile,
                to,
                config,
            );
        }
        OperandsOf::<A>::rescale_q(
            &mut operand_state,
            operands,
            &mut q_frags,
            warp,
            first_column - step,
            block + 1 < blocks,
            config,
        );
        let mut s = zeros(2usize);
        // Where the warp's keys are: rows of the tile, or a tile of their own.
        let row = own * comptime!(if in_order { 0 } else { 1 });
        let warp_at = at + own * comptime!(if in_order { chunks } else { 0 });
        add_abt_of_rows(&def, &q_frags, &k_tile, warp_at, row, step, &mut s, steps);
        #[unroll]
        for n in 0..2usize {
            #[unroll]
            for r in 0..2usize {
                let mut scores = s.index(n)[r];
                #[unroll]
                for e in 0..2usize {
                    let column = own_column + comptime!(n * 8 + e) + (lane % 4) * 2;
                    let mut value = scores[e];
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
                    if biased {
                        let bias = BiasesOf::<A>::bias(&bias_state, r, n, e);
                        value = fma(value, factor, bias);
                    }
                    let hide = (column < first) | (column >= to);
                    let mut shown = select(hide, MASKED, value);
                    if comptime!(!WeightOf::<A>::SEES_ITSELF) {
                        // As in `make_scores`.
                        shown = select(column == position, fma(value, 0f32, MASKED), shown);
                    }
                    scores[e] = shown;
                }
                s.index_mut(n)[r] = scores;
            }
        }
        WeightOf::<A>::add_tile(&mut row_state, &mut s, &mut o_acc, scale, 2usize, n_dim);
        let value_warp_at = value_at + own * comptime!(if in_order { value_chunks } else { 0 });
        add_pb_of_rows(&def, &s, &v_tile, value_warp_at, row, step, &mut o_acc, n_dim);
    }

    if comptime!(only) {
        let channels = config.value_dim;
        // The warps' partial results: [warps, heads, value_dim] and [warps, heads].
        let mut warps_o =
            SharedMemory::<f32>::new(comptime!(WARPS * HEADS_PER_BLOCK * config.value_dim));
        let mut warps_statistics = SharedMemory::<f32>::new(comptime!(WARPS * HEADS_PER_BLOCK));
        #[unroll]
        for r in 0..2usize {
            let (factor, statistic) = WeightOf::<A>::finish_split(&row_state, scale, r);
            let at = warp * HEADS_PER_BLOCK + r * 8 + lane / 4;
            if lane % 4 == 0 {
                warps_statistics[at] = statistic;
            }
            #[unroll]
            for n in 0..comptime!(config.value_dim / 8) {
                let value = o_acc.index(n)[r];
                let to = at * channels + n * 8 + (lane % 4) * 2;
                warps_o[to] = value[0] * factor;
                warps_o[to + 1] = value[1] * factor;
            }
        }
        sync_cube();
        // As `combine`.
        let rows = min((kv_head + 1) * group, first_head + HEADS_PER_BLOCK) - first_head;
        let mut own = UNIT_POS as usize;
        while own < rows * channels {
            let (row, channel) = (own / channels, own % channels);
            let head = first_head + row;
            let batch_head = batch * heads + head;
            let mut max_statistic = f32::cast_from(MASKED);
            let mut total = 0f32;
            let mut value = 0f32;
            if in_order {
                max_statistic = 1f32;
                #[unroll]
                for back in 0..WARPS {
                    let at = comptime!((WARPS - 1 - back) * HEADS_PER_BLOCK) + row;
                    value += max_statistic * warps_o[at * channels + channel];
                    max_statistic *= warps_statistics[at];
                }
            } else {
                #[unroll]
                for part in 0..WARPS {
                    let statistic = warps_statistics[part * HEADS_PER_BLOCK + row];
                    max_statistic = max(max_statistic, statistic);
                }
                #[unroll]
                for part in 0..WARPS {
                    let at = part * HEADS_PER_BLOCK + row;
                    let factor = WeightOf::<A>::split_factor(warps_statistics[at], max_statistic);
                    total += factor;
                    value += factor * warps_o[at * channels + channel];
                }
            }
            let shift = BiasesOf::<A>::shift(biases, &problem, batch_head, position, position);
            let (factor, statistic) =
                WeightOf::<A>::combine(weight, head, max_statistic, total, shift);
            outputs.o[outputs.strides.base(batch, head) * CHUNK + channel] =
                bf16::cast_from(value * factor);
            if channel == 0 {
                outputs.statistic[batch_head] = statistic;
            }
            own += comptime!(config.warps * 32);
        }
    } else {
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
                for n in 0..comptime!(config.value_dim / 8) {
                    let value = o_acc.index(n)[r];
                    let to = at * config.value_dim + n * 8 + (lane % 4) * 2;
                    partials.o[to] = value[0] * factor;
                    partials.o[to + 1] = value[1] * factor;
                }
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
    outputs: &mut RowOutputs,
    problem: ProblemShape,
    count: u32,
    #[comptime] config: KernelConfig,
) {
    define_exp2();
    let channels = config.value_dim;
    let batch_head = CUBE_POS_X as usize;
    let batch_heads = CUBE_COUNT_X as usize;
    let (batch, head) = (batch_head / problem.heads as usize, batch_head % problem.heads as usize);
    let in_order = comptime!(WeightOf::<A>::IN_ORDER);
    let mut max_statistic = f32::cast_from(MASKED);
    if !in_order {
        for part in 0..count as usize {
            let statistic = partials.statistics[part * batch_heads + batch_head];
            max_statistic = max(max_statistic, statistic);
        }
    }
    let position = problem.keys as usize - 1;
    let shift = BiasesOf::<A>::shift(biases, &problem, batch_head, position, position);
    let base = outputs.strides.base(batch, head) * CHUNK;
    let mut channel = UNIT_POS as usize;
    while channel < channels {
        let mut total = 0f32;
        let mut value = 0f32;
        if in_order {
            max_statistic = 1f32;
            for back in 0..count as usize {
                let at = (count as usize - 1 - back) * batch_heads + batch_head;
                value += max_statistic * partials.o[at * channels + channel];
                max_statistic *= partials.statistics[at];
            }
        } else {
            for part in 0..count as usize {
                let at = part * batch_heads + batch_head;
                let factor = WeightOf::<A>::split_factor(partials.statistics[at], max_statistic);
                total += factor;
                value += factor * partials.o[at * channels + channel];
            }
        }
        let (factor, all) = WeightOf::<A>::combine(weight, head, max_statistic, total, shift);
        outputs.o[base + channel] = bf16::cast_from(value * factor);
        if channel == 0 {
            outputs.statistic[batch_head] = all;
        }
        channel += CUBE_DIM as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_caches_are_not_split() {
        for (keys, want) in [(1, 1), (257, 1), (512, 1), (513, 3), (4096, 16)] {
            assert_eq!(most_splits(keys), want, "{keys} keys");
        }
    }

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
