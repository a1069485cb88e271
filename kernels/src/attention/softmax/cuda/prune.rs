//! Pruning under a learned decay: the first key that still matters to each query.
//!
//! With U_i = |scale| · |q_i| · max_{j ≤ i} |k_j| no score before its decay is above U_i or below −U_i.
//! So key j weighs at most exp(2 U_i + c_i − c_j) of what the query's own key does, c being the decay's
//! prefix sum, and all keys before j, which are fewer than the query's position and decayed further, so
//! many times that. Those that together weigh at most [`PRUNED`] of the row's total are left out (as in
//! Lin et al., "Adaptive computation pruning for the Forgetting Transformer", 2025, with bounds of each
//! row in place of one for all). What is left out depends on no later token.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::decay::{Decay, SPAN, sum_before};
use super::scores::first_above;
use super::{Call, grid, row_sums};
use crate::attention::softmax::PRUNED;
use crate::cuda::{CudaTensor, buffer, empty};

/// Threads of a block of [`largest_norms`].
pub const THREADS: usize = 1024;

/// Where queries begin to see keys under pruning, 32-bit integers, with tiles of 64 queries.
#[derive(Clone)]
pub struct Pruned {
    /// The first key that each query sees, `[batch, heads, queries]`.
    pub starts: CudaTensor,
    /// The least and the most of each tile's, `[batch, heads, tiles, 2]`.
    pub bounds: CudaTensor,
    /// The least of each tile's and all later ones', `[batch, heads, tiles]`.
    pub least: CudaTensor,
}

impl Pruned {
    /// Of a call with a decay, see [`first_keys`].
    pub(super) fn new(call: &Call, decay: &Decay) -> Self {
        let [batch, heads, queries, _] = call.q.dims;
        let [_, kv_heads, keys, _] = call.k.dims;
        let client = &call.q.tensor.client;
        let (q_norms, k_norms) = (row_sums(&call.q, &call.q), row_sums(&call.k, &call.k));
        let groups = queries.div_ceil(SPAN);
        let integers = |shape: &[usize]| empty(&call.q.tensor, shape, DType::I32);
        let starts = integers(&[batch, heads, queries]);
        let bounds = integers(&[batch, heads, groups, 2]);
        let least = integers(&[batch, heads, groups]);
        // SAFETY: every row and group of the tensors has its thread, which stays within it.
        unsafe {
            largest_norms::launch_unchecked::<CudaRuntime>(
                client,
                CubeCount::Static((batch * kv_heads) as u32, 1, 1),
                CubeDim::new_1d(THREADS as u32),
                buffer(&k_norms, 1),
                keys as u32,
            );
            first_keys::launch_unchecked::<CudaRuntime>(
                client,
                grid(queries, SPAN, batch * heads),
                CubeDim::new_1d(SPAN as u32),
                buffer(&q_norms, 1),
                buffer(&k_norms, 1),
                buffer(&decay.within, 1),
                buffer(&decay.before, 1),
                buffer(&starts, 1),
                buffer(&bounds, 1),
                queries as u32,
                keys as u32,
                (heads / kv_heads) as u32,
                call.op.scale,
                PRUNED.ln(),
            );
            least_after::launch_unchecked::<CudaRuntime>(
                client,
                CubeCount::Static((batch * heads) as u32, 1, 1),
                CubeDim::new_1d(32),
                buffer(&bounds, 1),
                buffer(&least, 1),
                groups as u32,
            );
        }
        Pruned { starts, bounds, least }
    }
}

/// max_{s ≤ t} x_s of each row, in place.
///
/// - `x`: `[rows, len]`, at least 0
///
/// Grid: rows.
#[cube(launch_unchecked)]
pub fn largest_norms(x: &mut Array<f32>, len: u32) {
    let len = len as usize;
    let start = CUBE_POS_X as usize * len;
    let unit = UNIT_POS as usize;
    let lane = UNIT_POS_PLANE;
    let mut of_warps = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    let mut carry = 0f32;
    for tile in 0..(len + THREADS - 1) / THREADS {
        let at = tile * THREADS + unit;
        let mut value = 0f32;
        if at < len {
            value = x[start + at];
        }
        #[unroll]
        for step in 0..5u32 {
            let other = plane_shuffle_up(value, comptime!(1u32 << step));
            if lane >= comptime!(1u32 << step) {
                value = max(value, other);
            }
        }
        if lane == 31 {
            of_warps[unit / 32] = value;
        }
        sync_cube();
        let mut all = carry;
        for warp in 0..comptime!(THREADS / 32) {
            let other = of_warps[warp];
            if warp < unit / 32 {
                value = max(value, other);
            }
            all = max(all, other);
        }
        value = max(value, carry);
        if at < len {
            x[start + at] = value;
        }
        carry = all;
        sync_cube();
    }
}

