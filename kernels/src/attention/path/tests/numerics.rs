//! The block transforms against products of matrices, and rows of 65,536 tokens against their
//! recurrences.

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{dot, householder, uniform, values};
use crate::attention::path::householder::TransformedBlocks;
use crate::attention::path::op::{Path, PathInputs};
use crate::attention::path::reference::{BLOCK, Tokens, Visible, attend};
use crate::backend::OpBackend;
use crate::testing::assert_budget;

/// Tokens of one key head, as f32 numbers in row-major order; `decays[h]` are query head h's gates.
#[derive(Clone)]
pub(super) struct Sample {
    pub head_dim: usize,
    pub q: Vec<Vec<f32>>,
    k: Vec<f32>,
    v: Vec<f32>,
    w: Vec<f32>,
    beta: Vec<f32>,
    decays: Vec<Vec<f32>>,
}

/// Divides every direction by its norm.
fn normalised(mut w: Vec<f32>, head_dim: usize) -> Vec<f32> {
    for w in w.chunks_exact_mut(head_dim) {
        let length = w.iter().map(|x| x * x).sum::<f32>().sqrt();
        w.iter_mut().for_each(|x| *x /= length);
    }
    w
}

impl Sample {
    /// Random tokens with β in (0, 2) and no gates.
    pub fn new(len: usize, head_dim: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(len as u64);
        let mut random = || uniform(&mut rng, len * head_dim);
        let (q, k, v, w) = (random(), random(), random(), random());
        let beta = (0..len).map(|_| rng.random_range(0.0f32..2.0)).collect();
        let w = normalised(w, head_dim);
        Sample { head_dim, q: vec![q], k, v, w, beta, decays: vec![] }
    }

    pub fn len(&self) -> usize {
        self.beta.len()
    }

    pub fn beta(self, beta: impl Fn(usize) -> f32) -> Self {
        Sample { beta: (0..self.len()).map(beta).collect(), ..self }
    }

    /// The same direction everywhere: the largest off-diagonal entries that a block can have.
    pub fn one_direction(self) -> Self {
        let w = self.w[..self.head_dim].repeat(self.len());
        Sample { w, ..self }
    }

    /// Queries, keys and values rounded to bf16.
    pub fn rounded(mut self) -> Self {
        let heads = self.q.iter_mut().chain([&mut self.k, &mut self.v]);
        heads.flatten().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        self
    }

    /// One query head for every gate, all with the same queries.
    pub fn gates(self, gates: &[&dyn Fn(usize) -> f32]) -> Self {
        let decays = gates.iter().map(|gate| (0..self.len()).map(gate).collect()).collect();
        Sample { q: vec![self.q[0].clone(); gates.len()], decays, ..self }
    }

    /// The softmax scale.
    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// The operation's settings, without a window.
    pub fn op(&self) -> Path {
        Path { scale: self.scale() as f32, window: None }
    }

    /// As tensors.
    pub fn inputs<B: OpBackend>(&self, device: &B::Device) -> PathInputs<B> {
        let (len, d) = (self.len(), self.head_dim);
        let tensor = |x: &[f32], shape: [usize; 4]| -> Tensor<B, 4> {
            Tensor::from_data(TensorData::new(x.to_vec(), shape), device)
        };
        let log_decay = (!self.decays.is_empty())
            .then(|| tensor(&self.decays.concat(), [1, self.decays.len(), len, 1]).squeeze_dim(3));
        PathInputs {
            q: tensor(&self.q.concat(), [1, self.q.len(), len, d]),
            k: tensor(&self.k, [1, 1, len, d]),
            v: tensor(&self.v, [1, 1, len, d]),
            w: tensor(&self.w, [1, 1, len, d]),
            beta: tensor(&self.beta, [1, 1, len, 1]),
            log_decay,
        }
    }

    /// As tensors in rows, the queries times the scale.
    pub fn tokens(&self) -> Tokens<Flex> {
        self.inputs(&Default::default()).rows(self.scale() as f32)
    }

    /// Token t of `x`.
    fn row(&self, x: &[f32], t: usize) -> Vec<f64> {
        x[t * self.head_dim..][..self.head_dim].iter().map(|&x| f64::from(x)).collect()
    }

