//! Searches of rows whose results depend only on a row's highest scores, its candidates.
//!
//! One pass over the keys keeps each score above a lower bound that rises with what was seen, in lists in shared
//! memory. Further passes then read the lists. In lists that are full, the bound rises and what it excludes goes;
//! while keys are alike, new candidates become rare, as the maximum of a sequence does. A block with a row of too
//! many candidates for the lists leaves its rows to the [`search`](super::search) over all scores.
//!
//! A row's result depends, but for the choice between the two searches, on its own scores alone: when lists are
//! full depends on other rows, so the passes that decide begin with the keys that count, and no others.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::hooks::{Hooks, LaunchOf};
use super::mask::{Mask, QueryBlock};
use super::problem::{KernelConfig, ProblemShape};
use super::search::{Qk, QkLaunch, RowSearch, hide_masked, nothing, of_four_lanes};
use super::{FlashAttention, grid};
use crate::cuda::{buffer, empty};
use crate::tile::lists::TwoLists;
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, Pipeline, start_tile_abt, uninit, wait};
use crate::tile::{ALIGN, Accumulator, CHUNK, Chunk, MASKED, all_of_block, bytes, define_exp2};

/// Warpgroups per block and rows per tile, as [`FORWARD_SHAPES`](super::FORWARD_SHAPES). The blocks have the rows
/// of those of the search over all scores.
const SHAPES: [(usize, usize); 4] = [(2, 128), (2, 64), (2, 64), (1, 32)];

/// Bytes of shared memory for the tiles and lists of a block, of which two run at a time.
const MEMORY: usize = 112 << 10;

/// Most slots of a thread, which collects candidates of two rows.
const MOST_SLOTS: usize = 64;

/// Fragments of 8 keys whose scores are collected at a time.
const FRAGMENTS: usize = 4;

/// Most scores of a thread that are collected at a time.
const MOST_NEW: usize = FRAGMENTS * 4;

/// Scores of a list that are read at a time; divides the slots.
const AT_ONCE: usize = 4;

/// A warp makes room in its lists so many times, and once more for every [`TILES_PER_RAISE`] tiles.
const RAISES: usize = 16;
const TILES_PER_RAISE: usize = 4;

/// Above every score.
const NEVER: f32 = 3e38;

/// A search that depends only on scores above a bound. Its bound, among the values, only rises.
#[cube]
pub trait CandidateSearch: RowSearch {
    /// Raises the bound by what [`RowSearch::add_first`] and [`RowSearch::add`] have collected over all of the
    /// row's scores so far that are above it, or by a maximum alone.
    fn raise(values: &mut Array<f32>, collected: &Array<f32>);

    /// The bound. After the last pass, the scores above it determine what the row finds.
    fn bound(values: &Array<f32>) -> f32;

    /// Forgets the bound, for passes that begin again. They must not depend on how the first ones began.
    fn restart(values: &mut Array<f32>);
}

/// Slots per thread.
fn slots(config: KernelConfig) -> usize {
    let KernelConfig { padded_head_dim: dim, tile, .. } = config;
    let tiles = (2 * tile + config.rows()) * dim * size_of::<u16>();
    let slots = (MEMORY - tiles) / (config.threads() * size_of::<f32>());
    slots.min(MOST_SLOTS) / AT_ONCE * AT_ONCE
}

impl<A: Hooks> FlashAttention<A> {
    /// [`FlashAttention::search`], faster where rows have few candidates.
    pub fn search_candidates<S: CandidateSearch>(
        &self,
        results: impl Fn() -> LaunchOf<S::Results>,
    ) {
        let [batch, heads, queries, _] = self.q.dims;
        if queries == 1 {
            return self.search::<S>(results());
        }
        let config = self.config(SHAPES);
        let blocks = queries.div_ceil(config.rows());
        let left = empty(&self.q.tensor, &[batch * heads * blocks], DType::U32);
        // SAFETY: as in `FlashAttention::forward`; the second search reads what the first one leaves.
        unsafe {
            search_candidates::launch_unchecked::<S, CudaRuntime>(
                &self.q.tensor.client,
                grid(queries, config.rows(), batch * heads),
                CubeDim::new_1d(config.threads() as u32),
                QkLaunch::new(self.q.tensor_map(config.rows()), self.k.tensor_map(config.tile)),
                self.mask(),
                results(),
                buffer(&left, 1),
                self.problem(),
                slots(config),
                config,
            );
        }
        self.search_blocks::<S>(results(), Some((&left, config.rows())));
    }
}

