//! The backward pass in blocks against autodiff through the reference, which the variants' conformance
//! suites compare with the oracles.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Rowwise, Weights, rowwise};
use crate::attention::ExecPath;
use crate::attention::entmax::Entmax;
use crate::attention::lssar::Lssar;
use crate::attention::rectified::Rectified;
use crate::attention::stick_breaking::StickBreaking;
use crate::backend::{primitive, tensor, with_reference};

type Ad = Autodiff<Flex>;

/// q, k, v, the upstream gradient, and the optional inputs.
struct RowwiseCase {
    tensors: [Tensor<Flex, 4>; 4],
    offsets: Option<Tensor<Flex, 2>>,
    documents: Option<TensorData>,
}

fn random<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<Flex, D> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.7..1.7)).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

impl RowwiseCase {
    /// Two rows, 8 heads in groups of 2, head_dim 4, value_dim 6.
    fn new(queries: usize, keys: usize) -> Self {
        let q = random([2, 8, queries, 4], 1);
        let [k, v] = [random([2, 4, keys, 4], 2), random([2, 4, keys, 6], 3)];
        let upstream = random([2, 8, queries, 6], 4);
        RowwiseCase { tensors: [q, k, v, upstream], offsets: None, documents: None }
    }

    fn offsets(self, batch: usize) -> Self {
        let queries = self.tensors[0].dims()[2];
        RowwiseCase { offsets: Some(random([batch, queries], 5) * 0.2), ..self }
    }

    /// The second row is two documents.
    fn packed(self) -> Self {
        let keys = self.tensors[1].dims()[2];
        let starts = (0..2 * keys).map(|t| if t < keys + keys / 3 { 0 } else { keys / 3 });
        let starts: Vec<i32> = starts.map(|start| start as i32).collect();
        RowwiseCase { documents: Some(TensorData::new(starts, [2, keys])), ..self }
    }

    /// The output and the gradients, by autodiff.
    fn autodiff<W: Weights>(&self, op: &Rowwise<W>) -> Vec<Vec<f32>> {
        let device = Default::default();
        let [q, k, v, upstream] = self.tensors.clone().map(Tensor::<Ad, 4>::from_inner);
        let [q, k, v] = [q, k, v].map(Tensor::require_grad);
        let offsets = self.offsets.clone().map(|x| Tensor::<Ad, 2>::from_inner(x).require_grad());
        let documents = self.documents.clone();
        let documents = documents.map(|starts| Tensor::<Ad, 2, Int>::from_data(starts, &device));
        let [a, b, c] = [&q, &k, &v].map(Tensor::clone);
        let o = rowwise(op, a, b, c, offsets.clone(), documents, ExecPath::Reference);
        let grads = (o.clone() * upstream).sum().backward();
        let mut all = vec![values(o.inner())];
        all.extend([&q, &k, &v].map(|x| values(x.grad(&grads).expect("a gradient"))));
        all.extend(offsets.map(|x| values(x.grad(&grads).expect("a gradient"))));
        all
    }

    /// The gradients, by the backward pass in blocks.
    fn in_blocks<W: Weights>(&self, op: &Rowwise<W>) -> Vec<Vec<f32>> {
        let [q, k, v, upstream] = self.tensors.clone().map(primitive);
        let ints: Vec<_> = self
            .documents
            .iter()
            .map(|starts| Tensor::<Flex, 2, Int>::from_data(starts.clone(), &Default::default()))
            .map(Tensor::into_primitive)
            .collect();
        let grads = match self.offsets.clone() {
            None => op.backward::<3>(vec![q, k, v], &ints, upstream).to_vec(),
            Some(offsets) => {
                op.backward::<4>(vec![q, k, v, primitive(offsets)], &ints, upstream).to_vec()
            }
        };
        let mut grads = grads.into_iter().map(|grad| grad.expect("a gradient"));
        let mut all: Vec<_> =
            grads.by_ref().take(3).map(|x| values(tensor::<Flex, 4>(x))).collect();
        all.extend(grads.map(|x| values(tensor::<Flex, 2>(x))));
        all
    }
}

fn values<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
    x.into_data().to_vec().expect("an f32 tensor")
}

/// Compares `got` with `want`, with a tolerance relative to the largest element, at least 0.1 (some
/// gradients vanish: entmax does not depend on an offset).
fn assert_close(what: &str, got: &[Vec<f32>], want: &[Vec<f32>], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}, tensor {at}");
        let scale = want.iter().fold(0.1f32, |a, x| a.max(x.abs()));
        for (got, want) in got.iter().zip(want) {
            let near = (got - want).abs() <= tolerance * scale;
            assert!(near, "{what}, tensor {at}: {got} where {want} is right, largest {scale}");
        }
    }
}

fn core<W: Weights>(weights: W, window: Option<usize>) -> Rowwise<W> {
    Rowwise { weights, scale: 0.7, window }
}

fn check_small<W: Weights>(weights: W) {
    for (queries, keys) in [(1, 1), (9, 9), (40, 40), (5, 40)] {
        for window in [None, Some(4)] {
            let plain = RowwiseCase::new(queries, keys);
            let packed = RowwiseCase::new(queries, keys).packed().offsets(2);
            for problem in [plain, packed, RowwiseCase::new(queries, keys).offsets(1)] {
                let op = core(weights.clone(), window);
                let want = with_reference(|| problem.autodiff(&op));
                let what = format!("{op:?}, {queries} queries of {keys}");
                assert_close(&what, &problem.in_blocks(&op), &want[1..], 3e-5);
            }
        }
    }
}

#[test]
fn gradients_in_blocks_are_those_of_autodiff() {
    check_small(Rectified { power: 1 });
    check_small(Rectified { power: 2 });
    check_small(Rectified { power: 3 });
    check_small(Lssar { power: 1 });
    check_small(Lssar { power: 3 });
    check_small(Entmax);
    check_small(StickBreaking);
}

/// 16 heads of 1,100 × 1,100 scores are more than one block.
fn check_large<W: Weights>(weights: W, window: Option<usize>) {
    let problem = RowwiseCase::new(1100, 1100).packed().offsets(2);
    let op = core(weights, window);
    let tensors = super::RowwiseInputs::<Flex>::new(problem.tensors.clone().map(primitive), &[]);
    assert!(op.blocks(&tensors).count() > 1, "one block");
    let want = with_reference(|| problem.autodiff(&op));
    assert_close(&format!("{op:?}"), &problem.autodiff(&op), &want, 3e-5);
}

#[test]
fn several_blocks_give_what_autodiff_gives() {
    check_large(Rectified { power: 2 }, None);
    check_large(StickBreaking, Some(300));
}
