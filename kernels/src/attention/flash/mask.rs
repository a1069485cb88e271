//! The mask: a query attends to the keys from its first visible key up to its own position. Masks are
//! computed from positions and never stored.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::problem::{Causality, KernelConfig, ProblemShape};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, RowsAt};

/// The limits on a query's keys beside causality, a compile-time argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// A window.
    pub window: bool,
    /// Document starts.
    pub documents: bool,
    /// Pruning.
    pub pruned: bool,
}

impl Limits {
    /// Whether a query's first key can be other than key 0.
    pub fn any(&self) -> bool {
        self.window || self.documents || self.pruned
    }
}

/// The mask of a call.
///
/// `limits` says which of the other fields are present. cubecl's kernel cache ignores an option without a
/// value, so the options alone would not distinguish two kernels.
#[derive(CubeType, CubeLaunch)]
pub struct Mask {
    /// The start of each position's document, `[batch, positions]`.
    pub documents: ComptimeOption<Array<i32>>,
    /// The first keys after pruning.
    pub pruned: ComptimeOption<PrunedKeys>,
    /// With a window w, a query attends to its own key and the w − 1 before it.
    pub window: u32,
    /// The limits that apply.
    #[cube(comptime)]
    pub limits: Limits,
}

/// The first key of each query after pruning, with bounds per tile of 64 queries.
#[derive(CubeType, CubeLaunch)]
pub struct PrunedKeys {
    /// The first key of each query, `[batch, heads, queries]`.
    pub first: Array<i32>,
    /// The minimum and maximum of each tile, `[batch, heads, tiles, 2]`.
    pub bounds: Array<i32>,
    /// The minimum over each tile and all later ones, `[batch, heads, tiles]`.
    pub least: Array<i32>,
}

/// The tensors of [`PrunedKeys`], 32-bit integers.
#[derive(Clone, Debug)]
pub struct Pruned {
    /// `[batch, heads, queries]`
    pub first: CudaTensor,
    /// `[batch, heads, tiles, 2]`
    pub bounds: CudaTensor,
    /// `[batch, heads, tiles]`
    pub least: CudaTensor,
}

impl Pruned {
    /// Uninitialised tensors for `[batch, heads, queries]`.
    pub fn uninit(like: &CudaTensor, [batch, heads, queries]: [usize; 3]) -> Self {
        let tiles = queries.div_ceil(GROUP_ROWS);
        let integers = |shape: &[usize]| empty(like, shape, DType::I32);
        Pruned {
            first: integers(&[batch, heads, queries]),
            bounds: integers(&[batch, heads, tiles, 2]),
            least: integers(&[batch, heads, tiles]),
        }
    }

    /// Computes `least` from `bounds`.
    pub fn set_least(&self) {
        let [batch, heads, tiles]: [usize; 3] = self.least.meta.shape().dims();
        // SAFETY: a block stays within the tiles of its head.
        unsafe {
            least_after::launch_unchecked::<CudaRuntime>(
                &self.least.client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(32),
                buffer(&self.bounds, 1),
                buffer(&self.least, 1),
                tiles as u32,
            );
        }
    }
}

/// The minimum first key of each 64 queries and all after them, `[rows, groups]`, from `bounds`.
///
/// Grid: rows; 32 threads.
#[cube(launch_unchecked)]
fn least_after(bounds: &Array<i32>, least: &mut Array<i32>, groups: u32) {
    let groups = groups as usize;
    let row = CUBE_POS_X as usize;
    let mut carry = i32::cast_from(i32::MAX);
    for tile in 0..(groups + 31) / 32 {
        // From the last to the first.
        let back = tile * 32 + UNIT_POS as usize;
        let mut value = carry;
        if back < groups {
            value = min(value, bounds[(row * groups + groups - 1 - back) * 2]);
        }
        #[unroll]
        for step in 0..5u32 {
            let other = plane_shuffle_up(value, comptime!(1u32 << step));
            if UNIT_POS_PLANE >= comptime!(1u32 << step) {
                value = min(value, other);
            }
        }
        if back < groups {
            least[row * groups + groups - 1 - back] = value;
        }
        carry = plane_shuffle(value, 31u32);
    }
}

#[cube]
impl Mask {
    /// The first key inside the window and the document of the query at `position`.
    pub fn first_key(&self, problem: &ProblemShape, batch: usize, position: usize) -> usize {
        let mut first = 0usize;
        if comptime!(self.limits.window) {
            let window = self.window as usize;
            if position >= window {
                first = position - window + 1;
            }
        }
        if comptime!(self.limits.documents) {
            let positions = problem.positions as usize;
            let documents = self.documents.as_ref().unwrap();
            let start = documents[batch * positions + min(position, positions - 1)] as usize;
            first = max(first, start);
        }
        first
    }

