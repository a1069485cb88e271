//! The outputs, and the gradients of the values.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::memory::{ChunkOf, OutputElement, Sizes, TokensOf};
use super::super::{CHUNK_TOKENS, THREADS};
use super::DiagonalConfig;
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{CHUNK, Chunk, keep_loop, zeros};

/// What the kernels read, and their result.
#[derive(CubeType, CubeLaunch)]
pub struct OutputArrays<O: Numeric> {
    /// Q, `[batch, heads, tokens, head_dim]`; for the gradients K, `[batch, kv_heads, tokens, head_dim]`.
    pub vectors: HeadChunks,
    /// C, `[rows, group, chunks, 64, 64]`.
    pub scores: Array<Chunk>,
    /// v, `[batch, kv_heads, tokens, value_dim]`; for the gradients do, `[batch, heads, tokens, value_dim]`.
    pub values: HeadChunks,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`; the gradients of those after them.
    pub states: Array<Chunk>,
    /// `[batch, heads, tokens, value_dim]`; `[batch, kv_heads, tokens, value_dim]`.
    pub result: HeadPairs<O>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    vectors: Matrix,
    scores: Matrix,
    values: Matrix,
    state: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let vectors = Matrix::new(0, d);
        let scores = Matrix::new(vectors.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let values = Matrix::new(scores.end(CHUNK_TOKENS), n);
        let state = Matrix::new(values.end(CHUNK_TOKENS), n);
        Layout { vectors, scores, values, state, chunks: state.end(d) }
    }
}

/// o = Q S + C V.
///
/// Grid: the chunks of all query heads of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_output<O: OutputElement>(
    arrays: &mut OutputArrays<O>,
    sizes: Sizes,
    #[comptime] config: DiagonalConfig,
) {
    blocks_per_multiprocessor(comptime!("diagonal_output".to_string()), THREADS, 2usize);
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let (head, chunk) = (CUBE_POS_X as usize / chunks, CUBE_POS_X as usize % chunks);
    let of = ChunkOf::new(head / group, chunk, &sizes);
    let head = head % group;

    let queries = of.queries(head, &arrays.vectors.strides, &sizes);
    queries.start_load(&mut arena, &arrays.vectors, 0usize, layout.vectors, d);
    load_scores(&mut arena, &arrays.scores, CUBE_POS_X as usize, layout);
    let parts = comptime!(config.parts());
    let values = of.tokens(&arrays.values.strides);
    let results = of.queries(head, &arrays.result.strides, &sizes);
    keep_loop();
    for part in 0..parts {
        load_part(&mut arena, arrays, &of, &values, part, layout, config);
        finish_loads();
        let from_state = comptime!(Product::ab(layout.vectors, layout.state, [CHUNK_TOKENS, n, d]));
        let from_chunk =
            comptime!(Product::ab(layout.scores, layout.values, [CHUNK_TOKENS, n, CHUNK_TOKENS]));
        let tile = WarpTile::new(from_chunk);
        if tile.exists {
            let mut acc = zeros(comptime!(from_state.fragments()));
            add_product(&arena, &mut acc, &tile, from_state);
            add_product(&arena, &mut acc, &tile, from_chunk);
            let first = part * comptime!(n / CHUNK);
            results.write(&mut arrays.result, &acc, &tile, first, from_chunk);
        }
        sync_cube();
    }
}

/// dv = Σ Cᵀ do over the query heads + K dS.
///
/// Grid: the chunks of all rows · parts, the parts of a chunk after one another; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_values(
    arrays: &mut OutputArrays<bf16>,
    sizes: Sizes,
    #[comptime] config: DiagonalConfig,
) {
    blocks_per_multiprocessor(comptime!("diagonal_values".to_string()), THREADS, 2usize);
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let parts = comptime!(config.parts());
    let (number, part) = (CUBE_POS_X as usize / parts, CUBE_POS_X as usize % parts);
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);

    let keys = of.tokens(&arrays.vectors.strides);
    keys.start_load(&mut arena, &arrays.vectors, 0usize, layout.vectors, d);
    let from_state = comptime!(Product::ab(layout.vectors, layout.state, [CHUNK_TOKENS, n, d]));
    let from_chunk =
        comptime!(Product::atb(layout.scores, layout.values, [CHUNK_TOKENS, n, CHUNK_TOKENS]));
    let tile = WarpTile::new(from_chunk);
    let mut acc = zeros(comptime!(from_chunk.fragments()));
    keep_loop();
    for head in 0..group {
        let upstream = of.queries(head, &arrays.values.strides, &sizes);
        load_part(&mut arena, arrays, &of, &upstream, part, layout, config);
        let scores = (of.row * group + head) * chunks + of.chunk;
        load_scores(&mut arena, &arrays.scores, scores, layout);
        finish_loads();
        if tile.exists {
            if head == 0 {
                add_product(&arena, &mut acc, &tile, from_state);
            }
            add_product(&arena, &mut acc, &tile, from_chunk);
        }
        sync_cube();
    }
    if tile.exists {
        let (to, first) = (&mut arrays.result, part * comptime!(n / CHUNK));
        of.tokens(&to.strides).write(to, &acc, &tile, first, from_chunk);
    }
}

#[cube]
fn load_scores(
    arena: &mut SharedMemory<Chunk>,
    scores: &Array<Chunk>,
    number: usize,
    #[comptime] layout: Layout,
) {
    let stride = comptime!(CHUNK_TOKENS / CHUNK);
    let base = number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
    let all = CHUNK_TOKENS.runtime();
    start_load(arena, scores, base, stride, all, layout.scores, CHUNK_TOKENS, CHUNK_TOKENS);
}

/// Reads a part of the values of these tokens, and of the state.
#[cube]
fn load_part<O: Numeric>(
    arena: &mut SharedMemory<Chunk>,
    arrays: &OutputArrays<O>,
    of: &ChunkOf,
    values: &TokensOf,
    part: usize,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n) = comptime!((config.head_dim, config.columns));
    let of_v = comptime!(config.value_dim / CHUNK);
    let first = part * comptime!(n / CHUNK);
    values.start_load(arena, &arrays.values, first, layout.values, n);
    let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
    start_load(arena, &arrays.states, base, of_v, d.runtime(), layout.state, d, n);
}
