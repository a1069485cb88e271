//! Activation checkpointing: keeps only each block's input, and recomputes the block in the backward
//! pass.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::cross_entropy::Loss;
use longwall_kernels::ops::vjp_root::vjp_root;
use longwall_model::LanguageModel;
use longwall_model::layers::{Block, Span};

use super::Tokens;
use crate::gradients::{Gradients, Graph};

/// Runs one micro-batch: returns its loss and adds its gradients to `gradients`. Rows of streams go on from `carried`,
/// which becomes what they hand over.
///
/// The embedding, each block, and the layers after the blocks each have their own graph; the gradient
/// of a part's output comes from the part after it. Losses and gradients equal those of one graph, bit
/// for bit if kernels are deterministic.
pub(super) fn block_by_block<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    tokens: Tokens<Autodiff<B>>,
    carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
    z_loss: f32,
    gradients: &mut Gradients<B>,
) -> Loss<Autodiff<B>> {
    let Tokens { inputs: tokens, targets, weights, span } = tokens;
    let past = carried.as_deref().map(<[_]>::to_vec);
    let BlockInputs { mut blocks, output, first_values } =
        block_inputs(model, &tokens, &span, carried);

    // The layers after the blocks.
    let x = Tensor::from_inner(output).require_grad();
    let loss = model.loss_after_blocks(x.clone(), targets, weights, z_loss);
    let mut ends = Gradients::none(model);
    let mut graph = ends.add_backward(model, loss.total.clone());
    let mut dy = leaf_grad(&x, &mut graph);

    // The blocks, from the last to the first.
    let mut d_first_values = Vec::new();
    for (at, block) in model.blocks.iter().enumerate().rev() {
        let x = blocks.pop().expect("as many inputs as blocks");
        let x = Tensor::from_inner(x).require_grad();
        // The first block computes the first values, the others read them.
        let values_leaf = (at > 0).then(|| first_values.clone()).flatten();
        let values_leaf = values_leaf.map(|values| Tensor::from_inner(values).require_grad());
        let mut values = values_leaf.clone();
        let mut past = past.as_ref().map(|past| past[at].clone());
        let y = forward(block, x.clone(), &span, past.as_mut(), &mut values);
        let mut root = vjp(y, dy);
        if let (0, Some(values)) = (at, values) {
            let learned = model.blocks.iter().any(|block| block.attention.value_mix.is_some());
            root = with_first_values(root, values, std::mem::take(&mut d_first_values), learned);
        }
        let mut graph = gradients.add_backward(model, root);
        dy = leaf_grad(&x, &mut graph);
        let d_values = values_leaf.and_then(|values| values.grad_remove(&mut graph));
        d_first_values.extend(d_values);
    }

    // The embedding, which may share its weight with the output layer.
    ends.add_backward(model, vjp(model.embedded(tokens, &span), dy));
    gradients.add(ends);
    loss
}

/// The activations that the forward pass keeps.
struct BlockInputs<B: OpBackend> {
    /// Each block's input.
    blocks: Vec<Tensor<B, 3>>,
    /// The last block's output.
    output: Tensor<B, 3>,
    /// The first block's values, for the value residual.
    first_values: Option<Tensor<B, 3>>,
}

/// The forward pass without a graph, up to the last block's output; `carried` as in [`block_by_block`].
fn block_inputs<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    tokens: &Tensor<Autodiff<B>, 2, burn::tensor::Int>,
    span: &Span<Autodiff<B>>,
    mut carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
) -> BlockInputs<B> {
    let model = model.valid();
    let span = span.inner();
    let mut x = model.embedded(tokens.clone().inner(), &span);
    let (mut blocks, mut first_values) = (Vec::new(), None);
    for (at, block) in model.blocks.iter().enumerate() {
        blocks.push(x.clone());
        let mut past = carried.as_deref().map(|carried| carried[at].clone().inner());
        x = forward(block, x, &span, past.as_mut(), &mut first_values);
        if let (Some(carried), Some(past)) = (carried.as_deref_mut(), past) {
            carried[at] = Tensor::from_inner(past);
        }
    }
    BlockInputs { blocks, output: x, first_values }
}

