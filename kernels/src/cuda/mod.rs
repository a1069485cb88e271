//! What the CUDA backend's kernels share.

pub mod blas;

use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaRuntime;

/// A tensor of the CUDA backend.
pub type CudaTensor = CubeTensor<CudaRuntime>;
