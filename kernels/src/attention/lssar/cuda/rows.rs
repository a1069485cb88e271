//! What LSSAR computes for each row: the mean and the maximum of φ, which give the row's gain and offset, and
//! what the backward pass makes of them.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::super::weights::{MIN_EXCESS, UNSHIFTED};
use super::phi::{SoftplusSum, softplus};
use crate::attention::flash::hooks::LaunchOf;
use crate::attention::flash::search::{RowSearch, VALUES};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim};
use crate::tile::{Accumulator, LOG2_E, MASKED, define_exp2, exp2, log2, sum_of_four};

/// What the search finds for each row, `[batch, heads, queries]` in f32; φ and its mean are to base 2.
#[derive(Clone)]
pub struct FoundRows {
    /// 1 / (mean · (max u − O)); 0 for a row that selects nothing.
    pub gain: CudaTensor,
    /// O / (max u − O), or 0.
    pub offset: CudaTensor,
    /// O · gain · log₂ e / N, the factor of the pull that only the row's scores determine.
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

    /// What the backward pass reads: the gains and offsets with which weights sum to 1, the changes of scores by
    /// which δ is felt, p · log₂ e · gain · δ, and the pulls.
    ///
    /// - `totals`: the sums of weights with power p and with p − 1
    /// - `deltas`: the means of dP by these weights
    pub fn normalised(
        &self,
        power: u32,
        totals: [&CudaTensor; 2],
        deltas: [&CudaTensor; 2],
    ) -> [CudaTensor; 4] {
        let shape: [usize; 3] = self.gain.meta.shape().dims();
        let count = shape.iter().product();
        let results = [(); 4].map(|()| empty(&self.gain, &shape, DType::F32));
        let [gain, offset, centre, pull] = results.each_ref().map(|x| buffer(x, 1));
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
                centre,
                pull,
                power as f32,
                as_u32(count),
            );
        }
        results
    }
}

/// The search of a row's mean and maximum of φ, in one pass.
pub struct Mean;

#[cube]
impl RowSearch for Mean {
    type Results = FoundRowArrays;

    const FACTOR: f32 = LOG2_E;
    const BY_TILES: bool = true;

    fn init() -> Array<f32> {
        let mut values = Array::<f32>::new(VALUES);
        #[unroll]
        for i in 1..VALUES {
            values[i] = 0f32;
        }
        values[0] = f32::cast_from(MASKED);
        values
    }

    /// Each lane has its own maximum and sum.
    fn add_tile(
        values: &mut Array<f32>,
        s: &Accumulator,
        scale: f32,
        #[comptime] r: usize,
        #[comptime] n_keys: usize,
    ) {
        // Two sums, because the additions to one wait for one another.
        let (mut even, mut odd) = (SoftplusSum::empty(), SoftplusSum::empty());
        let mut most = values[0];
        #[unroll]
        for n in 0..n_keys {
            let pair = s.index(n)[r];
            let (first, second) = (pair[0] * scale, pair[1] * scale);
            most = max(most, max(first, second));
            even.add(first);
            odd.add(second);
        }
        values[0] = most;
        values[1] += even.total() + odd.total();
    }

    fn add_first(collected: &mut Array<f32>, score: f32) {
        collected[0] = max(collected[0], score);
        collected[1] += softplus(score);
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
        let mut most = max(collected[0], values[0]);
        most = max(most, plane_shuffle_xor(most, 1));
        most = max(most, plane_shuffle_xor(most, 2));
        let mean = (collected[1] + sum_of_four(values[1])) / seen;
        let largest = softplus(most);
        let offset = select(seen > UNSHIFTED, 1f32, 0f32);
        let above = largest / mean - offset;
        let flat = above < MIN_EXCESS;
        let gain = select(flat, 0f32, 1f32 / (mean * above));
        values[0] = gain;
        values[1] = select(flat, 0f32, offset / above);
        values[2] = offset * gain * LOG2_E / seen;
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
    centre: &mut Array<f32>,
    pull: &mut Array<f32>,
    power: f32,
    count: u32,
) {
    define_exp2();
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let selects = total[at] > 0f32;
        let root = select(selects, exp2(log2(total[at]) * (-1f32 / power)), 0f32);
        let of_row = rows.gain[at] * root;
        gain[at] = of_row;
        centre[at] = power * LOG2_E * of_row * delta[at];
        offset[at] = rows.offset[at] * root;
        let of_row = power * rows.share[at] * total_below[at] / total[at];
        pull[at] = select(selects, of_row * (delta_below[at] - delta[at]), 0f32);
    }
}
