//! Numerics at 65,536 tokens, with gates that decay as strongly as they can, not at all, alternating and
//! at random, against sums in f64 by the definition.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::power::{Config, Form};
use crate::attention::{AttentionShape, Inputs, dispatch};
use crate::backend::with_reference;

type Ad = Autodiff<Flex>;

const D: usize = 8;
/// Rows of the batch, one for each kind of gate.
const ROWS: usize = 4;

/// One head's q, k, v `[ROWS, seq_len, D]`, gate logits `[ROWS, seq_len]` and the upstream
/// gradient `[ROWS, seq_len, D]`, zero except at the sampled queries.
struct LongRows {
    seq_len: usize,
    qkv: [Vec<f32>; 3],
    logits: Vec<f32>,
    upstream: Vec<f32>,
    sampled: Vec<usize>,
}

impl LongRows {
    fn new(size: f32, seq_len: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let n = ROWS * seq_len * D;
        let qkv =
            [size, size, 1.0].map(|x| (0..n).map(|_| rng.random_range(-x..x)).collect::<Vec<_>>());
        let logits = (0..ROWS * seq_len).map(|at| match (at / seq_len, at % seq_len) {
            (0, _) => -30.0,
            (1, _) => 100.0,
            (2, t) => [-30.0, 100.0][t % 2],
            // Long runs of open gates, then a closed or a half-open one.
            _ => [100.0, 100.0, 8.0, 100.0, 100.0, 100.0, -2.0, -30.0]
                [if rng.random_bool(0.99) { 0 } else { rng.random_range(0..8) }],
        });
        let logits = logits.collect();
        let mut sampled: Vec<_> = (0..24).map(|_| rng.random_range(0..seq_len)).collect();
        // Around the ends of chunks, and the last token.
        sampled.extend([0, 1, 511, 512, 513, 1024, seq_len - 257, seq_len - 256, seq_len - 1]);
        let [mut q, k, v]: [Vec<f32>; 3] = qkv;
        let mut upstream = vec![0.0; n];
        for row in 0..ROWS {
            for &i in &sampled {
                let at = (row * seq_len + i) * D..(row * seq_len + i + 1) * D;
                upstream[at.clone()].iter_mut().for_each(|x| *x = rng.random_range(-1.0..1.0));
                // Under closed gates a query sees only its own key: if it were orthogonal to it, f32
                // inputs would not determine its gradient.
                q[at.clone()].iter_mut().zip(&k[at]).for_each(|(q, k)| *q += k);
            }
        }
        LongRows { seq_len, qkv: [q, k, v], logits, upstream, sampled }
    }

