//! Products of readers and writers of a chunk, where each channel decays at its own rate.
//!
//! A decay from a writer s to a reader t is split at a token between them, so that both factors are at most 1: at each
//! level the chunk is cut into blocks of `2·half` tokens, in which the later half reads what the earlier half has
//! written, and the factors are decays to the last writer and from it. Six levels, 32 to 1, cover all pairs with
//! s < t.

use cubecl::prelude::*;

use super::super::memory::{ChunkOf, Own, rounds};
use super::super::product::{Matrix, pair, write_pair};
use super::super::sums::LEAST;
use super::super::{CHUNK_TOKENS, THREADS};
use super::DiagonalConfig;
use crate::tile::product::{Place, quads};
use crate::tile::{
    Accumulator, CHUNK, Chunk, LOG2_E, Pair, all_of_block, exp2, half, keep_loop, zeros,
};
use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};

/// Tokens of a block of `mma.sync`.
pub(super) const BLOCK: usize = 16;

/// Elements of a row of sums.
pub const fn row_of_sums(head_dim: usize) -> usize {
    head_dim + 4
}

/// Elements of the sums of a chunk: a row of zeros, then one per token.
pub const fn sums_len(head_dim: usize) -> usize {
    (CHUNK_TOKENS + 1) * row_of_sums(head_dim)
}

/// Parts of a chunk's tokens whose sums are formed side by side.
pub const fn segments(head_dim: usize) -> usize {
    let mut segments = CHUNK_TOKENS;
    while segments * head_dim > THREADS {
        segments /= 2;
    }
    segments
}

/// Sums the log decays from the chunk's start, base 2: row t + 1 holds P_t, row 0 zeros. Tokens past the last do not
/// decay. Synchronises before it returns.
#[cube]
pub fn load_sums(
    sums: &mut SharedMemory<f32>,
    log_decay: &Array<f32>,
    of: &ChunkOf,
    #[comptime] d: usize,
) {
    let segments = comptime!(segments(d));
    let (tokens, row) = comptime!((CHUNK_TOKENS / segments, row_of_sums(d)));
    let (channel, segment) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let exists = segment < segments;
    let first = segment * tokens;
    if exists {
        let mut sum = 0f32;
        if segment == 0 {
            sums[channel] = 0f32;
        }
        #[unroll]
        for t in 0..tokens {
            let token = first + t;
            let mut step = 0f32;
            if token < of.count {
                let at = (of.token + token) * d + channel;
                step = max(log_decay[at], f32::cast_from(LEAST)) * LOG2_E;
            }
            sum += step;
            sums[(token + 1) * row + channel] = sum;
        }
    }
    sync_cube();
    let mut before = 0f32;
    if exists {
        for s in 0..segment {
            before += sums[(s + 1) * comptime!(tokens * row) + channel];
        }
    }
    sync_cube();
    if exists {
        #[unroll]
        for t in 0..tokens {
            sums[(first + t + 1) * row + channel] += before;
        }
    }
    sync_cube();
}

/// Reads β of a chunk's tokens; 1 where nothing is weighted. The block must synchronise afterwards.
#[cube]
pub fn load_weights(
    weights: &mut SharedMemory<f32>,
    beta: &Array<f32>,
    of: &ChunkOf,
    #[comptime] config: DiagonalConfig,
) {
    let token = UNIT_POS as usize;
    if token < CHUNK_TOKENS {
        let mut weight = f32::cast_from(1f32);
        if comptime!(config.is_weighted()) {
            weight = 0f32;
            if token < of.count {
                weight = beta[of.token + token];
            }
        }
        weights[token] = weight;
    }
}

/// Eight channels of the decay between two rows of sums: 2^(P_to − P_from).
#[cube]
fn factors(
    sums: &SharedMemory<f32>,
    to: usize,
    from: usize,
    chunk: usize,
    #[comptime] d: usize,
) -> Array<f32> {
    let row = comptime!(row_of_sums(d) / 4);
    let quads = quads(sums);
    let mut factors = Array::<f32>::new(CHUNK);
    #[unroll]
    for q in 0..2usize {
        let (to_row, from_row) =
            (quads[to * row + chunk * 2 + q], quads[from * row + chunk * 2 + q]);
        #[unroll]
        for i in 0..4usize {
            factors[comptime!(4 * q + i)] = exp2(to_row[i] - from_row[i]);
        }
    }
    factors
}

