//! Moves of queries and keys from one level to the next, and merges of transforms (`docs/path.md`, "Halves").
//!
//! A part of s tokens has the transform I − R, R `[head_dim, head_dim]`. Of each pair of parts, queries of the second
//! move back over the first, x ← x − x R_firstᵀ, and keys of the first ahead over the second, x ← x − x R_second;
//! R_pair = R_first + R_second − R_first R_second. A last part without a second one passes to the next level as it is.

use cubecl::prelude::*;

use super::split::{SplitTile, panels};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, uninit, wait};
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

/// Tiles of a block of [`move_vectors`], which share a transform.
pub const TILES_PER_BLOCK: usize = 4;

/// Moves vectors in place, and rounds them.
///
/// - `x`: `[batch, tokens, heads, head_dim]`; `rounded`: the same in bf16
/// - `transforms`: R of this level's parts, `[batch, parts, kv_heads, head_dim, head_dim]`
///
/// Grid: tiles of a part by [`TILES_PER_BLOCK`], heads, batch · pairs.
#[cube(launch_unchecked, address_type = "u64")]
pub fn move_vectors(
    x: &mut Array<Pair>,
    rounded: &mut Array<Bf16Pair>,
    transforms: &Array<Pair>,
    sizes: LevelSizes,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (rows, threads) = comptime!((config.rows(), config.threads()));
    let pairs = sizes.parts as usize / 2;
    let (batch, pair) = (CUBE_POS_Z as usize / pairs, CUBE_POS_Z as usize % pairs);
    let movers = sizes.movers(batch, pair, CUBE_POS_Y as usize, moving, config);
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let mut tile = SplitTile::new(rows, comptime!(config.padded()));
    let mut transform = SplitTile::new(head_dim, comptime!(config.padded()));
    let from = CUBE_POS_X as usize * TILES_PER_BLOCK;
    let to = min(from + TILES_PER_BLOCK, (movers.count + rows - 1) / rows);
    if from < to {
        let (base, stride) = (movers.transform, comptime!(head_dim / 2));
        transform.load(transforms, base, stride, head_dim, head_dim, threads);
    }
    for index in from..to {
        let base = movers.base + index * rows * movers.stride;
        let count = movers.count - index * rows;
        tile.load(x, base, movers.stride, count, head_dim, threads);
        sync_async_proxy_shared();
        sync_cube();
        let mut acc = uninit(comptime!(head_dim / 8));
        let group_row = warp / GROUP_WARPS * GROUP_ROWS;
        if comptime!(moving == Moving::Queries) {
            tile.start_abt(group_row, &transform, &mut acc);
        } else {
            tile.start_ab(group_row, &transform, &mut acc);
        }
        wait(&mut acc, 0usize);
        subtract(&acc, x, rounded, base, movers.stride, count, warp, head_dim);
        // Before the tile is loaded again.
        sync_cube();
    }
}

/// x ← x − acc, and its rounding, for a warp's 16 rows of those from pair `base` on.
#[cube]
fn subtract(
    acc: &Accumulator,
    x: &mut Array<Pair>,
    rounded: &mut Array<Bf16Pair>,
    base: usize,
    stride: usize,
    count: usize,
    warp: usize,
    #[comptime] head_dim: usize,
) {
    let lane = UNIT_POS_PLANE as usize;
    #[unroll]
    for r in 0..2usize {
        let row = warp * 16 + r * 8 + lane / 4;
        if row < count {
            #[unroll]
            for n in 0..comptime!(head_dim / 8) {
                let at = base + row * stride + n * 4 + lane % 4;
                let moved = x[at] - acc.index(n)[r];
                x[at] = moved;
                rounded[at] = Vector::cast_from(moved);
            }
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
