//! The gradients of a chunk's readers and writers by their scores, with the factors of [`levels`](super::levels).

use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::levels::{
    BLOCK, MOST_DECAY, Operands, last_writer, meet, reads, row_of_sums, scale_level, sum_pair,
};
use super::{DiagonalConfig, Reading};
use crate::tile::matrix::{Matrix, WarpTile, pair, read_pair};
use crate::tile::{Accumulator, Bf16Pair, CHUNK, Chunk, Pair, exp2, half, keep_loop, zeros};

/// The gradients of a chunk's readers and writers: results of 64 tokens of head_dim channels.
#[derive(CubeType)]
pub struct Near {
    /// Of the readers.
    pub reader: Accumulator,
    /// Of the corrections, times their weights.
    pub correction: Accumulator,
    /// Of the keys.
    pub key: Accumulator,
    /// Of the sums of log decays at the tokens.
    pub of_sums: Accumulator,
    /// Of the sums up to which the present readers read, if some read before the decay of their own token.
    pub of_readers: Accumulator,
}

/// Adds the gradients that reach the readers of a mild chunk by the scores, whose gradients `d_scores`, with
/// corrections and with keys, are 0 wherever there is no score. All vectors are given decayed to the chunk's middle.
#[cube]
pub fn add_mild_reads(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    near: &mut Near,
    tile: &WarpTile,
    #[comptime] reading: Reading,
    #[comptime] d_scores: [Matrix; 2],
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    let (first, zero, half) = (tile.down * BLOCK, 0usize.runtime(), WHOLE.runtime());
    let earlier = tile.down as u32 + 1;
    let mut acc = zeros(comptime!(config.fragments()));
    add_reads(arena, &mut acc, tile, first, zero, earlier, half, d_scores[0], o.w, config);
    if comptime!(config.writers() == 2) {
        add_reads(arena, &mut acc, tile, first, zero, earlier, half, d_scores[1], o.y, config);
    }
    add_of_readers(arena, sums, near, &acc, tile, half, reading, o, config);
}

/// As [`add_mild_reads`], those that reach the writers.
#[cube]
pub fn add_mild_writes(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    near: &mut Near,
    tile: &WarpTile,
    #[comptime] d_scores: [Matrix; 2],
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    let (first, after, half) = (tile.down * BLOCK, 1usize.runtime(), WHOLE.runtime());
    let later = 4 - tile.down as u32;
    let mut acc = zeros(comptime!(config.fragments()));
    add_writes(arena, &mut acc, tile, first, first, later, half, d_scores[0], o.x, config);
    let (to, of_sums) = (&mut near.correction, &mut near.of_sums);
    add_of_level(arena, sums, to, of_sums, &acc, tile, half, after, false, o.w, config);
    if comptime!(config.writers() == 2) {
        let mut acc = zeros(comptime!(config.fragments()));
        add_writes(arena, &mut acc, tile, first, first, later, half, d_scores[1], o.x, config);
        let (to, of_sums) = (&mut near.key, &mut near.of_sums);
        add_of_level(arena, sums, to, of_sums, &acc, tile, half, after, false, o.y, config);
    }
}

/// The level at which the decays of a mild chunk are split, at its middle. No block is too small for its tokens to be
/// told apart there: d_scores has zeros where there is no score.
const WHOLE: u32 = 32;