/// Eight channels times their factors and a weight, rounded.
#[cube]
fn scaled(value: Chunk, factors: &Array<f32>, weight: f32) -> Chunk {
    let mut scaled = Chunk::cast_from(0f32);
    #[unroll]
    for i in 0..CHUNK {
        scaled[i] = bf16::cast_from(f32::cast_from(value[i]) * (factors[i] * weight));
    }
    scaled
}

/// The row of sums at the middle of the chunk.
pub(super) const MIDDLE: usize = CHUNK_TOKENS / 2;

/// The most decay of half a chunk, base 2, for which the middle serves as the reference of all pairs: factors then stay
/// within 2^±60, and their products, also of pairs that do not count, within f32.
pub(super) const MOST_DECAY: f32 = 60.0;

/// The most decay from the chunk's start, base 2, to readers that split all decays there: their factors are at least
/// 2^−90 and those of the writers before them at most 2^90, which bf16 holds with all its digits.
const MOST_SINCE_START: f32 = 90.0;

/// Whether all decays of the chunk can be split at its middle. All threads call it.
#[cube]
pub(super) fn is_mild(sums: &SharedMemory<f32>, #[comptime] d: usize) -> bool {
    let row = comptime!(row_of_sums(d));
    let channel = UNIT_POS as usize % d;
    let middle = sums[comptime!(MIDDLE * row) + channel];
    let last = sums[comptime!(CHUNK_TOKENS * row) + channel];
    all_of_block(middle >= -MOST_DECAY && last - middle >= -MOST_DECAY)
}

/// How many readers, the chunk's first, can split their decays at its start. A reader's part depends on no later token.
/// All threads call it.
#[cube]
fn readers_from_start(sums: &SharedMemory<f32>, #[comptime] d: usize) -> u32 {
    let row = comptime!(row_of_sums(d));
    let channel = UNIT_POS as usize % d;
    let mut count = u32::cast_from(CHUNK_TOKENS as u32);
    if !all_of_block(sums[comptime!(CHUNK_TOKENS * row) + channel] >= -MOST_SINCE_START) {
        count = u32::cast_from(0u32);
        let mut step = u32::cast_from(MIDDLE as u32);
        keep_loop();
        for _ in 0..comptime!(CHUNK_TOKENS.ilog2()) {
            let last = (count + step) as usize;
            if all_of_block(sums[last * row + channel] >= -MOST_SINCE_START) {
                count += step;
            }
            step >>= 1;
        }
    }
    count
}

/// What a token does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// It reads.
    Reads,
    /// It writes, times its weight if there are weights.
    WritesWeighted,
    /// It writes.
    Writes,
}

/// Multiplies the rows of a matrix by their decays from a row of sums, for readers, or to it, for writers. `after` is 1, or
/// 0 for readers that read before the decay of their own token.
#[cube]
pub fn scale_rows_by(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    after: usize,
    #[comptime] role: Role,
    #[comptime] reference: usize,
    #[comptime] from: Matrix,
    #[comptime] to: Matrix,
    #[comptime] d: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(CHUNK_TOKENS, d)) {
        let at = Own::new(round, CHUNK_TOKENS, d);
        if at.exists {
            let reference = reference.runtime();
            let factors = if comptime!(role == Role::Reads) {
                factors(sums, at.row + after, reference, at.chunk, d)
            } else {
                factors(sums, reference, at.row + 1, at.chunk, d)
            };
            let mut weight = f32::cast_from(1f32);
            if comptime!(role == Role::WritesWeighted) {
                weight = weights[at.row];
            }
            let value = arena[from.at + at.row * from.row + at.chunk];
            arena[to.at + at.row * to.row + at.chunk] = scaled(value, &factors, weight);
        }
    }
}

/// Where the vectors of a chunk lie, and where a level's go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operands {
    /// The readers.
    pub reader: Matrix,
    /// What corrections write, or the keys of an additive update.
    pub correction: Matrix,
    /// The keys of values beside corrections.
    pub key: Matrix,
    /// Decayed: the readers of a level's later halves and the corrections of its earlier halves; or, with one reference
    /// for the whole chunk, all readers.
    pub x: Matrix,
    /// Decayed keys.
    pub y: Matrix,
    /// Corrections, decayed to that reference.
    pub w: Matrix,
}

