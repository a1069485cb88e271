//! The operations' side of the contract: [`Op`] with a gradient, [`NoGradOp`] without.

use std::fmt::Debug;

use burn::backend::Flex;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::OpBackend;
use crate::Cuda;
use crate::cuda::CudaTensor;

/// The result of a kernel's forward pass: the output, and the tensors saved for the backward pass.
#[derive(Clone, Debug)]
pub struct Forward<T> {
    /// The operation's result.
    pub output: T,
    /// Tensors saved for the backward pass: inputs (shared, so cheap), statistics, or gradients already
    /// computed.
    pub saved: Vec<T>,
}

/// One differentiable operation of `N` float tensors, with one float result.
///
/// Integer tensors (token ids, document starts) are passed beside them and have no gradient.
pub trait Op<const N: usize>: Clone + Debug + Send + Sync + 'static {
    /// Whether references use this operation: then [`with_reference`](super::with_reference) does not turn
    /// off its kernels.
    const PART_OF_REFERENCES: bool = false;

    /// The operation in plain tensor operations: short, obvious, differentiable, on any backend.
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B>;

    /// Runs the CPU kernel; `None` if there is none for these inputs, and the reference runs.
    ///
    /// `needs` says which inputs require a gradient; without any, nothing needs to be saved.
    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let _ = (inputs, ints, needs);
        None
    }

    /// The CPU kernel's gradients of the inputs that `needs` selects, from the tensors that
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

    /// [`Op::cuda_backward`] for an operation that can add its gradients to existing ones. `grad_accum`
    /// holds the inputs' gradients from other uses of an input and, for a parameter, from earlier passes
    /// ([`with_accumulated_grads`](super::with_accumulated_grads)).
    ///
    /// To add to a gradient, an operation takes it and returns the sum. Gradients left in `grad_accum` are
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
/// It takes its tensors by value, so that a kernel can write into buffers that are not shared.
pub trait NoGradOp {
    /// The inputs, of a device's tensors `T`.
    type Inputs<T>;
    /// The outputs.
    type Outputs<T>;

    /// The operation in plain tensor operations, on any backend.
    fn reference<B: OpBackend>(
        &self,
        inputs: Self::Inputs<FloatTensor<B>>,
    ) -> Self::Outputs<FloatTensor<B>>;

    /// Runs the CPU kernel, or the reference if there is none.
    fn cpu(&self, inputs: Self::Inputs<FlexTensor>) -> Self::Outputs<FlexTensor> {
        self.reference::<Flex>(inputs)
    }

    /// The CUDA kernel, as [`NoGradOp::cpu`].
    fn cuda(&self, inputs: Self::Inputs<CudaTensor>) -> Self::Outputs<CudaTensor> {
        self.reference::<Cuda>(inputs)
    }
}
