//! The delta rule against its definition in f64: at length, with extreme decays and β, with repeated keys.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Decays, DeltaInputs, DeltaRule};
use crate::attention::recurrent::State;
use crate::attention::{AttentionShape, ExecPath};
use crate::backend::with_reference;
use crate::testing::Tensor64;

/// The inputs of a definition: q, k, v of a layer, `beta(b, t, kv_head)` and `decay(b, t, kv_head, channel)`.
pub struct Definition<'a> {
    pub shape: &'a AttentionShape,
    pub qkv: [&'a Tensor64; 3],
    pub beta: &'a dyn Fn(usize, usize, usize) -> f64,
    pub decay: &'a dyn Fn(usize, usize, usize, usize) -> f64,
    pub documents: &'a [Vec<usize>],
}

impl Definition<'_> {
    /// S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ, one step at a time. The output of query head h at
    /// token t of sequence b is `finish(b, t, h, y)`.
    pub fn outputs(&self, finish: impl Fn(usize, usize, usize, Vec<f64>) -> Vec<f64>) -> Tensor64 {
        let [q, k, v] = self.qkv;
        let [batch, kv_heads, seq_len, values] = v.shape[..] else { panic!("4 dimensions") };
        let (d, heads, group) = (self.shape.head_dim, self.shape.heads, self.shape.group());
        let serves = kv_heads / k.shape[1];
        let unit = |x: &Tensor64, b, h, t| {
            let x: Vec<f64> = (0..d).map(|n| x.at(&[b, h, t, n])).collect();
            let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| x / norm).collect::<Vec<_>>()
        };
        let mut out = Tensor64::from_fn(&[batch, heads, seq_len, values], |_| 0.0);
        for (b, kv) in (0..batch).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))) {
            let mut state = vec![vec![0.0; values]; d];
            for t in 0..seq_len {
                if self.documents[b][t] == t {
                    state = vec![vec![0.0; values]; d];
                }
                let key = unit(k, b, kv / serves, t);
                let beta = (self.beta)(b, t, kv);
                for (n, row) in state.iter_mut().enumerate() {
                    row.iter_mut().for_each(|s| *s *= (self.decay)(b, t, kv, n));
                }
                for m in 0..values {
                    let held: f64 = (0..d).map(|n| key[n] * state[n][m]).sum();
                    for n in 0..d {
                        state[n][m] += beta * key[n] * (v.at(&[b, kv, t, m]) - held);
                    }
                }
                for g in 0..group {
                    let query = unit(q, b, kv / serves * group + g, t);
                    let y = |m: usize| (0..d).map(|n| query[n] * state[n][m]).sum::<f64>();
                    let y = (0..values).map(|m| y(m) / (d as f64).sqrt()).collect();
                    let h = kv * group + g;
                    let at = ((b * heads + h) * seq_len + t) * values;
                    out.data[at..at + values].copy_from_slice(&finish(b, t, h, y));
                }
            }
        }
        out
    }
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + eˣ).
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// y / √(mean(y²) + 10⁻⁵) ⊙ scale.
pub fn rms_norm(y: &[f64], scale: impl Fn(usize) -> f64) -> Vec<f64> {
    let square = y.iter().map(|y| y * y).sum::<f64>() / y.len() as f64;
    y.iter().enumerate().map(|(m, y)| y / (square + 1e-5).sqrt() * scale(m)).collect()
}

/// Gives some tokens the extremes of a gate, by their logits `[batch, seq_len, features]`: closed and open, exactly
/// 0 and 1 in f32, for tokens whose index leaves the remainders `closed` and `open` modulo `every`.
pub fn with_extremes(logits: &mut Tensor64, every: usize, [closed, open]: [(usize, f64); 2]) {
    let [_, seq_len, features] = logits.shape[..] else { panic!("3 dimensions") };
    for (at, x) in logits.data.iter_mut().enumerate() {
        let t = at / features % seq_len;
        for (remainder, value) in [closed, open] {
            if t % every == remainder {
                *x = value;
            }
        }
    }
}

/// Gives every fourth token the key of the token before it.
pub fn with_repeated_keys(k: &mut Tensor64) {
    let [_, _, seq_len, d] = k.shape[..] else { panic!("4 dimensions") };
    for at in d..k.data.len() {
        let t = at / d % seq_len;
        if t % 4 == 1 {
            k.data[at] = k.data[at - d];
        }
    }
}

type Ad = Autodiff<Flex>;

/// Beyond many chunks.
const SEQ_LEN: usize = 20_000;
const D: usize = 4;
const ROWS: usize = 6;

