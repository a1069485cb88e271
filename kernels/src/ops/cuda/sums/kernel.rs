//! Sums over many elements, in two passes, in a fixed order.

use cubecl::prelude::*;

use crate::ops::cuda::block::sum_row;

/// Threads of the one block of [`total`].
pub const THREADS: usize = 256;
/// Columns per block of [`columns`], one for each lane of a warp.
pub const COLUMNS: usize = 32;
/// Warps per block of [`columns`]: warp w sums the rows w, w + `WARPS`, ….
pub const WARPS: usize = 16;

/// Sums `columns` columns, from `first` on, of `parts`, `[rows, row]`, into `out`. Their column i goes to
/// index (i mod n)·m + i / n with m = `transposed` and n = `columns` / m, which is i for m = 1.
#[cube(launch_unchecked)]
pub fn columns(
    parts: &Array<f32>,
    out: &mut Array<f32>,
    rows: u32,
    row: u32,
    first: u32,
    columns: u32,
    transposed: u32,
) {
    let lane = UNIT_POS as usize % COLUMNS;
    let warp = UNIT_POS as usize / COLUMNS;
    let columns = columns as usize;
    let column = CUBE_POS_X as usize * COLUMNS + lane;
    let mut sums = SharedMemory::<f32>::new(comptime!(COLUMNS * WARPS));
    let mut sum = f32::cast_from(0f32);
    if column < columns {
        let mut at = warp;
        while at < rows as usize {
            sum += parts[at * row as usize + first as usize + column];
            at += WARPS;
        }
    }
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < COLUMNS as u32 {
        if column < columns {
            #[unroll]
            for warp in 1..WARPS {
                sum += sums[warp * COLUMNS + lane];
            }
            let m = transposed as usize;
            let n = columns / m;
            out[column % n * m + column / n] = sum;
        }
    }
}

/// The sum of `parts`, `[len]`, into `out`, `[1]`, by one block.
#[cube(launch_unchecked)]
pub fn total(parts: &Array<f32>, out: &mut Array<f32>, len: u32) {
    let mut scratch = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = f32::cast_from(0f32);
    let mut at = UNIT_POS;
    while at < len {
        sum[0] = sum[0] + parts[at as usize];
        at += THREADS as u32;
    }
    sum_row(&mut sum, &mut scratch, 1usize, THREADS);
    if UNIT_POS == 0 {
        out[0] = sum[0];
    }
}
