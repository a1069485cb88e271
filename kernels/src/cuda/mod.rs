//! What the CUDA backend's kernels share.
//!
//! One trap for references that run there: burn 0.21's `reshape` (so `unsqueeze` too) to a higher
//! rank misreads a strided view whose last dimension has one element, such as a `narrow` to one
//! token, or a row transposed into a column. Reshape first, then take the view.

pub mod blas;

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;

/// A tensor of the CUDA backend.
pub type CudaTensor = CubeTensor<CudaRuntime>;
