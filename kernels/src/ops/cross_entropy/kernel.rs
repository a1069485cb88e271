//! The loss of rows of logits, and its gradient in their place.

use cubecl::prelude::*;

/// Below every logit, and finite: differences of it are no NaN.
const LOWEST: f32 = -3.0e38;
/// Vectors that a thread asks for before it waits.
const AHEAD: usize = 4;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Threads of a block, which handles one row: a multiple of 32.
    pub threads: usize,
    /// Vectors of a row that shared memory keeps between the two passes: all, or none, and then
    /// the row is read twice.
    pub staged: usize,
    /// Whether the vocabulary fills its last vector.
    pub even: bool,
    /// Whether losses are weighted.
    pub weighted: bool,
    /// Whether the logits become the gradient; weighted only.
    pub gradient: bool,
}

/// Per row, weight · (ln Σ_v exp(z_v) − z_target) and, with a gradient,
/// z ← weight · (softmax(z) − onehot(target)). Rows of weight 0 have loss and gradient 0. The loss
/// of a row whose target is outside the vocabulary is `missing`, a NaN.
///
/// - `logits`: `[rows, stride]` vectors, of which the first ⌈vocab / N⌉ of a row are used; with a
///   gradient, what follows the vocabulary in its last vector becomes 0
/// - `targets`, `weights`, `losses`: `[…]`, this chunk's rows from `first` on
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn rows<E: Float, N: Size>(
    logits: &mut Array<Vector<E, N>>,
    targets: &Array<i32>,
    weights: &Array<f32>,
    losses: &mut Array<f32>,
    first: u32,
    vocab: u32,
    stride: u32,
    missing: f32,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: StorageType,
) {
    let lanes = N::value();
    let start = CUBE_POS_X as usize * stride as usize;
    let row = (first + CUBE_POS_X) as usize;
    let vectors = (vocab as usize + lanes - 1) / lanes;
    let target = u32::cast_from(targets[row]);
    let known = target < vocab; // A negative one is a large number by now.
    let target_vector = target as usize / lanes;
    let target_lane = target as usize % lanes;
    let mut weight = f32::cast_from(1f32);
    if plan.weighted {
        weight = weights[row];
    }

    if weight == 0.0 {
        if plan.gradient {
            let mut at = UNIT_POS as usize;
            while at < vectors {
                logits[start + at] = Vector::cast_from(0f32);
                at += plan.threads;
            }
        }
        if UNIT_POS == 0 {
            losses[row] = select(known, f32::cast_from(0f32), missing);
        }
    } else {
        // 1. The thread's largest logit and its Σ exp(z − largest).
        let warps = comptime!(plan.threads / 32);
        let mut staged = SharedMemory::<Vector<E, N>>::new(comptime!(if plan.staged > 0 {
            plan.staged
        } else {
            1
        }));
        let mut peaks = SharedMemory::<f32>::new(warps);
        let mut sums = SharedMemory::<f32>::new(warps);
        let mut picked = SharedMemory::<f32>::new(1usize);
        let mut peak = f32::cast_from(LOWEST);
        let mut sum = f32::cast_from(0f32);
        let mut base = UNIT_POS as usize;
        let mut ahead = Array::<Vector<E, N>>::new(AHEAD);
        while base < vectors {
            #[unroll]
            for i in 0..AHEAD {
                let at = min(base + i * plan.threads, vectors - 1);
                ahead[i] = logits[start + at];
            }
            #[unroll]
            for i in 0..AHEAD {
                let at = base + i * plan.threads;
                if at < vectors {
                    if comptime!(plan.staged > 0) {
                        staged[at] = ahead[i];
                    }
                    let z = inside::<E, N>(ahead[i], at, vocab, plan.even);
                    let mut largest = z[0];
                    #[unroll]
                    for j in 1..lanes {
                        largest = max(largest, z[j]);
                    }
                    if largest > peak {
                        sum *= Exp::exp(peak - largest);
                        peak = largest;
                    }
                    #[unroll]
                    for j in 0..lanes {
                        sum += Exp::exp(z[j] - peak);
                    }
                    if at == target_vector {
                        #[unroll]
                        for j in 0..lanes {
                            if j == target_lane {
                                picked[0] = z[j];
                            }
                        }
                    }
                }
            }
            base += comptime!(AHEAD * plan.threads);
        }

        // 2. The row's.
        let lane = UNIT_POS_PLANE as usize;
        let largest = max_lanes(peak);
        sum = sum_lanes(sum * Exp::exp(peak - largest));
        if lane == 0 {
            peaks[UNIT_POS as usize / 32] = largest;
            sums[UNIT_POS as usize / 32] = sum;
        }
        sync_cube();
        peak = f32::cast_from(LOWEST);
        sum = f32::cast_from(0f32);
        if lane < warps {
            peak = peaks[lane];
            sum = sums[lane];
        }
        let largest = max_lanes(peak);
        sum = sum_lanes(sum * Exp::exp(peak - largest));
        if UNIT_POS == 0 {
            // ln(sum), of a sum of 1 or more: `ln` would be the fast, rough one here.
            let loss = f32::log1p(sum - 1.0) + (largest - picked[0]);
            losses[row] = select(known, loss * weight, missing);
        }

        // 3. The gradient.
        if plan.gradient {
            let factor = weight / sum;
            let mut at = UNIT_POS as usize;
            while at < vectors {
                let again =
                    if comptime!(plan.staged > 0) { staged[at] } else { logits[start + at] };
                let z = inside::<E, N>(again, at, vocab, plan.even);
                let mut gradient = Vector::<f32, N>::cast_from(0f32);
                #[unroll]
                for j in 0..lanes {
                    gradient[j] = Exp::exp(z[j] - largest) * factor;
                }
                if at == target_vector {
                    #[unroll]
                    for j in 0..lanes {
                        if j == target_lane {
                            gradient[j] = gradient[j] - weight;
                        }
                    }
                }
                logits[start + at] = Vector::cast_from(gradient);
                at += plan.threads;
            }
        }
    }
}

/// Vector `at` of a row in f32, with [`LOWEST`] past the vocabulary.
#[cube]
fn inside<E: Float, N: Size>(
    z: Vector<E, N>,
    at: usize,
    vocab: u32,
    #[comptime] even: bool,
) -> Vector<f32, N> {
    let mut z = Vector::<f32, N>::cast_from(z);
    if comptime!(!even) {
        #[unroll]
        for j in 0..N::value() {
            if at * N::value() + j >= vocab as usize {
                z[j] = f32::cast_from(LOWEST);
            }
        }
    }
    z
}

#[cube]
fn max_lanes(x: f32) -> f32 {
    let mut largest = x;
    #[unroll]
    for step in 0..5u32 {
        largest = max(largest, plane_shuffle_xor(largest, comptime!(1u32 << step)));
    }
    largest
}

#[cube]
fn sum_lanes(x: f32) -> f32 {
    let mut sum = x;
    #[unroll]
    for step in 0..5u32 {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    sum
}