/// As [`add_mild_reads`] and [`add_mild_writes`], of any chunk, level by level; vectors are given without decay.
/// Synchronises before it returns.
#[cube]
pub fn add_levels(
    arena: &mut SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    weights: &SharedMemory<f32>,
    near: &mut Near,
    tile: &WarpTile,
    #[comptime] reading: Reading,
    #[comptime] d_scores: [Matrix; 2],
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    if comptime!(reading.own) {
        if tile.exists {
            add_own(arena, weights, near, tile, d_scores, o, config);
        }
    }
    let mut half = u32::cast_from(32u32);
    keep_loop();
    for _ in 0..6usize {
        scale_level(arena, sums, weights, reading.after.runtime(), half, o, config);
        sync_cube();
        if tile.exists {
            let first = tile.down * BLOCK;
            // The first reader of the block's readers and writers, where these are whole blocks; below, each block has
            // both.
            let boundary = last_writer(first as u32, half);
            let far = half >= comptime!(BLOCK as u32);
            let reads = reads(first as u32, half);
            let steps = select(far, half / comptime!(BLOCK as u32), 1u32.runtime());
            if reads || !far {
                let from = select(far, (boundary - half) as usize, first);
                let mut acc = zeros(comptime!(config.fragments()));
                add_reads(
                    arena,
                    &mut acc,
                    tile,
                    first,
                    from,
                    steps,
                    half,
                    d_scores[0],
                    o.x,
                    config,
                );
                if comptime!(config.writers() == 2) {
                    add_reads(
                        arena,
                        &mut acc,
                        tile,
                        first,
                        from,
                        steps,
                        half,
                        d_scores[1],
                        o.y,
                        config,
                    );
                }
                add_of_readers(arena, sums, near, &acc, tile, half, reading, o, config);
            }
            if !reads || !far {
                let from = select(far, boundary as usize, first);
                let mut acc = zeros(comptime!(config.fragments()));
                add_writes(
                    arena,
                    &mut acc,
                    tile,
                    first,
                    from,
                    steps,
                    half,
                    d_scores[0],
                    o.x,
                    config,
                );
                add_of_level(
                    arena,
                    sums,
                    &mut near.correction,
                    &mut near.of_sums,
                    &acc,
                    tile,
                    half,
                    1usize.runtime(),
                    false,
                    o.x,
                    config,
                );
                if comptime!(config.writers() == 2) {
                    let mut acc = zeros(comptime!(config.fragments()));
                    add_writes(
                        arena,
                        &mut acc,
                        tile,
                        first,
                        from,
                        steps,
                        half,
                        d_scores[1],
                        o.x,
                        config,
                    );
                    add_of_level(
                        arena,
                        sums,
                        &mut near.key,
                        &mut near.of_sums,
                        &acc,
                        tile,
                        half,
                        1usize.runtime(),
                        false,
                        o.y,
                        config,
                    );
                }
            }
        }
        sync_cube();
        half >>= 1;
    }
}

/// The products of tokens with themselves.
#[cube]
fn add_own(
    arena: &SharedMemory<Chunk>,
    weights: &SharedMemory<f32>,
    near: &mut Near,
    tile: &WarpTile,
    #[comptime] d_scores: [Matrix; 2],
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    #[unroll]
    for r in 0..2usize {
        let t = tile.row(r);
        let even = t / 2 * 2;
        let both = read_pair(arena, t, even, d_scores[0]);
        let gradient = Pair::cast_from(select(t == even, both[0], both[1]));
        let weighted = gradient * Pair::cast_from(weights[t]);
        #[unroll]
        for f in 0..comptime!(config.fragments()) {
            let column = tile.column(f);
            let reader = read_pair(arena, t, column, o.reader);
            let correction = read_pair(arena, t, column, o.correction);
            let d_reader = near.reader.index_mut(f);
            d_reader[r] = d_reader[r] + weighted * correction;
            let d_correction = near.correction.index_mut(f);
            d_correction[r] = d_correction[r] + gradient * reader;
        }
        if comptime!(config.writers() == 2) {
            let both = read_pair(arena, t, even, d_scores[1]);
            let gradient = Pair::cast_from(select(t == even, both[0], both[1]));
            #[unroll]
            for f in 0..comptime!(config.fragments()) {
                let column = tile.column(f);
                let reader = read_pair(arena, t, column, o.reader);
                let key = read_pair(arena, t, column, o.key);
                let d_reader = near.reader.index_mut(f);
                d_reader[r] = d_reader[r] + gradient * key;
                let d_key = near.key.index_mut(f);
                d_key[r] = d_key[r] + gradient * reader;
            }
        }
    }
}

/// [`add_of_level`] of readers.
#[cube]
fn add_of_readers(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    near: &mut Near,
    acc: &Accumulator,
    tile: &WarpTile,
    half: u32,
    #[comptime] reading: Reading,
    #[comptime] o: Operands,
    #[comptime] config: DiagonalConfig,
) {
    if comptime!(reading.is_before()) {
        add_of_level(
            arena,
            sums,
            &mut near.reader,
            &mut near.of_readers,
            acc,
            tile,
            half,
            reading.after.runtime(),
            true,
            o.x,
            config,
        );
    } else {
        add_of_level(
            arena,
            sums,
            &mut near.reader,
            &mut near.of_sums,
            acc,
            tile,
            half,
            reading.after.runtime(),
            true,
            o.x,
            config,
        );
    }
}