/// Writes all vectors, decayed between their tokens and a row of sums.
#[cube]
pub(super) fn scale_all(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    after: usize,
    #[comptime] reference: usize,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    scale_rows_by(arena, sums, weights, after, Role::Reads, reference, o.reader, o.x, d);
    scale_rows_by(
        arena,
        sums,
        weights,
        after,
        comptime!(config.corrects_by()),
        reference,
        o.correction,
        o.w,
        d,
    );
    if comptime!(config.writers() == 2) {
        scale_rows_by(arena, sums, weights, after, Role::Writes, reference, o.key, o.y, d);
    }
}

/// Whether a token reads at the level of `half`, a power of two.
#[cube]
pub(super) fn reads(token: u32, half: u32) -> bool {
    (token & half) != 0
}

/// The row of sums of the last writer of a token's block.
#[cube]
pub(super) fn last_writer(token: u32, half: u32) -> u32 {
    token - (token & (2 * half - 1)) + half
}

/// Writes a level's vectors, decayed.
#[cube]
pub(super) fn scale_level(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    after: usize,
    half: u32,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    let d = comptime!(config.head_dim);
    #[unroll]
    for round in 0..comptime!(rounds(CHUNK_TOKENS, d)) {
        let at = Own::new(round, CHUNK_TOKENS, d);
        if at.exists {
            let reads = reads(at.row as u32, half);
            let last_writer = last_writer(at.row as u32, half) as usize;
            let own = at.row + select(reads, after, usize::cast_from(1u32));
            let (later, earlier) =
                (select(reads, own, last_writer), select(reads, last_writer, own));
            let factors = factors(sums, later, earlier, at.chunk, d);
            let mut weight = f32::cast_from(1f32);
            if comptime!(config.is_weighted()) {
                weight = select(reads, 1f32, weights[at.row]);
            }
            let from = select(
                reads,
                comptime!(o.reader.at).runtime(),
                comptime!(o.correction.at).runtime(),
            );
            let value = arena[from + at.row * o.x.row + at.chunk];
            arena[o.x.at + at.row * o.x.row + at.chunk] = scaled(value, &factors, weight);
            if comptime!(config.writers() == 2) {
                let value = arena[o.key.at + at.row * o.key.row + at.chunk];
                arena[o.y.at + at.row * o.y.row + at.chunk] =
                    scaled(value, &factors, f32::cast_from(1f32));
            }
        }
    }
}

/// A warp's blocks of the scores of readers with one kind of writers: 16 × 16 each.
#[derive(CubeType)]
pub struct Scores {
    /// Between the halves of the chunk.
    far: Accumulator,
    /// Between the halves of a half.
    middle: Accumulator,
    /// On the diagonal.
    near: Accumulator,
}

/// Where scores go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// To the arena of numbers in f32.
    Exact(Place),
    /// To the arena of vectors, rounded.
    Rounded(Matrix),
}

/// The warp's block of 16 tokens, and the kind of writers: 0 for corrections, 1 for keys.
#[cube]
fn block_and_writer() -> (usize, usize) {
    let warp = UNIT_POS as usize / 32;
    (warp % 4, warp / 4)
}

/// Whether `s` writes and `t` reads at the level of `half`, in one block.
#[cube]
pub(super) fn meet(t: u32, s: u32, half: u32) -> bool {
    reads(t, half) && !reads(s, half) && (t ^ s) < 2 * half
}

/// Adds the products of 16 rows of A with 16 rows of another matrix of the same width.
#[cube]
fn add_block(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    a_row: usize,
    b_at: usize,
    b_row: usize,
    #[comptime] a: Matrix,
    #[comptime] d: usize,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_PLANE as usize;
    let (eight, within, second) = (lane / 8 % 2, lane % 8, lane / 16);
    for step in 0..comptime!(d / BLOCK) {
        let at = a.at + (a_row + lane % 16) * a.row + step * 2 + second;
        let slice = arena.slice(at, at + 1);
        let left = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::A, 4usize, false);
        let at = b_at + (b_row + second * 8 + within) * a.row + step * 2 + eight;
        let slice = arena.slice(at, at + 1);
        let four = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::B, 4usize, false);
        #[unroll]
        for h in 0..2usize {
            def.execute_inplace(&left, &half(&four, h), acc.index_mut(h));
        }
    }
}

