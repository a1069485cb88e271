//! The gradients of moves and of merges (`docs/path.md`, "Backward"). With g the gradient after a move, x the vector
//! before it and dR_pair that of the merged transform:
//!
//! - queries: dR_first −= gᵀ x, g ← g − g R_first
//! - keys: dR_second −= xᵀ g, g ← g − g R_secondᵀ
//! - dR_first += dR_pair − dR_pair R_secondᵀ, dR_second += dR_pair − R_firstᵀ dR_pair

use cubecl::prelude::*;

use super::moves::{LevelSizes, MoveConfig, Moving};
use super::split::SplitTile;
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS, start_panels_atb, uninit, wait};
use crate::tile::{ALIGN, Accumulator, Bf16Pair, CHUNK, Chunk, PANEL, Pair, place, zeros};

/// Most tokens of a piece: the products of a part's transform are summed by pieces, then over these.
pub const PIECE: usize = 512;

/// Moves gradients back in place, and adds those of this level's scores; the parts of the transforms' gradients by
/// pieces, without their sign.
///
/// - `g`: `[batch, tokens, heads, head_dim]`
/// - `x`: the vectors before the move, `[batch · pairs, part, heads, head_dim]`
/// - `added`: the gradients of this level's scores with respect to `x`, like `x`
/// - `transforms`: R of this level's parts, `[batch, parts, kv_heads, head_dim, head_dim]`
/// - `pieces`: `[pieces, batch · pairs, kv_heads, head_dim, head_dim]`
///
/// Grid: pieces of a part, kv_heads, batch · pairs.
#[cube(launch_unchecked, address_type = "u64")]
pub fn move_gradients(
    g: &mut Array<Pair>,
    x: &Array<Chunk>,
    added: &Array<Bf16Pair>,
    transforms: &Array<Pair>,
    pieces: &mut Array<Pair>,
    sizes: LevelSizes,
    #[comptime] moving: Moving,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (rows, threads, padded) = comptime!((config.rows(), config.threads(), config.padded()));
    let n_dim = comptime!(head_dim / 8);
    let pairs = sizes.parts as usize / 2;
    let batch_pair = CUBE_POS_Z as usize;
    let kv_head = CUBE_POS_Y as usize;
    let group = sizes.group as usize;
    let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
    let (warpgroup, lane) = (warp / GROUP_WARPS, UNIT_POS_PLANE as usize);

    let mut tile = SplitTile::new(rows, padded);
    let mut transform = SplitTile::new(head_dim, padded);
    let mut x_tile = SharedMemory::<Chunk>::new_aligned(comptime!(rows * padded / CHUNK), ALIGN);
    let mut d_transform = zeros(n_dim);
    let first_token = CUBE_POS_X as usize * PIECE;
    for in_group in 0..group {
        let head = kv_head * group + in_group;
        let movers = sizes.movers(batch_pair / pairs, batch_pair % pairs, head, moving, config);
        if in_group == 0 {
            let (base, stride) = (movers.transform, comptime!(head_dim / 2));
            transform.load(transforms, base, stride, head_dim, head_dim, threads);
        }
        let end = min(movers.count, first_token + PIECE);
        let mut token = first_token;
        while token < end {
            let base = movers.base + token * movers.stride;
            // A literal would have another type.
            let count = min(end - token, usize::cast_from(comptime!(rows as u32)));
            tile.load(g, base, movers.stride, count, head_dim, threads);
            let of_part = (batch_pair * sizes.part as usize + token) * sizes.heads as usize + head;
            let x_stride = sizes.heads as usize * comptime!(head_dim / CHUNK);
            let x_base = of_part * comptime!(head_dim / CHUNK);
            load_rounded(&mut x_tile, x, x_base, x_stride, count, rows, padded, config);
            sync_async_proxy_shared();
            sync_cube();
            let mut moved = uninit(n_dim);
            let group_row = warpgroup * GROUP_ROWS;
            if comptime!(moving == Moving::Queries) {
                tile.start_ab(group_row, &transform, &mut moved);
                add_gtx(&tile, &x_tile, warpgroup, &mut d_transform, rows);
            } else {
                tile.start_abt(group_row, &transform, &mut moved);
                add_xtg(&tile, &x_tile, warpgroup, &mut d_transform, rows);
            }
            wait(&mut moved, 0usize);
            wait(&mut d_transform, 0usize);
            let added_base = of_part * comptime!(head_dim / 2);
            #[unroll]
            for r in 0..2usize {
                let row = warp * 16 + r * 8 + lane / 4;
                if row < count {
                    #[unroll]
                    for n in 0..n_dim {
                        let at = base + row * movers.stride + n * 4 + lane % 4;
                        let own = added_base + row * movers.stride + n * 4 + lane % 4;
                        g[at] = g[at] - moved.index(n)[r] + Pair::cast_from(added[own]);
                    }
                }
            }
            // Before the tiles are loaded again.
            sync_cube();
            token += rows;
        }
    }
    let at = (CUBE_POS_X as usize * CUBE_COUNT_Z as usize + batch_pair) * CUBE_COUNT_Y as usize;
    let to = (at + kv_head) * comptime!(head_dim * head_dim / 2);
    #[unroll]
    for r in 0..2usize {
        let row = warp * 16 + r * 8 + lane / 4;
        if row < head_dim {
            #[unroll]
            for n in 0..n_dim {
                let at = to + row * comptime!(head_dim / 2) + n * 4 + lane % 4;
                pieces[at] = d_transform.index(n)[r];
            }
        }
    }
}