    /// The first key of `query`, which is at `position`. `batch_head` is batch · heads + head.
    pub fn first_key_of(
        &self,
        problem: &ProblemShape,
        batch: usize,
        batch_head: usize,
        query: usize,
        position: usize,
    ) -> u32 {
        let mut first = self.first_key(problem, batch, position) as u32;
        if comptime!(self.limits.pruned) {
            let queries = problem.queries as usize;
            let pruned = self.pruned.as_ref().unwrap();
            let own = pruned.first[batch_head * queries + min(query, queries - 1)];
            first = max(first, own as u32);
        }
        first
    }

    /// The first key that any query from `first_query` on attends to, of the heads of a kv head. With pruning,
    /// `first_query` is a multiple of 64. [`Mask::end_of_queries`] is its inverse.
    pub fn first_key_from(
        &self,
        problem: &ProblemShape,
        batch: usize,
        kv_head: usize,
        first_query: usize,
    ) -> usize {
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let mut first = self.first_key(problem, batch, problem.offset() + first_query);
        if comptime!(self.limits.pruned) {
            let group = problem.group as usize;
            let pruned = self.pruned.as_ref().unwrap();
            let tiles = (queries + GROUP_ROWS - 1) / GROUP_ROWS;
            let mut least = keys;
            for head in kv_head * group..(kv_head + 1) * group {
                let base = (batch * problem.heads as usize + head) * tiles;
                least = min(least, pruned.least[base + first_query / GROUP_ROWS] as usize);
            }
            first = max(first, least);
        }
        first
    }

    /// The end (exclusive) of the positions whose queries attend to a key at or before `column`.
    pub fn end_of_queries(
        &self,
        problem: &ProblemShape,
        batch: usize,
        kv_head: usize,
        column: usize,
    ) -> usize {
        let (queries, positions) = (problem.queries as usize, problem.positions as usize);
        let mut end = positions;
        if comptime!(self.limits.window) {
            end = min(end, column + self.window as usize);
        }
        if comptime!(self.limits.documents) {
            let documents = self.documents.as_ref().unwrap();
            end = first_above(documents, batch * positions, column, column + 1, end);
        }
        if comptime!(self.limits.pruned) {
            let group = problem.group as usize;
            let pruned = self.pruned.as_ref().unwrap();
            let tiles = (queries + GROUP_ROWS - 1) / GROUP_ROWS;
            // A literal would have another type.
            let zero = usize::cast_from(0u32);
            let mut last = 0usize;
            for head in kv_head * group..(kv_head + 1) * group {
                let base = (batch * problem.heads as usize + head) * tiles;
                let found = first_above(&pruned.least, base, column, zero, tiles);
                last = max(last, min(found * GROUP_ROWS, queries));
            }
            end = min(end, problem.offset() + last);
        }
        end
    }
}

#[cube]
impl PrunedKeys {
    /// The minimum and maximum first key of the 64 queries from `query` on; past the last query, those of the
    /// last group.
    fn bounds_of_group(&self, batch_head: usize, query: usize, queries: usize) -> (usize, usize) {
        let tiles = (queries + GROUP_ROWS - 1) / GROUP_ROWS;
        let at = (batch_head * tiles + min(query, queries - 1) / GROUP_ROWS) * 2;
        (self.bounds[at] as usize, self.bounds[at + 1] as usize)
    }

    /// The minimum first key of a block's queries from `first_query` on, 16 per warp.
    fn least_of_block(
        &self,
        batch_head: usize,
        first_query: usize,
        queries: usize,
        #[comptime] warps: usize,
    ) -> usize {
        let (mut least, _) = self.bounds_of_group(batch_head, first_query, queries);
        #[unroll]
        for i in 1..comptime!(warps / GROUP_WARPS) {
            let (other, _) =
                self.bounds_of_group(batch_head, first_query + i * GROUP_ROWS, queries);
            least = min(least, other);
        }
        least
    }
}

