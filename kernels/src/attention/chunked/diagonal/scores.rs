//! The scores of a chunk's readers with its writers, by the factors of [`levels`](super::levels).

use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::super::CHUNK_TOKENS;
use super::DiagonalConfig;
use super::levels::{
    BLOCK, MIDDLE, Operands, meet, row_of_sums, scale_level, scale_readers, scale_writers,
};
use crate::tile::matrix::{Matrix, write_pair};
use crate::tile::product::Place;
use crate::tile::{Accumulator, Chunk, all_of_block, half, keep_loop, zeros};

/// The most decay from the chunk's start, base 2, to readers that split all decays there: their factors are at least
/// 2^−90 and those of the writers before them at most 2^90, which bf16 holds with all its digits.
const MOST_SINCE_START: f32 = 90.0;

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
        scale_readers(arena, sums, weights, after, 0usize, o, d);
        scale_writers(arena, sums, weights, 0usize, o, config);
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

/// Sets the scores of a block on the diagonal, from token `first` on, to 0 whose writers are not before their readers
/// or, with `own`, at them; and those of readers that are not among the first `from_start`.
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
