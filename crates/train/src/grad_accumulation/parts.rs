//! A micro-batch in parts: the embedding, each block, and the layers after the blocks have graphs of their own, whose
//! backward passes run one after another. So blocks can be recomputed (activation checkpointing), and a block's
//! gradients are final while those of the blocks before it are still to be computed.

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use longwall_kernels::attention::DocumentStarts;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::cross_entropy::Loss;
use longwall_kernels::ops::vjp_root::vjp_root;
use longwall_model::LanguageModel;
use longwall_model::layers::Block;

use super::{MicroBatch, OnFinal};
use crate::gradients::{Gradients, Graph, places};

/// When blocks' graphs are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockGraphs {
    /// In the forward pass: they keep their activations.
    Kept,
    /// In the backward pass, from the blocks' inputs.
    Recomputed,
}

/// Runs one micro-batch: returns its loss and adds its gradients to `gradients`, and calls `on_final` after each block,
/// from the last to the first. Rows of streams go on from `carried`, which becomes what they hand over.
///
/// The gradient of a part's output comes from the part after it. Losses and gradients equal those of one graph, bit
/// for bit if kernels are deterministic.
pub(super) fn block_by_block<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    rows: MicroBatch<Autodiff<B>>,
    carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
    weights: Tensor<Autodiff<B>, 2>,
    z_loss: f32,
    gradients: &mut Gradients<B>,
    graphs: BlockGraphs,
    mut on_final: Option<OnFinal<B>>,
) -> Loss<Autodiff<B>> {
    let MicroBatch { inputs: tokens, targets, document_starts: documents } = rows;
    let past = carried.as_deref().map(<[_]>::to_vec);
    let Forward { mut blocks, output, first_values } =
        forward_pass(model, &tokens, &documents, carried, graphs);

    // The layers after the blocks.
    let x = Tensor::from_inner(output).require_grad();
    let loss = model.loss_after_blocks(x.clone(), targets, weights, z_loss);
    let mut ends = Gradients::none(model);
    let mut graph = ends.add_backward(model, loss.total.clone());
    let mut dy = leaf_grad(&x, &mut graph);

    // The blocks, from the last to the first.
    let mut d_first_values = Vec::new();
    for (at, block) in model.blocks.iter().enumerate().rev() {
        let part = blocks.pop().expect("as many parts as blocks");
        let BlockGraph { x, y, values_leaf, values } = match part {
            BlockPart::Graph(graph) => graph,
            BlockPart::Input(x) => {
                let mut past = past.as_ref().map(|past| past[at].clone());
                let values = first_values.as_ref().filter(|_| at > 0);
                BlockGraph::new(block, x, &documents, past.as_mut(), values)
            }
        };
        let mut root = vjp(y, dy);
        if let (0, Some(values)) = (at, values) {
            let learned = model.blocks.iter().any(|block| block.attention.value_mix.is_some());
            root = with_first_values(root, values, std::mem::take(&mut d_first_values), learned);
        }
        let mut graph = gradients.add_backward(model, root);
        dy = leaf_grad(&x, &mut graph);
        let d_values = values_leaf.and_then(|values| values.grad_remove(&mut graph));
        d_first_values.extend(d_values);
        if let Some(on_final) = &mut on_final {
            on_final(gradients, &places(model, block));
        }
    }

    // The embedding, which may share its weight with the output layer.
    ends.add_backward(model, vjp(model.embedded(tokens, documents), dy));
    gradients.add(ends);
    loss
}

/// What the forward pass keeps.
struct Forward<B: OpBackend> {
    /// Of each block.
    blocks: Vec<BlockPart<B>>,
    /// The last block's output.
    output: Tensor<B, 3>,
    /// The first block's values, for the value residual.
    first_values: Option<Tensor<B, 3>>,
}

/// What is kept of a block.
enum BlockPart<B: OpBackend> {
    Graph(BlockGraph<B>),
    Input(Tensor<B, 3>),
}

/// The graph of a block.
struct BlockGraph<B: OpBackend> {
    /// Its input, a leaf.
    x: Tensor<Autodiff<B>, 3>,
    /// Its output.
    y: Tensor<Autodiff<B>, 3>,
    /// The first block's values as a leaf; none in the first block, which computes them.
    values_leaf: Option<Tensor<Autodiff<B>, 3>>,
    /// These values, in the first block those of its graph.
    values: Option<Tensor<Autodiff<B>, 3>>,
}

