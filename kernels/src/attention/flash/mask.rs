//! Which keys a query attends to: those from its first key up to its own position. Masks follow from
//! positions alone, so that none is ever in memory.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::problem::{Config, Problem};
use crate::cuda::{CudaTensor, empty};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS};

/// What limits a query's keys beside causality. A kernel is compiled for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// A window.
    pub window: bool,
    /// The beginnings of documents.
    pub documents: bool,
    /// Pruning.
    pub pruned: bool,
}

impl Limits {
    /// Whether some query may have a first key that is not the row's first.
    pub fn any(&self) -> bool {
        self.window || self.documents || self.pruned
    }
}

/// The mask of a call.
///
/// `limits` says which of the others are there. cubecl's cache of compiled kernels takes an option without a
/// value for nothing, so it alone would not tell two kernels apart.
#[derive(CubeType, CubeLaunch)]
pub struct Mask {
    /// Where the document of each position begins, `[batch, keys]`.
    pub documents: ComptimeOption<Array<i32>>,
    /// Where pruning lets queries begin.
    pub pruned: ComptimeOption<PrunedKeys>,
    /// With a window w, a query attends to its own key and the w − 1 before it.
    pub window: u32,
    /// What limits keys.
    #[cube(comptime)]
    pub limits: Limits,
}

/// The first keys that pruning leaves, with tiles of 64 queries.
#[derive(CubeType, CubeLaunch)]
pub struct PrunedKeys {
    /// The first key of each query, `[batch, heads, queries]`.
    pub first: Array<i32>,
    /// The least and the largest of each tile's, `[batch, heads, tiles, 2]`.
    pub bounds: Array<i32>,
    /// The least of each tile's and all later ones', `[batch, heads, tiles]`.
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
    /// Tensors for `[batch, heads, queries]`, not yet written.
    pub fn uninit(like: &CudaTensor, [batch, heads, queries]: [usize; 3]) -> Self {
        let tiles = queries.div_ceil(GROUP_ROWS);
        let integers = |shape: &[usize]| empty(like, shape, DType::I32);
        Pruned {
            first: integers(&[batch, heads, queries]),
            bounds: integers(&[batch, heads, tiles, 2]),
            least: integers(&[batch, heads, tiles]),
        }
    }
}

#[cube]
impl Mask {
    /// The first key that the window and the document leave to the query at `position`.
    pub fn first_key(&self, problem: &Problem, batch: usize, position: usize) -> usize {
        let mut first = 0usize;
        if comptime!(self.limits.window) {
            let window = self.window as usize;
            if position >= window {
                first = position - window + 1;
            }
        }
        if comptime!(self.limits.documents) {
            let keys = problem.keys as usize;
            let documents = self.documents.as_ref().unwrap();
            let start = documents[batch * keys + min(position, keys - 1)] as usize;
            first = max(first, start);
        }
        first
    }

    /// The first key of `query`, which stands at `position`. `row` is its head among those of all sequences.
    pub fn first_key_of(
        &self,
        problem: &Problem,
        batch: usize,
        row: usize,
        query: usize,
        position: usize,
    ) -> u32 {
        let mut first = self.first_key(problem, batch, position) as u32;
        if comptime!(self.limits.pruned) {
            let queries = problem.queries as usize;
            let pruned = self.pruned.as_ref().unwrap();
            let own = pruned.first[row * queries + min(query, queries - 1)];
            first = max(first, own as u32);
        }
        first
    }

    /// One past the last position whose query attends to some key at or before `column`.
    pub fn end_of_queries(
        &self,
        problem: &Problem,
        batch: usize,
        kv_head: usize,
        column: usize,
    ) -> usize {
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let mut end = keys;
        if comptime!(self.limits.window) {
            end = min(end, column + self.window as usize);
        }
        if comptime!(self.limits.documents) {
            let documents = self.documents.as_ref().unwrap();
            end = first_above(documents, batch * keys, column, column + 1, end);
        }
        if comptime!(self.limits.pruned) {
            let group = problem.group as usize;
            let pruned = self.pruned.as_ref().unwrap();
            let tiles = (queries + GROUP_ROWS - 1) / GROUP_ROWS;
            // A literal would be of another type.
            let zero = usize::cast_from(0u32);
            let mut last = 0usize;
            for head in kv_head * group..(kv_head + 1) * group {
                let base = (batch * problem.heads as usize + head) * tiles;
                let found = first_above(&pruned.least, base, column, zero, tiles);
                last = max(last, min(found * GROUP_ROWS, queries));
            }
            end = min(end, keys - queries + last);
        }
        end
    }
}

#[cube]
impl PrunedKeys {
    /// The least and the largest first key of the 64 queries from `query` on; of the last 64 for those past
    /// them.
    fn bounds_of_group(&self, row: usize, query: usize, queries: usize) -> (usize, usize) {
        let tiles = (queries + GROUP_ROWS - 1) / GROUP_ROWS;
        let at = (row * tiles + min(query, queries - 1) / GROUP_ROWS) * 2;
        (self.bounds[at] as usize, self.bounds[at + 1] as usize)
    }