/// q, k, v, β, log decays and the upstream gradient, each `[ROWS, SEQ_LEN, D]`; β has its value in each channel.
fn long_rows() -> [Vec<f32>; 6] {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let n = ROWS * SEQ_LEN * D;
    let mut random = || (0..n).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    let [q, mut k, v, upstream] = [random(), random(), random(), random()];
    for (token, k) in k.chunks_exact_mut(D).enumerate() {
        // The same key in every token of the rows 2, 3 and 5.
        if [2, 3, 5].contains(&(token / SEQ_LEN)) {
            k.copy_from_slice(&[0.3, -0.5, 0.7, 0.1]);
        }
        let norm = k.iter().map(|k| k * k).sum::<f32>().sqrt();
        k.iter_mut().for_each(|k| *k /= norm);
    }
    let mut beta = vec![0.0; n];
    for (token, beta) in beta.chunks_exact_mut(D).enumerate() {
        beta.fill(match token / SEQ_LEN {
            1 => [0.0, 1.0, 2.0][token * 7 % 5 % 3],
            // With 2 the state would change sign at each token, undamped, and rounding would add up.
            2 => 1.9,
            3 | 5 => 1.0,
            _ => rng.random_range(0.0..2.0),
        });
    }
    let log_decay = (0..n).map(|at| match (at / D / SEQ_LEN, at / D % SEQ_LEN) {
        (0, _) => -30.0,
        (3, t) => [-30.0, -1e-4][(t + at % D) % 2],
        (4, _) => {
            [-1e5, -0.7, -1e-4, 0.0][if rng.random_bool(0.95) { 3 } else { rng.random_range(0..4) }]
        }
        _ => 0.0,
    });
    let log_decay = log_decay.collect();
    [q, k, v, beta, log_decay, upstream]
}

/// y and the gradients of q, k, v, β (the sum over channels) and the log decays.
fn run([q, k, v, beta, log_decay, upstream]: &[Vec<f32>; 6], chunk: usize) -> [Vec<f64>; 6] {
    let tensor = |x: &Vec<f32>| {
        let data = TensorData::new(x.clone(), [ROWS, SEQ_LEN, D]);
        Tensor::<Ad, 3>::from_data(data, &Default::default())
    };
    let inputs = [q, k, v, beta, log_decay].map(|x| tensor(x).require_grad());
    let [q, k, v, beta, log_decay] = inputs.clone();
    let beta = beta.narrow(2, 0, 1);
    let [q, k, v, beta, log_decay] = [q, k, v, beta, log_decay].map(|x| x.unsqueeze_dim::<4>(1));
    let rows = DeltaInputs { q, k, v, beta, log_decay };
    let y = DeltaRule { chunk, decays: Decays::PerToken }
        .attend(rows, None, ExecPath::Reference)
        .squeeze_dim::<3>(1);
    let grads = (y.clone() * tensor(upstream)).sum().backward();
    let of = |x: Tensor<Flex, 3>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let [d_q, d_k, d_v, d_beta, d_decay] = inputs.map(|x| of(x.grad(&grads).unwrap()));
    [of(y.inner()), d_q, d_k, d_v, d_beta, d_decay]
}

type Matrix = [[f64; D]; D];

/// The recurrence and its gradients backwards through time.
fn definition(inputs: &[Vec<f32>; 6]) -> [Vec<f64>; 6] {
    let mut all: [Vec<f64>; 6] = std::array::from_fn(|_| vec![0.0; ROWS * SEQ_LEN * D]);
    for row in 0..ROWS {
        let at = |t: usize, n: usize| (row * SEQ_LEN + t) * D + n;
        let token = |x: usize, t: usize| -> [f64; D] {
            std::array::from_fn(|n| inputs[x][at(t, n)].into())
        };
        let beta = |t: usize| f64::from(inputs[3][at(t, 0)]);
        // The decayed state and what it holds for the token's key.
        let decayed = |state: &Matrix, t: usize| -> (Matrix, [f64; D]) {
            let (decay, k) = (token(4, t), token(1, t));
            let matrix: Matrix = std::array::from_fn(|n| state[n].map(|s| decay[n].exp() * s));
            let held = |m: usize| (0..D).map(|n| k[n] * matrix[n][m]).sum();
            (matrix, std::array::from_fn(held))
        };
        let mut states: Vec<Matrix> = vec![[[0.0; D]; D]];
        for t in 0..SEQ_LEN {
            let (mut state, held) = decayed(&states[t], t);
            let (q, k, v) = (token(0, t), token(1, t), token(2, t));
            for n in 0..D {
                for m in 0..D {
                    state[n][m] += beta(t) * k[n] * (v[m] - held[m]);
                    all[0][at(t, m)] += q[n] * state[n][m];
                }
            }
            states.push(state);
        }
        let mut d_state: Matrix = [[0.0; D]; D];
        for t in (0..SEQ_LEN).rev() {
            let (before, held) = decayed(&states[t], t);
            let (q, k, v, upstream) = (token(0, t), token(1, t), token(2, t), token(5, t));
            let mut d_w = [0.0; D];
            for n in 0..D {
                for m in 0..D {
                    all[1][at(t, n)] += states[t + 1][n][m] * upstream[m];
                    d_state[n][m] += q[n] * upstream[m];
                    all[2][at(t, n)] += d_state[n][m] * beta(t) * (v[m] - held[m]);
                    d_w[m] += d_state[n][m] * k[n];
                }
            }
            for m in 0..D {
                all[3][at(t, m)] = beta(t) * d_w[m];
                all[4][at(t, 0)] += d_w[m] * (v[m] - held[m]);
            }
            let decay = token(4, t);
            for n in 0..D {
                for m in 0..D {
                    let d_held = -beta(t) * d_w[m];
                    all[2][at(t, n)] += before[n][m] * d_held;
                    d_state[n][m] += k[n] * d_held;
                    all[5][at(t, n)] += d_state[n][m] * before[n][m];
                    d_state[n][m] *= decay[n].exp();
                }
            }
        }
    }
    all
}

