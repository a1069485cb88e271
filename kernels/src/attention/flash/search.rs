//! Searches of rows: passes over a row's scores, without values, for numbers that its weights depend on, such
//! as a threshold. They serve kinds with the default operands, biases and scores.
//!
//! For many queries, the scores of each pass are computed anew on the tensor cores. A block repeats its passes
//! until none of its rows wants another one. For one query per head, the scores are written to memory once.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::backward::LANES_PER_ROW;
use super::hooks::{Hooks, LaunchOf};
use super::mask::{Mask, QueryBlock, masked};
use super::problem::{KernelConfig, ProblemShape};
use super::{FlashAttention, grid};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, Pipeline, start_tile_abt, uninit, wait};
use crate::tile::{
    ALIGN, Accumulator, CHUNK, Chunk, MASKED, RowStrides, bytes, define_exp2, sum_of_four,
};

/// The numbers of a row that a search keeps between passes, and those that a pass collects.
pub const VALUES: usize = 4;

/// Warpgroups per block and rows per tile, as [`FORWARD_SHAPES`](super::FORWARD_SHAPES).
const SEARCH_SHAPES: [(usize, usize); 4] = [(2, 128), (2, 128), (2, 128), (1, 64)];

/// A search. Its scores are scale · q·k · [`RowSearch::FACTOR`], and far below any other for masked keys.
///
/// A row has [`VALUES`] values, which the search defines. A pass collects as many numbers: a maximum, which
/// begins at [`MASKED`], and three sums. What a row finds must not depend on how often others repeat their
/// passes.
#[cube]
pub trait RowSearch: Send + Sync + 'static {
    /// The launch arguments: where results go, and settings.
    type Results: LaunchArg + CubeType;

    /// A constant factor on scores.
    const FACTOR: f32;
    /// Whether the first pass over tiles calls [`RowSearch::add_tile`], and collects nothing.
    const BY_TILES: bool;

    /// The values before the first pass.
    fn init() -> Array<f32>;

    /// Updates the values of a lane's row `r` by a tile of the first pass; `s` times `scale` are scores. If the
    /// four lanes of a row do not get the same values, [`RowSearch::end_pass`] makes them the same.
    fn add_tile(
        values: &mut Array<f32>,
        s: &Accumulator,
        scale: f32,
        #[comptime] r: usize,
        #[comptime] n_keys: usize,
    );

    /// Collects a score in the first pass.
    fn add_first(collected: &mut Array<f32>, score: f32);

    /// Collects a score in a later pass.
    fn add(collected: &mut Array<f32>, values: &Array<f32>, score: f32);

    /// Updates the values by what the pass of this number, from 0 on, has collected over the row's `keys`
    /// visible keys. Returns whether the row wants another pass.
    fn end_pass(
        values: &mut Array<f32>,
        collected: &Array<f32>,
        results: &Self::Results,
        keys: u32,
        pass: u32,
    ) -> bool;

    /// Writes the results of the row `at` of `[batch, heads, queries]`.
    fn write(values: &Array<f32>, results: &mut Self::Results, at: usize);
}

impl<A: Hooks> FlashAttention<A> {
    /// Searches the rows of all queries.
    pub fn search<S: RowSearch>(&self, results: LaunchOf<S::Results>) {
        if self.q.dims[2] == 1 {
            self.search_one::<S>(results);
        } else {
            self.search_blocks::<S>(results, None);
        }
    }

    /// As [`FlashAttention::search`], of several queries per head: of all, or of the blocks of as many queries as
    /// given that `left` marks, `[batch, heads, blocks]` in the grid's order.
    ///
    /// # Panics
    /// If the blocks of the search have another number of queries.
    pub(super) fn search_blocks<S: RowSearch>(
        &self,
        results: LaunchOf<S::Results>,
        left: Option<(&CudaTensor, usize)>,
    ) {
        let [batch, heads, queries, _] = self.q.dims;
        let config = self.config(SEARCH_SHAPES);
        assert!(left.is_none_or(|(_, rows)| rows == config.rows()), "queries per block");
        // SAFETY: as in `FlashAttention::forward`.
        unsafe {
            search::launch_unchecked::<S, CudaRuntime>(
                &self.q.tensor.client,
                grid(queries, config.rows(), batch * heads),
                CubeDim::new_1d(config.threads() as u32),
                QkLaunch::new(self.q.tensor_map(config.rows()), self.k.tensor_map(config.tile)),
                self.mask(),
                results,
                left.map(|(left, _)| buffer(left, 1)).into(),
                self.problem(),
                left.is_some(),
                config,
            );
        }
    }

