//! The contract between operations and devices.
//!
//! [`Op`] is one differentiable operation; [`OpBackend`] is a burn backend that can run it. Every
//! backend runs an operation's reference; a backend with a kernel for it runs the kernel, and
//! [`Autodiff`] then records one node with the kernel's own gradient.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Debug;
use std::marker::PhantomData;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Int, Slice, Tensor, TensorMetadata, TensorPrimitive};
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};
use burn_flex::FlexTensor;
use cubecl::cuda::CudaRuntime;

use crate::cuda::{CudaTensor, narrow};
use crate::ops::adamw::{AdamwStep, Stepped};

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
    /// Whether [`with_reference`] leaves its kernels on: for an operation that references are made
    /// of.
    const IN_REFERENCES: bool = false;

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

    /// [`Op::cuda_backward`] where some inputs have gradients already, from other uses of them: an
    /// operation that adds to one in the same pass takes it from `onto`, and what is left there is
    /// added afterwards.
    fn cuda_backward_onto(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        onto: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        let _ = onto;
        self.cuda_backward(saved, ints, grad, needs)
    }
}

/// A burn backend that runs Longwall's operations.
pub trait OpBackend: Backend {
    /// The device's name for logs and reports, for example `cpu` or `cuda`.
    fn device_kind() -> &'static str;

    /// Runs `op`: its kernel on this device, or its reference where there is none.
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

    /// `x` in f32. The gradient of a parameter stays f32, that of an activation becomes of its type.
    fn widen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if x.dtype() == DType::BF16 { Self::float_cast(x, FloatDType::F32) } else { x }
    }

    /// The device's kernel for `op`, if it has one for these inputs.
    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
        needs: [bool; N],
    ) -> Option<Forward<FloatTensor<Self>>>;

    /// The gradients of the kernel that [`OpBackend::forward`] ran; `onto` as in
    /// [`Op::cuda_backward_onto`].
    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<FloatTensor<Self>>,
        ints: &[IntTensor<Self>],
        grad: FloatTensor<Self>,
        needs: [bool; N],
        onto: &mut [Option<FloatTensor<Self>>; N],
    ) -> [Option<FloatTensor<Self>>; N];

    /// The first `len` elements of dimension `dim`: a view, where the device would copy a slice.
    fn leading(x: FloatTensor<Self>, dim: usize, len: usize) -> FloatTensor<Self> {
        let range = |d: usize, size: usize| Slice::from(0..if d == dim { len } else { size });
        let ranges: Vec<_> = x.shape().iter().enumerate().map(|(d, &n)| range(d, n)).collect();
        Self::float_slice(x, &ranges)
    }

    /// `x` for work that has its own form on CUDA, as decoding has, which changes what it keeps in place:
    /// `None` on other devices, and under [`with_reference`].
    fn into_cuda(x: FloatTensor<Self>) -> Option<CudaTensor> {
        let _ = x;
        None
    }

    /// What [`OpBackend::into_cuda`] gave, or work on it.
    ///
    /// # Panics
    /// On other devices.
    fn from_cuda(x: CudaTensor) -> FloatTensor<Self> {
        unreachable!("a CUDA tensor of {:?} on {}", x.meta.shape(), Self::device_kind())
    }

    /// One AdamW step on one parameter, from `[parameter, gradient, m, v]`: the new parameter, m
    /// and v, and the new parameter as `copy`. Not differentiable.
    ///
    /// All four tensors have one shape; buffers owned by nobody else are updated in place.
    fn adamw(
        step: &AdamwStep,
        tensors: [FloatTensor<Self>; 4],
        copy: Option<DType>,
    ) -> Stepped<FloatTensor<Self>> {
        let new = crate::ops::adamw::reference::<Self>(step, tensors);
        crate::ops::adamw::with_copy::<Self>(new, copy)
    }

    /// Σ x², shape `[1]`, in f32; the same bits at every call. Not differentiable.
    fn square_sum(x: FloatTensor<Self>) -> FloatTensor<Self> {
        crate::ops::grad_norm::reference::<Self>(x)
    }

    /// Σ x² over all tensors together, as [`OpBackend::square_sum`].
    fn square_sums(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        crate::ops::grad_norm::one_by_one::<Self>(tensors)
    }
}

