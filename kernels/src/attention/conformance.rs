//! The tests every registered variant gets: agreement with its f64 oracle (outputs and gradients
//! of every input, at odd lengths, with grouped heads, windows and packed documents), causality,
//! decoding, determinism. `K` is the backend that is tested, against its own f32 reference: for
//! a kind without a kernel there, these are one, and only the oracle is left to hold it.

mod length;
mod rounded;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Int, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use self::length::{Decay, holds_at_length};
pub(crate) use self::rounded::bf16_suite;
pub use self::rounded::{
    bf16_agrees_at, bf16_agrees_pruned_and_packed, bf16_agrees_with_the_oracle, bf16_decodes_at,
    bf16_is_causal_and_shows_a_nan, bf16_is_deterministic_on_a_full_device,
};
use super::{
    AttentionShape, DecodeState, DocumentStarts, Init, Inputs, Parameter, Projection, Variant,
    dispatch,
};
use crate::backend::{OpBackend, with_reference};
use crate::testing::{CHECKED, Oracle, assert_conditioned_budget, differences, record};

/// What a variant's `tests.rs` supplies.
pub trait Conformance: Variant {
    /// Step of the central differences: smaller for a variant with kinks, which a step may pass.
    const STEP: f64 = 1e-5;

    /// Configurations to test.
    fn cases() -> Vec<Self>;

    /// Changes a problem's random inputs (q, k, v, the projections, the parameters) where they
    /// would meet a kink, or leave nothing but rounding to compare.
    fn prepare(&self, inputs: &mut [Oracle]) {
        let _ = inputs;
    }

    /// How often a kernel in bf16 rounds what a result or a gradient comes from. Five: q and k where
    /// they are rotated, the weights or their slopes, the result, a gradient that is rotated back.
    fn roundings(&self) -> u32 {
        5
    }

    /// The size below which a bf16 gradient counts as vanished, relative to all gradients' together: what is
    /// left where larger terms cancel, as for a single key, is rounding.
    fn vanished(&self) -> f64 {
        0.1
    }

    /// The operation by its definition: `inputs` are q, k, v, the projections, the parameters;
    /// `documents[b][t]` is where the document of position t starts.
    fn oracle(&self, shape: &AttentionShape, inputs: &[Oracle], documents: &[Vec<usize>])
    -> Oracle;
}

/// One problem: a shape, inputs and documents.
#[derive(Clone)]
struct Problem {
    shape: AttentionShape,
    batch: usize,
    seq_len: usize,
    inputs: Vec<Oracle>,
    documents: Vec<Vec<usize>>,
    /// Of q, k, v and the projections.
    dtype: DType,
}

/// The expected initial value of element `at`.
fn mean(init: &Init, at: usize) -> f32 {
    match init {
        Init::Constant(value) => *value,
        Init::Values(values) => values[at],
        Init::Normal(_) => 0.0,
    }
}

/// Sizes of a problem: heads, kv_heads, head_dim, batch, seq_len.
pub type Sizes = [usize; 5];

impl Problem {
    fn new<V: Conformance>(variant: &V, sizes: Sizes, window: Option<usize>) -> Self {
        let [heads, kv_heads, head_dim, batch, seq_len] = sizes;
        let width = heads * head_dim;
        let shape =
            AttentionShape { window, ..AttentionShape::new(width, heads, kv_heads, head_dim) };
        let mut rng = ChaCha8Rng::seed_from_u64(seq_len as u64);
        let mut random = |shape: &[usize], center: &dyn Fn(usize) -> f32, spread: f32| {
            let data = (0..shape.iter().product::<usize>())
                .map(|at| f64::from(center(at) + rng.random_range(-spread..spread)))
                .collect();
            Oracle::new(shape, data)
        };
        let (views, value_dim) = (variant.views(), variant.value_dim(&shape));
        let mut inputs = vec![
            random(&[batch, views * heads, seq_len, head_dim], &|_| 0.0, 1.7),
            random(&[batch, views * kv_heads, seq_len, head_dim], &|_| 0.0, 1.7),
            random(&[batch, kv_heads, seq_len, value_dim], &|_| 0.0, 1.7),
        ];
        for Projection { features, bias, .. } in variant.projections(&shape) {
            let bias = bias.unwrap_or(Init::Constant(0.0));
            let center = |at| mean(&bias, at % features);
            inputs.push(random(&[batch, seq_len, features], &center, 1.7));
        }
        for Parameter { elements, init, .. } in variant.parameters(&shape) {
            // Away from the initial values, where parts may vanish.
            inputs.push(random(&[elements], &|at| mean(&init, at), 0.1));
        }
        variant.prepare(&mut inputs);
        let documents = vec![vec![0; seq_len]; batch];
        Problem { shape, batch, seq_len, inputs, documents, dtype: DType::F32 }
    }