    /// As [`FlashAttention::search`], of one query per head.
    fn search_one<S: RowSearch>(&self, results: LaunchOf<S::Results>) {
        let [batch, heads, _, head_dim] = self.q.dims;
        let [_, kv_heads, keys, _] = self.k.dims;
        let client = &self.q.tensor.client;
        let scores = empty(&self.q.tensor, &[batch, heads, keys], DType::F32);
        // SAFETY: as in `FlashAttention::forward`; the second kernel reads the scores that the first one writes.
        unsafe {
            scores_of_one::launch_unchecked::<CudaRuntime>(
                client,
                grid(keys, KEYS_PER_BLOCK, batch * kv_heads),
                CubeDim::new_1d(THREADS as u32),
                buffer(&self.q.tensor, CHUNK),
                buffer(&self.k.tensor, CHUNK),
                buffer(&scores, 1),
                self.decode_mask(),
                self.problem(),
                self.q.row_strides(),
                self.k.row_strides(),
                self.scale * S::FACTOR,
                head_dim / CHUNK,
            );
            search_scores::launch_unchecked::<S, CudaRuntime>(
                client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(THREADS as u32),
                buffer(&scores, 1),
                self.decode_mask(),
                results,
                self.problem(),
            );
        }
    }
}

/// q and k, `[batch, heads or kv_heads, tokens, head_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct Qk {
    /// Queries.
    pub q: TensorMap<bf16, Tiled>,
    /// Keys.
    pub k: TensorMap<bf16, Tiled>,
}

/// What a pass has collected before its first score.
#[cube]
pub fn nothing() -> Array<f32> {
    let mut collected = Array::<f32>::new(VALUES);
    collected[0] = f32::cast_from(MASKED);
    #[unroll]
    for i in 1..VALUES {
        collected[i] = 0f32;
    }
    collected
}

/// What the four lanes of a row have collected.
#[cube]
pub fn of_four_lanes(collected: &mut Array<f32>) {
    let mut most = collected[0];
    most = max(most, plane_shuffle_xor(most, 1));
    most = max(most, plane_shuffle_xor(most, 2));
    collected[0] = most;
    #[unroll]
    for i in 1..VALUES {
        collected[i] = sum_of_four(collected[i]);
    }
}

