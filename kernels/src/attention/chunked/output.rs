//! The outputs of the chunks, from the states before them.

use cubecl::prelude::*;

use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, Sizes};
use super::{CHUNK_TOKENS, THREADS};
use crate::tile::matrix::{
    Matrix, Product, WarpTile, add_product, pair, scale_rows, write_pair, write_rows,
};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{Bf16Pair, CHUNK, Chunk, define_exp2, keep_loop, zeros};

/// What the kernel reads beside [`ChunkInputs`], and its result.
#[derive(CubeType, CubeLaunch)]
pub struct OutputArrays {
    /// The values without β, `[rows, tokens, value_dim]`.
    pub e: Array<Chunk>,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub states: Array<Chunk>,
    /// `[rows, group, tokens, value_dim]`
    pub o: Array<Bf16Pair>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    q: Matrix,
    k: Matrix,
    scores: Matrix,
    e: Matrix,
    state: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &ChunkConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let q = Matrix::new(0, d);
        let k = Matrix::new(q.end(CHUNK_TOKENS), d);
        let scores = Matrix::new(k.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let e = Matrix::new(scores.end(CHUNK_TOKENS), n);
        let state = Matrix::new(e.end(CHUNK_TOKENS), n);
        Layout { q, k, scores, e, state, chunks: state.end(d) }
    }
}

/// o = e^P q S + (q kᵀ ⊙ decays) diag(β) e.
///
/// Grid: the chunks of all query heads of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn output(
    inputs: &ChunkInputs,
    arrays: &mut OutputArrays,
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    blocks_per_multiprocessor(comptime!("output".to_string()), THREADS, 3usize);
    define_exp2();
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut factors = Factors::new();
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let (head, chunk) = (CUBE_POS_X as usize / chunks, CUBE_POS_X as usize % chunks);
    let of = ChunkOf::new(head / group, chunk, &sizes);
    let query = of.query(head % group, &sizes);
    let (of_k, of_v) = comptime!((d / CHUNK, config.value_dim / CHUNK));
    let state_base = of.number * comptime!(d * config.value_dim / CHUNK);

    // 1. Scores, decayed.
    start_load(&mut arena, &inputs.q, query * of_k, of_k, of.count, layout.q, CHUNK_TOKENS, d);
    start_load(&mut arena, &inputs.k, of.token * of_k, of_k, of.count, layout.k, CHUNK_TOKENS, d);
    start_load(&mut arena, &arrays.states, state_base, of_v, d.runtime(), layout.state, d, n);
    start_load(&mut arena, &arrays.e, of.token * of_v, of_v, of.count, layout.e, CHUNK_TOKENS, n);
    factors.load(inputs, &of, config);
    finish_loads();
    let qk = comptime!(Product::abt(layout.q, layout.k, [CHUNK_TOKENS, CHUNK_TOKENS, d]));
    let tile = WarpTile::new(qk);
    let mut acc = zeros(comptime!(qk.fragments()));
    add_product(&arena, &mut acc, &tile, qk);
    #[unroll]
    for r in 0..2usize {
        let t = tile.row(r);
        #[unroll]
        for f in 0..comptime!(qk.fragments()) {
            let (s, value) = (tile.column(f), acc.index(f)[r]);
            let first = value[0] * factors.between(t, s) * factors.beta[s];
            let second = value[1] * factors.between(t, s + 1) * factors.beta[s + 1];
            let value = pair(select(s <= t, first, 0f32), select(s < t, second, 0f32));
            write_pair(&mut arena, value, t, s, layout.scores);
        }
    }
    sync_cube();

    // 2. The outputs, by parts of the channels.
    let from_state = comptime!(Product::ab(layout.q, layout.state, [CHUNK_TOKENS, n, d]));
    let sizes = comptime!([CHUNK_TOKENS, n, CHUNK_TOKENS]);
    let from_chunk = comptime!(Product::ab(layout.scores, layout.e, sizes));
    let tile = WarpTile::new(from_chunk);
    let parts = comptime!(config.parts());
    keep_loop();
    for part in 0..parts {
        if tile.exists {
            let mut acc = zeros(comptime!(from_state.fragments()));
            add_product(&arena, &mut acc, &tile, from_state);
            scale_rows(&mut acc, &factors.since_start, &tile, from_state);
            add_product(&arena, &mut acc, &tile, from_chunk);
            let stride = comptime!(config.value_dim / 2);
            let base = query * stride + part * comptime!(n / 2);
            write_rows(&mut arrays.o, &acc, &tile, base, stride, of.count, from_chunk);
        }
        if part + 1 < parts {
            sync_cube();
            let first = (part + 1) * comptime!(n / CHUNK);
            let (states, e) = (&arrays.states, &arrays.e);
            start_load(
                &mut arena,
                states,
                state_base + first,
                of_v,
                d.runtime(),
                layout.state,
                d,
                n,
            );
            let base = of.token * of_v + first;
            start_load(&mut arena, e, base, of_v, of.count, layout.e, CHUNK_TOKENS, n);
            finish_loads();
        }
    }
}
