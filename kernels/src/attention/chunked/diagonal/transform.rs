//! What a chunk does to the state, whatever the values are (`docs/chunked.md`, "A decay per channel").

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::CHUNK_TOKENS;
use super::super::memory::{ChunkOf, Sizes};
use super::levels::{
    Operands, Role, load_sums, load_weights, row_of_sums, scale_rows_by, sums_len,
};
use super::scores::{Target, scores, store_scores};
use super::{DiagonalConfig, DiagonalInputs};
use crate::attention::flash::HeadPairs;
use crate::tile::inverse::{ELEMENTS, INVERSE, ROW, SYSTEM, clear_inverse, invert, rounded};
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product, read_pair, write, write_rows};
use crate::tile::product::{Place, Product as SplitProduct, multiply};
use crate::tile::rows::{Own, rounds};
use crate::tile::{Bf16Pair, CHUNK, Chunk, define_exp2, exp2, scale, zeros};

/// What the kernel writes.
#[derive(CubeType, CubeLaunch)]
pub struct TransformArrays {
    /// K, the keys of the values, `[batch, kv_heads, tokens, head_dim]`.
    pub keys: HeadPairs<bf16>,
    /// The decay of the state over the chunk, `[rows, chunks, head_dim]`.
    pub decay: Array<f32>,
    /// G, `[rows, chunks, head_dim, head_dim]`, if there are corrections.
    pub change: Array<Bf16Pair>,
    /// T, `[rows, chunks, 64, 64]`, likewise.
    pub transfer: Array<Chunk>,
    /// W, `[rows, chunks, 64, head_dim]`, likewise.
    pub reads: Array<Bf16Pair>,
    /// Y, `[rows, chunks, 64, 64]`, likewise.
    pub inverse: Array<Chunk>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    operands: Operands,
    /// The corrections, decayed to the chunk's end.
    correction: Matrix,
    /// T and Y, once the levels are done.
    transfer: Matrix,
    inverse: Matrix,
    /// W.
    reads: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let d = config.head_dim;
        let removal = Matrix::new(0, d);
        let apart = config.writers() == 2;
        let correction = if apart { Matrix::new(removal.end(CHUNK_TOKENS), d) } else { removal };
        let key = if apart { Matrix::new(correction.end(CHUNK_TOKENS), d) } else { correction };
        let x = Matrix::new(key.end(CHUNK_TOKENS), d);
        let w = Matrix::new(x.end(CHUNK_TOKENS), d);
        let y = Matrix::new(w.end(CHUNK_TOKENS), d);
        let operands = Operands { reader: removal, correction, key, x, y, w };
        // Where the removal keys are the corrections, these need a place of their own when both are decayed.
        let decayed = if apart { correction } else { x };
        let free = if apart { x } else { w };
        let transfer = Matrix::new(free.at, CHUNK_TOKENS);
        let inverse = Matrix::new(transfer.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let reads = Matrix::new(inverse.end(CHUNK_TOKENS), d);
        let end = if apart { y.end(CHUNK_TOKENS) } else { w.end(CHUNK_TOKENS) };
        let last = if config.corrects() { reads.end(CHUNK_TOKENS) } else { end };
        let chunks = if last > end { last } else { end };
        Layout { operands, correction: decayed, transfer, inverse, reads, chunks }
    }
}

/// The scores of removal keys with keys.
const OF_KEYS: Place = Place { at: ELEMENTS, row: ROW, next: 0 };

/// Elements of the arena of numbers.
const fn numbers(config: &DiagonalConfig) -> usize {
    let sums = sums_len(config.head_dim);
    let matrices = match config.writers() {
        2 => ELEMENTS + CHUNK_TOKENS * ROW,
        _ => ELEMENTS,
    };
    if !config.corrects() || sums > matrices { sums } else { matrices }
}

/// K, the decay, and with corrections G, T and W.
///
/// Grid: the chunks of all rows; [`THREADS`](super::super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_transform(
    inputs: &DiagonalInputs,
    arrays: &mut TransformArrays,
    sizes: Sizes,
    #[comptime] config: DiagonalConfig,
) {
    define_exp2();
    let d = comptime!(config.head_dim);
    let layout = comptime!(Layout::new(&config));
    let o = comptime!(layout.operands);
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut numbers = SharedMemory::<f32>::new_aligned(comptime!(numbers(&config)), 16usize);
    let mut weights = SharedMemory::<f32>::new(CHUNK_TOKENS);
    let chunks = sizes.chunks as usize;
    let number = CUBE_POS_X as usize;
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);

    let (removal, correction) = (&inputs.removal, &inputs.correction);
    of.tokens(&correction.strides).start_load(&mut arena, correction, 0usize, o.correction, d);
    if comptime!(config.writers() == 2) {
        of.tokens(&removal.strides).start_load(&mut arena, removal, 0usize, o.reader, d);
        of.tokens(&inputs.key.strides).start_load(&mut arena, &inputs.key, 0usize, o.key, d);
    }
    load_weights(&mut weights, &inputs.beta, &of, config);
    load_sums(&mut numbers, &inputs.log_decay, &of, d);
    let end = comptime!(CHUNK_TOKENS * row_of_sums(d));
    if UNIT_POS < comptime!(d as u32) {
        let channel = UNIT_POS as usize;
        arrays.decay[number * d + channel] = exp2(numbers[end + channel]);
    }
    if comptime!(config.corrects()) {
        let after = comptime!(config.reads_after());
        let pairs = scores(&mut arena, &numbers, &weights, after.runtime(), false, o, config);
        decay_vectors(&mut arena, &numbers, &weights, layout, config);
        sync_cube();
        store_scores(&mut arena, &mut numbers, &pairs, 0usize, comptime!(Target::Exact(SYSTEM)));
        if comptime!(config.writers() == 2) {
            let to = comptime!(Target::Exact(OF_KEYS));
            store_scores(&mut arena, &mut numbers, &pairs, 1usize, to);
        }
        clear_inverse(&mut numbers);
        sync_cube();
        invert(&mut numbers);
        let transfer = comptime!(if config.writers() == 2 { SYSTEM } else { INVERSE });
        if comptime!(config.writers() == 2) {
            let square = comptime!([CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS]);
            let product = comptime!(SplitProduct::ab([INVERSE, OF_KEYS, SYSTEM], square));
            multiply(&mut numbers, comptime!(product.negative()));
            sync_cube();
        }
        round(&mut arena, &numbers, &mut arrays.transfer, number, transfer, layout.transfer);
        round(&mut arena, &numbers, &mut arrays.inverse, number, INVERSE, layout.inverse);
        sync_cube();
        change(&mut arena, arrays, &of, layout, config);
    } else {
        decay_vectors(&mut arena, &numbers, &weights, layout, config);
        sync_cube();
        let all =
            comptime!(Product::ab(layout.correction, layout.correction, [CHUNK_TOKENS, d, 16]));
        let tile = WarpTile::new(all);
        if tile.exists {
            let mut acc = zeros(comptime!(all.fragments()));
            add_matrix(&arena, &mut acc, &tile, layout.correction, all);
            of.tokens(&arrays.keys.strides).write(&mut arrays.keys, &acc, &tile, 0usize, all);
        }
    }
}

