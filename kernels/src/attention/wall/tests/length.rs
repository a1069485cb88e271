//! Numerics of long rows with adversarial gates: of 65,536 tokens, and of 3,000 where the whole operation runs
//! on the CPU.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Tensor, TensorData};

use super::{random, values};
use crate::attention::conformance::{Decay, holds_at_length};
use crate::attention::wall::past::PastTokens;
use crate::attention::wall::piece::GatedQkv;
use crate::attention::wall::reference::{TRAIN_CHUNK, attend_next, keys, rows};
use crate::attention::wall::{Config, LARGEST_G_MAX, decode};
use crate::attention::{AttentionShape, DecodeState, Inputs, dispatch};
use crate::backend::OpBackend;
use crate::{Cpu, Cuda};

const SEQ_LEN: usize = 1 << 16;
const DIM: usize = 4;
const G_MAX: f32 = LARGEST_G_MAX;

type Ad = Autodiff<Flex>;

/// The gate of token t in channel n.
type GateFn = fn(usize, usize) -> f32;

/// Decay at the clamp, none, both alternating, weak decay after strong, and different speeds in one
/// row: at the clamp, e^−11 over the row, e^−1 over the row, alternating.
const GATES: [GateFn; 5] = [
    |_, _| -G_MAX,
    |_, _| 0.0,
    |t, n| if (t + n) % 2 == 0 { -G_MAX } else { 0.0 },
    |t, _| if t < SEQ_LEN - 3000 { -G_MAX } else { -1e-4 },
    |t, n| [-G_MAX, -1.7e-4, -1.6e-5, if t % 1000 == 0 { -G_MAX } else { -1e-5 }][n],
];

fn shape() -> AttentionShape {
    AttentionShape::new(DIM, 1, 1, DIM)
}

fn gates<B: OpBackend>(gate: GateFn) -> Tensor<B, 4> {
    let data: Vec<f32> = (0..SEQ_LEN * DIM).map(|at| gate(at / DIM, at % DIM)).collect();
    Tensor::from_data(TensorData::new(data, [1, 1, SEQ_LEN, DIM]), &Default::default())
}

fn inputs<B: OpBackend>() -> [Tensor<B, 4>; 3] {
    [1, 2, 3].map(|seed| random([1, 1, SEQ_LEN, DIM], seed))
}

/// Row i of q, k, v and g in f64, `[t][n]`.
struct RowOracle {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
}

impl RowOracle {
    fn new(gate: GateFn) -> Self {
        let [q, k, v] = inputs::<Flex>().map(values);
        RowOracle { q, k, v, g: values(gates::<Flex>(gate)) }
    }

    /// The output of row i: the decay of each channel is the running sum of g from i backwards.
    fn output(&self, i: usize) -> [f64; DIM] {
        let mut decay = [0.0f64; DIM];
        let mut scores = vec![0.0f64; i + 1];
        for j in (0..=i).rev() {
            for n in 0..DIM {
                let (q, k) = (self.q[i * DIM + n], self.k[j * DIM + n]);
                scores[j] += decay[n].exp() * q * k / (DIM as f64).sqrt();
                decay[n] += self.g[j * DIM + n];
            }
        }
        let total: f64 = scores.iter().map(|s| s.exp()).sum();
        std::array::from_fn(|n| {
            let weighted = scores.iter().enumerate().map(|(j, s)| s.exp() * self.v[j * DIM + n]);
            weighted.sum::<f64>() / total
        })
    }
}

/// The piece of `n` rows from `first` on, and the past before it.
fn problem<B: OpBackend>(
    [q, k, v, g]: [Tensor<B, 4>; 4],
    first: usize,
    n: usize,
    chunk: usize,
) -> (PastTokens<B>, GatedQkv<B>) {
    let all = rows(&shape(), q, keys(&shape(), [k, v, g], None), None);
    let mut past = PastTokens::new(chunk, None);
    if first > 0 {
        past.push(all.keys.cut(0, first));
    }
    (past, all.cut(first, n))
}

