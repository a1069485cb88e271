//! Runs a kind on a problem, and checks what served it.

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};

use super::{Conformance, Problem};
use crate::attention::probe::{PRUNED_FRACTION, Probe};
use crate::attention::{
    AttentionShape, DecodeState, DocumentStarts, ExecPath, Inputs, Kernel, Variant, dispatch,
};
use crate::backend::{OpBackend, kernels_allowed};
use crate::testing::Tensor64;
use crate::testing::served::{Served, served};

/// The path that a kind must take on `K` for inputs of type `dtype`: the kernel's for any shape if the kind
/// lists one.
pub(super) fn path<V: Variant, K: OpBackend>(dtype: DType) -> ExecPath {
    let kernel = Kernel { device: K::device_kind(), dtype };
    if V::KERNELS.contains(&kernel) && kernels_allowed() {
        ExecPath::Kernel(kernel.device)
    } else {
        ExecPath::Reference
    }
}

/// Panics when an operation of an attention kind ran its reference although a kernel should have served it.
fn check_served<V: Variant>(variant: &V, path: ExecPath, served: &Served) {
    let references: Vec<_> =
        served.references.iter().filter(|op| op.contains("::attention::")).collect();
    assert!(
        path == ExecPath::Reference || references.is_empty(),
        "{variant:?}: {references:?} ran as references, where the {path} was to serve"
    );
}

/// [`dispatch::attend`] on the whole problem.
fn attend_tensors<V: Variant, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    inputs: Inputs<K>,
) -> Tensor<K, 4> {
    let path = path::<V, K>(problem.dtype);
    let chosen = ExecPath::of_inputs(variant, &problem.shape, &inputs, false);
    assert_eq!(chosen, path, "the path of {variant:?} for {:?}", problem.shape);
    served_by(variant, path, || {
        dispatch::attend(variant, &problem.shape, inputs, problem.documents())
    })
}

/// The outputs of `attend`, which the path must serve.
pub(super) fn served_by<V: Variant, K: OpBackend>(
    variant: &V,
    path: ExecPath,
    attend: impl FnOnce() -> Tensor<K, 4>,
) -> Tensor<K, 4> {
    let (o, served) = served(attend);
    check_served(variant, path, &served);
    let kernels = served.kernels.iter().filter(|op| op.contains("::attention::")).count();
    assert!(
        path == ExecPath::Reference || kernels > 0,
        "{variant:?}: no kernel ran, where the {path} was to serve"
    );
    o
}

/// The outputs of a problem.
pub fn attend<V: Variant, K: OpBackend>(variant: &V, problem: &Problem) -> Vec<f64> {
    to_vec(attend_tensors::<V, K>(variant, problem, problem.tensors()))
}

/// The gradients of Σ upstream · o with respect to every input.
pub fn gradients<V: Variant, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    upstream: &Tensor64,
) -> Vec<Vec<f64>> {
    let inputs = require_grad(problem.tensors::<Autodiff<K>>());
    let o = attend_tensors(variant, problem, inputs.clone());
    let weights = upstream.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let weights = Tensor::from_data(TensorData::new(weights, o.dims()), &Default::default());
    gradients_of(&inputs, &(o.cast(DType::F32) * weights).sum().backward())
}

/// The inputs as leaves of a graph.
pub(super) fn require_grad<B: AutodiffBackend + OpBackend>(inputs: Inputs<B>) -> Inputs<B> {
    let Inputs { q, k, v, projections, parameters } = inputs;
    let [q, k, v] = [q, k, v].map(|x| x.detach().require_grad());
    let projections = projections.into_iter().map(|x| x.detach().require_grad()).collect();
    let parameters = parameters.into_iter().map(|x| x.detach().require_grad()).collect();
    Inputs { q, k, v, projections, parameters }
}

/// The gradients of the inputs, in order.
pub(super) fn gradients_of<K: OpBackend>(
    inputs: &Inputs<Autodiff<K>>,
    grads: &<Autodiff<K> as AutodiffBackend>::Gradients,
) -> Vec<Vec<f64>> {
    type Ad<K> = Autodiff<K>;
    let Inputs { q, k, v, projections, parameters } = inputs;
    fn grad<K: OpBackend, const D: usize>(
        x: &Tensor<Ad<K>, D>,
        grads: &<Ad<K> as AutodiffBackend>::Gradients,
    ) -> Vec<f64> {
        to_vec(x.grad(grads).expect("every input has a gradient"))
    }
    let first = [q, k, v].map(|x| grad(x, grads));
    let projections = projections.iter().map(|x| grad(x, grads));
    let parameters = parameters.iter().map(|x| grad(x, grads));
    first.into_iter().chain(projections).chain(parameters).collect()
}

/// The decoding of a problem's tokens.
#[derive(Clone)]
pub struct Decoding<'a, V: Variant, K: OpBackend> {
    variant: &'a V,
    problem: &'a Problem,
    inputs: Inputs<K>,
    state: dispatch::State<V, K>,
    /// Number of tokens so far.
    tokens: usize,
}

impl<'a, V: Conformance, K: OpBackend> Decoding<'a, V, K> {
    /// The state before the first token.
    pub fn new(variant: &'a V, problem: &'a Problem) -> Self {
        let state = dispatch::State::new(0);
        Decoding { variant, problem, inputs: problem.tensors(), state, tokens: 0 }
    }

    /// The outputs of the next `n` tokens.
    pub fn extend(&mut self, n: usize) -> Tensor<K, 4> {
        let path = path::<V, K>(self.problem.dtype);
        let inputs = super::problem::cut(&self.inputs, self.tokens, n);
        self.tokens += n;
        let (variant, shape) = (self.variant, &self.problem.shape);
        let (o, served) = served(|| dispatch::extend(variant, shape, inputs, &mut self.state));
        assert_eq!(self.state.path(), Some(path), "the path of decoding {variant:?}, {shape:?}");
        check_served(variant, path, &served);
        o
    }

    /// Elements of the state.
    pub fn elements(&self) -> usize {
        self.state.elements()
    }
}

/// The elements of a tensor.
pub fn to_vec<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The largest |a − b|.
pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// The fraction of visible pairs that a kind says its pruning leaves out of these inputs.
pub fn observed_pruning<V: Variant, B: OpBackend>(
    variant: &V,
    shape: &AttentionShape,
    inputs: Inputs<B>,
    documents: DocumentStarts<B>,
) -> Option<f64> {
    let mut probe = Probe::default();
    dispatch::observe(variant, shape, inputs, documents, &mut probe);
    probe.mean(PRUNED_FRACTION)
}
