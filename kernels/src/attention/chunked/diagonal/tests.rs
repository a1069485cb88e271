//! The core against recurrences in f64: output and every gradient, at lengths around chunks, with extreme decays and
//! repeated keys.

use burn::tensor::{DType, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::tests::by_token;
use super::{Corrections, Diagonal, Update};
use crate::Cuda;
use crate::backend::tensor;
use crate::cuda::CudaTensor;
use crate::testing::{record, root_mean_square};

/// Rows of a problem.
const ROWS: usize = 2;

/// One problem; all but decays and weights are numbers of bf16.
struct Sample {
    what: &'static str,
    update: Update,
    /// `[group, seq_len, head_dim, value_dim]`
    sizes: [usize; 4],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    removal: Vec<f32>,
    correction: Vec<f32>,
    upstream: Vec<f32>,
    log_decay: Vec<f32>,
    beta: Vec<f32>,
}

/// The output, and the gradients of q, k, v, the log decays, and what corrects.
type Results = Vec<Vec<f64>>;

const NAMES: [&str; 7] = [
    "y",
    "gradient of q",
    "of k",
    "of v",
    "of the log decays",
    "of beta or removal keys",
    "of corrections",
];

impl Sample {
    /// Unit queries, keys and removal keys, random decays; rates of corrections and β from 0 to 1.
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
        let tokens = ROWS * len;
        let (q, k) = (vectors(ROWS * group * len, d, true), vectors(tokens, d, true));
        let (v, upstream) =
            (vectors(tokens, values, false), vectors(ROWS * group * len, values, false));
        let removal = vectors(tokens, d, true);
        let log_decay = (0..tokens * d).map(|_| -rng.random_range(0.0f32..1.0).powi(4)).collect();
        let beta = (0..tokens).map(|_| rng.random_range(0.0f32..1.0)).collect();
        let sample = Sample {
            what,
            update,
            sizes,
            q,
            k,
            v,
            removal,
            correction: vec![],
            upstream,
            log_decay,
            beta,
        };
        let rates: Vec<f32> = (0..tokens * d).map(|_| rng.random_range(0.0f32..1.0)).collect();
        sample.rates(|at| rates[at])
    }

    /// With the corrections that these rates make of the removal keys.
    fn rates(mut self, of: impl Fn(usize) -> f32) -> Self {
        let rated = self.removal.iter().enumerate();
        self.correction = rated.map(|(at, x)| bf16::from_f32(x * of(at)).to_f32()).collect();
        self
    }

    /// With the decay of each token's channels.
    fn decays(mut self, of: impl Fn(usize, usize) -> f32) -> Self {
        let [_, len, d, _] = self.sizes;
        self.log_decay.iter_mut().enumerate().for_each(|(at, x)| *x = of(at / d % len, at % d));
        self
    }

    /// With the weight of each token.
    fn weights(mut self, of: impl Fn(usize) -> f32) -> Self {
        self.beta = (0..ROWS * self.sizes[1]).map(|at| of(at % self.sizes[1])).collect();
        self
    }

    /// With the keys of the token before in all tokens but each `every`-th; removal keys are the keys.
    fn repeated_keys(mut self, every: usize) -> Self {
        let [_, len, d, _] = self.sizes;
        for t in (0..ROWS * len).filter(|t| t % len % every != 0) {
            self.k.copy_within((t - 1) * d..t * d, t * d);
        }
        self.removal = self.k.clone();
        self
    }

    /// On the GPU.
    fn call(&self) -> (Diagonal, CudaTensor) {
        let [group, len, d, values] = self.sizes;
        // Rows are heads of one sequence, or sequences of one head.
        let batch = 1 + len % ROWS;
        let of = |x: &[f32], heads: usize, channels: usize, dtype| {
            by_token(x, [batch, heads / batch, len, channels], dtype)
        };
        let vectors = |x: &[f32]| of(x, ROWS, d, DType::BF16);
        let call = Diagonal {
            q: of(&self.q, ROWS * group, d, DType::BF16),
            k: vectors(&self.k),
            v: of(&self.v, ROWS, values, DType::BF16),
            log_decay: of(&self.log_decay, ROWS, d, DType::F32),
            corrections: match self.update {
                Update::Additive => Corrections::None,
                Update::Delta => Corrections::Weights(of(&self.beta, ROWS, 1, DType::F32)),
                Update::Replace => Corrections::Vectors {
                    removal: vectors(&self.removal),
                    correction: vectors(&self.correction),
                },
            },
        };
        (call, of(&self.upstream, ROWS * group, values, DType::BF16))
    }

    fn by_kernels(&self) -> Results {
        let (call, upstream) = self.call();
        let (y, saved) = call.forward(DType::BF16);
        let Diagonal { q, k, v, log_decay, corrections } = call.backward(&saved, &upstream);
        let rest = match corrections {
            Corrections::None => vec![],
            Corrections::Weights(beta) => vec![beta],
            Corrections::Vectors { removal, correction } => vec![removal, correction],
        };
        let values_of = |x: CudaTensor| -> Vec<f64> {
            let elements = x.meta.shape().num_elements();
            let x = crate::cuda::reshaped(&x, &[elements]);
            tensor::<Cuda, 1>(x).into_data().iter::<f64>().collect()
        };
        [y, q, k, v, log_decay].into_iter().chain(rest).map(values_of).collect()
    }

    /// One token after the other, and back.
    fn expected(&self) -> Results {
        let [group, len, d, values] = self.sizes;
        let (tokens, queries) = (ROWS * len, ROWS * group * len);
        let counts = match self.update {
            Update::Additive => vec![],
            Update::Delta => vec![tokens],
            Update::Replace => vec![tokens * d; 2],
        };
        let first = [queries * values, queries * d, tokens * d, tokens * values, tokens * d];
        let mut all: Results = first.into_iter().chain(counts).map(|n| vec![0.0; n]).collect();
        let f = |x: &[f32], at: usize| f64::from(x[at]);
        let cells: Vec<(usize, usize)> =
            (0..d).flat_map(|n| (0..values).map(move |m| (n, m))).collect();
        let cell = |n: usize, m: usize| n * values + m;
        // Row vector times state.
        let read = |x: &dyn Fn(usize) -> f64, state: &[f64]| -> Vec<f64> {
            (0..values).map(|m| (0..d).map(|n| x(n) * state[cell(n, m)]).sum()).collect()
        };
        for row in 0..ROWS {
            let at = |t: usize, n: usize| (row * len + t) * d + n;
            let value = |t: usize, m: usize| (row * len + t) * values + m;
            let query = |g: usize, t: usize| (row * group + g) * len + t;
            let mut state = vec![0.0; d * values];
            // The states before the tokens, and what is read of them.
            let mut states = vec![state.clone()];
            for t in 0..len {
                let decayed: Vec<f64> = cells
                    .iter()
                    .map(|&(n, m)| state[cell(n, m)] * f(&self.log_decay, at(t, n)).exp())
                    .collect();
                let held = match self.update {
                    Update::Additive => vec![0.0; values],
                    Update::Delta => read(&|n| f(&self.k, at(t, n)), &decayed),
                    Update::Replace => read(&|n| f(&self.removal, at(t, n)), &state),
                };
                for &(n, m) in &cells {
                    let (key, v) = (f(&self.k, at(t, n)), f(&self.v, value(t, m)));
                    state[cell(n, m)] = decayed[cell(n, m)]
                        + match self.update {
                            Update::Additive => key * v,
                            Update::Delta => key * f(&self.beta, row * len + t) * (v - held[m]),
                            Update::Replace => key * v - f(&self.correction, at(t, n)) * held[m],
                        };
                }
                for g in 0..group {
                    let y = read(&|n| f(&self.q, query(g, t) * d + n), &state);
                    all[0][query(g, t) * values..][..values].copy_from_slice(&y);
                }
                states.push(state.clone());
            }
            let mut d_state = vec![0.0; d * values];
            for t in (0..len).rev() {
                let (before, after) = (&states[t], &states[t + 1]);
                for g in 0..group {
                    for &(n, m) in &cells {
                        let d_o = f(&self.upstream, query(g, t) * values + m);
                        all[1][query(g, t) * d + n] += after[cell(n, m)] * d_o;
                        d_state[cell(n, m)] += f(&self.q, query(g, t) * d + n) * d_o;
                    }
                }
                let decay = |n: usize| f(&self.log_decay, at(t, n)).exp();
                let of_key = read(&|n| f(&self.k, at(t, n)), &d_state);
                match self.update {
                    Update::Additive => {
                        for &(n, m) in &cells {
                            all[2][at(t, n)] += d_state[cell(n, m)] * f(&self.v, value(t, m));
                            all[3][value(t, m)] = of_key[m];
                        }
                    }
                    Update::Delta => {
                        let decayed = |n: usize, m: usize| before[cell(n, m)] * decay(n);
                        let beta = f(&self.beta, row * len + t);
                        for m in 0..values {
                            let held: f64 =
                                (0..d).map(|n| f(&self.k, at(t, n)) * decayed(n, m)).sum();
                            let e = f(&self.v, value(t, m)) - held;
                            let d_e = beta * of_key[m];
                            all[5][row * len + t] += of_key[m] * e;
                            all[3][value(t, m)] = d_e;
                            for n in 0..d {
                                all[2][at(t, n)] +=
                                    d_state[cell(n, m)] * beta * e - decayed(n, m) * d_e;
                                d_state[cell(n, m)] -= f(&self.k, at(t, n)) * d_e;
                            }
                        }
                    }
                    Update::Replace => {
                        let u = read(&|n| f(&self.removal, at(t, n)), before);
                        let d_u = read(&|n| -f(&self.correction, at(t, n)), &d_state);
                        for &(n, m) in &cells {
                            all[2][at(t, n)] += d_state[cell(n, m)] * f(&self.v, value(t, m));
                            all[3][value(t, m)] = of_key[m];
                            all[5][at(t, n)] += before[cell(n, m)] * d_u[m];
                            all[6][at(t, n)] -= d_state[cell(n, m)] * u[m];
                        }
                        for &(n, m) in &cells {
                            all[4][at(t, n)] += decay(n) * d_state[cell(n, m)] * before[cell(n, m)];
                            d_state[cell(n, m)] = decay(n) * d_state[cell(n, m)]
                                + f(&self.removal, at(t, n)) * d_u[m];
                        }
                        continue;
                    }
                }
                for &(n, m) in &cells {
                    all[4][at(t, n)] += decay(n) * d_state[cell(n, m)] * before[cell(n, m)];
                    d_state[cell(n, m)] *= decay(n);
                }
            }
        }
        all
    }

    /// The root mean square of each result's errors may be `allowed` times its own; two runs give equal bits.
    fn check(&self, allowed: f64) {
        let (got, want) = (self.by_kernels(), self.expected());
        assert_eq!(got.len(), want.len());
        let what = format!("{}, {:?}, {:?}", self.what, self.update, self.sizes);
        let mut failed = vec![];
        for ((name, got), want) in NAMES.iter().zip(&got).zip(&want) {
            let errors: Vec<f64> = got.iter().zip(want).map(|(got, want)| got - want).collect();
            let error = root_mean_square(&errors) / root_mean_square(want).max(1e-3);
            record(error);
            if error.is_nan() || error > allowed {
                failed.push(format!("{name} is off by {error:.2e}"));
            }
        }
        assert!(failed.is_empty(), "{what}, of its root mean square: {failed:?}");
        assert!(got == self.by_kernels(), "{what}: two runs differ");
    }
}

