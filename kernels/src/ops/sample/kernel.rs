//! The choice of a token: a block for each row.
//!
//! A warp reads a part of the row; its lanes read neighbouring logits. Sums are in a fixed order. The k-th
//! largest logit, and the smallest of those that make up top-p, are found bit by bit: each of 32 passes counts
//! (or sums the weights of) the logits from a candidate on. A row of 50,000 logits stays in the
//! multiprocessor's cache.

use cubecl::prelude::*;

use crate::tile::{LOG2_E, define_exp2, exp2};

/// Threads per block.
pub const THREADS: usize = 1024;

const WARPS: usize = THREADS / 32;

/// The compile-time configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Filter {
    /// Whether the token is drawn, rather than the most likely one.
    pub random: bool,
    /// Whether only the k most likely tokens are kept.
    pub top_k: bool,
    /// Whether only the most likely tokens of a total probability are kept.
    pub top_p: bool,
}

/// The part of a row that a warp reads.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// Index of the row's first logit.
    row: usize,
    /// The lane's first token.
    first: usize,
    /// The end of the warp's tokens.
    end: usize,
}

/// Which tokens are kept: those with a key above `key`, and the first `ties` of those with this key.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    key: u32,
    ties: u32,
}

/// The token of each row, see [`sample`](super::sample).
///
/// Grid: rows.
///
/// - `logits`: `[rows, vocab]`
/// - `uniforms`: `[rows]`, in [0, 1)
/// - `tokens`: `[rows]`
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
pub fn sample(
    logits: &Array<f32>,
    uniforms: &Array<f32>,
    tokens: &mut Array<i32>,
    vocab: u32,
    inverse_temperature: f32,
    top_k: u32,
    top_p: f32,
    #[comptime] filter: Filter,
) {
    define_exp2();
    let (row, vocab) = (CUBE_POS_X as usize, vocab as usize);
    let warp = UNIT_POS as usize / 32;
    let lane = UNIT_POS as usize % 32;
    let share = (vocab + comptime!(WARPS - 1)) / WARPS;
    let part =
        Part { row: row * vocab, first: warp * share + lane, end: min((warp + 1) * share, vocab) };
    let mut scratch = SharedMemory::<f32>::new(WARPS);
    let mut counts = SharedMemory::<u32>::new(WARPS);

    let mut most = f32::cast_from(f32::MIN);
    let mut at = part.first;
    while at < part.end {
        most = max(most, logits[part.row + at]);
        at += 32;
    }
    most = block_max(most, &mut scratch);

    if comptime!(!filter.random) {
        let mut best = vocab as u32 - 1;
        let mut at = part.first;
        while at < part.end {
            if logits[part.row + at] == most {
                best = min(best, at as u32);
            }
            at += 32;
        }
        best = block_min(best, &mut counts);
        if UNIT_POS == 0 {
            tokens[row] = i32::cast_from(best);
        }
    } else {
        let scale = inverse_temperature * LOG2_E;
        // Everything: every logit's key is above 0.
        let mut kept = Kept { key: 0u32.runtime(), ties: 0u32.runtime() };
        if comptime!(filter.top_k) {
            kept.key = kth_key(logits, &part, top_k, &mut counts);
            kept.ties = top_k - block_sum_u32(count_above(logits, &part, kept.key), &mut counts);
        }
        if comptime!(filter.top_p) {
            keep_nucleus(logits, &part, &mut kept, most, scale, top_p, &mut scratch);
        }
        let uniform = uniforms[row];
        draw(logits, &part, &kept, most, scale, uniform, &mut scratch, &mut counts, tokens, row);
    }
}

/// A number that is ordered as `x` is.
#[cube]
fn key_of(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    select(bits >> 31 == 1, !bits, bits | 0x8000_0000u32)
}

/// The logit whose key this is.
#[cube]
fn logit_of(key: u32) -> f32 {
    f32::reinterpret(select(key >> 31 == 1, key & 0x7fff_ffffu32, !key))
}

