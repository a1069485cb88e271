//! The gradients of queries, keys, corrections and decays, chunk by chunk.

use cubecl::prelude::*;

use super::super::memory::{ChunkOf, Sizes, load};
use super::super::product::{
    Matrix, Product, WarpTile, add_product, pair, read_pair, scale, write, write_pair, write_rows,
};
use super::super::sums::LEAST;
use super::super::{CHUNK_TOKENS, THREADS};
use super::levels::{
    Operands, far_factor, load_sums, load_weights, row_of_sums, scale_rows_by, segments, sums_len,
};
use super::near::{Near, add_near};
use super::{DiagonalConfig, DiagonalInputs};
use crate::tile::roles::two_blocks_per_multiprocessor;
use crate::tile::{
    Accumulator, Bf16Pair, CHUNK, Chunk, Pair, define_exp2, exp2, keep_loop, sum_of_four, zeros,
};

/// What the kernel reads beside [`DiagonalInputs`], and its results.
#[derive(CubeType, CubeLaunch)]
pub struct GradientArrays {
    /// do, `[rows, group, tokens, value_dim]`.
    pub d_o: Array<Chunk>,
    /// `[rows, tokens, value_dim]`
    pub v: Array<Chunk>,
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
    /// `[rows, group, tokens, head_dim]`
    pub d_q: Array<Bf16Pair>,
    /// `[rows, tokens, head_dim]`, where removal keys and corrections are not the keys, as the next.
    pub d_removal: Array<Bf16Pair>,
    /// Likewise.
    pub d_correction: Array<Bf16Pair>,
    /// `[rows, tokens, head_dim]`
    pub d_key: Array<Bf16Pair>,
    /// `[rows, tokens, head_dim]`
    pub d_log_decay: Array<f32>,
    /// `[rows, tokens]`, for the delta rule.
    pub d_beta: Array<f32>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    reader: Matrix,
    correction: Matrix,
    key: Matrix,
    /// The gradients of scores: with corrections or, where there are none, with keys; with keys.
    d_scores: [Matrix; 2],
    /// Chunks from one of four places for intermediate matrices to the next.
    place: usize,
    places: usize,
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let (d, n) = (config.head_dim, config.columns);
        let reader = Matrix::new(0, d);
        let correction = Matrix::new(reader.end(CHUNK_TOKENS), d);
        let key = Matrix::new(correction.end(CHUNK_TOKENS), d);
        let last = if config.writers() == 2 { key } else { correction };
        let first = Matrix::new(last.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let second = Matrix::new(first.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let places = second.end(CHUNK_TOKENS);
        let sizes = [
            Matrix::new(0, d).end(CHUNK_TOKENS),
            Matrix::new(0, CHUNK_TOKENS).end(CHUNK_TOKENS),
            Matrix::new(0, n).end(d),
        ];
        let mut place = sizes[0];
        if sizes[1] > place {
            place = sizes[1];
        }
        if sizes[2] > place {
            place = sizes[2];
        }
        let d_scores = [first, second];
        Layout { reader, correction, key, d_scores, place, places, chunks: places + 4 * place }
    }

    /// A matrix of `columns` columns in one of the four places.
    const fn at(&self, place: usize, columns: usize) -> Matrix {
        Matrix::new(self.places + place * self.place, columns)
    }

    const fn operands(&self, d: usize) -> Operands {
        let (reader, correction, key) = (self.reader, self.correction, self.key);
        let (x, y, w) = (self.at(0, d), self.at(1, d), self.at(2, d));
        Operands { reader, correction, key, x, y, w }
    }
}

/// Numbers in shared memory.
#[derive(CubeType)]
struct Numbers {
    /// The sums of log decays; at last the gradients of those sums.
    sums: SharedMemory<f32>,
    /// β.
    weights: SharedMemory<f32>,
    /// What later chunks contribute to the gradient of the chunk's last sum, by warps of 16 tokens.
    ends: SharedMemory<f32>,
    /// The decay times Σ S ⊙ dS of each channel, in two parts.
    of_state: SharedMemory<f32>,
    /// dβ, in two parts.
    d_beta: SharedMemory<f32>,
}

/// Warps below one another in results of 64 tokens.
const DOWN: usize = 4;

/// The gradients of a chunk's vectors and log decays.
///
/// Grid: the chunks of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_gradients(
    inputs: &DiagonalInputs,
    arrays: &mut GradientArrays,
    sizes: Sizes,
    #[comptime] config: DiagonalConfig,
) {
    if comptime!(config.head_dim <= 64) {
        two_blocks_per_multiprocessor(comptime!("diagonal_gradients".to_string()), THREADS);
    }
    define_exp2();
    let d = comptime!(config.head_dim);
    let layout = comptime!(Layout::new(&config));
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut numbers = Numbers {
        sums: SharedMemory::<f32>::new_aligned(comptime!(sums_len(d)), 16usize),
        weights: SharedMemory::<f32>::new(CHUNK_TOKENS),
        ends: SharedMemory::<f32>::new(comptime!(DOWN * d)),
        of_state: SharedMemory::<f32>::new(comptime!(2 * d)),
        d_beta: SharedMemory::<f32>::new(comptime!(2 * CHUNK_TOKENS)),
    };
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let number = CUBE_POS_X as usize;
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);
    let stride = comptime!(d / CHUNK);
    let base = of.token * stride;

    let mut at = UNIT_POS as usize;
    while at < comptime!(DOWN * d) {
        numbers.ends[at] = 0f32;
        at += THREADS;
    }
    if UNIT_POS < comptime!(2 * CHUNK_TOKENS as u32) {
        numbers.d_beta[UNIT_POS as usize] = 0f32;
    }
    let correction = comptime!(layout.correction);
    load(&mut arena, &inputs.correction, base, stride, of.count, correction, CHUNK_TOKENS, d);
    if comptime!(config.writers() == 2) {
        load(&mut arena, &inputs.key, base, stride, of.count, layout.key, CHUNK_TOKENS, d);
    }
    load_weights(&mut numbers.weights, &inputs.beta, &of, config);
    load_sums(&mut numbers.sums, &inputs.log_decay, &of, d);

    let vectors =
        comptime!(Product::ab(layout.d_scores[0], layout.reader, [CHUNK_TOKENS, d, CHUNK_TOKENS]));
    let square = comptime!(Product::ab(layout.d_scores[0], layout.d_scores[0], [CHUNK_TOKENS; 3]));
    let (own, tile) = (WarpTile::new(vectors), WarpTile::new(square));
    let mut near = Near {
        reader: zeros(comptime!(vectors.fragments())),
        correction: zeros(comptime!(vectors.fragments())),
        key: zeros(comptime!(if config.writers() == 2 { vectors.fragments() } else { 2 })),
        of_sums: zeros(comptime!(vectors.fragments())),
        of_readers: zeros(comptime!(if config.reads_before() { vectors.fragments() } else { 2 })),
    };
    // dT and −dW.
    let mut d_transfer = zeros(comptime!(square.fragments()));
    let mut d_reads = zeros(comptime!(vectors.fragments()));

    // The query heads and, last, the removal keys.
    let o = comptime!(layout.operands(d));
    let mut readers = group;
    if comptime!(config.corrects()) {
        readers = group + 1;
    }
    keep_loop();
    for reader in 0..readers {
        let removes = reader >= group;
        let query = of.query(min(reader, group - 1), &sizes);
        let mut d_decayed = zeros(comptime!(vectors.fragments()));
        let mut after = usize::cast_from(1u32);
        if removes {
            if comptime!(config.reads_before()) {
                join_sums(&mut near, config);
                after = usize::cast_from(0u32);
            }
            of_removal(
                &mut arena,
                inputs,
                arrays,
                &mut numbers,
                &mut near,
                &of,
                &mut d_transfer,
                &mut d_reads,
                &mut d_decayed,
                &own,
                &tile,
                layout,
                config,
            );
        } else {
            load(
                &mut arena,
                &inputs.q,
                query * stride,
                stride,
                of.count,
                layout.reader,
                CHUNK_TOKENS,
                d,
            );
            let number = (of.row * group + reader) * chunks + of.chunk;
            of_query(
                &mut arena,
                arrays,
                &of,
                query,
                number,
                &mut d_decayed,
                &mut d_transfer,
                &mut d_reads,
                &own,
                &tile,
                layout,
                config,
            );
        }
        if own.exists {
            set_far_reads(&arena, &numbers.sums, &mut near, &d_decayed, &own, after, o, config);
        }
        add_near(
            &mut arena,
            &numbers.sums,
            &numbers.weights,
            &mut near,
            &own,
            after,
            !removes,
            layout.d_scores,
            o,
            config,
        );
        if own.exists && !removes {
            let pairs = comptime!(d / 2);
            write_rows(
                &mut arrays.d_q,
                &near.reader,
                &own,
                query * pairs,
                pairs,
                of.count,
                vectors,
            );
        }
    }
    if comptime!(!config.corrects()) {
        let mut d_keys = zeros(comptime!(vectors.fragments()));
        of_values(&mut arena, arrays, &mut numbers, &of, &mut d_keys, &own, layout, config);
        if own.exists {
            add_far_writes(
                &arena,
                &mut numbers,
                &mut near.correction,
                &mut near.of_sums,
                &d_keys,
                &own,
                o.correction,
                false,
                config,
            );
        }
    }
    finish(&arena, inputs, arrays, &mut numbers, &mut near, &of, &own, layout, config);
}

