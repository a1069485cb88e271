//! Differentiation: the nodes of operations in burn's graph.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, TensorMetadata};

use super::grad_accumulation::take_grad_accum;
use super::{Forward, Op, OpBackend, StateOp};
use crate::device::{Allocation, DeviceKind};

/// The node of an operation that ran a kernel.
#[derive(Debug)]
struct Node<O, const N: usize>(PhantomData<O>);

/// What a [`Node`] saves for its backward pass.
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
        let parents = ops.parents.map(|parent| parent.map(|parent| parent.id));
        let taken = parents.map(|parent| take_grad_accum::<B>(grads, parent?, &grad));
        let places = taken.each_ref().map(|taken| taken.as_ref().map(|(place, _)| *place));
        let mut grad_accum = taken.map(|taken| taken.map(|(_, sum)| sum));
        let inputs = B::backward(&op, tensors, &ints, grad, needs, &mut grad_accum);
        for ((parent, gradient), (place, left)) in
            parents.into_iter().zip(inputs).zip(places.into_iter().zip(grad_accum))
        {
            if let (Some(place), Some(left)) = (place, left) {
                grads.register::<B>(place, left);
            }
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent, gradient);
            }
        }
    }
}

/// The node of [`OpBackend::to_f32`].
#[derive(Debug)]
struct ToF32;

impl<B: OpBackend> Backward<B, 1> for ToF32 {
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

/// The tensors without their nodes, and which of them require a gradient.
fn without_nodes<B: OpBackend, C: CheckpointStrategy, const N: usize>(
    inputs: &[FloatTensor<Autodiff<B, C>>; N],
) -> ([FloatTensor<B>; N], [bool; N]) {
    let primitives = std::array::from_fn(|i| inputs[i].primitive.clone());
    (primitives, std::array::from_fn(|i| !inputs[i].node.requirement.is_none()))
}

/// The output of an operation whose kernel ran, as a [`Node`] of the graph.
fn recorded<B: OpBackend, C: CheckpointStrategy, O: Op<N>, const N: usize>(
    op: &O,
    inputs: &[FloatTensor<Autodiff<B, C>>; N],
    ints: &[IntTensor<B>],
    needs: [bool; N],
    forward: Forward<FloatTensor<B>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[cfg(test)]
    crate::testing::served::by_kernel::<O>();
    let nodes = inputs.each_ref().map(|input| input.node.clone());
    match Node::<O, N>(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(
            Saved { op: op.clone(), tensors: forward.saved, ints: ints.to_vec(), needs },
            forward.output,
        ),
        OpsKind::UnTracked(prep) => prep.finish(forward.output),
    }
}

impl<B: OpBackend, C: CheckpointStrategy> OpBackend for Autodiff<B, C> {
    fn device_kind() -> DeviceKind {
        B::device_kind()
    }

    fn available_memory(device: &Self::Device) -> Option<u64> {
        B::available_memory(device)
    }

    fn set_allocation(device: &Self::Device, allocation: Allocation) {
        B::set_allocation(device, allocation);
    }

    fn run_kernel<O: Op<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        let (primitives, needs) = without_nodes::<B, C, N>(inputs);
        let forward = B::forward(op, &primitives, ints, needs)?;
        Some(recorded::<B, C, O, N>(op, inputs, ints, needs, forward))
    }

    fn run_kernel_from<O: StateOp<N>, const N: usize>(
        op: &O,
        inputs: &[FloatTensor<Self>; N],
        ints: &[IntTensor<Self>],
        before: &FloatTensor<Self>,
    ) -> Option<[FloatTensor<Self>; 2]> {
        let (primitives, needs) = without_nodes::<B, C, N>(inputs);
        let (forward, after) = B::forward_from(op, &primitives, ints, &before.primitive, needs)?;
        let output = recorded::<B, C, O, N>(op, inputs, ints, needs, forward);
        Some([output, <Self as AutodiffBackend>::from_inner(after)])
    }

    fn to_f32(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let is_parameter = x.node.parents.is_empty();
        match ToF32.prepare::<C>([x.node.clone()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let back = if is_parameter { DType::F32 } else { x.dtype() };
                prep.finish(back, B::to_f32(x.primitive))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::to_f32(x.primitive)),
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

    fn forward_from<O: StateOp<N>, const N: usize>(
        _op: &O,
        _inputs: &[FloatTensor<Self>; N],
        _ints: &[IntTensor<Self>],
        _before: &FloatTensor<Self>,
        _needs: [bool; N],
    ) -> Option<(Forward<FloatTensor<Self>>, FloatTensor<Self>)> {
        None // Likewise, through `run_from`.
    }

    fn backward<O: Op<N>, const N: usize>(
        op: &O,
        _saved: Vec<FloatTensor<Self>>,
        _ints: &[IntTensor<Self>],
        _grad: FloatTensor<Self>,
        _needs: [bool; N],
        _grad_accum: &mut [Option<FloatTensor<Self>>; N],
    ) -> [Option<FloatTensor<Self>>; N] {
        unreachable!("{op:?} was differentiated twice")
    }
}
