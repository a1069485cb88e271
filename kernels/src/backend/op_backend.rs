//! The devices' side of the contract.

use burn::backend::Flex;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Slice, TensorMetadata};
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};
use burn_flex::FlexTensor;
use cubecl::cuda::CudaRuntime;

use super::reference::{kernels_allowed, run_reference, run_reference_from};
use super::{Forward, NoGradOp, Op, StateOp};
use crate::cuda::{CudaTensor, narrow};
use crate::device::{Allocation, DeviceKind, memory};

/// A burn backend that runs Longwall's operations.
pub trait OpBackend: Backend {
    /// The kind of its devices.
    fn device_kind() -> DeviceKind;

    /// Bytes that this process can still take of the device's memory; `None` if the system or the driver
    /// does not report it.
    fn available_memory(device: &Self::Device) -> Option<u64>;

    /// Releases what no tensor holds of the device's memory, and allocates this thread's tensors in another way from
    /// now on. Only GPUs have ways to choose from.
    fn set_allocation(device: &Self::Device, allocation: Allocation) {
        let _ = (device, allocation);
    }

    /// Runs `op`: its kernel on this device, or its reference if there is none.
    fn run<O: Op<N>, const N: usize>(
        op: &O,
        inputs: [FloatTensor<Self>; N],
        ints: Vec<IntTensor<Self>>,
    ) -> FloatTensor<Self> {
        match Self::run_kernel(op, &inputs, &ints) {
            Some(output) => output,
            None => run_reference::<Self, O, N>(op, inputs, &ints),
        }
    }

    /// Runs the device's kernel for `op`, if it has one for these inputs.
    fn run_kernel<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        let forward = Self::forward(op, inputs, ints, [false; N])?;
        #[cfg(test)]
        crate::testing::served::by_kernel::<O>();
        Some(forward.output)
    }

    /// As [`OpBackend::run`], from the state `before` the first token; also the state after the last.
    fn run_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: [FloatTensor<Self>; N],
        ints: Vec<IntTensor<Self>>,
        before: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        match Self::run_kernel_from(op, &inputs, &ints, &before) {
            Some(results) => results,
            None => run_reference_from::<Self, O, N>(op, inputs, &ints, before),
        }
    }

    /// As [`OpBackend::run_kernel`], from the state `before` the first token; also the state after the last.
    fn run_kernel_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
        before: &FloatTensor<Self>,
    ) -> Option<[FloatTensor<Self>; 2]> {
        let (forward, after) = Self::forward_from(op, inputs, ints, before, [false; N])?;
        #[cfg(test)]
        crate::testing::served::by_kernel::<O>();
        Some([forward.output, after])
    }

    /// Runs `op`, which has no gradient: its kernel on this device, or its reference if there is none.
    fn run_no_grad<O: NoGradOp>(
        op: &O,
        inputs: O::Inputs<FloatTensor<Self>>,
    ) -> O::Outputs<FloatTensor<Self>> {
        op.reference::<Self>(inputs)
    }

    /// `x` in f32. In the backward pass, a parameter's gradient stays f32, an activation's is cast to its
    /// type.
    fn to_f32(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if x.dtype() == DType::BF16 { Self::float_cast(x, FloatDType::F32) } else { x }
    }

    /// The forward pass of the device's kernel for `op`, if it has one for these inputs.
    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
        needs: [bool; N],
    ) -> Option<Forward<FloatTensor<Self>>>;

    /// As [`OpBackend::forward`], from the state `before` the first token; also the state after the last.
    fn forward_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
        before: &FloatTensor<Self>,
        needs: [bool; N],
    ) -> Option<(Forward<FloatTensor<Self>>, FloatTensor<Self>)>;

    /// The backward pass of the kernel that [`OpBackend::forward`] or [`OpBackend::forward_from`] ran; `grad_accum` as
    /// in [`Op::cuda_backward_accumulating`].
    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<FloatTensor<Self>>,
        ints: &[IntTensor<Self>],
        grad: FloatTensor<Self>,
        needs: [bool; N],
        grad_accum: &mut [Option<FloatTensor<Self>>; N],
    ) -> [Option<FloatTensor<Self>>; N];

    /// The first `len` elements of dimension `dim`; a view even where the device's slice would copy.
    fn leading(x: FloatTensor<Self>, dim: usize, len: usize) -> FloatTensor<Self> {
        let range = |d: usize, size: usize| Slice::from(0..if d == dim { len } else { size });
        let ranges: Vec<_> = x.shape().iter().enumerate().map(|(d, &n)| range(d, n)).collect();
        Self::float_slice(x, &ranges)
    }

    /// `x` as a CUDA tensor, for code specific to CUDA such as decoding, which updates its cache in place.
    /// `None` on other devices, and under [`with_reference`](super::with_reference).
    fn into_cuda(x: FloatTensor<Self>) -> Option<CudaTensor> {
        let _ = x;
        None
    }

    /// The inverse of [`OpBackend::into_cuda`].
    ///
    /// # Panics
    /// On other devices.
    fn from_cuda(x: CudaTensor) -> FloatTensor<Self> {
        unreachable!("a CUDA tensor of {:?} on {}", x.meta.shape(), Self::device_kind())
    }

    /// As [`OpBackend::from_cuda`], for integers.
    ///
    /// # Panics
    /// On other devices.
    fn int_from_cuda(x: CudaTensor) -> IntTensor<Self> {
        unreachable!("a CUDA tensor of {:?} on {}", x.meta.shape(), Self::device_kind())
    }
}

