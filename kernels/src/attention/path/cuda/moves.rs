//! Moves of queries and keys from one level to the next, and merges of transforms (`docs/path.md`, "Halves").
//!
//! A part of s tokens has the transform I − R, R `[head_dim, head_dim]`. Of each pair of parts, queries of the second
//! move back over the first, x ← x − x R_firstᵀ, and keys of the first ahead over the second, x ← x − x R_second;
//! R_pair = R_first + R_second − R_first R_second. A last part without a second one passes to the next level as it is.

use cubecl::prelude::*;

use super::split::{SplitRows, SplitTile, panels, split_fragments};
use crate::tile::copies::{finish_copies, wait_for_chunks};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_THREADS, start_abt, start_pb, uninit, wait};
use crate::tile::{
    AFragments, Bf16Quad, CHUNK, Chunk, PANEL_DIM, Pair, quad_in_two_chunks, quad_of_two_lanes,
    split_pair,
};

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
    /// Panels of 64 rows or columns, and warpgroups of a block that moves gradients.
    pub const fn groups(self) -> usize {
        panels(self.head_dim)
    }

    /// Threads of a block that moves gradients.
    pub const fn threads(self) -> usize {
        GROUP_THREADS * self.groups()
    }

    /// Chunks of a tile of vectors.
    pub const fn tile_chunks(self) -> usize {
        GROUP_ROWS * self.padded() / CHUNK
    }

    /// Channels in shared memory.
    pub const fn padded(self) -> usize {
        PANEL_DIM * self.groups()
    }
}

