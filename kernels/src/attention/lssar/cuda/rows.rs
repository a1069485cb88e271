//! What LSSAR computes for each row: the mean and the maximum of φ, which give the row's gain and offset, and
//! what the backward pass makes of them.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::super::weights::{MIN_EXCESS, UNSHIFTED};
use crate::attention::flash::hooks::LaunchOf;
use crate::attention::flash::search::{RowSearch, VALUES};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim};
use crate::tile::{Accumulator, LOG2_E, define_exp2, exp2, log2};

/// What the search finds for each row, `[batch, heads, queries]` in f32.
#[derive(Clone)]
pub struct FoundRows {
    /// 1 / (mean · (max u − O)); 0 for a row that selects nothing.
    pub gain: CudaTensor,
    /// O / (max u − O), or 0.
    pub offset: CudaTensor,
    /// O · gain / N, the factor of the pull that only the row's scores determine.
    pub share: CudaTensor,
}

/// The launch arguments of [`FoundRows`].
#[derive(CubeType, CubeLaunch)]
pub struct FoundRowArrays {
    gain: Array<f32>,
    offset: Array<f32>,
    share: Array<f32>,
}

impl FoundRows {
    /// The launch argument that writes to these tensors.
    pub fn launch(&self) -> LaunchOf<FoundRowArrays> {
        let [gain, offset, share] = [&self.gain, &self.offset, &self.share].map(|x| buffer(x, 1));
        FoundRowArraysLaunch::<CudaRuntime>::new(gain, offset, share)
    }

    /// The gains and offsets with which weights sum to 1, and the pulls.
    ///
    /// - `totals`: the sums of weights with power p and with p − 1
    /// - `deltas`: the means of dP by these weights
    pub fn normalised(
        &self,
        power: u32,
        totals: [&CudaTensor; 2],
        deltas: [&CudaTensor; 2],
    ) -> [CudaTensor; 3] {
        let shape: [usize; 3] = self.gain.meta.shape().dims();
        let count = shape.iter().product();
        let results = [(); 3].map(|()| empty(&self.gain, &shape, DType::F32));
        let [gain, offset, pull] = results.each_ref().map(|x| buffer(x, 1));
        // SAFETY: a thread reads and writes the elements of its row.
        unsafe {
            normalise::launch_unchecked::<CudaRuntime>(
                &self.gain.client,
                blocks(count, THREADS),
                dim(THREADS),
                self.launch(),
                buffer(totals[0], 1),
                buffer(totals[1], 1),
                buffer(deltas[0], 1),
                buffer(deltas[1], 1),
                gain,
                offset,
                pull,
                power as f32,
                as_u32(count),
            );
        }
        results
    }
}

/// ln(1 + eˣ), to f32's relative accuracy also far below 0, and its derivative; requires [`define_exp2`].
#[cube]
pub fn softplus(x: f32) -> (f32, f32) {
    let small = exp2(f32::abs(x) * -LOG2_E);
    let series = small * (1f32 - small * (0.5f32 - small * (1f32 / 3f32 - small * 0.25f32)));
    let log = log2(1f32 + small) * (1f32 / LOG2_E);
    let phi = max(x, 0f32) + select(small < 0.015f32, series, log);
    (phi, select(x >= 0f32, 1f32, small) / (1f32 + small))
}

/// The search of a row's mean and maximum of φ, in one pass.
pub struct Mean;

#[cube]
impl RowSearch for Mean {
    type Results = FoundRowArrays;

    const FACTOR: f32 = 1.0;
    const BY_TILES: bool = false;

    fn init() -> Array<f32> {
        let mut values = Array::<f32>::new(VALUES);
        #[unroll]
        for i in 0..VALUES {
            values[i] = 0f32;
        }
        values
    }

    fn add_tile(
        _values: &mut Array<f32>,
        _s: &Accumulator,
        _scale: f32,
        #[comptime] _r: usize,
        #[comptime] _n_keys: usize,
    ) {
    }

    fn add_first(collected: &mut Array<f32>, score: f32) {
        let (phi, _) = softplus(score);
        collected[0] = max(collected[0], score);
        collected[1] += phi;
    }

    fn add(_collected: &mut Array<f32>, _values: &Array<f32>, _score: f32) {}

    fn end_pass(
        values: &mut Array<f32>,
        collected: &Array<f32>,
        _results: &FoundRowArrays,
        keys: u32,
        _pass: u32,
    ) -> bool {
        let seen = f32::cast_from(keys);
        let mean = collected[1] / seen;
        let (largest, _) = softplus(collected[0]);
        let offset = select(seen > UNSHIFTED, 1f32, 0f32);
        let above = largest / mean - offset;
        let flat = above < MIN_EXCESS;
        let gain = select(flat, 0f32, 1f32 / (mean * above));
        values[0] = gain;
        values[1] = select(flat, 0f32, offset / above);
        values[2] = offset * gain / seen;
        false.runtime()
    }

    fn write(values: &Array<f32>, results: &mut FoundRowArrays, at: usize) {
        results.gain[at] = values[0];
        results.offset[at] = values[1];
        results.share[at] = values[2];
    }
}

/// See [`FoundRows::normalised`].
///
/// Grid: a thread for each row.
#[cube(launch_unchecked)]
fn normalise(
    rows: &FoundRowArrays,
    total: &Array<f32>,
    total_below: &Array<f32>,
    delta: &Array<f32>,
    delta_below: &Array<f32>,
    gain: &mut Array<f32>,
    offset: &mut Array<f32>,
    pull: &mut Array<f32>,
    power: f32,
    count: u32,
) {
    define_exp2();
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let selects = total[at] > 0f32;
        let root = select(selects, exp2(log2(total[at]) * (-1f32 / power)), 0f32);
        gain[at] = rows.gain[at] * root;
        offset[at] = rows.offset[at] * root;
        let of_row = power * rows.share[at] * total_below[at] / total[at];
        pull[at] = select(selects, of_row * (delta_below[at] - delta[at]), 0f32);
    }
}
