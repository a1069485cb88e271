//! The gradients of q, k, the log decays and β, chunk by chunk.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::memory::{ChunkConfig, ChunkInputs, ChunkOf, Factors, Sizes};
use super::sums::LEAST;
use super::{CHUNK_TOKENS, THREADS};
use crate::attention::flash::{HeadChunks, HeadPairs};
use crate::tile::matrix::{
    Matrix, Product, WARPS, WarpTile, add_product, pair, read_pair, scale_rows, write_pair,
};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load};
use crate::tile::{Accumulator, CHUNK, Chunk, define_exp2, keep_loop, scale, sum_of_four, zeros};

/// What the kernel reads beside [`ChunkInputs`], and its results.
#[derive(CubeType, CubeLaunch)]
pub struct GradientArrays {
    /// do, `[batch, heads, tokens, value_dim]`.
    pub d_o: HeadChunks,
    /// The values without β, `[batch, kv_heads, tokens, value_dim]`.
    pub e: HeadChunks,
    /// dv, likewise, for the delta rule.
    pub d_v: HeadChunks,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub states: Array<Chunk>,
    /// The gradients of the states after the chunks, likewise.
    pub d_states: Array<Chunk>,
    /// `[rows, tokens]`
    pub log_decay: Array<f32>,
    /// `[batch, heads, tokens, head_dim]`
    pub d_q: HeadPairs<bf16>,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub d_k: HeadPairs<bf16>,
    /// `[rows, tokens]`
    pub d_log_decay: Array<f32>,
    /// `[rows, tokens]`, if values are weighted.
    pub d_beta: Array<f32>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    k: Matrix,
    q: Matrix,
    /// A part of do, or of dv.
    d_o: Matrix,
    /// The gradients of scores, in place of do.
    d_scores: Matrix,
    e: Matrix,
    state: Matrix,
    d_state: Matrix,
    chunks: usize,
}

impl Layout {
    const fn new(config: &ChunkConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let k = Matrix::new(0, d);
        let q = Matrix::new(k.end(CHUNK_TOKENS), d);
        let d_o = Matrix::new(q.end(CHUNK_TOKENS), n);
        let d_scores = Matrix::new(d_o.at, CHUNK_TOKENS);
        let e = Matrix::new(d_scores.end(CHUNK_TOKENS), n);
        let state = Matrix::new(e.end(CHUNK_TOKENS), n);
        let d_state = Matrix::new(state.end(d), n);
        Layout { k, q, d_o, d_scores, e, state, d_state, chunks: d_state.end(d) }
    }
}

/// Tiles of a result beside one another, at most; below one another, of 64 rows.
const ACROSS: usize = 2;
const DOWN: usize = WARPS / ACROSS;

/// Sums by token, each in parts that a warp owns.
#[derive(CubeType)]
struct TokenSums {
    /// Of a reader t: what its scores and its reading of the state contribute to dP_t.
    read: SharedMemory<f32>,
    /// Of a writer s: what the scores of its chunk contribute to dβ_s.
    near: SharedMemory<f32>,
    /// Of a writer s: what later chunks contribute to dβ_s.
    far: SharedMemory<f32>,
}

#[cube]
impl TokenSums {
    /// All zero, once the block has synchronised.
    fn new() -> TokenSums {
        let mut sums = TokenSums {
            read: SharedMemory::<f32>::new(comptime!(ACROSS * CHUNK_TOKENS)),
            near: SharedMemory::<f32>::new(comptime!(DOWN * CHUNK_TOKENS)),
            far: SharedMemory::<f32>::new(comptime!(ACROSS * CHUNK_TOKENS)),
        };
        let at = UNIT_POS as usize;
        sums.near[at] = 0f32;
        if at < comptime!(ACROSS * CHUNK_TOKENS) {
            sums.read[at] = 0f32;
            sums.far[at] = 0f32;
        }
        sums
    }
}