/// Adds what the query heads contribute to the gradients of the sums at their tokens.
#[cube]
fn join_sums(near: &mut Near, #[comptime] config: DiagonalConfig) {
    #[unroll]
    for f in 0..comptime!(config.fragments()) {
        let (to, from) = (near.of_sums.index_mut(f), near.of_readers.index_mut(f));
        #[unroll]
        for r in 0..2usize {
            to[r] = to[r] + from[r];
            from[r] = Pair::cast_from(0f32);
        }
    }
}

/// The gradients of the decayed removal keys, and those of corrections and keys that reach them by the state; in shared
/// memory the removal keys and the gradients of their scores. Synchronises before it returns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_removal(
    arena: &mut SharedMemory<Chunk>,
    inputs: &DiagonalInputs,
    arrays: &GradientArrays,
    numbers: &mut Numbers,
    near: &mut Near,
    of: &ChunkOf,
    d_transfer: &mut Accumulator,
    d_reads: &mut Accumulator,
    d_removal: &mut Accumulator,
    own: &WarpTile,
    tile: &WarpTile,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let o = comptime!(layout.operands(config.head_dim));
    let mut d_keys = zeros(comptime!(config.fragments()));
    of_values(arena, arrays, numbers, of, &mut d_keys, own, layout, config);
    if comptime!(config.writers() == 2) {
        if own.exists {
            add_far_writes(
                arena,
                numbers,
                &mut near.key,
                &mut near.of_sums,
                &d_keys,
                own,
                o.key,
                false,
                config,
            );
        }
    }
    let mut d_decayed = zeros(comptime!(config.fragments()));
    of_change(
        arena,
        inputs,
        arrays,
        numbers,
        of,
        d_transfer,
        d_reads,
        d_removal,
        &mut d_decayed,
        own,
        tile,
        layout,
        config,
    );
    if own.exists {
        add_far_writes(
            arena,
            numbers,
            &mut near.correction,
            &mut near.of_sums,
            &d_decayed,
            own,
            o.correction,
            true,
            config,
        );
    }
}

