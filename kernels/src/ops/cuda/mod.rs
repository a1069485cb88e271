//! What the operations' CUDA code shares. An operation's `kernel.rs` is device code, its `cuda.rs`
//! launches it.
//!
//! Activations are f32 or bf16. Matrices of parameters are of either type, vectors of parameters
//! are f32. All arithmetic is in f32; gradients of activations have the activations' type, gradients of
//! parameters are f32. The order of sums is fixed, so equal inputs give equal bits.
//!
//! Buffers are aligned to 512 bytes, and so are views made by burn: a tensor's first elements can be read
//! in 16-byte vectors.

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

use self::block::HeadStridesLaunch;
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous};

/// The default number of threads per block.
pub const THREADS: usize = 256;

/// Whether activations of this type have kernels.
pub fn supported(x: &CudaTensor) -> bool {
    matches!(x.dtype, DType::F32 | DType::BF16)
}

/// Elements per vector read from rows of `width`: the most that divide it, up to 16 bytes.
pub fn lanes(width: usize, dtype: DType) -> usize {
    let most = WIDE / dtype.size();
    1 << width.trailing_zeros().min(most.ilog2())
}

/// A size as a kernel argument.
///
/// # Panics
/// From 2³² on.
pub fn as_u32(size: usize) -> u32 {
    u32::try_from(size)
        .unwrap_or_else(|_| panic!("{size} elements; a kernel addresses fewer than 2^32 at a time"))
}

/// The number of blocks of `threads` for `work` items.
pub fn blocks(work: usize, threads: usize) -> CubeCount {
    CubeCount::Static(as_u32(work.div_ceil(threads)), 1, 1)
}

/// A block of `threads` threads.
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

/// The strides of `x`, `[batch, heads, seq_len, head_dim]`, in vectors of `lanes`.
///
/// # Panics
/// From 2³² vectors on.
pub fn head_strides(x: &CudaTensor, lanes: usize) -> HeadStridesLaunch<CudaRuntime> {
    let (strides, shape) = (x.meta.strides(), dims(x));
    let stride = |dim: usize| {
        as_u32(shape[dim] * strides[dim] / lanes);
        // A dimension of size 1 may have any stride.
        as_u32(if shape[dim] == 1 { 0 } else { strides[dim] / lanes })
    };
    HeadStridesLaunch::new(stride(0), stride(1), stride(2))
}

/// A placeholder for an argument that the kernel does not read.
pub fn nothing(x: &CudaTensor) -> ArrayArg<CudaRuntime> {
    buffer(x, 1)
}

/// A view of the same buffer with this shape and these strides, `offset` elements after x's start.
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
/// When it is not f32, or has another shape.
pub fn vector(x: &CudaTensor, len: usize, what: &str) -> CudaTensor {
    assert_eq!(x.dtype, DType::F32, "type of {what}");
    assert_eq!(dims(x), [len], "shape of {what}");
    contiguous(x)
}

/// An integer tensor, contiguous.
///
/// # Panics
/// When it is not i32, or has another shape.
pub fn integers(x: &CudaTensor, shape: &[usize], what: &str) -> CudaTensor {
    assert_eq!(x.dtype, DType::I32, "type of {what}");
    assert_eq!(dims(x), shape, "shape of {what}");
    contiguous(x)
}