/// Copies rows of bf16 into a tile; rows from `count` on are zero.
#[cube]
fn load_rounded(
    tile: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] rows: usize,
    #[comptime] padded: usize,
    #[comptime] config: MoveConfig,
) {
    let chunks_per_row = comptime!(padded / CHUNK);
    let mut at = UNIT_POS as usize;
    while at < comptime!(rows * padded / CHUNK) {
        let (row, chunk) = (at / chunks_per_row, at % chunks_per_row);
        let mut value = Chunk::cast_from(0f32);
        if (row < count) & (chunk < comptime!(config.head_dim / CHUNK)) {
            value = source[base + row * stride + chunk];
        }
        let to = chunk / PANEL * rows * PANEL + place(row as u32, (chunk % PANEL) as u32);
        tile[to] = value;
        at += comptime!(config.threads());
    }
}

/// Starts acc += gᵀ x for the 64 channels of g in `panel`.
#[cube]
fn add_gtx(
    g: &SplitTile,
    x: &SharedMemory<Chunk>,
    panel: usize,
    acc: &mut Accumulator,
    #[comptime] rows: usize,
) {
    let (left, zero) = (panel * rows * PANEL, usize::cast_from(0u32));
    start_panels_atb(&g.high, left, x, zero, acc, false, rows);
    start_panels_atb(&g.low, left, x, zero, acc, false, rows);
}

/// Starts acc += xᵀ g for the 64 channels of x in `panel`.
#[cube]
fn add_xtg(
    g: &SplitTile,
    x: &SharedMemory<Chunk>,
    panel: usize,
    acc: &mut Accumulator,
    #[comptime] rows: usize,
) {
    let (left, zero) = (panel * rows * PANEL, usize::cast_from(0u32));
    start_panels_atb(x, left, &g.high, zero, acc, false, rows);
    start_panels_atb(x, left, &g.low, zero, acc, false, rows);
}