/// Reads a matrix of all tokens.
#[cube]
fn load_tokens(
    arena: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    number: usize,
    #[comptime] to: Matrix,
    #[comptime] columns: usize,
) {
    let stride = comptime!(columns / CHUNK);
    let base = number * comptime!(CHUNK_TOKENS * columns / CHUNK);
    load(arena, source, base, stride, CHUNK_TOKENS.runtime(), to, CHUNK_TOKENS, columns);
}

/// Writes an accumulator of pairs of tokens as a matrix, rounded, with zeros above the diagonal and, if `strict`, on it.
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

/// dQ of a query head, and the gradients of its scores in shared memory; adds to dT and −dW. Synchronises before it
/// returns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_query(
    arena: &mut SharedMemory<Chunk>,
    arrays: &GradientArrays,
    of: &ChunkOf,
    query: usize,
    number: usize,
    d_query: &mut Accumulator,
    d_transfer: &mut Accumulator,
    d_reads: &mut Accumulator,
    own: &WarpTile,
    tile: &WarpTile,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, all) = comptime!((config.head_dim, config.columns, CHUNK_TOKENS));
    let of_v = comptime!(config.value_dim / CHUNK);
    let (d_o, v, state) = comptime!((layout.at(0, n), layout.at(1, n), layout.at(2, n)));
    let of_state = comptime!(Product::abt(d_o, state, [all, d, n]));
    let of_scores = comptime!(Product::abt(d_o, v, [all, all, n]));
    let mut d_scores = zeros(comptime!(of_scores.fragments()));
    keep_loop();
    for part in 0..comptime!(config.parts()) {
        let first = part * comptime!(n / CHUNK);
        load(arena, &arrays.d_o, query * of_v + first, of_v, of.count, d_o, all, n);
        load(arena, &arrays.v, of.token * of_v + first, of_v, of.count, v, all, n);
        let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
        load(arena, &arrays.states, base, of_v, d.runtime(), state, d, n);
        sync_cube();
        add_product(arena, &mut d_scores, tile, of_scores);
        if own.exists {
            add_product(arena, d_query, own, of_state);
        }
        sync_cube();
    }
    let with_keys = comptime!(layout.d_scores[if config.corrects() { 1 } else { 0 }]);
    write_lower(arena, &d_scores, tile, 1f32, false, with_keys, of_scores);
    if comptime!(config.corrects()) {
        let (transfer, reads) = comptime!((layout.at(0, all), layout.at(1, d)));
        let (scores, d_q) = comptime!((layout.at(2, all), layout.at(3, d)));
        if own.exists {
            write(arena, d_query, own, d_q, of_state);
        }
        load_tokens(arena, &arrays.transfer, of.number, transfer, all);
        load_tokens(arena, &arrays.reads, of.number, reads, d);
        load_tokens(arena, &arrays.of_corrections, number, scores, all);
        sync_cube();
        let by_reads = comptime!(Product::abt(d_q, reads, [all, all, d]));
        let mut d_scores = zeros(comptime!(by_reads.fragments()));
        add_product(arena, &mut d_scores, tile, by_reads);
        scale(&mut d_scores, -1f32, comptime!(by_reads.fragments()));
        let by_transfer = comptime!(Product::abt(with_keys, transfer, [all, all, all]));
        add_product(arena, &mut d_scores, tile, by_transfer);
        let of_transfer = comptime!(Product::atb(scores, with_keys, [all, all, all]));
        add_product(arena, d_transfer, tile, of_transfer);
        if own.exists {
            let of_reads = comptime!(Product::atb(scores, d_q, [all, d, all]));
            add_product(arena, d_reads, own, of_reads);
        }
        sync_cube();
        write_lower(arena, &d_scores, tile, 1f32, false, layout.d_scores[0], by_reads);
    }
    sync_cube();
}

