//! x Wᵀ for a few rows of x, as in decoding, in bf16 and without cuBLASLt.
//!
//! Such a product reads each weight once, and the GPU needs only microseconds for it. cuBLASLt runs on a stream
//! of its own, which costs the host more ([`blas`](crate::cuda::blas)).
//!
//! A warp multiplies 16 rows of W by all rows of x, in fragments of `mma.sync` m16n8k16. A lane reads both
//! operands straight from memory, 16 bytes at a time: 8 consecutive elements of a row, which it hands to two
//! fragments. The sum over k is thus in another order, the same for W and x. The warps of a block share k, and
//! their parts are added in the order of the warps.
//!
//! [`several`](super::several) multiplies one x by several W in one launch.

use burn::tensor::{DType, bf16};
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::row_norm::RowNorm;
use crate::cuda::blas::Epilogue;
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty};
use crate::ops::activation::kernel::{Function, value};
use crate::ops::cuda::{as_u32, dim};
use crate::tile::{Bf16Pair, CHUNK, Chunk, zeros};

/// Most rows of x.
pub const MOST_ROWS: usize = 64;

/// Outputs per block: the rows of a fragment.
pub const OUTPUTS: usize = 16;

/// Rows of x per fragment.
pub const ROWS: usize = 8;

/// Elements of k per step of a warp: two fragments.
pub const STEP: usize = 32;

/// Chunks per step.
const STEP_CHUNKS: usize = STEP / CHUNK;

/// Warps per block.
pub const WARPS: usize = 8;

/// Most steps whose weights a warp has in flight.
const MOST_AHEAD: usize = 4;

/// What happens to the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Then {
    Nothing,
    /// Adds a tensor of the products' shape.
    Add,
    /// Adds a vector to each row.
    Bias,
    /// Applies GELU; the products are stored too.
    Gelu,
}

/// How a block's products are divided among fragments and steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Fragments of rows of x.
    pub fragments: usize,
    /// Steps whose weights a warp has in flight.
    ahead: usize,
    /// Whether every warp has a multiple of `ahead` steps.
    even: bool,
}

impl Tiling {
    pub fn new(rows: usize, k: usize) -> Self {
        let steps = k / STEP;
        let per_warp = steps.div_ceil(WARPS);
        let ahead = (1..=MOST_AHEAD).rev().find(|n| per_warp.is_multiple_of(*n)).unwrap_or(1);
        let even = steps.is_multiple_of(WARPS);
        Tiling { fragments: rows.div_ceil(ROWS), ahead, even }
    }

    /// Elements of the warps' parts of a block's products, `[warps, rows, outputs]`.
    pub const fn parts(self) -> usize {
        WARPS * self.fragments * ROWS * OUTPUTS
    }
}

/// x Wᵀ with the epilogue `then`, in type `dtype`; `None` if this kernel does not serve these sizes or types.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`
pub fn product(
    x: &CudaTensor,
    weight: &CudaTensor,
    dtype: DType,
    then: &Epilogue,
) -> Option<CudaTensor> {
    let ([rows, k], outputs) = (x.meta.shape().dims(), weight.meta.shape()[0]);
    if !serves(x, weight) {
        return None;
    }
    let y = empty(x, &[rows, outputs], dtype);
    // The third is what GELU is applied to.
    let (then, term, before) = match then {
        Epilogue::None => (Then::Nothing, None, None),
        Epilogue::Add(term) => (Then::Add, Some(contiguous(term)), None),
        Epilogue::Bias(bias) => (Then::Bias, Some(contiguous(bias)), None),
        Epilogue::Gelu(before) => (Then::Gelu, None, Some(before)),
    };
    let tiling = Tiling::new(rows, k);
    // SAFETY: rows and outputs past the last are clamped when read and not written; the callers' tensors have the
    // sizes that the kernel's documentation asks for.
    unsafe {
        few_rows::launch_unchecked(
            &x.client,
            CubeCount::Static(as_u32(outputs.div_ceil(OUTPUTS)), 1, 1),
            dim(WARPS * 32),
            buffer(x, CHUNK),
            buffer(weight, CHUNK),
            RowNorm::none(x),
            term.as_ref().map(|term| buffer(term, 1)).into(),
            before.map(|before| buffer(before, 1)).into(),
            buffer(&y, 1),
            as_u32(rows),
            as_u32(outputs),
            as_u32(k / STEP),
            tiling,
            then,
            dtype.into(),
            term.as_ref().map_or(dtype, |term| term.dtype).into(),
        );
    }
    Some(y)
}

