//! Which keys a block of queries and its warpgroups see.

use cubecl::prelude::*;

use super::prune::{bounds_of_group, least_of_block, start_of};
use super::scores::{Options, Problem, first_key};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS};

/// A block of 16·warps queries of one head, and the tiles of keys that some of them see. The grid is blocks
/// of queries, those that see most first, and batch · heads.
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
    /// Tiles.
    pub tiles: usize,
}

#[cube]
impl QueryBlock {
    /// This cube's.
    #[allow(arithmetic_overflow)] // CUBE_POS_X and the like are no constants on the device.
    pub fn new(
        problem: &Problem,
        documents: &Array<i32>,
        bounds: &Array<i32>,
        #[comptime] options: Options,
    ) -> QueryBlock {
        let rows = comptime!(options.rows());
        let (row, heads, group) =
            (CUBE_POS_Y as usize, problem.heads as usize, problem.group as usize);
        let (batch, head) = (row / heads, row % heads);
        let queries = problem.queries as usize;
        let first_query = (CUBE_COUNT_X - 1 - CUBE_POS_X) as usize * rows;
        let offset = problem.keys as usize - queries;
        let last = offset + min(first_query + rows, queries) - 1;
        let mut from = first_key(problem, documents, batch, offset + first_query, options);
        if options.prune {
            from = max(from, least_of_block(bounds, row, first_query, queries, options.warps));
        }
        let from = from / options.span;
        QueryBlock {
            batch,
            head,
            kv_head: head / group,
            row,
            first_query,
            offset,
            from,
            tiles: last / options.span + 1 - from,
        }
    }

    /// The queries of the warpgroup that `warp` is of.
    pub fn of_group(
        &self,
        problem: &Problem,
        documents: &Array<i32>,
        bounds: &Array<i32>,
        warp: usize,
        #[comptime] options: Options,
    ) -> GroupOfQueries {
        let queries = problem.queries as usize;
        let first_query = self.first_query + warp / GROUP_WARPS * GROUP_ROWS;
        let first = self.offset + first_query;
        let last = self.offset + min(first_query + GROUP_ROWS, queries) - 1;
        let mut from = first_key(problem, documents, self.batch, first, options);
        let mut all_from = first_key(problem, documents, self.batch, last, options);
        if options.prune {
            let (least, most) = bounds_of_group(bounds, self.row, first_query, queries);
            from = max(from, least);
            all_from = max(all_from, most);
        }
        GroupOfQueries {
            first,
            last,
            // Shuffled, the compiler knows that it is one for the warp.
            from: plane_shuffle(from as u32, 0u32) as usize,
            all_from,
            empty: first_query >= queries,
        }
    }

    /// The first keys that a lane's two queries see, those of the warp's rows from `own` on.
    pub fn first_keys(
        &self,
        problem: &Problem,
        documents: &Array<i32>,
        starts: &Array<i32>,
        own: usize,
        #[comptime] options: Options,
    ) -> Array<u32> {
        let mut first = Array::<u32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            let query = own + r * 8 + UNIT_POS_PLANE as usize / 4;
            let position = self.offset + query;
            first[r] = first_key(problem, documents, self.batch, position, options) as u32;
            if options.prune {
                first[r] =
                    max(first[r], start_of(starts, self.row, query, problem.queries as usize));
            }
        }
        first
    }

    /// Where the gates of the block's keys begin among those of all, of which a row has `count` tiles.
    pub fn gates_at(&self, problem: &Problem, count: usize, #[comptime] options: Options) -> usize {
        let kv_heads = (problem.heads / problem.group) as usize;
        (self.batch * kv_heads + self.kv_head) * count * options.dim
    }
}

/// The 64 queries of a warpgroup; positions.
#[derive(CubeType, Clone, Copy)]
pub struct GroupOfQueries {
    /// Of the first: up to here all of them see.
    pub first: usize,
    /// Of the last.
    pub last: usize,
    /// The first key that some of them see.
    pub from: usize,
    /// The first key that all of them see.
    pub all_from: usize,
    /// Whether there are none.
    pub empty: bool,
}

#[cube]
impl GroupOfQueries {
    /// Whether some query does not see some key of the tile from `column` on.
    pub fn at_edge(&self, column: usize, #[comptime] span: usize) -> bool {
        (column + span > self.first + 1) | (column < self.all_from)
    }
}