/// dK, and Σ S ⊙ dS of each channel times its decay. Synchronises before it returns.
#[cube]
fn of_values(
    arena: &mut SharedMemory<Chunk>,
    arrays: &GradientArrays,
    numbers: &mut Numbers,
    of: &ChunkOf,
    d_keys: &mut Accumulator,
    own: &WarpTile,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (d, n, all) = comptime!((config.head_dim, config.columns, CHUNK_TOKENS));
    let of_v = comptime!(config.value_dim / CHUNK);
    let (v, state, d_state) = comptime!((layout.at(0, n), layout.at(1, n), layout.at(2, n)));
    let of_keys = comptime!(Product::abt(v, d_state, [all, d, n]));
    let of_change = comptime!(Product::abt(d_state, state, [d, d, n]));
    let whole = WarpTile::new(of_change);
    let mut d_change = zeros(comptime!(if config.corrects() { of_change.fragments() } else { 2 }));
    let (channel, half) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let mut sum = 0f32;
    keep_loop();
    for part in 0..comptime!(config.parts()) {
        let first = part * comptime!(n / CHUNK);
        load(arena, &arrays.v, of.token * of_v + first, of_v, of.count, v, all, n);
        let base = of.number * comptime!(d * config.value_dim / CHUNK) + first;
        load(arena, &arrays.states, base, of_v, d.runtime(), state, d, n);
        load(arena, &arrays.d_states, base, of_v, d.runtime(), d_state, d, n);
        sync_cube();
        if own.exists {
            add_product(arena, d_keys, own, of_keys);
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
        sync_cube();
    }
    if half < 2 {
        let last = comptime!(CHUNK_TOKENS * row_of_sums(d)) + channel;
        numbers.of_state[UNIT_POS as usize] = sum * exp2(numbers.sums[last]);
    }
    if comptime!(config.corrects()) {
        if own.exists {
            write(arena, d_keys, own, comptime!(layout.at(0, d)), of_keys);
        }
        if whole.exists {
            write(arena, &d_change, &whole, comptime!(layout.at(1, d)), of_change);
        }
    }
}

/// From dK and dG in shared memory, dT and −dW: the gradients of the decayed removal keys and corrections, and in shared
/// memory those of their scores and the removal keys. Synchronises before it returns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_change(
    arena: &mut SharedMemory<Chunk>,
    inputs: &DiagonalInputs,
    arrays: &GradientArrays,
    numbers: &Numbers,
    of: &ChunkOf,
    d_transfer: &mut Accumulator,
    d_reads: &mut Accumulator,
    d_removal: &mut Accumulator,
    d_decayed: &mut Accumulator,
    own: &WarpTile,
    tile: &WarpTile,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (d, all) = comptime!((config.head_dim, CHUNK_TOKENS));
    let (keys, change, decayed) = comptime!((layout.at(0, d), layout.at(1, d), layout.at(3, d)));
    let (transfer, reads) = comptime!((layout.d_scores[0], layout.reader));
    scale_rows_by(
        arena,
        &numbers.sums,
        &numbers.weights,
        1usize.runtime(),
        comptime!(config.corrects_by()),
        CHUNK_TOKENS,
        layout.correction,
        decayed,
        d,
    );
    load_tokens(arena, &arrays.transfer, of.number, transfer, all);
    load_tokens(arena, &arrays.reads, of.number, reads, d);
    sync_cube();

    let by_change = comptime!(Product::abt(reads, change, [all, d, d]));
    let vectors = comptime!(by_change.fragments());
    if own.exists {
        add_product(arena, d_decayed, own, by_change);
        scale(d_decayed, -1f32, vectors);
        add_product(arena, d_decayed, own, comptime!(Product::ab(transfer, keys, [all, d, all])));
        add_product(arena, d_reads, own, comptime!(Product::ab(decayed, change, [all, d, d])));
        scale(d_reads, -1f32, vectors);
    }
    let square = comptime!(Product::abt(decayed, keys, [all, all, d]));
    add_product(arena, d_transfer, tile, square);
    sync_cube();

    let (d_t, inverse, d_w) = comptime!((layout.at(0, all), layout.at(1, all), layout.at(3, d)));
    write(arena, d_transfer, tile, d_t, square);
    if own.exists {
        write(arena, d_reads, own, d_w, by_change);
    }
    load_tokens(arena, &arrays.inverse, of.number, inverse, all);
    sync_cube();
    if own.exists {
        add_product(arena, d_removal, own, comptime!(Product::atb(inverse, d_w, [all, d, all])));
    }
    // U = Yᵀ dT.
    let mut u = zeros(comptime!(square.fragments()));
    add_product(arena, &mut u, tile, comptime!(Product::atb(inverse, d_t, [all, all, all])));
    sync_cube();

    let d_z = comptime!(layout.at(2, d));
    write(arena, &u, tile, d_t, square);
    if own.exists {
        write(arena, d_removal, own, d_z, by_change);
    }
    sync_cube();
    let mut d_system = zeros(comptime!(square.fragments()));
    add_product(arena, &mut d_system, tile, comptime!(Product::abt(d_z, reads, [all, all, d])));
    add_product(
        arena,
        &mut d_system,
        tile,
        comptime!(Product::abt(d_t, transfer, [all, all, all])),
    );
    sync_cube();
    write_lower(arena, &d_system, tile, -1f32, true, layout.d_scores[0], square);
    if comptime!(config.writers() == 2) {
        write_lower(arena, &u, tile, -1f32, true, layout.d_scores[1], square);
    }
    let stride = comptime!(d / CHUNK);
    load(arena, &inputs.removal, of.token * stride, stride, of.count, layout.reader, all, d);
    sync_cube();
}