/// Adds the products of an accumulator's rows with those of a matrix in shared memory to their sums.
#[cube]
fn add_row_products(
    sums: &mut SharedMemory<f32>,
    arena: &SharedMemory<Chunk>,
    acc: &Accumulator,
    tile: &WarpTile,
    #[comptime] with: Matrix,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let mut sum = 0f32;
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let (a, b) = (acc.index(f)[r], read_pair(arena, row, tile.column(f), with));
            sum += a[0] * b[0] + a[1] * b[1];
        }
        let sum = sum_of_four(sum);
        if UNIT_POS_PLANE % 4 == 0 {
            sums[tile.across * CHUNK_TOKENS + row] += sum;
        }
    }
}

/// dq, dk, the gradients of the log decays and dβ of a chunk.
///
/// Under the delta rule a key also reads the state, as a query that sees only the keys before its own and whose
/// upstream gradient is −dv: it comes last of the readers.
///
/// Grid: the chunks of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn gradients(
    inputs: &ChunkInputs,
    arrays: &mut GradientArrays,
    sizes: Sizes,
    #[comptime] config: ChunkConfig,
) {
    blocks_per_multiprocessor(comptime!("gradients".to_string()), THREADS, 2usize);
    define_exp2();
    let (d, n) = comptime!((config.head_dim, config.columns));
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut factors = Factors::new();
    let mut sums = TokenSums::new();
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let number = CUBE_POS_X as usize;
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);
    let of_v = comptime!(config.value_dim / CHUNK);
    let state_base = of.number * comptime!(d * config.value_dim / CHUNK);
    let parts = comptime!(config.parts());

    let (keys, values) = (of.tokens(&inputs.k.strides), of.tokens(&arrays.e.strides));
    keys.start_load(&mut arena, &inputs.k, 0usize, layout.k, d);
    factors.load(inputs, &of, config);

    let square = comptime!([CHUNK_TOKENS, CHUNK_TOKENS, n]);
    let vectors = comptime!([CHUNK_TOKENS, d, n]);
    let of_scores = comptime!(Product::abt(layout.d_o, layout.e, square));
    let qk = comptime!(Product::abt(layout.q, layout.k, [CHUNK_TOKENS, CHUNK_TOKENS, d]));
    let of_query = comptime!(Product::abt(layout.d_o, layout.state, vectors));
    let of_key = comptime!(Product::abt(layout.e, layout.d_state, vectors));
    let near = comptime!([CHUNK_TOKENS, d, CHUNK_TOKENS]);
    let by_keys = comptime!(Product::ab(layout.d_scores, layout.k, near));
    let by_queries = comptime!(Product::atb(layout.d_scores, layout.q, near));
    let (tile, own) = (WarpTile::new(qk), WarpTile::new(by_keys));

    let mut d_k = zeros(comptime!(by_keys.fragments()));
    let mut of_state = 0f32;
    let mut readers = group;
    if comptime!(config.is_delta()) {
        readers = group + 1;
    }
    keep_loop();
    for reader in 0..readers {
        let is_key = reader >= group;
        let head = min(reader, group - 1);

        // 1. The reader's vectors.
        if is_key {
            keys.start_load(&mut arena, &inputs.k, 0usize, layout.q, d);
        } else {
            let queries = of.queries(head, &inputs.q.strides, &sizes);
            queries.start_load(&mut arena, &inputs.q, 0usize, layout.q, d);
        }

        // 2. do eᵀ and do Sᵀ; with the first reader e dSᵀ.
        let mut d_scores = zeros(comptime!(of_scores.fragments()));
        let mut d_q = zeros(comptime!(by_keys.fragments()));
        keep_loop();
        for part in 0..parts {
            let first = part * comptime!(n / CHUNK);
            if is_key {
                let upstream = of.tokens(&arrays.d_v.strides);
                upstream.start_load(&mut arena, &arrays.d_v, first, layout.d_o, n);
            } else {
                let upstream = of.queries(head, &arrays.d_o.strides, &sizes);
                upstream.start_load(&mut arena, &arrays.d_o, first, layout.d_o, n);
            }
            values.start_load(&mut arena, &arrays.e, first, layout.e, n);
            let base = state_base + first;
            start_load(&mut arena, &arrays.states, base, of_v, d.runtime(), layout.state, d, n);
            if reader == 0 {
                start_load(
                    &mut arena,
                    &arrays.d_states,
                    base,
                    of_v,
                    d.runtime(),
                    layout.d_state,
                    d,
                    n,
                );
            }
            finish_loads();
            add_product(&arena, &mut d_scores, &tile, of_scores);
            if own.exists {
                add_product(&arena, &mut d_q, &own, of_query);
            }
            if reader == 0 {
                if own.exists {
                    add_product(&arena, &mut d_k, &own, of_key);
                }
                of_state += dot(&arena, layout, config);
            }
            sync_cube();
        }
        if reader == 0 && own.exists {
            scale_rows(&mut d_k, &factors.until_end, &own, by_keys);
            add_row_products(&mut sums.far, &arena, &d_k, &own, layout.k, by_keys);
            scale_rows(&mut d_k, &factors.beta, &own, by_keys);
        }

        // 3. The gradients of the scores, with those of the decays.
        let sign = select(is_key, -1f32, 1f32);
        let mut scores = zeros(comptime!(qk.fragments()));
        add_product(&arena, &mut scores, &tile, qk);
        weigh(&mut arena, &mut sums, &scores, &d_scores, &factors, &tile, sign, layout, qk);
        sync_cube();

        // 4. The gradients of the reader and of the keys that it reads.
        if own.exists {
            scale(&mut d_q, sign);
            scale_rows(&mut d_q, &factors.since_start, &own, by_keys);
            add_row_products(&mut sums.read, &arena, &d_q, &own, layout.q, by_keys);
            add_product(&arena, &mut d_q, &own, by_keys);
            add_product(&arena, &mut d_k, &own, by_queries);
            if is_key {
                #[unroll]
                for f in 0..comptime!(by_keys.fragments()) {
                    let (key, reads) = (d_k.index_mut(f), d_q.index(f));
                    #[unroll]
                    for r in 0..2usize {
                        key[r] = key[r] + reads[r];
                    }
                }
            } else {
                let queries = of.queries(head, &arrays.d_q.strides, &sizes);
                queries.write(&mut arrays.d_q, &d_q, &own, 0usize, by_keys);
            }
        }
        sync_cube();
    }
    if own.exists {
        of.tokens(&arrays.d_k.strides).write(&mut arrays.d_k, &d_k, &own, 0usize, by_keys);
    }
    finish(arrays, &sums, &factors, of_state, &of, config);
}