/// Whether the kernels can read these operands.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`
pub fn serves(x: &CudaTensor, weight: &CudaTensor) -> bool {
    let ([rows, k], [outputs, inputs]) = (x.meta.shape().dims(), weight.meta.shape().dims());
    let readable = |x: &CudaTensor| {
        let offset = x.handle.offset_start.unwrap_or(0);
        x.dtype == DType::BF16 && x.is_contiguous() && offset.is_multiple_of(WIDE as u64)
    };
    (1..=MOST_ROWS).contains(&rows)
        && outputs > 0
        && k > 0
        && k == inputs
        && k.is_multiple_of(STEP)
        && readable(x)
        && readable(weight)
}

/// y = f(x Wᵀ).
///
/// Grid: blocks of [`OUTPUTS`] outputs.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`, where k has `steps` steps
/// - `term`: `[rows, outputs]` for [`Then::Add`], `[outputs]` for [`Then::Bias`]
/// - `before`: `[rows, outputs]`, written by [`Then::Gelu`]
/// - `y`: `[rows, outputs]`
#[cube(launch_unchecked, fast_math = FastMath::all(), address_type = "u64")]
fn few_rows<E: Float, T: Float>(
    x: &Array<Chunk>,
    weight: &Array<Chunk>,
    norm: &RowNorm,
    term: &ComptimeOption<Array<T>>,
    before: &mut ComptimeOption<Array<E>>,
    y: &mut Array<E>,
    rows: u32,
    outputs: u32,
    steps: u32,
    #[comptime] tiling: Tiling,
    #[comptime] then: Then,
    #[define(E)] _dtype: StorageType,
    #[define(T)] _term_dtype: StorageType,
) {
    let (rows, outputs, steps) = (rows as usize, outputs as usize, steps as usize);
    let first = CUBE_POS_X as usize * OUTPUTS;
    let mut parts = SharedMemory::<f32>::new(comptime!(tiling.parts()));
    let statistics = norm.statistics(x, rows, steps, tiling);
    multiply(x, weight, norm, &statistics, &mut parts, first, rows, outputs, steps, tiling);
    let mut own = UNIT_POS as usize;
    while own < rows * OUTPUTS {
        let (row, output) = (own / OUTPUTS, first + own % OUTPUTS);
        if output < outputs {
            let mut sum = sum_of_warps(&parts, own, tiling);
            let at = row * outputs + output;
            if comptime!(then == Then::Add) {
                sum += f32::cast_from(term.as_ref().unwrap()[at]);
            }
            if comptime!(then == Then::Bias) {
                sum += f32::cast_from(term.as_ref().unwrap()[output]);
            }
            if comptime!(then == Then::Gelu) {
                before.as_mut().unwrap()[at] = E::cast_from(sum);
                sum = value(sum, Function::Gelu);
            }
            y[at] = E::cast_from(sum);
        }
        own += comptime!(WARPS * 32);
    }
}

