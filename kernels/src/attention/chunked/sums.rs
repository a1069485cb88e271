//! Sums of log decays inside chunks.

use cubecl::prelude::*;

use super::memory::Sizes;
use super::{CHUNK_TOKENS, THREADS};
use crate::ops::prefix_sum::kernel::scan;
use crate::tile::LOG2_E;

/// The least log decay of a step: the state is then 0 in f32, as it is for any lower one. Without a bound, one that
/// clears the state would take the digits of those summed after it.
pub const LEAST: f32 = -104.0;

/// Chunks of a block.
pub const CHUNKS_PER_BLOCK: usize = THREADS / CHUNK_TOKENS;

/// P_t = Σ_{s≤t} log₂ α_s from the chunk's start; tokens past the last do not decay.
///
/// - `log_decay`: `[rows, tokens]`
/// - `sums`: `[rows, chunks, 64]`
///
/// Grid: `count`, the number of all chunks, by [`CHUNKS_PER_BLOCK`]; [`THREADS`] threads.
#[cube(launch_unchecked)]
pub fn chunk_sums(log_decay: &Array<f32>, sums: &mut Array<f32>, sizes: Sizes, count: u32) {
    let warp = UNIT_POS as usize / 32;
    let number = CUBE_POS_X as usize * CHUNKS_PER_BLOCK + UNIT_POS as usize / CHUNK_TOKENS;
    let within = UNIT_POS as usize % CHUNK_TOKENS;
    let (chunks, tokens) = (sizes.chunks as usize, sizes.tokens as usize);
    let (row, token) = (number / chunks, number % chunks * CHUNK_TOKENS + within);
    let mut step = 0f32;
    if number < count as usize && token < tokens {
        step = max(log_decay[row * tokens + token], f32::cast_from(LEAST)) * LOG2_E;
    }
    let sum = scan::<f32>(step);
    let mut halves = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    if UNIT_POS_PLANE == 31 {
        halves[warp] = sum;
    }
    sync_cube();
    let mut before = 0f32;
    if warp % 2 == 1 {
        before = halves[warp - 1];
    }
    if number < count as usize {
        sums[number * CHUNK_TOKENS + within] = before + sum;
    }
}
