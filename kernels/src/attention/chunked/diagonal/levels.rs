//! The factors of readers and writers of a chunk, where each channel decays at its own rate.
//!
//! A decay from a writer s to a reader t is split at a token between them, so that both factors are at most 1: at each
//! level the chunk is cut into blocks of `2·half` tokens, in which the later half reads what the earlier half has
//! written, and the factors are decays to the last writer and from it. Six levels, 32 to 1, cover all pairs with
//! s < t.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::super::memory::ChunkOf;
use super::super::sums::LEAST;
use super::super::{CHUNK_TOKENS, THREADS};
use super::DiagonalConfig;
use crate::attention::flash::HeadNumbers;
use crate::tile::matrix::{Matrix, pair};
use crate::tile::product::quads;
use crate::tile::rows::{Own, finish_loads, rounds};
use crate::tile::{CHUNK, Chunk, LOG2_E, Pair, all_of_block, exp2};

/// Tokens of a block of `mma.sync`.
pub(super) const BLOCK: usize = 16;

/// Elements of a row of sums.
pub const fn row_of_sums(head_dim: usize) -> usize {
    head_dim + 8
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
/// decay. Finishes what the block has started to load, and synchronises before it returns.
///
/// Returns which decays of the thread's tokens count, a bit for each: its channel is `UNIT_POS % d`, its tokens those
/// of segment `UNIT_POS / d`, if there is one.
#[cube]
pub fn load_sums(
    sums: &mut SharedMemory<f32>,
    log_decay: &HeadNumbers,
    of: &ChunkOf,
    #[comptime] d: usize,
) -> u32 {
    let segments = comptime!(segments(d));
    let (tokens, row) = comptime!((CHUNK_TOKENS / segments, row_of_sums(d)));
    let (channel, segment) = (UNIT_POS as usize % d, UNIT_POS as usize / d);
    let exists = segment < segments;
    let first = segment * tokens;
    let mut counting = u32::cast_from(0u32);
    let from = of.tokens(&log_decay.strides);
    if exists {
        let mut sum = 0f32;
        if segment == 0 {
            sums[channel] = 0f32;
        }
        #[unroll]
        for t in 0..tokens {
            let token = first + t;
            let at = (from.base + min(token, of.count - 1) * from.stride) * CHUNK + channel;
            let (decay, least) = (log_decay.numbers[at], f32::cast_from(LEAST));
            counting |= select(decay > least, comptime!(1u32 << t).runtime(), 0u32);
            sum += select(token < of.count, max(decay, least) * LOG2_E, 0f32);
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
    finish_loads();
    counting
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

/// Whether all decays of the chunk can be split at its middle. All threads call it.
#[cube]
pub(super) fn is_mild(sums: &SharedMemory<f32>, #[comptime] d: usize) -> bool {
    let row = comptime!(row_of_sums(d));
    let channel = UNIT_POS as usize % d;
    let middle = sums[comptime!(MIDDLE * row) + channel];
    let last = sums[comptime!(CHUNK_TOKENS * row) + channel];
    all_of_block(middle >= -MOST_DECAY && last - middle >= -MOST_DECAY)
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

/// Multiplies the rows of a matrix by their decays from a row of sums, for readers, or to it, for writers. `after` is
/// 1, or 0 for readers that read before the decay of their own token.
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

/// Writes the readers, decayed from a row of sums.
#[cube]
pub(super) fn scale_readers(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    after: usize,
    #[comptime] reference: usize,
    #[comptime] o: Operands,
    #[comptime] d: usize,
) {
    scale_rows_by(arena, sums, weights, after, Role::Reads, reference, o.reader, o.x, d);
}

/// Writes corrections and keys, decayed to a row of sums.
#[cube]
pub(super) fn scale_writers(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    #[comptime] reference: usize,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    let (d, role) = comptime!((config.head_dim, config.corrects_by()));
    let after = 1usize.runtime();
    scale_rows_by(arena, sums, weights, after, role, reference, o.correction, o.w, d);
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

/// Whether `s` writes and `t` reads at the level of `half`, in one block.
#[cube]
pub(super) fn meet(t: u32, s: u32, half: u32) -> bool {
    reads(t, half) && !reads(s, half) && (t ^ s) < 2 * half
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
