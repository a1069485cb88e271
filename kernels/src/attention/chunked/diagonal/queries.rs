//! What a chunk's queries read of the state and of the chunk's values.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::CHUNK_TOKENS;
use super::super::memory::{ChunkOf, Sizes};
use super::levels::{Operands, Role, load_sums, load_weights, scale_rows_by, sums_len};
use super::scores::{Target, scores, store_scores};
use super::transform::add_matrix;
use super::{DiagonalConfig, DiagonalInputs};
use crate::attention::flash::HeadPairs;
use crate::tile::inverse::ROW;
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product, write_rows};
use crate::tile::product::Place;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{Accumulator, Bf16Pair, CHUNK, Chunk, Pair, define_exp2, scale, zeros};

/// What the kernel reads beside [`DiagonalInputs`], and its results.
#[derive(CubeType, CubeLaunch)]
pub struct QueryArrays {
    /// T, `[rows, chunks, 64, 64]`, if there are corrections.
    pub transfer: Array<Chunk>,
    /// W, `[rows, chunks, 64, head_dim]`, likewise.
    pub reads: Array<Chunk>,
    /// Q, the queries of the state, `[batch, heads, tokens, head_dim]`.
    pub queries: HeadPairs<bf16>,
    /// C, the scores of the chunk's values, `[rows, group, chunks, 64, 64]`.
    pub scores: Array<Bf16Pair>,
    /// D, the scores of the chunk's corrections, likewise, if there are any.
    pub of_corrections: Array<Bf16Pair>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    operands: Operands,
    /// In place of the other vectors, once the levels are done.
    scores: Matrix,
    transfer: Matrix,
    reads: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let d = config.head_dim;
        let query = Matrix::new(0, d);
        let correction = Matrix::new(query.end(CHUNK_TOKENS), d);
        let key = Matrix::new(correction.end(CHUNK_TOKENS), d);
        let two = config.writers() == 2;
        let x = if two { Matrix::new(key.end(CHUNK_TOKENS), d) } else { key };
        let w = Matrix::new(x.end(CHUNK_TOKENS), d);
        let y = Matrix::new(w.end(CHUNK_TOKENS), d);
        let scores = Matrix::new(correction.at, CHUNK_TOKENS);
        let transfer = Matrix::new(scores.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let reads = Matrix::new(transfer.end(CHUNK_TOKENS), d);
        let end = if two { y.end(CHUNK_TOKENS) } else { w.end(CHUNK_TOKENS) };
        let last = if config.corrects() { reads } else { scores }.end(CHUNK_TOKENS);
        let chunks = if last > end { last } else { end };
        let operands = Operands { reader: query, correction, key, x, y, w };
        Layout { operands, scores, transfer, reads, chunks }
    }
}

/// The scores with keys, in place of the sums.
const OF_KEYS: Place = Place { at: 0, row: ROW, next: 0 };

const fn numbers(config: &DiagonalConfig) -> usize {
    let (sums, scores) = (sums_len(config.head_dim), CHUNK_TOKENS * ROW);
    if sums > scores { sums } else { scores }
}

/// Q and C.
///
/// Grid: the chunks of all query heads of all rows; [`THREADS`](super::super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_queries(
    inputs: &DiagonalInputs,
    arrays: &mut QueryArrays,
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
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let (head, chunk) = (CUBE_POS_X as usize / chunks, CUBE_POS_X as usize % chunks);
    let of = ChunkOf::new(head / group, chunk, &sizes);
    let head = head % group;

    let queries = of.queries(head, &inputs.q.strides, &sizes);
    queries.start_load(&mut arena, &inputs.q, 0usize, o.reader, d);
    let correction = &inputs.correction;
    of.tokens(&correction.strides).start_load(&mut arena, correction, 0usize, o.correction, d);
    if comptime!(config.writers() == 2) {
        of.tokens(&inputs.key.strides).start_load(&mut arena, &inputs.key, 0usize, o.key, d);
    }
    load_weights(&mut weights, &inputs.beta, &of, config);
    load_sums(&mut numbers, &inputs.log_decay, &of, d);
    let pairs = scores(&mut arena, &numbers, &weights, 1usize.runtime(), true, o, config);
    scale_rows_by(
        &mut arena,
        &numbers,
        &weights,
        1usize.runtime(),
        Role::Reads,
        0usize,
        o.reader,
        o.reader,
        d,
    );
    sync_cube();
    store_scores(
        &mut arena,
        &mut numbers,
        &pairs,
        0usize,
        comptime!(Target::Rounded(layout.scores)),
    );
    if comptime!(config.writers() == 2) {
        store_scores(&mut arena, &mut numbers, &pairs, 1usize, comptime!(Target::Exact(OF_KEYS)));
    }
    if comptime!(config.corrects()) {
        let base = of.number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
        let (all, of_scores) = comptime!((CHUNK_TOKENS, CHUNK_TOKENS / CHUNK));
        start_load(
            &mut arena,
            &arrays.transfer,
            base,
            of_scores,
            all.runtime(),
            layout.transfer,
            all,
            all,
        );
        let base = of.number * comptime!(CHUNK_TOKENS * d / CHUNK);
        let stride = comptime!(d / CHUNK);
        start_load(&mut arena, &arrays.reads, base, stride, all.runtime(), layout.reads, all, d);
    }
    finish_loads();

    let by_values = comptime!(Product::ab(layout.scores, layout.transfer, [CHUNK_TOKENS; 3]));
    let tile = WarpTile::new(by_values);
    let mut acc = zeros(comptime!(by_values.fragments()));
    let (base, row, count) = (
        CUBE_POS_X as usize * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / 2),
        comptime!(CHUNK_TOKENS / 2),
        CHUNK_TOKENS.runtime(),
    );
    if comptime!(config.corrects()) {
        let mut of_corrections = zeros(comptime!(by_values.fragments()));
        add_matrix(&arena, &mut of_corrections, &tile, layout.scores, by_values);
        write_rows(&mut arrays.of_corrections, &of_corrections, &tile, base, row, count, by_values);
        if comptime!(config.writers() == 2) {
            add_numbers(&numbers, &mut acc, &tile, by_values);
        }
        add_product(&arena, &mut acc, &tile, by_values);
    } else {
        add_matrix(&arena, &mut acc, &tile, layout.scores, by_values);
    }
    write_rows(&mut arrays.scores, &acc, &tile, base, row, count, by_values);

    let from_state =
        comptime!(Product::ab(layout.scores, layout.reads, [CHUNK_TOKENS, d, CHUNK_TOKENS]));
    let tile = WarpTile::new(from_state);
    if tile.exists {
        let mut acc = zeros(comptime!(from_state.fragments()));
        if comptime!(config.corrects()) {
            add_product(&arena, &mut acc, &tile, from_state);
            scale(&mut acc, -1f32);
        }
        add_matrix(&arena, &mut acc, &tile, o.reader, from_state);
        let queries = of.queries(head, &arrays.queries.strides, &sizes);
        queries.write(&mut arrays.queries, &acc, &tile, 0usize, from_state);
    }
}

/// Adds the scores with keys.
#[cube]
fn add_numbers(
    numbers: &SharedMemory<f32>,
    acc: &mut Accumulator,
    tile: &WarpTile,
    #[comptime] p: Product,
) {
    #[unroll]
    for f in 0..comptime!(p.fragments()) {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            let at = OF_KEYS.at + tile.row(r) * OF_KEYS.row + tile.column(f);
            let mut value = Pair::empty();
            value[0] = numbers[at];
            value[1] = numbers[at + 1];
            fragment[r] = fragment[r] + value;
        }
    }
}
