//! The decays between tokens and states, the near keys of queries, and the weights of rows.

use cubecl::prelude::*;

use crate::ops::prefix_sum::kernel::scan;
use crate::tile::{CHUNK, Chunk, LOG2_E, MASKED, RowStrides, exp2};

/// Threads of a block.
pub const THREADS: usize = 256;

/// Warps of a block of [`decays_of_chunks`], with a chunk each.
pub const CHUNKS_PER_BLOCK: usize = THREADS / 32;

/// Tokens whose rows of scores have one shift, as in [`DecaySums`](crate::attention::decay::DecaySums).
const SPAN: usize = crate::attention::decay::SPAN;

/// The decays of a call, base 2.
#[derive(CubeType, CubeLaunch)]
pub struct Decays {
    /// log₂ of the decay from the end of the chunk two before a query's to the start of the query's span;
    /// [`MASKED`] or less if the query's document starts later. `[rows, tokens]`.
    pub reads: Array<f32>,
    /// The decay from a token to the end of its chunk, 0 if a document starts in between. `[rows, tokens]`.
    pub until_end: Array<f32>,
    /// log₂ of the decay over a chunk, `[rows, chunks]`.
    pub totals: Array<f32>,
}

/// The sizes of [`decays_of_chunks`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct DecaySizes {
    /// Kv heads of a sequence.
    pub kv_heads: u32,
    /// Tokens of a row.
    pub tokens: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Chunks of all rows.
    pub count: u32,
}

/// Where log decays come from, a compile-time argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecaySources {
    /// A gate.
    pub gated: bool,
    /// Document starts, before which nothing is kept.
    pub documents: bool,
}

/// A token's log decay, base 2, and the part of it that a document's start makes.
#[cube]
fn step(
    log_decay: &Array<f32>,
    starts: &Array<i32>,
    row: usize,
    token: usize,
    end: usize,
    sizes: &DecaySizes,
    #[comptime] sources: DecaySources,
) -> (f32, f32) {
    let tokens = sizes.tokens as usize;
    let mut decay = f32::cast_from(0f32);
    let mut forgotten = f32::cast_from(0f32);
    if token < end {
        if comptime!(sources.documents) {
            let start = starts[row / sizes.kv_heads as usize * tokens + token] as usize;
            if (start == token) & (token > 0) {
                forgotten = f32::cast_from(MASKED);
            }
        }
        decay = forgotten;
        if comptime!(sources.gated) {
            decay += max(log_decay[row * tokens + token] * LOG2_E, f32::cast_from(MASKED));
        }
    }
    (decay, forgotten)
}

/// The decays of a call.
///
/// - `log_decay`: `[rows, tokens]`, natural logarithm, if `sources.gated`
/// - `starts`: the start of each token's document, `[batch, tokens]`, if `sources.documents`
///
/// Grid: all chunks by [`CHUNKS_PER_BLOCK`]; [`THREADS`] threads.
#[cube(launch_unchecked)]
pub fn decays_of_chunks(
    log_decay: &Array<f32>,
    starts: &Array<i32>,
    results: &mut Decays,
    sizes: DecaySizes,
    #[comptime] sources: DecaySources,
) {
    let (tokens, chunk_tokens) = (sizes.tokens as usize, sizes.chunk as usize);
    let chunks = (tokens + chunk_tokens - 1) / chunk_tokens;
    let number = CUBE_POS_X as usize * CHUNKS_PER_BLOCK + UNIT_POS as usize / 32;
    let lane = UNIT_POS_PLANE as usize;
    if number < sizes.count as usize {
        let (row, chunk) = (number / chunks, number % chunks);
        let first = chunk * chunk_tokens;
        let end = min(first + chunk_tokens, tokens);
        let rounds = chunk_tokens / 32;

        // 1. Over the chunk before.
        let mut before = f32::cast_from(0f32);
        if chunk > 0 {
            for round in 0..rounds {
                let token = first - chunk_tokens + round * 32 + lane;
                let (decay, _) = step(log_decay, starts, row, token, end, &sizes, sources);
                before += plane_sum(decay);
            }
        }

        // 2. From the chunk's start to each query's span.
        let mut total = f32::cast_from(0f32);
        let mut until_span = f32::cast_from(0f32);
        let mut forgotten = f32::cast_from(0f32);
        for round in 0..rounds {
            if round * 32 % SPAN == 0 {
                until_span = total;
                forgotten = f32::cast_from(0f32);
            }
            let token = first + round * 32 + lane;
            let (decay, start) = step(log_decay, starts, row, token, end, &sizes, sources);
            let in_span = forgotten + scan::<f32>(start);
            if token < end {
                results.reads[row * tokens + token] = before + until_span + in_span;
            }
            forgotten = plane_shuffle(in_span, 31u32);
            total += plane_sum(decay);
        }
        if lane == 0 {
            results.totals[number] = total;
        }

        // 3. From each token to the chunk's end.
        let mut after = f32::cast_from(0f32);
        for round in 0..rounds {
            let token = first + chunk_tokens - 1 - round * 32 - lane;
            let (decay, _) = step(log_decay, starts, row, token, end, &sizes, sources);
            let through = scan::<f32>(decay);
            // Not `through` − `decay`, which would round again.
            let others = plane_shuffle_up(through, 1u32);
            let sum = after + select(lane == 0, 0f32, others);
            if token < end {
                results.until_end[row * tokens + token] = exp2(sum);
            }
            after += plane_shuffle(through, 31u32);
        }
    }
}

/// The first key that a token's query reads one by one: that of its document, or of the chunk before its own.
///
/// - `starts`: `[batch, tokens]`, if `documents`
/// - `near`: `[batch, tokens]`, `count` in all
#[cube(launch_unchecked)]
pub fn near_starts(
    starts: &Array<i32>,
    near: &mut Array<i32>,
    tokens: u32,
    chunk: u32,
    count: u32,
    #[comptime] documents: bool,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let own = at as u32 % tokens / chunk;
        let mut first = i32::cast_from((max(own, 1u32) - 1) * chunk);
        if documents {
            first = max(first, starts[at]);
        }
        near[at] = first;
    }
}

/// −δ times the factors of what queries read from S: the gradients of the sums of far weights.
///
/// - all of one shape, of `count` elements
#[cube(launch_unchecked)]
pub fn gradients_of_sums(
    delta: &Array<f32>,
    factors: &Array<f32>,
    results: &mut Array<f32>,
    count: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        results[at] = -delta[at] * factors[at];
    }
}

/// The rows of x times their factors, rounded.
///
/// - `x`: `[batch, heads, tokens, head_dim]`
/// - `factors`: `[batch, heads, tokens]`
/// - `weighted`: shaped as x, contiguous, `count` chunks in all
#[cube(launch_unchecked)]
pub fn weigh(
    x: &Array<Chunk>,
    factors: &Array<f32>,
    weighted: &mut Array<Chunk>,
    strides: RowStrides,
    heads: u32,
    tokens: u32,
    count: u32,
    #[comptime] chunks: u32,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let (row, chunk) = (at as u32 / chunks, at as u32 % chunks);
        let (head, token) = (row / tokens, row % tokens);
        let base = strides.base((head / heads) as usize, (head % heads) as usize);
        let vector = x[base + token as usize * strides.row as usize + chunk as usize];
        let factor = Vector::<f32, Const<CHUNK>>::cast_from(factors[row as usize]);
        weighted[at] = Vector::cast_from(Vector::<f32, Const<CHUNK>>::cast_from(vector) * factor);
    }
}