/// See [`FlashAttention::search`]. Tiles of keys are read from the last to the first. With `only_left`, blocks that
/// `left` does not mark end at once.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn search<S: RowSearch>(
    qk: &Qk,
    mask: &Mask,
    results: &mut S::Results,
    left: &ComptimeOption<Array<u32>>,
    problem: ProblemShape,
    #[comptime] only_left: bool,
    #[comptime] config: KernelConfig,
) {
    blocks_per_multiprocessor(comptime!("search".to_string()), comptime!(config.threads()), 2usize);
    define_exp2();
    if only_left {
        let left = left.as_ref().unwrap();
        if left[CUBE_POS_Y as usize * CUBE_COUNT_X as usize + CUBE_POS_X as usize] == 0 {
            terminate!();
        }
    }
    let KernelConfig { padded_head_dim: dim, warps, tile, .. } = comptime!(config);
    let rows = comptime!(config.rows());
    let n_keys = comptime!(tile / 8);

    let lane = UNIT_POS_PLANE as usize;
    // The shuffle tells the compiler that the value is warp-uniform.
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = QueryBlock::new(&problem, mask, config);
    let (batch, kv_head, batch_head) = (block.batch, block.kv_head, block.batch_head);
    let (offset, from, tiles) = (block.offset, block.from, block.tiles);
    let queries = problem.queries as usize;

    let mut pipeline = Pipeline::new(tile, (dim, dim), warps);
    let mut q_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * dim / CHUNK), ALIGN);
    let mut unfinished = SharedMemory::<u32>::new(comptime!(warps));
    sync_cube();

    let last = from + tiles - 1;
    let group = block.group(&problem, mask, warp, config);
    let group_row = warp / GROUP_WARPS * GROUP_ROWS;
    let own = block.first_query + warp * 16;
    // The range of the block's tiles that the warpgroup takes part in.
    let mut seen_from = last - group.last_key / tile;
    let mut seen_to = last + 1 - group.from / tile;
    if group.empty {
        seen_from = tiles;
        seen_to = tiles;
    }
    let first = block.first_keys(&problem, mask, own);
    let lane_row = (offset + own + lane / 4) as u32;
    let scale = problem.scale * S::FACTOR;
    let mut values = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..2usize {
        values.push(S::init());
    }
    let mut s = uninit(n_keys);

    let mut done = usize::cast_from(0u32);
    let mut pass = u32::cast_from(0u32);
    let mut wanted = u32::cast_from(1u32);
    while wanted > 0 {
        if UNIT_POS == 0 {
            for i in 0..2usize {
                if i < tiles {
                    let with_q = (pass == 0) & (i == 0);
                    let others = select(with_q, comptime!(bytes(rows, dim)), 0u32);
                    let column = (last - i) * tile;
                    pipeline.load_first(done + i, &qk.k, batch, kv_head, column, others);
                    if with_q {
                        let (head, first) = (block.head, block.first_query);
                        pipeline.load_also(done, &qk.q, batch, head, first, &mut q_tile, rows, dim);
                    }
                }
            }
        }
        let mut collected = Sequence::<Array<f32>>::new();
        #[unroll]
        for _ in 0..2usize {
            collected.push(nothing());
        }
        for i in 0..tiles {
            pipeline.wait(done + i);
            let seen = (i >= seen_from) & (i < seen_to);
            if seen {
                let at = pipeline.first_tile(done + i);
                let steps = comptime!(dim / 16);
                start_tile_abt(
                    &q_tile,
                    group_row,
                    rows,
                    &pipeline.first_tiles,
                    at,
                    &mut s,
                    true,
                    n_keys,
                    steps,
                );
                wait(&mut s, 0usize);
            }
            if pipeline.release(done + i) & (i + 2 < tiles) {
                let column = (last - i - 2) * tile;
                pipeline.load_first(done + i + 2, &qk.k, batch, kv_head, column, 0u32);
            }
            if seen {
                let first_column = (last - i) * tile;
                if group.at_edge(first_column, tile, true) {
                    let column = (first_column + (lane % 4) * 2) as u32;
                    hide_masked(&mut s, lane_row, column, &first, n_keys);
                }
                if pass == 0 {
                    #[unroll]
                    for r in 0..2usize {
                        if comptime!(S::BY_TILES) {
                            S::add_tile(values.index_mut(r), &s, scale, r, n_keys);
                        } else {
                            #[unroll]
                            for n in 0..n_keys {
                                let pair = s.index(n)[r];
                                S::add_first(collected.index_mut(r), pair[0] * scale);
                                S::add_first(collected.index_mut(r), pair[1] * scale);
                            }
                        }
                    }
                } else {
                    #[unroll]
                    for r in 0..2usize {
                        #[unroll]
                        for n in 0..n_keys {
                            let pair = s.index(n)[r];
                            let row = values.index(r);
                            S::add(collected.index_mut(r), row, pair[0] * scale);
                            S::add(collected.index_mut(r), row, pair[1] * scale);
                        }
                    }
                }
            }
        }
        let mut more = false;
        #[unroll]
        for r in 0..2usize {
            of_four_lanes(collected.index_mut(r));
            let query = own + r * 8 + lane / 4;
            let position = (offset + min(query, queries - 1)) as u32;
            let keys = position + 1 - min(first[r], position);
            let wants = S::end_pass(values.index_mut(r), collected.index(r), results, keys, pass);
            more |= wants & (query < queries);
        }
        let more = plane_any(more);
        if lane == 0 {
            unfinished[warp] = select(more, 1u32, 0u32);
        }
        done += tiles;
        pass += 1;
        sync_cube();
        wanted = 0u32;
        #[unroll]
        for warp in 0..warps {
            wanted += unfinished[warp];
        }
        sync_cube();
    }
    #[unroll]
    for r in 0..2usize {
        let query = own + r * 8 + lane / 4;
        if (lane % 4 == 0) & (query < queries) {
            S::write(values.index(r), results, batch_head * queries + query);
        }
    }
}

/// Replaces the products of masked keys, where `row` and `column` are a lane's first row and column.
#[cube]
pub fn hide_masked(
    s: &mut Accumulator,
    row: u32,
    column: u32,
    first: &Array<u32>,
    #[comptime] n_keys: usize,
) {
    #[unroll]
    for r in 0..2usize {
        let row = row + comptime!((r * 8) as u32);
        #[unroll]
        for n in 0..n_keys {
            let fragment = s.index_mut(n);
            let mut pair = fragment[r];
            #[unroll]
            for e in 0..2usize {
                let hide = masked(row, column + comptime!((n * 8 + e) as u32), first[r]);
                pair[e] = select(hide, MASKED, pair[e]);
            }
            fragment[r] = pair;
        }
    }
}

/// Threads per block of the kernels for one query per head.
const THREADS: usize = 256;

/// Keys at a time of a block of [`scores_of_one`].
const KEYS_AT_ONCE: usize = THREADS / LANES_PER_ROW;

/// Keys of a block of [`scores_of_one`].
const KEYS_PER_BLOCK: usize = 4 * KEYS_AT_ONCE;