impl OpBackend for Flex {
    fn device_kind() -> &'static str {
        "cpu"
    }

    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        if reference_forced::<O, N>() || inputs.iter().any(|t| t.dtype() != DType::F32) {
            return None; // The kernels are f32; f64 tensors take the reference.
        }
        op.cpu_forward(inputs, ints, needs)
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        needs: [bool; N],
        _onto: &mut [Option<FlexTensor>; N],
    ) -> [Option<FlexTensor>; N] {
        op.cpu_backward(saved, ints, grad, needs)
    }

    fn adamw(
        step: &AdamwStep,
        tensors: [FlexTensor; 4],
        copy: Option<DType>,
    ) -> Stepped<FlexTensor> {
        let new = crate::ops::adamw::cpu(step, tensors);
        crate::ops::adamw::with_copy::<Self>(new, copy)
    }

    fn square_sum(x: FlexTensor) -> FlexTensor {
        crate::ops::grad_norm::cpu(x)
    }
}

impl<F: FloatElement, I: IntElement, BT: BoolElement> OpBackend
    for CubeBackend<CudaRuntime, F, I, BT>
{
    fn device_kind() -> &'static str {
        "cuda"
    }

    fn forward<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        if reference_forced::<O, N>() {
            return None;
        }
        op.cuda_forward(inputs, ints, needs)
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        needs: [bool; N],
        onto: &mut [Option<CudaTensor>; N],
    ) -> [Option<CudaTensor>; N] {
        op.cuda_backward_onto(saved, ints, grad, needs, onto)
    }

    fn leading(x: CudaTensor, dim: usize, len: usize) -> CudaTensor {
        narrow(&x, dim, 0..len)
    }

    fn into_cuda(x: CudaTensor) -> Option<CudaTensor> {
        (!REFERENCE.get()).then_some(x)
    }

    fn from_cuda(x: CudaTensor) -> CudaTensor {
        x
    }

    fn adamw(
        step: &AdamwStep,
        tensors: [CudaTensor; 4],
        copy: Option<DType>,
    ) -> Stepped<CudaTensor> {
        crate::ops::cuda::elementwise::adamw(step, tensors, copy)
    }

    fn square_sum(x: CudaTensor) -> CudaTensor {
        crate::ops::cuda::sums::squares(&[x])
    }

    fn square_sums(tensors: Vec<CudaTensor>) -> CudaTensor {
        crate::ops::cuda::sums::squares(&tensors)
    }
}

/// The autodiff node of every operation that ran a kernel.
#[derive(Debug)]
struct Node<O, const N: usize>(PhantomData<O>);

/// What a [`Node`] keeps between its forward and its backward pass.
#[derive(Clone, Debug)]
struct Saved<O, B: Backend, const N: usize> {
    op: O,
    tensors: Vec<FloatTensor<B>>,
    ints: Vec<IntTensor<B>>,
    needs: [bool; N],
}

impl<B: OpBackend, O: Op<N>, const N: usize> Backward<B, N> for Node<O, N> {
    type State = Saved<O, B, N>;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        let Saved { op, tensors, ints, needs } = ops.state;
        let mut onto = ops.parents.each_ref().map(|parent| {
            // A tensor of the parent's node is what the container is asked for.
            let mut of_parent = <Autodiff<B> as AutodiffBackend>::from_inner(grad.clone());
            of_parent.node = parent.clone()?;
            grads.remove::<B>(&of_parent)
        });
        let earlier: [Option<u64>; N] = std::array::from_fn(|i| {
            let leaf = ops.parents[i].as_ref().filter(|_| onto[i].is_none())?.id.value;
            onto[i] = earlier_gradients::<B, _>(|all| all.remove(&leaf)).flatten();
            Some(leaf)
        });
        let inputs = B::backward(&op, tensors, &ints, grad, needs, &mut onto);
        for (((parent, old), new), earlier) in
            ops.parents.into_iter().zip(onto).zip(inputs).zip(earlier)
        {
            let Some(parent) = parent else { continue };
            match (old, earlier) {
                (Some(old), Some(leaf)) => {
                    earlier_gradients::<B, _>(|all| all.insert(leaf, old));
                }
                (Some(old), None) => grads.register::<B>(parent.id, old),
                (None, _) => {}
            }
            if let Some(new) = new {
                grads.register::<B>(parent.id, new);
            }
        }
    }
}

