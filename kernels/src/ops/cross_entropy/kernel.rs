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
    /// Whether logits have a softcap.
    pub softcap: bool,
    /// Whether there is a z-loss; requires `weighted`.
    pub z_loss: bool,
}

/// The numbers of a launch.
#[derive(CubeLaunch, CubeType)]
pub struct LossArgs {
    /// c of the softcap, if there is one.
    pub cap: f32,
    /// a, the coefficient of the z-loss, if there is one.
    pub z_loss: f32,
    /// The cross-entropy of a row whose target is outside the vocabulary: a NaN.
    pub missing: f32,
}

/// Per row, the cross-entropy weight · (ln S − z_target) with S = Σ_v exp(z_v), the z-loss weight · a · ln² S
/// and, with a gradient, z ← weight · ((1 + 2 a ln S) · softmax(z) − onehot(target)). With a softcap c, z is
/// c·tanh(logit / c), and the gradient is that of the logit: times 1 − (z / c)². Rows of weight 0 have loss and
/// gradient 0. The cross-entropy of a row whose target is outside the vocabulary is `missing`.
///
/// - `logits`: `[rows, stride]` vectors, of which the first ⌈vocab / N⌉ of a row are used; with a
///   gradient, the padding in the last of these becomes 0
/// - `targets`, `weights`, `losses`, `z_losses`: `[…]`, this chunk's rows from `first` on
#[cube(launch_unchecked, fast_math = FastMath::all())]
pub fn rows<E: Float, N: Size>(
    logits: &mut Array<Vector<E, N>>,
    targets: &Array<i32>,
    weights: &Array<f32>,
    losses: &mut Array<f32>,
    z_losses: &mut Array<f32>,
    first: u32,
    vocab: u32,
    stride: u32,
    args: LossArgs,
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
            losses[row] = select(known, f32::cast_from(0f32), args.missing);
            if config.z_loss {
                z_losses[row] = f32::cast_from(0f32);
            }
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
                    let z = inside::<E, N>(ahead[i], at, vocab, args.cap, config);
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
            let loss = ln(sum) + (largest - picked[0]);
            losses[row] = select(known, loss * weight, args.missing);
            if config.z_loss {
                let log_sum = ln(sum) + largest;
                z_losses[row] = args.z_loss * log_sum * log_sum * weight;
            }
        }

        // 3. The gradient.
        if config.gradient {
            let mut factor = weight / sum;
            if config.z_loss {
                let log_sum = ln(sum) + largest;
                factor *= 1.0 + 2.0 * args.z_loss * log_sum;
            }
            let mut at = UNIT_POS as usize;
            while at < vectors {
                let again =
                    if comptime!(config.staged > 0) { staged[at] } else { logits[start + at] };
                let z = inside::<E, N>(again, at, vocab, args.cap, config);
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
                if config.softcap {
                    #[unroll]
                    for j in 0..lanes {
                        // Past the vocabulary, the gradient is 0 and the slope finite.
                        let tanh = max(z[j] / args.cap, f32::cast_from(-1f32));
                        gradient[j] *= 1.0 - tanh * tanh;
                    }
                }
                logits[start + at] = Vector::cast_from(gradient);
                at += config.threads;
            }
        }
    }
}

/// Vector `at` of a row in f32, after the softcap, with [`LOWEST`] past the vocabulary.
#[cube]
fn inside<E: Float, N: Size>(
    z: Vector<E, N>,
    at: usize,
    vocab: u32,
    cap: f32,
    #[comptime] config: LossConfig,
) -> Vector<f32, N> {
    let mut z = Vector::<f32, N>::cast_from(z);
    if config.softcap {
        #[unroll]
        for j in 0..N::value() {
            z[j] = cap * tanh(z[j] / cap);
        }
    }
    if comptime!(!config.even) {
        #[unroll]
        for j in 0..N::value() {
            if at * N::value() + j >= vocab as usize {
                z[j] = f32::cast_from(LOWEST);
            }
        }
    }
    z
}

/// ln(x) for x ≥ 1: under fast math `ln` is less accurate than `log1p`.
#[cube]
fn ln(x: f32) -> f32 {
    f32::log1p(x - 1.0)
}

/// tanh(x) to a few units in the last place: `f32::tanh` is far less accurate under fast math.
#[cube]
fn tanh(x: f32) -> f32 {
    // Up to 0.625 by the polynomial of Cephes' `tanhf`, where 1 − 2 / (e^2|x| + 1) would cancel.
    let s = x * x;
    let mut p = fma(s, -5.704_988_7e-3, 2.063_909e-2);
    p = fma(p, s, -5.373_971_6e-2);
    p = fma(p, s, 1.333_144_2e-1);
    p = fma(p, s, -3.333_328e-1);
    let small = fma(x * s, p, x);
    let size = f32::abs(x);
    let large = 1.0 - 2.0 / (Exp::exp(2.0 * size) + 1.0);
    select(size < 0.625, small, select(x < 0.0, -large, large))
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