/// The scores of the readers with all writers before them: Σ_n reader_t writer_s decay_n(s → t), where corrections
/// count times their weights. With `own` a reader also reads what its own token writes. Synchronises before it
/// returns.
#[cube]
pub fn scores(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    after: usize,
    #[comptime] own: bool,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) -> Scores {
    let d = comptime!(config.head_dim);
    let (block, writer) = block_and_writer();
    let exists = writer < comptime!(config.writers());
    let corrects = writer == 0;
    let mut scores = Scores { far: zeros(2usize), middle: zeros(2usize), near: zeros(2usize) };
    let (far, below, first) = (32 + block / 2 * BLOCK, block * 32, block * BLOCK);
    let from_start = readers_from_start(sums, d);
    if from_start > 0 {
        scale_all(arena, sums, weights, after, 0usize, o, config);
        sync_cube();
        if exists {
            let at = select(corrects, comptime!(o.w.at).runtime(), comptime!(o.y.at).runtime());
            add_block(arena, &mut scores.far, far, at, block % 2 * BLOCK, o.x, d);
            if block < 2 {
                add_block(arena, &mut scores.middle, below + BLOCK, at, below, o.x, d);
            }
            add_block(arena, &mut scores.near, first, at, first, o.x, d);
            keep_lower(&mut scores.near, first as u32, from_start, own);
        }
        sync_cube();
    }
    if from_start < comptime!(CHUNK_TOKENS as u32) {
        let at = select(corrects, comptime!(o.x.at).runtime(), comptime!(o.y.at).runtime());
        scale_level(arena, sums, weights, after, 32u32.runtime(), o, config);
        sync_cube();
        if exists {
            let mut products = zeros(2usize);
            add_block(arena, &mut products, far, at, block % 2 * BLOCK, o.x, d);
            replace_later(&mut scores.far, &products, far as u32, from_start);
        }
        sync_cube();
        scale_level(arena, sums, weights, after, 16u32.runtime(), o, config);
        sync_cube();
        if exists && block < 2 {
            let mut products = zeros(2usize);
            add_block(arena, &mut products, below + BLOCK, at, below, o.x, d);
            replace_later(&mut scores.middle, &products, (below + BLOCK) as u32, from_start);
        }
        sync_cube();

        if comptime!(own) {
            let (correction, key) = comptime!((o.correction.at, o.key.at));
            let at = select(corrects, correction.runtime(), key.runtime());
            if exists {
                let mut products = zeros(2usize);
                add_block(arena, &mut products, first, at, first, o.reader, d);
                let half = 0u32.runtime();
                add_where(&mut scores.near, &products, weights, writer, half, from_start, config);
            }
        }
        let mut half = u32::cast_from(8u32);
        keep_loop();
        for _ in 0..4usize {
            scale_level(arena, sums, weights, after, half, o, config);
            sync_cube();
            if exists {
                let mut products = zeros(2usize);
                add_block(arena, &mut products, first, at, first, o.x, d);
                add_where(&mut scores.near, &products, weights, writer, half, from_start, config);
            }
            sync_cube();
            half >>= 1;
        }
    }
    scores
}

/// Sets the scores of a block on the diagonal, from token `first` on, to 0 whose writers are not before their readers or,
/// with `own`, at them; and those of readers that are not among the first `from_start`.
#[cube]
fn keep_lower(near: &mut Accumulator, first: u32, from_start: u32, #[comptime] own: bool) {
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for f in 0..2usize {
        let block = near.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            let t = lane / 4 + comptime!((8 * r) as u32);
            let mut end = t;
            if comptime!(own) {
                end += 1;
            }
            let end = select(first + t < from_start, end, 0u32);
            let mut value = block[r];
            #[unroll]
            for c in 0..2usize {
                let s = lane % 4 * 2 + comptime!((8 * f + c) as u32);
                value[c] = select(s < end, value[c], 0f32);
            }
            block[r] = value;
        }
    }
}

