//! The gradients of moves and of merges (`docs/path.md`, "Backward"). With g the gradient after a move, x the vector
//! before it and dR_pair that of the merged transform:
//!
//! - queries: dR_first −= gᵀ x, g ← g − g R_first
//! - keys: dR_second −= xᵀ g, g ← g − g R_secondᵀ
//! - dR_first += dR_pair − dR_pair R_secondᵀ, dR_second += dR_pair − R_firstᵀ dR_pair

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::moves::{LevelSizes, MoveConfig, Movers, Moving, own_panel};
use super::split::{SplitRows, SplitTile, at_most, shared_tile};
use crate::tile::copies::{copy_chunk, finish_copies, wait_for_chunks};
use crate::tile::warpgroup::{
    GROUP_ROWS, GROUP_THREADS, GROUP_WARPS, start_panels_atb, uninit, wait,
};
use crate::tile::{Accumulator, CHUNK, Chunk, PANEL, PANEL_DIM, Pair, place_in, zeros};

/// Most tokens of a piece: the products of a part's transform are summed by pieces, then over these.
pub const PIECE: usize = 512;

/// Tiles in shared memory: one is loaded while the other is used.
const STAGES: usize = 2;

/// Moves gradients back in place and adds those of this level's scores. Writes Σ gᵀ x, or Σ xᵀ g for keys, by pieces,
/// which [`merge_gradients`] subtracts.
///
/// - `g`: `[2, batch, tokens, heads, head_dim]`
/// - `x`: the vectors before the move, `[batch · pairs, part, heads, head_dim]`
/// - `added`: the gradients of this level's scores with respect to `x`, like `x`
/// - `transforms`: R of this level's parts, `[batch, parts, kv_heads, 2, head_dim, head_dim]`
/// - `pieces`: `[pieces, batch · pairs, kv_heads, head_dim, head_dim]`
///
/// Grid: pieces of a part, kv_heads, batch · pairs. A tile has 64 tokens; each warpgroup computes 64 channels of their
/// gradients, and 64 rows of the transform's.
#[cube(launch_unchecked, address_type = "u64")]
pub fn move_gradients(
    g: &mut Array<Chunk>,
    x: &Array<Chunk>,
    added: &Array<Chunk>,
    transforms: &Array<Chunk>,
    pieces: &mut Array<Pair>,
    to_low: u64,
    sizes: LevelSizes,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (threads, padded) = comptime!((config.threads(), config.padded()));
    let pairs = sizes.parts as usize / 2;
    let batch_pair = CUBE_POS_Z as usize;
    let kv_head = CUBE_POS_Y as usize;
    let group = sizes.group as usize;
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let (warpgroup, lane) = (warp / GROUP_WARPS, UNIT_POS_PLANE as usize);
    let first_head = kv_head * group;
    let movers = sizes.movers(batch_pair / pairs, batch_pair % pairs, first_head, moving, config);

    let rounds = comptime!(config.tile_chunks() / threads);
    let mut tiles = Tiles {
        g: SplitTile::new(GROUP_ROWS, padded, STAGES),
        x: shared_tile(comptime!(STAGES * config.tile_chunks())),
    };
    let mut transform = SplitTile::new(padded, padded, 1usize);
    let mut d_transform = zeros(comptime!(head_dim / 8));
    let first_token = CUBE_POS_X as usize * PIECE;
    // A short part may end before the piece.
    let end = min(movers.count, first_token + PIECE);
    let per_head = (max(end, first_token) - first_token + GROUP_ROWS - 1) / GROUP_ROWS;
    let count = per_head * group;
    let part = Part {
        movers,
        first: batch_pair * sizes.part as usize,
        heads: sizes.heads as usize,
        first_head,
        first_token,
        per_head,
        to_low: to_low as usize,
    };
    let zero = 0usize.runtime();
    if count > 0 {
        let of_transform = SplitRows::of_matrix(movers.transform, head_dim);
        transform.start_copy(zero, transforms, &of_transform, threads);
        tiles.start(zero, g, x, &part, config);
    }
    for number in 0..count {
        finish_copies();
        if number + 1 < count {
            tiles.start(number + 1, g, x, &part, config);
        }
        let stage = number % STAGES;
        let (at, x_at) = (tiles.g.at(stage), stage * comptime!(config.tile_chunks()));
        let rows = part.gradients(number, config);
        let mut more = Array::<Chunk>::new(rounds);
        #[unroll]
        for round in 0..rounds {
            let own = OwnChunk::new(round, &rows, config);
            let offset = select(own.exists, own.row * rows.stride + own.chunk, 0usize);
            more[round] = added[part.vectors(number, config) + offset];
        }
        let mut moved = uninit(8usize);
        tiles.start_move(at, &transform, warpgroup, &mut moved, moving);
        tiles.start_sum(at, x_at, warpgroup, &mut d_transform, moving);
        wait(&mut moved, 0usize);
        wait(&mut d_transform, 0usize);
        // Before the tile changes.
        sync_cube();
        tiles.g.subtract(at, &moved, warp % GROUP_WARPS * 16, warpgroup * PANEL_DIM);
        sync_cube();
        #[unroll]
        for round in 0..rounds {
            let own = OwnChunk::new(round, &rows, config);
            if own.exists {
                let place = at + own.place;
                let (high, low) = add(tiles.g.high[place], tiles.g.low[place], more[round]);
                let to = rows.base + own.row * rows.stride + own.chunk;
                g[to] = high;
                g[to + rows.to_low] = low;
            }
        }
    }
    let at = (CUBE_POS_X as usize * CUBE_COUNT_Z as usize + batch_pair) * CUBE_COUNT_Y as usize;
    let to = (at + kv_head) * comptime!(head_dim * head_dim / 2);
    #[unroll]
    for r in 0..2usize {
        let row = warp * 16 + r * 8 + lane / 4;
        if row < head_dim {
            #[unroll]
            for n in 0..comptime!(head_dim / 8) {
                let at = to + row * comptime!(head_dim / 2) + n * 4 + lane % 4;
                pieces[at] = d_transform.index(n)[r];
            }
        }
    }
}

