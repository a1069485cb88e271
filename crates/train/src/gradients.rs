//! Gradients of all parameters: collected after each backward pass, summed, and their norm.

use std::ops::Range;

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor};
use longwall_kernels::backend::{
    OpBackend, leaf_id, primitive, take_accumulated_grad, tensor, with_accumulated_grads,
};
use longwall_kernels::ops::grad_norm::square_sums;

/// One gradient per parameter, in the order in which the module visits its parameters; `None` if the
/// loss does not depend on the parameter.
#[derive(Debug)]
pub struct Gradients<B: OpBackend> {
    pub(crate) tensors: Vec<Option<FloatTensor<B>>>,
}

impl<B: OpBackend> Gradients<B> {
    /// No gradients yet for `model`'s parameters.
    pub fn none<M: Module<Autodiff<B>>>(model: &M) -> Self {
        Gradients { tensors: leaves(model).iter().map(|_| None).collect() }
    }

    /// The gradients of `root` with respect to `model`'s parameters.
    pub fn of<M: Module<Autodiff<B>>>(model: &M, root: Tensor<Autodiff<B>, 1>) -> Self {
        let mut gradients = Gradients::none(model);
        gradients.add_backward(model, root);
        gradients
    }

    /// Runs the backward pass of `root` and accumulates the gradients of `model`'s parameters: within
    /// the pass if an operation can, else afterwards. Returns the gradients of all other leaves.
    ///
    /// # Panics
    /// When these gradients belong to another model.
    pub fn add_backward<M: Module<Autodiff<B>>>(
        &mut self,
        model: &M,
        root: Tensor<Autodiff<B>, 1>,
    ) -> Graph<B> {
        self.add_backward_of(0..self.tensors.len(), model, root)
    }

    /// As [`Gradients::add_backward`], for a part of the model: `parameters` are those of `part`, see
    /// [`parameters_within`], and `root` depends on no others.
    ///
    /// # Panics
    /// As [`Gradients::add_backward`].
    pub(crate) fn add_backward_of<M: Module<Autodiff<B>>>(
        &mut self,
        parameters: Range<usize>,
        part: &M,
        root: Tensor<Autodiff<B>, 1>,
    ) -> Graph<B> {
        let (leaves, own) = (leaves(part), &mut self.tensors[parameters]);
        assert_eq!(own.len(), leaves.len(), "gradients of two different models");
        let sums = leaves.into_iter().zip(own.iter_mut());
        let sums = sums.filter_map(|(leaf, sum)| Some((leaf, sum.take()?))).collect();
        let mut graph = with_accumulated_grads::<B>(root, sums).backward();
        part.visit(&mut Collect { graph: &mut graph, sums: own.iter_mut() });
        graph
    }

    /// The gradients as they are now: later backward passes do not change these copies.
    pub(crate) fn copies(&self) -> Vec<Option<FloatTensor<B>>> {
        // A clone would share its memory with the sum that an operation adds to.
        let copy = |gradient: &FloatTensor<B>| B::float_mul_scalar(gradient.clone(), 1.0.into());
        self.tensors.iter().map(|gradient| gradient.as_ref().map(copy)).collect()
    }

    /// Tensors of shape `[1]` that sum to Σ (g − b)², where b are the gradients `before`.
    pub(crate) fn square_sums_since(
        &self,
        before: Vec<Option<FloatTensor<B>>>,
    ) -> Vec<Tensor<B, 1>> {
        let change = |(now, before): (&Option<FloatTensor<B>>, Option<FloatTensor<B>>)| {
            let now = now.clone()?;
            Some(match before {
                Some(before) => B::float_sub(now, before),
                None => now,
            })
        };
        // One after another: together, the differences would take the gradients' memory once more.
        let changes = self.tensors.iter().zip(before).filter_map(change);
        changes.flat_map(|change| square_sums::<B>(vec![change])).map(tensor).collect()
    }

    /// Tensors of shape `[1]` that sum to Σ g² over all gradients ([`square_sums`]).
    pub fn square_sums(&self) -> Vec<Tensor<B, 1>> {
        let gradients = self.tensors.iter().flatten().cloned().collect();
        square_sums::<B>(gradients).into_iter().map(tensor).collect()
    }
}

fn sum_of<B: OpBackend>(
    sum: Option<FloatTensor<B>>,
    term: Option<FloatTensor<B>>,
) -> Option<FloatTensor<B>> {
    match (sum, term) {
        (Some(sum), Some(term)) => Some(B::float_add(sum, term)),
        (sum, term) => sum.or(term),
    }
}

/// The gradients of one backward pass.
pub type Graph<B> = <Autodiff<B> as AutodiffBackend>::Gradients;

/// The graph nodes of `model`'s parameters.
fn leaves<B: OpBackend, M: Module<Autodiff<B>>>(model: &M) -> Vec<NodeId> {
    let mut leaves = Leaves { ids: Vec::new() };
    model.visit(&mut leaves);
    leaves.ids
}

