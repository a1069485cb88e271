//! Moves of queries and keys from one level to the next, and merges of transforms (`docs/path.md`, "Halves").
//!
//! A part of s tokens has the transform I − R, R `[head_dim, head_dim]`. Of each pair of parts, queries of the second
//! move back over the first, x ← x − x R_firstᵀ, and keys of the first ahead over the second, x ← x − x R_second;
//! R_pair = R_first + R_second − R_first R_second. A last part without a second one passes to the next level as it is.

use cubecl::prelude::*;

use super::split::{SplitTile, panels, split_fragments};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, start_abt, start_pb, uninit, wait};
use crate::tile::{Accumulator, Bf16Pair, PANEL_DIM, Pair};

/// Whose vectors move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moving {
    /// Queries of second parts.
    Queries,
    /// Keys of first parts.
    Keys,
}

/// The compile-time configuration of these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MoveConfig {
    /// Channels, a multiple of 16, at most 128.
    pub head_dim: usize,
}

impl MoveConfig {
    /// Warpgroups of a block: each has 64 rows of a tile, and 64 rows of a transform's gradient.
    pub const fn groups(self) -> usize {
        panels(self.head_dim)
    }

    /// Threads of a block.
    pub const fn threads(self) -> usize {
        32 * GROUP_WARPS * self.groups()
    }

    /// Rows of a tile.
    pub const fn rows(self) -> usize {
        GROUP_ROWS * self.groups()
    }

    /// Channels in shared memory.
    pub const fn padded(self) -> usize {
        PANEL_DIM * self.groups()
    }
}

/// The sizes of a level.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct LevelSizes {
    /// Tokens of a sequence, a multiple of 64.
    pub tokens: u32,
    /// Tokens of a part.
    pub part: u32,
    /// Parts of a sequence, of which the last may be short.
    pub parts: u32,
    /// Heads of the vectors.
    pub heads: u32,
    /// Heads of the vectors per head of k.
    pub group: u32,
}

/// The vectors of one part and head that move, and the transform they meet.
#[derive(CubeType, Clone, Copy)]
pub struct Movers {
    /// The pair of the first vector's first channels in `[batch, tokens, heads, head_dim]`.
    pub base: usize,
    /// Pairs from one token to the next.
    pub stride: usize,
    /// Tokens.
    pub count: usize,
    /// The first pair of the transform in `[batch, parts, kv_heads, head_dim, head_dim]`.
    pub transform: usize,
}

#[cube]
impl LevelSizes {
    /// Those of pair `pair` and head `head` of sequence `batch`.
    pub fn movers(
        &self,
        batch: usize,
        pair: usize,
        head: usize,
        #[comptime] moving: Moving,
        #[comptime] config: MoveConfig,
    ) -> Movers {
        let (tokens, part) = (self.tokens as usize, self.part as usize);
        let (heads, group) = (self.heads as usize, self.group as usize);
        let pairs = comptime!(config.head_dim / 2);
        let (mut own, mut other) = (2 * pair, 2 * pair + 1);
        if comptime!(moving == Moving::Queries) {
            own = 2 * pair + 1;
            other = 2 * pair;
        }
        let first = own * part;
        let base = ((batch * tokens + first) * heads + head) * pairs;
        let at = (batch * self.parts as usize + other) * (heads / group) + head / group;
        Movers {
            base,
            stride: heads * pairs,
            count: min(part, tokens - first),
            transform: at * config.head_dim * pairs,
        }
    }
}

/// The sizes of all levels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct AllLevels {
    /// Levels.
    pub levels: u32,
    /// Tokens of a sequence, a multiple of 64.
    pub tokens: u32,
    /// Heads of the vectors.
    pub heads: u32,
    /// Heads of the vectors per head of k.
    pub group: u32,
}

/// Tokens of a block of [`move_vectors`]: two of the smallest parts.
pub const MOVED_TOKENS: usize = 2 * GROUP_ROWS;