/// Writes the warps' parts of the products of x's rows, normalised, and W's rows from `first` on to `parts`,
/// `[warps, rows, outputs]`.
///
/// - `x`, `weight`: `[rows, k]` and `[outputs, k]`, where k has `steps` steps
/// - `statistics`: as [`RowNorm::statistics`] returns them
#[cube]
pub fn multiply(
    x: &Array<Chunk>,
    weight: &Array<Chunk>,
    norm: &RowNorm,
    statistics: &SharedMemory<f32>,
    parts: &mut SharedMemory<f32>,
    first: usize,
    rows: usize,
    outputs: usize,
    steps: usize,
    #[comptime] tiling: Tiling,
) {
    let Tiling { fragments, ahead, even } = comptime!(tiling);
    let chunks = steps * STEP_CHUNKS;
    let lane = UNIT_POS as usize % 32;
    let warp = UNIT_POS as usize / 32;
    // A lane's two rows of W, and its row of x in each fragment; its chunk of a step.
    let upper = min(first + lane / 4, outputs - 1) * chunks + lane % 4;
    let lower = min(first + lane / 4 + 8, outputs - 1) * chunks + lane % 4;

    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let mut acc = zeros(fragments);
    let mut uppers = Array::<Chunk>::new(ahead);
    let mut lowers = Array::<Chunk>::new(ahead);
    let mut step = warp;
    while step < steps {
        #[unroll]
        for i in 0..ahead {
            let at = min(step + i * WARPS, steps - 1) * STEP_CHUNKS;
            uppers[i] = weight[upper + at];
            lowers[i] = weight[lower + at];
        }
        #[unroll]
        for i in 0..ahead {
            let at = step + i * WARPS;
            if even || at < steps {
                #[unroll]
                for f in 0..fragments {
                    let row = min(lane / 4 + f * ROWS, rows - 1);
                    let column = at * STEP_CHUNKS + lane % 4;
                    let mut own = x[row * chunks + column];
                    if comptime!(norm.enabled) {
                        own = norm.apply(own, column, statistics[row * 2], statistics[row * 2 + 1]);
                    }
                    #[unroll]
                    for half in 0..2usize {
                        def.execute_inplace(
                            &four_pairs(uppers[i], lowers[i], half),
                            &two_pairs(own, half),
                            acc.index_mut(f),
                        );
                    }
                }
            }
        }
        step += comptime!(ahead * WARPS);
    }
    #[unroll]
    for f in 0..fragments {
        #[unroll]
        for r in 0..2usize {
            let pair = acc.index(f)[r];
            #[unroll]
            for e in 0..2usize {
                let row = lane % 4 * 2 + f * ROWS + e;
                let at = (warp * comptime!(fragments * ROWS) + row) * OUTPUTS;
                parts[at + lane / 4 + r * 8] = pair[e];
            }
        }
    }
    sync_cube();
}

/// The sum of the warps' parts of product `own`.
#[cube]
pub fn sum_of_warps(parts: &SharedMemory<f32>, own: usize, #[comptime] tiling: Tiling) -> f32 {
    let mut sum = parts[own];
    #[unroll]
    for warp in 1..WARPS {
        sum += parts[own + warp * comptime!(tiling.fragments * ROWS * OUTPUTS)];
    }
    sum
}

/// Operand A: elements 4·`half` to 4·`half` + 3 of a chunk of the upper row, and of the lower.
#[cube]
fn four_pairs(upper: Chunk, lower: Chunk, #[comptime] half: usize) -> Array<Bf16Pair> {
    let mut pairs = Array::<Bf16Pair>::new(4usize);
    #[unroll]
    for i in 0..2usize {
        pairs[i * 2] = pair(upper, half * 2 + i);
        pairs[i * 2 + 1] = pair(lower, half * 2 + i);
    }
    pairs
}

/// Operand B: elements 4·`half` to 4·`half` + 3 of a chunk.
#[cube]
fn two_pairs(chunk: Chunk, #[comptime] half: usize) -> Array<Bf16Pair> {
    let mut pairs = Array::<Bf16Pair>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        pairs[i] = pair(chunk, half * 2 + i);
    }
    pairs
}

/// Elements 2·`at` and 2·`at` + 1 of a chunk.
#[cube]
fn pair(chunk: Chunk, #[comptime] at: usize) -> Bf16Pair {
    let mut pair = Bf16Pair::empty();
    pair[0] = chunk[comptime!(2 * at)];
    pair[1] = chunk[comptime!(2 * at + 1)];
    pair
}