impl<B: OpBackend> BlockGraph<B> {
    /// That of `block` with the input `x`, which reads `first_values`, if it is not the first one.
    fn new(
        block: &Block<Autodiff<B>>,
        x: Tensor<B, 3>,
        documents: &DocumentStarts<Autodiff<B>>,
        past: Option<&mut Tensor<Autodiff<B>, 2>>,
        first_values: Option<&Tensor<B, 3>>,
    ) -> Self {
        let x = Tensor::from_inner(x).require_grad();
        let values_leaf = first_values.map(|x| Tensor::from_inner(x.clone()).require_grad());
        let mut values = values_leaf.clone();
        let y = forward(block, x.clone(), documents, past, &mut values);
        BlockGraph { x, y, values_leaf, values }
    }
}

/// The forward pass up to the last block's output; `carried` as in [`block_by_block`].
fn forward_pass<B: OpBackend>(
    model: &LanguageModel<Autodiff<B>>,
    tokens: &Tensor<Autodiff<B>, 2, burn::tensor::Int>,
    documents: &DocumentStarts<Autodiff<B>>,
    mut carried: Option<&mut [Tensor<Autodiff<B>, 2>]>,
    graphs: BlockGraphs,
) -> Forward<B> {
    let without_graph = model.valid();
    let inner = documents.clone().map(Tensor::inner);
    let mut x = without_graph.embedded(tokens.clone().inner(), inner.clone());
    let (mut blocks, mut first_values) = (Vec::new(), None);
    for (at, block) in model.blocks.iter().enumerate() {
        let past = carried.as_deref().map(|carried| carried[at].clone());
        let after = match graphs {
            BlockGraphs::Kept => {
                let (mut past, values) = (past, first_values.as_ref());
                let graph = BlockGraph::new(block, x, documents, past.as_mut(), values);
                x = graph.y.clone().inner();
                if at == 0 {
                    first_values = graph.values.clone().map(Tensor::inner);
                }
                blocks.push(BlockPart::Graph(graph));
                past.map(Tensor::inner)
            }
            BlockGraphs::Recomputed => {
                blocks.push(BlockPart::Input(x.clone()));
                let (block, mut past) = (&without_graph.blocks[at], past.map(Tensor::inner));
                x = forward(block, x, &inner, past.as_mut(), &mut first_values);
                past
            }
        };
        if let (Some(carried), Some(after)) = (carried.as_deref_mut(), after) {
            carried[at] = Tensor::from_inner(after);
        }
    }
    Forward { blocks, output: x, first_values }
}

/// A block's output; if there is a past, that of rows that go on from it.
fn forward<B: OpBackend>(
    block: &Block<B>,
    x: Tensor<B, 3>,
    documents: &DocumentStarts<B>,
    past: Option<&mut Tensor<B, 2>>,
    first_values: &mut Option<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    match past {
        Some(past) => block.forward_from(x, documents.clone(), past, first_values),
        None => block.forward(x, documents.clone(), first_values),
    }
}

/// The gradient of the leaf `x`.
fn leaf_grad<B: OpBackend>(x: &Tensor<Autodiff<B>, 3>, graph: &mut Graph<B>) -> Tensor<B, 3> {
    x.grad_remove(graph).expect("every part depends on its input")
}

