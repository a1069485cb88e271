//! The gradients of queries, keys, corrections and decays, from those of a chunk's matrices.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::memory::{ChunkOf, Sizes, TokensOf};
use super::super::{CHUNK_TOKENS, THREADS};
use super::levels::{
    MIDDLE, Operands, far_factor, is_mild, load_sums, load_weights, row_of_sums, scale_readers,
    scale_writers, segments, sums_len,
};
use super::matrices_back::{first_of_reader, load_tokens};
use super::near::{Near, add_levels, add_mild_reads, add_mild_writes};
use super::{DiagonalConfig, DiagonalInputs, Reading};
use crate::attention::flash::{HeadNumbers, HeadPairs};
use crate::tile::copies::wait_for_chunks;
use crate::tile::matrix::{Matrix, WarpTile, read_pair};
use crate::tile::roles::blocks_per_multiprocessor;
use crate::tile::{
    Accumulator, CHUNK, Chunk, Pair, define_exp2, exp2, keep_loop, sum_of_four, zeros,
};

/// What the kernel reads beside [`DiagonalInputs`], and its results. Where it says so, the gradients of decayed vectors
/// give way to those of the vectors.
#[derive(CubeType, CubeLaunch)]
pub struct VectorArrays {
    /// As [`MatrixArrays`](super::matrices_back::MatrixArrays) has them, as the next.
    pub d_scores: Array<Chunk>,
    /// Likewise.
    pub of_states: Array<f32>,
    /// Whether the chunks are mild, `[rows, chunks]`: 0 or 1.
    pub is_mild: Array<u32>,
    /// dQ, and then the gradient of the queries, `[batch, heads, tokens, head_dim]`.
    pub d_queries: HeadPairs<bf16>,
    /// dZ̃, and then, where there are corrections beside keys, the gradient of the removal keys, `[batch, kv_heads,
    /// tokens, head_dim]`, as the next two.
    pub d_removal: HeadPairs<bf16>,
    /// dB̃, or dK̃ where there are no corrections, and then the gradient of the corrections, or of the keys.
    pub d_corrections: HeadPairs<bf16>,
    /// dK̃ and then the gradient of the keys, where there are corrections beside keys.
    pub d_keys: HeadPairs<bf16>,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub d_log_decay: HeadNumbers,
    /// `[rows, tokens]`, for the delta rule.
    pub d_beta: Array<f32>,
}

/// The matrices of a block in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    vectors: Operands,
    /// The gradients of scores with corrections or, where there are none, with keys; with keys.
    d_scores: [Matrix; 2],
    chunks: usize,
}

