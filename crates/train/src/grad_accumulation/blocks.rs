//! The forward and backward pass of one micro-batch, block by block.
//!
//! The embedding, each block, and the layers after the blocks each have their own graph; the gradient of a part's
//! output comes from the part after it. So the gradients of a block are complete before the backward pass of the block
//! before it begins. With activation checkpointing, the forward pass keeps only each block's input, and the backward
//! pass recomputes the block.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::cross_entropy::Loss;
use longwall_kernels::ops::vjp_root::vjp_root;
use longwall_model::LanguageModel;
use longwall_model::layers::{Block, Span};

use super::{AccumulationPlan, FinishedGradients, Tokens};
use crate::gradients::{Gradients, Graph, parameter_count, parameters_within};

/// Runs one micro-batch: returns its loss and adds its gradients to `gradients`. Rows of streams go on from `carried`,
/// which becomes what they hand over. `finished`, if it is given, is called after each block's backward pass.
///
/// Losses and gradients do not depend on whether blocks are recomputed, bit for bit if kernels are deterministic.
pub(super) fn block_by_block<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    tokens: Tokens<Autodiff<B>>,
    carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
    plan: AccumulationPlan,
    gradients: &mut Gradients<B>,
    mut finished: Option<FinishedGradients<'_, B>>,
) -> Loss<Autodiff<B>> {
    let Tokens { inputs, targets, weights, span } = tokens;
    let past = carried.as_deref().map(<[_]>::to_vec);
    let embedded = model.embedded(inputs, &span);
    let ForwardPass { mut blocks, output, first_values } =
        forward_pass(model, embedded.clone().inner(), &span, carried, plan.recompute);

    // The layers after the blocks.
    let (loss, mut dy) = {
        let x = leaf(output);
        let loss = model.loss_after_blocks(x.clone(), targets, weights, plan.z_loss);
        let mut graph = gradients.add_backward(model, loss.total.clone());
        (loss, leaf_grad(&x, &mut graph))
    };

    // The blocks, from the last to the first.
    let mut d_first_values = Vec::new();
    let mut end = parameters_within(model, &model.blocks).end;
    for (at, block) in model.blocks.iter().enumerate().rev() {
        let graph = match blocks.pop().expect("as many as blocks") {
            Kept::Graph(graph) => graph,
            Kept::Input(x) => {
                let mut past = past.as_ref().map(|past| past[at].clone());
                // The first block computes the first values, the others read them.
                let values = first_values.as_ref().filter(|_| at > 0);
                BlockGraph::new(block, x, &span, past.as_mut(), values)
            }
        };
        let BlockGraph { x, y, values_before, values } = graph;
        let mut root = vjp(y, dy);
        if let (0, Some(values)) = (at, values) {
            let learned = model.blocks.iter().any(|block| block.attention.value_mix.is_some());
            root = with_first_values(root, values, std::mem::take(&mut d_first_values), learned);
        }
        let own = end - parameter_count(block)..end;
        end = own.start;
        let mut graph = gradients.add_backward_of(own.clone(), block, root);
        dy = leaf_grad(&x, &mut graph);
        let d_values = values_before.and_then(|values| values.grad_remove(&mut graph));
        d_first_values.extend(d_values);
        if let Some(finished) = &mut finished {
            finished(gradients, own);
        }
    }

    // The embedding, which may share its weight with the output layer.
    gradients.add_backward(model, vjp(embedded, dy));
    loss
}

/// What the forward pass keeps.
struct ForwardPass<B: OpBackend> {
    /// Of each block.
    blocks: Vec<Kept<B>>,
    /// The last block's output.
    output: Tensor<B, 3>,
    /// The first block's values, for the value residual.
    first_values: Option<Tensor<B, 3>>,
}

/// What the forward pass keeps of a block.
enum Kept<B: OpBackend> {
    /// Its input, from which the backward pass recomputes it.
    Input(Tensor<B, 3>),
    /// All that the backward pass reads.
    Graph(BlockGraph<B>),
}

/// A block's own graph.
struct BlockGraph<B: OpBackend> {
    /// Its input, a leaf.
    x: Tensor<Autodiff<B>, 3>,
    /// Its output.
    y: Tensor<Autodiff<B>, 3>,
    /// The first block's values as this block reads them, a leaf.
    values_before: Option<Tensor<Autodiff<B>, 3>>,
    /// Those that the next block reads.
    values: Option<Tensor<Autodiff<B>, 3>>,
}