/// The tokens and heads of a block, by tiles: those of one head after those of the other.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// Of the first head.
    movers: Movers,
    /// The part's first row in `[batch · pairs · part]`.
    first: usize,
    heads: usize,
    first_head: usize,
    /// The first token, within the part.
    first_token: usize,
    /// Tiles of a head.
    per_head: usize,
    /// Chunks from a gradient to the rest of it.
    to_low: usize,
}

#[cube]
impl Part {
    /// The rows of g of tile `number`.
    fn gradients(&self, number: usize, #[comptime] config: MoveConfig) -> SplitRows {
        let chunks = comptime!(config.head_dim / CHUNK);
        let token = self.first_token + number % self.per_head * GROUP_ROWS;
        SplitRows {
            base: self.movers.base + (number / self.per_head) * chunks + token * self.movers.stride,
            stride: self.movers.stride,
            to_low: self.to_low,
            count: at_most(self.movers.count - token, GROUP_ROWS),
            chunks: chunks.runtime(),
        }
    }

    /// The first chunk of its vectors in `[batch · pairs, part, heads, head_dim]`.
    fn vectors(&self, number: usize, #[comptime] config: MoveConfig) -> usize {
        let token = self.first_token + number % self.per_head * GROUP_ROWS;
        let head = self.first_head + number / self.per_head;
        ((self.first + token) * self.heads + head) * comptime!(config.head_dim / CHUNK)
    }
}

/// Tiles of gradients and of vectors.
#[derive(CubeType)]
struct Tiles {
    g: SplitTile,
    x: SharedMemory<Chunk>,
}