    /// The problem with each input changed by one unit in its last place, up or down.
    fn nudged(&self) -> Self {
        let mut nudged = self.clone();
        let mut rng = ChaCha8Rng::seed_from_u64(17);
        for x in nudged.inputs.iter_mut().flat_map(|input| &mut input.data) {
            let up = f64::from(u8::from(rng.random::<bool>()));
            *x *= 1.0 + (2.0 * up - 1.0) * f64::from(f32::EPSILON);
        }
        nudged
    }

    /// The problem with q, k, v and the projections rounded to bf16.
    fn in_bf16(mut self) -> Self {
        let activations = self.inputs.iter_mut().filter(|x| x.shape.len() > 1);
        activations.flat_map(|x| &mut x.data).for_each(|x| *x = bf16::from_f64(*x).to_f64());
        self.dtype = DType::BF16;
        self
    }

    /// The problem with other values of the tokens at `from` and later.
    fn changed(&self, from: usize) -> Self {
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

    /// The same values in f32.
    fn in_f32(&self) -> Self {
        Problem { dtype: DType::F32, ..self.clone() }
    }

    /// Splits every row into documents that start at the given positions; the second row has one
    /// start fewer, so that rows differ.
    fn packed(mut self, starts: &[usize]) -> Self {
        for (row, documents) in self.documents.iter_mut().enumerate() {
            let starts = &starts[..starts.len() - row.min(1)];
            for (t, document) in documents.iter_mut().enumerate() {
                *document = *starts.iter().rfind(|&&s| s <= t).unwrap_or(&0);
            }
        }
        self
    }

    fn documents<B: OpBackend>(&self) -> DocumentStarts<B> {
        let starts: Vec<i32> = self.documents.iter().flatten().map(|&t| t as i32).collect();
        let packed = starts.iter().any(|&s| s > 0);
        let data = TensorData::new(starts, [self.batch, self.seq_len]);
        packed.then(|| Tensor::<B, 2, Int>::from_data(data, &B::Device::default()))
    }

    fn tensors<B: OpBackend>(&self) -> Inputs<B> {
        fn tensor<B: OpBackend, const D: usize>(x: &Oracle) -> Tensor<B, D> {
            let data = x.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
            Tensor::from_data(TensorData::new(data, x.shape.clone()), &B::Device::default())
        }
        let [q, k, v, rest @ ..] = &self.inputs[..] else { panic!("at least q, k and v") };
        // As projections give them: [batch, seq_len, heads, head_dim] in memory.
        let heads = |x: &Oracle| -> Tensor<B, 4> {
            let by_token = tensor::<B, 4>(x).swap_dims(1, 2).into_data();
            Tensor::from_data(by_token, &B::Device::default()).swap_dims(1, 2)
        };
        let [q, k, v] = [q, k, v].map(heads);
        let of_rank = |rank| rest.iter().filter(move |x| x.shape.len() == rank);
        let [q, k, v] = [q, k, v].map(|x| x.cast(self.dtype));
        let projections = of_rank(3).map(|x| tensor::<B, 3>(x).cast(self.dtype)).collect();
        Inputs { q, k, v, projections, parameters: of_rank(1).map(tensor::<B, 1>).collect() }
    }

    fn attend<V: Variant, K: OpBackend>(&self, variant: &V) -> Vec<f64> {
        to_vec(dispatch::attend::<_, K>(variant, &self.shape, self.tensors(), self.documents()))
    }
}

/// Tokens `first` to `first + n` of the inputs.
fn cut<B: OpBackend>(inputs: &Inputs<B>, first: usize, n: usize) -> Inputs<B> {
    let cut = |x: &Tensor<B, 4>| x.clone().narrow(2, first, n);
    Inputs {
        q: cut(&inputs.q),
        k: cut(&inputs.k),
        v: cut(&inputs.v),
        projections: inputs.projections.iter().map(|x| x.clone().narrow(1, first, n)).collect(),
        parameters: inputs.parameters.clone(),
    }
}

/// The windows that the variant can be tested with: none but `None` where it allows none.
fn windows<V: Variant>(variant: &V, windows: &[usize]) -> Vec<Option<usize>> {
    let allowed = windows.iter().filter(|_| variant.allows_window());
    std::iter::once(None).chain(allowed.map(|&w| Some(w))).collect()
}

fn to_vec<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The gradients of Σ upstream · o with respect to every input.
fn gradients<V: Variant, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    upstream: &Oracle,
) -> Vec<Vec<f64>> {
    type Ad<K> = Autodiff<K>;
    let Inputs { q, k, v, projections, parameters } = problem.tensors::<Ad<K>>();
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    let projections: Vec<_> = projections.into_iter().map(Tensor::require_grad).collect();
    let parameters: Vec<_> = parameters.into_iter().map(Tensor::require_grad).collect();
    let inputs = Inputs {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        projections: projections.clone(),
        parameters: parameters.clone(),
    };
    let o = dispatch::attend(variant, &problem.shape, inputs, problem.documents());
    let weights = upstream.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let weights = Tensor::from_data(TensorData::new(weights, o.dims()), &Default::default());
    let grads = (o.cast(DType::F32) * weights).sum().backward();
    fn grad<K: OpBackend, const D: usize>(
        x: &Tensor<Ad<K>, D>,
        grads: &<Ad<K> as AutodiffBackend>::Gradients,
    ) -> Vec<f64> {
        to_vec(x.grad(grads).expect("every input has a gradient"))
    }
    let first = [&q, &k, &v].map(|x| grad(x, &grads));
    let projections = projections.iter().map(|x| grad(x, &grads));
    let parameters = parameters.iter().map(|x| grad(x, &grads));
    first.into_iter().chain(projections).chain(parameters).collect()
}