/// The thread's part of Σ S ⊙ dS over a part of the state in shared memory.
#[cube]
fn dot(
    arena: &SharedMemory<Chunk>,
    #[comptime] layout: Layout,
    #[comptime] config: ChunkConfig,
) -> f32 {
    let per_row = comptime!(config.columns / CHUNK);
    let count = comptime!(config.head_dim * config.columns / CHUNK);
    let mut sum = 0f32;
    let mut at = UNIT_POS as usize;
    while at < count {
        let (row, chunk) = (at / per_row, at % per_row);
        let a = arena[layout.state.at + row * layout.state.row + chunk];
        let b = arena[layout.d_state.at + row * layout.d_state.row + chunk];
        #[unroll]
        for i in 0..CHUNK {
            sum += f32::cast_from(a[i]) * f32::cast_from(b[i]);
        }
        at += THREADS;
    }
    sum
}

/// Writes the gradients of the scores, decayed and times β, in place of do, and adds what they do to the decays and to
/// β. A key that reads, `sign` −1, does not see its own.
#[cube]
fn weigh(
    arena: &mut SharedMemory<Chunk>,
    sums: &mut TokenSums,
    scores: &Accumulator,
    d_scores: &Accumulator,
    factors: &Factors,
    tile: &WarpTile,
    sign: f32,
    #[comptime] layout: Layout,
    #[comptime] p: Product,
) {
    let fragments = comptime!(p.fragments());
    let mut of_rows = Array::<f32>::new(2usize);
    of_rows[0] = 0f32;
    of_rows[1] = 0f32;
    #[unroll]
    for f in 0..fragments {
        let mut of_columns = Array::<f32>::new(2usize);
        of_columns[0] = 0f32;
        of_columns[1] = 0f32;
        #[unroll]
        for r in 0..2usize {
            let (t, first) = (tile.row(r), tile.column(f));
            let (score, upstream) = (scores.index(f)[r], d_scores.index(f)[r]);
            let mut gradient = pair(0f32, 0f32);
            #[unroll]
            for c in 0..2usize {
                let s = first + c;
                let visible = (s < t) || ((s == t) && (sign > 0f32));
                let decayed = sign * upstream[c] * factors.between(t, s);
                let decayed = select(visible, decayed, 0f32);
                let beta = factors.beta[s];
                gradient[c] = decayed * beta;
                let product = decayed * score[c];
                of_columns[c] += product;
                of_rows[r] += product * beta;
            }
            write_pair(arena, gradient, t, first, layout.d_scores);
        }
        #[unroll]
        for c in 0..2usize {
            // The lanes that hold these columns of the tile's other rows.
            let mut sum = of_columns[c];
            sum += plane_shuffle_xor(sum, 4);
            sum += plane_shuffle_xor(sum, 8);
            sum += plane_shuffle_xor(sum, 16);
            if UNIT_POS_PLANE < 4 {
                sums.near[tile.down * CHUNK_TOKENS + tile.column(f) + c] += sum;
            }
        }
    }
    #[unroll]
    for r in 0..2usize {
        let sum = sum_of_four(of_rows[r]);
        if UNIT_POS_PLANE % 4 == 0 {
            sums.read[tile.across * CHUNK_TOKENS + tile.row(r)] += sum;
        }
    }
}