/// The first key that each query sees, `[batch, heads, queries]`, and the least and the most of each
/// 64 queries, `[batch, heads, groups, 2]`.
///
/// - `q_norms`: |q_i|², `[batch, heads, queries]`
/// - `k_norms`: max_{j ≤ i} |k_j|², `[batch, kv_heads, keys]`
/// - `within`, `before`: of [`prefix_sums`](super::decay::prefix_sums)
///
/// Grid: groups of 64 queries, batch · heads; 64 threads.
#[cube(launch_unchecked)]
pub fn first_keys(
    q_norms: &Array<f32>,
    k_norms: &Array<f32>,
    within: &Array<f32>,
    before: &Array<f64>,
    starts: &mut Array<i32>,
    bounds: &mut Array<i32>,
    queries: u32,
    keys: u32,
    group: u32,
    scale: f32,
    log_pruned: f32,
) {
    let (queries, keys) = (queries as usize, keys as usize);
    let row = CUBE_POS_Y as usize;
    // Threads past the last query repeat it: all meet in the shuffles.
    let query = min(CUBE_POS_X as usize * SPAN + UNIT_POS as usize, queries - 1);
    let position = keys - queries + query;
    let norms = q_norms[row * queries + query] * k_norms[row / group as usize * keys + position];
    // A little more than the bound, for what rounding takes from it.
    let bound = 2.001f32 * f32::abs(scale) * Sqrt::sqrt(norms);
    let count = f32::cast_from(position as u32 + 1);
    let least = log_pruned - bound - Log::ln(count);
    let own =
        sum_before(before, row, keys, position) + f64::cast_from(within[row * keys + position]);
    // Prefix sums never rise: halve the range in which the decay passes the bound. The query's own
    // key, which has decayed by nothing, is kept.
    let mut low = 0usize;
    let mut high = position;
    while low < high {
        let middle = (low + high) / 2;
        let sum =
            sum_before(before, row, keys, middle) + f64::cast_from(within[row * keys + middle]);
        if f32::cast_from(own - sum) > least {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let first = low as i32;
    starts[row * queries + query] = first;

    let mut of_warps = SharedMemory::<i32>::new(4usize);
    let (least, most) = (plane_min(first), plane_max(first));
    let warp = UNIT_POS as usize / 32;
    if UNIT_POS_PLANE == 0 {
        of_warps[warp * 2] = least;
        of_warps[warp * 2 + 1] = most;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let at = (row * CUBE_COUNT_X as usize + CUBE_POS_X as usize) * 2;
        bounds[at] = min(of_warps[0], of_warps[2]);
        bounds[at + 1] = max(of_warps[1], of_warps[3]);
    }
}

/// The least first key of each 64 queries and all after them, `[rows, groups]`, from `bounds`.
///
/// Grid: rows; 32 threads.
#[cube(launch_unchecked)]
pub fn least_after(bounds: &Array<i32>, least: &mut Array<i32>, groups: u32) {
    let groups = groups as usize;
    let row = CUBE_POS_X as usize;
    let mut carry = i32::cast_from(i32::MAX);
    for tile in 0..(groups + 31) / 32 {
        // From the last to the first.
        let back = tile * 32 + UNIT_POS as usize;
        let mut value = carry;
        if back < groups {
            value = min(value, bounds[(row * groups + groups - 1 - back) * 2]);
        }
        #[unroll]
        for step in 0..5u32 {
            let other = plane_shuffle_up(value, comptime!(1u32 << step));
            if UNIT_POS_PLANE >= comptime!(1u32 << step) {
                value = min(value, other);
            }
        }
        if back < groups {
            least[row * groups + groups - 1 - back] = value;
        }
        carry = plane_shuffle(value, 31u32);
    }
}

/// The first key that `query` sees, in the row `row` of `starts`; of the last query for those past it.
#[cube]
pub fn start_of(starts: &Array<i32>, row: usize, query: usize, queries: usize) -> u32 {
    starts[row * queries + min(query, queries - 1)] as u32
}

/// The least and the most of the first keys of the 64 queries from `query` on; of the last 64 for those
/// past them.
#[cube]
pub fn bounds_of_group(
    bounds: &Array<i32>,
    row: usize,
    query: usize,
    queries: usize,
) -> (usize, usize) {
    let groups = (queries + SPAN - 1) / SPAN;
    let at = (row * groups + min(query, queries - 1) / SPAN) * 2;
    (bounds[at] as usize, bounds[at + 1] as usize)
}

/// The least of the first keys of a block's queries from `first_row` on, 16 a warp.
#[cube]
pub fn least_of_block(
    bounds: &Array<i32>,
    row: usize,
    first_row: usize,
    queries: usize,
    #[comptime] warps: usize,
) -> usize {
    let (mut least, _) = bounds_of_group(bounds, row, first_row, queries);
    #[unroll]
    for i in 1..comptime!(warps * 16 / SPAN) {
        let (other, _) = bounds_of_group(bounds, row, first_row + i * SPAN, queries);
        least = min(least, other);
    }
    least
}

/// One past the last 64 queries of which one sees a key at or before `column`, where `least` is of
/// [`least_after`].
#[cube]
pub fn end_of_queries(least: &Array<i32>, row: usize, queries: usize, column: usize) -> usize {
    let groups = (queries + SPAN - 1) / SPAN;
    // A literal would be of another type.
    let first = usize::cast_from(0u32);
    min(first_above(least, row * groups, column, first, groups) * SPAN, queries)
}