/// The first index from `low` on whose value is above `bound`, or `high` if there is none before it, by
/// binary search. Indices count from `base` in `values`, which is non-decreasing there.
#[cube]
pub fn first_above(
    values: &Array<i32>,
    base: usize,
    bound: usize,
    low: usize,
    high: usize,
) -> usize {
    let mut low = low;
    let mut high = high;
    while low < high {
        let middle = (low + high) / 2;
        if values[base + middle] as usize > bound {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Whether the mask hides the key at `column` from a query whose keys are `first` to `last`.
#[cube]
pub fn masked(last: u32, column: u32, first: u32) -> bool {
    (column > last) | (column < first)
}

/// A block of 16·warps queries of one head, and the key tiles that any of them attends to. The grid is
/// query blocks, those with the most keys first, by batch · heads.
#[derive(CubeType, Clone, Copy)]
pub struct QueryBlock {
    /// The sequence.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// Its kv head.
    pub kv_head: usize,
    /// Its head of v.
    pub value_head: usize,
    /// batch · heads + head.
    pub batch_head: usize,
    /// The first query.
    pub first_query: usize,
    /// The position of query 0.
    pub offset: usize,
    /// The first key tile.
    pub from: usize,
    /// Number of key tiles; only with [`Causality::BeforeBlock`] possibly 0.
    pub tiles: usize,
}

#[cube]
impl QueryBlock {
    /// The block of this thread block.
    #[allow(arithmetic_overflow)] // CUBE_POS_X and the like are not constants on the device.
    pub fn new(
        problem: &ProblemShape,
        mask: &Mask,
        #[comptime] config: KernelConfig,
    ) -> QueryBlock {
        let rows = comptime!(config.rows());
        let (batch_head, heads, group) =
            (CUBE_POS_Y as usize, problem.heads as usize, problem.group as usize);
        let (batch, head) = (batch_head / heads, batch_head % heads);
        let queries = problem.queries as usize;
        let first_query = (CUBE_COUNT_X - 1 - CUBE_POS_X) as usize * rows;
        let offset = problem.offset();
        let last_position = offset + min(first_query + rows, queries) - 1;
        let last = problem.last_key(last_position, config);
        let mut from = mask.first_key(problem, batch, offset + first_query);
        if comptime!(mask.limits.pruned) {
            let pruned = mask.pruned.as_ref().unwrap();
            from = max(from, pruned.least_of_block(batch_head, first_query, queries, config.warps));
        }
        let from_tile = from / config.tile;
        let mut tiles = last / config.tile + 1 - from_tile;
        if comptime!(config.causality == Causality::BeforeBlock) {
            if from >= last_position / GROUP_ROWS * GROUP_ROWS {
                tiles = 0usize;
            }
        }
        QueryBlock {
            batch,
            head,
            kv_head: head / group,
            value_head: problem.value_head(head / group, config),
            batch_head,
            first_query,
            offset,
            from: from_tile,
            tiles,
        }
    }

    /// Where its queries are in q.
    pub fn queries_at(&self) -> RowsAt {
        RowsAt { batch: self.batch, head: self.head, row: self.first_query }
    }

    /// Where the keys from `column` on are in k.
    pub fn keys_at(&self, column: usize) -> RowsAt {
        RowsAt { batch: self.batch, head: self.kv_head, row: column }
    }

    /// Where the values from `column` on are in v.
    pub fn values_at(&self, column: usize) -> RowsAt {
        RowsAt { batch: self.batch, head: self.value_head, row: column }
    }

    /// The first key of the tile of iteration `back`: tiles are visited from the last to the first.
    pub fn column(&self, back: usize, #[comptime] tile: usize) -> usize {
        (self.from + self.tiles - 1 - back) * tile
    }

    /// The queries of the warpgroup that contains `warp`.
    pub fn group(
        &self,
        problem: &ProblemShape,
        mask: &Mask,
        warp: usize,
        #[comptime] config: KernelConfig,
    ) -> QueryGroup {
        let queries = problem.queries as usize;
        let first_query = self.first_query + warp / GROUP_WARPS * GROUP_ROWS;
        let first = self.offset + first_query;
        let last = self.offset + min(first_query + GROUP_ROWS, queries) - 1;
        let mut from = mask.first_key(problem, self.batch, first);
        let mut all_from = mask.first_key(problem, self.batch, last);
        let last_key = problem.last_key(last, config);
        if comptime!(mask.limits.pruned) {
            let pruned = mask.pruned.as_ref().unwrap();
            let (least, most) = pruned.bounds_of_group(self.batch_head, first_query, queries);
            from = max(from, least);
            all_from = max(all_from, most);
        }
        let mut empty = first_query >= queries;
        if comptime!(config.causality == Causality::BeforeBlock) {
            empty |= from >= first;
        }
        QueryGroup {
            first,
            all_to: problem.last_key(first, config),
            last_key,
            // The shuffle tells the compiler that the value is warp-uniform.
            from: plane_shuffle(from as u32, 0u32) as usize,
            all_from,
            empty,
        }
    }

    /// The first keys of a lane's two queries; the warp's queries begin at `own`.
    pub fn first_keys(&self, problem: &ProblemShape, mask: &Mask, own: usize) -> Array<u32> {
        let mut first = Array::<u32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + UNIT_POS_PLANE as usize / 4;
            let position = self.offset + query;
            first[r] = mask.first_key_of(problem, self.batch, self.batch_head, query, position);
        }
        first
    }
}

/// The 64 queries of a warpgroup.
#[derive(CubeType, Clone, Copy)]
pub struct QueryGroup {
    /// The first query.
    pub first: usize,
    /// The last key that causality allows all queries.
    pub all_to: usize,
    /// The last key that causality allows any query.
    pub last_key: usize,
    /// The first key that any query attends to.
    pub from: usize,
    /// The first key that all queries attend to, as far as causality allows.
    pub all_from: usize,
    /// Whether the group has no queries, or with [`Causality::BeforeBlock`] none that sees a key.
    pub empty: bool,
}

#[cube]
impl QueryGroup {
    /// Whether the key tile from `column` on needs masking, where queries attend to their own key or not.
    pub fn at_edge(
        &self,
        column: usize,
        #[comptime] tile: usize,
        #[comptime] sees_itself: bool,
    ) -> bool {
        (column + tile > self.all_to + comptime!(usize::from(sees_itself)))
            | (column < self.all_from)
    }
}