/// Sets the gradient of the readers to what reaches them by the state.
#[cube]
fn set_far_reads(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    near: &mut Near,
    decayed: &Accumulator,
    tile: &WarpTile,
    after: usize,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        #[unroll]
        for f in 0..comptime!(config.fragments()) {
            let column = tile.column(f);
            let factor = far_factor(sums, row, column, after, true, comptime!(config.head_dim));
            let value = decayed.index(f)[r] * factor;
            let product = value * read_pair(arena, row, column, o.reader);
            let vector = near.reader.index_mut(f);
            vector[r] = value;
            if comptime!(config.reads_before()) {
                let of_sum = near.of_readers.index_mut(f);
                of_sum[r] = of_sum[r] + product;
            } else {
                let of_sum = near.of_sums.index_mut(f);
                of_sum[r] = of_sum[r] + product;
            }
        }
    }
}

/// Adds to the gradient of what is written, times its weight, what reaches it by the state after the chunk.
#[cube]
fn add_far_writes(
    arena: &SharedMemory<Chunk>,
    numbers: &mut Numbers,
    vectors: &mut Accumulator,
    of_writer: &mut Accumulator,
    decayed: &Accumulator,
    tile: &WarpTile,
    #[comptime] raw: Matrix,
    #[comptime] weighted: bool,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    #[unroll]
    for f in 0..comptime!(config.fragments()) {
        let column = tile.column(f);
        let mut of_columns = Pair::cast_from(0f32);
        let (vector, of_sum) = (vectors.index_mut(f), of_writer.index_mut(f));
        #[unroll]
        for r in 0..2usize {
            let row = tile.row(r);
            let factor = far_factor(&numbers.sums, row, column, 1usize.runtime(), false, d);
            let value = decayed.index(f)[r] * factor;
            vector[r] = vector[r] + value;
            let mut product = value * read_pair(arena, row, column, raw);
            if comptime!(weighted) {
                product *= Pair::cast_from(numbers.weights[row]);
            }
            of_sum[r] = of_sum[r] - product;
            of_columns += product;
        }
        #[unroll]
        for c in 0..2usize {
            // The lanes that hold this column of the tile's other rows.
            let mut sum = of_columns[c];
            sum += plane_shuffle_xor(sum, 4);
            sum += plane_shuffle_xor(sum, 8);
            sum += plane_shuffle_xor(sum, 16);
            if UNIT_POS_PLANE < 4 {
                numbers.ends[tile.down * d + column + c] += sum;
            }
        }
    }
}

