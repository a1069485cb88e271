//! Tiles of a block and their merging to halves, in shared memory, as both passes compute them.
//!
//! −c of a move x ← x − c B, c = x Aᵀ, is stored rather than c, so that every product is added.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::THREADS;
use super::layout::{BLOCK, BlockConfig, KEYS_16, KEYS_32, TILE, TILES, Y_MOVED};
use super::memory::{BlockInputs, BlockOf, BlockShape, Visibility, copy_rows, load_head};
use super::product::{Kept, Place, Product, multiply, quads};

/// Tokens of half a block.
pub const HALF: usize = 2 * TILE;

/// The second and fourth of a place's tiles, as a batch.
pub const fn odd(place: Place) -> Place {
    place.cell(TILE, 0).step(HALF, 0)
}

/// The first and third of a place's tiles, as a batch.
pub const fn even(place: Place) -> Place {
    place.step(HALF, 0)
}

/// The corners of a block's square between its neighbouring tiles, as a batch.
pub const fn corners(square: Place) -> Place {
    square.cell(TILE, 0).step(HALF, HALF)
}

/// The corner of a block's square between its halves.
pub const fn corner(square: Place) -> Place {
    square.cell(HALF, 0)
}

/// The sizes of the products between tiles with the results `[16, 16]`.
pub const fn among_tiles(dim: usize) -> [usize; 3] {
    [TILE, TILE, dim]
}

/// The sizes of the products between halves with the results `[32, 32]`.
pub const fn among_halves(dim: usize) -> [usize; 3] {
    [HALF, HALF, dim]
}

/// Reads w, k and β of a block.
#[cube]
pub fn load_block(
    arena: &mut SharedMemory<f32>,
    inputs: &BlockInputs,
    of: &BlockOf,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    load_head::<f32>(arena, &inputs.w, of, of.kv_head, 1f32, comptime!(config.w()), d);
    load_head::<bf16>(arena, &inputs.k, of, of.kv_head, 1f32, comptime!(config.k()), d);
    let row = UNIT_POS as usize;
    if row < BLOCK {
        let strides = inputs.beta_strides;
        let base = of.batch * strides.batch as usize + of.kv_head * strides.head as usize;
        let mut beta = 0f32;
        if row < of.count {
            beta = inputs.beta[base + (of.first() + row) * strides.token as usize];
        }
        arena[comptime!(config.beta()) + row] = beta;
    }
}

/// a = W Wᵀ below the diagonal, for each tile, at `a`; W Kᵀ below the diagonal at `wk`.
#[cube]
pub fn tile_products(
    arena: &mut SharedMemory<f32>,
    #[comptime] k: Place,
    #[comptime] a: Place,
    #[comptime] wk: Place,
    #[comptime] config: BlockConfig,
) {
    let sizes = comptime!(among_tiles(config.head_dim));
    let w = comptime!(config.w());
    let below = comptime!(Kept::StrictlyLower);
    multiply(arena, comptime!(Product::abt([w, w, a], sizes).batch(TILES).kept(below)));
    multiply(arena, comptime!(Product::abt([w, k, wk], sizes).batch(TILES).kept(below)));
}

/// y of the tiles, and m in place of W Kᵀ, by forward substitution:
/// x_t = β_t (x_t − Σ_{s<t} a_ts x_s) for each column.
#[cube]
fn substitute(
    arena: &mut SharedMemory<f32>,
    #[comptime] a: Place,
    #[comptime] config: BlockConfig,
) {
    let (w, y, m) = comptime!((config.w(), config.y(), config.m()));
    let (dim, each) = comptime!((config.head_dim, config.head_dim + TILE));
    for round in 0..comptime!((TILES * each).div_ceil(THREADS)) {
        let index = round * THREADS + UNIT_POS as usize;
        if index < comptime!(TILES * each) {
            let (tile, column) = (index / each, index % each);
            let mut from = m.at + tile * m.next + column - dim;
            let mut to = m.at + tile * m.next + column - dim;
            let mut stride = comptime!(m.row).runtime();
            if column < dim {
                from = w.at + tile * w.next + column;
                to = y.at + tile * y.next + column;
                stride = comptime!(w.row).runtime();
            }
            let a_at = comptime!(a.at / 4) + tile * comptime!(a.next / 4);
            let beta_at = comptime!(config.beta()) + tile * TILE;
            let mut x = Array::<f32>::new(TILE);
            #[unroll]
            for t in 0..TILE {
                x[t] = 0f32;
            }
            #[unroll]
            for t in 0..TILE {
                let mut value = arena[from + t * stride];
                #[unroll]
                for four in 0..comptime!(t.div_ceil(4)) {
                    let quad = quads(arena)[a_at + comptime!(t * (a.row / 4) + four)];
                    #[unroll]
                    for i in 0..4usize {
                        value -= quad[i] * x[comptime!(four * 4 + i)];
                    }
                }
                x[t] = value * arena[beta_at + t];
            }
            #[unroll]
            for t in 0..TILE {
                arena[to + t * stride] = x[t];
            }
        }
    }
}