fn check_outputs<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem) {
    let want = variant.oracle(&problem.shape, &problem.inputs, &problem.documents);
    let kernel = problem.attend::<V, K>(variant);
    let reference = with_reference(|| problem.attend::<V, K>(variant));
    let nudged = with_reference(|| problem.nudged().attend::<V, K>(variant));
    let what = format!("{variant:?}, {:?}, seq_len {}", problem.shape, problem.seq_len);
    assert_conditioned_budget(&what, &kernel, [&reference, &nudged], &want.data);
}

/// The gradients for one upstream gradient, by the kernel and by the reference.
struct Pulled {
    upstream: Oracle,
    kernel: Vec<Vec<f64>>,
    reference: Vec<Vec<f64>>,
    nudged: Vec<Vec<f64>>,
}

impl Pulled {
    fn new<V: Conformance, K: OpBackend>(
        variant: &V,
        problem: &Problem,
        mut upstream: Oracle,
        seed: u64,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        upstream.data.iter_mut().for_each(|x| *x = f64::from(rng.random_range(-1.0f32..1.0)));
        let kernel = gradients::<V, K>(variant, problem, &upstream);
        let reference = with_reference(|| gradients::<V, K>(variant, problem, &upstream));
        let nudged = problem.nudged();
        let nudged = with_reference(|| gradients::<V, K>(variant, &nudged, &upstream));
        Pulled { upstream, kernel, reference, nudged }
    }
}

/// Gradients of one input, where they were compared.
#[derive(Clone, Default)]
struct Sample {
    kernel: Vec<f64>,
    reference: Vec<f64>,
    nudged: Vec<f64>,
    want: Vec<f64>,
}

/// A sample of each input's gradients; holds two runs to the same bits.
fn gradient_samples<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem) -> Vec<Sample> {
    let oracle = |inputs: &[Oracle]| variant.oracle(&problem.shape, inputs, &problem.documents);
    let output = oracle(&problem.inputs);
    let mut pulled: Vec<Pulled> = vec![];
    let mut samples = vec![Sample::default(); problem.inputs.len()];
    for (input, sample) in samples.iter_mut().enumerate() {
        // An input of few elements is compared for as many upstream gradients as make a sample:
        // the rounding of one number says nothing.
        for draw in 0..CHECKED.div_ceil(problem.inputs[input].data.len()) {
            if pulled.len() == draw {
                let seed = 5 + draw as u64;
                pulled.push(Pulled::new::<V, K>(variant, problem, output.clone(), seed));
            }
            let pulled = &pulled[draw];
            let (places, want) =
                differences(&problem.inputs, input, &pulled.upstream, V::STEP, &oracle);
            sample.kernel.extend(places.iter().map(|&p| pulled.kernel[input][p]));
            sample.reference.extend(places.iter().map(|&p| pulled.reference[input][p]));
            sample.nudged.extend(places.iter().map(|&p| pulled.nudged[input][p]));
            sample.want.extend(want);
        }
    }
    let again = gradients::<V, K>(variant, problem, &pulled[0].upstream);
    assert_eq!(pulled[0].kernel, again, "{variant:?}: gradients of two runs differ");
    samples
}

