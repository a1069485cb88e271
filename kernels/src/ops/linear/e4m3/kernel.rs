//! The kernels that round a matrix to e4m3.

use cubecl::prelude::*;

use super::Of;
use crate::ops::activation::kernel::{Function, value};
use crate::tile::e4m3::four_e4m3;
use crate::tile::{CHUNK, Chunk};

/// Most blocks of [`largest`]; so many maxima, [`round_matrix`] reads them with one load per thread.
pub const MOST_PARTS: usize = 256;

/// Threads per block of [`largest`]: so many blocks fill a GPU.
pub const LARGEST_THREADS: usize = 1024;

/// Threads per block of [`round_matrix`].
pub const THREADS: usize = 256;

/// Rows per block of [`round_matrix`].
pub const TILE_ROWS: usize = 128;

/// Columns per block of [`round_matrix`].
pub const TILE_COLUMNS: usize = 64;

/// Numbers per word.
const WORD: usize = 4;

/// A chunk in e4m3.
type TwoWords = Vector<u32, Const<2>>;

/// Chunks per row of a block.
const TILE_CHUNKS: usize = TILE_COLUMNS / CHUNK;

/// Words per column of a block in shared memory, one of them unused: it shifts columns to other banks.
const COLUMN_WORDS: usize = TILE_ROWS / WORD + 1;

/// The bits of an f32 without the sign; they order magnitudes, with infinity and then NaN above all numbers.
#[cube]
fn magnitude(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7fff_ffffu32
}

/// A chunk's elements in f32, or their GELU.
#[cube]
fn numbers(chunk: Chunk, #[comptime] of: Of) -> Vector<f32, Const<CHUNK>> {
    let x = Vector::<f32, Const<CHUNK>>::cast_from(chunk);
    let mut y = x;
    if comptime!(of == Of::Gelu) {
        #[unroll]
        for i in 0..CHUNK {
            y[i] = value(x[i], Function::Gelu);
        }
    }
    y
}