    /// The output of query i of head h, by taking q_i through every transform before it, with
    /// every β multiplied by `factor`.
    fn output(&self, h: usize, i: usize, factor: f64) -> Vec<f64> {
        let mut x = self.row(&self.q[h], i);
        let (mut decay, mut scores) = (0.0, vec![]);
        for j in (0..=i).rev() {
            scores.push(self.scale() * dot(&self.row(&self.k, j), &x) + decay);
            householder(&mut x, &self.row(&self.w, j), factor * f64::from(self.beta[j]));
            decay += self.decays.get(h).map_or(0.0, |decays| f64::from(decays[j]));
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut out = vec![0.0; self.head_dim];
        for (distance, score) in scores.iter().enumerate() {
            let v = self.row(&self.v, i - distance);
            out.iter_mut().zip(v).for_each(|(o, v)| *o += (score - max).exp() / total * v);
        }
        out
    }
}

fn everything() -> Visible<Flex> {
    Visible { window: None, documents: None, kv_heads: 1 }
}

/// Checks row `i` of outputs `[1, heads, rows, head_dim]` that start at position `first`.
pub(super) fn check_row(
    what: &str,
    sample: &Sample,
    out: &Tensor<Flex, 4>,
    first: usize,
    i: usize,
) {
    for h in 0..sample.q.len() {
        let got = values(out.clone().narrow(1, h, 1).narrow(2, i - first, 1));
        let want = sample.output(h, i, 1.0);
        assert_budget(&format!("{what}, head {h}, row {i}"), &got, &got, &want);
    }
}

/// The outputs of the last block, and the position at which it starts. The transforms of all tokens before
/// come from a pass with a window of 1, which is cheap and does not change them.
fn last_rows(sample: &Sample) -> (Tensor<Flex, 4>, usize) {
    let tokens = sample.tokens();
    let first = sample.len() - BLOCK;
    let nothing = Visible { window: Some(1), ..everything() };
    let (_, past) = attend(&tokens.narrow(0, first), &nothing, &[], 0);
    let (out, _) = attend(&tokens.narrow(first, BLOCK), &everything(), &past, first);
    (out, first)
}

/// Compares a few of the last rows with their recurrences.
fn check_last_rows(what: &str, sample: &Sample) {
    let (out, first) = last_rows(sample);
    for i in [first, sample.len() - 1] {
        check_row(what, sample, &out, first, i);
    }
}

/// As [`check_last_rows`], for a transform repeated at every token. Identical blocks have identical rounding
/// errors, which add up linearly: from 2,048 tokens on the budget grows with the length. Near β = 2 the last
/// digit of β has as large an effect; four units of it are allowed.
fn check_last_rows_of_one(what: &str, sample: &Sample) {
    let (out, first) = last_rows(sample);
    for i in [first, sample.len() - 1] {
        let got = values(out.clone().narrow(2, i - first, 1));
        let want = sample.output(0, i, 1.0);
        let nearby = sample.output(0, i, 1.0 + 4.0 * f64::from(f32::EPSILON));
        let difference = |a: &[f64]| {
            assert!(a.iter().all(|x| x.is_finite()), "{what}, row {i}: {a:?}");
            a.iter().zip(&want).fold(0.0f64, |max, (a, b)| max.max((a - b).abs()))
        };
        let largest = want.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        let budget = 2e-5 * largest * (sample.len() as f64 / 2048.0).max(1.0);
        let (error, bits) = (difference(&got), difference(&nearby));
        assert!(
            error <= budget + bits,
            "{what}, row {i}: off by {error:.2e} of {largest:.2e}; four last digits of β are {bits:.2e}"
        );
    }
}

/// A block's transforms by explicit matrix products: P, and for every pair j ≤ i q̃, k̃ and the score.
fn check_block(what: &str, sample: &Sample) {
    let (len, d) = (sample.len(), sample.head_dim);
    let Tokens { q, k, w, beta, .. } = sample.tokens();
    let got = TransformedBlocks::new([q, k, w, beta], len);
    // Row n of a product H_s ⋯ H_e is H_e ⋯ H_s e_n: the factors are symmetric.
    let through = |mut x: Vec<f64>, order: &mut dyn Iterator<Item = usize>| {
        for t in order {
            householder(&mut x, &sample.row(&sample.w, t), f64::from(sample.beta[t]));
        }
        x
    };
    let unit = |n: usize| (0..d).map(|m| f64::from(u8::from(m == n))).collect::<Vec<_>>();
    let transform: Vec<_> = (0..d).flat_map(|n| through(unit(n), &mut (0..len))).collect();
    let row = |x: &[f32], t| sample.row(x, t);
    let q: Vec<_> = (0..len)
        .flat_map(|i| through(row(&sample.q[0], i), &mut (0..=i).rev()))
        .map(|x| x * sample.scale())
        .collect();
    let k: Vec<_> = (0..len).flat_map(|j| through(row(&sample.k, j), &mut (j + 1..len))).collect();
    let hold = |name: &str, got: Tensor<Flex, 5>, want: Vec<f64>| {
        let got = values(got);
        assert_budget(&format!("{what}, {name}"), &got, &got, &want);
    };
    // With I − P: P or I − P may nearly vanish, while errors are relative to the vectors that P multiplies.
    let units: Vec<_> = (0..d).flat_map(unit).collect();
    let removed = units.iter().zip(&transform).map(|(unit, p)| unit - p).collect::<Vec<_>>();
    let eye = Tensor::eye(d, &Default::default()).reshape([1, 1, 1, d, d]);
    let both = Tensor::cat(vec![eye - got.removed.clone(), got.removed], 3);
    hold("transform", both, [transform, removed].concat());
    hold("queries", got.q, q);
    hold("keys", got.k, k);
    let mut scores = vec![0.0; len * len];
    for i in 0..len {
        for j in 0..=i {
            let q = through(row(&sample.q[0], i), &mut (j + 1..=i).rev());
            scores[i * len + j] = sample.scale() * dot(&q, &row(&sample.k, j));
        }
    }
    hold("scores", got.scores.tril(0), scores);
}

#[test]
fn block_transforms_are_the_products_of_their_matrices() {
    for (len, d) in [(1, 8), (2, 3), (32, 16), (64, 64), (64, 8)] {
        check_block("random directions", &Sample::new(len, d));
        check_block("reflections", &Sample::new(len, d).beta(|_| 2.0));
        check_block("near no transform", &Sample::new(len, d).beta(|_| 1e-6));
        check_block("no transform", &Sample::new(len, d).beta(|_| 0.0));
        check_block("projections", &Sample::new(len, d).beta(|_| 1.0));
    }
}

/// Repeated tokens give the largest possible entries of the triangular matrix.
#[test]
fn block_transforms_of_repeated_directions_keep_their_precision() {
    for beta in [2.0, 1.999, 1.0, 0.5, 1e-6] {
        let sample = Sample::new(64, 32).one_direction().beta(|_| beta);
        check_block(&format!("one direction, beta {beta}"), &sample);
    }
    let sample = Sample::new(64, 8).one_direction().beta(|t| if t % 2 == 0 { 2.0 } else { 0.0 });
    check_block("one direction, every other token", &sample);
    // Two directions that differ in their fourth digit.
    let mut sample = Sample::new(64, 16).one_direction().beta(|_| 1.999);
    sample.w.chunks_exact_mut(32).for_each(|pair| pair[0] += 1e-4);
    sample.w = normalised(sample.w, 16);
    check_block("two directions that nearly agree", &sample);
}

#[test]
fn whole_rows_of_65536_tokens_agree_with_their_recurrence() {
    let len = 1 << 16;
    // A quarter of the row each: strongest decay, none, alternating, weak.
    let mixed = |t: usize| match t * 4 / len {
        0 => -30.0,
        1 => 0.0,
        2 => -30.0 * (t % 2) as f32,
        _ => -1e-4,
    };
    let sample = Sample::new(len, 8).gates(&[&mixed]);
    let (out, _) = attend(&sample.tokens(), &everything(), &[], 0);
    assert!(values(out.clone()).iter().all(|x| x.is_finite()));
    for i in [0, 1, 63, 64, 4_097, 16_383, 16_384, 32_767, 40_001, 49_151, len - 1] {
        check_row("mixed gates", &sample, &out, 0, i);
    }
}

#[test]
fn rows_after_65536_gates_of_one_kind_agree_with_their_recurrence() {
    let len = 1 << 16;
    let strong = |_: usize| -30.0;
    let none = |_: usize| 0.0;
    let alternating = |t: usize| -30.0 * (t % 2) as f32;
    let blocks = |t: usize| if (t / 100).is_multiple_of(2) { -30.0 } else { 0.0 };
    // 32,768 steps of −30 sum to −10⁶, where neighbouring f32 numbers are 0.06 apart; gates of −0.001 on
    // both sides of them must still have an effect.
    let buried = |t: usize| if t >= len / 4 && t < 3 * len / 4 { -30.0 } else { -1e-3 };
    let sample = Sample::new(len, 8).gates(&[&strong, &none, &alternating, &blocks, &buried]);
    check_last_rows("gates", &sample);
}

#[test]
fn rows_after_65536_transforms_agree_with_their_recurrence() {
    let sample = || Sample::new(1 << 16, 8);
    check_last_rows("random transforms", &sample());
    check_last_rows("beta near 0", &sample().beta(|_| 1e-6));
    check_last_rows("projections", &sample().beta(|_| 1.0));
}

#[test]
fn rows_after_reflections_agree_with_their_recurrence() {
    for (len, d) in [(1 << 10, 8), (1 << 16, 64)] {
        check_last_rows("beta near 2", &Sample::new(len, d).beta(|_| 1.999_999));
        check_last_rows("reflections", &Sample::new(len, d).beta(|_| 2.0));
    }
}

#[test]
fn rows_after_one_transform_repeated_agree_with_their_recurrence() {
    for len in [1 << 11, 1 << 16] {
        let sample = || Sample::new(len, 8).one_direction();
        for beta in [0.0, 1e-6, 0.5, 1.0, 1.5, 1.999_999, 2.0] {
            let what = format!("beta {beta}, {len} tokens");
            check_last_rows_of_one(&what, &sample().beta(|_| beta));
        }
        let rarely = |t: usize| if t.is_multiple_of(1000) { 1.0 } else { 2.0 };
        check_last_rows_of_one("projections among reflections", &sample().beta(rarely));
    }
}