fn check_gradients<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem) {
    let samples = gradient_samples::<V, K>(variant, problem);
    for (input, Sample { kernel, reference, nudged, want }) in samples.into_iter().enumerate() {
        let what = format!("{variant:?}, {:?}, gradient of input {input}", problem.shape);
        assert_conditioned_budget(&what, &kernel, [&reference, &nudged], &want);
    }
}

/// Gradients for a single token. Those of q and k may vanish by cancellation there, so that errors
/// relative to them mean nothing: all inputs' are held to the largest of any.
fn check_gradients_of_one_token<V: Conformance, K: OpBackend>(variant: &V) {
    let problem = Problem::new(variant, [2, 2, 8, 1, 1], None);
    let samples = gradient_samples::<V, K>(variant, &problem);
    let all =
        |of: fn(&Sample) -> &Vec<f64>| samples.iter().flat_map(of).copied().collect::<Vec<_>>();
    let what = format!("{variant:?}, gradients for one token");
    let references = [&all(|s| &s.reference)[..], &all(|s| &s.nudged)];
    assert_conditioned_budget(&what, &all(|s| &s.kernel), references, &all(|s| &s.want));
}

/// Outputs at awkward lengths, with and without grouped heads.
pub fn agrees_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for seq_len in [1, 63, 64, 100, 257] {
            check_outputs::<V, K>(&variant, &Problem::new(&variant, [2, 2, 8, 1, seq_len], None));
        }
        check_outputs::<V, K>(&variant, &Problem::new(&variant, [6, 2, 16, 2, 70], None));
        check_outputs::<V, K>(&variant, &Problem::new(&variant, [4, 1, 32, 1, 33], None));
    }
    for head_dim in [64, 96, 128] {
        let variant = &V::cases()[0];
        check_outputs::<V, K>(variant, &Problem::new(variant, [2, 1, head_dim, 1, 40], None));
    }
}

/// Gradients of every input.
pub fn gradients_agree_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        check_gradients_of_one_token::<V, K>(&variant);
        for sizes in [[2, 2, 8, 1, 12], [4, 2, 8, 2, 9], [2, 1, 16, 1, 33]] {
            check_gradients::<V, K>(&variant, &Problem::new(&variant, sizes, None));
        }
        for window in windows(&variant, &[5]) {
            check_gradients::<V, K>(&variant, &Problem::new(&variant, [2, 1, 8, 1, 70], window));
        }
        let packed = Problem::new(&variant, [2, 2, 8, 2, 70], None).packed(&[0, 1, 30, 66]);
        check_gradients::<V, K>(&variant, &packed);
    }
}

/// Windows shorter and longer than the sequence.
pub fn windows_agree_with_the_oracle<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 3, 64, 65, 200]) {
            check_outputs::<V, K>(&variant, &Problem::new(&variant, [2, 1, 8, 1, 130], window));
        }
    }
}

/// Packed documents agree with the oracle, and with each document alone.
pub fn documents_do_not_see_each_other<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[7]) {
            let problem = Problem::new(&variant, [4, 2, 8, 2, 100], window);
            check_outputs::<V, K>(&variant, &problem.packed(&[0, 1, 17, 64, 99]));
            // The last token stands alone in its piece.
            let problem = Problem::new(&variant, [2, 1, 8, 2, 129], window);
            check_outputs::<V, K>(&variant, &problem.packed(&[0, 40, 128]));
        }
        let problem = Problem::new(&variant, [2, 2, 8, 1, 100], None).packed(&[0, 40]);
        let inputs = problem.tensors::<K>();
        let part =
            |first, n| dispatch::attend(&variant, &problem.shape, cut(&inputs, first, n), None);
        // The last sequence is longer than a document alone would need: only the mask parts them.
        let apart = to_vec(Tensor::cat(vec![part(0, 40), part(40, 60)], 2));
        assert_close(&problem.attend::<V, K>(&variant), &apart);
    }
}

