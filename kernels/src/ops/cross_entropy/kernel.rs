//! The loss of rows of logits, and their gradient in place.

use cubecl::prelude::*;

/// Below every logit but finite, so that differences are not NaN.
const LOWEST: f32 = -3.0e38;
/// Vectors that a thread has in flight together.
const PREFETCH: usize = 4;

/// The compile-time configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LossConfig {
    /// Threads per block, which handles one row: a multiple of 32.
    pub threads: usize,
    /// Vectors of a row that shared memory keeps between the two passes: all or none; with none the row
    /// is read twice.
    pub staged: usize,
    /// Whether the vocabulary fills its last vector.
    pub even: bool,
    /// Whether losses are weighted.
    pub weighted: bool,
    /// Whether the gradient overwrites the logits; requires `weighted`.
    pub gradient: bool,
}

/// Per row, weight · (ln Σ_v exp(z_v) − z_target) and, with a gradient,
/// z ← weight · (softmax(z) − onehot(target)). Rows of weight 0 have loss and gradient 0. The loss
/// of a row whose target is outside the vocabulary is `missing`, a NaN.
///
/// - `logits`: `[rows, stride]` vectors, of which the first ⌈vocab / N⌉ of a row are used; with a
///   gradient, the padding in the last of these becomes 0
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
    #[comptime] config: LossConfig,
    #[define(E)] _dtype: StorageType,
) {
    let lanes = N::value();
    let start = CUBE_POS_X as usize * stride as usize;
    let row = (first + CUBE_POS_X) as usize;
    let vectors = (vocab as usize + lanes - 1) / lanes;
    let target = u32::cast_from(targets[row]);
    let known = target < vocab; // A negative target is a large unsigned number.
    let target_vector = target as usize / lanes;
    let target_lane = target as usize % lanes;
    let mut weight = f32::cast_from(1f32);
    if config.weighted {
        weight = weights[row];
    }

    if weight == 0.0 {
        if config.gradient {
            let mut at = UNIT_POS as usize;
            while at < vectors {
                logits[start + at] = Vector::cast_from(0f32);
                at += config.threads;
            }
        }
        if UNIT_POS == 0 {
            losses[row] = select(known, f32::cast_from(0f32), missing);
        }
    } else {
        // 1. The thread's maximum and its Σ exp(z − maximum).
        let warps = comptime!(config.threads / 32);
        let mut staged = SharedMemory::<Vector<E, N>>::new(comptime!(if config.staged > 0 {
            config.staged
        } else {
            1
        }));
        let mut warp_max = SharedMemory::<f32>::new(warps);
        let mut sums = SharedMemory::<f32>::new(warps);
        let mut picked = SharedMemory::<f32>::new(1usize);
        let mut row_max = f32::cast_from(LOWEST);
        let mut sum = f32::cast_from(0f32);
        let mut base = UNIT_POS as usize;
        let mut ahead = Array::<Vector<E, N>>::new(PREFETCH);
        while base < vectors {
            #[unroll]
            for i in 0..PREFETCH {
                let at = min(base + i * config.threads, vectors - 1);
                ahead[i] = logits[start + at];
            }
            #[unroll]
            for i in 0..PREFETCH {
                let at = base + i * config.threads;
                if at < vectors {
                    if comptime!(config.staged > 0) {
                        staged[at] = ahead[i];
                    }
                    let z = inside::<E, N>(ahead[i], at, vocab, config.even);
                    let mut largest = z[0];
                    #[unroll]
                    for j in 1..lanes {
                        largest = max(largest, z[j]);
                    }
                    if largest > row_max {
                        sum *= Exp::exp(row_max - largest);
                        row_max = largest;
                    }
                    #[unroll]
                    for j in 0..lanes {
                        sum += Exp::exp(z[j] - row_max);
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
            base += comptime!(PREFETCH * config.threads);
        }

        // 2. The row maximum and sum.
        let lane = UNIT_POS_PLANE as usize;
        let largest = max_lanes(row_max);
        sum = sum_lanes(sum * Exp::exp(row_max - largest));
        if lane == 0 {
            warp_max[UNIT_POS as usize / 32] = largest;
            sums[UNIT_POS as usize / 32] = sum;
        }
        sync_cube();
        row_max = f32::cast_from(LOWEST);
        sum = f32::cast_from(0f32);
        if lane < warps {
            row_max = warp_max[lane];
            sum = sums[lane];
        }
        let largest = max_lanes(row_max);
        sum = sum_lanes(sum * Exp::exp(row_max - largest));
        if UNIT_POS == 0 {
            // ln(sum) for sum ≥ 1: under fast math `ln` is less accurate than `log1p`.
            let loss = f32::log1p(sum - 1.0) + (largest - picked[0]);
            losses[row] = select(known, loss * weight, missing);
        }

        // 3. The gradient.
        if config.gradient {
            let factor = weight / sum;
            let mut at = UNIT_POS as usize;
            while at < vectors {
                let again =
                    if comptime!(config.staged > 0) { staged[at] } else { logits[start + at] };
                let z = inside::<E, N>(again, at, vocab, config.even);
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
                at += config.threads;
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