/// The panel of a transform's rows, and the pair of parts, of a block that owns 64 rows.
#[cube]
pub fn own_panel(#[comptime] config: MoveConfig) -> (usize, usize) {
    let panels = comptime!(config.groups());
    (CUBE_POS_X as usize % panels, CUBE_POS_X as usize / panels)
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
    /// The first chunk of the first vector in `[batch, tokens, heads, head_dim]`.
    pub base: usize,
    /// Chunks from one token to the next.
    pub stride: usize,
    /// Tokens.
    pub count: usize,
    /// The number of the transform in `[batch, parts, kv_heads]`.
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
        let chunks = comptime!(config.head_dim / CHUNK);
        let (mut own, mut other) = (2 * pair, 2 * pair + 1);
        if comptime!(moving == Moving::Queries) {
            own = 2 * pair + 1;
            other = 2 * pair;
        }
        let first = own * part;
        let base = ((batch * tokens + first) * heads + head) * chunks;
        let at = (batch * self.parts as usize + other) * (heads / group) + head / group;
        Movers { base, stride: heads * chunks, count: min(part, tokens - first), transform: at }
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

/// Where a block of 64 tokens is at a level.
#[derive(CubeType, Clone, Copy)]
struct AtLevel {
    /// The level.
    level: u32,
    /// Parts of a sequence.
    parts: usize,
    /// The block's part.
    position: usize,
    /// Tokens of a part.
    part: usize,
    /// The number of the level's first transform among those above the first level.
    transforms: usize,
    /// The level's first row in `[batch · pairs, part, heads]`, of all levels.
    rows: usize,
}

#[cube]
impl AtLevel {
    /// The first level.
    fn first(sizes: &AllLevels) -> AtLevel {
        AtLevel {
            level: 0u32.runtime(),
            parts: sizes.tokens as usize / GROUP_ROWS,
            position: CUBE_POS_X as usize,
            part: GROUP_ROWS.runtime(),
            transforms: 0usize.runtime(),
            rows: 0usize.runtime(),
        }
    }

    /// Goes on to the next level.
    fn rise(&mut self, sizes: &AllLevels) {
        let batch = CUBE_COUNT_Z as usize;
        if self.level > 0 {
            self.transforms += batch * self.parts * (sizes.heads / sizes.group) as usize;
        }
        self.rows += batch * (self.parts / 2) * self.part * sizes.heads as usize;
        self.level += 1;
        self.parts = (self.parts + 1) / 2;
        self.position /= 2;
        self.part *= 2;
    }

    /// Whether the level's scores are computed from the block's vectors.
    fn has_scores(&self, #[comptime] moving: Moving) -> bool {
        let mut has = self.position % 2 == 1;
        if comptime!(moving == Moving::Keys) {
            has = (self.position % 2 == 0) & (self.position + 1 < self.parts);
        }
        has
    }

    /// Whether they move to the next level.
    fn moves(&self, sizes: &AllLevels, #[comptime] moving: Moving) -> bool {
        self.has_scores(moving) & (self.level + 1 < sizes.levels)
    }

    /// Starts to copy the transform that they move by, if they do.
    fn start_copy(
        &self,
        transform: &mut SplitTile,
        blocks: &Array<Chunk>,
        above: &Array<Chunk>,
        sizes: &AllLevels,
        #[comptime] moving: Moving,
        #[comptime] config: MoveConfig,
    ) {
        if self.moves(sizes, moving) {
            let threads = GROUP_THREADS;
            let mut other = self.position + 1;
            if comptime!(moving == Moving::Queries) {
                other = self.position - 1;
            }
            let kv_heads = (sizes.heads / sizes.group) as usize;
            let kv_head = (CUBE_POS_Y / sizes.group) as usize;
            let number = (CUBE_POS_Z as usize * self.parts + other) * kv_heads + kv_head;
            let zero = 0usize.runtime();
            if self.level == 0 {
                let rows = SplitRows::of_matrix(number, config.head_dim);
                transform.start_copy(zero, blocks, &rows, threads);
            } else {
                let rows = SplitRows::of_matrix(self.transforms + number, config.head_dim);
                transform.start_copy(zero, above, &rows, threads);
            }
        }
    }
}

/// Moves vectors through all levels, and writes what each level's scores are computed from.
///
/// - `x`: the vectors of the first level, `[batch, tokens, heads, head_dim]`
/// - `rows`: one level after the other, each `[batch · pairs, part, heads, head_dim]`
/// - `blocks`: R of the first level's parts, `[batch, parts, kv_heads, 2, head_dim, head_dim]`
/// - `above`: R of the further levels, one after the other, each like `blocks`
///
/// Grid: blocks of 64 tokens, heads, batch; a warpgroup, which keeps its vectors in registers, each number as the sum
/// of two in bf16.
#[cube(launch_unchecked, address_type = "u64")]
pub fn move_vectors(
    x: &Array<Pair>,
    rows: &mut Array<Bf16Quad>,
    blocks: &Array<Chunk>,
    above: &Array<Chunk>,
    sizes: AllLevels,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (row_pairs, row_quads, threads) = comptime!((head_dim / 2, head_dim / 4, GROUP_THREADS));
    // As many as registers hold, or with 128 channels the transforms in shared memory.
    let at_once = comptime!(if config.groups() == 1 { 5usize } else { 3usize });
    blocks_per_multiprocessor(comptime!("move_vectors".to_string()), threads, at_once);
    let (head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (heads, tokens) = (sizes.heads as usize, sizes.tokens as usize);
    let mut transform = SplitTile::new(head_dim, comptime!(config.padded()), 1usize);
    let mut at = AtLevel::first(&sizes);
    at.start_copy(&mut transform, blocks, above, &sizes, moving, config);

    let in_block = UNIT_POS as usize / 32 * 16 + UNIT_POS_PLANE as usize / 4;
    let token = CUBE_POS_X as usize * GROUP_ROWS + in_block;
    let base = ((batch * tokens + token) * heads + head) * row_pairs;
    let (mut high, mut low) = read(x, base, heads * row_pairs, config);
    for _ in 0..sizes.levels {
        if at.has_scores(moving) {
            let in_part = token - at.position * at.part;
            let sequence = batch * (at.parts / 2) + at.position / 2;
            let row = at.rows + (sequence * at.part + in_part) * heads + head;
            write(&high, rows, row * row_quads, heads * row_quads, config);
        }
        if at.moves(&sizes, moving) {
            finish_copies();
            advance(&mut high, &mut low, &transform, moving, config);
            // Before the transform's place is written again.
            sync_cube();
        }
        at.rise(&sizes);
        if at.level < sizes.levels {
            at.start_copy(&mut transform, blocks, above, &sizes, moving, config);
        }
    }
}

/// Reads a lane's pairs of two rows, 8 apart; the first one begins at pair `base`.
#[cube]
fn read(
    x: &Array<Pair>,
    base: usize,
    stride: usize,
    #[comptime] config: MoveConfig,
) -> (AFragments, AFragments) {
    let mut vectors = uninit(comptime!(config.head_dim / 8));
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for n in 0..vectors.len() {
            vectors.index_mut(n)[r] =
                x[base + comptime!(r * 8) * stride + n * 4 + UNIT_POS_PLANE as usize % 4];
        }
    }
    split_fragments(&vectors, comptime!(config.head_dim / 8))
}

/// Writes them, the first one from quad `base` on.
#[cube]
fn write(
    vectors: &AFragments,
    rows: &mut Array<Bf16Quad>,
    base: usize,
    stride: usize,
    #[comptime] config: MoveConfig,
) {
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for step in 0..comptime!(config.head_dim / 16) {
            let at = base + comptime!(r * 8) * stride + step * 4 + quad_in_two_chunks();
            let first = Pair::cast_from(vectors.index(step)[r]);
            let second = Pair::cast_from(vectors.index(step)[comptime!(2 + r)]);
            rows[at] = Bf16Quad::cast_from(quad_of_two_lanes(first, second));
        }
    }
}