/// Lengths around chunks, grouped heads, head dims up to the widest.
fn check_sizes(update: Update) {
    for len in [1, 17, 64, 65, 200] {
        Sample::new("64 channels", update, [1, len, 64, 64]).check(0.006);
    }
    Sample::new("groups", update, [3, 130, 64, 32]).check(0.006);
    Sample::new("128 channels", update, [1, 130, 128, 128]).check(0.006);
    Sample::new("wide values", update, [2, 70, 128, 256]).check(0.006);
    Sample::new("odd sizes", update, [1, 100, 48, 80]).check(0.006);
    Sample::new("few channels", update, [2, 150, 16, 16]).check(0.006);
}

#[test]
#[ignore = "needs a GPU"]
fn additive_updates_agree_with_recurrences() {
    check_sizes(Update::Additive);
}

#[test]
#[ignore = "needs a GPU"]
fn the_delta_rule_agrees_with_recurrences() {
    check_sizes(Update::Delta);
}

#[test]
#[ignore = "needs a GPU"]
fn replacement_agrees_with_recurrences() {
    check_sizes(Update::Replace);
}

#[test]
#[ignore = "needs a GPU"]
fn extreme_decays_agree_with_recurrences() {
    for update in [Update::Additive, Update::Delta, Update::Replace] {
        let sample = || Sample::new("decays", update, [1, 200, 64, 64]);
        Sample { what: "no decay", ..sample().decays(|_, _| 0.0) }.check(0.006);
        Sample { what: "strongest decay", ..sample().decays(|_, _| -1e5) }.check(0.006);
        let mixed = sample().decays(|t, n| [-1e5, -1e-3, 0.0, -30.0, -0.1][(t * 7 + n * 3) % 5]);
        Sample { what: "mixed decays", ..mixed }.check(0.006);
        let reset =
            sample().decays(|t, _| if [0, 3, 70, 127, 128].contains(&t) { -1e5 } else { -1e-3 });
        Sample { what: "documents", ..reset }.check(0.006);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn repeated_keys_agree_with_recurrences() {
    let delta = || Sample::new("weights", Update::Delta, [1, 200, 64, 64]);
    let some_zero = delta().weights(|t| [0.0, 1.0, 0.3][t % 3]);
    Sample { what: "some weights 0", ..some_zero }.check(0.006);
    Sample { what: "replaced", ..delta().repeated_keys(5).weights(|_| 1.0) }.check(0.01);
    let reflected = delta().repeated_keys(5).weights(|t| [2.0, 1.9][t % 2]);
    Sample { what: "reflected", ..reflected }.check(0.01);
    let replace = || Sample::new("removal", Update::Replace, [1, 200, 64, 64]).repeated_keys(5);
    Sample { what: "replaced", ..replace().rates(|_| 1.0) }.check(0.01);
    Sample { what: "nothing removed", ..replace().rates(|_| 0.0) }.check(0.006);
}
