//! The inverse G = (I + diag(β) A)⁻¹ of each block, A = W Wᵀ below the diagonal.

use cubecl::prelude::*;

use super::layout::{BLOCK, BlockConfig};
use super::memory::{
    BlockInputs, BlockOf, BlockShape, Numbers, SQUARE_CHUNKS, load_directions, split,
};
use super::product::{Product, WarpTile, product, sync};
use crate::tile::inverse::{ELEMENTS, INVERSE, ROW, SYSTEM, clear_inverse, invert};
use crate::tile::product::quads;
use crate::tile::rows::{Own, rounds};
use crate::tile::{ALIGN, Chunk};

/// Writes `[blocks, 2, 64, 64]`: each inverse rounded, and the rest rounded.
///
/// Grid: all blocks; [`THREADS`](super::THREADS) threads.
#[cube(launch_unchecked)]
pub fn inverses(
    inputs: &BlockInputs,
    output: &mut Array<Chunk>,
    shape: BlockShape,
    #[comptime] config: BlockConfig,
) {
    let w = comptime!(config.w());
    let mut tiles = SharedMemory::<Chunk>::new_aligned(comptime!(config.k().high.at), ALIGN);
    let mut arena = SharedMemory::<f32>::new_aligned(ELEMENTS, 16usize);
    let mut numbers = Numbers::new();
    let of = BlockOf::own(&shape);
    load_directions(&mut tiles, inputs, &of, false, config);
    numbers.load_beta(inputs, &of);
    clear_inverse(&mut arena);
    sync();
    let p = comptime!(Product::abt(w, w, config.over_channels()));
    let tile = WarpTile::new(p);
    let acc = product(&tiles, p);
    #[unroll]
    for r in 0..2usize {
        let t = tile.row(r);
        let beta = numbers.beta[t];
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let value = acc.index(f)[r];
            #[unroll]
            for c in 0..2usize {
                let s = tile.column(f) + c;
                arena[SYSTEM.at + t * ROW + s] = select(s < t, value[c] * beta, 0f32);
            }
        }
    }
    sync_cube();
    invert(&mut arena);
    let base = CUBE_POS_X as usize * comptime!(2 * BLOCK * SQUARE_CHUNKS);
    let quads = quads(&arena);
    #[unroll]
    for round in 0..comptime!(rounds(BLOCK, BLOCK)) {
        let at = Own::new(round, BLOCK, BLOCK);
        let from = comptime!(INVERSE.at / 4) + at.row * comptime!(ROW / 4) + at.chunk * 2;
        let (high, low) = split(quads[from], quads[from + 1], 1f32);
        let to = base + at.row * SQUARE_CHUNKS + at.chunk;
        output[to] = high;
        output[to + comptime!(BLOCK * SQUARE_CHUNKS)] = low;
    }
}
