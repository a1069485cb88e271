//! The outputs of the chunks, from the states before them.

use cubecl::prelude::*;

use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, OutputElement, Sizes};
use super::{CHUNK_TOKENS, THREADS};
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product, pair, scale_rows, write_pair};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{CHUNK, Chunk, define_exp2, keep_loop, zeros};

/// What the kernel reads beside [`ChunkInputs`], and its result.
#[derive(CubeType, CubeLaunch)]
pub struct OutputArrays<O: Numeric> {
    /// The values without β, `[batch, kv_heads, tokens, value_dim]`.
    pub e: HeadChunks,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub states: Array<Chunk>,
    /// `[batch, heads, tokens, value_dim]`
    pub o: HeadPairs<O>,
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
pub fn output<O: OutputElement>(
    inputs: &ChunkInputs,
    arrays: &mut OutputArrays<O>,
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
    let head = head % group;
    let of_v = comptime!(config.value_dim / CHUNK);
    let state_base = of.number * comptime!(d * config.value_dim / CHUNK);

    // 1. Scores, decayed.
    let queries = of.queries(head, &inputs.q.strides, &sizes);
    queries.start_load(&mut arena, &inputs.q, 0usize, layout.q, d);
    of.tokens(&inputs.k.strides).start_load(&mut arena, &inputs.k, 0usize, layout.k, d);
    start_load(&mut arena, &arrays.states, state_base, of_v, d.runtime(), layout.state, d, n);
    let values = of.tokens(&arrays.e.strides);
    values.start_load(&mut arena, &arrays.e, 0usize, layout.e, n);
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
    let square = comptime!([CHUNK_TOKENS, n, CHUNK_TOKENS]);
    let from_chunk = comptime!(Product::ab(layout.scores, layout.e, square));
    let results = of.queries(head, &arrays.o.strides, &sizes);
    let tile = WarpTile::new(from_chunk);
    let parts = comptime!(config.parts());
    keep_loop();
    for part in 0..parts {
        if tile.exists {
            let mut acc = zeros(comptime!(from_state.fragments()));
            add_product(&arena, &mut acc, &tile, from_state);
            scale_rows(&mut acc, &factors.since_start, &tile, from_state);
            add_product(&arena, &mut acc, &tile, from_chunk);
            let first = part * comptime!(n / CHUNK);
            results.write(&mut arrays.o, &acc, &tile, first, from_chunk);
        }
        if part + 1 < parts {
            sync_cube();
            let first = (part + 1) * comptime!(n / CHUNK);
            let states = &arrays.states;
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
            values.start_load(&mut arena, &arrays.e, first, layout.e, n);
            finish_loads();
        }
    }
}