/// The probability of a logit, relative to that of the largest.
#[cube]
fn weight(logit: f32, most: f32, scale: f32) -> f32 {
    exp2((logit - most) * scale)
}

/// The lane's number of keys above `key`.
#[cube]
fn count_above(logits: &Array<f32>, part: &Part, key: u32) -> u32 {
    let mut count = 0u32;
    let mut at = part.first;
    while at < part.end {
        count += select(key_of(logits[part.row + at]) > key, 1u32, 0u32);
        at += 32;
    }
    count
}

/// The largest key that at least `k` keys reach.
#[cube]
fn kth_key(logits: &Array<f32>, part: &Part, k: u32, counts: &mut SharedMemory<u32>) -> u32 {
    let mut key = 0u32;
    for bit in 0..32u32 {
        let candidate = key | (1u32 << (31u32 - bit));
        let reached = block_sum_u32(count_above(logits, part, candidate - 1), counts);
        if reached >= k {
            key = candidate;
        }
    }
    key
}

/// The lane's weight of the keys above `key`.
#[cube]
fn weight_above(logits: &Array<f32>, part: &Part, key: u32, most: f32, scale: f32) -> f32 {
    let mut sum = 0f32;
    let mut at = part.first;
    while at < part.end {
        let logit = logits[part.row + at];
        sum += select(key_of(logit) > key, weight(logit, most, scale), 0f32);
        at += 32;
    }
    sum
}

/// Of the tokens kept, keeps the most likely ones whose weight is at least `top_p` of the whole.
#[cube]
fn keep_nucleus(
    logits: &Array<f32>,
    part: &Part,
    kept: &mut Kept,
    most: f32,
    scale: f32,
    top_p: f32,
    scratch: &mut SharedMemory<f32>,
) {
    let mut total = block_sum(weight_above(logits, part, kept.key, most, scale), scratch);
    if kept.ties > 0 {
        total += f32::cast_from(kept.ties) * weight(logit_of(kept.key), most, scale);
    }
    let target = top_p * total;
    // The largest key such that the tokens from it on weigh enough.
    let mut key = 0u32;
    for bit in 0..32u32 {
        let candidate = key | (1u32 << (31u32 - bit));
        let sum = block_sum(weight_above(logits, part, candidate - 1, most, scale), scratch);
        if sum >= target {
            key = candidate;
        }
    }
    // At top-k's smallest key or below, at most the ties that top-k keeps.
    let mut most_ties = u32::MAX.runtime();
    if key <= kept.key {
        key = kept.key;
        most_ties = kept.ties;
    }
    let above = block_sum(weight_above(logits, part, key, most, scale), scratch);
    let one = weight(logit_of(key), most, scale);
    let ties = max(f32::ceil((target - above) / one), 1f32);
    kept.key = key;
    kept.ties = min(u32::cast_from(min(ties, 4e9f32)), most_ties);
}

