//! The forward scan: the state at the start of each chunk, and the corrected values.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::CHUNK_TOKENS;
use super::memory::{
    ChunkConfig, ChunkInputs, ChunkOf, EndStates, Factors, FactorsAhead, HandOver, Sizes,
};
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{
    Matrix, Product, WarpTile, add_product, pair, read_numbers, read_pair, write, write_numbers,
    write_pair,
};
use crate::tile::rows::{fetch_to, put, put_scaled, rounds, store};
use crate::tile::{CHUNK, Chunk, Pair, define_exp2, scale, zeros};

/// What the scan reads beside [`ChunkInputs`], and what it writes.
#[derive(CubeType, CubeLaunch)]
pub struct ScanArrays {
    /// `[batch, kv_heads, tokens, value_dim]`
    pub v: HeadChunks,
    /// Y, `[rows, chunks, 64, 64]`, for the delta rule.
    pub y: Array<Chunk>,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub states: Array<Chunk>,
    /// The corrected values without β, as v, for the delta rule.
    pub e: HeadPairs<bf16>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    k: Matrix,
    /// v; what enters the state.
    w: Matrix,
    state: Matrix,
    y: Matrix,
    /// r.
    r: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &ChunkConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let k = Matrix::new(0, d);
        let w = Matrix::new(k.end(CHUNK_TOKENS), n);
        let state = Matrix::new(w.end(CHUNK_TOKENS), n);
        let y = Matrix::new(state.end(d), CHUNK_TOKENS);
        let r = Matrix::new(y.end(CHUNK_TOKENS), n);
        let chunks = if config.is_delta() { r.end(CHUNK_TOKENS) } else { y.at };
        Layout { k, w, state, y, r, chunks }
    }
}

/// The chunks of a row one after the other, for a part of the value's channels. The state is in registers in f32;
/// products read it rounded to bf16, as it is written.
///
/// Grid: rows · parts; [`THREADS`](super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn scan(
    inputs: &ChunkInputs,
    arrays: &mut ScanArrays,
    ends: &mut EndStates,
    sizes: Sizes,
    #[comptime] hand_over: HandOver,
    #[comptime] config: ChunkConfig,
) {
    define_exp2();
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut factors = Factors::new();
    let parts = comptime!(config.parts());
    let (row, part) = (CUBE_POS_X as usize / parts, CUBE_POS_X as usize % parts);
    let chunks = sizes.chunks as usize;
    let of_v = comptime!(config.value_dim / CHUNK);
    let first = part * comptime!(n / CHUNK);

    let into_state = comptime!(Product::atb(layout.k, layout.w, [d, n, CHUNK_TOKENS]));
    let own = WarpTile::new(into_state);
    let mut state = zeros(comptime!(into_state.fragments()));
    let pairs = comptime!(config.value_dim / 2);
    let of_state = row * comptime!(d * pairs) + part * comptime!(n / 2);
    if comptime!(hand_over.before) {
        if own.exists {
            read_numbers(&mut state, &ends.before, &own, of_state, pairs, into_state);
        }
    }

    let (of, all) = (ChunkOf::new(row, 0usize, &sizes), CHUNK_TOKENS.runtime());
    factors.load(inputs, &of, config);
    let k = of.tokens(&inputs.k.strides).fetch(&inputs.k, 0usize, d);
    let v = of.tokens(&arrays.v.strides).fetch(&arrays.v, first, n);
    sync_cube();
    put(&mut arena, &k, of.count, layout.k, CHUNK_TOKENS, d);
    if comptime!(config.is_delta()) {
        put(&mut arena, &v, of.count, layout.w, CHUNK_TOKENS, n);
        let mut y = Array::<Chunk>::new(comptime!(transform_chunks(&config)));
        fetch_transform(&mut y, &arrays.y, &of);
        put(&mut arena, &y, all, layout.y, CHUNK_TOKENS, CHUNK_TOKENS);
    } else {
        let (beta, until_end) = (&factors.beta, &factors.until_end);
        put_scaled(&mut arena, &v, of.count, beta, until_end, layout.w, CHUNK_TOKENS, n);
    }

    for chunk in 0..chunks {
        // 1. The state before the chunk; the next chunk's vectors start to load.
        let of = ChunkOf::new(row, chunk, &sizes);
        if own.exists {
            write(&mut arena, &state, &own, layout.state, into_state);
        }
        let next = ChunkOf::new(row, min(chunk + 1, chunks - 1), &sizes);
        let next_factors = FactorsAhead::fetch(inputs, &next, config);
        let next_k = next.tokens(&inputs.k.strides).fetch(&inputs.k, 0usize, d);
        let next_v = next.tokens(&arrays.v.strides).fetch(&arrays.v, first, n);
        let mut next_y = Array::<Chunk>::new(comptime!(transform_chunks(&config)));
        if comptime!(config.is_delta()) {
            fetch_transform(&mut next_y, &arrays.y, &next);
        }
        sync_cube();
        let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
        store(&arena, &mut arrays.states, base, of_v, d.runtime(), layout.state, d, n);

        // 2. What enters the state.
        if comptime!(config.is_delta()) {
            correct(&mut arena, &mut arrays.e, &factors, &of, first, layout, config);
            put(&mut arena, &next_y, all, layout.y, CHUNK_TOKENS, CHUNK_TOKENS);
        }

        // 3. The state after the chunk.
        if own.exists {
            scale(&mut state, factors.whole());
            add_product(&arena, &mut state, &own, into_state);
        }
        sync_cube();

        // 4. The next chunk.
        factors.put(&next_factors);
        put(&mut arena, &next_k, next.count, layout.k, CHUNK_TOKENS, d);
        if comptime!(config.is_delta()) {
            put(&mut arena, &next_v, next.count, layout.w, CHUNK_TOKENS, n);
        } else {
            sync_cube();
            let (beta, until_end) = (&factors.beta, &factors.until_end);
            put_scaled(&mut arena, &next_v, next.count, beta, until_end, layout.w, CHUNK_TOKENS, n);
        }
    }
    if comptime!(hand_over.after) {
        if own.exists {
            write_numbers(&mut ends.after, &state, &own, of_state, pairs, into_state);
        }
    }
}

