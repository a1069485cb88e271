//! The kernels of layer norm and RMS norm.
//!
//! A row is handled by a group of threads: part of a warp, a warp, or a block. A thread holds the same
//! columns of every row that it handles.

use cubecl::prelude::*;

use crate::ops::cuda::block::{RowOffsets, RowSplit, inside, sum_row, sum_vector, write_sum};

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormConfig {
    /// How rows are split among threads.
    pub split: RowSplit,
    /// Whether the mean is subtracted, as in layer norm.
    pub centred: bool,
    /// Whether there is a bias.
    pub biased: bool,
    /// Whether the backward pass adds to `dx` instead of overwriting it.
    pub adds: bool,
}

/// y = (x − mean) / σ · weight + bias of each row.
///
/// - `x`: `[rows, vectors]`, at `offsets`
/// - `weight`, `bias`: `[vectors]`; `bias` is not read unless `biased`
/// - `y`: `[rows, vectors]`
/// - `statistics`: `[rows, 2]`, 1/σ and the mean (0 for RMS norm)
#[cube(launch_unchecked)]
pub fn forward<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    weight: &Array<Vector<f32, N>>,
    bias: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<E, N>>,
    statistics: &mut Array<f32>,
    rows: u32,
    vectors: u32,
    scale: f32,
    eps: f32,
    offsets: RowOffsets,
    #[comptime] config: NormConfig,
    #[define(E)] _dtype: StorageType,
) {
    let threads = comptime!(config.split.threads);
    let vectors = vectors as usize;
    let lane = UNIT_POS as usize % threads;
    // Groups past the last row repeat it and write the same bits again.
    let row = CUBE_POS_X as usize * config.split.groups + UNIT_POS as usize / threads;
    let row = min(row, rows as usize - 1);
    let start = offsets.start(row);
    let mut scratch = SharedMemory::<f32>::new(comptime!(threads.div_ceil(32)));
    let mut sum = Array::<f32>::new(1usize);

    // 1. The row, and its mean.
    let mut held = Array::<Vector<E, N>>::new(config.split.held);
    let mut total = Vector::<f32, N>::cast_from(0f32);
    load_row::<E, N>(x, &mut held, start, lane, vectors, config);
    #[unroll]
    for i in 0..config.split.held {
        total += Vector::cast_from(held[i]);
    }
    let mut mean = f32::cast_from(0f32);
    if config.centred {
        sum[0] = sum_vector::<N>(total);
        sum_row(&mut sum, &mut scratch, 1usize, threads);
        mean = sum[0] * scale;
    }

    // 2. The mean square of the deviations.
    let mut squares = Vector::<f32, N>::cast_from(0f32);
    #[unroll]
    for i in 0..config.split.held {
        if inside(lane + i * threads, vectors, config.split.even) {
            let deviation = Vector::<f32, N>::cast_from(held[i]) - Vector::cast_from(mean);
            squares += deviation * deviation;
        }
    }
    sum[0] = sum_vector::<N>(squares);
    sum_row(&mut sum, &mut scratch, 1usize, threads);
    let inverse = 1.0 / f32::sqrt(sum[0] * scale + eps);

    // 3. The result.
    if lane == 0 {
        statistics[row * 2] = inverse;
        statistics[row * 2 + 1] = mean;
    }
    #[unroll]
    for i in 0..config.split.held {
        let at = lane + i * threads;
        if inside(at, vectors, config.split.even) {
            let deviation = Vector::<f32, N>::cast_from(held[i]) - Vector::cast_from(mean);
            let mut value = deviation * Vector::cast_from(inverse) * weight[at];
            if config.biased {
                value += bias[at];
            }
            y[row * vectors + at] = Vector::cast_from(value);
        }
    }
}