impl<B: OpBackend> BlockGraph<B> {
    /// Runs `block`; if there is a past, rows go on from it.
    fn new(
        block: &Block<Autodiff<B>>,
        x: Tensor<B, 3>,
        span: &Span<Autodiff<B>>,
        past: Option<&mut Tensor<Autodiff<B>, 2>>,
        first_values: Option<&Tensor<B, 3>>,
    ) -> Self {
        let x = leaf(x);
        let values_before = first_values.cloned().map(leaf);
        let mut values = values_before.clone();
        let y = forward(block, x.clone(), span, past, &mut values);
        BlockGraph { x, y, values_before, values }
    }
}

/// The forward pass of the blocks, from the first one's input `x`; `carried` as in [`block_by_block`].
fn forward_pass<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    mut x: Tensor<B, 3>,
    span: &Span<Autodiff<B>>,
    mut carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
    recompute: bool,
) -> ForwardPass<B> {
    let plain_span = span.inner();
    let (mut blocks, mut first_values) = (Vec::new(), None);
    for (at, block) in model.blocks.iter().enumerate() {
        let past = carried.as_deref().map(|carried| carried[at].clone());
        let (kept, past) = if recompute {
            let (kept, mut past) = (Kept::Input(x.clone()), past.map(Tensor::inner));
            x = forward(&block.valid(), x, &plain_span, past.as_mut(), &mut first_values);
            (kept, past)
        } else {
            let mut past = past;
            let graph = BlockGraph::new(block, x, span, past.as_mut(), first_values.as_ref());
            x = graph.y.clone().inner();
            first_values = graph.values.clone().map(Tensor::inner);
            (Kept::Graph(graph), past.map(Tensor::inner))
        };
        blocks.push(kept);
        if let (Some(carried), Some(past)) = (carried.as_deref_mut(), past) {
            carried[at] = Tensor::from_inner(past);
        }
    }
    ForwardPass { blocks, output: x, first_values }
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

/// A leaf of a graph with the value `x`.
fn leaf<B: OpBackend>(x: Tensor<B, 3>) -> Tensor<Autodiff<B>, 3> {
    Tensor::from_inner(x).require_grad()
}

/// The gradient of the leaf `x`.
fn leaf_grad<B: OpBackend>(x: &Tensor<Autodiff<B>, 3>, graph: &mut Graph<B>) -> Tensor<B, 3> {
    x.grad_remove(graph).expect("every part depends on its input")
}

/// A scalar whose gradient with respect to `y` is `dy`, in y's type.
fn vjp<B: OpBackend>(y: Tensor<Autodiff<B>, 3>, dy: Tensor<B, 3>) -> Tensor<Autodiff<B>, 1> {
    // Without a kernel, the gradient of a bf16 tensor may be in f32.
    let dy = dy.cast(y.dtype());
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
/// order. With the same order here, a test can compare bits.
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
    use std::ops::Range;

    use burn::tensor::TensorMetadata;
    use burn::tensor::ops::{FloatTensor, FloatTensorOps};
    use longwall_kernels::backend::tensor;

    use super::*;
    use crate::grad_accumulation::tests::{PLAN, batch};
    use crate::grad_accumulation::{MicroBatch, forward_backward, weight_sum, weights};
    use crate::signals::StopFlag;
    use crate::testing::{TestBackend, TestModel, model_of, model_with, models_of_all_layers};

    /// The bits of every gradient, in order.
    type Bits = Vec<Option<Vec<u32>>>;

    fn bits(gradients: &Gradients<TestBackend>) -> Bits {
        let of = |x: &FloatTensor<TestBackend>| {
            let flat = TestBackend::float_reshape(x.clone(), [x.shape().num_elements()].into());
            let data = tensor::<TestBackend, 1>(flat).into_data();
            data.iter::<f32>().map(f32::to_bits).collect()
        };
        gradients.tensors.iter().map(|x| x.as_ref().map(of)).collect()
    }

    const OWN_PLAN: AccumulationPlan = AccumulationPlan { z_loss: 0.1, ..PLAN };

    /// The bits of the loss's terms and of the gradients of four rows.
    fn pass(
        model: &TestModel,
        plan: AccumulationPlan,
        finished: Option<FinishedGradients<'_, TestBackend>>,
    ) -> (Vec<u32>, Bits) {
        let (batch, device) = (batch(), Default::default());
        let (weights, never) = (weight_sum(&batch), StopFlag::new());
        let pass = forward_backward::<TestBackend>(
            model, &batch, None, None, weights, plan, &never, finished, &device,
        )
        .unwrap();
        let terms = pass.terms.clone().into_data().iter::<f32>().map(f32::to_bits).collect();
        (terms, bits(&pass.gradients))
    }

    #[test]
    fn losses_and_gradients_do_not_depend_on_recomputation() {
        for config in models_of_all_layers() {
            let model = model_of(&config);
            let recompute = AccumulationPlan { recompute: true, ..OWN_PLAN };
            assert!(pass(&model, OWN_PLAN, None) == pass(&model, recompute, None), "{config:?}");
        }
    }

    #[test]
    fn losses_and_gradients_equal_those_of_one_graph_to_the_bit() {
        for config in models_of_all_layers() {
            let model = model_of(&config);
            let (rows, device) = (batch(), Default::default());
            let of_loss = weights::<Autodiff<TestBackend>>(&rows, 0..4, weight_sum(&rows), &device);
            let MicroBatch { inputs, targets, document_starts } =
                MicroBatch::new(&rows, 0..4, &device);
            let loss = model.loss(inputs, targets, of_loss, document_starts, OWN_PLAN.z_loss);
            let terms = loss.terms.inner().into_data();
            let terms: Vec<u32> = terms.iter::<f32>().map(f32::to_bits).collect();
            let whole = bits(&Gradients::of(&model, loss.total));
            let plan = AccumulationPlan { micro_batch: 4, ..OWN_PLAN };
            let (parts_terms, parts) = pass(&model, plan, None);
            assert_eq!(terms, parts_terms, "loss of {config:?}");
            assert!(whole.iter().flatten().flatten().any(|bits| *bits != 0), "{config:?}");
            assert_eq!(whole.len(), parts.len());
            for (at, (whole, parts)) in whole.iter().zip(&parts).enumerate() {
                assert!(whole == parts, "gradient {at} of {config:?}");
            }
        }
    }

    /// Each block's gradients come once, the last block's first, as they are at the end of the pass.
    #[test]
    fn gradients_of_a_block_are_finished_before_the_blocks_before_it() {
        for (tied, recompute) in [(false, false), (false, true), (true, false)] {
            let model = model_with(&format!("layers = 3\ntie_embeddings = {tied}"), 0);
            let plan = AccumulationPlan { recompute, ..OWN_PLAN };
            let (_, all) = pass(&model, plan, None);
            let mut got: Bits = all.iter().map(|_| None).collect();
            let mut ranges = vec![];
            let mut take = |gradients: &mut Gradients<TestBackend>, parameters: Range<usize>| {
                for at in parameters.clone() {
                    let tensors = vec![gradients.tensors[at].take()];
                    got[at] = bits(&Gradients { tensors }).swap_remove(0);
                }
                ranges.push(parameters);
            };
            let (_, left) = pass(&model, plan, Some(&mut take));
            let blocks = parameters_within(&model, &model.blocks);
            assert_eq!(ranges.len(), 3);
            assert_eq!(ranges.last().unwrap().start, blocks.start);
            assert_eq!(ranges[0].end, blocks.end);
            assert!(ranges.windows(2).all(|two| two[0].start == two[1].end), "{ranges:?}");
            for at in 0..all.len() {
                let (given, kept) = (got[at].is_some(), left[at].is_some());
                assert_eq!(given, blocks.contains(&at) && all[at].is_some(), "gradient {at}");
                assert_eq!(kept, all[at].is_some() && !given, "gradient {at}");
                assert!(got[at].as_ref().or(left[at].as_ref()) == all[at].as_ref(), "{at}");
            }
        }
    }

    #[test]
    fn measured_gradients_are_not_handed_out() {
        let plan = AccumulationPlan { measure_noise: true, ..OWN_PLAN };
        let mut refuse = |_: &mut Gradients<TestBackend>, _| panic!("a gradient is handed out");
        pass(&model_with("layers = 2", 0), plan, Some(&mut refuse));
    }
}
