//! The gradient of what enters the state, w, from the outputs of its own chunk and, if the state's gradients are
//! there, from those of later chunks.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, Sizes};
use super::{CHUNK_TOKENS, THREADS};
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product, pair, scale_rows, write_pair};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{CHUNK, Chunk, define_exp2, keep_loop, zeros};

/// What the kernel reads beside [`ChunkInputs`], and its result.
#[derive(CubeType, CubeLaunch)]
pub struct ValueGradientArrays {
    /// do, `[batch, heads, tokens, value_dim]`.
    pub d_o: HeadChunks,
    /// The gradients of the states after the chunks, `[rows, chunks, head_dim, value_dim]`, for an additive update.
    pub d_states: Array<Chunk>,
    /// `[batch, kv_heads, tokens, value_dim]`: of v for an additive update; for the delta rule the part of dw that comes
    /// from the own chunk's outputs.
    pub d_v: HeadPairs<bf16>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    k: Matrix,
    q: Matrix,
    scores: Matrix,
    d_o: Matrix,
    d_state: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &ChunkConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let k = Matrix::new(0, d);
        let q = Matrix::new(k.end(CHUNK_TOKENS), d);
        let scores = Matrix::new(q.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let d_o = Matrix::new(scores.end(CHUNK_TOKENS), n);
        let d_state = Matrix::new(d_o.end(CHUNK_TOKENS), n);
        let chunks = if config.is_delta() { d_state.at } else { d_state.end(d) };
        Layout { k, q, scores, d_o, d_state, chunks }
    }
}

/// dw = (q kᵀ ⊙ decays)ᵀ do, summed over the query heads, + the decay to the chunk's end times k dS.
///
/// Grid: the chunks of all rows · parts, the parts of a chunk after one another; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn value_gradients(
    inputs: &ChunkInputs,
    arrays: &mut ValueGradientArrays,
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    blocks_per_multiprocessor(comptime!("value_gradients".to_string()), THREADS, 2usize);
    define_exp2();
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut factors = Factors::new();
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let parts = comptime!(config.parts());
    let (number, part) = (CUBE_POS_X as usize / parts, CUBE_POS_X as usize % parts);
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);
    let of_v = comptime!(config.value_dim / CHUNK);
    let first = part * comptime!(n / CHUNK);

    of.tokens(&inputs.k.strides).start_load(&mut arena, &inputs.k, 0usize, layout.k, d);
    factors.load(inputs, &of, config);
    let square = comptime!([CHUNK_TOKENS, n, CHUNK_TOKENS]);
    let from_chunk = comptime!(Product::atb(layout.scores, layout.d_o, square));
    let own = WarpTile::new(from_chunk);
    let mut acc = zeros(comptime!(from_chunk.fragments()));
    if comptime!(!config.is_delta()) {
        let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
        start_load(&mut arena, &arrays.d_states, base, of_v, d.runtime(), layout.d_state, d, n);
        finish_loads();
        let from_state = comptime!(Product::ab(layout.k, layout.d_state, [CHUNK_TOKENS, n, d]));
        if own.exists {
            add_product(&arena, &mut acc, &own, from_state);
            scale_rows(&mut acc, &factors.until_end, &own, from_state);
        }
    }
    keep_loop();
    for head in 0..group {
        let queries = of.queries(head, &inputs.q.strides, &sizes);
        queries.start_load(&mut arena, &inputs.q, 0usize, layout.q, d);
        let upstream = of.queries(head, &arrays.d_o.strides, &sizes);
        upstream.start_load(&mut arena, &arrays.d_o, first, layout.d_o, n);
        finish_loads();
        let qk = comptime!(Product::abt(layout.q, layout.k, [CHUNK_TOKENS, CHUNK_TOKENS, d]));
        let tile = WarpTile::new(qk);
        let mut scores = zeros(comptime!(qk.fragments()));
        add_product(&arena, &mut scores, &tile, qk);
        #[unroll]
        for r in 0..2usize {
            let t = tile.row(r);
            #[unroll]
            for f in 0..comptime!(qk.fragments()) {
                let (s, value) = (tile.column(f), scores.index(f)[r]);
                let first = value[0] * factors.between(t, s);
                let second = value[1] * factors.between(t, s + 1);
                let value = pair(select(s <= t, first, 0f32), select(s < t, second, 0f32));
                write_pair(&mut arena, value, t, s, layout.scores);
            }
        }
        sync_cube();
        if own.exists {
            add_product(&arena, &mut acc, &own, from_chunk);
        }
        sync_cube();
    }
    if own.exists {
        if comptime!(!config.is_delta()) {
            scale_rows(&mut acc, &factors.beta, &own, from_chunk);
        }
        of.tokens(&arrays.d_v.strides).write(&mut arrays.d_v, &acc, &own, first, from_chunk);
    }
}
