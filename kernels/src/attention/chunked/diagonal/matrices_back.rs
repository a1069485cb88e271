//! The gradients of a chunk's matrices: of decayed queries, keys, removal keys and corrections, and of scores.

use cubecl::prelude::*;

use super::super::memory::{ChunkOf, Sizes, TokensOf};
use super::super::{CHUNK_TOKENS, THREADS};
use super::levels::{load_sums, load_weights, scale_rows_by, sums_len};
use super::{DiagonalConfig, DiagonalInputs};
use crate::attention::flash::HeadChunks;
use crate::tile::matrix::{Matrix, Product, WarpTile, add_product, pair, write, write_pair};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::rows::{finish_loads, start_load, store};
use crate::tile::{Accumulator, CHUNK, Chunk, define_exp2, keep_loop, scale, zeros};

/// What the kernel reads beside [`DiagonalInputs`], and its results.
#[derive(CubeType, CubeLaunch)]
pub struct MatrixArrays {
    /// do, `[batch, heads, tokens, value_dim]`.
    pub d_o: HeadChunks,
    /// `[batch, kv_heads, tokens, value_dim]`
    pub v: HeadChunks,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]`.
    pub states: Array<Chunk>,
    /// The gradients of the states after the chunks, likewise.
    pub d_states: Array<Chunk>,
    /// T, `[rows, chunks, 64, 64]`, if there are corrections, as the next three.
    pub transfer: Array<Chunk>,
    /// W, `[rows, chunks, 64, head_dim]`.
    pub reads: Array<Chunk>,
    /// Y, as T.
    pub inverse: Array<Chunk>,
    /// D, `[rows, group, chunks, 64, 64]`.
    pub of_corrections: Array<Chunk>,
    /// dQ, `[batch, heads, tokens, head_dim]`.
    pub d_queries: HeadChunks,
    /// dZ̃, `[batch, kv_heads, tokens, head_dim]`, if there are corrections.
    pub d_removal: HeadChunks,
    /// dB̃, likewise; dK̃ where there are no corrections.
    pub d_corrections: HeadChunks,
    /// dK̃, likewise, where there are corrections beside keys.
    pub d_keys: HeadChunks,
    /// The gradients of scores, 0 where there is no score, `[rows, chunks, readers, writers, 64, 64]`: readers are the
    /// query heads and, last, the removal keys; writers are corrections and then keys.
    pub d_scores: Array<Chunk>,
    /// Σ S ⊙ dS' of each channel, over two parts of the values, `[rows, chunks, 2, head_dim]`.
    pub of_states: Array<f32>,
}

/// The places of matrices in shared memory. Later matrices take the places of those that are no longer read, so that
/// few steps wait for others.
mod place {
    /// do, and then the gradients of the scores with corrections; dK; dZ̃.
    pub const UPSTREAM: usize = 0;
    /// v; dT.
    pub const VALUES: usize = 1;
    /// S; −dW.
    pub const STATE: usize = 2;
    /// D; Y.
    pub const SCORES: usize = 3;
    /// B̃; U.
    pub const DECAYED: usize = 4;
    /// T.
    pub const TRANSFER: usize = 5;
    /// W.
    pub const READS: usize = 6;
    /// dS'; dB̃.
    pub const D_STATE: usize = 7;
    /// The gradients of the scores with keys; dG, which may take two places; gradients of scores.
    pub const WITH_KEYS: usize = 8;
    /// dQ; gradients of scores.
    pub const D_QUERY: usize = 9;
    /// Their number.
    pub const COUNT: usize = 10;
}

/// A matrix of `columns` columns at a place, of which each holds any matrix but dG.
const fn at(config: &DiagonalConfig, place: usize, columns: usize) -> Matrix {
    Matrix::new(place * place_len(config), columns)
}

/// Chunks of a place.
const fn place_len(config: &DiagonalConfig) -> usize {
    let d = config.head_dim;
    let mut len = Matrix::new(0, d).end(CHUNK_TOKENS);
    let others =
        [Matrix::new(0, CHUNK_TOKENS).end(CHUNK_TOKENS), Matrix::new(0, config.columns).end(d)];
    let mut i = 0;
    while i < others.len() {
        if others[i] > len {
            len = others[i];
        }
        i += 1;
    }
    len
}

/// The gradients of a chunk's matrices.
///
/// Grid: the chunks of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_matrices_back(
    inputs: &DiagonalInputs,
    arrays: &mut MatrixArrays,
    sizes: Sizes,
    #[comptime] config: DiagonalConfig,
) {
    if comptime!(config.head_dim <= 64) {
        blocks_per_multiprocessor(comptime!("diagonal_matrices_back".to_string()), THREADS, 2usize);
    }
    define_exp2();
    let (d, all) = comptime!((config.head_dim, CHUNK_TOKENS));
    let mut arena =
        SharedMemory::<Chunk>::new_aligned(comptime!(place::COUNT * place_len(&config)), 16usize);
    let chunks = sizes.chunks as usize;
    let number = CUBE_POS_X as usize;
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);
    let transfer = comptime!(at(&config, place::TRANSFER, all));
    let reads = comptime!(at(&config, place::READS, d));
    let group = sizes.group as usize;
    start_head(&mut arena, arrays, &of, 0usize.runtime(), &sizes, config);
    let parts = comptime!(config.parts());
    start_part(&mut arena, arrays, &of, 0usize.runtime(), config);
    start_d_state(&mut arena, arrays, &of, comptime!(parts - 1).runtime(), config);
    if comptime!(config.corrects()) {
        let decayed = comptime!(at(&config, place::DECAYED, d));
        load_tokens(&mut arena, &arrays.transfer, number, transfer, all);
        load_tokens(&mut arena, &arrays.reads, number, reads, d);
        let correction = &inputs.correction;
        of.tokens(&correction.strides).start_load(&mut arena, correction, 0usize, decayed, d);
        let mut sums = SharedMemory::<f32>::new_aligned(comptime!(sums_len(d)), 16usize);
        let mut weights = SharedMemory::<f32>::new(CHUNK_TOKENS);
        load_weights(&mut weights, &inputs.beta, &of, config);
        load_sums(&mut sums, &inputs.log_decay, &of, d);
        scale_rows_by(
            &mut arena,
            &sums,
            &weights,
            1usize.runtime(),
            comptime!(config.corrects_by()),
            all,
            decayed,
            decayed,
            d,
        );
    }

    let vectors = comptime!(Product::ab(transfer, reads, [all, d, all]));
    let square = comptime!(Product::ab(transfer, transfer, [all; 3]));
    let (own, tile) = (WarpTile::new(vectors), WarpTile::new(square));
    // dT and −dW.
    let mut d_transfer = zeros(comptime!(square.fragments()));
    let mut d_reads = zeros(comptime!(vectors.fragments()));
    keep_loop();
    for head in 0..group {
        of_query(
            &mut arena,
            arrays,
            &of,
            head,
            &sizes,
            &mut d_transfer,
            &mut d_reads,
            &own,
            &tile,
            config,
        );
    }
    of_values(&mut arena, arrays, &of, &own, config);
    if comptime!(config.corrects()) {
        of_change(
            &mut arena,
            arrays,
            &of,
            group,
            &mut d_transfer,
            &mut d_reads,
            &own,
            &tile,
            config,
        );
    }
}

/// Starts to load the first part of a query head's do and, with corrections, its D.
#[cube]
fn start_head(
    arena: &mut SharedMemory<Chunk>,
    arrays: &MatrixArrays,
    of: &ChunkOf,
    head: usize,
    sizes: &Sizes,
    #[comptime] config: DiagonalConfig,
) {
    let upstream = of.queries(head, &arrays.d_o.strides, sizes);
    start_upstream(arena, arrays, &upstream, 0usize.runtime(), config);
    if comptime!(config.corrects()) {
        let (group, chunks) = (sizes.group as usize, sizes.chunks as usize);
        let number = (of.row * group + head) * chunks + of.chunk;
        let to = comptime!(at(&config, place::SCORES, CHUNK_TOKENS));
        load_tokens(arena, &arrays.of_corrections, number, to, CHUNK_TOKENS);
    }
}

/// Starts to load a part of a query head's do.
#[cube]
fn start_upstream(
    arena: &mut SharedMemory<Chunk>,
    arrays: &MatrixArrays,
    upstream: &TokensOf,
    part: usize,
    #[comptime] config: DiagonalConfig,
) {
    let n = comptime!(config.columns);
    let to = comptime!(at(&config, place::UPSTREAM, n));
    upstream.start_load(arena, &arrays.d_o, part * comptime!(n / CHUNK), to, n);
}

/// Starts to load a part of v and of the state.
#[cube]
fn start_part(
    arena: &mut SharedMemory<Chunk>,
    arrays: &MatrixArrays,
    of: &ChunkOf,
    part: usize,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, of_v) = comptime!((config.head_dim, config.columns, config.value_dim / CHUNK));
    let first = part * comptime!(n / CHUNK);
    let (values, state) = comptime!((at(&config, place::VALUES, n), at(&config, place::STATE, n)));
    of.tokens(&arrays.v.strides).start_load(arena, &arrays.v, first, values, n);
    let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
    start_load(arena, &arrays.states, base, of_v, d.runtime(), state, d, n);
}

/// Starts to load a part of the gradient of the state after the chunk.
#[cube]
fn start_d_state(
    arena: &mut SharedMemory<Chunk>,
    arrays: &MatrixArrays,
    of: &ChunkOf,
    part: usize,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, of_v) = comptime!((config.head_dim, config.columns, config.value_dim / CHUNK));
    let base = of.number * comptime!(d * config.value_dim / CHUNK) + part * comptime!(n / CHUNK);
    let to = comptime!(at(&config, place::D_STATE, n));
    start_load(arena, &arrays.d_states, base, of_v, d.runtime(), to, d, n);
}

/// Reads a matrix of all tokens.
#[cube]
pub(super) fn load_tokens(
    arena: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    number: usize,
    #[comptime] to: Matrix,
    #[comptime] columns: usize,
) {
    let stride = comptime!(columns / CHUNK);
    let base = number * comptime!(CHUNK_TOKENS * columns / CHUNK);
    start_load(arena, source, base, stride, CHUNK_TOKENS.runtime(), to, CHUNK_TOKENS, columns);
}

/// Writes the gradients of the scores of a reader with a kind of writers.
#[cube]
fn store_scores(
    arena: &SharedMemory<Chunk>,
    d_scores: &mut Array<Chunk>,
    number: usize,
    #[comptime] from: Matrix,
) {
    let stride = comptime!(CHUNK_TOKENS / CHUNK);
    let base = number * comptime!(CHUNK_TOKENS * CHUNK_TOKENS / CHUNK);
    let count = CHUNK_TOKENS.runtime();
    store(arena, d_scores, base, stride, count, from, CHUNK_TOKENS, CHUNK_TOKENS);
}

/// The number of a reader's first matrix in [`MatrixArrays::d_scores`].
#[cube]
pub(super) fn first_of_reader(
    of: &ChunkOf,
    reader: usize,
    group: usize,
    #[comptime] config: DiagonalConfig,
) -> usize {
    let mut readers = group;
    if comptime!(config.corrects()) {
        readers = group + 1;
    }
    (of.number * readers + reader) * comptime!(config.writers())
}

/// Writes an accumulator of pairs of tokens as a matrix, rounded, with zeros above the diagonal and, if `strict`, on
/// it.
#[cube]
fn write_lower(
    arena: &mut SharedMemory<Chunk>,
    acc: &Accumulator,
    tile: &WarpTile,
    sign: f32,
    #[comptime] strict: bool,
    #[comptime] to: Matrix,
    #[comptime] p: Product,
) {
    #[unroll]
    for r in 0..2usize {
        let t = tile.row(r);
        let mut end = t + 1;
        if comptime!(strict) {
            end = t;
        }
        #[unroll]
        for f in 0..comptime!(p.fragments()) {
            let (s, value) = (tile.column(f), acc.index(f)[r]);
            let first = select(s < end, sign * value[0], 0f32);
            let second = select(s + 1 < end, sign * value[1], 0f32);
            write_pair(arena, pair(first, second), t, s, to);
        }
    }
}

/// dQ of a query head and the gradients of its scores; adds to dT and −dW. Leaves the last part of v and of the state.
/// Synchronises before it returns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_query(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut MatrixArrays,
    of: &ChunkOf,
    head: usize,
    sizes: &Sizes,
    d_transfer: &mut Accumulator,
    d_reads: &mut Accumulator,
    own: &WarpTile,
    tile: &WarpTile,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, all) = comptime!((config.head_dim, config.columns, CHUNK_TOKENS));
    let group = sizes.group as usize;
    let upstream = of.queries(head, &arrays.d_o.strides, sizes);
    let (d_o, v) = comptime!((at(&config, place::UPSTREAM, n), at(&config, place::VALUES, n)));
    let state = comptime!(at(&config, place::STATE, n));
    let of_state = comptime!(Product::abt(d_o, state, [all, d, n]));
    let of_scores = comptime!(Product::abt(d_o, v, [all, all, n]));
    let mut d_query = zeros(comptime!(of_state.fragments()));
    let mut d_scores = zeros(comptime!(of_scores.fragments()));
    let parts = comptime!(config.parts());
    keep_loop();
    for part in 0..parts {
        if part > 0 {
            start_upstream(arena, arrays, &upstream, part, config);
        }
        if comptime!(parts > 1) && head + part > 0 {
            start_part(arena, arrays, of, part, config);
        }
        finish_loads();
        add_product(arena, &mut d_scores, tile, of_scores);
        if own.exists {
            add_product(arena, &mut d_query, own, of_state);
        }
        if part + 1 < parts {
            sync_cube();
        }
    }
    let with_keys = comptime!(at(&config, place::WITH_KEYS, all));
    let d_q = comptime!(at(&config, place::D_QUERY, d));
    write_lower(arena, &d_scores, tile, 1f32, false, with_keys, of_scores);
    if own.exists {
        write(arena, &d_query, own, d_q, of_state);
    }
    sync_cube();
    of.queries(head, &arrays.d_queries.strides, sizes).store(arena, &mut arrays.d_queries, d_q, d);
    let number = first_of_reader(of, head, group, config);
    if comptime!(config.corrects()) {
        let scores = comptime!(at(&config, place::SCORES, all));
        let transfer = comptime!(at(&config, place::TRANSFER, all));
        let reads = comptime!(at(&config, place::READS, d));
        let corrected = comptime!(at(&config, place::UPSTREAM, all));
        let by_reads = comptime!(Product::abt(d_q, reads, [all, all, d]));
        let mut d_scores = zeros(comptime!(by_reads.fragments()));
        add_product(arena, &mut d_scores, tile, by_reads);
        scale(&mut d_scores, -1f32);
        let by_transfer = comptime!(Product::abt(with_keys, transfer, [all, all, all]));
        add_product(arena, &mut d_scores, tile, by_transfer);
        write_lower(arena, &d_scores, tile, 1f32, false, corrected, by_reads);
        let of_transfer = comptime!(Product::atb(scores, with_keys, [all, all, all]));
        add_product(arena, d_transfer, tile, of_transfer);
        if own.exists {
            let of_reads = comptime!(Product::atb(scores, d_q, [all, d, all]));
            add_product(arena, d_reads, own, of_reads);
        }
        sync_cube();
        store_scores(arena, &mut arrays.d_scores, number, corrected);
        if comptime!(config.writers() == 2) {
            store_scores(arena, &mut arrays.d_scores, number + 1, with_keys);
        }
    } else {
        store_scores(arena, &mut arrays.d_scores, number, with_keys);
    }
    sync_cube();
    if head + 1 < group {
        start_head(arena, arrays, of, head + 1, sizes, config);
    } else if comptime!(config.corrects()) {
        let inverse = comptime!(at(&config, place::SCORES, all));
        load_tokens(arena, &arrays.inverse, of.number, inverse, all);
    }
}

/// dK̃ and Σ S ⊙ dS'; for corrections, dK in do's place and dG. Synchronises before it returns.
#[cube]
fn of_values(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut MatrixArrays,
    of: &ChunkOf,
    own: &WarpTile,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, all) = comptime!((config.head_dim, config.columns, CHUNK_TOKENS));
    let (v, state) = comptime!((at(&config, place::VALUES, n), at(&config, place::STATE, n)));
    let d_state = comptime!(at(&config, place::D_STATE, n));
    let of_keys = comptime!(Product::abt(v, d_state, [all, d, n]));
    let of_change = comptime!(Product::abt(d_state, state, [d, d, n]));
    let whole = WarpTile::new(of_change);
    let mut d_keys = zeros(comptime!(of_keys.fragments()));
    let mut d_change = zeros(comptime!(if config.corrects() { of_change.fragments() } else { 2 }));
    let (channel, half) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let mut sum = 0f32;
    let parts = comptime!(config.parts());
    // From the last part on, which is there.
    keep_loop();
    for i in 0..parts {
        if i > 0 {
            sync_cube();
            start_part(arena, arrays, of, parts - 1 - i, config);
            start_d_state(arena, arrays, of, parts - 1 - i, config);
            finish_loads();
        }
        if own.exists {
            add_product(arena, &mut d_keys, own, of_keys);
        }
        if comptime!(config.corrects()) {
            if whole.exists {
                add_product(arena, &mut d_change, &whole, of_change);
            }
        }
        if half < 2 {
            #[unroll]
            for i in 0..comptime!(n / CHUNK / 2) {
                let at = half * comptime!(n / CHUNK / 2) + i;
                let a = arena[state.at + channel * state.row + at];
                let b = arena[d_state.at + channel * d_state.row + at];
                #[unroll]
                for c in 0..CHUNK {
                    sum += f32::cast_from(a[c]) * f32::cast_from(b[c]);
                }
            }
        }
    }
    if half < 2 {
        arrays.of_states[of.number * comptime!(2 * d) + UNIT_POS as usize] = sum;
    }
    let keys = comptime!(at(&config, place::UPSTREAM, d));
    if own.exists {
        write(arena, &d_keys, own, keys, of_keys);
    }
    if comptime!(config.corrects()) {
        if whole.exists {
            let change = comptime!(at(&config, place::WITH_KEYS, d));
            write(arena, &d_change, &whole, change, of_change);
        }
    }
    finish_loads();
    if comptime!(config.writers() == 2) {
        of.tokens(&arrays.d_keys.strides).store(arena, &mut arrays.d_keys, keys, d);
    }
    if comptime!(!config.corrects()) {
        let to = &mut arrays.d_corrections;
        of.tokens(&to.strides).store(arena, to, keys, d);
    }
}

/// From dK and dG, dT and −dW: dB̃, dZ̃, dN' and dA.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_change(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut MatrixArrays,
    of: &ChunkOf,
    group: usize,
    d_transfer: &mut Accumulator,
    d_reads: &mut Accumulator,
    own: &WarpTile,
    tile: &WarpTile,
    #[comptime] config: DiagonalConfig,
) {
    let (d, all) = comptime!((config.head_dim, CHUNK_TOKENS));
    let (keys, change) =
        comptime!((at(&config, place::UPSTREAM, d), at(&config, place::WITH_KEYS, d)));
    let decayed = comptime!(at(&config, place::DECAYED, d));
    let transfer = comptime!(at(&config, place::TRANSFER, all));
    let reads = comptime!(at(&config, place::READS, d));
    let inverse = comptime!(at(&config, place::SCORES, all));

    let by_change = comptime!(Product::abt(reads, change, [all, d, d]));
    let vectors = comptime!(by_change.fragments());
    let mut d_corrections = zeros(vectors);
    if own.exists {
        add_product(arena, &mut d_corrections, own, by_change);
        scale(&mut d_corrections, -1f32);
        let by_keys = comptime!(Product::ab(transfer, keys, [all, d, all]));
        add_product(arena, &mut d_corrections, own, by_keys);
        add_product(arena, d_reads, own, comptime!(Product::ab(decayed, change, [all, d, d])));
        scale(d_reads, -1f32);
    }
    let square = comptime!(Product::abt(decayed, keys, [all, all, d]));
    add_product(arena, d_transfer, tile, square);

    // No product reads the values and the states any more.
    let (d_t, d_w) = comptime!((at(&config, place::VALUES, all), at(&config, place::STATE, d)));
    let d_b = comptime!(at(&config, place::D_STATE, d));
    write(arena, d_transfer, tile, d_t, square);
    if own.exists {
        write(arena, d_reads, own, d_w, by_change);
        write(arena, &d_corrections, own, d_b, by_change);
    }
    sync_cube();
    let to = &mut arrays.d_corrections;
    of.tokens(&to.strides).store(arena, to, d_b, d);
    let mut d_removal = zeros(vectors);
    if own.exists {
        let by_inverse = comptime!(Product::atb(inverse, d_w, [all, d, all]));
        add_product(arena, &mut d_removal, own, by_inverse);
    }
    // U = Yᵀ dT.
    let mut u = zeros(comptime!(square.fragments()));
    add_product(arena, &mut u, tile, comptime!(Product::atb(inverse, d_t, [all, all, all])));

    // Nor B̃ and dK.
    let (d_z, of_u) =
        comptime!((at(&config, place::UPSTREAM, d), at(&config, place::DECAYED, all)));
    write(arena, &u, tile, of_u, square);
    if own.exists {
        write(arena, &d_removal, own, d_z, by_change);
    }
    sync_cube();
    of.tokens(&arrays.d_removal.strides).store(arena, &mut arrays.d_removal, d_z, d);
    let mut d_system = zeros(comptime!(square.fragments()));
    add_product(arena, &mut d_system, tile, comptime!(Product::abt(d_z, reads, [all, all, d])));
    let by_transfer = comptime!(Product::abt(of_u, transfer, [all, all, all]));
    add_product(arena, &mut d_system, tile, by_transfer);
    // Nor dG.
    let with_corrections = comptime!(at(&config, place::WITH_KEYS, all));
    let with_keys = comptime!(at(&config, place::D_QUERY, all));
    write_lower(arena, &d_system, tile, -1f32, true, with_corrections, square);
    if comptime!(config.writers() == 2) {
        write_lower(arena, &u, tile, -1f32, true, with_keys, square);
    }
    sync_cube();
    let number = first_of_reader(of, group, group, config);
    store_scores(arena, &mut arrays.d_scores, number, with_corrections);
    if comptime!(config.writers() == 2) {
        store_scores(arena, &mut arrays.d_scores, number + 1, with_keys);
    }
}