/// The gradients of the log decays and of β. With x_t what the token's readers and, negative, its own writing in
/// the chunk contribute to dP_t, and b_s what its writing for later chunks does,
/// dℓ_s = Σ_{t≥s} x_t + Σ_{t<s} b_t + decay · Σ S ⊙ dS.
#[cube]
fn finish(
    arrays: &mut GradientArrays,
    sums: &TokenSums,
    factors: &Factors,
    of_state: f32,
    of: &ChunkOf,
    #[comptime] config: ChunkConfig,
) {
    let mut of_states = SharedMemory::<f32>::new(WARPS);
    let mut within = SharedMemory::<f32>::new(CHUNK_TOKENS);
    let mut later = SharedMemory::<f32>::new(CHUNK_TOKENS);
    let of_warp = plane_sum(of_state);
    if UNIT_POS_PLANE == 0 {
        of_states[UNIT_POS as usize / 32] = of_warp;
    }
    let token = UNIT_POS as usize;
    if token < CHUNK_TOKENS {
        let mut near = 0f32;
        #[unroll]
        for part in 0..DOWN {
            near += sums.near[comptime!(part * CHUNK_TOKENS) + token];
        }
        let mut read = 0f32;
        let mut far = 0f32;
        #[unroll]
        for part in 0..ACROSS {
            read += sums.read[comptime!(part * CHUNK_TOKENS) + token];
            far += sums.far[comptime!(part * CHUNK_TOKENS) + token];
        }
        let beta = factors.beta[token];
        within[token] = read - beta * near;
        later[token] = beta * far;
        if comptime!(config.weighted) {
            if token < of.count {
                arrays.d_beta[of.token + token] = near + far;
            }
        }
    }
    sync_cube();
    if token < of.count {
        let mut sum = 0f32;
        #[unroll]
        for warp in 0..WARPS {
            sum += of_states[warp];
        }
        sum *= factors.whole();
        for t in 0..CHUNK_TOKENS {
            sum += select(t >= token, within[t], later[t]);
        }
        // A sum of rounding errors, where the decay is lower than those that count.
        let counts = arrays.log_decay[of.token + token] > f32::cast_from(LEAST);
        arrays.d_log_decay[of.token + token] = select(counts, sum, 0f32);
    }
}