    /// The least first key of a block's queries from `first_query` on, 16 a warp.
    fn least_of_block(
        &self,
        row: usize,
        first_query: usize,
        queries: usize,
        #[comptime] warps: usize,
    ) -> usize {
        let (mut least, _) = self.bounds_of_group(row, first_query, queries);
        #[unroll]
        for i in 1..comptime!(warps / GROUP_WARPS) {
            let (other, _) = self.bounds_of_group(row, first_query + i * GROUP_ROWS, queries);
            least = min(least, other);
        }
        least
    }
}

/// The first place from `low` on whose value is above `bound`; `high` where there is none before it. Values
/// lie in `values` from `base` on, and never fall.
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

/// Whether the mask hides the key at `column` from the query at `row`, whose first key is `first`.
#[cube]
pub fn masked(row: u32, column: u32, first: u32) -> bool {
    (column > row) | (column < first)
}

/// A block of 16·warps queries of one head, and the tiles of keys that some of them attend to. The grid is
/// blocks of queries, those with the most keys first, and batch · heads.
#[derive(CubeType, Clone, Copy)]
pub struct QueryBlock {
    /// The sequence.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// Its kv head.
    pub kv_head: usize,
    /// The head among those of all sequences.
    pub row: usize,
    /// The first query.
    pub first_query: usize,
    /// The position of the first of all queries.
    pub offset: usize,
    /// The first tile of keys.
    pub from: usize,
    /// Number of tiles.
    pub tiles: usize,
}

#[cube]
impl QueryBlock {
    /// This cube's.
    #[allow(arithmetic_overflow)] // CUBE_POS_X and the like are no constants on the device.
    pub fn new(problem: &Problem, mask: &Mask, #[comptime] config: Config) -> QueryBlock {
        let rows = comptime!(config.rows());
        let (row, heads, group) =
            (CUBE_POS_Y as usize, problem.heads as usize, problem.group as usize);
        let (batch, head) = (row / heads, row % heads);
        let queries = problem.queries as usize;
        let first_query = (CUBE_COUNT_X - 1 - CUBE_POS_X) as usize * rows;
        let offset = problem.keys as usize - queries;
        let last = offset + min(first_query + rows, queries) - 1;
        let mut from = mask.first_key(problem, batch, offset + first_query);
        if comptime!(mask.limits.pruned) {
            let pruned = mask.pruned.as_ref().unwrap();
            from = max(from, pruned.least_of_block(row, first_query, queries, config.warps));
        }
        let from = from / config.tile;
        QueryBlock {
            batch,
            head,
            kv_head: head / group,
            row,
            first_query,
            offset,
            from,
            tiles: last / config.tile + 1 - from,
        }
    }

    /// The queries of the warpgroup that `warp` is of.
    pub fn group(&self, problem: &Problem, mask: &Mask, warp: usize) -> QueryGroup {
        let queries = problem.queries as usize;
        let first_query = self.first_query + warp / GROUP_WARPS * GROUP_ROWS;
        let first = self.offset + first_query;
        let last = self.offset + min(first_query + GROUP_ROWS, queries) - 1;
        let mut from = mask.first_key(problem, self.batch, first);
        let mut all_from = mask.first_key(problem, self.batch, last);
        if comptime!(mask.limits.pruned) {
            let pruned = mask.pruned.as_ref().unwrap();
            let (least, most) = pruned.bounds_of_group(self.row, first_query, queries);
            from = max(from, least);
            all_from = max(all_from, most);
        }
        QueryGroup {
            first,
            last,
            // Shuffled, the compiler knows that it is one for the warp.
            from: plane_shuffle(from as u32, 0u32) as usize,
            all_from,
            empty: first_query >= queries,
        }
    }

    /// The first keys of a lane's two queries, which are those of the warp's rows from `own` on.
    pub fn first_keys(&self, problem: &Problem, mask: &Mask, own: usize) -> Array<u32> {
        let mut first = Array::<u32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + UNIT_POS_PLANE as usize / 4;
            let position = self.offset + query;
            first[r] = mask.first_key_of(problem, self.batch, self.row, query, position);
        }
        first
    }
}

/// The 64 queries of a warpgroup, as positions.
#[derive(CubeType, Clone, Copy)]
pub struct QueryGroup {
    /// The first query. All of them attend to keys up to here.
    pub first: usize,
    /// The last query.
    pub last: usize,
    /// The first key that some of them attend to.
    pub from: usize,
    /// The first key that all of them attend to.
    pub all_from: usize,
    /// Whether there are none.
    pub empty: bool,
}

#[cube]
impl QueryGroup {
    /// Whether the mask hides some key of the tile from `column` on from some query.
    pub fn at_edge(&self, column: usize, #[comptime] tile: usize) -> bool {
        (column + tile > self.first + 1) | (column < self.all_from)
    }
}