thread_local! {
    /// The gradients of [`add_to_earlier`] that nobody has taken: an [`Earlier`].
    static EARLIER: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// Gradients of leaves, by [`leaf_id`].
pub type Earlier<B> = HashMap<u64, FloatTensor<B>>;

/// What tells a leaf of the graph from others.
pub fn leaf_id<B: Backend>(x: &FloatTensor<Autodiff<B>>) -> u64 {
    x.node.id.value
}

/// Runs `backward`, a backward pass, where leaves have gradients of earlier passes: an operation that
/// adds to one in the same pass ([`Op::cuda_backward_onto`]) takes it, and the pass then gives the
/// leaf's sum. Returns what nobody took.
pub fn add_to_earlier<B: Backend, T>(
    earlier: Earlier<B>,
    backward: impl FnOnce() -> T,
) -> (T, Earlier<B>) {
    EARLIER.set(Some(Box::new(earlier)));
    let result = backward();
    let left = EARLIER.take().and_then(|left| left.downcast().ok());
    (result, *left.expect("a backward pass does not run inside another"))
}

/// Uses the earlier gradients, where a backward pass has some.
fn earlier_gradients<B: Backend, T>(f: impl FnOnce(&mut Earlier<B>) -> T) -> Option<T> {
    EARLIER.with_borrow_mut(|all| Some(f(all.as_mut()?.downcast_mut()?)))
}

/// The autodiff node of [`OpBackend::widen`].
#[derive(Debug)]
struct Widen;

impl<B: OpBackend> Backward<B, 1> for Widen {
    /// The type of the gradient.
    type State = DType;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = &ops.parents {
            grads.register::<B>(parent.id, B::float_cast(grad, ops.state.into()));
        }
    }
}

impl<B: OpBackend, C: CheckpointStrategy> OpBackend for Autodiff<B, C> {
    fn device_kind() -> &'static str {
        B::device_kind()
    }

    fn run_kernel<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        let needs = std::array::from_fn(|i| !inputs[i].node.requirement.is_none());
        let primitives = std::array::from_fn(|i| inputs[i].primitive.clone());
        let forward = B::forward(op, &primitives, ints, needs)?;
        #[cfg(test)]
        crate::testing::served::by_kernel::<O>();
        let nodes = inputs.each_ref().map(|input| input.node.clone());
        Some(match Node::<O, N>(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(
                Saved { op: op.clone(), tensors: forward.saved, ints: ints.to_vec(), needs },
                forward.output,
            ),
            OpsKind::UnTracked(prep) => prep.finish(forward.output),
        })
    }

    fn widen(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let is_parameter = x.node.parents.is_empty();
        match Widen.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let back = if is_parameter { DType::F32 } else { x.dtype() };
                prep.finish(back, B::widen(x.primitive))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::widen(x.primitive)),
        }
    }

    fn forward<O: Op<N>, const N: usize>(
        _op: &O,
        _inputs: &[FloatTensor<Self>; N],
        _ints: &[IntTensor<Self>],
        _needs: [bool; N],
    ) -> Option<Forward<FloatTensor<Self>>> {
        None // Kernels run through `run`, which records their node.
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        _saved: Vec<FloatTensor<Self>>,
        _ints: &[IntTensor<Self>],
        _grad: FloatTensor<Self>,
        _needs: [bool; N],
        _onto: &mut [Option<FloatTensor<Self>>; N],
    ) -> [Option<FloatTensor<Self>>; N] {
        unreachable!("{op:?} was differentiated twice")
    }

    fn adamw(
        step: &AdamwStep,
        tensors: [FloatTensor<Self>; 4],
        copy: Option<DType>,
    ) -> Stepped<FloatTensor<Self>> {
        let (new, copy) = B::adamw(step, tensors.map(Self::inner), copy);
        (new.map(Self::from_inner), copy.map(Self::from_inner))
    }

    fn square_sum(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::square_sum(Self::inner(x)))
    }

    fn square_sums(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        Self::from_inner(B::square_sums(tensors.into_iter().map(Self::inner).collect()))
    }
}

/// Runs the reference of `op`, which computes in f32 where inputs are bf16; the result is of the
/// first input's type.
pub fn run_reference<B: OpBackend, O: Op<N>, const N: usize>(
    op: &O,
    inputs: [FloatTensor<B>; N],
    ints: &[IntTensor<B>],
) -> FloatTensor<B> {
    #[cfg(test)]
    crate::testing::served::by_reference::<O>();
    let dtype = inputs[0].dtype();
    if inputs.iter().all(|x| x.dtype() != DType::BF16) {
        return op.reference::<B>(inputs, ints);
    }
    let result = op.reference::<B>(inputs.map(B::widen), ints);
    if dtype == DType::BF16 { B::float_cast(result, dtype.into()) } else { result }
}

thread_local! {
    static REFERENCE: Cell<bool> = const { Cell::new(false) };
}

fn reference_forced<O: Op<N>, const N: usize>() -> bool {
    references_only() && !O::IN_REFERENCES
}

/// Whether this runs inside [`with_reference`].
pub fn references_only() -> bool {
    REFERENCE.get()
}

/// Runs `f` with every operation of this thread taking its reference, on any device: the slow and
/// obvious path that kernels are compared with.
pub fn with_reference<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            REFERENCE.set(self.0);
        }
    }
    let _restore = Restore(REFERENCE.replace(true));
    f()
}

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