/// The scores of one query per head, `[batch, heads, keys]`: q·k · `factor`, and [`MASKED`] for masked keys.
///
/// Grid: blocks of keys, batch · kv_heads.
#[cube(launch_unchecked, address_type = "u64")]
pub fn scores_of_one(
    q: &Array<Chunk>,
    k: &Array<Chunk>,
    scores: &mut Array<f32>,
    mask: &Mask,
    problem: ProblemShape,
    q_strides: RowStrides,
    k_strides: RowStrides,
    factor: f32,
    #[comptime] chunks: usize,
) {
    let (heads, group) = (problem.heads as usize, problem.group as usize);
    let kv_heads = heads / group;
    let batch = CUBE_POS_Y as usize / kv_heads;
    let kv_head = CUBE_POS_Y as usize % kv_heads;
    let keys = problem.keys as usize;
    let first = mask.first_key(&problem, batch, keys - 1);
    let lane = UNIT_POS as usize % LANES_PER_ROW;
    #[unroll]
    for i in 0..comptime!(KEYS_PER_BLOCK / KEYS_AT_ONCE) {
        let key = CUBE_POS_X as usize * KEYS_PER_BLOCK
            + i * KEYS_AT_ONCE
            + UNIT_POS as usize / LANES_PER_ROW;
        // Lanes past the last key repeat it, because all lanes take part in the shuffles.
        let row = min(key, keys - 1);
        let k_at = k_strides.base(batch, kv_head) + row * k_strides.row as usize;
        for head in kv_head * group..(kv_head + 1) * group {
            let q_at = q_strides.base(batch, head);
            let mut sum = 0f32;
            #[unroll]
            for i in 0..comptime!(chunks.div_ceil(LANES_PER_ROW)) {
                let chunk = i * LANES_PER_ROW + lane;
                if comptime!(chunks.is_multiple_of(LANES_PER_ROW)) || chunk < chunks {
                    let q = Vector::<f32, Const<CHUNK>>::cast_from(q[q_at + chunk]);
                    let k = Vector::<f32, Const<CHUNK>>::cast_from(k[k_at + chunk]);
                    #[unroll]
                    for e in 0..CHUNK {
                        sum += q[e] * k[e];
                    }
                }
            }
            sum += plane_shuffle_xor(sum, 1);
            sum += plane_shuffle_xor(sum, 2);
            sum += plane_shuffle_xor(sum, 4);
            if (lane == 0) & (key < keys) {
                let score = select(key < first, MASKED, sum * factor);
                scores[(batch * heads + head) * keys + key] = score;
            }
        }
    }
}

/// Searches rows whose scores, `[batch, heads, keys]`, are in memory; sums have a fixed order.
///
/// Grid: batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn search_scores<S: RowSearch>(
    scores: &Array<f32>,
    mask: &Mask,
    results: &mut S::Results,
    problem: ProblemShape,
) {
    define_exp2();
    let row = CUBE_POS_X as usize;
    let keys = problem.keys as usize;
    let first = mask.first_key(&problem, row / problem.heads as usize, keys - 1);
    let warps = comptime!(THREADS / 32);
    let mut of_warps = SharedMemory::<f32>::new(comptime!(THREADS / 32 * VALUES));
    let mut values = S::init();
    let mut pass = u32::cast_from(0u32);
    let mut wanted = u32::cast_from(1u32);
    while wanted > 0 {
        let mut collected = nothing();
        let mut at = first + UNIT_POS as usize;
        while at < keys {
            let score = scores[row * keys + at];
            if pass == 0 {
                S::add_first(&mut collected, score);
            } else {
                S::add(&mut collected, &values, score);
            }
            at += THREADS;
        }
        let place = UNIT_POS as usize / 32 * VALUES;
        #[unroll]
        for i in 0..VALUES {
            let mut of_warp = plane_max(collected[i]);
            if comptime!(i > 0) {
                of_warp = plane_sum(collected[i]);
            }
            if UNIT_POS_PLANE == 0 {
                of_warps[place + i] = of_warp;
            }
        }
        sync_cube();
        let mut all = nothing();
        #[unroll]
        for warp in 0..warps {
            all[0] = max(all[0], of_warps[warp * VALUES]);
            #[unroll]
            for i in 1..VALUES {
                all[i] += of_warps[warp * VALUES + i];
            }
        }
        sync_cube();
        let wants = S::end_pass(&mut values, &all, results, (keys - first) as u32, pass);
        wanted = select(wants, 1u32, 0u32);
        pass += 1;
    }
    if UNIT_POS == 0 {
        S::write(&values, results, row);
    }
}
