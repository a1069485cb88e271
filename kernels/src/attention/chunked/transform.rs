//! The transform Y = (I + A diag(β))⁻¹ of each chunk (`docs/chunked.md`, "The delta rule").

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::memory::{
    ChunkConfig, ChunkInputs, ChunkOf, Factors, Own, Sizes, finish_loads, rounds, start_load,
};
use super::product::{Matrix, Product, WarpTile, add_product};
use super::{CHUNK_TOKENS, THREADS};
use crate::tile::product::{Place, Product as SplitProduct, multiply, quads};
use crate::tile::{CHUNK, Chunk, define_exp2, zeros};

/// Tokens that are substituted one by one.
const TILE: usize = 16;

/// Tokens of half a chunk.
const HALF: usize = 2 * TILE;

/// Elements of a row of a matrix of all tokens, padded to an odd number of quads.
pub const ROW: usize = CHUNK_TOKENS + 4;

const fn square(number: usize) -> Place {
    Place { at: number * CHUNK_TOKENS * ROW, row: ROW, next: TILE * ROW + TILE }
}

/// A diag(β) below the diagonal.
pub const SYSTEM: Place = square(0);

/// Y.
pub const INVERSE: Place = square(1);

/// A product between blocks.
const BETWEEN: Place = Place { at: 2 * CHUNK_TOKENS * ROW, row: HALF + 4, next: TILE * (HALF + 4) };

/// Elements of the arena.
pub const ELEMENTS: usize = BETWEEN.at + HALF * BETWEEN.row;

/// Y of each chunk, rounded to bf16, `[rows, chunks, 64, 64]`. It is computed in f32: by substitution in blocks of 16
/// tokens, which are then joined in pairs.
///
/// Grid: all chunks; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn transform(
    inputs: &ChunkInputs,
    y: &mut Array<Chunk>,
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    define_exp2();
    let d = config.head_dim;
    let chunks = sizes.chunks as usize;
    let number = CUBE_POS_X as usize;
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);
    let k = comptime!(Matrix::new(0, d));
    let mut tiles = SharedMemory::<Chunk>::new_aligned(comptime!(k.end(CHUNK_TOKENS)), 16usize);
    let mut arena = SharedMemory::<f32>::new_aligned(ELEMENTS, 16usize);
    let mut factors = Factors::new();

    // 1. The system; zeros in place of the inverse.
    let stride = comptime!(d / CHUNK);
    start_load(&mut tiles, &inputs.k, of.token * stride, stride, of.count, k, CHUNK_TOKENS, d);
    factors.load(inputs, &of, config);
    clear_inverse(&mut arena);
    finish_loads();
    let scores = comptime!(Product::abt(k, k, [CHUNK_TOKENS, CHUNK_TOKENS, d]));
    let tile = WarpTile::new(scores);
    let mut acc = zeros(comptime!(scores.fragments()));
    add_product(&tiles, &mut acc, &tile, scores);
    #[unroll]
    for r in 0..2usize {
        let t = tile.row(r);
        #[unroll]
        for f in 0..comptime!(scores.fragments()) {
            let value = acc.index(f)[r];
            #[unroll]
            for c in 0..2usize {
                let s = tile.column(f) + c;
                let entry = value[c] * factors.between(t, s) * factors.beta[s];
                arena[SYSTEM.at + t * ROW + s] = select(s < t, entry, 0f32);
            }
        }
    }
    sync_cube();

    // 2. Its inverse.
    invert(&mut arena);

    // 3. Rounded.
    #[unroll]
    for round in 0..comptime!(rounds(CHUNK_TOKENS, CHUNK_TOKENS)) {
        let at = Own::new(round, CHUNK_TOKENS, CHUNK_TOKENS);
        let base = number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
        y[base + at.row * comptime!(CHUNK_TOKENS / CHUNK) + at.chunk] =
            rounded(&arena, &at, INVERSE);
    }
}

/// A chunk of a matrix, rounded to bf16.
#[cube]
pub fn rounded(arena: &SharedMemory<f32>, at: &Own, #[comptime] from: Place) -> Chunk {
    let first = comptime!(from.at / 4) + at.row * comptime!(from.row / 4) + at.chunk * 2;
    let quads = quads(arena);
    let mut rounded = Chunk::cast_from(0f32);
    #[unroll]
    for half in 0..2usize {
        let quad = quads[first + half];
        #[unroll]
        for i in 0..4usize {
            rounded[comptime!(half * 4 + i)] = bf16::cast_from(quad[i]);
        }
    }
    rounded
}

/// Zeros in place of the inverse.
#[cube]
pub fn clear_inverse(arena: &mut SharedMemory<f32>) {
    let mut at = UNIT_POS as usize;
    while at < comptime!(CHUNK_TOKENS * ROW) {
        arena[INVERSE.at + at] = 0f32;
        at += THREADS;
    }
}

/// (I + L)⁻¹ of the system L, in place of zeros. Synchronises before it returns; the caller does so before.
#[cube]
pub fn invert(arena: &mut SharedMemory<f32>) {
    // The blocks on the diagonal, a column for each thread.
    if UNIT_POS < comptime!(CHUNK_TOKENS as u32) {
        let (block, column) = (UNIT_POS as usize / TILE, UNIT_POS as usize % TILE);
        let from = SYSTEM.at + block * SYSTEM.next;
        let to = INVERSE.at + block * INVERSE.next + column;
        let mut x = Array::<f32>::new(TILE);
        #[unroll]
        for t in 0..TILE {
            let mut value = select(column == t, 1f32, 0f32);
            #[unroll]
            for s in 0..t {
                value -= arena[from + comptime!(t * ROW + s)] * x[s];
            }
            x[t] = value;
            arena[to + comptime!(t * ROW)] = value;
        }
    }
    sync_cube();

    // Pairs of blocks: below the diagonal, −Y₂ L Y₁.
    join(arena, TILE, 2usize);
    join(arena, HALF, 1usize);
}

/// Joins `pairs` pairs of neighbouring blocks of `size` tokens.
#[cube]
fn join(arena: &mut SharedMemory<f32>, #[comptime] size: usize, #[comptime] pairs: usize) {
    let below = comptime!(SYSTEM.cell(size, 0).step(2 * size, 2 * size));
    let first = comptime!(INVERSE.step(2 * size, 2 * size));
    let second = comptime!(INVERSE.cell(size, size).step(2 * size, 2 * size));
    let corner = comptime!(INVERSE.cell(size, 0).step(2 * size, 2 * size));
    let sizes = comptime!([size, size, size]);
    multiply(arena, comptime!(SplitProduct::ab([below, first, BETWEEN], sizes).batch(pairs)));
    sync_cube();
    let product = comptime!(SplitProduct::ab([second, BETWEEN, corner], sizes).batch(pairs));
    multiply(arena, comptime!(product.negative()));
    sync_cube();
}