/// The largest of the block's values. `scratch` has an element for each of the `warps` warps.
#[cube]
fn largest_of_block(own: u32, scratch: &mut SharedMemory<u32>, #[comptime] warps: usize) -> u32 {
    let of_warp = plane_max(own);
    if UNIT_POS % 32 == 0 {
        scratch[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    plane_max(scratch[UNIT_POS as usize % warps])
}

/// The largest [`magnitude`] of each block's chunks, or of their GELU.
///
/// - `x`: `[chunks]`
/// - `parts`: `[blocks]`
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn largest(x: &Array<Chunk>, parts: &mut Array<u32>, chunks: u32, #[comptime] of: Of) {
    let stride = (CUBE_COUNT_X * CUBE_DIM) as usize;
    let end = chunks as usize;
    let mut own = 0u32;
    let mut at = ABSOLUTE_POS;
    while at < end {
        let x = numbers(x[at], of);
        #[unroll]
        for i in 0..CHUNK {
            own = max(own, magnitude(x[i]));
        }
        at += stride;
    }
    let mut scratch = SharedMemory::<u32>::new(comptime!(LARGEST_THREADS / 32));
    let of_block = largest_of_block(own, &mut scratch, comptime!(LARGEST_THREADS / 32));
    if UNIT_POS == 0 {
        parts[CUBE_POS_X as usize] = of_block;
    }
}

/// log₂ of the scale plus 127: of the smallest power of two whose 448-fold, 1.75 · 2⁸ times it, is at least
/// the largest magnitude. At least 2⁻¹⁰⁰, so that the scale and its inverse are normal numbers.
#[cube]
fn scale_exponent(largest: u32) -> u32 {
    // 1.75 has the mantissa 0x600000. Adding the rest of the mantissa's range carries into the exponent.
    let exponent = (largest + 0x1f_ffffu32) >> 23u32;
    let mut biased = 27u32;
    if exponent > 35u32 {
        biased = exponent - 8u32;
    }
    biased
}

/// Rounds the matrix x, or its GELU, to e4m3 after division by a scale, the same for all elements. Each
/// thread rounds four rows of a chunk.
///
/// The scale is a power of two, so that dividing and multiplying by it are exact. If x has a NaN or an
/// infinity, all results are NaN.
///
/// Grid: column tiles, then row tiles.
///
/// - `x`: `[rows, columns / 8]`
/// - `parts`: `[part_count]`, from [`largest`]; at most [`MOST_PARTS`]
/// - `by_rows`: `[rows, columns / 8]`, four columns per word
/// - `by_columns`: the transpose, `[columns, rows / 4]`, four rows per word
/// - `scale`: `[1]`
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn round_matrix(
    x: &Array<Chunk>,
    parts: &Array<u32>,
    by_rows: &mut ComptimeOption<Array<TwoWords>>,
    by_columns: &mut ComptimeOption<Array<u32>>,
    scale: &mut Array<f32>,
    part_count: u32,
    rows: u32,
    columns: u32,
    #[comptime] of: Of,
    #[comptime] in_rows: bool,
    #[comptime] in_columns: bool,
) {
    let mut scratch = SharedMemory::<u32>::new(comptime!(THREADS / 32));
    let mut own = 0u32;
    if UNIT_POS < part_count {
        own = parts[UNIT_POS as usize];
    }
    let largest = largest_of_block(own, &mut scratch, comptime!(THREADS / 32));
    let exponent = scale_exponent(largest);
    let mut bits = exponent << 23u32;
    let mut inverse_bits = (254u32 - exponent) << 23u32;
    if largest >= 0x7f80_0000u32 {
        bits = u32::cast_from(0x7fc0_0000u32); // NaN.
        inverse_bits = bits;
    }
    let inverse = f32::reinterpret(inverse_bits);
    if CUBE_POS_X == 0 && CUBE_POS_Y == 0 && UNIT_POS == 0 {
        scale[0] = f32::reinterpret(bits);
    }

    let (rows, columns) = (rows as usize, columns as usize);
    let first_row = CUBE_POS_Y as usize * TILE_ROWS;
    let first_column = CUBE_POS_X as usize * TILE_COLUMNS;
    let thread = UNIT_POS as usize;
    let (own_chunk, own_rows) = (thread % TILE_CHUNKS, thread / TILE_CHUNKS);
    let row = first_row + own_rows * WORD;
    let column = first_column + own_chunk * CHUNK;
    let mut tile = SharedMemory::<u32>::new(comptime!(TILE_COLUMNS * COLUMN_WORDS));
    if row < rows && column < columns {
        let mut four = Array::<Vector<f32, Const<CHUNK>>>::new(4usize);
        #[unroll]
        for i in 0..WORD {
            let chunk = x[(row + i) * (columns / CHUNK) + column / CHUNK];
            four[i] = numbers(chunk, of) * Vector::cast_from(inverse);
        }
        if comptime!(in_rows) {
            #[unroll]
            for i in 0..WORD {
                let x = four[i];
                let mut words = TwoWords::empty();
                words[0] = four_e4m3(x[0], x[1], x[2], x[3]);
                words[1] = four_e4m3(x[4], x[5], x[6], x[7]);
                let to = (row + i) * (columns / CHUNK) + column / CHUNK;
                by_rows.as_mut().unwrap()[to] = words;
            }
        }
        if comptime!(in_columns) {
            #[unroll]
            for c in 0..CHUNK {
                let word = four_e4m3(four[0][c], four[1][c], four[2][c], four[3][c]);
                tile[(own_chunk * CHUNK + c) * COLUMN_WORDS + own_rows] = word;
            }
        }
    }
    if comptime!(in_columns) {
        sync_cube();
        // A warp writes columns of the tile.
        let word = thread % 32;
        #[unroll]
        for i in 0..comptime!(TILE_COLUMNS * 32 / THREADS) {
            let in_tile = thread / 32 + i * comptime!(THREADS / 32);
            let column = first_column + in_tile;
            if column < columns && first_row + word * WORD < rows {
                let to = column * (rows / WORD) + first_row / WORD + word;
                by_columns.as_mut().unwrap()[to] = tile[in_tile * COLUMN_WORDS + word];
            }
        }
    }
}