/// Rows across the sequence, in pieces that end inside and at the end of chunks, for training and for
/// decoding.
#[test]
fn outputs_hold_at_length() {
    for (case, gate) in GATES.into_iter().enumerate() {
        let exact = RowOracle::new(gate);
        let [q, k, v] = inputs::<Flex>();
        let g = gates::<Flex>(gate);
        for chunk in [TRAIN_CHUNK, decode::DECODE_CHUNK] {
            for (first, n) in [(0, chunk), (4000, 1), (30_000, 16), (SEQ_LEN - chunk, chunk)] {
                let tensors = [q.clone(), k.clone(), v.clone(), g.clone()];
                let (past, piece) = problem(tensors, first, n, chunk);
                let got = values(attend_next(&shape(), &past, &piece, None));
                for row in (0..n).step_by(51).chain([n - 1]) {
                    let want = exact.output(first + row);
                    for n in 0..DIM {
                        let got = got[row * DIM + n];
                        assert!(
                            (got - want[n]).abs() < 1e-5,
                            "gates {case}, row {}: {got} where {} is right",
                            first + row,
                            want[n]
                        );
                    }
                }
            }
        }
    }
}

/// With the largest decay.
fn fastest() -> Config {
    Config { g_max: G_MAX, ..Config::default() }
}

const OF_CHANNELS: Decay = Decay::Channels { g_max: G_MAX as f64 };

#[test]
fn holds_at_length_on_the_cpu() {
    holds_at_length::<Config, Cpu>(&fastest(), OF_CHANNELS, DType::F32, 3000);
}

const OF_CHANNELS_AND_HEADS: Decay = Decay::Both { g_max: G_MAX as f64 };

