//! Accumulation of gradients over several backward passes.
//!
//! The gradient of a batch is the sum over the backward passes of its micro-batches. An operation can add
//! to that sum in the pass itself, as a matrix product that writes into the sum with β = 1 does: there is
//! no second gradient of the parameter's size, and no separate addition. Megatron-LM calls this gradient
//! accumulation fusion, and the sum `main_grad`.
//!
//! The graph owns the sums. [`with_accumulated_grads`] adds a node on top of a pass's root that holds
//! them. This node runs first: it moves each sum into the pass's gradient container, into the slot of its
//! leaf. An operation's node takes a leaf's sum from there and passes it to
//! [`Op::cuda_backward_accumulating`](super::Op::cuda_backward_accumulating). Sums that no operation took
//! remain in their slots for [`take_accumulated_grad`]. A pass that never runs, or is abandoned, drops its
//! sums with its graph.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;

use super::{primitive, tensor};

/// The id of a leaf of the graph, such as a parameter.
pub fn leaf_id<B: Backend>(leaf: &FloatTensor<Autodiff<B>>) -> NodeId {
    leaf.node.id
}

/// `root` with a backward pass that adds to `sums`, the gradients of leaves from earlier passes. If an
/// operation supports it, it adds to a leaf's sum in the pass, and the new sum is the leaf's gradient. Sums
/// that no operation took remain after the pass, see [`take_accumulated_grad`].
///
/// # Panics
/// When `root` depends on no leaf that requires a gradient.
pub fn with_accumulated_grads<B: Backend>(
    root: Tensor<Autodiff<B>, 1>,
    sums: Vec<(NodeId, FloatTensor<B>)>,
) -> Tensor<Autodiff<B>, 1> {
    let root = primitive(root);
    match HandOver.prepare::<NoCheckpointing>([root.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => tensor(prep.finish(sums, root.primitive)),
        OpsKind::UnTracked(_) => panic!("the root depends on no leaf that wants a gradient"),
    }
}

/// Takes the sum of `leaf` that no operation of the pass took.
pub fn take_accumulated_grad<B: Backend>(
    leaf: &FloatTensor<Autodiff<B>>,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    take::<B>(grads, slot(leaf_id::<B>(leaf)), &leaf.primitive)
}

/// Takes the sum that an operation's gradient of `parent` can be added to: that of this pass so far, else
/// that of earlier passes. Returns it with its id in the container.
///
/// `any` is any tensor.
pub(super) fn take_grad_accum<B: Backend>(
    grads: &mut Gradients,
    parent: NodeId,
    any: &FloatTensor<B>,
) -> Option<(NodeId, FloatTensor<B>)> {
    [parent, slot(parent)].into_iter().find_map(|id| Some((id, take::<B>(grads, id, any)?)))
}

/// The node on top of a root. Its state is the sums of the leaves.
#[derive(Debug)]
struct HandOver;

impl<B: Backend> Backward<B, 1> for HandOver {
    type State = Vec<(NodeId, FloatTensor<B>)>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        for (leaf, sum) in ops.state {
            grads.register::<B>(slot(leaf), sum);
        }
        let grad = grads.consume::<B>(&ops.node);
        if let [Some(root)] = &ops.parents {
            grads.register::<B>(root.id, grad);
        }
    }
}

/// The id under which a pass's container holds the sum of `leaf`. Nodes are numbered from 0 up, so no node
/// has this id.
fn slot(leaf: NodeId) -> NodeId {
    NodeId { value: !leaf.value }
}

