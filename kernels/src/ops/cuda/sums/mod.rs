//! Sums over many elements, in a fixed order.

mod kernel;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::{CudaTensor, as_u32, blocks, buffer, dim, dims, elements};
use crate::cuda::empty;

/// Sums of the columns from `first` on of `parts`, `[rows, columns]` in f32, as a tensor of
/// `shape`. With `transposed` m they are read as `[m, n]` and written as `[n, m]`; 1 for no transpose.
pub fn columns(parts: &CudaTensor, first: usize, shape: &[usize], transposed: usize) -> CudaTensor {
    let [rows, row] = dims(parts)[..] else { unreachable!("partial sums are a matrix") };
    let out = empty(parts, shape, DType::F32);
    let columns = elements(&out);
    as_u32(rows * row);
    // SAFETY: the arguments have the sizes that the kernel's documentation asks for.
    unsafe {
        kernel::columns::launch_unchecked::<CudaRuntime>(
            &parts.client,
            blocks(columns, kernel::COLUMNS),
            dim(kernel::COLUMNS * kernel::WARPS),
            buffer(parts, 1),
            buffer(&out, 1),
            as_u32(rows),
            as_u32(row),
            as_u32(first),
            as_u32(columns),
            as_u32(transposed),
        );
    }
    out
}

/// The sum of all elements of an f32 tensor without gaps, shape `[1]`.
pub fn total(parts: &CudaTensor) -> CudaTensor {
    let out = empty(parts, &[1], DType::F32);
    add_up(parts, &out);
    out
}

/// [`total`] into `out`, one element anywhere in a buffer.
pub fn add_up(parts: &CudaTensor, out: &CudaTensor) {
    // SAFETY: one block reads all elements and writes one.
    unsafe {
        kernel::total::launch_unchecked::<CudaRuntime>(
            &parts.client,
            blocks(1, 1),
            dim(kernel::THREADS),
            buffer(parts, 1),
            buffer(out, 1),
            as_u32(elements(parts)),
        );
    }
}
