//! Device functions that several kernels share.

use cubecl::prelude::*;

/// The offsets of a tensor's rows, in vectors: up to three nested strided loops.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct RowOffsets {
    /// Size of the innermost loop.
    pub inner: u32,
    /// Stride of the innermost loop.
    pub inner_stride: u32,
    /// Size of the middle loop.
    pub middle: u32,
    /// Stride of the middle loop.
    pub middle_stride: u32,
    /// Stride of the outermost loop.
    pub outer_stride: u32,
}

#[cube]
impl RowOffsets {
    /// The index of a row's first vector.
    pub fn start(&self, row: usize) -> usize {
        let inner = self.inner as usize;
        let middle = self.middle as usize;
        let rest = row / inner;
        row % inner * self.inner_stride as usize
            + rest % middle * self.middle_stride as usize
            + rest / middle * self.outer_stride as usize
    }
}

/// Sum of a vector's elements.
#[cube]
pub fn sum_vector<N: Size>(x: Vector<f32, N>) -> f32 {
    let mut sum = x[0];
    #[unroll]
    for i in 1..x.vector_size() {
        sum += x[i];
    }
    sum
}

/// Replaces each of `count` values by its sum over the threads that share a row: `threads`
/// neighbouring lanes, a power of two up to 32, or the whole block. The order of summation is fixed,
/// and all threads get the same bits.
///
/// `scratch` holds `count` times `threads / 32` elements.
#[cube]
pub fn sum_row(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] threads: usize,
) {
    let lanes = comptime!(if threads < 32 { threads } else { 32 });
    #[unroll]
    for i in 0..count {
        let mut sum = values[i];
        #[unroll]
        for step in 0..comptime!(lanes.ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
        }
        values[i] = sum;
    }
    if comptime!(threads > 32) {
        let warps = comptime!(threads / 32);
        sync_cube(); // Threads may still read the previous sum.
        if UNIT_POS % 32 == 0 {
            #[unroll]
            for i in 0..count {
                scratch[UNIT_POS as usize / 32 * count + i] = values[i];
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..count {
            let mut sum = scratch[i];
            #[unroll]
            for warp in 1..warps {
                sum += scratch[warp * count + i];
            }
            values[i] = sum;
        }
    }
}