/// The most of the largest value that rounding adds. A chunk's tokens follow from one another by sums of up to 64
/// terms, and without decay a token's rounding reaches all later ones. Step by step, f32 is off by up to 7e-6 on
/// rows like these; by chunks of 64, the reference by 3.1e-5 and the kernel by 3.5e-5.
const ROUNDING: f64 = 5e-5;

#[test]
fn outputs_and_gradients_are_exact_to_rounding_at_length() {
    let rows = long_rows();
    let want = definition(&rows);
    let results = [
        ("kernel", run(&rows, 64)),
        ("kernel, short chunks", run(&rows, 16)),
        ("reference", with_reference(|| run(&rows, 64))),
    ];
    for (what, got) in results {
        for (result, (got, want)) in got.iter().zip(&want).enumerate() {
            for row in 0..ROWS {
                let range = row * SEQ_LEN * D..(row + 1) * SEQ_LEN * D;
                let (got, want) = (&got[range.clone()], &want[range]);
                let largest = want.iter().fold(1e-6f64, |a, x| a.max(x.abs()));
                let error = got.iter().zip(want).map(|(a, b)| (a - b).abs());
                let error = error.fold(0.0, |a: f64, x| if x <= a { a } else { x });
                assert!(
                    error <= ROUNDING * largest,
                    "{what}, result {result} (y, then gradients of q, k, v, β, decay), row {row}: off \
                     by {error:.2e}, largest value {largest:.2e}"
                );
            }
        }
    }
}

fn wave<const N: usize>(shape: [usize; N], phase: f32) -> Tensor<Flex, N> {
    let n = shape.iter().product::<usize>();
    let data: Vec<f32> = (0..n).map(|at| (at as f32 * 1.37 + phase).sin()).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

/// Two rows of `seq_len` tokens with three query heads each, and log decays of so many channels.
fn waves(seq_len: usize, channels: usize) -> DeltaInputs<Flex> {
    let k = wave([2, 1, seq_len, 8], 1.0);
    let norm = (k.clone() * k.clone()).sum_dim(3).sqrt();
    DeltaInputs {
        q: wave([2, 3, seq_len, 8], 0.0),
        k: k / norm,
        v: wave([2, 1, seq_len, 5], 2.0),
        beta: wave([2, 1, seq_len, 1], 3.0) + 1.0,
        log_decay: (wave([2, 1, seq_len, 1], 4.0) - 1.0).repeat_dim(3, channels),
    }
}

fn largest_difference<const N: usize>(a: Tensor<Flex, N>, b: Tensor<Flex, N>) -> f32 {
    (a - b).abs().max().into_scalar()
}

/// A prefill with single steps gives the outputs and ends in the state of one pass.
#[test]
fn the_state_does_not_depend_on_how_tokens_arrive() {
    let rule = DeltaRule { chunk: 16, decays: Decays::PerToken };
    let (mut state, mut whole) = (State::default(), State::default());
    let want = rule.extend(waves(300, 8), &mut whole, ExecPath::Reference);
    let mut parts = vec![];
    for n in [100, 1, 1, 16, 33, 149] {
        let first = parts.iter().map(|y: &Tensor<Flex, 4>| y.dims()[2]).sum();
        let DeltaInputs { q, k, v, beta, log_decay } = waves(300, 8);
        let [q, k, v, beta, log_decay] = [q, k, v, beta, log_decay].map(|x| x.narrow(2, first, n));
        let inputs = DeltaInputs { q, k, v, beta, log_decay };
        parts.push(rule.extend(inputs, &mut state, ExecPath::Reference));
    }
    assert!(largest_difference(Tensor::cat(parts, 2), want) < 2e-6);
    assert!(largest_difference(state.s.unwrap(), whole.s.unwrap()) < 2e-6);
}

#[test]
fn a_heads_decay_equals_the_same_decay_of_every_channel() {
    let rule = DeltaRule { chunk: 16, decays: Decays::PerToken };
    for path in [ExecPath::Reference, ExecPath::Kernel(crate::device::DeviceKind::Cpu)] {
        let y = |channels| rule.attend(waves(100, channels), None, path);
        assert!(largest_difference(y(1), y(8)) < 2e-6, "{path}");
    }
}