/// x ← x − x Rᵀ for queries, x ← x − x R for keys.
#[cube]
fn advance(
    high: &mut AFragments,
    low: &mut AFragments,
    transform: &SplitTile,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let n_dim = comptime!(config.head_dim / 8);
    let mut acc = crate::tile::zeros(n_dim);
    let zero = usize::cast_from(0u32);
    if comptime!(moving == Moving::Queries) {
        start_abt(low, &transform.high, zero, &mut acc, false, n_dim);
        start_abt(high, &transform.low, zero, &mut acc, false, n_dim);
        start_abt(high, &transform.high, zero, &mut acc, false, n_dim);
    } else {
        start_pb(low, &transform.high, zero, &mut acc);
        start_pb(high, &transform.low, zero, &mut acc);
        start_pb(high, &transform.high, zero, &mut acc);
    }
    wait(&mut acc, 0usize);
    #[unroll]
    for n in 0..n_dim {
        #[unroll]
        for r in 0..2usize {
            let place = comptime!(n % 2 * 2 + r);
            let first = Pair::cast_from(high.index(comptime!(n / 2))[place]);
            let rest = Pair::cast_from(low.index(comptime!(n / 2))[place]);
            let moved = (first - acc.index(n)[r]) + rest;
            let (nearest, rest) = split_pair(moved);
            high.index_mut(comptime!(n / 2))[place] = nearest;
            low.index_mut(comptime!(n / 2))[place] = rest;
        }
    }
}

/// R of the next level's parts, `[batch, parts / 2 rounded up, kv_heads, 2, head_dim, head_dim]`, from those of this
/// level, `[batch, parts, kv_heads, 2, head_dim, head_dim]`.
///
/// Grid: panels of 64 rows of the next level's parts, kv_heads, batch; a warpgroup.
#[cube(launch_unchecked, address_type = "u64")]
pub fn merge_transforms(
    transforms: &Array<Chunk>,
    merged: &mut Array<Chunk>,
    parts: u32,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (threads, padded) = comptime!((GROUP_THREADS, config.padded()));
    let (panel, pair) = own_panel(config);
    let (head, batch) = (CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (heads, parts) = (CUBE_COUNT_Y as usize, parts as usize);
    let first = (batch * parts + 2 * pair) * heads + head;
    let own = (batch * ((parts + 1) / 2) + pair) * heads + head;
    let row = panel * GROUP_ROWS;
    let to = SplitRows::of_matrix(own, head_dim).rows(row);
    let mut left = SplitTile::new(GROUP_ROWS, padded, 1usize);
    let of_first = SplitRows::of_matrix(first, head_dim).rows(row);
    let zero = 0usize.runtime();
    left.start_copy(zero, transforms, &of_first, threads);
    if 2 * pair + 1 < parts {
        let mut right = SplitTile::new(padded, padded, 1usize);
        let of_second = SplitRows::of_matrix(first + heads, head_dim);
        right.start_copy(zero, transforms, &of_second, threads);
        finish_copies();
        let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
        let mut acc = uninit(comptime!(head_dim / 8));
        left.start_ab(zero, &right, zero, &mut acc);
        wait(&mut acc, 0usize);
        // Before the tile of R_first changes.
        sync_cube();
        right.subtract_from(&mut acc, row + warp * 16);
        left.subtract(zero, &acc, warp * 16, zero);
    } else {
        wait_for_chunks();
    }
    sync_cube();
    left.store(zero, merged, &to, threads);
}