/// A thread's chunks of Y.
const fn transform_chunks(config: &ChunkConfig) -> usize {
    if config.is_delta() { rounds(CHUNK_TOKENS, CHUNK_TOKENS) } else { 1 }
}

/// Starts to read a chunk's Y.
#[cube]
fn fetch_transform(own: &mut Array<Chunk>, y: &Array<Chunk>, of: &ChunkOf) {
    let stride = comptime!(CHUNK_TOKENS / CHUNK);
    let base = of.number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
    fetch_to(own, y, base, stride, CHUNK_TOKENS.runtime(), CHUNK_TOKENS, CHUNK_TOKENS);
}

/// The corrected values: e = Y (v − e^P k S), written to global memory; times β and decayed to the chunk's end in
/// place of v. Synchronises before it returns.
#[cube]
fn correct(
    arena: &mut SharedMemory<Chunk>,
    e: &mut HeadPairs<bf16>,
    factors: &Factors,
    of: &ChunkOf,
    first: usize,
    #[comptime] layout: Layout,
    #[comptime] config: ChunkConfig,
) {
    let (d, n) = comptime!((config.head_dim, config.columns));
    let reads = comptime!(Product::ab(layout.k, layout.state, [CHUNK_TOKENS, n, d]));
    let tile = WarpTile::new(reads);
    if tile.exists {
        let mut acc = zeros(comptime!(reads.fragments()));
        add_product(arena, &mut acc, &tile, reads);
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let decay = factors.since_start[row];
            #[unroll]
            for f in 0..comptime!(reads.fragments()) {
                let column = tile.column(f);
                let value = read_pair(arena, row, column, layout.w);
                let read = acc.index(f)[r] * Pair::cast_from(decay);
                write_pair(arena, value - read, row, column, layout.r);
            }
        }
    }
    sync_cube();
    let solve = comptime!(Product::ab(layout.y, layout.r, [CHUNK_TOKENS, n, CHUNK_TOKENS]));
    if tile.exists {
        let mut acc = zeros(comptime!(solve.fragments()));
        add_product(arena, &mut acc, &tile, solve);
        of.tokens(&e.strides).write(e, &acc, &tile, first, solve);
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let factor = factors.beta[row] * factors.until_end[row];
            #[unroll]
            for f in 0..comptime!(solve.fragments()) {
                let value = acc.index(f)[r];
                let value = pair(value[0] * factor, value[1] * factor);
                write_pair(arena, value, row, tile.column(f), layout.w);
            }
        }
    }
    sync_cube();
}
