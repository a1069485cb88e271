//! Inclusive prefix sums of rows.

use cubecl::prelude::*;

/// Threads per block, which handles one row.
pub const THREADS: usize = 512;
/// Consecutive elements per thread.
const ELEMENTS_PER_THREAD: usize = 8;
/// Elements that a block handles at a time.
const TILE_ELEMENTS: usize = THREADS * ELEMENTS_PER_THREAD;

/// y_i = Σ_{j ≤ i} x_j of each row; backwards, Σ_{j ≥ i}.
///
/// Within a tile sums are combined as in a tree; from tile to tile, compensated summation carries the sum
/// so far together with its rounding error.
///
/// - `x`, `y`: `[rows, len]`
#[cube(launch_unchecked)]
pub fn prefix_sum(x: &Array<f32>, y: &mut Array<f32>, len: u32, #[comptime] backwards: bool) {
    let len = len as usize;
    let start = CUBE_POS_X as usize * len;
    let lane = UNIT_POS_PLANE;
    let warp = UNIT_POS as usize / 32;
    let warps = comptime!(THREADS / 32);
    let mut sums = SharedMemory::<f32>::new(warps);
    let mut own = Array::<f32>::new(ELEMENTS_PER_THREAD);
    let mut carry = f32::cast_from(0f32);
    let mut lost = f32::cast_from(0f32);
    let tiles = (len + TILE_ELEMENTS - 1) / TILE_ELEMENTS;
    for tile in 0..tiles {
        // 1. Prefix sums of the thread's elements.
        let first = tile * TILE_ELEMENTS + UNIT_POS as usize * ELEMENTS_PER_THREAD;
        let mut sum = f32::cast_from(0f32);
        #[unroll]
        for i in 0..ELEMENTS_PER_THREAD {
            let mut value = f32::cast_from(0f32);
            if first + i < len {
                value = x[start + place(first + i, len, backwards)];
            }
            own[i] = value;
        }
        #[unroll]
        for i in 0..ELEMENTS_PER_THREAD {
            sum += own[i];
            own[i] = sum;
        }

        // 2. The sums of the lanes before in the warp, and of the warps before.
        let through = scan::<f32>(sum);
        if lane == 31 {
            sums[warp] = through;
        }
        sync_cube();
        let mut part = f32::cast_from(0f32);
        if (lane as usize) < warps {
            part = sums[lane as usize];
        }
        let part = scan::<f32>(part);
        let all = plane_shuffle(part, 31u32);
        let mut before = plane_shuffle(part, max(warp as u32, 1u32) - 1);
        if warp == 0 {
            before = f32::cast_from(0f32);
        }
        // Not `through` − `sum`, which would round again.
        let mut lanes_before = plane_shuffle(through, max(lane, 1u32) - 1);
        if lane == 0 {
            lanes_before = f32::cast_from(0f32);
        }

        // 3. The results, and the sum so far.
        #[unroll]
        for i in 0..ELEMENTS_PER_THREAD {
            if first + i < len {
                let value = carry + (lost + (before + (lanes_before + own[i])));
                y[start + place(first + i, len, backwards)] = value;
            }
        }
        let next = carry + all;
        let added = next - carry;
        let error = (carry - (next - added)) + (all - added);
        carry = next;
        // The error of an infinite sum is NaN: ignore it.
        if !f32::is_nan(error) {
            lost += error;
        }
        sync_cube();
    }
}

/// Inclusive prefix sums over the lanes of a warp.
#[cube]
pub fn scan<N: Numeric>(x: N) -> N {
    let mut sum = x;
    #[unroll]
    for step in 0..5u32 {
        let reach = comptime!(1u32 << step);
        let before = plane_shuffle_up(sum, reach);
        if UNIT_POS_PLANE >= reach {
            sum += before;
        }
    }
    sum
}

#[cube]
fn place(at: usize, len: usize, #[comptime] backwards: bool) -> usize {
    let mut place = at;
    if backwards {
        place = len - 1 - at;
    }
    place
}
