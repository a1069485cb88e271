//! What the operations' CUDA sides share. An operation's `kernel.rs` is device code, its `cuda.rs`
//! launches it.
//!
//! Activations are f32 or bf16. Matrices of parameters are of either type, vectors of parameters
//! are f32. All arithmetic is in f32; gradients of activations have their type, gradients of
//! parameters are f32. Sums have one order, so equal inputs give equal bits.
//!
//! Buffers lie at multiples of 512 bytes, and views made by burn do too, so that the first element
//! of a tensor may be read as part of 16 bytes.

pub mod block;
pub mod elementwise;
pub mod norm;
pub mod rows;
pub mod sums;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

use crate::cuda::{CudaTensor, WIDE, buffer, contiguous};

/// Threads of a block whose kernel does not care.
pub const THREADS: usize = 256;

/// Whether activations of this type have kernels.
pub fn supported(x: &CudaTensor) -> bool {
    matches!(x.dtype, DType::F32 | DType::BF16)
}

/// Elements that a thread reads at once from rows of `width`: as many as fit evenly.
pub fn lanes(width: usize, dtype: DType) -> usize {
    let most = WIDE / dtype.size();
    1 << width.trailing_zeros().min(most.ilog2())
}

/// A size as kernels take it.
///
/// # Panics
/// When it does not fit 32 bits.
pub fn number(size: usize) -> u32 {
    u32::try_from(size)
        .unwrap_or_else(|_| panic!("{size} elements; a kernel addresses fewer than 2^32 at a time"))
}

/// Blocks of `threads` for so many pieces of work.
pub fn blocks(work: usize, threads: usize) -> CubeCount {
    CubeCount::Static(number(work.div_ceil(threads)), 1, 1)
}

/// A block of so many threads.
pub fn dim(threads: usize) -> CubeDim {
    CubeDim::new_1d(threads as u32)
}

/// The sizes of the dimensions.
pub fn dims(x: &CudaTensor) -> Vec<usize> {
    x.meta.shape().to_vec()
}

/// Number of elements.
pub fn elements(x: &CudaTensor) -> usize {
    x.meta.shape().num_elements()
}

/// Something to pass where a kernel reads nothing.
pub fn nothing(x: &CudaTensor) -> ArrayArg<CudaRuntime> {
    buffer(x, 1)
}

/// A tensor of another shape or other strides over the same buffer, `offset` elements on.
pub fn over(x: &CudaTensor, offset: usize, shape: &[usize], strides: &[usize]) -> CudaTensor {
    let handle = match offset * x.dtype.size() {
        0 => x.handle.clone(),
        bytes => x.handle.clone().offset_start(bytes as u64),
    };
    let meta = Metadata::new(Shape::from(shape.to_vec()), strides.to_vec());
    CubeTensor::new(x.client.clone(), handle, meta, x.device.clone(), x.dtype)
}

/// A parameter vector, contiguous.
///
/// # Panics
/// When it is not f32, or not of this shape.
pub fn vector(x: &CudaTensor, len: usize, what: &str) -> CudaTensor {
    assert_eq!(x.dtype, DType::F32, "type of {what}");
    assert_eq!(dims(x), [len], "shape of {what}");
    contiguous(x)
}

/// An integer tensor, contiguous.
///
/// # Panics
/// When it is not i32, or not of this shape.
pub fn integers(x: &CudaTensor, shape: &[usize], what: &str) -> CudaTensor {
    assert_eq!(x.dtype, DType::I32, "type of {what}");
    assert_eq!(dims(x), shape, "shape of {what}");
    contiguous(x)
}
