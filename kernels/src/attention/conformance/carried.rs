//! Rows in pieces, each of which goes on from the state after the one before, as rows of a stream do.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::problem::cut;
use super::run::{attend, gradients, gradients_of, path, require_grad, served_by, to_vec};
use super::{Conformance, Problem};
use crate::attention::{DocumentStarts, Variant, dispatch};
use crate::backend::{OpBackend, with_reference};
use crate::testing::Tensor64;

/// A problem in pieces.
#[derive(Clone)]
pub struct InPieces {
    pub problem: Problem,
    /// Tokens of the pieces.
    pub pieces: Vec<usize>,
}

impl InPieces {
    /// # Panics
    /// When the pieces are not the problem's tokens.
    pub fn new(problem: Problem, pieces: &[usize]) -> Self {
        assert_eq!(pieces.iter().sum::<usize>(), problem.seq_len, "tokens of the pieces");
        InPieces { problem, pieces: pieces.to_vec() }
    }

    /// The problems of a suite: of one document, with documents that begin in each piece and with one, and with
    /// documents that go on into the last piece. A single token is a piece, too.
    pub fn all<V: Conformance>(variant: &V, sizes: [usize; 4], pieces: [usize; 3]) -> Vec<Self> {
        let [heads, kv_heads, head_dim, batch] = sizes;
        let (len, last) = (pieces.iter().sum(), pieces[0] + pieces[1]);
        let problem = || Problem::new(variant, [heads, kv_heads, head_dim, batch, len], None);
        let packings = [vec![], vec![0, 10, last, len - 4], vec![0, 1, 20, len - 20]];
        packings
            .into_iter()
            .map(|starts| match &starts[..] {
                [] => problem(),
                starts => problem().packed(starts),
            })
            .map(|problem| InPieces::new(problem, &pieces))
            .collect()
    }

    /// Where the last piece begins.
    fn last(&self) -> usize {
        self.problem.seq_len - self.pieces[self.pieces.len() - 1]
    }

    /// Gradients of the outputs, random in the last piece and 0 before it.
    pub fn upstream<V: Variant>(&self, variant: &V) -> Tensor64 {
        let Problem { shape, batch, seq_len, .. } = self.problem;
        let value_dim = variant.value_dim(&shape);
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let sizes = [batch, shape.heads, seq_len, value_dim];
        let draw = |at: usize| {
            let drawn = f64::from(rng.random_range(-1.0f32..1.0));
            if at / value_dim % seq_len < self.last() { 0.0 } else { drawn }
        };
        Tensor64::new(&sizes, (0..sizes.iter().product()).map(draw).collect())
    }

    /// Document starts of the piece of `n` tokens from `first` on; −1 of documents that began before it.
    fn documents<B: OpBackend>(&self, first: usize, n: usize) -> DocumentStarts<B> {
        let Problem { batch, documents, .. } = &self.problem;
        if documents.iter().flatten().all(|&start| start == 0) {
            return None;
        }
        let within = |start: &usize| start.checked_sub(first).map_or(-1, |at| at as i32);
        let starts: Vec<i32> =
            documents.iter().flat_map(|row| row[first..first + n].iter().map(within)).collect();
        let data = TensorData::new(starts, [*batch, n]);
        Some(Tensor::<B, 2, Int>::from_data(data, &B::Device::default()))
    }

    /// Outputs of all tokens, then the gradients of the last piece's inputs and of the parameters.
    pub fn results<V: Variant, K: OpBackend>(
        &self,
        variant: &V,
        upstream: &Tensor64,
    ) -> Vec<Vec<f64>> {
        type Ad<K> = Autodiff<K>;
        let Problem { shape, batch, dtype, .. } = &self.problem;
        let elements = variant.state_elements(shape, 1) as usize;
        let all = self.problem.tensors::<Ad<K>>();
        let mut state = Tensor::<Ad<K>, 2>::zeros([*batch, elements], &Default::default());
        let (mut first, mut outputs, mut last) = (0, vec![], None);
        for &n in &self.pieces {
            let inputs = require_grad(cut(&all, first, n));
            let documents = self.documents(first, n);
            let path = path::<V, Ad<K>>(*dtype);
            let o = served_by(variant, path, || {
                dispatch::attend_from(variant, shape, inputs.clone(), documents, &mut state)
            });
            assert_eq!(state.dtype(), DType::F32, "the type of the state");
            outputs.push(o.clone().inner());
            last = Some((inputs, o));
            first += n;
        }
        let (inputs, o) = last.expect("there are pieces");
        let weights = upstream.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let weights = TensorData::new(weights, upstream.shape.clone());
        let weights = Tensor::<Ad<K>, 4>::from_data(weights, &Default::default());
        let weights = weights.narrow(2, self.last(), o.dims()[2]);
        let grads = (o.cast(DType::F32) * weights).sum().backward();
        let mut results = vec![to_vec(Tensor::cat(outputs, 2))];
        results.extend(gradients_of(&inputs, &grads));
        results
    }

    /// What [`InPieces::results`] should be, from the whole rows in f32 on the CPU. Gradients of parameters are the
    /// reference's in the same pieces: in whole rows, parameters also act on the earlier ones.
    pub fn expected<V: Variant>(&self, variant: &V, upstream: &Tensor64) -> Vec<Vec<f64>> {
        let of_cpu = InPieces { problem: self.problem.in_f32(), ..self.clone() };
        let Problem { inputs, seq_len, .. } = &of_cpu.problem;
        let grads = gradients::<V, Flex>(variant, &of_cpu.problem, upstream);
        let mut results = vec![attend::<V, Flex>(variant, &of_cpu.problem)];
        for (grad, input) in grads.into_iter().zip(inputs).filter(|(_, x)| x.shape.len() > 1) {
            let channels = input.shape[input.shape.len() - 1];
            let rows = grad.chunks_exact(seq_len * channels);
            results.push(rows.flat_map(|row| &row[self.last() * channels..]).copied().collect());
        }
        let in_pieces = with_reference(|| of_cpu.results::<V, Flex>(variant, upstream));
        results.extend(in_pieces.into_iter().skip(results.len()));
        results
    }
}

/// Asserts that a kind without a state refuses one.
pub fn refuses_a_state<V: Conformance, K: OpBackend>(variant: &V) {
    let problem = Problem::new(variant, [2, 2, 16, 1, 4], None);
    let elements = variant.state_elements(&problem.shape, problem.seq_len) as usize;
    let mut state = Tensor::<K, 2>::zeros([1, elements], &Default::default());
    let attend = || {
        let inputs = problem.tensors::<K>();
        dispatch::attend_from(variant, &problem.shape, inputs, None, &mut state)
    };
    let refused = catch_unwind(AssertUnwindSafe(attend)).expect_err("no state to go on from");
    let message = refused.downcast_ref::<String>().expect("a message");
    assert!(message.ends_with("carries no state"), "{message}");
}
