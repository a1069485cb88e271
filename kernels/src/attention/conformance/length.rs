//! Numerics of attention with decay over long rows, with adversarial gates: the outputs of some queries and
//! all gradients from these outputs, against f64.

use burn::tensor::{DType, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::in_bf16::Roundings;
use super::run::{Decoding, attend, gradients, largest_difference, to_vec};
use super::{Conformance, Problem};
use crate::backend::OpBackend;
use crate::testing::{Tensor64, root_mean_square};

/// The kind of decay of scores. The gates are logits z; y = ln σ(z).
#[derive(Clone, Copy, Debug)]
pub enum Decay {
    /// One gate per query head: each step adds y to the score.
    Scalar,
    /// One gate per channel of a kv head: each step multiplies the channel's part of the score by
    /// exp(−g_max (1 − e^(y / g_max))).
    Channels { g_max: f64 },
    /// Both: one gate per channel of a kv head, and after it one per query head.
    Both { g_max: f64 },
}

/// What a gate's decay does to a score.
#[derive(Clone, Copy, Debug)]
enum Gate {
    Heads,
    Channels { g_max: f64 },
}

impl Decay {
    fn gates(self) -> Vec<Gate> {
        match self {
            Decay::Scalar => vec![Gate::Heads],
            Decay::Channels { g_max } => vec![Gate::Channels { g_max }],
            Decay::Both { g_max } => vec![Gate::Channels { g_max }, Gate::Heads],
        }
    }
}

impl Gate {
    /// The log decay of one step, and its derivative with respect to the logit.
    fn log_decay(self, z: f64) -> (f64, f64) {
        let y = z.min(0.0) - (-z.abs()).exp().ln_1p();
        let slope = 1.0 / (1.0 + z.exp());
        match self {
            Gate::Heads => (y, slope),
            Gate::Channels { g_max } => (g_max * (y / g_max).exp_m1(), (y / g_max).exp() * slope),
        }
    }

    /// The feature of the gate that decays a head's channel.
    fn feature(self, head: usize, n: usize) -> usize {
        match self {
            Gate::Heads => head,
            Gate::Channels { .. } => head * DIM + n,
        }
    }
}

const HEADS: usize = 2;
const DIM: usize = 64;

/// Tokens that are decoded one by one, more than a tile of the kernels has.
const STEPS: usize = 70;

/// The logit of token t of `tokens`, in feature n.
type Logit = fn(t: usize, tokens: usize, n: usize) -> f64;

/// Closed gates (at the clamp, or e^−30 per token); open ones; both alternating; weak decay after strong;
/// channels of different speed, one of which decays in rare large steps; one closed gate among open ones
/// inside a tile.
const LOGITS: [Logit; 6] = [
    |_, _, _| -30.0,
    |_, _, _| 40.0,
    |t, _, n| if (t + n) % 2 == 0 { -30.0 } else { 40.0 },
    |t, tokens, _| if t < tokens - tokens / 20 { -30.0 } else { 9.0 },
    |t, _, n| [-30.0, 8.5, 11.0, if t % 1000 == 0 { -30.0 } else { 12.0 }][n % 4],
    |t, tokens, _| if t == tokens / 2 + 21 { -9984.0 } else { 12.0 },
];

/// Of two gates, the second has the logits of this many cases later.
const SECOND_GATE: usize = 3;

/// Outputs, decoded outputs and gradients of a kind with this decay over `tokens` tokens are accurate: in
/// bf16 up to its roundings, in f32 to 1e-4 of their size.
pub fn holds_at_length<V: Conformance, K: OpBackend>(
    variant: &V,
    decay: Decay,
    dtype: DType,
    tokens: usize,
) {
    let rows = [0, 1, 63, 64, 65, tokens / 3, tokens / 2 + 20, tokens / 2 + 22, tokens - 1000];
    let rows: Vec<usize> = rows.into_iter().chain(tokens - 3..tokens).collect();
    for case in 0..LOGITS.len() {
        let mut problem = Problem::new(variant, [HEADS, HEADS, DIM, 1, tokens], None).in_bf16();
        problem.dtype = dtype;
        for gate in 0..decay.gates().len() {
            let logit = LOGITS[(case + gate * SECOND_GATE) % LOGITS.len()];
            let logits = &mut problem.inputs[3 + gate];
            let shape = [1, tokens, logits.shape[2]];
            *logits = Tensor64::from_fn(&shape, |at| logit(at[1], tokens, at[2]));
        }
        let mut rng = ChaCha8Rng::seed_from_u64(case as u64);
        let mut upstream = Tensor64::from_fn(&[1, HEADS, tokens, DIM], |_| 0.0);
        for at in 0..HEADS * rows.len() * DIM {
            let (head, row, n) = (at / DIM / rows.len(), rows[at / DIM % rows.len()], at % DIM);
            upstream.data[(head * tokens + row) * DIM + n] =
                f64::from(rng.random_range(-8i8..8)) / 8.0;
        }
        let want = exact(&problem, decay, &rows, &upstream);
        let what = |of: String| format!("{variant:?}, gates {case}, {of}");

        let check = |what: &str, got: &[f64], want: &[f64], least: f64| {
            if dtype == DType::BF16 {
                let count = variant.roundings();
                return Roundings { count, least, vector: 1, kinks: false }.check(what, got, want);
            }
            assert!(got.iter().all(|x| x.is_finite()), "{what}: not finite");
            let largest = want.iter().fold(least, |a, x| a.max(x.abs()));
            let worst = largest_difference(got, want);
            assert!(worst <= 1e-4 * largest, "{what}: off by {worst:.2e} of {largest:.2e}");
        };
        let o = attend::<V, K>(variant, &problem);
        let decoded = decode::<V, K>(variant, &problem, STEPS);
        for head in 0..HEADS {
            for (at, &row) in rows.iter().enumerate() {
                let want = &want.o[(head * rows.len() + at) * DIM..][..DIM];
                let got = &o[(head * tokens + row) * DIM..][..DIM];
                check(&what(format!("row {row}")), got, want, 0.0);
                if row + STEPS >= tokens {
                    let got = &decoded[(head * STEPS + row + STEPS - tokens) * DIM..][..DIM];
                    check(&what(format!("decoded row {row}")), got, want, 0.0);
                }
            }
        }
        let mut got = gradients::<V, K>(variant, &problem, &upstream);
        let mut wanted = want.grads;
        // The gates' gradients are compared with respect to log decays, where these depend on the logits.
        for (input, slopes) in (3..).zip(&want.slopes) {
            let places: Vec<usize> = (0..slopes.len()).filter(|&at| slopes[at] > 1e-12).collect();
            got[input] = places.iter().map(|&at| got[input][at] / slopes[at]).collect();
            wanted[input] = places.iter().map(|&at| wanted[input][at]).collect();
        }
        let of = |part: fn(&Gradient) -> f64, grads: &[Gradient]| -> Vec<f64> {
            grads.iter().map(part).collect()
        };
        // The gradients of q, k and the gate may vanish while v's do not.
        let least = 0.1 * root_mean_square(&of(|x| x.value, &wanted.concat()));
        for (input, (got, want)) in got.iter().zip(&wanted).enumerate() {
            if want.is_empty() {
                continue;
            }
            let what = what(format!("gradient of input {input}"));
            let size = root_mean_square(&of(|x| x.size, want));
            let want = of(|x| x.value, want);
            check(&what, got, &want, least.max(root_mean_square(&want).hypot(size)));
        }
    }
}

/// The outputs of the last `steps` tokens, one by one after the others at once.
fn decode<V: Conformance, K: OpBackend>(variant: &V, problem: &Problem, steps: usize) -> Vec<f64> {
    let mut decoding = Decoding::<V, K>::new(variant, problem);
    decoding.extend(problem.seq_len - steps);
    to_vec(Tensor::cat((0..steps).map(|_| decoding.extend(1)).collect(), 2))
}

/// Outputs of some rows, `[heads, rows, DIM]`, the gradients of q, k, v and each gate's log decays, and the
/// derivatives of the log decays with respect to the logits.
struct ExactRows {
    o: Vec<f64>,
    grads: Vec<Vec<Gradient>>,
    slopes: Vec<Vec<f64>>,
}

/// A gradient, which is linear in dS = P ⊙ (dP − D), D = dO·o.
#[derive(Clone, Copy, Debug, Default)]
struct Gradient {
    value: f64,
    /// The size that errors are relative to: the same sum with √(Σ (dO_c o_c)²) in place of dP − D, because
    /// rounding o changes D by a fraction of that. For the gate also the root of the sum of its terms'
    /// squares, because the terms come from two passes and cancel.
    size: f64,
}

impl Gradient {
    fn add(&mut self, Gradient { value, size }: Gradient, factor: f64) {
        self.value += value * factor;
        self.size += size * factor;
    }
}

/// A gate's log decays, with their derivatives with respect to the logits.
struct ExactGate {
    gate: Gate,
    features: usize,
    steps: Vec<(f64, f64)>,
}

impl ExactGate {
    fn new(gate: Gate, logits: &Tensor64) -> Self {
        let steps = logits.data.iter().map(|&z| gate.log_decay(z)).collect();
        ExactGate { gate, features: logits.shape[2], steps }
    }
}

/// The gradients of the prefix sums of a gate's log decays, with the sums of their terms' squares.
struct PrefixGradients {
    features: usize,
    sums: Vec<(Gradient, f64)>,
}

impl PrefixGradients {
    fn of(gate: &ExactGate) -> Self {
        let sums = vec![(Gradient::default(), 0.0); gate.steps.len()];
        PrefixGradients { features: gate.features, sums }
    }

    /// Adds `d_score` times `factor` at the query i, and subtracts it at the key j.
    fn add(&mut self, [i, j]: [usize; 2], feature: usize, d_score: Gradient, factor: f64) {
        for (t, factor) in [(i, factor), (j, -factor)] {
            let (sum, square) = &mut self.sums[t * self.features + feature];
            sum.add(d_score, factor);
            *square += (d_score.value * factor).powi(2);
        }
    }

    /// The gradients of the log decays.
    fn of_steps(&self) -> Vec<Gradient> {
        let mut gradients = vec![Gradient::default(); self.sums.len()];
        let mut later = vec![(Gradient::default(), 0.0); self.features];
        for at in (0..self.sums.len()).rev() {
            let (sum, square) = &mut later[at % self.features];
            sum.add(self.sums[at].0, 1.0);
            *square += self.sums[at].1;
            let size = sum.size.hypot(square.sqrt());
            gradients[at] = Gradient { value: sum.value, size };
        }
        gradients
    }
}

/// The sums of log decays between a key and a query.
#[derive(Clone, Copy)]
struct DecaySums {
    of_channels: [f64; DIM],
    of_head: f64,
}

/// Calls `f` for each key of the query at `i`, from the last to the first.
fn backwards(gates: &[ExactGate], head: usize, i: usize, mut f: impl FnMut(usize, &DecaySums)) {
    let mut sums = DecaySums { of_channels: [0.0; DIM], of_head: 0.0 };
    for j in (0..=i).rev() {
        f(j, &sums);
        for ExactGate { gate, features, steps, .. } in gates {
            let step = |n: usize| steps[j * features + gate.feature(head, n)].0;
            match gate {
                Gate::Heads => sums.of_head += step(0),
                Gate::Channels { .. } => (0..DIM).for_each(|n| sums.of_channels[n] += step(n)),
            }
        }
    }
}

/// Outputs and gradients of the queries in `rows`; `upstream` is 0 elsewhere.
fn exact(problem: &Problem, decay: Decay, rows: &[usize], upstream: &Tensor64) -> ExactRows {
    let (tokens, scale) = (problem.seq_len, 1.0 / (DIM as f64).sqrt());
    let [q, k, v, logits @ ..] = &problem.inputs[..] else { panic!("q, k, v and gates") };
    let gates = decay.gates();
    assert_eq!(logits.len(), gates.len(), "the problem's gates");
    let gates: Vec<_> = gates.into_iter().zip(logits).map(|(g, z)| ExactGate::new(g, z)).collect();
    let mut d_gates: Vec<_> = gates.iter().map(PrefixGradients::of).collect();
    let mut o = vec![];
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![Gradient::default(); x.data.len()]);
    for (head, &i) in (0..HEADS).flat_map(|head| rows.iter().map(move |i| (head, i))) {
        // The range of a token's query, key and value of the head.
        let row = |t: usize| (head * tokens + t) * DIM..(head * tokens + t + 1) * DIM;
        let (q, d_o) = (&q.data[row(i)], &upstream.data[row(i)]);
        let mut weights = vec![0.0; i + 1];
        backwards(&gates, head, i, |j, DecaySums { of_channels, of_head }| {
            let k = &k.data[row(j)];
            let dot: f64 = (0..DIM).map(|n| of_channels[n].exp() * q[n] * k[n]).sum();
            weights[j] = scale * dot + of_head;
        });
        let row_max = weights.iter().copied().fold(f64::MIN, f64::max);
        weights.iter_mut().for_each(|x| *x = (*x - row_max).exp());
        let total: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|x| *x /= total);
        let weighted =
            |n: usize| weights.iter().zip(v.data[row(0).start + n..].iter().step_by(DIM));
        let output: Vec<f64> = (0..DIM).map(|n| weighted(n).map(|(p, v)| p * v).sum()).collect();

        let dot = |x: &[f64]| d_o.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
        let mean = dot(&output);
        let size = d_o.iter().zip(&output).map(|(a, b)| (a * b).powi(2)).sum::<f64>().sqrt();
        backwards(&gates, head, i, |j, DecaySums { of_channels, .. }| {
            let (key, value, weight) = (&k.data[row(j)], &v.data[row(j)], weights[j]);
            let d_score = Gradient { value: weight * (dot(value) - mean), size: weight * size };
            let d_dot = |n: usize| scale * of_channels[n].exp();
            for n in 0..DIM {
                dv[row(j)][n].value += weight * d_o[n];
                dk[row(j)][n].add(d_score, d_dot(n) * q[n]);
                dq[row(i)][n].add(d_score, d_dot(n) * key[n]);
            }
            for (ExactGate { gate, .. }, d_gate) in gates.iter().zip(&mut d_gates) {
                let mut add =
                    |n, factor| d_gate.add([i, j], gate.feature(head, n), d_score, factor);
                match gate {
                    // Once for all channels.
                    Gate::Heads => add(0, 1.0),
                    Gate::Channels { .. } => {
                        (0..DIM).for_each(|n| add(n, d_dot(n) * q[n] * key[n]))
                    }
                }
            }
        });
        o.extend(output);
    }
    let slopes = gates.iter().map(|gate| gate.steps.iter().map(|step| step.1).collect()).collect();
    let of_gates = d_gates.iter().map(PrefixGradients::of_steps);
    let grads = [dq, dk, dv].into_iter().chain(of_gates).collect();
    ExactRows { o, grads, slopes }
}
