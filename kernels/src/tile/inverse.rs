//! The inverse of I + L, where L has 64 rows and is 0 on and above the diagonal: blocks of 16 rows by substitution in
//! f32, pairs of blocks by products that keep about 16 bits.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::Chunk;
use super::product::{Place, Product, THREADS, multiply, quads};
use super::rows::Own;

/// Rows and columns.
pub const SIZE: usize = 64;

/// Rows that are substituted one by one.
const TILE: usize = 16;

/// Half of the rows.
const HALF: usize = 2 * TILE;

/// Elements of a row, padded to an odd number of quads.
pub const ROW: usize = SIZE + 4;

const fn square(number: usize) -> Place {
    Place { at: number * SIZE * ROW, row: ROW, next: TILE * ROW + TILE }
}

/// L.
pub const SYSTEM: Place = square(0);

/// The inverse.
pub const INVERSE: Place = square(1);

/// A product between blocks.
const BETWEEN: Place = Place { at: 2 * SIZE * ROW, row: HALF + 4, next: TILE * (HALF + 4) };

/// Elements of the arena.
pub const ELEMENTS: usize = BETWEEN.at + HALF * BETWEEN.row;

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
    while at < comptime!(SIZE * ROW) {
        arena[INVERSE.at + at] = 0f32;
        at += THREADS;
    }
}

/// (I + L)⁻¹ of the system L, in place of zeros. Synchronises before it returns; the caller does so before.
#[cube]
pub fn invert(arena: &mut SharedMemory<f32>) {
    // The blocks on the diagonal, a column for each thread.
    if UNIT_POS < comptime!(SIZE as u32) {
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
    multiply(arena, comptime!(Product::ab([below, first, BETWEEN], sizes).batch(pairs)));
    sync_cube();
    let product = comptime!(Product::ab([second, BETWEEN, corner], sizes).batch(pairs));
    multiply(arena, comptime!(product.negative()));
    sync_cube();
}