/// Takes the gradient of `id` from the container, whose interface takes a tensor: one made from `any` and
/// given this id.
fn take<B: Backend>(
    grads: &mut Gradients,
    id: NodeId,
    any: &FloatTensor<B>,
) -> Option<FloatTensor<B>> {
    let mut key = <Autodiff<B> as AutodiffBackend>::from_inner(any.clone());
    Arc::get_mut(&mut key.node).expect("the node of a new tensor has one owner").id = id;
    grads.remove::<B>(&key)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::backend::Flex;
    use burn::tensor::ops::IntTensor;
    use burn_flex::FlexTensor;

    use super::*;
    use crate::backend::{Forward, Op, OpBackend};
    use crate::cpu::{contiguous, from_vec, slice};

    type Ad = Autodiff<Flex>;

    /// 3 x, or a panic in its backward pass.
    #[derive(Clone, Debug)]
    struct Triple {
        fails: bool,
    }

    impl Op<1> for Triple {
        fn reference<B: OpBackend>(
            &self,
            [x]: [FloatTensor<B>; 1],
            _ints: &[IntTensor<B>],
        ) -> FloatTensor<B> {
            B::float_mul_scalar(x, 3.0.into())
        }

        fn cpu_forward(
            &self,
            [x]: &[FlexTensor; 1],
            _ints: &[FlexTensor],
            _needs: [bool; 1],
        ) -> Option<Forward<FlexTensor>> {
            let x = contiguous(x);
            let y = slice(&x).iter().map(|x| 3.0 * x).collect();
            Some(Forward { output: from_vec(y, &[1]), saved: vec![] })
        }

        fn cpu_backward(
            &self,
            _saved: Vec<FlexTensor>,
            _ints: &[FlexTensor],
            grad: FlexTensor,
            _needs: [bool; 1],
        ) -> [Option<FlexTensor>; 1] {
            assert!(!self.fails, "this backward pass is abandoned");
            let dx = slice(&contiguous(&grad)).iter().map(|dy| 3.0 * dy).collect();
            [Some(from_vec(dx, &[1]))]
        }
    }

    fn leaf() -> Tensor<Ad, 1> {
        Tensor::<Ad, 1>::from_floats([2.0], &Default::default()).require_grad()
    }

    fn sum_of(x: &Tensor<Ad, 1>, sum: f32) -> Vec<(NodeId, FloatTensor<Flex>)> {
        let sum = Tensor::<Flex, 1>::from_floats([sum], &Default::default());
        vec![(leaf_id::<Flex>(&primitive(x.clone())), primitive(sum))]
    }

    fn root(x: &Tensor<Ad, 1>, fails: bool) -> Tensor<Ad, 1> {
        tensor(Ad::run(&Triple { fails }, [primitive(x.clone())], vec![]))
    }

    /// The gradient that a pass gave `x`, and what is left of its sum.
    fn parts(x: &Tensor<Ad, 1>, grads: &mut Gradients) -> [Option<f32>; 2] {
        let left = take_accumulated_grad::<Flex>(&primitive(x.clone()), grads);
        let left = left.map(tensor::<Flex, 1>);
        [x.grad_remove(grads), left].map(|grad| Some(grad?.into_scalar()))
    }

    #[test]
    fn what_no_operation_adds_to_is_left_beside_the_gradient_of_the_pass() {
        let x = leaf();
        let mut grads = with_accumulated_grads(root(&x, false), sum_of(&x, 10.0)).backward();
        assert_eq!(parts(&x, &mut grads), [Some(3.0), Some(10.0)]);
        assert_eq!(parts(&x, &mut grads), [None, None]);
    }

    #[test]
    fn a_leaf_with_two_uses_keeps_its_sum_apart() {
        let x = leaf();
        let loss = root(&x, false) + root(&x, false);
        let mut grads = with_accumulated_grads(loss, sum_of(&x, 10.0)).backward();
        assert_eq!(parts(&x, &mut grads), [Some(6.0), Some(10.0)]);
    }

    #[test]
    fn an_abandoned_pass_leaves_nothing_to_the_next() {
        let x = leaf();
        drop(with_accumulated_grads(root(&x, false), sum_of(&x, 10.0)));
        let failing = with_accumulated_grads(root(&x, true), sum_of(&x, 20.0));
        let outcome = catch_unwind(AssertUnwindSafe(|| failing.backward()));
        assert!(outcome.is_err(), "the pass was to be abandoned");
        let mut grads = root(&x, false).backward();
        assert_eq!(parts(&x, &mut grads), [Some(3.0), None]);
        let mut grads = with_accumulated_grads(root(&x, false), sum_of(&x, 30.0)).backward();
        assert_eq!(parts(&x, &mut grads), [Some(3.0), Some(30.0)]);
    }
}