/// See [`FlashAttention::search_candidates`]. Writes 1 to `left`, `[batch, heads, blocks]` in the grid's order,
/// for a block whose rows it leaves to the search over all scores, else 0.
///
/// Grid: blocks of queries, batch · heads.
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn search_candidates<S: CandidateSearch>(
    qk: &Qk,
    mask: &Mask,
    results: &mut S::Results,
    left: &mut Array<u32>,
    problem: ProblemShape,
    #[comptime] slots: usize,
    #[comptime] config: KernelConfig,
) {
    blocks_per_multiprocessor(
        comptime!("search_candidates".to_string()),
        comptime!(config.threads()),
        2usize,
    );
    define_exp2();
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
    let mut lists = TwoLists::new(slots, comptime!(config.threads()));
    sync_cube();

    let last = from + tiles - 1;
    if UNIT_POS == 0 {
        for i in 0..2usize {
            if i < tiles {
                let others = select(i == 0, comptime!(bytes(rows, dim)), 0u32);
                let column = (last - i) * tile;
                pipeline.load_first(i, &qk.k, batch, kv_head, column, others);
                if i == 0 {
                    let (head, first) = (block.head, block.first_query);
                    pipeline.load_also(i, &qk.q, batch, head, first, &mut q_tile, rows, dim);
                }
            }
        }
    }

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
    let inverse = 1f32 / scale;
    let mut values = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..2usize {
        values.push(S::init());
    }
    // Of products, as the accumulator holds them.
    let mut bounds = Array::<f32>::new(2usize);
    bounds[0] = f32::cast_from(NEVER);
    bounds[1] = f32::cast_from(NEVER);
    let mut s = uninit(n_keys);

    let mut raises = tiles / TILES_PER_RAISE + RAISES;
    let mut overflowed = false;
    for i in 0..tiles {
        pipeline.wait(i);
        let seen = (i >= seen_from) & (i < seen_to);
        if seen {
            let at = pipeline.first_tile(i);
            let steps = comptime!(dim / 16);
            let tiles = &pipeline.first_tiles;
            start_tile_abt(&q_tile, group_row, rows, tiles, at, &mut s, true, n_keys, steps);
            wait(&mut s, 0usize);
        }
        if pipeline.release(i) & (i + 2 < tiles) {
            let column = (last - i - 2) * tile;
            pipeline.load_first(i + 2, &qk.k, batch, kv_head, column, 0u32);
        }
        if seen {
            let first_column = (last - i) * tile;
            if group.at_edge(first_column, tile, true) {
                let column = (first_column + (lane % 4) * 2) as u32;
                hide_masked(&mut s, lane_row, column, &first, n_keys);
            }
            if i == seen_from {
                #[unroll]
                for r in 0..2usize {
                    raise_by_tile::<S>(values.index_mut(r), &s, scale, r, n_keys);
                    // Rows past the last query have no candidates.
                    if own + r * 8 + lane / 4 < queries {
                        bounds[r] = S::bound(values.index(r)) * inverse;
                    }
                }
            }
            #[unroll]
            for part in 0..comptime!(n_keys / FRAGMENTS) {
                if plane_any(!lists.have_room(MOST_NEW)) {
                    if !overflowed {
                        #[unroll]
                        for r in 0..2usize {
                            raise_by_list::<S>(
                                values.index_mut(r),
                                &mut lists,
                                &mut bounds,
                                (scale, inverse),
                                r,
                            );
                        }
                    }
                    if plane_any(!lists.have_room(MOST_NEW)) | (raises == 0) {
                        overflowed = true;
                        #[unroll]
                        for r in 0..2usize {
                            lists.clear(r);
                            bounds[r] = f32::cast_from(NEVER);
                        }
                    } else {
                        raises -= 1;
                    }
                }
                #[unroll]
                for n in 0..FRAGMENTS {
                    let fragment = s.index(comptime!(part * FRAGMENTS + n));
                    #[unroll]
                    for e in 0..2usize {
                        #[unroll]
                        for r in 0..2usize {
                            lists.push_above(fragment[r][e], bounds[r], r);
                        }
                    }
                }
            }
        }
        // After tiles 1, 2, 4 and so on: whether to end early.
        let mut ends = false;
        if i & (i + 1) == 0 {
            ends = !all_of_block(!overflowed);
        }
        if ends {
            // A block must not end before its loads.
            if i + 1 < tiles {
                pipeline.wait(i + 1);
            }
            if i + 2 < tiles {
                pipeline.wait(i + 2);
            }
            break;
        }
    }
    let found = all_of_block(!overflowed);
    if found {
        let mut keys = Array::<u32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + lane / 4;
            let position = (offset + min(query, queries - 1)) as u32;
            keys[r] = position + 1 - min(first[r], position);
        }
        search_lists::<S>(&mut values, &lists, results, &keys, scale);
        #[unroll]
        for r in 0..2usize {
            let bound = S::bound(values.index(r)) * inverse;
            keep_above(&mut lists, bound, r);
            S::restart(values.index_mut(r));
        }
        search_lists::<S>(&mut values, &lists, results, &keys, scale);
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + lane / 4;
            if (lane % 4 == 0) & (query < queries) {
                S::write(values.index(r), results, batch_head * queries + query);
            }
        }
    }
    if UNIT_POS == 0 {
        left[batch_head * CUBE_COUNT_X as usize + CUBE_POS_X as usize] = select(found, 0u32, 1u32);
    }
}