/// Replaces the scores in a block, from token `first` on, of readers that are not among the first `from_start`.
#[cube]
fn replace_later(block: &mut Accumulator, by: &Accumulator, first: u32, from_start: u32) {
    #[unroll]
    for f in 0..2usize {
        let (to, products) = (block.index_mut(f), by.index(f));
        #[unroll]
        for r in 0..2usize {
            let row = first + UNIT_POS_PLANE / 4 + comptime!((8 * r) as u32);
            to[r] = select(row < from_start, to[r], products[r]);
        }
    }
}

/// Adds the products of readers that are not among the first `from_start` with writers that meet at a level, or, for
/// `half` = 0, of tokens with themselves.
#[cube]
fn add_where(
    near: &mut Accumulator,
    products: &Accumulator,
    weights: &SharedMemory<f32>,
    writer: usize,
    half: u32,
    from_start: u32,
    #[comptime] config: DiagonalConfig,
) {
    let (block, _) = block_and_writer();
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for f in 0..2usize {
        let (sum, product) = (near.index_mut(f), products.index(f));
        #[unroll]
        for r in 0..2usize {
            let t = lane / 4 + comptime!((8 * r) as u32);
            let mut value = product[r];
            #[unroll]
            for c in 0..2usize {
                let s = lane % 4 * 2 + comptime!((8 * f + c) as u32);
                let mut counts = s == t;
                let mut weight = f32::cast_from(1f32);
                if half > 0 {
                    counts = meet(t, s, half);
                } else if comptime!(config.is_weighted()) {
                    weight = select(writer == 0, weights[block * BLOCK + s as usize], 1f32);
                }
                let counts = counts && block as u32 * comptime!(BLOCK as u32) + t >= from_start;
                value[c] = select(counts, value[c] * weight, 0f32);
            }
            sum[r] = sum[r] + value;
        }
    }
}

/// Writes the scores with one kind of writers as a matrix, with zeros above its diagonal.
#[cube]
pub fn store_scores(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut SharedMemory<f32>,
    scores: &Scores,
    #[comptime] of_writer: usize,
    #[comptime] to: Target,
) {
    let (block, writer) = block_and_writer();
    if writer == of_writer {
        let nothing = zeros(2usize);
        let (row, column) = (32 + block / 2 * BLOCK, block % 2 * BLOCK);
        store_block(arena, numbers, &scores.far, row, column, to);
        store_block(arena, numbers, &nothing, column, row, to);
        if block < 2 {
            let column = block * 32;
            store_block(arena, numbers, &scores.middle, column + BLOCK, column, to);
            store_block(arena, numbers, &nothing, column, column + BLOCK, to);
        }
        store_block(arena, numbers, &scores.near, block * BLOCK, block * BLOCK, to);
    }
}

#[cube]
fn store_block(
    arena: &mut SharedMemory<Chunk>,
    numbers: &mut SharedMemory<f32>,
    block: &Accumulator,
    row: usize,
    column: usize,
    #[comptime] to: Target,
) {
    let lane = UNIT_POS_PLANE as usize;
    #[unroll]
    for r in 0..2usize {
        let row = row + lane / 4 + 8 * r;
        #[unroll]
        for f in 0..2usize {
            let column = column + 8 * f + lane % 4 * 2;
            let value = block.index(f)[r];
            match comptime!(to) {
                Target::Exact(place) => {
                    let at = place.at + row * place.row + column;
                    numbers[at] = value[0];
                    numbers[at + 1] = value[1];
                }
                Target::Rounded(matrix) => write_pair(arena, value, row, column, matrix),
            }
        }
    }
}

/// The decays of the lane's elements between the chunk's start and their tokens, or from them to its end.
#[cube]
pub fn far_factor(
    sums: &SharedMemory<f32>,
    row: usize,
    column: usize,
    after: usize,
    #[comptime] since_start: bool,
    #[comptime] d: usize,
) -> Pair {
    let row_len = comptime!(row_of_sums(d));
    let at = sum_pair(sums, (row + after) * row_len + column);
    let exponent = if comptime!(since_start) {
        at
    } else {
        sum_pair(sums, comptime!(CHUNK_TOKENS * row_len) + column) - at
    };
    pair(exp2(exponent[0]), exp2(exponent[1]))
}

/// Two sums at an even place.
#[cube]
pub(super) fn sum_pair(sums: &SharedMemory<f32>, at: usize) -> Pair {
    sums.to_slice().into_vectorized().with_vector_size::<Const<2>>()[at / 2]
}
