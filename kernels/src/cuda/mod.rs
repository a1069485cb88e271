//! What the CUDA backend's kernels share.
//!
//! A pitfall for references on CUDA: burn 0.21's `reshape` (and so `unsqueeze`) to a higher rank misreads
//! a strided view whose last dimension has one element, such as a `narrow` to one token, or a row
//! transposed into a column. Reshape first, then take the view.

pub mod blas;
mod side_stream;

use std::ops::Range;

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::{ArrayArg, ComputeClient};
use cubecl::zspace::metadata::Metadata;

pub use self::side_stream::SideStream;

/// A tensor of the CUDA backend.
pub type CudaTensor = CubeTensor<CudaRuntime>;

/// The multiprocessors of the device.
pub fn multiprocessors(client: &ComputeClient<CudaRuntime>) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize
}

/// `x` itself if it is contiguous, else a contiguous copy.
pub fn contiguous(x: &CudaTensor) -> CudaTensor {
    into_contiguous(x.clone())
}

/// An uninitialised contiguous tensor on the device of `like`.
pub fn empty(like: &CudaTensor, shape: &[usize], dtype: DType) -> CudaTensor {
    let shape = Shape::from(shape.to_vec());
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// As [`empty`], filled with zeros.
pub fn zeros(like: &CudaTensor, shape: &[usize], dtype: DType) -> CudaTensor {
    // Made as one row, because burn may pad rows.
    let row = Shape::new([shape.iter().product()]);
    reshaped(&zeros_client(like.client.clone(), like.device.clone(), row, dtype), shape)
}

/// `x`, contiguous, with another shape.
///
/// # Panics
/// When the numbers of elements differ.
pub fn reshaped(x: &CudaTensor, shape: &[usize]) -> CudaTensor {
    let x = contiguous(x);
    let shape = Shape::from(shape.to_vec());
    assert_eq!(x.meta.shape().num_elements(), shape.num_elements(), "elements of {shape:?}");
    CudaTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

/// A view of the elements in `range` of dimension `dim`.
///
/// # Panics
/// When the range exceeds the dimension.
pub fn narrow(x: &CudaTensor, dim: usize, range: Range<usize>) -> CudaTensor {
    let (mut shape, strides) = (x.meta.shape().clone(), x.meta.strides().clone());
    assert!(range.start <= range.end && range.end <= shape[dim], "{range:?} of {shape:?}");
    shape[dim] = range.len();
    let bytes = range.start * strides[dim] * x.dtype.size();
    let mut view = x.clone();
    view.handle = view.handle.offset_start(bytes as u64);
    *view.meta = Metadata::new(shape, strides);
    view
}

/// Copies the contiguous tensor `x` if its buffer is shared, so that it can be written in place.
pub fn unshare(x: &mut CudaTensor) {
    if !x.can_mut() {
        // burn's copy may pad rows.
        *x = contiguous(&x.copy());
    }
}

/// Bytes per vector read.
pub const WIDE: usize = 16;

/// The buffer from a tensor's first element on as vectors of `lanes` elements, for any strides.
///
/// # Panics
/// When `lanes` is above 1 and the first element is not aligned to 16 bytes.
pub fn buffer(x: &CudaTensor, lanes: usize) -> ArrayArg<CudaRuntime> {
    let offset = x.handle.offset_start.unwrap_or(0);
    assert!(lanes == 1 || offset.is_multiple_of(WIDE as u64), "a view at byte {offset}");
    let elements = x.meta.shape().num_elements();
    // SAFETY: kernels stay within the tensor by its shape and strides, and do not use this length.
    unsafe { ArrayArg::from_raw_parts(x.handle.clone(), elements / lanes) }
}