/// Moves vectors through all levels, and writes what each level's scores are computed from.
///
/// - `x`: the vectors of the first level, `[batch, tokens, heads, head_dim]`
/// - `rows`: one level after the other, each `[batch · pairs, part, heads, head_dim]`
/// - `blocks`: R of the first level's parts, `[batch, parts, kv_heads, head_dim, head_dim]`
/// - `above`: R of the further levels, one after the other, each like `blocks`
///
/// Grid: tokens by [`MOVED_TOKENS`], heads, batch; 256 threads. A warpgroup keeps 64 vectors in registers.
#[cube(launch_unchecked, address_type = "u64")]
pub fn move_vectors(
    x: &Array<Pair>,
    rows: &mut Array<Bf16Pair>,
    blocks: &Array<Pair>,
    above: &Array<Pair>,
    sizes: AllLevels,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (row_pairs, threads) = comptime!((head_dim / 2, MOVED_TOKENS * 2));
    let (head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (heads, tokens) = (sizes.heads as usize, sizes.tokens as usize);
    let kv_heads = heads / sizes.group as usize;
    let kv_head = head / sizes.group as usize;
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let block = CUBE_POS_X as usize * 2 + warp / GROUP_WARPS;
    let exists = block * GROUP_ROWS < tokens;
    let token = block * GROUP_ROWS + warp % GROUP_WARPS * 16 + UNIT_POS_PLANE as usize / 4;
    let mut vectors = crate::tile::zeros(comptime!(head_dim / 8));
    if exists {
        read(
            &mut vectors,
            x,
            ((batch * tokens + token) * heads + head) * row_pairs,
            heads * row_pairs,
        );
    }
    let mut transform = SplitTile::new(head_dim, comptime!(config.padded()));

    let mut part = GROUP_ROWS.runtime();
    let mut parts = tokens / GROUP_ROWS;
    let mut position = block;
    let mut common = CUBE_POS_X as usize * 2;
    let (mut level_rows, mut level_transforms) = (0usize.runtime(), 0usize.runtime());
    for level in 0..sizes.levels {
        let pairs = parts / 2;
        let mut moves = exists & (position % 2 == 1);
        if comptime!(moving == Moving::Keys) {
            moves = exists & (position % 2 == 0) & (position + 1 < parts);
        }
        if moves {
            let in_part = token - position * part;
            let row = ((batch * pairs + position / 2) * part + in_part) * heads + head;
            write(&vectors, rows, level_rows + row * row_pairs, heads * row_pairs);
        }
        // All vectors of a block move by one transform, if any do.
        let first = common / 2 * 2;
        let mut needed = (level == 0) | (common % 2 == 1);
        let mut other = first;
        if comptime!(moving == Moving::Keys) {
            needed = common % 2 == 0;
            other = first + 1;
        }
        if needed & (first + 1 < parts) & (level + 1 < sizes.levels) {
            let from =
                ((batch * parts + other) * kv_heads + kv_head) * comptime!(head_dim * head_dim / 2);
            if level == 0 {
                transform.load(blocks, from, row_pairs, head_dim, head_dim, threads);
            } else {
                transform.load(
                    above,
                    level_transforms + from,
                    row_pairs,
                    head_dim,
                    head_dim,
                    threads,
                );
            }
            sync_async_proxy_shared();
            sync_cube();
            if moves {
                advance(&mut vectors, &transform, moving, config);
            }
            // Before the transform's place is written again.
            sync_cube();
        }
        level_rows += sizes.batch_rows(pairs * part) * row_pairs;
        if level > 0 {
            level_transforms +=
                CUBE_COUNT_Z as usize * parts * kv_heads * comptime!(head_dim * head_dim / 2);
        }
        part *= 2;
        parts = (parts + 1) / 2;
        position /= 2;
        common /= 2;
    }
}

#[cube]
impl AllLevels {
    /// Rows of all sequences and heads, for `tokens` of each.
    fn batch_rows(&self, tokens: usize) -> usize {
        CUBE_COUNT_Z as usize * tokens * self.heads as usize
    }
}

/// Reads a lane's pairs of two rows, 8 apart; the first one begins at pair `base`.
#[cube]
fn read(vectors: &mut Accumulator, x: &Array<Pair>, base: usize, stride: usize) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for n in 0..vectors.len() {
            vectors.index_mut(n)[r] =
                x[base + comptime!(r * 8) * stride + n * 4 + UNIT_POS_PLANE as usize % 4];
        }
    }
}

