//! The norm of the rows of x inside a product of few rows: each block computes the statistics again, which takes less
//! than another launch.

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::few_rows::{ROWS, STEP, Tiling, WARPS};
use crate::cuda::{CudaTensor, buffer};
use crate::ops::cuda::{nothing, vector};
use crate::tile::{CHUNK, Chunk};

/// f32 of a chunk's elements.
type Floats = Vector<f32, Const<CHUNK>>;

/// A layer norm, or an RMS norm, of each row.
#[derive(Clone, Debug)]
pub struct NormTensors {
    /// `[width]`, f32
    pub weight: CudaTensor,
    /// `[width]`, f32
    pub bias: Option<CudaTensor>,
    /// Whether the mean is subtracted, as in layer norm.
    pub centred: bool,
    /// Added to the mean square.
    pub eps: f32,
}

impl NormTensors {
    /// The kernel's argument for rows of `width`.
    ///
    /// # Panics
    /// When the norm's sizes differ, or its type is not f32.
    pub fn launch(&self, width: usize) -> RowNormLaunch<CudaRuntime> {
        let weight = vector(&self.weight, width, "the norm's weight");
        let bias = self.bias.as_ref().map(|bias| vector(bias, width, "the norm's bias"));
        RowNormLaunch::new(
            buffer(&weight, CHUNK),
            bias.as_ref().map_or_else(|| nothing(&weight), |bias| buffer(bias, CHUNK)),
            self.eps,
            1.0 / width as f32,
            true,
            self.centred,
            bias.is_some(),
        )
    }
}

/// [`NormTensors`] as a kernel's argument.
#[derive(CubeType, CubeLaunch)]
pub struct RowNorm {
    /// `[width]`
    weight: Array<Floats>,
    /// `[width]`; not read unless `biased`.
    bias: Array<Floats>,
    eps: f32,
    inverse_width: f32,
    /// Whether there is a norm.
    #[cube(comptime)]
    pub enabled: bool,
    #[cube(comptime)]
    centred: bool,
    #[cube(comptime)]
    biased: bool,
}

impl RowNorm {
    /// No norm; `any` is any tensor.
    pub fn none(any: &CudaTensor) -> RowNormLaunch<CudaRuntime> {
        RowNormLaunch::new(nothing(any), nothing(any), 0.0, 0.0, false, false, false)
    }
}

#[cube]
impl RowNorm {
    /// The mean (0 unless it is subtracted) and 1/σ of each row of x, `[rows, 2]`; uninitialised without a norm.
    pub fn statistics(
        &self,
        x: &Array<Chunk>,
        rows: usize,
        steps: usize,
        #[comptime] tiling: Tiling,
    ) -> SharedMemory<f32> {
        let mut statistics = SharedMemory::<f32>::new(comptime!(2 * tiling.fragments * ROWS));
        if comptime!(self.enabled) {
            let chunks = steps * comptime!(STEP / CHUNK);
            let lane = UNIT_POS as usize % 32;
            let mut row = UNIT_POS as usize / 32;
            while row < rows {
                let mut mean = 0f32;
                if comptime!(self.centred) {
                    let mut sum = 0f32;
                    let mut at = lane;
                    while at < chunks {
                        let own = Floats::cast_from(x[row * chunks + at]);
                        #[unroll]
                        for e in 0..CHUNK {
                            sum += own[e];
                        }
                        at += 32;
                    }
                    mean = plane_sum(sum) * self.inverse_width;
                }
                let mut squares = 0f32;
                let mut at = lane;
                while at < chunks {
                    let own = Floats::cast_from(x[row * chunks + at]);
                    #[unroll]
                    for e in 0..CHUNK {
                        let deviation = own[e] - mean;
                        squares += deviation * deviation;
                    }
                    at += 32;
                }
                let variance = plane_sum(squares) * self.inverse_width;
                if lane == 0 {
                    statistics[row * 2] = mean;
                    statistics[row * 2 + 1] = 1.0 / f32::sqrt(variance + self.eps);
                }
                row += WARPS;
            }
            sync_cube();
        }
        statistics
    }

    /// The norm of chunk `at` of a row, rounded as the norm's own kernel rounds it.
    pub fn apply(&self, own: Chunk, at: usize, mean: f32, inverse: f32) -> Chunk {
        let deviation = Floats::cast_from(own) - Floats::cast_from(mean);
        let mut value = deviation * Floats::cast_from(inverse) * self.weight[at];
        if comptime!(self.biased) {
            value += self.bias[at];
        }
        Chunk::cast_from(value)
    }
}