/// How many parameters `part` has.
pub(crate) fn parameter_count<B: OpBackend, M: Module<Autodiff<B>>>(part: &M) -> usize {
    leaves(part).len()
}

/// Where the parameters of `part` are among those of `model`, which it is a part of.
///
/// # Panics
/// When they are not there.
pub(crate) fn parameters_within<B, M, P>(model: &M, part: &P) -> Range<usize>
where
    B: OpBackend,
    M: Module<Autodiff<B>>,
    P: Module<Autodiff<B>>,
{
    let (all, own) = (leaves(model), leaves(part));
    let first = all.iter().position(|leaf| Some(leaf) == own.first()).unwrap_or(0);
    assert_eq!(all[first..first + own.len()], own, "a part of the model");
    first..first + own.len()
}

struct Leaves {
    ids: Vec<NodeId>,
}

impl<B: OpBackend> ModuleVisitor<Autodiff<B>> for Leaves {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        self.ids.push(leaf_id::<B>(&primitive(param.val())));
    }
}

/// Moves the parameters' gradients out of a graph, and adds the sums that no operation accumulated.
struct Collect<'a, B: OpBackend, I> {
    graph: &'a mut Graph<B>,
    /// Where they go.
    sums: I,
}

impl<'a, B, I> ModuleVisitor<Autodiff<B>> for Collect<'_, B, I>
where
    B: OpBackend,
    I: Iterator<Item = &'a mut Option<FloatTensor<B>>>,
{
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Autodiff<B>, D>>) {
        let sum = self.sums.next().expect("as many gradients as parameters");
        let untouched = take_accumulated_grad::<B>(&primitive(param.val()), self.graph);
        // In f32 for bf16 parameters too: sums over micro-batches and the optimiser's state are f32.
        let gradient = param.grad_remove(self.graph).map(|g| primitive(g.cast(DType::F32)));
        *sum = sum_of::<B>(untouched, gradient);
    }
}

/// The factor that scales a gradient of norm `grad_norm` down to `clip`; 1 if the norm is no larger.
pub fn clip_factor(clip: Option<f64>, grad_norm: f32) -> f32 {
    clip.map_or(1.0, |clip| (clip / (f64::from(grad_norm) + 1e-6)).min(1.0) as f32)
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorMetadata;
    use burn::tensor::ops::FloatTensorOps;

    use super::*;
    use crate::testing::{TestBackend, tiny_batch, tiny_model};

    type Model = longwall_model::LanguageModel<Autodiff<TestBackend>>;

    fn loss(model: &Model, rows: Range<usize>) -> Tensor<Autodiff<TestBackend>, 1> {
        let [tokens, targets] = tiny_batch(rows);
        let weights = Tensor::ones(tokens.dims(), &tokens.device()) / 64.0;
        model.loss(tokens, targets, weights, None, 0.0).total
    }

    fn gradients(model: &Model, rows: Range<usize>) -> Gradients<TestBackend> {
        Gradients::of(model, loss(model, rows))
    }

    fn elements(gradients: Gradients<TestBackend>) -> Vec<f32> {
        let flat = |g: FloatTensor<TestBackend>| {
            let count = g.shape().num_elements();
            let g = TestBackend::float_reshape(g, [count].into());
            tensor::<TestBackend, 1>(g).into_data().to_vec::<f32>().unwrap()
        };
        let present = gradients.tensors.into_iter().map(|g| g.expect("a gradient is missing"));
        present.flat_map(flat).collect()
    }

    #[test]
    fn gradients_of_micro_batches_add_up_to_that_of_the_batch() {
        let model = tiny_model(1);
        let whole = elements(gradients(&model, 0..4));
        let mut sum = Gradients::none(&model);
        for rows in [0..1, 1..4] {
            sum.add_backward(&model, loss(&model, rows));
        }
        let sum = elements(sum);
        assert_eq!(whole.len(), sum.len());
        assert!(whole.iter().any(|g| g.abs() > 1e-3), "all gradients vanish");
        for (whole, sum) in whole.iter().zip(sum) {
            assert!((whole - sum).abs() < 1e-6 + 1e-4 * whole.abs(), "{whole} and {sum}");
        }
    }

    #[test]
    fn the_square_sums_are_those_of_the_elements() {
        let gradients = gradients(&tiny_model(1), 0..4);
        let total: f32 = gradients.square_sums().into_iter().map(|s| s.into_scalar()).sum();
        let expected: f32 = elements(gradients).iter().map(|g| g * g).sum();
        assert!((total - expected).abs() < 1e-4 * expected, "{total} and {expected}");
    }

    #[test]
    fn gradients_above_the_clip_are_scaled_down_to_it() {
        assert_eq!(clip_factor(None, 100.0), 1.0);
        assert_eq!(clip_factor(Some(1.0), 0.5), 1.0);
        assert!((clip_factor(Some(1.0), 4.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(Some(1.0), 0.0), 1.0);
    }
}