/// From w, k and β: y of the tiles, m, y of halves at x, and the keys of levels at `keys`. −c of the move of the
/// third tile's keys by the fourth remains at [`key_moves`].
#[cube]
pub fn prepare(
    arena: &mut SharedMemory<f32>,
    #[comptime] keys: Place,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y, x) = comptime!((config.w(), config.k(), config.y(), config.x()));
    let (s, m) = comptime!((config.s(), config.m()));
    tile_products(arena, k, s, m, config);
    sync_cube();
    substitute(arena, s, config);
    sync_cube();

    // 1. y of the second tiles, moved to the starts of the first; keys, moved to the ends of their tiles.
    let moves = comptime!(s.cell(0, TILE).step(HALF, 0));
    let sizes = comptime!(among_tiles(d));
    multiply(arena, comptime!(Product::abt([odd(y), even(w), moves], sizes).batch(2).negative()));
    copy_rows(arena, y, x, BLOCK, d);
    let keys_16 = comptime!(keys.cell(KEYS_16, 0));
    copy_rows(arena, k, keys_16, TILE, d);
    copy_rows(arena, comptime!(k.cell(TILE, 0)), comptime!(keys.cell(TILE, 0)), TILE, d);
    copy_rows(arena, comptime!(k.cell(HALF, 0)), comptime!(keys_16.cell(TILE, 0)), TILE, d);
    sync_cube();
    let rows = comptime!([TILE, d, TILE]);
    multiply(arena, comptime!(Product::ab([moves, even(y), odd(x)], rows).batch(2).added()));
    let move_even = comptime!(Product::atb([even(m), even(w), keys_16.step(TILE, 0)], rows));
    multiply(arena, comptime!(move_even.batch(2).negative().added()));
    let second = comptime!([m.cell(TILE, 0), w.cell(TILE, 0), keys.cell(TILE, 0)]);
    multiply(arena, comptime!(Product::atb(second, rows).negative().added()));
    sync_cube();

    // 2. Keys of the first tiles, moved over the second.
    let moves = comptime!(key_moves(config));
    let abc = comptime!([keys_16.step(TILE, 0), odd(y), moves]);
    multiply(arena, comptime!(Product::abt(abc, sizes).batch(2).negative()));
    copy_rows(arena, keys_16, comptime!(keys.cell(KEYS_32, 0)), TILE, d);
    copy_rows(arena, comptime!(x.cell(TILE, 0)), comptime!(y.cell(Y_MOVED, 0)), TILE, d);
    sync_cube();
    let abc = comptime!([moves, w.cell(TILE, 0), keys.cell(KEYS_32, 0)]);
    multiply(arena, comptime!(Product::ab(abc, rows).added()));
    sync_cube();
}

/// Where [`prepare`] leaves −c of the moves of the first and third tile's keys by a tile, as a batch.
pub const fn key_moves(config: BlockConfig) -> Place {
    config.s().cell(0, HALF).step(HALF, 0)
}

/// The scores inside tiles, −c at `c`, and the queries at x moved to the starts of their tiles. The keys at `k` are
/// those given.
#[cube]
pub fn tile_level(
    arena: &mut SharedMemory<f32>,
    #[comptime] c: Place,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, k, y, x) = comptime!((config.w(), config.k(), config.y(), config.x()));
    let (s, m) = comptime!((config.s(), config.m()));
    let sizes = comptime!(among_tiles(d));
    multiply(arena, comptime!(Product::abt([x, k, s], sizes).batch(TILES)));
    let along = comptime!(Product::abt([x, w, c], sizes).batch(TILES));
    multiply(arena, comptime!(along.negative().kept(Kept::Lower)));
    sync_cube();
    let small = comptime!([TILE, TILE, TILE]);
    multiply(arena, comptime!(Product::ab([c, m, s], small).batch(TILES).added()));
    multiply(arena, comptime!(Product::ab([c, y, x], [TILE, d, TILE]).batch(TILES).added()));
    sync_cube();
}