fn assert_close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-5 * scale, "{got} where {want} is right");
    }
}

/// A later token changes no earlier output, not by a bit; it does change its own.
pub fn is_causal<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        let problem = Problem::new(&variant, [2, 1, 8, 1, 100], None);
        let before = problem.attend::<V, K>(&variant);
        let from = 70;
        let after = problem.changed(from).attend::<V, K>(&variant);
        for (at, (before, after)) in before.iter().zip(&after).enumerate() {
            let t = at / variant.value_dim(&problem.shape) % 100;
            assert_eq!(before == after, t < from, "{variant:?} at position {t}");
        }
    }
}

/// A prefill and then steps, alone and in small groups, equal the full forward pass.
pub fn decoding_equals_the_full_pass<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 6]) {
            for steps in [&[17, 1, 1, 3, 1, 20, 17][..], &[127, 1, 1, 1]] {
                let tokens = steps.iter().sum();
                let problem = Problem::new(&variant, [4, 2, 8, 2, tokens], window);
                let full = problem.attend::<V, K>(&variant);
                let inputs = problem.tensors::<K>();
                let mut state = dispatch::State::<_, K>::new(0);
                let mut outputs = vec![];
                let mut first = 0;
                for &n in steps {
                    let inputs = cut(&inputs, first, n);
                    outputs.push(dispatch::extend(&variant, &problem.shape, inputs, &mut state));
                    first += n;
                }
                assert_close(&to_vec(Tensor::cat(outputs, 2)), &full);
            }
        }
    }
}

/// Decoding holds what the variant says it does: at least half of it is real, and buffers are no
/// more than twice as large.
pub fn the_state_is_as_large_as_documented<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for window in windows(&variant, &[1, 40]) {
            let batch = 2;
            let problem = Problem::new(&variant, [4, 2, 8, batch, 300], window);
            let inputs = problem.tensors::<K>();
            let mut state = dispatch::State::<_, K>::new(0);
            for t in 0..300 {
                dispatch::extend(&variant, &problem.shape, cut(&inputs, t, 1), &mut state);
                let documented = variant.state_elements(&problem.shape, t + 1) as usize;
                let held = state.elements() / batch;
                assert!(
                    documented <= 2 * held && held <= 2 * documented,
                    "{variant:?}, window {window:?}: {held} elements after {} tokens, documented \
                     {documented}",
                    t + 1
                );
            }
        }
    }
}

/// Two runs give the same bits.
pub fn is_deterministic<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        let problem = Problem::new(&variant, [4, 2, 16, 2, 130], None);
        assert_eq!(problem.attend::<V, K>(&variant), problem.attend::<V, K>(&variant));
    }
}

/// A NaN in the input is not hidden: a training step must be able to notice it.
pub fn a_nan_shows<V: Conformance, K: OpBackend>() {
    for variant in V::cases() {
        for input in 0..3 {
            let mut problem = Problem::new(&variant, [1, 1, 8, 1, 20], None);
            problem.inputs[input].data[3] = f64::NAN;
            assert!(problem.attend::<V, K>(&variant).iter().any(|x| x.is_nan()), "input {input}");
        }
    }
}

/// Outputs and gradients at a training step's sizes, where another choice of stock kernels may
/// begin, agree with the CPU's: to 2e-5 of the largest value, or as nearly as the CPU agrees with
/// itself where each input is changed in its last bit (sums over a batch that cancel, say, have few
/// digits that two roundings share).
pub fn agrees_with_the_cpu_at_a_models_size<V: Conformance, K: OpBackend>() {
    let variant = &V::cases()[0];
    for starts in [&[0][..], &[0, 1, 100, 161]] {
        let mut problem = Problem::new(variant, [3, 3, 64, 16, 256], None).packed(starts);
        // Away from scores of zero, by which power's only key of a row is divided.
        problem.inputs[..2].iter_mut().flat_map(|x| &mut x.data).for_each(|x| *x += 0.5);
        let shape = &problem.shape;
        let sizes = [problem.batch, shape.heads, problem.seq_len, variant.value_dim(shape)];
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let draw = |_| f64::from(rng.random_range(-1.0f32..1.0));
        let upstream = Oracle::new(&sizes, (0..sizes.iter().product()).map(draw).collect());
        let nudged = problem.nudged();
        let got = results::<V, K>(variant, &problem, &upstream);
        let want = results::<V, Flex>(variant, &problem, &upstream);
        let near = results::<V, Flex>(variant, &nudged, &upstream);
        for (i, ((got, want), near)) in got.iter().zip(&want).zip(&near).enumerate() {
            let scale = want.iter().fold(1e-3f64, |a, x| a.max(x.abs()));
            let allowed = (2e-5 * scale).max(4.0 * largest_difference(near, want));
            let off = largest_difference(got, want);
            record(off / scale);
            assert!(
                off <= allowed,
                "{variant:?}, documents at {starts:?}, result {i} (output, then gradients): off by \
                 {off:.2e}, allowed {allowed:.2e}, largest value {scale:.2e}"
            );
        }
    }
}

