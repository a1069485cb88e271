//! The contract between operations and devices.
//!
//! [`Op`] is one differentiable operation, [`StateOp`] one that can also go on from a state, [`NoGradOp`] one without a
//! gradient; [`OpBackend`] is a burn backend that can run them. Every backend runs an operation's reference; a backend
//! with a kernel for it runs the kernel, and [`Autodiff`](burn::backend::Autodiff) then records one node with the
//! kernel's own gradient. [`with_reference`] turns kernels off.

mod autodiff;
mod grad_accumulation;
mod op;
mod op_backend;
mod reference;
mod state_op;

use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor, TensorPrimitive};

pub use grad_accumulation::{leaf_id, take_accumulated_grad, with_accumulated_grads};
pub use op::{Forward, NoGradOp, Op};
pub use op_backend::OpBackend;
pub(crate) use reference::kernels_allowed;
pub use reference::with_reference;
pub use state_op::StateOp;

/// A float tensor from its primitive.
pub fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// A float tensor's primitive.
pub fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// An integer tensor from its primitive.
pub fn int_tensor<B: Backend, const D: usize>(primitive: IntTensor<B>) -> Tensor<B, D, Int> {
    Tensor::from_primitive(primitive)
}