impl Layout {
    const fn new(config: &DiagonalConfig) -> Self {
        let (d, two) = (config.head_dim, config.writers() == 2);
        let reader = Matrix::new(0, d);
        let correction = Matrix::new(reader.end(CHUNK_TOKENS), d);
        let x = Matrix::new(correction.end(CHUNK_TOKENS), d);
        let w = Matrix::new(x.end(CHUNK_TOKENS), d);
        let key = Matrix::new(w.end(CHUNK_TOKENS), d);
        let y = Matrix::new(key.end(CHUNK_TOKENS), d);
        let (key, y, end) =
            if two { (key, y, y.end(CHUNK_TOKENS)) } else { (correction, w, w.end(CHUNK_TOKENS)) };
        let first = Matrix::new(end, CHUNK_TOKENS);
        let second = Matrix::new(first.end(CHUNK_TOKENS), CHUNK_TOKENS);
        let chunks = if two { second.end(CHUNK_TOKENS) } else { second.at };
        let vectors = Operands { reader, correction, key, x, y, w };
        Layout { vectors, d_scores: [first, second], chunks }
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
    /// dβ, in two parts.
    d_beta: SharedMemory<f32>,
}

/// Warps below one another in results of 64 tokens.
const DOWN: usize = 4;

/// The gradients of a chunk's vectors and log decays, for chunks whose decays can be split at their middle if `mild`,
/// for the others if not; the kernel for mild chunks runs first. Apart, the one needs fewer registers.
///
/// Grid: the chunks of all rows; [`THREADS`] threads.
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn diagonal_vectors_back(
    inputs: &DiagonalInputs,
    arrays: &mut VectorArrays,
    sizes: Sizes,
    #[comptime] mild: bool,
    #[comptime] config: DiagonalConfig,
) {
    if comptime!(config.head_dim <= 64) {
        blocks_per_multiprocessor(comptime!("diagonal_vectors_back".to_string()), THREADS, 2usize);
    }
    define_exp2();
    let d = comptime!(config.head_dim);
    let layout = comptime!(Layout::new(&config));
    let o = comptime!(layout.vectors);
    let (chunks, group) = (sizes.chunks as usize, sizes.group as usize);
    let number = CUBE_POS_X as usize;
    if comptime!(!mild) {
        if arrays.is_mild[number] != 0 {
            terminate!();
        }
    }
    let mut arena = SharedMemory::<Chunk>::new_aligned(comptime!(layout.chunks), 16usize);
    let mut numbers = Numbers {
        sums: SharedMemory::<f32>::new_aligned(comptime!(sums_len(d)), 16usize),
        weights: SharedMemory::<f32>::new(CHUNK_TOKENS),
        ends: SharedMemory::<f32>::new(comptime!(DOWN * d)),
        d_beta: SharedMemory::<f32>::new(comptime!(2 * CHUNK_TOKENS)),
    };
    let of = ChunkOf::new(number / chunks, number % chunks, &sizes);

    let mut at = UNIT_POS as usize;
    while at < comptime!(DOWN * d) {
        numbers.ends[at] = 0f32;
        at += THREADS;
    }
    if UNIT_POS < comptime!(2 * CHUNK_TOKENS as u32) {
        numbers.d_beta[UNIT_POS as usize] = 0f32;
    }
    let correction = &inputs.correction;
    of.tokens(&correction.strides).start_load(&mut arena, correction, 0usize, o.correction, d);
    if comptime!(config.writers() == 2) {
        of.tokens(&inputs.key.strides).start_load(&mut arena, &inputs.key, 0usize, o.key, d);
    }
    start_reader(&mut arena, inputs, arrays, &of, 0usize.runtime(), &sizes, layout, config);
    load_weights(&mut numbers.weights, &inputs.beta, &of, config);
    let counting = load_sums(&mut numbers.sums, &inputs.log_decay, &of, d);
    if comptime!(mild) {
        let mild = is_mild(&numbers.sums, d);
        if UNIT_POS == 0 {
            arrays.is_mild[number] = u32::cast_from(mild);
        }
        if !mild {
            terminate!();
        }
        scale_writers(&mut arena, &numbers.sums, &numbers.weights, MIDDLE, o, config);
    }

    let vectors = comptime!(config.vectors());
    let own = WarpTile::new(vectors);
    let fragments = comptime!(vectors.fragments());
    let mut near = Near {
        reader: zeros(fragments),
        correction: zeros(fragments),
        key: zeros(comptime!(if config.writers() == 2 { fragments } else { 2 })),
        of_sums: zeros(fragments),
        of_readers: zeros(comptime!(if config.reads_before() { fragments } else { 2 })),
    };
    if own.exists {
        let mut decayed = zeros(fragments);
        let from = &arrays.d_corrections;
        of.tokens(&from.strides).read(&mut decayed, from, &own, vectors);
        add_far_writes(
            &arena,
            &mut numbers,
            &mut near.correction,
            &mut near.of_sums,
            &decayed,
            &own,
            o.correction,
            comptime!(config.is_weighted()),
            config,
        );
        if comptime!(config.writers() == 2) {
            let mut decayed = zeros(fragments);
            of.tokens(&arrays.d_keys.strides).read(&mut decayed, &arrays.d_keys, &own, vectors);
            add_far_writes(
                &arena,
                &mut numbers,
                &mut near.key,
                &mut near.of_sums,
                &decayed,
                &own,
                o.key,
                false,
                config,
            );
        }
    }

    keep_loop();
    for head in 0..group {
        let at = of.queries(head, &arrays.d_queries.strides, &sizes);
        let to = &mut near;
        of_reader(&mut arena, arrays, &numbers, to, &of, &at, &own, false, mild, layout, config);
        if comptime!(config.corrects()) || head + 1 < group {
            start_reader(&mut arena, inputs, arrays, &of, head + 1, &sizes, layout, config);
        }
        if own.exists {
            at.write(&mut arrays.d_queries, &near.reader, &own, 0usize, vectors);
        }
    }
    if comptime!(config.corrects()) {
        let (to, at) = (&mut near, of.tokens(&arrays.d_removal.strides));
        of_reader(&mut arena, arrays, &numbers, to, &of, &at, &own, true, mild, layout, config);
    }
    finish(&arena, arrays, &mut numbers, &mut near, &of, &own, counting, layout, config);
}

/// Starts to load a reader, a query head or, after them, the removal keys, and the gradients of its scores.
#[cube]
fn start_reader(
    arena: &mut SharedMemory<Chunk>,
    inputs: &DiagonalInputs,
    arrays: &VectorArrays,
    of: &ChunkOf,
    reader: usize,
    sizes: &Sizes,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    let (to, all, group) = (comptime!(layout.vectors.reader), CHUNK_TOKENS, sizes.group as usize);
    if reader < group {
        of.queries(reader, &inputs.q.strides, sizes).start_load(arena, &inputs.q, 0usize, to, d);
    } else {
        of.tokens(&inputs.removal.strides).start_load(arena, &inputs.removal, 0usize, to, d);
    }
    let first = first_of_reader(of, reader, group, config);
    load_tokens(arena, &arrays.d_scores, first, layout.d_scores[0], all);
    if comptime!(config.writers() == 2) {
        load_tokens(arena, &arrays.d_scores, first + 1, layout.d_scores[1], all);
    }
}

/// The gradient of a reader that is being loaded, by the state and by its scores; adds to those of the writers and of
/// the sums. Those of corrections and keys of their own are written once the removal keys, which `remove`, have added
/// to them. Synchronises before it returns.
#[cube]
#[allow(clippy::too_many_arguments)]
fn of_reader(
    arena: &mut SharedMemory<Chunk>,
    arrays: &mut VectorArrays,
    numbers: &Numbers,
    near: &mut Near,
    of: &ChunkOf,
    at: &TokensOf,
    own: &WarpTile,
    #[comptime] removes: bool,
    #[comptime] mild: bool,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let (o, d) = comptime!((layout.vectors, config.head_dim));
    let vectors = comptime!(config.vectors());
    let reading = comptime!(if removes { config.removal_reads() } else { config.queries_read() });
    let (sums, weights) = (&numbers.sums, &numbers.weights);
    // Each thread decays what it has loaded itself.
    wait_for_chunks();
    if comptime!(mild) {
        scale_readers(arena, sums, weights, reading.after, MIDDLE, o, d);
    }
    sync_cube();
    if own.exists {
        if comptime!(mild) {
            add_mild_writes(arena, sums, near, own, layout.d_scores, o, config);
            if comptime!(removes && config.writers() == 2) {
                write_writers(arrays, near, of, own, config);
            }
        }
        let mut decayed = zeros(comptime!(vectors.fragments()));
        let from = if comptime!(removes) { &arrays.d_removal } else { &arrays.d_queries };
        at.read(&mut decayed, from, own, vectors);
        set_far_reads(arena, sums, near, &decayed, own, reading, o, config);
        if comptime!(mild) {
            add_mild_reads(arena, sums, near, own, reading, layout.d_scores, o, config);
        }
    }
    if comptime!(mild) {
        sync_cube();
    } else {
        add_levels(arena, sums, weights, near, own, reading, layout.d_scores, o, config);
        if comptime!(removes && config.writers() == 2) {
            if own.exists {
                write_writers(arrays, near, of, own, config);
            }
        }
    }
}

/// Writes the gradients of corrections and of keys.
#[cube]
fn write_writers(
    arrays: &mut VectorArrays,
    near: &Near,
    of: &ChunkOf,
    own: &WarpTile,
    #[comptime] config: DiagonalConfig,
) {
    let vectors = comptime!(config.vectors());
    let to = &mut arrays.d_corrections;
    of.tokens(&to.strides).write(to, &near.correction, own, 0usize, vectors);
    let to = &mut arrays.d_keys;
    of.tokens(&to.strides).write(to, &near.key, own, 0usize, vectors);
}

/// Sets the gradient of the readers to what reaches them by the state.
#[cube]
fn set_far_reads(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    near: &mut Near,
    decayed: &Accumulator,
    tile: &WarpTile,
    #[comptime] reading: Reading,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        #[unroll]
        for f in 0..comptime!(config.fragments()) {
            let column = tile.column(f);
            let factor =
                far_factor(sums, row, column, reading.after, true, comptime!(config.head_dim));
            let value = decayed.index(f)[r] * factor;
            let product = value * read_pair(arena, row, column, o.reader);
            let vector = near.reader.index_mut(f);
            vector[r] = value;
            if comptime!(reading.is_before()) {
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
    arrays: &mut VectorArrays,
    numbers: &mut Numbers,
    near: &mut Near,
    of: &ChunkOf,
    own: &WarpTile,
    counting: u32,
    #[comptime] layout: Layout,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    let row_len = comptime!(row_of_sums(d));
    let vectors = comptime!(config.vectors());
    let segments = comptime!(segments(d));
    let tokens = comptime!(CHUNK_TOKENS / segments);
    let (channel, segment) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let exists = segment < segments;
    let first = segment * tokens;
    let states = of.number * comptime!(2 * d) + channel;
    let decay = exp2(numbers.sums[comptime!(CHUNK_TOKENS * row_len) + channel]);
    let of_state = decay * (arrays.of_states[states] + arrays.of_states[states + d]);
    sync_cube();
    if own.exists {
        if comptime!(config.writers() == 2) {
            let to = &mut arrays.d_removal;
            of.tokens(&to.strides).write(to, &near.reader, own, 0usize, vectors);
        } else {
            if comptime!(config.is_weighted()) {
                join_key(arena, numbers, near, own, layout.vectors.correction, config);
            }
            let to = &mut arrays.d_corrections;
            of.tokens(&to.strides).write(to, &near.correction, own, 0usize, vectors);
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
        let mut after = of_state;
        #[unroll]
        for warp in 0..DOWN {
            after += numbers.ends[comptime!(warp * d) + channel];
        }
        let mut later = segment + 1;
        while later < segments {
            after += numbers.sums[later * comptime!(tokens * row_len) + channel];
            later += 1;
        }
        let to = of.tokens(&arrays.d_log_decay.strides);
        for t in 0..tokens {
            let token = first + t;
            if token < of.count {
                let at = (to.base + token * to.stride) * CHUNK + channel;
                let sum = numbers.sums[token * row_len + channel] + after;
                // A sum of rounding errors, where the decay is lower than those that count.
                let counts = (counting >> t as u32) & 1 == 1;
                arrays.d_log_decay.numbers[at] = select(counts, sum, 0f32);
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