/// Decays the vectors: removal keys from the chunk's start, the others to its end.
#[cube]
fn decay_vectors(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    let o = comptime!(layout.operands);
    // Each thread has its elements to itself.
    let (to, after) = comptime!((layout.correction, config.reads_after()));
    let corrects = comptime!(config.corrects_by());
    let after = after.runtime();
    scale_rows_by(arena, sums, weights, after, corrects, CHUNK_TOKENS, o.correction, to, d);
    if comptime!(config.corrects()) {
        scale_rows_by(arena, sums, weights, after, Role::Reads, 0usize, o.reader, o.reader, d);
    }
    if comptime!(config.writers() == 2) {
        scale_rows_by(arena, sums, weights, after, Role::Writes, CHUNK_TOKENS, o.key, o.key, d);
    }
}

/// Adds a matrix in shared memory to an accumulator.
#[cube]
pub fn add_matrix(
    arena: &SharedMemory<Chunk>,
    acc: &mut crate::tile::Accumulator,
    tile: &WarpTile,
    #[comptime] matrix: Matrix,
    #[comptime] p: Product,
) {
    #[unroll]
    for f in 0..comptime!(p.fragments()) {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            fragment[r] = fragment[r] + read_pair(arena, tile.row(r), tile.column(f), matrix);
        }
    }
}

/// Rounds a matrix of all tokens to bf16, in shared and in global memory.
#[cube]
fn round(
    arena: &mut SharedMemory<Chunk>,
    numbers: &SharedMemory<f32>,
    target: &mut Array<Chunk>,
    number: usize,
    #[comptime] from: Place,
    #[comptime] to: Matrix,
) {
    #[unroll]
    for round in 0..comptime!(rounds(CHUNK_TOKENS, CHUNK_TOKENS)) {
        let at = Own::new(round, CHUNK_TOKENS, CHUNK_TOKENS);
        let rounded = rounded(numbers, &at, from);
        arena[to.at + at.row * to.row + at.chunk] = rounded;
        let base = number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
        target[base + at.row * comptime!(CHUNK_TOKENS / CHUNK) + at.chunk] = rounded;
    }
}

/// W = Y Z, K = K + Tᵀ B and G = −Bᵀ W of the decayed vectors.
#[cube]
fn change(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut TransformArrays,
    of: &ChunkOf,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    let (o, pairs) = comptime!((layout.operands, d / 2));
    let vectors = comptime!([CHUNK_TOKENS, d, CHUNK_TOKENS]);
    let reads = comptime!(Product::ab(layout.inverse, o.reader, vectors));
    let tile = WarpTile::new(reads);
    if tile.exists {
        let mut acc = zeros(comptime!(reads.fragments()));
        add_product(arena, &mut acc, &tile, reads);
        write(arena, &acc, &tile, layout.reads, reads);
        let base = of.number * comptime!(CHUNK_TOKENS * pairs);
        write_rows(&mut arrays.reads, &acc, &tile, base, pairs, CHUNK_TOKENS.runtime(), reads);
        let keys = comptime!(Product::atb(layout.transfer, layout.correction, vectors));
        let mut acc = zeros(comptime!(keys.fragments()));
        if comptime!(config.writers() == 2) {
            add_matrix(arena, &mut acc, &tile, o.key, keys);
        }
        add_product(arena, &mut acc, &tile, keys);
        of.tokens(&arrays.keys.strides).write(&mut arrays.keys, &acc, &tile, 0usize, keys);
    }
    sync_cube();
    let change = comptime!(Product::atb(layout.correction, layout.reads, [d, d, CHUNK_TOKENS]));
    let tile = WarpTile::new(change);
    if tile.exists {
        let mut acc = zeros(comptime!(change.fragments()));
        add_product(arena, &mut acc, &tile, change);
        scale(&mut acc, -1f32);
        let base = of.number * comptime!(d * pairs);
        write_rows(&mut arrays.change, &acc, &tile, base, pairs, d.runtime(), change);
    }
}