#[test]
fn holds_at_length_with_a_forget_gate_on_the_cpu() {
    let config = Config { forget_gate: true, ..fastest() };
    holds_at_length::<Config, Cpu>(&config, OF_CHANNELS_AND_HEADS, DType::F32, 3000);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_holds_at_length_with_a_forget_gate() {
    let config = Config { forget_gate: true, ..fastest() };
    holds_at_length::<Config, Cuda>(&config, OF_CHANNELS_AND_HEADS, DType::BF16, SEQ_LEN);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_holds_at_length() {
    for prune in [false, true] {
        let config = Config { prune, ..fastest() };
        holds_at_length::<Config, Cuda>(&config, OF_CHANNELS, DType::BF16, SEQ_LEN);
    }
}

/// A test that only the exact decay passes: one key stands out, and the output is its weight.
#[test]
fn a_far_key_keeps_its_digits() {
    // Channel 0 decays by e^−1 over the sequence in steps of 1.5e-5, which a plain prefix sum in
    // f32 gets wrong in the third digit.
    let gate: GateFn = |_, _| -1.6e-5;
    let device = Default::default();
    let one = |at: usize| {
        let mut data = vec![0.0f32; SEQ_LEN * DIM];
        data[at * DIM] = 1.0;
        TensorData::new(data, [1, 1, SEQ_LEN, DIM])
    };
    let k = Tensor::<Flex, 4>::from_data(one(0), &device) * 30.0;
    let v = Tensor::<Flex, 4>::from_data(one(0), &device);
    let q = Tensor::ones([1, 1, SEQ_LEN, DIM], &device);
    for chunk in [TRAIN_CHUNK, decode::DECODE_CHUNK] {
        let tensors = [q.clone(), k.clone(), v.clone(), gates(gate)];
        let (past, piece) = problem(tensors, SEQ_LEN - 1, 1, chunk);
        let got = values(attend_next(&shape(), &past, &piece, None))[0];
        let g = f64::from(-1.6e-5f32) * (SEQ_LEN - 1) as f64;
        let weight = (g.exp() * 30.0 / (DIM as f64).sqrt()).exp();
        let want = weight / (weight + (SEQ_LEN - 1) as f64);
        assert!((got / want - 1.0).abs() < 2e-4, "{got} where {want} is right");
    }
}

/// Gradients of the last rows with respect to everything, near and far, against central
/// differences in f64; finite everywhere.
#[test]
fn gradients_hold_at_length() {
    let n = 4;
    let first = SEQ_LEN - n;
    for (case, gate) in GATES.into_iter().enumerate() {
        let [q, k, v] = inputs::<Ad>().map(Tensor::require_grad);
        let g = gates::<Ad>(gate).require_grad();
        let tensors = [&q, &k, &v, &g].map(Tensor::clone);
        let (past, piece) = problem(tensors, first, n, TRAIN_CHUNK);
        let grads = attend_next(&shape(), &past, &piece, None).sum().backward();
        let grads = [&q, &k, &v, &g].map(|x| values(x.grad(&grads).expect("a gradient")));
        assert!(grads.iter().flatten().all(|x| x.is_finite()), "gates {case}");
        let mut exact = RowOracle::new(gate);
        let places = [first * DIM + 1, SEQ_LEN * DIM - 90, 9 * SEQ_LEN * DIM / 10 + 2];
        for input in 0..4 {
            let scale = grads[input].iter().fold(1e-3f64, |a, x| a.max(x.abs()));
            for place in places {
                let mut loss = |step: f64| {
                    let data = [&mut exact.q, &mut exact.k, &mut exact.v, &mut exact.g];
                    data.into_iter().nth(input).expect("four inputs")[place] += step;
                    let rows = first..SEQ_LEN;
                    rows.flat_map(|i| exact.output(i)).sum::<f64>()
                };
                let (up, down) = (loss(1e-5), loss(-2e-5));
                loss(1e-5);
                let want = (up - down) / 2e-5;
                let got = grads[input][place];
                assert!(
                    (got - want).abs() < 2e-5 * scale,
                    "gates {case}, input {input} at {place}: {got} where {want} is right"
                );
            }
        }
    }
}

/// Forward and backward over the whole row with a window, through the variant itself.
#[test]
fn a_whole_row_with_a_window_is_finite_both_ways() {
    let shape = AttentionShape { window: Some(100), ..shape() };
    let [q, k, v] = inputs::<Ad>().map(Tensor::require_grad);
    // Logits that saturate either way, and some that do not.
    let logits = random::<Ad, 3>([1, SEQ_LEN, DIM], 4).powi_scalar(5) * 100.0;
    let logits = logits.require_grad();
    let inputs = Inputs {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        projections: vec![logits.clone()],
        parameters: vec![],
    };
    let o = dispatch::attend(&Config::default(), &shape, inputs, None);
    assert_eq!(o.dims(), [1, 1, SEQ_LEN, DIM]);
    let grads = o.clone().sum().backward();
    assert!(values(o).iter().all(|x| x.is_finite()));
    for x in [&q, &k, &v] {
        let grad = values(x.grad(&grads).expect("a gradient"));
        assert!(grad.iter().all(|x| x.is_finite()));
    }
    let slope = values(logits.grad(&grads).expect("a gradient"));
    assert!(slope.iter().all(|x| x.is_finite()) && slope.iter().any(|&x| x != 0.0));
}

/// A window bounds the state, however long the sequence.
#[test]
fn a_window_bounds_the_state() {
    let shape = AttentionShape { window: Some(200), ..shape() };
    let config = Config::default();
    let mut state = dispatch::State::<_, Flex>::new(0);
    let step = 500;
    for seed in 0..20 {
        let x = || random([1, 1, step, DIM], seed);
        let projections = vec![random([1, step, DIM], seed)];
        let inputs = Inputs { q: x(), k: x(), v: x(), projections, parameters: vec![] };
        dispatch::extend(&config, &shape, inputs, &mut state);
        assert!(state.elements() <= (200 + 2 * 128) * 3 * DIM, "{} elements", state.elements());
    }
}