/// Whether the CPU's kernels may run `O` on these inputs. They are f32; f64 tensors take the reference.
fn cpu_runs<O: Op<N>, const N: usize>(inputs: &[FlexTensor; N]) -> bool {
    let served = inputs.iter().all(|t| t.dtype() == DType::F32);
    served && (O::PART_OF_REFERENCES || kernels_allowed())
}

impl OpBackend for Flex {
    fn device_kind() -> DeviceKind {
        DeviceKind::Cpu
    }

    fn available_memory(_device: &Self::Device) -> Option<u64> {
        memory::of_machine()
    }

    fn run_no_grad<O: NoGradOp>(op: &O, inputs: O::Inputs<FlexTensor>) -> O::Outputs<FlexTensor> {
        if kernels_allowed() { op.cpu(inputs) } else { op.reference::<Self>(inputs) }
    }

    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        if cpu_runs::<O, N>(inputs) { op.cpu_forward(inputs, ints, needs) } else { None }
    }

    fn forward_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        before: &FlexTensor,
        needs: [bool; N],
    ) -> Option<(Forward<FlexTensor>, FlexTensor)> {
        let runs = cpu_runs::<O, N>(inputs);
        if runs { op.cpu_forward_from(inputs, ints, before, needs) } else { None }
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
        _grad_accum: &mut [Option<FlexTensor>; N],
    ) -> [Option<FlexTensor>; N] {
        op.cpu_backward(saved, ints, grad, needs)
    }
}

impl<F: FloatElement, I: IntElement, BT: BoolElement> OpBackend
    for CubeBackend<CudaRuntime, F, I, BT>
{
    fn device_kind() -> DeviceKind {
        DeviceKind::Cuda
    }

    fn available_memory(device: &Self::Device) -> Option<u64> {
        memory::of_gpu(device)
    }

    fn set_allocation(device: &Self::Device, allocation: Allocation) {
        memory::set_allocation(device, allocation);
    }

    fn run_no_grad<O: NoGradOp>(op: &O, inputs: O::Inputs<CudaTensor>) -> O::Outputs<CudaTensor> {
        if kernels_allowed() { op.cuda(inputs) } else { op.reference::<Self>(inputs) }
    }

    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let runs = O::PART_OF_REFERENCES || kernels_allowed();
        if runs { op.cuda_forward(inputs, ints, needs) } else { None }
    }

    fn forward_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; N],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        let runs = O::PART_OF_REFERENCES || kernels_allowed();
        if runs { op.cuda_forward_from(inputs, ints, before, needs) } else { None }
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        grad_accum: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        op.cuda_backward_accumulating(saved, ints, grad, needs, grad_accum)
    }

    fn leading(x: CudaTensor, dim: usize, len: usize) -> CudaTensor {
        narrow(&x, dim, 0..len)
    }

    fn into_cuda(x: CudaTensor) -> Option<CudaTensor> {
        kernels_allowed().then_some(x)
    }

    fn from_cuda(x: CudaTensor) -> CudaTensor {
        x
    }

    fn int_from_cuda(x: CudaTensor) -> CudaTensor {
        x
    }
}