    /// Outputs, and the gradients of q, k, v and the logits.
    fn run(&self, config: &Config) -> [Vec<f64>; 5] {
        let device = Default::default();
        let heads = |x: &Vec<f32>| {
            let data = TensorData::new(x.clone(), [ROWS, 1, self.seq_len, D]);
            Tensor::<Ad, 4>::from_data(data, &device).require_grad()
        };
        let [q, k, v] = [0, 1, 2].map(|at| heads(&self.qkv[at]));
        let logits = TensorData::new(self.logits.clone(), [ROWS, self.seq_len, 1]);
        let logits = Tensor::<Ad, 3>::from_data(logits, &device).require_grad();
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: vec![logits.clone()],
            parameters: vec![],
        };
        let o = dispatch::attend(config, &AttentionShape::new(D, 1, 1, D), inputs, None);
        let grads = (o.clone() * heads(&self.upstream)).sum().backward();
        let of = |x: Tensor<Flex, 4>| x.into_data().iter::<f64>().collect::<Vec<_>>();
        let [d_q, d_k, d_v] = [q, k, v].map(|x| of(x.grad(&grads).unwrap()));
        let d_logits = logits.grad(&grads).unwrap().into_data().iter::<f64>().collect();
        [of(o.inner()), d_q, d_k, d_v, d_logits]
    }

    /// As `run`, by the definition, only at the sampled queries (zeros elsewhere).
    fn definition(&self, p: i32) -> [Vec<f64>; 5] {
        let n = ROWS * self.seq_len;
        let mut all = [n * D, n * D, n * D, n * D, n].map(|n| vec![0.0; n]);
        for row in 0..ROWS {
            for &i in &self.sampled {
                self.add_query(p, row, i, &mut all);
            }
        }
        all
    }

    fn add_query(&self, p: i32, row: usize, i: usize, all: &mut [Vec<f64>; 5]) {
        let token = |x: &[f32], t: usize| -> [f64; D] {
            std::array::from_fn(|c| f64::from(x[(row * self.seq_len + t) * D + c]))
        };
        let dot = |x: [f64; D], y: [f64; D]| (0..D).map(|c| x[c] * y[c]).sum::<f64>();
        let [q, k, v] = &self.qkv;
        let (query, grad) = (token(q, i), token(&self.upstream, i));
        let mut decay = 1.0;
        let mut seen = vec![];
        for j in (0..=i).rev() {
            let score = dot(query, token(k, j));
            seen.push((j, score, score.powi(p) * decay));
            let logit = f64::from(self.logits[row * self.seq_len + j]);
            decay /= 1.0 + (-logit).exp();
        }
        let total: f64 = seen.iter().map(|x| x.2).sum();
        let mut o = [0.0; D];
        for &(j, _, weight) in &seen {
            let v = token(v, j);
            (0..D).for_each(|c| o[c] += weight / total * v[c]);
        }
        let [out, d_q, d_k, d_v, d_logits] = all;
        let at = |t: usize, c: usize| (row * self.seq_len + t) * D + c;
        (0..D).for_each(|c| out[at(i, c)] = o[c]);
        // Σ over the keys before t of the gradients of their logarithms, the oldest first.
        let mut before = 0.0;
        for &(j, score, weight) in seen.iter().rev() {
            let logit = f64::from(self.logits[row * self.seq_len + j]);
            d_logits[row * self.seq_len + j] += before / (1.0 + logit.exp());
            let weight = weight / total;
            let d_log = weight * (dot(grad, token(v, j)) - dot(grad, o));
            before += d_log;
            for c in 0..D {
                d_v[at(j, c)] += weight * grad[c];
                let d_score = d_log * f64::from(p) / score;
                d_k[at(j, c)] += d_score * query[c];
                d_q[at(i, c)] += d_score * token(k, j)[c];
            }
        }
    }
}

/// Checks all gradients, and outputs at the sampled queries, to the conformance suite's accuracy relative
/// to the largest value of their row of the batch.
///
/// Under closed gates most queries see one key and gradients nearly vanish: errors are relative to the size
/// of a gradient with few keys, about p·|v|·|upstream| / |q|.
fn check(config: &Config, size: f32, seq_len: usize) {
    let problem = LongRows::new(size, seq_len);
    let got = problem.run(config);
    let want = problem.definition(config.p as i32);
    let by_score = f64::from(config.p) / f64::from(size);
    let few_keys = [1.0, by_score, by_score, 1.0, 1.0];
    for (what, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!(got.iter().all(|x| x.is_finite()), "output or gradient {what} is not finite");
        for row in 0..ROWS {
            let range = |x: &[f64]| x.len() / ROWS * row..x.len() / ROWS * (row + 1);
            let (got, want) = (&got[range(got)], &want[range(want)]);
            let least = if row == 0 || row == 2 { few_keys[what] } else { 1e-30 };
            let largest = want.iter().fold(least, |a, x| a.max(x.abs()));
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                let sampled = what > 0 || problem.sampled.contains(&(at / D));
                assert!(
                    !sampled || (got - want).abs() <= 2e-5 * largest,
                    "{config:?}, {what}, gates {row}, element {at}: {got} where {want} is right, \
                     largest value {largest}"
                );
            }
        }
    }
}

fn chunked(p: u32) -> Config {
    Config { p, rope: false, form: Form::Chunked, ..Config::default() }
}

#[test]
fn squares_are_exact_to_rounding_under_any_gate() {
    check(&chunked(2), 1.7, 65_536);
}

#[test]
fn fourth_powers_are_exact_to_rounding_under_any_gate() {
    check(&chunked(4), 1.7, 65_536);
}

#[test]
fn large_scores_are_exact_to_rounding() {
    check(&chunked(2), 1.7 * 30.0, 65_536);
    check(&chunked(4), 1.7 * 30.0, 65_536);
}

/// The reference, which other devices run, in both forms.
#[test]
fn the_reference_is_exact_to_rounding_under_any_gate() {
    for form in [Form::Chunked, Form::Attention] {
        for p in [2, 4] {
            with_reference(|| check(&Config { form, ..chunked(p) }, 1.7, 3000));
        }
    }
}
