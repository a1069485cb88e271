//! The search of a row's threshold τ, where f(τ) = Σ_j max(z_j − τ, 0)² is 1, with z = S/2.
//!
//! Only keys above τ matter. A lower bound of τ is the maximum − 1, or a step of Newton's from another one, taken
//! with the keys so far: further keys only raise f.
//!
//! Over all scores, the first pass estimates τ tile by tile. It keeps f and A = −f'/2 of the keys so far at the
//! estimate. Of the keys before a tile they are extrapolated as if f^(1/3) were linear: f^(1/2) is convex, so that its
//! root would be a lower bound, and f itself falls like an exponential where keys have one's tail.
//!
//! A later pass sums, over the c keys above τ, their excess A and its square f. As long as no key crosses the
//! threshold, Σ (z − τ − δ)² = 1 is quadratic in δ, and its root is exact. Otherwise errors shrink as their
//! third power: the step ends the search if it is [`LAST_STEP`] of the mean excess. After
//! [`QUADRATIC_PASSES`], steps are Newton's for f^(1/2) − 1, which converge from any τ.

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::attention::flash::candidates::CandidateSearch;
use crate::attention::flash::hooks::LaunchOf;
use crate::attention::flash::search::{RowSearch, VALUES};
use crate::cuda::{CudaTensor, buffer};
use crate::tile::{Accumulator, exp2, log2, sum_of_four};

/// The search.
pub struct Threshold;

/// τ, `[batch, heads, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct FoundThresholds {
    tau: Array<f32>,
}

/// The launch argument that writes to `tau`, `[batch, heads, queries]` in f32.
pub fn results(tau: &CudaTensor) -> LaunchOf<FoundThresholds> {
    FoundThresholdsLaunch::<CudaRuntime>::new(buffer(tau, 1))
}

/// Below every score of a visible key, but for masked ones not.
const LEAST: f32 = -1e18;

/// The last step, as a share of the mean excess over the threshold: the error it leaves is a ten-millionth of
/// the mean where scores are spread evenly.
pub const LAST_STEP: f32 = 0.01;

/// Passes whose steps are roots of the quadratic.
pub const QUADRATIC_PASSES: u32 = 8;

/// Most passes.
pub const MOST_PASSES: u32 = 60;

// A row's values.
/// The maximum of z.
const MAX: usize = 0;
/// τ.
const TAU: usize = 1;
/// In the first pass A, else whether τ is found.
const EXCESS: usize = 2;
/// In the first pass f.
const SQUARES: usize = 3;

/// f^(1/3) after τ has moved by `step`, as a share of what it was.
#[cube]
fn cube_root_share(excess: f32, squares: f32, step: f32) -> f32 {
    max(1f32 - excess / max(squares, 1e-9f32) * step * (2f32 / 3f32), 0f32)
}

/// The step of τ, from the sums of a pass: to the root of the quadratic, if it has one, or Newton's.
#[cube]
pub fn step_to_root(excess: f32, squares: f32, count: f32, quadratic: bool) -> f32 {
    let norm = f32::sqrt(squares);
    let newton = (norm - 1f32) * norm / excess;
    let square = excess * excess - count * (squares - 1f32);
    let root = (squares - 1f32) / (excess + f32::sqrt(select(square > 0f32, square, 0f32)));
    select((square >= 0f32) & quadratic, root, newton)
}

/// A higher lower bound of the threshold, from the maximum `most` of scores and, over some keys, the sum of their
/// excess over the bound and of its square.
///
/// f^(1/2) is convex and falls, so that Newton's steps do not reach its root from below; the factor is for
/// rounding. Squares that may be infinite are not used.
#[cube]
pub fn raised(bound: f32, most: f32, excess: f32, squares: f32) -> f32 {
    let norm = f32::sqrt(squares);
    let step = 0.999f32 * (norm - 1f32) * norm / excess;
    let newton = select((squares > 1f32) & (squares < 1e30f32), bound + step, bound);
    let least = most - 1f32;
    select(newton > least, newton, least)
}

#[cube]
impl RowSearch for Threshold {
    type Results = FoundThresholds;

    const FACTOR: f32 = 0.5;
    const BY_TILES: bool = true;

