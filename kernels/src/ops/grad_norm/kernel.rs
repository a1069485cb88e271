//! The kernel of sums of squares.

use cubecl::prelude::*;

use crate::ops::cuda::block::{sum_row, sum_vector};

/// Threads per block.
pub const THREADS: usize = 256;

/// Σ x² over each block's vectors, written to `parts`, `[blocks]`, from `slot` on.
///
/// - `x`: `[vectors]`
#[cube(launch_unchecked)]
pub fn squares<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    parts: &mut Array<f32>,
    first: u32,
    vectors: u32,
    slot: u32,
    #[define(E)] _dtype: StorageType,
) {
    // Two sums, to hide the latency of the additions.
    let mut even = Vector::<f32, N>::cast_from(0f32);
    let mut odd = Vector::<f32, N>::cast_from(0f32);
    let stride = (CUBE_COUNT_X * CUBE_DIM) as usize;
    let mut at = first as usize + ABSOLUTE_POS;
    let end = (first + vectors) as usize;
    while at < end {
        let x0 = Vector::<f32, N>::cast_from(x[at]);
        if at + stride < end {
            let x1 = Vector::<f32, N>::cast_from(x[at + stride]);
            odd += x1 * x1;
        }
        even += x0 * x0;
        at += 2 * stride;
    }
    let mut scratch = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = sum_vector::<N>(even + odd);
    sum_row(&mut sum, &mut scratch, 1usize, THREADS);
    if UNIT_POS == 0 {
        parts[(slot + CUBE_POS_X) as usize] = sum[0];
    }
}