/// A block's output; if there is a past, that of rows that go on from it.
fn forward<B: OpBackend>(
    block: &Block<B>,
    x: Tensor<B, 3>,
    span: &Span<B>,
    past: Option<&mut Tensor<B, 2>>,
    first_values: &mut Option<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    match past {
        Some(past) => block.forward_from(x, span.documents().clone(), past, first_values),
        None => block.forward(x, span, first_values),
    }
}

/// The gradient of the leaf `x`.
fn leaf_grad<B: OpBackend>(x: &Tensor<Autodiff<B>, 3>, graph: &mut Graph<B>) -> Tensor<B, 3> {
    x.grad_remove(graph).expect("every part depends on its input")
}

/// A scalar whose gradient with respect to `y` is exactly `dy`.
fn vjp<B: OpBackend>(y: Tensor<Autodiff<B>, 3>, dy: Tensor<B, 3>) -> Tensor<Autodiff<B>, 1> {
    assert_eq!(y.dtype(), dy.dtype(), "an output and its gradient are of one type");
    vjp_root(y, Tensor::from_inner(dy))
}

/// `root`, plus the gradients `later` of the first block's `values` from the later blocks, the last
/// block's first.
///
/// A single graph sums these gradients and the first block's own in an order that depends on its
/// structure, and rounding depends on the order. burn visits nodes in order of their depth, and nodes
/// of equal depth as a depth-first search finds them, second operand first. The gated value residual
/// reads `values` in nodes deeper than the first block's own: the last block's gradient comes first,
/// the first block's last. The learned one reads them in nodes of the same depth, which reverses the
/// order.
fn with_first_values<B: OpBackend>(
    root: Tensor<Autodiff<B>, 1>,
    values: Tensor<Autodiff<B>, 3>,
    later: Vec<Tensor<B, 3>>,
    learned: bool,
) -> Tensor<Autodiff<B>, 1> {
    let later = match learned {
        true => later,
        false => later.into_iter().reduce(|sum, d_values| sum + d_values).into_iter().collect(),
    };
    // The search begins at the root, as in a single graph.
    later.into_iter().rev().fold(root, |root, d_values| vjp(values.clone(), d_values) + root)
}

#[cfg(test)]
mod tests {
    use crate::grad_accumulation::tests::{PLAN, batch};
    use crate::grad_accumulation::{AccumulationPlan, forward_backward, weight_sum};
    use crate::signals::StopFlag;
    use crate::testing::{TestBackend, TestModel, model_of, models_of_all_layers};
    use burn::tensor::TensorMetadata;
    use burn::tensor::ops::FloatTensorOps;
    use longwall_kernels::backend::tensor;

    /// The bits of the loss's terms and of every gradient, in order.
    fn pass(model: &TestModel, recompute: bool) -> (Vec<u32>, Vec<Option<Vec<u32>>>) {
        let batch = batch();
        let plan = AccumulationPlan { recompute, z_loss: 0.1, ..PLAN };
        let device = Default::default();
        let (weights, never) = (weight_sum(&batch), StopFlag::new());
        let pass = forward_backward::<TestBackend>(
            model, &batch, None, None, weights, plan, &never, &device,
        )
        .unwrap();
        let bits = |x: &burn::tensor::ops::FloatTensor<TestBackend>| {
            let flat = TestBackend::float_reshape(x.clone(), [x.shape().num_elements()].into());
            let data = tensor::<TestBackend, 1>(flat).into_data();
            data.iter::<f32>().map(f32::to_bits).collect()
        };
        let terms = pass.terms.clone().into_data().iter::<f32>().map(f32::to_bits).collect();
        (terms, pass.gradients.tensors.iter().map(|g| g.as_ref().map(bits)).collect())
    }

    #[test]
    fn losses_and_gradients_equal_those_of_one_graph_to_the_bit() {
        for config in models_of_all_layers() {
            let model = model_of(&config);
            let ((loss, whole), (recomputed, parts)) = (pass(&model, false), pass(&model, true));
            assert_eq!(loss, recomputed, "loss of {config:?}");
            assert!(whole.iter().flatten().flatten().any(|bits| *bits != 0), "{config:?}");
            assert_eq!(whole.len(), parts.len());
            for (at, (whole, parts)) in whole.iter().zip(&parts).enumerate() {
                assert!(whole == parts, "gradient {at} of {config:?}");
            }
        }
    }
}