    fn init() -> Array<f32> {
        let mut values = Array::<f32>::new(VALUES);
        values[MAX] = f32::cast_from(LEAST);
        values[TAU] = f32::cast_from(LEAST);
        values[EXCESS] = 0f32;
        values[SQUARES] = 0f32;
        values
    }

    fn add_tile(
        values: &mut Array<f32>,
        s: &Accumulator,
        scale: f32,
        #[comptime] r: usize,
        #[comptime] n_keys: usize,
    ) {
        let mut most = max(s.index(0usize)[r][0], s.index(0usize)[r][1]);
        #[unroll]
        for n in 1..n_keys {
            let pair = s.index(n)[r];
            most = max(most, max(pair[0], pair[1]));
        }
        most = max(most, plane_shuffle_xor(most, 1));
        most = max(most, plane_shuffle_xor(most, 2));
        let most = max(values[MAX], most * scale);
        values[MAX] = most;
        // τ is at least the maximum − 1.
        let tau = max(values[TAU], most - 1f32);
        let share = cube_root_share(values[EXCESS], values[SQUARES], tau - values[TAU]);
        let mut excess = 0f32;
        let mut squares = 0f32;
        #[unroll]
        for n in 0..n_keys {
            let pair = s.index(n)[r];
            #[unroll]
            for e in 0..2usize {
                let above = max(fma(pair[e], scale, -tau), 0f32);
                excess += above;
                squares = fma(above, above, squares);
            }
        }
        let excess = values[EXCESS] * share * share + sum_of_four(excess);
        let squares = values[SQUARES] * share * share * share + sum_of_four(squares);
        let grows = squares > 1f32;
        let root = exp2(log2(squares) * (-1f32 / 3f32));
        let step = 1.5f32 * squares / excess * (1f32 - root);
        values[TAU] = select(grows, tau + step, tau);
        values[EXCESS] = select(grows, excess * root * root, excess);
        values[SQUARES] = select(grows, 1f32, squares);
    }

    fn add_first(collected: &mut Array<f32>, score: f32) {
        collected[0] = max(collected[0], score);
    }

    fn add(collected: &mut Array<f32>, values: &Array<f32>, score: f32) {
        let above = max(score - values[TAU], 0f32);
        collected[1] += above;
        collected[2] = fma(above, above, collected[2]);
        collected[3] += select(above > 0f32, 1f32, 0f32);
    }

    fn end_pass(
        values: &mut Array<f32>,
        collected: &Array<f32>,
        _results: &FoundThresholds,
        keys: u32,
        pass: u32,
    ) -> bool {
        let most = max(values[MAX], collected[0]);
        values[MAX] = most;
        // n keys at the maximum have the highest threshold.
        let highest = most - 1f32 / Sqrt::sqrt(f32::cast_from(keys));
        let first = pass == 0;
        let estimate = min(max(values[TAU], most - 1f32), highest);
        let (excess, squares, count) = (collected[1], collected[2], collected[3]);
        let step = step_to_root(excess, squares, count, pass <= QUADRATIC_PASSES);
        let moved = min(max(values[TAU] + step, most - 1f32), highest);
        // A row that has found its threshold keeps it while others go on.
        let found = !first & (values[EXCESS] > 0f32);
        values[TAU] = select(first, estimate, select(found, values[TAU], moved));
        let large = (f32::abs(step) * count > LAST_STEP * excess) & (pass < MOST_PASSES);
        let wants = select(first, keys > 1, large & !found);
        values[EXCESS] = select(first | wants, 0f32, 1f32);
        wants
    }

    fn write(values: &Array<f32>, results: &mut FoundThresholds, at: usize) {
        results.tau[at] = values[TAU];
    }
}

#[cube]
impl CandidateSearch for Threshold {
    fn raise(values: &mut Array<f32>, collected: &Array<f32>) {
        values[MAX] = max(values[MAX], collected[0]);
        values[TAU] = raised(values[TAU], values[MAX], collected[1], collected[2]);
    }

    fn bound(values: &Array<f32>) -> f32 {
        values[TAU]
    }

    fn restart(values: &mut Array<f32>) {
        values[TAU] = f32::cast_from(LEAST);
    }
}
