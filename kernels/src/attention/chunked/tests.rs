//! The core against recurrences in f64: output and every gradient, at lengths around chunks, with extreme decays,
//! repeated keys and weights up to 2.

use burn::tensor::{DType, FloatDType, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Grads, Update, backward, forward};
use crate::Cuda;
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, contiguous};
use crate::testing::{record, root_mean_square};

/// Rows of a problem.
const ROWS: usize = 2;

/// One problem; q, k, v and the upstream gradient are numbers of bf16.
struct Sample {
    what: &'static str,
    update: Update,
    /// `[group, seq_len, head_dim, value_dim]`
    sizes: [usize; 4],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    upstream: Vec<f32>,
    log_decay: Vec<f32>,
    beta: Option<Vec<f32>>,
}

/// The output, and the gradients of q, k, v, the log decays and β.
type Results = Vec<Vec<f64>>;

const NAMES: [&str; 6] = ["y", "gradient of q", "of k", "of v", "of the log decays", "of beta"];

/// `x`, `[batch, heads, tokens, channels]`, on the GPU in the memory order `[batch, tokens, heads, channels]`.
pub(super) fn by_token(x: &[f32], shape: [usize; 4], dtype: DType) -> CudaTensor {
    let x = Tensor::<Cuda, 4>::from_data(TensorData::new(x.to_vec(), shape), &Default::default());
    let x = if dtype == DType::BF16 { x.cast(FloatDType::BF16) } else { x };
    let mut x = contiguous(&primitive(x.swap_dims(1, 2)));
    x.meta.swap(1, 2);
    x
}

impl Sample {
    /// Unit keys and queries, random decays; β from 0 to 1 under the delta rule.
    fn new(what: &'static str, update: Update, sizes: [usize; 4]) -> Self {
        let [group, len, d, values] = sizes;
        let mut rng = ChaCha8Rng::seed_from_u64(len as u64);
        let mut vectors = |count: usize, channels: usize, unit: bool| -> Vec<f32> {
            let rows = (0..count).flat_map(|_| {
                let x: Vec<f32> = (0..channels).map(|_| rng.random_range(-1.7f32..1.7)).collect();
                let norm = if unit { x.iter().map(|x| x * x).sum::<f32>().sqrt() } else { 1.0 };
                x.into_iter().map(move |x| bf16::from_f32(x / norm).to_f32())
            });
            rows.collect()
        };
        let (q, k) = (vectors(ROWS * group * len, d, true), vectors(ROWS * len, d, true));
        let (v, upstream) =
            (vectors(ROWS * len, values, false), vectors(ROWS * group * len, values, false));
        let log_decay = (0..ROWS * len).map(|_| -rng.random_range(0.0f32..1.0).powi(4)).collect();
        let beta = (0..ROWS * len).map(|_| rng.random_range(0.0f32..1.0)).collect();
        let beta = (update == Update::Delta).then_some(beta);
        Sample { what, update, sizes, q, k, v, upstream, log_decay, beta }
    }

    /// With the decay of each token.
    fn decays(mut self, of: impl Fn(usize) -> f32) -> Self {
        let len = self.sizes[1];
        self.log_decay.iter_mut().enumerate().for_each(|(at, x)| *x = of(at % len));
        self
    }

    /// With the weight of each token.
    fn weights(mut self, of: impl Fn(usize) -> f32) -> Self {
        self.beta = Some((0..ROWS * self.sizes[1]).map(|at| of(at % self.sizes[1])).collect());
        self
    }

    /// With the key of the token before in all tokens but each `every`-th.
    fn repeated_keys(mut self, every: usize) -> Self {
        let [_, len, d, _] = self.sizes;
        for t in (0..ROWS * len).filter(|t| t % len % every != 0) {
            self.k.copy_within((t - 1) * d..t * d, t * d);
        }
        self
    }