/// The output, then every input's gradient.
fn results<V: Conformance, K: OpBackend>(
    variant: &V,
    problem: &Problem,
    upstream: &Oracle,
) -> Vec<Vec<f64>> {
    let mut results = vec![problem.attend::<V, K>(variant)];
    results.extend(gradients::<V, K>(variant, problem, upstream));
    results
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// The test modules of a registered variant, on the CPU and on CUDA.
macro_rules! suite {
    ($module:ident) => {
        mod $module {
            type V = crate::attention::$module::Config;
            crate::attention::conformance::suite!(
                V:
                agrees_with_the_oracle
                gradients_agree_with_the_oracle
                windows_agree_with_the_oracle
                documents_do_not_see_each_other
                is_causal
                decoding_equals_the_full_pass
                the_state_is_as_large_as_documented
                is_deterministic
                a_nan_shows
            );
        }
    };
    ($v:ident: $($test:ident)+) => {
        $(
            #[test]
            fn $test() {
                crate::attention::conformance::$test::<$v, crate::Cpu>();
            }
        )+

        mod cuda {
            $(
                #[test]
                #[ignore = "needs a GPU"]
                fn $test() {
                    crate::attention::conformance::$test::<super::$v, crate::Cuda>();
                }
            )+

            #[test]
            #[ignore = "needs a GPU"]
            fn agrees_with_the_cpu_at_a_models_size() {
                crate::attention::conformance::agrees_with_the_cpu_at_a_models_size::<
                    super::$v,
                    crate::Cuda,
                >();
            }
        }
    };
}
pub(crate) use suite;

/// q or k by the definition of rotary positions, for oracles: half-split pairs among the first
/// `dims` channels.
pub fn rotated(x: &Oracle, theta: f64, dims: usize) -> Oracle {
    let half = dims / 2;
    Oracle::from_fn(&x.shape, |at| {
        let [b, h, t, n] = at[..] else { panic!("q and k have 4 dimensions") };
        if n >= dims {
            return x.at(at);
        }
        let pair = n % half;
        let angle = t as f64 * theta.powf(-2.0 * pair as f64 / dims as f64);
        let (first, second) = (x.at(&[b, h, t, pair]), x.at(&[b, h, t, pair + half]));
        if n < half {
            first * angle.cos() - second * angle.sin()
        } else {
            second * angle.cos() + first * angle.sin()
        }
    })
}

/// Softmax attention by its definition, for oracles: `score(b, h, i, j)` over the visible keys.
pub fn softmax_oracle(
    shape: &AttentionShape,
    [q, v]: [&Oracle; 2],
    sinks: Option<&Oracle>,
    documents: &[Vec<usize>],
    score: impl Fn(usize, usize, usize, usize) -> f64,
) -> Oracle {
    let group = shape.heads / shape.kv_heads;
    let mut out = Oracle::from_fn(&q.shape, |_| 0.0);
    let [batch, heads, seq_len, head_dim] = q.shape[..] else { panic!("q has 4 dimensions") };
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..seq_len {
                let window = shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let keys = documents[b][i].max(window)..i + 1;
                let scores: Vec<f64> = keys.clone().map(|j| score(b, h, i, j)).collect();
                let sink = sinks.map(|sinks| sinks.data[h]);
                let all = || scores.iter().copied().chain(sink);
                let max = all().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = all().map(|s| (s - max).exp()).sum();
                for n in 0..head_dim {
                    let value = |j: usize| v.at(&[b, h / group, j, n]);
                    let sum: f64 = scores
                        .iter()
                        .zip(keys.clone())
                        .map(|(s, j)| (s - max).exp() * value(j))
                        .sum();
                    out.data[((b * heads + h) * seq_len + i) * head_dim + n] = sum / total;
                }
            }
        }
    }
    out
}