/// Adds what a level has: the decayed gradients to those of the vectors, and their products with the vectors, as
/// decayed and rounded, to those of the sums. So what a pair adds to its reader's sum is what it takes from its
/// writer's.
#[cube]
fn add_of_level(
    arena: &SharedMemory<Chunk>,
    sums: &SharedMemory<f32>,
    vectors: &mut Accumulator,
    of_sums: &mut Accumulator,
    acc: &Accumulator,
    tile: &WarpTile,
    half: u32,
    after: usize,
    #[comptime] reads: bool,
    #[comptime] from: Matrix,
    #[comptime] config: DiagonalConfig,
) {
    let row_len = comptime!(row_of_sums(config.head_dim));
    #[unroll]
    for r in 0..2usize {
        let row = tile.row(r);
        let last_writer = last_writer(row as u32, half) as usize;
        let own = row + after;
        #[unroll]
        for f in 0..comptime!(config.fragments()) {
            let column = tile.column(f);
            let value = acc.index(f)[r];
            let (vector, of_sum) = (vectors.index_mut(f), of_sums.index_mut(f));
            let (at, reference) = (
                sum_pair(sums, own * row_len + column),
                sum_pair(sums, last_writer * row_len + column),
            );
            let exponent = if comptime!(reads) { at - reference } else { reference - at };
            // At levels of less than a block, of a token that has the other role, whose gradient is 0, it may be any.
            let limit = f32::cast_from(MOST_DECAY);
            let factor = pair(exp2(min(exponent[0], limit)), exp2(min(exponent[1], limit)));
            vector[r] = vector[r] + value * factor;
            let product = value * read_pair(arena, row, column, from);
            of_sum[r] = if comptime!(reads) { of_sum[r] + product } else { of_sum[r] - product };
        }
    }
}

/// Adds d_scores · writers, for the readers from `first` on and `steps`·16 writers from `from` on.
#[cube]
fn add_reads(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    tile: &WarpTile,
    first: usize,
    from: usize,
    steps: u32,
    half: u32,
    #[comptime] d_scores: Matrix,
    #[comptime] writers: Matrix,
    #[comptime] config: DiagonalConfig,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_PLANE as usize;
    for step in 0..steps {
        let from = from + step as usize * BLOCK;
        let at = d_scores.at + (first + lane % 16) * d_scores.row + from / CHUNK + lane / 16;
        let slice = arena.slice(at, at + 1);
        let mut left = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::A, 4usize, false);
        if half < comptime!(BLOCK as u32) {
            keep_meeting(&mut left, half, false);
        }
        add_with(arena, acc, &left, tile, from, writers, config);
    }
}

/// Adds d_scoresᵀ · readers, for the writers from `first` on and `steps`·16 readers from `from` on.
#[cube]
fn add_writes(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    tile: &WarpTile,
    first: usize,
    from: usize,
    steps: u32,
    half: u32,
    #[comptime] d_scores: Matrix,
    #[comptime] readers: Matrix,
    #[comptime] config: DiagonalConfig,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_PLANE as usize;
    let (eight, within, second) = (lane / 8 % 2, lane % 8, lane / 16);
    for step in 0..steps {
        let from = from + step as usize * BLOCK;
        let at = d_scores.at + (from + second * 8 + within) * d_scores.row + first / CHUNK + eight;
        let slice = arena.slice(at, at + 1);
        let mut left = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::A, 4usize, true);
        if half < comptime!(BLOCK as u32) {
            keep_meeting(&mut left, half, true);
        }
        add_with(arena, acc, &left, tile, from, readers, config);
    }
}

/// Sets the elements of a block on the diagonal to 0 whose tokens do not meet at a level.
#[cube]
fn keep_meeting(left: &mut Array<Bf16Pair>, half: u32, #[comptime] transposed: bool) {
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for i in 0..4usize {
        let mut value = left[i];
        #[unroll]
        for c in 0..2usize {
            let row = lane / 4 + comptime!((i % 2 * 8) as u32);
            let column = lane % 4 * 2 + comptime!((i / 2 * 8 + c) as u32);
            let mut counts = meet(row, column, half);
            if comptime!(transposed) {
                counts = meet(column, row, half);
            }
            value[c] = select(counts, value[c], bf16::cast_from(0f32));
        }
        left[i] = value;
    }
}

/// Adds the product of a fragment with the 16 rows of a matrix from `row` on.
#[cube]
fn add_with(
    arena: &SharedMemory<Chunk>,
    acc: &mut Accumulator,
    left: &Array<Bf16Pair>,
    tile: &WarpTile,
    row: usize,
    #[comptime] with: Matrix,
    #[comptime] config: DiagonalConfig,
) {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let lane = UNIT_POS_PLANE as usize;
    #[unroll]
    for two in 0..comptime!(config.fragments() / 2) {
        let column = tile.column + comptime!(two * BLOCK);
        let at = with.at + (row + lane % 16) * with.row + column / CHUNK + lane / 16;
        let slice = arena.slice(at, at + 1);
        let four = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::B, 4usize, true);
        #[unroll]
        for h in 0..2usize {
            def.execute_inplace(left, &half(&four, h), acc.index_mut(comptime!(two * 2 + h)));
        }
    }
}