/// Writes the first token whose cumulative weight exceeds `uniform` of the total.
#[cube]
fn draw(
    logits: &Array<f32>,
    part: &Part,
    kept: &Kept,
    most: f32,
    scale: f32,
    uniform: f32,
    scratch: &mut SharedMemory<f32>,
    counts: &mut SharedMemory<u32>,
    tokens: &mut Array<i32>,
    row: usize,
) {
    let warp = UNIT_POS as usize / 32;
    // Each warp's weight above the key, and its number of ties.
    let above = plane_sum(weight_above(logits, part, kept.key, most, scale));
    let mut own_ties = 0u32;
    if kept.ties > 0 {
        own_ties = count_above(logits, part, kept.key - 1) - count_above(logits, part, kept.key);
    }
    let own_ties = plane_sum(own_ties);
    sync_cube();
    if UNIT_POS % 32 == 0 {
        scratch[warp] = above;
        counts[warp] = own_ties;
    }
    sync_cube();
    let mut one = 0f32;
    if kept.ties > 0 {
        one = weight(logit_of(kept.key), most, scale);
    }
    // All units go through the warps' sums in order.
    let mut total = 0f32;
    let mut before = 0f32;
    let mut ties_before = 0u32;
    let mut ties = 0u32;
    for other in 0..WARPS {
        if other == warp {
            before = total;
            ties_before = ties;
        }
        let taken = min(counts[other], kept.ties - ties);
        ties += taken;
        total += scratch[other] + f32::cast_from(taken) * one;
    }
    let target = uniform * total;
    let own = above + f32::cast_from(min(own_ties, kept.ties - ties_before)) * one;
    // The last warp that has weight and starts at the target or before it.
    sync_cube();
    if UNIT_POS % 32 == 0 {
        counts[warp] = select((own > 0f32) & (before <= target), 1u32, 0u32);
    }
    sync_cube();
    let mut chosen = 0usize;
    for other in 0..WARPS {
        if counts[other] == 1 {
            chosen = other;
        }
    }
    if warp == chosen {
        let lane = UNIT_POS as usize % 32;
        let mut cumulative = before;
        let mut ties = ties_before;
        let mut token = part.first - lane;
        let mut found = false;
        let mut start = part.first - lane;
        while start < part.end {
            let at = start + lane;
            let mut key = 0u32;
            let mut heavy = 0f32;
            if at < part.end {
                let logit = logits[part.row + at];
                key = key_of(logit);
                heavy = weight(logit, most, scale);
            }
            let tied = select((key == kept.key) & (at < part.end), 1u32, 0u32);
            let rank = ties + plane_inclusive_sum(tied);
            let taken = (key > kept.key) | ((tied == 1) & (rank <= kept.ties));
            let own = select(taken, heavy, 0f32);
            let sum = cumulative + plane_inclusive_sum(own);
            let reached = taken & (sum > target);
            // Before the target is reached, the last token kept.
            let candidate = select(taken, at as u32 + 1, 0u32);
            let last = plane_max(candidate);
            let first = plane_min(select(reached, at as u32, u32::MAX));
            if !found {
                if first != u32::MAX {
                    token = first as usize;
                    found = true;
                } else if last > 0 {
                    token = last as usize - 1;
                }
            }
            cumulative = plane_broadcast(sum, 31u32);
            ties = plane_broadcast(rank, 31u32);
            start += 32;
        }
        if lane == 0 {
            tokens[row] = i32::cast_from(token as u32);
        }
    }
}

/// The sum over the block; all units get the same bits.
#[cube]
fn block_sum(x: f32, scratch: &mut SharedMemory<f32>) -> f32 {
    let of_warp = plane_sum(x);
    sync_cube(); // Units may still read the previous result.
    if UNIT_POS % 32 == 0 {
        scratch[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    plane_sum(scratch[UNIT_POS as usize % 32])
}

/// As [`block_sum`], for counts.
#[cube]
fn block_sum_u32(x: u32, scratch: &mut SharedMemory<u32>) -> u32 {
    let of_warp = plane_sum(x);
    sync_cube();
    if UNIT_POS % 32 == 0 {
        scratch[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    plane_sum(scratch[UNIT_POS as usize % 32])
}

/// The largest over the block.
#[cube]
fn block_max(x: f32, scratch: &mut SharedMemory<f32>) -> f32 {
    let of_warp = plane_max(x);
    sync_cube();
    if UNIT_POS % 32 == 0 {
        scratch[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    plane_max(scratch[UNIT_POS as usize % 32])
}

/// The least over the block.
#[cube]
fn block_min(x: u32, scratch: &mut SharedMemory<u32>) -> u32 {
    let of_warp = plane_min(x);
    sync_cube();
    if UNIT_POS % 32 == 0 {
        scratch[UNIT_POS as usize / 32] = of_warp;
    }
    sync_cube();
    plane_min(scratch[UNIT_POS as usize % 32])
}