/// Writes them rounded.
#[cube]
fn write(vectors: &Accumulator, rows: &mut Array<Bf16Pair>, base: usize, stride: usize) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for n in 0..vectors.len() {
            let at = base + comptime!(r * 8) * stride + n * 4 + UNIT_POS_PLANE as usize % 4;
            rows[at] = Vector::cast_from(vectors.index(n)[r]);
        }
    }
}

/// x ← x − x Rᵀ for queries, x ← x − x R for keys.
#[cube]
fn advance(
    vectors: &mut Accumulator,
    transform: &SplitTile,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let n_dim = comptime!(config.head_dim / 8);
    let (high, low) = split_fragments(vectors, n_dim);
    let mut acc = crate::tile::zeros(n_dim);
    let zero = usize::cast_from(0u32);
    if comptime!(moving == Moving::Queries) {
        start_abt(&low, &transform.high, zero, &mut acc, false, n_dim);
        start_abt(&high, &transform.low, zero, &mut acc, false, n_dim);
        start_abt(&high, &transform.high, zero, &mut acc, false, n_dim);
    } else {
        start_pb(&low, &transform.high, zero, &mut acc);
        start_pb(&high, &transform.low, zero, &mut acc);
        start_pb(&high, &transform.high, zero, &mut acc);
    }
    wait(&mut acc, 0usize);
    #[unroll]
    for n in 0..n_dim {
        #[unroll]
        for r in 0..2usize {
            let moved = vectors.index(n)[r] - acc.index(n)[r];
            vectors.index_mut(n)[r] = moved;
        }
    }
}

/// R of the next level's parts, `[batch, parts / 2 rounded up, kv_heads, head_dim, head_dim]`, from those of this
/// level, `[batch, parts, kv_heads, head_dim, head_dim]`.
///
/// Grid: parts of the next level, kv_heads, batch.
#[cube(launch_unchecked, address_type = "u64")]
pub fn merge_transforms(
    transforms: &Array<Pair>,
    merged: &mut Array<Pair>,
    parts: u32,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (rows, threads, padded) = comptime!((config.rows(), config.threads(), config.padded()));
    let elements = comptime!(head_dim * head_dim / 2);
    let (pair, head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (heads, parts) = (CUBE_COUNT_Y as usize, parts as usize);
    let first = ((batch * parts + 2 * pair) * heads + head) * elements;
    let second = first + heads * elements;
    let to = ((batch * CUBE_COUNT_X as usize + pair) * heads + head) * elements;
    let mut left = SplitTile::new(rows, padded);
    let mut right = SplitTile::new(head_dim, padded);
    if 2 * pair + 1 < parts {
        let stride = comptime!(head_dim / 2);
        left.load(transforms, first, stride, head_dim, head_dim, threads);
        right.load(transforms, second, stride, head_dim, head_dim, threads);
        sync_async_proxy_shared();
        sync_cube();
        let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
        let mut acc = uninit(comptime!(head_dim / 8));
        left.start_ab(warp / GROUP_WARPS * GROUP_ROWS, &right, &mut acc);
        wait(&mut acc, 0usize);
        let lane = UNIT_POS_PLANE as usize;
        #[unroll]
        for r in 0..2usize {
            let row = warp * 16 + r * 8 + lane / 4;
            if row < head_dim {
                #[unroll]
                for n in 0..comptime!(head_dim / 8) {
                    let at = row * stride + n * 4 + lane % 4;
                    let sum = transforms[first + at] + transforms[second + at];
                    merged[to + at] = sum - acc.index(n)[r];
                }
            }
        }
    } else {
        let mut at = UNIT_POS as usize;
        while at < elements {
            merged[to + at] = transforms[first + at];
            at += threads;
        }
    }
}