/// Writes the gradients of what belongs to the keys, and of the log decays: the sums, from each token to the last, of
/// the gradients of their sums.
#[cube]
#[allow(clippy::too_many_arguments)]
fn finish(
    arena: &SharedMemory<Chunk>,
    inputs: &DiagonalInputs,
    arrays: &mut GradientArrays,
    numbers: &mut Numbers,
    near: &mut Near,
    of: &ChunkOf,
    own: &WarpTile,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    let (pairs, row_len) = comptime!((d / 2, row_of_sums(d)));
    let vectors =
        comptime!(Product::ab(layout.d_scores[0], layout.reader, [CHUNK_TOKENS, d, CHUNK_TOKENS]));
    let base = of.token * pairs;
    sync_cube();
    if own.exists {
        if comptime!(config.writers() == 2) {
            write_rows(&mut arrays.d_removal, &near.reader, own, base, pairs, of.count, vectors);
            write_rows(
                &mut arrays.d_correction,
                &near.correction,
                own,
                base,
                pairs,
                of.count,
                vectors,
            );
            write_rows(&mut arrays.d_key, &near.key, own, base, pairs, of.count, vectors);
        } else {
            if comptime!(config.is_weighted()) {
                join_key(arena, numbers, near, own, layout.correction, config);
            }
            write_rows(&mut arrays.d_key, &near.correction, own, base, pairs, of.count, vectors);
        }
        #[unroll]
        for r in 0..2usize {
            #[unroll]
            for f in 0..comptime!(config.fragments()) {
                let at = own.row(r) * row_len + own.column(f);
                let value = near.of_sums.index(f)[r];
                numbers.sums[at] = value[0];
                numbers.sums[at + 1] = value[1];
            }
        }
    }
    sync_cube();
    if comptime!(config.reads_before()) {
        if own.exists {
            #[unroll]
            for r in 0..2usize {
                let row = own.row(r);
                if row > 0 {
                    #[unroll]
                    for f in 0..comptime!(config.fragments()) {
                        let at = (row - 1) * row_len + own.column(f);
                        let value = near.of_readers.index(f)[r];
                        numbers.sums[at] += value[0];
                        numbers.sums[at + 1] += value[1];
                    }
                }
            }
        }
        sync_cube();
    }
    let segments = comptime!(segments(d));
    let tokens = comptime!(CHUNK_TOKENS / segments);
    let (channel, segment) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let exists = segment < segments;
    let first = segment * tokens;
    let mut sum = 0f32;
    if exists {
        #[unroll]
        for t in 0..tokens {
            let at = (first + comptime!(tokens - 1 - t)) * row_len + channel;
            sum += numbers.sums[at];
            numbers.sums[at] = sum;
        }
    }
    sync_cube();
    if exists {
        let mut after = numbers.of_state[channel] + numbers.of_state[d + channel];
        #[unroll]
        for warp in 0..DOWN {
            after += numbers.ends[comptime!(warp * d) + channel];
        }
        let mut later = segment + 1;
        while later < segments {
            after += numbers.sums[later * comptime!(tokens * row_len) + channel];
            later += 1;
        }
        for t in 0..tokens {
            let token = first + t;
            if token < of.count {
                let at = (of.token + token) * d + channel;
                let sum = numbers.sums[token * row_len + channel] + after;
                // A sum of rounding errors, where the decay is lower than those that count.
                let counts = inputs.log_decay[at] > f32::cast_from(LEAST);
                arrays.d_log_decay[at] = select(counts, sum, 0f32);
            }
        }
    }
    if comptime!(config.is_weighted()) {
        let token = UNIT_POS as usize;
        if token < of.count {
            arrays.d_beta[of.token + token] =
                numbers.d_beta[token] + numbers.d_beta[CHUNK_TOKENS + token];
        }
    }
}

/// The gradient of keys that are removal keys and, times their weights, corrections, in place of that of the
/// corrections; and the parts of dβ.
#[cube]
fn join_key(
    arena: &SharedMemory<Chunk>,
    numbers: &mut Numbers,
    near: &mut Near,
    own: &WarpTile,
    #[comptime] key: Matrix,
    #[comptime] config: DiagonalConfig,
) {
    #[unroll]
    for r in 0..2usize {
        let row = own.row(r);
        let weight = Pair::cast_from(numbers.weights[row]);
        let mut sum = 0f32;
        #[unroll]
        for f in 0..comptime!(config.fragments()) {
            let key = read_pair(arena, row, own.column(f), key);
            let (of_key, of_removal) = (near.correction.index_mut(f), near.reader.index(f));
            let product = key * of_key[r];
            sum += product[0] + product[1];
            of_key[r] = of_key[r] * weight + of_removal[r];
        }
        let sum = sum_of_four(sum);
        if UNIT_POS_PLANE % 4 == 0 {
            numbers.d_beta[own.across * CHUNK_TOKENS + row] = sum;
        }
    }
}
