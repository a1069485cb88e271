//! Device functions that several kernels share.

use cubecl::prelude::*;

/// How a kernel splits rows of vectors among the threads of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowSplit {
    /// Threads per row: a power of two up to 32, or a multiple of 32, the whole block.
    pub threads: usize,
    /// Vectors of a row per thread.
    pub held: usize,
    /// Rows that a block handles at a time.
    pub groups: usize,
    /// Whether all threads hold the same number of vectors, so that no bounds check is needed.
    pub even: bool,
}

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

/// The strides of `[batch, heads, seq_len, head_dim]`, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct HeadStrides {
    /// Between sequences.
    pub batch: u32,
    /// Between heads.
    pub head: u32,
    /// Between rows.
    pub row: u32,
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

/// The sum over `lanes` neighbouring lanes, a power of two up to 32; all of them get the same bits.
#[cube]
pub fn sum_lanes(value: f32, #[comptime] lanes: usize) -> f32 {
    let mut sum = value;
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
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
        values[i] = sum_lanes(values[i], lanes);
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

/// Whether vector `at` is inside the row.
#[cube]
pub fn inside(at: usize, vectors: usize, #[comptime] even: bool) -> bool {
    let mut inside = true;
    if comptime!(!even) {
        inside = at < vectors;
    }
    inside
}

/// Writes the sum over the block's rows of what their threads hold, `[vectors]`, in a fixed order.
#[cube]
pub fn write_sum<N: Size>(
    held: &Array<Vector<f32, N>>,
    parts: &mut Array<Vector<f32, N>>,
    out: usize,
    vectors: usize,
    #[comptime] split: RowSplit,
) {
    let threads = comptime!(split.threads);
    if comptime!(split.groups == 1) {
        #[unroll]
        for i in 0..split.held {
            let at = UNIT_POS as usize + i * threads;
            if inside(at, vectors, split.even) {
                parts[out + at] = held[i];
            }
        }
    } else {
        let columns = comptime!(threads * split.held);
        let lane = UNIT_POS as usize % threads;
        let group = UNIT_POS as usize / threads;
        let mut all = SharedMemory::<Vector<f32, N>>::new(comptime!(split.groups * columns));
        #[unroll]
        for i in 0..split.held {
            all[group * columns + lane + i * threads] = held[i];
        }
        sync_cube();
        let mut at = UNIT_POS as usize;
        while at < vectors {
            let mut sum = all[at];
            #[unroll]
            for group in 1..split.groups {
                sum += all[group * columns + at];
            }
            parts[out + at] = sum;
            at += CUBE_DIM as usize;
        }
        sync_cube();
    }
}