    fn by_kernels(&self) -> Results {
        let [group, len, d, values] = self.sizes;
        // Rows are heads of one sequence, or sequences of one head.
        let batch = 1 + len % ROWS;
        let of = |x: &[f32], heads: usize, channels: usize, dtype| {
            by_token(x, [batch, heads / batch, len, channels], dtype)
        };
        let q = of(&self.q, ROWS * group, d, DType::BF16);
        let k = of(&self.k, ROWS, d, DType::BF16);
        let v = of(&self.v, ROWS, values, DType::BF16);
        let log_decay = of(&self.log_decay, ROWS, 1, DType::F32);
        let upstream = of(&self.upstream, ROWS * group, values, DType::BF16);
        let beta = self.beta.as_ref().map(|beta| of(beta, ROWS, 1, DType::F32));
        let inputs = [&q, &k, &v, &log_decay];
        let done = forward(self.update, inputs, beta.as_ref(), DType::BF16, true)
            .expect("the core serves this");
        let y = done.output;
        let Grads { q, k, v, beta, log_decay } = backward(self.update, &done.saved, &upstream);
        let values_of = |x: CudaTensor| -> Vec<f64> {
            let elements = x.meta.shape().num_elements();
            let x = crate::cuda::reshaped(&x, &[elements]);
            tensor::<Cuda, 1>(x).into_data().iter::<f64>().collect()
        };
        [Some(y), Some(q), Some(k), Some(v), Some(log_decay), beta]
            .into_iter()
            .flatten()
            .map(values_of)
            .collect()
    }

    /// One token after the other, and back.
    fn expected(&self) -> Results {
        let [group, len, d, values] = self.sizes;
        let counts = [group * len * values, group * len * d, len * d, len * values, len, len];
        let mut all: Results = counts.iter().map(|n| vec![0.0; ROWS * n]).collect();
        let f = |x: &[f32], at: usize| f64::from(x[at]);
        for row in 0..ROWS {
            let token = |t: usize| row * len + t;
            let query = |g: usize, t: usize| (row * group + g) * len + t;
            let beta = |t: usize| self.beta.as_ref().map_or(1.0, |beta| f(beta, token(t)));
            let key = |t: usize, n: usize| f(&self.k, token(t) * d + n);
            let cell = |n: usize, m: usize| n * values + m;
            // The decayed states before the tokens, and e.
            let mut decayed: Vec<Vec<f64>> = vec![];
            let mut corrected: Vec<Vec<f64>> = vec![];
            let mut state = vec![0.0; d * values];
            for t in 0..len {
                let decay = f(&self.log_decay, token(t)).exp();
                state.iter_mut().for_each(|s| *s *= decay);
                decayed.push(state.clone());
                let held = |m: usize| match self.update {
                    Update::Additive => 0.0,
                    Update::Delta => (0..d).map(|n| key(t, n) * state[cell(n, m)]).sum(),
                };
                let e: Vec<f64> =
                    (0..values).map(|m| f(&self.v, token(t) * values + m) - held(m)).collect();
                for (n, m) in (0..d).flat_map(|n| (0..values).map(move |m| (n, m))) {
                    state[cell(n, m)] += key(t, n) * beta(t) * e[m];
                    for g in 0..group {
                        all[0][query(g, t) * values + m] +=
                            f(&self.q, query(g, t) * d + n) * state[cell(n, m)];
                    }
                }
                corrected.push(e);
            }
            let mut d_state = vec![0.0; d * values];
            for t in (0..len).rev() {
                let (before, e) = (&decayed[t], &corrected[t]);
                for (n, m) in (0..d).flat_map(|n| (0..values).map(move |m| (n, m))) {
                    let after = before[cell(n, m)] + key(t, n) * beta(t) * e[m];
                    for g in 0..group {
                        let d_o = f(&self.upstream, query(g, t) * values + m);
                        all[1][query(g, t) * d + n] += after * d_o;
                        d_state[cell(n, m)] += f(&self.q, query(g, t) * d + n) * d_o;
                    }
                }
                for m in 0..values {
                    let d_w: f64 = (0..d).map(|n| key(t, n) * d_state[cell(n, m)]).sum();
                    all[5][token(t)] += d_w * e[m];
                    all[3][token(t) * values + m] = beta(t) * d_w;
                    for n in 0..d {
                        all[2][token(t) * d + n] += d_state[cell(n, m)] * beta(t) * e[m];
                        if self.update == Update::Delta {
                            all[2][token(t) * d + n] -= before[cell(n, m)] * beta(t) * d_w;
                            d_state[cell(n, m)] -= key(t, n) * beta(t) * d_w;
                        }
                    }
                }
                let products = d_state.iter().zip(before).map(|(a, b)| a * b);
                all[4][token(t)] = products.sum();
                let decay = f(&self.log_decay, token(t)).exp();
                d_state.iter_mut().for_each(|s| *s *= decay);
            }
        }
        all.truncate(if self.beta.is_some() { 6 } else { 5 });
        all
    }

