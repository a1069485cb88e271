//! Everything of Longwall that touches an accelerator: fused operations, attention variants, and
//! the backend contract they plug into.
//!
//! An operation implements [`backend::Op`] once: a reference in plain tensor operations that runs,
//! and differentiates, on every device; and, where speed matters, kernels with hand-written
//! gradients. [`backend::OpBackend`] picks the kernel where the device has one.

pub mod attention;
pub mod backend;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod ops;
#[cfg(test)]
mod testing;
mod tile;

/// The CPU backend.
pub type Cpu = burn::backend::Flex;

/// The CUDA backend, without a fusion wrapper: Longwall's own operations are the fused ones.
pub type Cuda = burn_cubecl::CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>;