/// With x̂ the normalised row and g = dy · weight: dx = (g − mean(g) − x̂ · mean(g · x̂)) / σ, where
/// mean(g) is omitted for RMS norm. A block also sums dy · x̂ and dy over the rows it handles, which
/// are `stride` apart.
///
/// - `x`, `dy`: `[rows, vectors]`, at `x_offsets` and `dy_offsets`
/// - `weight`: `[vectors]`
/// - `statistics`: `[rows, 2]`, see [`forward`]
/// - `dx`: `[rows, vectors]`; added to if [`NormConfig::adds`]
/// - `parts`: `[blocks, 2, vectors]`; without a bias `[blocks, vectors]`
#[cube(launch_unchecked)]
pub fn backward<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    dy: &Array<Vector<E, N>>,
    weight: &Array<Vector<f32, N>>,
    statistics: &Array<f32>,
    dx: &mut Array<Vector<E, N>>,
    parts: &mut Array<Vector<f32, N>>,
    rows: u32,
    vectors: u32,
    scale: f32,
    x_offsets: RowOffsets,
    dy_offsets: RowOffsets,
    #[comptime] config: NormConfig,
    #[define(E)] _dtype: StorageType,
) {
    let threads = comptime!(config.split.threads);
    let vectors = vectors as usize;
    let rows = rows as usize;
    let lane = UNIT_POS as usize % threads;
    let group = UNIT_POS as usize / threads;
    let mut scratch = SharedMemory::<f32>::new(comptime!(2 * threads.div_ceil(32)));
    let mut sums = Array::<f32>::new(2usize);
    let mut dw = zeros::<N>(config.split.held);
    let mut db = zeros::<N>(config.split.held);
    let mut held_x = Array::<Vector<E, N>>::new(config.split.held);
    let mut held_dy = Array::<Vector<E, N>>::new(config.split.held);
    let mut next_x = Array::<Vector<E, N>>::new(config.split.held);
    let mut next_dy = Array::<Vector<E, N>>::new(config.split.held);
    let mut held_dx = Array::<Vector<E, N>>::new(config.split.held);

    let stride = CUBE_COUNT_X as usize * config.split.groups;
    let first = CUBE_POS_X as usize * config.split.groups;
    let rounds = (rows - first + stride - 1) / stride;
    // Groups past the last row repeat it, without adding it to the sums.
    let row = min(first + group, rows - 1);
    load_row::<E, N>(x, &mut next_x, x_offsets.start(row), lane, vectors, config);
    load_row::<E, N>(dy, &mut next_dy, dy_offsets.start(row), lane, vectors, config);
    let mut next_inverse = statistics[row * 2];
    let mut next_mean = statistics[row * 2 + 1];
    for round in 0..rounds {
        let own = first + round * stride + group;
        let row = min(own, rows - 1);
        let inverse = Vector::<f32, N>::cast_from(next_inverse);
        let mean = Vector::<f32, N>::cast_from(next_mean);
        #[unroll]
        for i in 0..config.split.held {
            held_x[i] = next_x[i];
            held_dy[i] = next_dy[i];
        }
        // Read the next row while this one is computed.
        if round + 1 < rounds {
            let row = min(own + stride, rows - 1);
            load_row::<E, N>(x, &mut next_x, x_offsets.start(row), lane, vectors, config);
            load_row::<E, N>(dy, &mut next_dy, dy_offsets.start(row), lane, vectors, config);
            next_inverse = statistics[row * 2];
            next_mean = statistics[row * 2 + 1];
        }
        if config.adds {
            load_row::<E, N>(dx, &mut held_dx, row * vectors, lane, vectors, config);
        }

        // 1. mean(g) and mean(g · x̂), and the row's part of the sums.
        let mut shift = Vector::<f32, N>::cast_from(0f32);
        let mut slope = Vector::<f32, N>::cast_from(0f32);
        #[unroll]
        for i in 0..config.split.held {
            let at = lane + i * threads;
            if inside(at, vectors, config.split.even) {
                let hat = (Vector::cast_from(held_x[i]) - mean) * inverse;
                let dy = Vector::<f32, N>::cast_from(held_dy[i]);
                let g = dy * weight[at];
                shift += g;
                slope += g * hat;
                if own < rows {
                    dw[i] = dw[i] + dy * hat;
                    if config.biased {
                        db[i] = db[i] + dy;
                    }
                }
            }
        }
        sums[0] = sum_vector::<N>(slope);
        sums[1] = sum_vector::<N>(shift);
        if config.centred {
            sum_row(&mut sums, &mut scratch, 2usize, threads);
        } else {
            sum_row(&mut sums, &mut scratch, 1usize, threads);
            sums[1] = f32::cast_from(0f32);
        }

        // 2. dx.
        let slope = Vector::<f32, N>::cast_from(sums[0] * scale);
        let shift = Vector::<f32, N>::cast_from(sums[1] * scale);
        #[unroll]
        for i in 0..config.split.held {
            let at = lane + i * threads;
            if (own < rows) & inside(at, vectors, config.split.even) {
                let hat = (Vector::cast_from(held_x[i]) - mean) * inverse;
                let g = Vector::<f32, N>::cast_from(held_dy[i]) * weight[at];
                let mut value = (g - shift - hat * slope) * inverse;
                if config.adds {
                    value += Vector::cast_from(held_dx[i]);
                }
                dx[row * vectors + at] = Vector::cast_from(value);
            }
        }
    }

    // 3. The block's sums.
    let kinds = comptime!(if config.biased { 2 } else { 1 });
    let out = CUBE_POS_X as usize * kinds * vectors;
    write_sum::<N>(&dw, parts, out, vectors, config.split);
    if config.biased {
        write_sum::<N>(&db, parts, out + vectors, vectors, config.split);
    }
}

/// A thread's vectors of the row at `start`; zeros past its end.
#[cube]
fn load_row<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    held: &mut Array<Vector<E, N>>,
    start: usize,
    lane: usize,
    vectors: usize,
    #[comptime] config: NormConfig,
) {
    #[unroll]
    for i in 0..config.split.held {
        let at = lane + i * config.split.threads;
        held[i] = Vector::cast_from(0f32);
        if inside(at, vectors, config.split.even) {
            held[i] = x[start + at];
        }
    }
}

#[cube]
fn zeros<N: Size>(#[comptime] len: usize) -> Array<Vector<f32, N>> {
    let mut zeros = Array::<Vector<f32, N>>::new(len);
    #[unroll]
    for i in 0..len {
        zeros[i] = Vector::cast_from(0f32);
    }
    zeros
}
