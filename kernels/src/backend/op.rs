//! The operations' side of the contract: [`Op`] has a gradient, [`NoGradOp`] has none.

use std::fmt::Debug;

use burn::backend::Flex;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::OpBackend;
use crate::Cuda;
use crate::cuda::CudaTensor;

/// What a kernel's forward pass gives: the output, and what its backward pass will need.
#[derive(Clone, Debug)]
pub struct Forward<T> {
    /// The operation's result.
    pub output: T,
    /// Tensors kept until the backward pass: inputs (cheap, they are shared), statistics, or
    /// gradients already computed.
    pub saved: Vec<T>,
}

/// One differentiable operation of `N` float tensors, with one float result.
///
/// Integer tensors (token ids, document starts) are passed beside them and have no gradient.
pub trait Op<const N: usize>: Clone + Debug + Send + Sync + 'static {
    /// Whether references are made of this operation: then
    /// [`with_reference`](super::with_reference) leaves its kernels on.
    const PART_OF_REFERENCES: bool = false;

    /// The operation in plain tensor operations: short, obvious, differentiable, on any backend.
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B>;

    /// The CPU kernel, or `None` when these inputs have none and the reference runs.
    ///
    /// `needs` says which inputs want a gradient; with none, nothing need be saved.
    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let _ = (inputs, ints, needs);
        None
    }

    /// The CPU kernel's gradients of the inputs that `needs` names, from what
    /// [`Op::cpu_forward`] saved.
    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        let _ = (saved, ints, grad, needs);
        unreachable!("{self:?} has a CPU forward kernel but no backward kernel")
    }

    /// The CUDA kernel, as [`Op::cpu_forward`].
    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let _ = (inputs, ints, needs);
        None
    }

    /// The CUDA kernel's gradients, as [`Op::cpu_backward`].
    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let _ = (saved, ints, grad, needs);
        unreachable!("{self:?} has a CUDA forward kernel but no backward kernel")
    }

    /// [`Op::cuda_backward`] for an operation that adds its gradients to those that its inputs have
    /// already: `grad_accum` holds these, from other uses of an input and, for a parameter, from
    /// earlier passes ([`with_accumulated_grads`](super::with_accumulated_grads)).
    ///
    /// An operation that adds to one takes it and returns the sum. What is left in `grad_accum` is
    /// added afterwards.
    fn cuda_backward_accumulating(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let _ = grad_accum;
        self.cuda_backward(saved, ints, grad, needs)
    }
}

/// One operation without a gradient: an optimiser's update, a norm.
///
/// Its tensors are handed over, so that a kernel may write into buffers that nobody else owns.
pub trait NoGradOp {
    /// What it takes, of a device's tensors `T`.
    type Inputs<T>;
    /// What it gives.
    type Outputs<T>;

    /// The operation in plain tensor operations, on any backend.
    fn reference<B: OpBackend>(
        &self,
        inputs: Self::Inputs<FloatTensor<B>>,
    ) -> Self::Outputs<FloatTensor<B>>;

    /// The CPU kernel; the reference where there is none.
    fn cpu(&self, inputs: Self::Inputs<FlexTensor>) -> Self::Outputs<FlexTensor> {
        self.reference::<Flex>(inputs)
    }

    /// The CUDA kernel, as [`NoGradOp::cpu`].
    fn cuda(&self, inputs: Self::Inputs<CudaTensor>) -> Self::Outputs<CudaTensor> {
        self.reference::<Cuda>(inputs)
    }
}