/// The gradients of this level's transforms, `[batch, parts, kv_heads, head_dim, head_dim]`.
///
/// - `of_pairs`: those of the next level, `[batch, parts / 2 rounded up, kv_heads, head_dim, head_dim]`
/// - `transforms`: R of this level's parts
/// - `by_queries`, `by_keys`: what [`move_gradients`] gives, `count` pieces of
///   `[batch · pairs, kv_heads, head_dim, head_dim]`
///
/// Grid: parts of the next level, kv_heads, batch.
#[cube(launch_unchecked, address_type = "u64")]
pub fn merge_gradients(
    of_pairs: &Array<Pair>,
    transforms: &Array<Pair>,
    by_queries: &Array<Pair>,
    by_keys: &Array<Pair>,
    gradients: &mut Array<Pair>,
    parts: u32,
    count: u32,
    #[comptime] config: MoveConfig,
) {
    let MoveConfig { head_dim, .. } = comptime!(config);
    let (rows, threads, padded) = comptime!((config.rows(), config.threads(), config.padded()));
    let elements = comptime!(head_dim * head_dim / 2);
    let stride = comptime!(head_dim / 2);
    let n_dim = comptime!(head_dim / 8);
    let (pair, head, batch) = (CUBE_POS_X as usize, CUBE_POS_Y as usize, CUBE_POS_Z as usize);
    let (heads, parts) = (CUBE_COUNT_Y as usize, parts as usize);
    let first = ((batch * parts + 2 * pair) * heads + head) * elements;
    let second = first + heads * elements;
    let own = ((batch * CUBE_COUNT_X as usize + pair) * heads + head) * elements;
    let mut d_pair = SplitTile::new(rows, padded);
    let mut transform = SplitTile::new(head_dim, padded);
    if 2 * pair + 1 < parts {
        let warp = plane_shuffle(UNIT_POS / 32, 0u32) as usize;
        let warpgroup = warp / GROUP_WARPS;
        let pairs = parts / 2;
        let piece = ((batch * pairs + pair) * heads + head) * elements;
        let between = CUBE_COUNT_Z as usize * pairs * heads * elements;
        d_pair.load(of_pairs, own, stride, head_dim, head_dim, threads);
        transform.load(transforms, second, stride, head_dim, head_dim, threads);
        sync_async_proxy_shared();
        sync_cube();
        let mut acc = uninit(n_dim);
        d_pair.start_abt(warpgroup * GROUP_ROWS, &transform, &mut acc);
        wait(&mut acc, 0usize);
        store(&acc, of_pairs, own, by_queries, piece, between, count, gradients, first, config);
        sync_cube();
        // R_first has the rows of dR_pair's tile.
        let mut left = SplitTile::new(rows, padded);
        left.load(transforms, first, stride, head_dim, head_dim, threads);
        sync_async_proxy_shared();
        sync_cube();
        let mut acc = uninit(n_dim);
        left.start_atb(warpgroup, &d_pair, &mut acc, true);
        wait(&mut acc, 0usize);
        store(&acc, of_pairs, own, by_keys, piece, between, count, gradients, second, config);
    } else {
        let mut at = UNIT_POS as usize;
        while at < elements {
            gradients[first + at] = of_pairs[own + at];
            at += threads;
        }
    }
}

/// Writes dR_pair − acc − Σ pieces.
#[cube]
fn store(
    acc: &Accumulator,
    of_pairs: &Array<Pair>,
    own: usize,
    pieces: &Array<Pair>,
    piece: usize,
    between: usize,
    count: u32,
    gradients: &mut Array<Pair>,
    to: usize,
    #[comptime] config: MoveConfig,
) {
    let lane = UNIT_POS_PLANE as usize;
    #[unroll]
    for r in 0..2usize {
        let row = UNIT_POS as usize / 32 * 16 + r * 8 + lane / 4;
        if row < config.head_dim {
            #[unroll]
            for n in 0..comptime!(config.head_dim / 8) {
                let at = row * comptime!(config.head_dim / 2) + n * 4 + lane % 4;
                let mut sum = Pair::cast_from(0f32);
                for i in 0..count as usize {
                    sum += pieces[piece + i * between + at];
                }
                gradients[to + at] = of_pairs[own + at] - acc.index(n)[r] - sum;
            }
        }
    }
}
