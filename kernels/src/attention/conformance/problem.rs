//! The problems that the suites solve: a shape, drawn inputs, documents.

use burn::tensor::{DType, Int, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Conformance;
use crate::attention::{
    AttentionShape, DocumentStarts, Init, Inputs, ParameterSpec, ProjectionSpec,
};
use crate::backend::OpBackend;
use crate::testing::Tensor64;

/// One problem.
#[derive(Clone)]
pub struct Problem {
    pub shape: AttentionShape,
    pub batch: usize,
    pub seq_len: usize,
    /// q, k, v, the projections, the parameters.
    pub inputs: Vec<Tensor64>,
    /// The start of the document of each position, for each row.
    pub documents: Vec<Vec<usize>>,
    /// The type of q, k, v and the projections.
    pub dtype: DType,
}

/// The expected initial value of element `at`.
fn mean(init: &Init, at: usize) -> f32 {
    match init {
        Init::Constant(value) => *value,
        Init::Values(values) => values[at],
        Init::Normal(_) => 0.0,
        drawn @ (Init::LnUniform { .. } | Init::SoftplusLogUniform { .. }) => drawn.quantile(0.5),
    }
}

/// Sizes of a problem: heads, kv_heads, head_dim, batch, seq_len.
pub type Sizes = [usize; 5];

impl Problem {
    /// Random inputs in f32, in rows of one document each.
    pub fn new<V: Conformance>(variant: &V, sizes: Sizes, window: Option<usize>) -> Self {
        let [heads, kv_heads, head_dim, batch, seq_len] = sizes;
        let width = heads * head_dim;
        let shape =
            AttentionShape { window, ..AttentionShape::new(width, heads, kv_heads, head_dim) };
        let mut rng = ChaCha8Rng::seed_from_u64(seq_len as u64);
        let mut random = |shape: &[usize], center: &dyn Fn(usize) -> f32, spread: f32| {
            let data = (0..shape.iter().product::<usize>())
                .map(|at| f64::from(center(at) + rng.random_range(-spread..spread)))
                .collect();
            Tensor64::new(shape, data)
        };
        let (views, value_dim) = (variant.views(), variant.value_dim(&shape));
        let [query_heads, key_heads] =
            [variant.query_heads(&shape), variant.key_heads(&shape)].map(|heads| views * heads);
        let mut inputs = vec![
            random(&[batch, query_heads, seq_len, head_dim], &|_| 0.0, 1.7),
            random(&[batch, key_heads, seq_len, head_dim], &|_| 0.0, 1.7),
            random(&[batch, kv_heads, seq_len, value_dim], &|_| 0.0, 1.7),
        ];
        for ProjectionSpec { features, bias, .. } in variant.projections(&shape) {
            let bias = bias.unwrap_or(Init::Constant(0.0));
            let center = |at| mean(&bias, at % features);
            inputs.push(random(&[batch, seq_len, features], &center, 1.7));
        }
        for ParameterSpec { elements, init, .. } in variant.parameters(&shape) {
            // Away from the initial values, where terms may vanish.
            inputs.push(random(&[elements], &|at| mean(&init, at), 0.1));
        }
        variant.prepare(&mut inputs);
        let documents = vec![vec![0; seq_len]; batch];
        Problem { shape, batch, seq_len, inputs, documents, dtype: DType::F32 }
    }

    /// The problem with each input element changed by ±`unit` relative to it.
    pub fn nudged(&self, unit: f64, seed: u64) -> Self {
        let mut nudged = self.clone();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for x in nudged.inputs.iter_mut().flat_map(|input| &mut input.data) {
            let up = f64::from(u8::from(rng.random::<bool>()));
            *x *= 1.0 + (2.0 * up - 1.0) * unit;
        }
        nudged
    }

    /// The problem with q, k, v and the projections rounded to bf16.
    pub fn in_bf16(mut self) -> Self {
        let activations = self.inputs.iter_mut().filter(|x| x.shape.len() > 1);
        activations.flat_map(|x| &mut x.data).for_each(|x| *x = bf16::from_f64(*x).to_f64());
        self.dtype = DType::BF16;
        self
    }

    /// The same values in f32.
    pub fn in_f32(&self) -> Self {
        Problem { dtype: DType::F32, ..self.clone() }
    }

    /// The problem with other values of the tokens at `from` and later.
    pub fn changed(&self, from: usize) -> Self {
        let mut changed = self.clone();
        for input in &mut changed.inputs {
            let (time, inner) = match input.shape[..] {
                [_, _, time, head_dim] => (time, head_dim),
                [_, time, features] => (time, features),
                _ => continue,
            };
            for (at, x) in input.data.iter_mut().enumerate() {
                if at / inner % time >= from {
                    *x = -*x + 0.5;
                }
            }
        }
        changed
    }

    /// Splits every row into documents that start at the given positions; the second row has one
    /// start fewer, so that rows differ.
    pub fn packed(mut self, starts: &[usize]) -> Self {
        for (row, documents) in self.documents.iter_mut().enumerate() {
            let starts = &starts[..starts.len() - row.min(1)];
            for (t, document) in documents.iter_mut().enumerate() {
                *document = *starts.iter().rfind(|&&s| s <= t).unwrap_or(&0);
            }
        }
        self
    }

    /// The output by the kind's oracle.
    pub fn oracle<V: Conformance>(&self, variant: &V) -> Tensor64 {
        variant.oracle(&self.shape, &self.inputs, &self.documents)
    }

    /// Document starts as the operation takes them.
    pub fn documents<B: OpBackend>(&self) -> DocumentStarts<B> {
        let starts: Vec<i32> = self.documents.iter().flatten().map(|&t| t as i32).collect();
        let packed = starts.iter().any(|&s| s > 0);
        let data = TensorData::new(starts, [self.batch, self.seq_len]);
        packed.then(|| Tensor::<B, 2, Int>::from_data(data, &B::Device::default()))
    }

    /// The inputs as the operation takes them.
    pub fn tensors<B: OpBackend>(&self) -> Inputs<B> {
        fn tensor<B: OpBackend, const D: usize>(x: &Tensor64) -> Tensor<B, D> {
            let data = x.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
            Tensor::from_data(TensorData::new(data, x.shape.clone()), &B::Device::default())
        }
        let [q, k, v, rest @ ..] = &self.inputs[..] else { panic!("at least q, k and v") };
        // In the memory order of the projections, [batch, seq_len, heads, head_dim].
        let heads = |x: &Tensor64| -> Tensor<B, 4> {
            let by_token = tensor::<B, 4>(x).swap_dims(1, 2).into_data();
            Tensor::from_data(by_token, &B::Device::default()).swap_dims(1, 2)
        };
        let [q, k, v] = [q, k, v].map(heads);
        let of_rank = |rank| rest.iter().filter(move |x| x.shape.len() == rank);
        let [q, k, v] = [q, k, v].map(|x| x.cast(self.dtype));
        let projections = of_rank(3).map(|x| tensor::<B, 3>(x).cast(self.dtype)).collect();
        Inputs { q, k, v, projections, parameters: of_rank(1).map(tensor::<B, 1>).collect() }
    }
}

/// Tokens `first` to `first + n` of the inputs.
pub fn cut<B: OpBackend>(inputs: &Inputs<B>, first: usize, n: usize) -> Inputs<B> {
    let cut = |x: &Tensor<B, 4>| x.clone().narrow(2, first, n);
    Inputs {
        q: cut(&inputs.q),
        k: cut(&inputs.k),
        v: cut(&inputs.v),
        projections: inputs.projections.iter().map(|x| x.clone().narrow(1, first, n)).collect(),
        parameters: inputs.parameters.clone(),
    }
}

/// The windows to test the variant with: only `None` if it allows none.
pub fn windows<V: Conformance>(variant: &V, windows: &[usize]) -> Vec<Option<usize>> {
    let allowed = windows.iter().filter(|_| variant.allows_window());
    std::iter::once(None).chain(allowed.map(|&w| Some(w))).collect()
}
