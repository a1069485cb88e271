//! The transform Y = (I + A diag(β))⁻¹ of each chunk (`docs/chunked.md`, "The delta rule").

use cubecl::prelude::*;

use super::CHUNK_TOKENS;
use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, Sizes};
use crate::tile::inverse::{ELEMENTS, INVERSE, ROW, SYSTEM, clear_inverse, invert, rounded};
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product};
use crate::tile::rows::{Own, finish_loads, rounds};
use crate::tile::{CHUNK, Chunk, define_exp2, zeros};

/// Y of each chunk, rounded to bf16, `[rows, chunks, 64, 64]`. Blocks of 16 tokens are computed by substitution in f32,
/// and then joined in pairs by products that keep about 16 bits.
///
/// Grid: all chunks; [`THREADS`](super::THREADS) threads.
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
    of.tokens(&inputs.k.strides).start_load(&mut tiles, &inputs.k, 0usize, k, d);
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