#[cube]
impl Tiles {
    /// Starts to load tile `number`.
    fn start(
        &mut self,
        number: usize,
        g: &Array<Chunk>,
        x: &Array<Chunk>,
        part: &Part,
        #[comptime] config: MoveConfig,
    ) {
        let threads = comptime!(config.threads());
        let stage = number % STAGES;
        let rows = part.gradients(number, config);
        let at = self.g.at(stage);
        self.g.start_copy(at, g, &rows, threads);
        let base = part.vectors(number, config);
        let x_at = stage * comptime!(config.tile_chunks());
        #[unroll]
        for round in 0..comptime!(config.tile_chunks() / threads) {
            let own = OwnChunk::new(round, &rows, config);
            let from = base + select(own.exists, own.row * rows.stride + own.chunk, 0usize);
            copy_chunk(&mut self.x, x_at + own.place, x, from, own.exists);
        }
    }

    /// Starts acc = g R, or g Rᵀ for keys, for the 64 channels of a panel.
    fn start_move(
        &self,
        at: usize,
        transform: &SplitTile,
        panel: usize,
        acc: &mut Accumulator,
        #[comptime] moving: Moving,
    ) {
        if comptime!(moving == Moving::Queries) {
            self.g.start_ab(at, transform, panel, acc);
        } else {
            self.g.start_abt(at, transform, panel, acc, true);
        }
    }

    /// Starts acc += gᵀ x, or xᵀ g for keys, for the 64 rows of a panel.
    fn start_sum(
        &self,
        at: usize,
        x_at: usize,
        panel: usize,
        acc: &mut Accumulator,
        #[comptime] moving: Moving,
    ) {
        let rows = GROUP_ROWS;
        let panel = panel * comptime!(GROUP_ROWS * PANEL);
        if comptime!(moving == Moving::Queries) {
            start_panels_atb(&self.g.high, at + panel, &self.x, x_at, acc, false, rows);
            start_panels_atb(&self.g.low, at + panel, &self.x, x_at, acc, false, rows);
        } else {
            start_panels_atb(&self.x, x_at + panel, &self.g.high, at, acc, false, rows);
            start_panels_atb(&self.x, x_at + panel, &self.g.low, at, acc, false, rows);
        }
    }
}

/// A thread's chunk of a tile in a round.
#[derive(CubeType, Clone, Copy)]
struct OwnChunk {
    row: usize,
    chunk: usize,
    /// Its place in the tile.
    place: usize,
    /// Whether the tile's tokens have it.
    exists: bool,
}

#[cube]
impl OwnChunk {
    fn new(#[comptime] round: usize, rows: &SplitRows, #[comptime] config: MoveConfig) -> OwnChunk {
        let own = UNIT_POS as usize + comptime!(round * config.threads());
        let chunks_per_row = comptime!(config.padded() / CHUNK);
        let (row, chunk) = (own / chunks_per_row, own % chunks_per_row);
        OwnChunk {
            row,
            chunk,
            place: place_in(row, chunk, GROUP_ROWS),
            exists: (row < rows.count) & (chunk < rows.chunks),
        }
    }
}

/// Adds numbers in bf16 to a chunk, the sum of two.
#[cube]
fn add(high: Chunk, low: Chunk, more: Chunk) -> (Chunk, Chunk) {
    let mut sum_high = Chunk::cast_from(0f32);
    let mut sum_low = Chunk::cast_from(0f32);
    #[unroll]
    for i in 0..CHUNK {
        let sum = f32::cast_from(high[i]) + f32::cast_from(low[i]) + f32::cast_from(more[i]);
        let nearest = bf16::cast_from(sum);
        sum_high[i] = nearest;
        sum_low[i] = bf16::cast_from(sum - f32::cast_from(nearest));
    }
    (sum_high, sum_low)
}