/// The same between the tiles of each half, with the keys of levels at `keys`.
#[cube]
pub fn level_of_tiles(
    arena: &mut SharedMemory<f32>,
    #[comptime] keys: Place,
    #[comptime] c: Place,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, y, x) = comptime!((config.w(), config.y(), config.x()));
    let sizes = comptime!(among_tiles(d));
    let keys = comptime!(keys.cell(KEYS_16, 0).step(TILE, 0));
    let scores = comptime!(corners(config.s()));
    multiply(arena, comptime!(Product::abt([odd(x), keys, scores], sizes).batch(2)));
    multiply(arena, comptime!(Product::abt([odd(x), even(w), c], sizes).batch(2).negative()));
    sync_cube();
    let rows = comptime!([TILE, d, TILE]);
    multiply(arena, comptime!(Product::ab([c, even(y), odd(x)], rows).batch(2).added()));
    sync_cube();
}

/// The same between the halves.
#[cube]
pub fn level_of_halves(
    arena: &mut SharedMemory<f32>,
    #[comptime] keys: Place,
    #[comptime] c: Place,
    #[comptime] config: BlockConfig,
) {
    let d = config.head_dim;
    let (w, y, x) = comptime!((config.w(), config.y(), config.x().cell(HALF, 0)));
    let sizes = comptime!(among_halves(d));
    let keys = comptime!(keys.cell(KEYS_32, 0));
    let scores = comptime!(corner(config.s()));
    multiply(arena, comptime!(Product::abt([x, keys, scores], sizes)));
    multiply(arena, comptime!(Product::abt([x, w, c], sizes).negative()));
    sync_cube();
    let rows = comptime!([HALF, d, TILE]);
    multiply(arena, comptime!(Product::ab([c, y, x], rows).added()));
    let second = comptime!([c.cell(0, TILE), y.cell(Y_MOVED, 0), x]);
    multiply(arena, comptime!(Product::ab(second, rows).added()));
    sync_cube();
}

/// Reads Σ ℓ within the block, of one head.
#[cube]
pub fn load_decay(
    arena: &mut SharedMemory<f32>,
    visibility: &Visibility,
    of: &BlockOf,
    head: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) {
    if comptime!(config.decay) {
        let row = UNIT_POS as usize;
        if row < BLOCK {
            let mut sum = 0f32;
            if row < of.count {
                let sums = visibility.decay.as_ref().unwrap();
                let batch_head = of.batch * shape.heads as usize + head;
                sum = sums.within_span(batch_head, of.first() + row);
            }
            arena[comptime!(config.decay_sums()) + row] = sum;
        }
    }
}

/// The first row of the block that the query of `row` sees, [`BLOCK`] for a row past the last token.
#[cube]
pub fn first_visible(
    visibility: &Visibility,
    of: &BlockOf,
    row: usize,
    shape: &BlockShape,
    #[comptime] config: BlockConfig,
) -> usize {
    let mut first = 0usize;
    if row < of.count {
        if comptime!(config.window) {
            let window = visibility.window as usize;
            if row >= window {
                first = row - window + 1;
            }
        }
        if comptime!(config.documents) {
            let documents = visibility.documents.as_ref().unwrap();
            let at = of.batch * shape.tokens as usize + of.first() + row;
            let start = documents[at] as usize;
            if start > of.first() + first {
                first = start - of.first();
            }
        }
    } else {
        first = BLOCK.runtime();
    }
    first
}

/// The score of a query's row and a key's row, with the decay from the key to the block's start; the rest, from
/// there to the query, cancels in the softmax.
#[cube]
pub fn score(
    arena: &SharedMemory<f32>,
    row: usize,
    column: usize,
    #[comptime] config: BlockConfig,
) -> f32 {
    let s = comptime!(config.s());
    let mut score = arena[s.at + row * s.row + column];
    if comptime!(config.decay) {
        let sums = comptime!(config.decay_sums());
        score -= arena[sums + column];
    }
    score
}
