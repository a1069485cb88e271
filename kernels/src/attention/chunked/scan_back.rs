//! The backward scan: the gradient of the state after each chunk, and for the delta rule that of v.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::CHUNK_TOKENS;
use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, FactorsAhead, Sizes};
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::copies::wait_for_chunks;
use crate::tile::matrix::{
    Matrix, Product, WarpTile, add_product, pair, read_pair, write, write_pair,
};
use crate::tile::rows::{copy_rows, put, put_scaled, start_load, store};
use crate::tile::{CHUNK, Chunk, define_exp2, scale, zeros};

/// What the scan reads beside [`ChunkInputs`], and what it writes.
#[derive(CubeType, CubeLaunch)]
pub struct ScanBackArrays {
    /// do, `[batch, heads, tokens, value_dim]`.
    pub d_o: HeadChunks,
    /// Y, `[rows, chunks, 64, 64]`, for the delta rule.
    pub y: Array<Chunk>,
    /// dw from the outputs of the own chunk, `[batch, kv_heads, tokens, value_dim]`, for the delta rule.
    pub d_w: HeadChunks,
    /// The gradients of the states after the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub d_states: Array<Chunk>,
    /// dv, likewise.
    pub d_v: HeadPairs<bf16>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    q: Matrix,
    /// do, decayed from the chunk's start.
    d_o: Matrix,
    d_state: Matrix,
    k: Matrix,
    y: Matrix,
    /// dw; −dv, decayed from the chunk's start.
    d_w: Matrix,
    /// β dw.
    weighted: Matrix,
    /// Where the next chunk's k, Y and dw arrive.
    next: [Matrix; 3],
    chunks: usize,
}