/// A scalar whose gradient with respect to `y` is exactly `dy`.
fn vjp<B: OpBackend>(y: Tensor<Autodiff<B>, 3>, dy: Tensor<B, 3>) -> Tensor<Autodiff<B>, 1> {
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
    use burn::tensor::TensorMetadata;
    use burn::tensor::ops::FloatTensorOps;
    use longwall_config::Problems;
    use longwall_kernels::attention::AttentionConfig;
    use longwall_kernels::backend::tensor;
    use longwall_model::ModelConfig;

    use crate::grad_accumulation::tests::{PLAN, batch};
    use crate::grad_accumulation::{AccumulationPlan, OnFinal, forward_backward, weight_sum};
    use crate::gradients::Gradients;
    use crate::signals::StopFlag;
    use crate::testing::{TestBackend, TestModel, model_of};

    /// Block configurations that together use every option; `[attention]` is added later.
    const BLOCKS: [&str; 6] = [
        "arch = \"gpt2\"\nbias = true\npositions = \"learned\"\nembedding_norm = true",
        "arch = \"llama\"\nqk_norm = true\noutput_gate = true\nshort_conv = true\nkv_heads = 2",
        "arch = \"llama\"\nnorm_position = \"sandwich\"\nvalue_residual = \"learned\"",
        "arch = \"llama\"\nnorm_position = \"post\"\ntoken_shift = true\ntie_embeddings = true",
        "arch = \"rwkv7\"\nlogit_softcap = 5.0",
        "arch = \"rwkv7\"\nshort_conv = true\noutput_gate = true\nvalue_residual = \"learned\"",
    ];

    /// Models whose layers differ in kind, with and without a value residual.
    fn hybrids() -> impl Iterator<Item = ModelConfig> {
        let residuals = ["none", "learned", "gated"];
        let patterns = [["rwkv7", "rope", "wall", "fox"], ["rope", "power", "rope", "rwkv7"]];
        let tables = patterns.into_iter().flat_map(move |pattern| {
            residuals.map(|residual| {
                format!(
                    "layers = 4\nwidth = 32\nheads = 4\nvalue_residual = {residual:?}\n\
                     pattern = {pattern:?}"
                )
            })
        });
        tables.map(|table| {
            let config: ModelConfig = toml::from_str(&table).unwrap();
            let mut problems = Problems::new();
            config.validate(&mut problems);
            assert!(problems.as_slice().is_empty(), "{table}: {:?}", problems.as_slice());
            config
        })
    }

    /// Every attention kind that the blocks allow; the last blocks have a window if the kind allows one.
    fn configs() -> Vec<ModelConfig> {
        let mut configs = Vec::new();
        for (at, blocks) in BLOCKS.iter().enumerate() {
            for attention in AttentionConfig::defaults() {
                // Four layers: the values of the first reach three others.
                let table = format!("{blocks}\nlayers = 4\nwidth = 32\nheads = 4");
                let mut table: toml::Table = table.parse().unwrap();
                let attention = toml::Value::try_from(&attention).unwrap();
                table.insert("attention".to_owned(), attention);
                if at == 5 {
                    table.insert("window".to_owned(), 5.into());
                }
                let config: ModelConfig = table.try_into().unwrap();
                let mut problems = Problems::new();
                config.validate(&mut problems);
                if problems.as_slice().is_empty() {
                    configs.push(config);
                }
            }
        }
        configs
    }

    /// The bits of the loss's terms and of every gradient, in order; those that are `on_final` early, too.
    fn pass(model: &TestModel, recompute: bool, early: bool) -> (Vec<u32>, Vec<Option<Vec<u32>>>) {
        let batch = batch();
        let plan = AccumulationPlan { recompute, z_loss: 0.1, ..PLAN };
        let device = Default::default();
        let (weights, never) = (weight_sum(&batch), StopFlag::new());
        let mut taken = vec![];
        let mut take = |gradients: &mut Gradients<TestBackend>, places: &[usize]| {
            assert!(!places.is_empty(), "a block without parameters");
            taken.extend(places.iter().map(|at| (*at, gradients.tensors[*at].take())));
        };
        let on_final: Option<OnFinal<TestBackend>> = if early { Some(&mut take) } else { None };
        let mut pass =
            forward_backward(model, &batch, None, weights, plan, &never, &device, on_final)
                .unwrap();
        for (at, gradient) in taken {
            assert!(pass.gradients.tensors[at].is_none(), "gradient {at} was not final");
            pass.gradients.tensors[at] = gradient;
        }
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
        let configs = configs();
        assert!(configs.len() > 60, "{} configurations are left", configs.len());
        for config in configs.into_iter().chain(hybrids()) {
            let model = model_of(&config);
            let (loss, whole) = pass(&model, false, false);
            assert!(whole.iter().flatten().flatten().any(|bits| *bits != 0), "{config:?}");
            for (recompute, early) in [(true, false), (false, true)] {
                let (of_parts, parts) = pass(&model, recompute, early);
                assert_eq!(loss, of_parts, "loss of {config:?}");
                assert_eq!(whole.len(), parts.len());
                for (at, (whole, parts)) in whole.iter().zip(&parts).enumerate() {
                    assert!(whole == parts, "gradient {at} of {config:?}, early: {early}");
                }
            }
        }
    }
}
