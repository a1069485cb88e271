//! Pruning under a learned decay: the first key that still matters to each query.
//!
//! With U_i = |scale| · |q_i| · max_{j ≤ i} |k_j| no score before its decay is above U_i or below −U_i.
//! So key j weighs at most exp(2 U_i + c_i − c_j) of what the query's own key does, c being the decay's
//! prefix sum, and all keys before j, which are fewer than the query's position and decayed further, so
//! many times that. Those that together weigh at most [`PRUNED`] of the row's total are left out (as in
//! Lin et al., "Adaptive computation pruning for the Forgetting Transformer", 2025, with bounds of each
//! row in place of one for all). What is left out depends on no later token.

use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::attention::decay::{DecaySums, SPAN, Sums};
use crate::attention::flash::hooks::Hooks;
use crate::attention::flash::mask::Pruned;
use crate::attention::flash::{FlashAttention, grid, row_dots};
use crate::attention::softmax::PRUNED;
use crate::cuda::buffer;

/// Threads per block of [`largest_norms`].
pub const THREADS: usize = 1024;

/// The first keys of a call's queries after pruning, see [`first_keys`].
pub fn prune<H: Hooks>(flash: &FlashAttention<H>, decay: &DecaySums) -> Pruned {
    let (q, k) = (flash.q(), flash.k());
    let [batch, heads, queries, _] = q.dims;
    let [_, kv_heads, keys, _] = k.dims;
    let client = &q.tensor.client;
    let (q_norms, k_norms) = (row_dots(q, q), row_dots(k, k));
    let pruned = Pruned::uninit(&q.tensor, [batch, heads, queries]);
    let Pruned { first, bounds, .. } = &pruned;
    // SAFETY: the grids cover the tensors' rows and groups, and threads stay within theirs.
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
            decay.launch(),
            buffer(first, 1),
            buffer(bounds, 1),
            queries as u32,
            keys as u32,
            (heads / kv_heads) as u32,
            flash.scale(),
            PRUNED.ln(),
        );
    }
    pruned.set_least();
    pruned
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
/// - `sums`: of [`prefix_sums`](super::decay::prefix_sums)
///
/// Grid: groups of 64 queries, batch · heads; 64 threads.
#[cube(launch_unchecked)]
pub fn first_keys(
    q_norms: &Array<f32>,
    k_norms: &Array<f32>,
    sums: &Sums,
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
    // Threads past the last query repeat it, because all take part in the shuffles.
    let query = min(CUBE_POS_X as usize * SPAN + UNIT_POS as usize, queries - 1);
    let position = keys - queries + query;
    let norms = q_norms[row * queries + query] * k_norms[row / group as usize * keys + position];
    // A little more than the bound, for what rounding takes from it.
    let bound = 2.001f32 * f32::abs(scale) * Sqrt::sqrt(norms);
    let count = f32::cast_from(position as u32 + 1);
    let least = log_pruned - bound - Log::ln(count);
    let own = sums.at(row, position);
    // Prefix sums never rise: binary search for the first key within the bound. The query's own key,
    // without decay, is never pruned.
    let mut low = 0usize;
    let mut high = position;
    while low < high {
        let middle = (low + high) / 2;
        if f32::cast_from(own - sums.at(row, middle)) > least {
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