impl Layout {
    const fn new(config: &ChunkConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let q = Matrix::new(0, d);
        let d_o = Matrix::new(q.end(CHUNK_TOKENS), n);
        let d_state = Matrix::new(d_o.end(CHUNK_TOKENS), n);
        let k = Matrix::new(d_state.end(d), d);
        let y = Matrix::new(k.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let d_w = Matrix::new(y.end(CHUNK_TOKENS), n);
        let weighted = Matrix::new(d_w.end(CHUNK_TOKENS), n);
        let next_k = Matrix::new(weighted.end(CHUNK_TOKENS), d);
        let next_y = Matrix::new(next_k.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let next_d_w = Matrix::new(next_y.end(CHUNK_TOKENS), n);
        let chunks = if config.is_delta() { next_d_w.end(CHUNK_TOKENS) } else { k.at };
        let next = [next_k, next_y, next_d_w];
        Layout { q, d_o, d_state, k, y, d_w, weighted, next, chunks }
    }
}

/// The chunks of a row from the last to the first, for a part of the value's channels.
///
/// Grid: rows · parts; [`THREADS`](super::THREADS) threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn scan_back(
    inputs: &ChunkInputs,
    arrays: &mut ScanBackArrays,
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    define_exp2();
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut factors = Factors::new();
    let mut ones = SharedMemory::<f32>::new(CHUNK_TOKENS);
    if UNIT_POS < comptime!(CHUNK_TOKENS as u32) {
        ones[UNIT_POS as usize] = 1f32;
    }
    let parts = comptime!(config.parts());
    let (row, part) = (CUBE_POS_X as usize / parts, CUBE_POS_X as usize % parts);
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let of_v = comptime!(config.value_dim / CHUNK);
    let first = part * comptime!(n / CHUNK);

    let from_output = comptime!(Product::atb(layout.q, layout.d_o, [d, n, CHUNK_TOKENS]));
    let own = WarpTile::new(from_output);
    let mut d_state = zeros(comptime!(from_output.fragments()));

    // A step is a query head of a chunk; the first of a chunk also takes what its heads share.
    let steps = chunks * group;
    let of = ChunkOf::new(row, chunks - 1, &sizes);
    factors.load(inputs, &of, config);
    let none = 0usize.runtime();
    let q = of.queries(none, &inputs.q.strides, &sizes).fetch(&inputs.q, 0usize, d);
    let d_o = of.queries(none, &arrays.d_o.strides, &sizes).fetch(&arrays.d_o, first, n);
    sync_cube();
    put(&mut arena, &q, of.count, layout.q, CHUNK_TOKENS, d);
    let since_start = &factors.since_start;
    put_scaled(&mut arena, &d_o, of.count, since_start, &ones, layout.d_o, CHUNK_TOKENS, n);
    if comptime!(config.is_delta()) {
        start_shared(&mut arena, inputs, arrays, &of, first, layout, config);
        wait_for_chunks();
        take_shared(&mut arena, layout, config);
    }
    sync_cube();

    for step in 0..steps {
        // 1. The next step's vectors start to load.
        let of = ChunkOf::new(row, chunks - 1 - step / group, &sizes);
        let later = min(step + 1, steps - 1);
        let next = ChunkOf::new(row, chunks - 1 - later / group, &sizes);
        let head = later % group;
        let next_factors = FactorsAhead::fetch(inputs, &next, config);
        let next_q = next.queries(head, &inputs.q.strides, &sizes).fetch(&inputs.q, 0usize, d);
        let upstream = next.queries(head, &arrays.d_o.strides, &sizes);
        let next_d_o = upstream.fetch(&arrays.d_o, first, n);
        if comptime!(config.is_delta()) {
            if later % group == 0 {
                start_shared(&mut arena, inputs, arrays, &next, first, layout, config);
            }
        }

        // 2. The gradient of the state after the chunk, and what it does to the chunk's values.
        if step % group == 0 {
            if own.exists {
                write(&mut arena, &d_state, &own, layout.d_state, from_output);
                scale(&mut d_state, factors.whole());
            }
            sync_cube();
            let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
            store(&arena, &mut arrays.d_states, base, of_v, d.runtime(), layout.d_state, d, n);
            if comptime!(config.is_delta()) {
                correct_back(&mut arena, &mut arrays.d_v, &factors, &of, first, layout, config);
                let removed = comptime!(Product::atb(layout.k, layout.d_w, [d, n, CHUNK_TOKENS]));
                if own.exists {
                    add_product(&arena, &mut d_state, &own, removed);
                }
            }
        }

        // 3. The part of the outputs that reads the state before the chunk.
        if own.exists {
            add_product(&arena, &mut d_state, &own, from_output);
        }
        sync_cube();

        // 4. The next step.
        factors.put(&next_factors);
        put(&mut arena, &next_q, next.count, layout.q, CHUNK_TOKENS, d);
        if comptime!(config.is_delta()) {
            if later % group == 0 {
                wait_for_chunks();
                take_shared(&mut arena, layout, config);
            }
        }
        sync_cube();
        let since_start = &factors.since_start;
        put_scaled(
            &mut arena,
            &next_d_o,
            next.count,
            since_start,
            &ones,
            layout.d_o,
            CHUNK_TOKENS,
            n,
        );
        sync_cube();
    }
}

/// Starts to load what a chunk's query heads share.
#[cube]
fn start_shared(
    arena: &mut SharedMemory<Chunk>,
    inputs: &ChunkInputs,
    arrays: &ScanBackArrays,
    of: &ChunkOf,
    first: usize,
    #[comptime] layout: Layout,
    #[comptime] config: ChunkConfig,
) {
    let (d, n, all) = comptime!((config.head_dim, config.columns, CHUNK_TOKENS));
    let [k, y, d_w] = comptime!(layout.next);
    of.tokens(&inputs.k.strides).start_load(arena, &inputs.k, 0usize, k, d);
    of.tokens(&arrays.d_w.strides).start_load(arena, &arrays.d_w, first, d_w, n);
    let (base, stride) = (of.number * comptime!(all * all / CHUNK), comptime!(all / CHUNK));
    start_load(arena, &arrays.y, base, stride, all.runtime(), y, all, all);
}

/// Puts what has arrived in the place of the chunk before. Each thread moves what it has loaded.
#[cube]
fn take_shared(
    arena: &mut SharedMemory<Chunk>,
    #[comptime] layout: Layout,
    #[comptime] config: ChunkConfig,
) {
    let [k, y, d_w] = comptime!(layout.next);
    copy_rows(arena, k, layout.k, CHUNK_TOKENS, config.head_dim);
    copy_rows(arena, y, layout.y, CHUNK_TOKENS, CHUNK_TOKENS);
    copy_rows(arena, d_w, layout.d_w, CHUNK_TOKENS, config.columns);
}

/// dw, complete; dv = Yᵀ diag(β) dw, written to global memory; −dv decayed from the chunk's start in place of dw.
/// Synchronises before it returns.
#[cube]
fn correct_back(
    arena: &mut SharedMemory<Chunk>,
    d_v: &mut HeadPairs<bf16>,
    factors: &Factors,
    of: &ChunkOf,
    first: usize,
    #[comptime] layout: Layout,
    #[comptime] config: ChunkConfig,
) {
    let (d, n) = comptime!((config.head_dim, config.columns));
    let from_state = comptime!(Product::ab(layout.k, layout.d_state, [CHUNK_TOKENS, n, d]));
    let tile = WarpTile::new(from_state);
    if tile.exists {
        let mut acc = zeros(comptime!(from_state.fragments()));
        add_product(arena, &mut acc, &tile, from_state);
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let (until_end, beta) = (factors.until_end[row], factors.beta[row]);
            #[unroll]
            for f in 0..comptime!(from_state.fragments()) {
                let (column, later) = (tile.column(f), acc.index(f)[r]);
                let local = read_pair(arena, row, column, layout.d_w);
                let first = beta * (local[0] + until_end * later[0]);
                let second = beta * (local[1] + until_end * later[1]);
                write_pair(arena, pair(first, second), row, column, layout.weighted);
            }
        }
    }
    sync_cube();
    let square = comptime!([CHUNK_TOKENS, n, CHUNK_TOKENS]);
    let solve = comptime!(Product::atb(layout.y, layout.weighted, square));
    if tile.exists {
        let mut acc = zeros(comptime!(solve.fragments()));
        add_product(arena, &mut acc, &tile, solve);
        of.tokens(&d_v.strides).write(d_v, &acc, &tile, first, solve);
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let decay = -factors.since_start[row];
            #[unroll]
            for f in 0..comptime!(solve.fragments()) {
                let value = acc.index(f)[r];
                let value = pair(value[0] * decay, value[1] * decay);
                write_pair(arena, value, row, tile.column(f), layout.d_w);
            }
        }
    }
    sync_cube();
}
