//! Sums over many elements, of a fixed order.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::kernels::sums as kernels;
use super::{CudaTensor, blocks, buffer, contiguous, dim, dims, elements, number, supported};
use crate::cuda::empty;

/// Partial sums of a tensor, at most.
const PARTS: usize = 1024;

/// Sums of the columns from `first` on of `parts`, `[rows, columns]` in f32, as a tensor of
/// `shape`. With `transposed` m they are read as `[m, n]` and written as `[n, m]`; 1 changes
/// nothing.
pub fn columns(parts: &CudaTensor, first: usize, shape: &[usize], transposed: usize) -> CudaTensor {
    let [rows, row] = dims(parts)[..] else { unreachable!("partial sums are a matrix") };
    let out = empty(parts, shape, DType::F32);
    let columns = elements(&out);
    number(rows * row);
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        kernels::columns::launch_unchecked::<CudaRuntime>(
            &parts.client,
            blocks(columns, kernels::COLUMNS),
            dim(kernels::COLUMNS * kernels::WARPS),
            buffer(parts, 1),
            buffer(&out, 1),
            number(rows),
            number(row),
            number(first),
            number(columns),
            number(transposed),
        );
    }
    out
}

/// The sum of all elements of an f32 tensor without gaps, shape `[1]`.
pub fn total(parts: &CudaTensor) -> CudaTensor {
    let out = empty(parts, &[1], DType::F32);
    // SAFETY: one block reads all elements and writes one.
    unsafe {
        kernels::total::launch_unchecked::<CudaRuntime>(
            &parts.client,
            blocks(1, 1),
            dim(kernels::THREADS),
            buffer(parts, 1),
            buffer(&out, 1),
            number(elements(parts)),
        );
    }
    out
}

/// Σ x² over all tensors together, shape `[1]`, in f32.
///
/// # Panics
/// When there are none, or one is neither f32 nor bf16.
pub fn squares(tensors: &[CudaTensor]) -> CudaTensor {
    let tensors: Vec<_> = tensors.iter().map(contiguous).collect();
    let shares: Vec<[Share; 2]> = tensors.iter().map(Share::of).collect();
    let slots = shares.iter().flatten().map(|share| share.blocks).sum();
    let parts = empty(&tensors[0], &[slots], DType::F32);
    let mut slot = 0;
    for (x, shares) in tensors.iter().zip(&shares) {
        for share in shares.iter().filter(|share| share.blocks > 0) {
            // SAFETY: the kernel reads the share's vectors and writes one slot for each block.
            unsafe {
                kernels::squares::launch_unchecked(
                    &x.client,
                    blocks(share.blocks, 1),
                    dim(kernels::THREADS),
                    share.lanes,
                    buffer(x, share.lanes),
                    buffer(&parts, 1),
                    number(share.first),
                    number(share.vectors),
                    number(slot),
                    x.dtype.into(),
                );
            }
            slot += share.blocks;
        }
    }
    total(&parts)
}

/// Some vectors of a tensor, and the blocks that sum them.
struct Share {
    lanes: usize,
    first: usize,
    vectors: usize,
    blocks: usize,
}

impl Share {
    /// Whole vectors, then the elements left over.
    fn of(x: &CudaTensor) -> [Self; 2] {
        assert!(supported(x), "square sums of {:?} are not supported; cast to f32", x.dtype);
        let (len, lanes) = (elements(x), super::WIDE / x.dtype.size());
        let share = |lanes, first, vectors: usize| {
            // A thread has four vectors or more, where there are so many.
            let blocks = vectors.div_ceil(4 * kernels::THREADS).min(PARTS);
            Share { lanes, first, vectors, blocks }
        };
        [share(lanes, 0, len / lanes), share(1, len - len % lanes, len % lanes)]
    }
}