/// The gradients of the transforms of this level's first parts, by [`Moving::Queries`], or of its second ones,
/// `[batch, parts, kv_heads, 2, head_dim, head_dim]`.
///
/// - `of_pairs`: those of the next level, `[batch, parts / 2 rounded up, kv_heads, 2, head_dim, head_dim]`
/// - `transforms`: R of this level's parts
/// - `pieces`: what [`move_gradients`] gives, `count` pieces of `[batch · pairs, kv_heads, head_dim, head_dim]`
///
/// Grid: panels of 64 rows of the next level's parts, kv_heads, batch; a warpgroup.
#[cube(launch_unchecked, address_type = "u64")]
pub fn merge_gradients(
    of_pairs: &Array<Chunk>,
    transforms: &Array<Chunk>,
    pieces: &Array<Pair>,
    gradients: &mut Array<Chunk>,
    parts: u32,
    count: u32,
    #[comptime] moving: Moving,
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
    let zero = 0usize.runtime();
    let of_own = SplitRows::of_matrix(own, head_dim);
    let warp_row = plane_shuffle(UNIT_POS / 32, 0u32) as usize * 16;
    if comptime!(moving == Moving::Queries) {
        let mut d_pair = SplitTile::new(GROUP_ROWS, padded, 1usize);
        d_pair.start_copy(zero, of_pairs, &of_own.rows(row), threads);
        if 2 * pair + 1 < parts {
            let mut transform = SplitTile::new(padded, padded, 1usize);
            let of_second = SplitRows::of_matrix(first + heads, head_dim);
            transform.start_copy(zero, transforms, &of_second, threads);
            let mut acc = sum_pieces(pieces, pair, parts / 2, row + warp_row, count, config);
            finish_copies();
            d_pair.start_abt(zero, &transform, zero, &mut acc, false);
            wait(&mut acc, 0usize);
            // Before the tile changes.
            sync_cube();
            d_pair.subtract(zero, &acc, warp_row, zero);
        } else {
            wait_for_chunks();
        }
        sync_cube();
        let to = SplitRows::of_matrix(first, head_dim).rows(row);
        d_pair.store(zero, gradients, &to, threads);
    } else if 2 * pair + 1 < parts {
        let mut d_pair = SplitTile::new(padded, padded, 1usize);
        let mut transform = SplitTile::new(padded, PANEL_DIM, 1usize);
        d_pair.start_copy(zero, of_pairs, &of_own, threads);
        let of_first = SplitRows::of_matrix(first, head_dim);
        transform.start_copy(zero, transforms, &of_first.columns(row), threads);
        let mut acc = sum_pieces(pieces, pair, parts / 2, row + warp_row, count, config);
        finish_copies();
        transform.start_atb(&d_pair, &mut acc);
        wait(&mut acc, 0usize);
        sync_cube();
        d_pair.subtract(zero, &acc, row + warp_row, zero);
        sync_cube();
        let to = SplitRows::of_matrix(first + heads, head_dim).rows(row);
        d_pair.store(row, gradients, &to, threads);
    }
}

/// The sum of the pieces of a pair: the lane's rows, of 16 from `row` on.
#[cube]
fn sum_pieces(
    pieces: &Array<Pair>,
    pair: usize,
    pairs: usize,
    row: usize,
    count: u32,
    #[comptime] config: MoveConfig,
) -> Accumulator {
    let stride = comptime!(config.head_dim / 2);
    let elements = comptime!(config.head_dim * config.head_dim / 2);
    let heads = CUBE_COUNT_Y as usize;
    let number = (CUBE_POS_Z as usize * pairs + pair) * heads + CUBE_POS_Y as usize;
    let between = CUBE_COUNT_Z as usize * pairs * heads * elements;
    let lane = UNIT_POS_PLANE as usize;
    let mut sum = zeros(comptime!(config.head_dim / 8));
    for i in 0..count as usize {
        #[unroll]
        for r in 0..2usize {
            let row = at_most(row + r * 8 + lane / 4, comptime!(config.head_dim - 1));
            let base = number * elements + i * between + row * stride + lane % 4;
            #[unroll]
            for n in 0..comptime!(config.head_dim / 8) {
                sum.index_mut(n)[r] += pieces[base + n * 4];
            }
        }
    }
    sum
}