    /// The root mean square of each result's errors may be `allowed` times its own; two runs give equal bits.
    fn check(&self, allowed: f64) {
        let (got, want) = (self.by_kernels(), self.expected());
        assert_eq!(got.len(), want.len());
        for ((name, got), want) in NAMES.iter().zip(&got).zip(&want) {
            let errors: Vec<f64> = got.iter().zip(want).map(|(got, want)| got - want).collect();
            let error = root_mean_square(&errors) / root_mean_square(want).max(1e-3);
            record(error);
            let what = format!("{}, {:?}, {:?}", self.what, self.update, self.sizes);
            assert!(error <= allowed, "{what}, {name}: off by {error:.2e} of its root mean square");
        }
        assert!(got == self.by_kernels(), "{}, {:?}: two runs differ", self.what, self.sizes);
    }
}

const UPDATES: [Update; 2] = [Update::Additive, Update::Delta];

#[test]
#[ignore = "needs a GPU"]
fn outputs_and_gradients_agree_with_recurrences() {
    for update in UPDATES {
        for len in [1, 17, 64, 65, 200] {
            Sample::new("64 channels", update, [1, len, 64, 64]).check(0.006);
        }
        Sample::new("groups", update, [3, 130, 64, 32]).check(0.006);
        Sample::new("128 channels", update, [1, 130, 128, 128]).check(0.006);
        Sample::new("wide values", update, [2, 70, 128, 256]).check(0.006);
        Sample::new("odd sizes", update, [1, 100, 48, 80]).check(0.006);
        Sample::new("few channels", update, [2, 150, 16, 16]).check(0.006);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn extreme_decays_agree_with_recurrences() {
    for update in UPDATES {
        let sample = || Sample::new("decays", update, [1, 200, 64, 64]);
        Sample { what: "no decay", ..sample().decays(|_| 0.0) }.check(0.006);
        Sample { what: "strongest decay", ..sample().decays(|_| -1e5) }.check(0.006);
        let mixed = sample().decays(|t| [-1e5, -1e-3, 0.0, -30.0, -0.1][t * 7 % 5]);
        Sample { what: "mixed decays", ..mixed }.check(0.006);
        let reset =
            sample().decays(|t| if [0, 3, 70, 127, 128].contains(&t) { -1e5 } else { -1e-3 });
        Sample { what: "documents", ..reset }.check(0.006);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn weights_and_repeated_keys_agree_with_recurrences() {
    let sample = |update| Sample::new("weights", update, [1, 200, 64, 64]);
    let some_zero = |t: usize| [0.0, 1.0, 0.3][t % 3];
    Sample { what: "additive weights", ..sample(Update::Additive).weights(some_zero) }.check(0.006);
    let delta = || sample(Update::Delta);
    Sample { what: "some weights 0", ..delta().weights(some_zero) }.check(0.006);
    Sample { what: "replaced", ..delta().repeated_keys(5).weights(|_| 1.0) }.check(0.01);
    let reflected = delta().repeated_keys(5).weights(|t| [2.0, 1.9][t % 2]);
    Sample { what: "reflected", ..reflected }.check(0.01);
}