/// Raises the bound of a lane's row by the maximum of a tile.
#[cube]
fn raise_by_tile<S: CandidateSearch>(
    values: &mut Array<f32>,
    s: &Accumulator,
    scale: f32,
    #[comptime] r: usize,
    #[comptime] n_keys: usize,
) {
    let mut collected = nothing();
    #[unroll]
    for n in 0..n_keys {
        let pair = s.index(n)[r];
        S::add_first(&mut collected, pair[0] * scale);
        S::add_first(&mut collected, pair[1] * scale);
    }
    of_four_lanes(&mut collected);
    S::raise(values, &collected);
}

/// Raises the bound of a lane's row by its list, and removes from the list what is not above it. `scales` are the
/// factor on products and its inverse.
#[cube]
fn raise_by_list<S: CandidateSearch>(
    values: &mut Array<f32>,
    lists: &mut TwoLists,
    bounds: &mut Array<f32>,
    scales: (f32, f32),
    #[comptime] r: usize,
) {
    let mut collected = nothing();
    let count = lists.count(r);
    for group in 0..groups(lists, r) {
        #[unroll]
        for i in 0..AT_ONCE {
            let score = candidate(lists, group, i, count, r) * scales.0;
            S::add_first(&mut collected, score);
            S::add(&mut collected, values, score);
        }
    }
    of_four_lanes(&mut collected);
    S::raise(values, &collected);
    bounds[r] = max(bounds[r], S::bound(values) * scales.1);
    keep_above(lists, bounds[r], r);
}

/// The number of groups of [`AT_ONCE`] candidates in the longest of the warp's lists of one of its rows.
#[cube]
fn groups(lists: &TwoLists, #[comptime] r: usize) -> u32 {
    plane_max((lists.count(r) + comptime!(AT_ONCE as u32 - 1)) / comptime!(AT_ONCE as u32))
}

/// The `i`-th candidate of a group of a list of `count`; past its last, a masked score.
#[cube]
fn candidate(
    lists: &TwoLists,
    group: u32,
    #[comptime] i: usize,
    count: u32,
    #[comptime] r: usize,
) -> f32 {
    let index = group * comptime!(AT_ONCE as u32) + comptime!(i as u32);
    select(index < count, lists.at(index, r), f32::cast_from(MASKED))
}

/// Removes what is not above `bound` from a list. Others keep their order.
#[cube]
fn keep_above(lists: &mut TwoLists, bound: f32, #[comptime] r: usize) {
    let count = lists.count(r);
    let groups = groups(lists, r);
    lists.clear(r);
    for group in 0..groups {
        // Read before others take their slots: what is kept never gets ahead of what is read.
        let mut read = Array::<f32>::new(AT_ONCE);
        #[unroll]
        for i in 0..AT_ONCE {
            read[i] = candidate(lists, group, i, count, r);
        }
        #[unroll]
        for i in 0..AT_ONCE {
            lists.push_above(read[i], bound, r);
        }
    }
}

/// The passes of a search over the lists of a warp, until none of its rows wants another one.
#[cube]
fn search_lists<S: CandidateSearch>(
    values: &mut Sequence<Array<f32>>,
    lists: &TwoLists,
    results: &S::Results,
    keys: &Array<u32>,
    scale: f32,
) {
    let mut pass = u32::cast_from(0u32);
    let mut wanted = true;
    while wanted {
        let mut more = false;
        #[unroll]
        for r in 0..2usize {
            let mut collected = nothing();
            let count = lists.count(r);
            for group in 0..groups(lists, r) {
                #[unroll]
                for i in 0..AT_ONCE {
                    let score = candidate(lists, group, i, count, r) * scale;
                    if pass == 0 {
                        S::add_first(&mut collected, score);
                    } else {
                        S::add(&mut collected, values.index(r), score);
                    }
                }
            }
            of_four_lanes(&mut collected);
            more |= S::end_pass(values.index_mut(r), &collected, results, keys[r], pass);
        }
        pass += 1;
        wanted = plane_any(more);
    }
}
