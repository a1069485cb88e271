//! This variant's cases for the conformance suite, decoding, and extreme inputs.

mod cuda;
mod kernel;
mod numerics;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Config, FullRank, Rank, WActivation};
use crate::attention::conformance::{Conformance, softmax_oracle};
use crate::attention::{AttentionShape, DecodeState, Inputs, VariantSpec, dispatch};
use crate::backend::OpBackend;
use crate::testing::{Tensor64, assert_budget};

/// f(w) / √(Σ f(w)² + 1e-6) of one token's head.
fn direction(w: &Tensor64, at: [usize; 3], head_dim: usize, activation: WActivation) -> Vec<f64> {
    let [b, h, t] = at;
    let f = |w: f64| match activation {
        WActivation::None => w,
        WActivation::Silu => w / (1.0 + (-w).exp()),
    };
    let w: Vec<f64> = (0..head_dim).map(|n| f(w.at(&[b, t, h * head_dim + n]))).collect();
    let length = (w.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    w.iter().map(|x| x / length).collect()
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// H x = x − β w (wᵀx).
pub(super) fn householder(x: &mut [f64], w: &[f64], beta: f64) {
    let along = beta * dot(w, x);
    x.iter_mut().zip(w).for_each(|(x, w)| *x -= along * w);
}

impl Conformance for Config {
    const WIDEST_HEAD: usize = 128;

    fn cases() -> Vec<Self> {
        let silu = WActivation::Silu;
        vec![
            Config { w_activation: silu, ..Config::default() },
            Config {
                forget_gate: true,
                rank: Some(Rank::Full(FullRank::Full)),
                ..Config::default()
            },
        ]
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, w, beta, gate @ ..] = inputs else { panic!("q, k, v, w, beta") };
        let [batch, heads, seq_len, d] = q.shape[..] else { panic!("q has 4 dimensions") };
        let group = shape.heads / shape.kv_heads;
        // scores[b][h][i][j], by taking q_i through H_i, H_{i−1}, … one at a time.
        let mut scores = vec![vec![vec![vec![0.0; seq_len]; seq_len]; heads]; batch];
        for b in 0..batch {
            for h in 0..heads {
                let row = |x: &Tensor64, h: usize, t: usize| -> Vec<f64> {
                    (0..d).map(|n| x.at(&[b, h, t, n])).collect()
                };
                let kv = h / group;
                let keys: Vec<_> = (0..seq_len).map(|t| row(k, kv, t)).collect();
                let w: Vec<_> =
                    (0..seq_len).map(|t| direction(w, [b, kv, t], d, self.w_activation)).collect();
                for i in 0..seq_len {
                    let mut x = row(q, h, i);
                    let mut decay = 0.0;
                    for j in (0..=i).rev() {
                        scores[b][h][i][j] = dot(&keys[j], &x) / (d as f64).sqrt() + decay;
                        let beta = 2.0 / (1.0 + (-beta.at(&[b, j, kv])).exp());
                        householder(&mut x, &w[j], beta);
                        let logit = gate.first().map(|gate| gate.at(&[b, j, h]));
                        decay -= logit.map_or(0.0, |x| (-x).exp().ln_1p());
                    }
                }
            }
        }
        softmax_oracle(shape, [q, v], None, documents, |b, h, i, j| scores[b][h][i][j])
    }
}

/// Numbers of unit variance.
pub(super) fn uniform(rng: &mut ChaCha8Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(-1.7f32..1.7)).collect()
}

pub(super) fn values<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Inputs of a layer with two query heads on one key head.
fn layer<B: OpBackend>(shape: &AttentionShape, len: usize, scale: f32) -> Inputs<B> {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    fn tensor<B: OpBackend, const D: usize>(
        rng: &mut ChaCha8Rng,
        shape: [usize; D],
        scale: f32,
    ) -> Tensor<B, D> {
        let data = uniform(rng, shape.iter().product()).iter().map(|x| x * scale).collect();
        Tensor::from_data(TensorData::new::<f32, _>(data, shape), &Default::default())
    }
    let d = shape.head_dim;
    Inputs {
        q: tensor(&mut rng, [1, shape.heads, len, d], 1.0),
        k: tensor(&mut rng, [1, shape.kv_heads, len, d], 1.0),
        v: tensor(&mut rng, [1, shape.kv_heads, len, d], 1.0),
        projections: [shape.kv_heads * d, shape.kv_heads, shape.heads]
            .map(|features| tensor(&mut rng, [1, len, features], scale))
            .into(),
        parameters: vec![],
    }
}

/// `n` tokens of a layer's inputs.
fn cut(inputs: &Inputs<Flex>, first: usize, n: usize) -> Inputs<Flex> {
    let cut = |x: &Tensor<Flex, 4>| x.clone().narrow(2, first, n);
    Inputs {
        q: cut(&inputs.q),
        k: cut(&inputs.k),
        v: cut(&inputs.v),
        projections: inputs.projections.iter().map(|x| x.clone().narrow(1, first, n)).collect(),
        parameters: vec![],
    }
}

/// Zero directions, β at both ends of its range, gates at both ends of theirs.
#[test]
fn gradients_stay_finite_at_the_ends_of_every_range() {
    let shape = AttentionShape::new(16, 2, 1, 8);
    for (directions, gates) in [(0.0, 1e4), (1e-20, 1e4), (1e4, 1e-6)] {
        let Inputs { q, k, v, projections, .. } = layer::<Autodiff<Flex>>(&shape, 200, gates);
        let [w, beta, gate] = &projections[..] else { panic!("three projections") };
        let w = w.clone() / gates * directions;
        let projections: Vec<_> = [w, beta.clone(), gate.clone()].map(Tensor::require_grad).into();
        let q = q.require_grad();
        let inputs =
            Inputs { q: q.clone(), k, v, projections: projections.clone(), parameters: vec![] };
        let out = dispatch::attend(
            &Config { forget_gate: true, ..Config::default() },
            &shape,
            inputs,
            None,
        );
        assert!(values(out.clone().inner()).iter().all(|x| x.is_finite()), "outputs");
        let grads = (out.clone() * out).sum().backward();
        let finite = |x: Vec<f64>| assert!(x.iter().all(|x| x.is_finite()), "gradients");
        finite(values(q.grad(&grads).expect("a gradient of q")));
        projections.iter().for_each(|x| finite(values(x.grad(&grads).expect("a gradient"))));
    }
}

/// Prefills and steps that end before, at and after the 64 tokens after which keys are rewritten.
#[test]
fn decoding_across_rewrites_equals_the_full_pass() {
    let config = Config { forget_gate: true, ..Config::default() };
    for window in [None, Some(1), Some(64), Some(100)] {
        let shape = AttentionShape { window, ..AttentionShape::new(16, 2, 1, 8) };
        let inputs = layer::<Flex>(&shape, 500, 1.0);
        let full = values(dispatch::attend(&config, &shape, inputs.clone(), None));
        let mut state = dispatch::State::<_, Flex>::new(0);
        let (mut outputs, mut first) = (vec![], 0);
        for n in [1, 62, 1, 64, 1, 100, 33, 30, 2, 1, 130, 63, 12] {
            outputs.push(dispatch::extend(&config, &shape, cut(&inputs, first, n), &mut state));
            first += n;
        }
        let got = values(Tensor::cat(outputs, 2));
        assert_budget(&format!("window {window:?}"), &got, &got, &full);
    }
}

/// With a window w, at most w − 1 rewritten tokens and 63 newer ones are kept.
#[test]
fn a_windowed_state_does_not_grow() {
    let shape = AttentionShape { window: Some(100), ..AttentionShape::new(16, 2, 1, 8) };
    let config = Config { forget_gate: true, ..Config::default() };
    let inputs = layer::<Flex>(&shape, 1000, 1.0);
    let mut state = dispatch::State::<_, Flex>::new(0);
    let mut extend = |first, n| {
        dispatch::extend(&config, &shape, cut(&inputs, first, n), &mut state);
        state.elements()
    };
    let (token, transform) = (2 * 8 + 2, 8 * 8 + 2);
    for t in 0..700 {
        let held = extend(t, 1);
        assert!(held <= token * (99 + 63) + transform, "{held} elements after token {t}");
    }
    // A prefill rewrites all keys; ten more tokens are new.
    assert_eq!(extend(700, 290), token * 99);
    assert_eq!(extend(990, 10), token * (99 + 10) + transform);
}

#[test]
fn a_rank_outside_the_layer_is_reported() {
    let shape = AttentionShape::new(16, 2, 1, 8);
    for (rank, ok) in [(0, false), (1, true), (16, true), (17, false)] {
        let mut problems = Problems::new();
        Config { rank: Some(Rank::Channels(rank)), ..Config::default() }.validate(
            "model.attention",
            &shape,
            &mut problems,
        );
        assert_eq!(problems.as_slice().is_empty(), ok, "rank {rank}: {problems}");
        for problem in problems.as_slice() {
            assert_eq!(problem.key, "model.attention.rank");
            assert_eq!(problem.remedy, "leave it out for its default");
        }
    }
}

#[test]
fn a_rank_is_a_number_or_the_word_full() {
    let rank = |text: &str| toml::from_str::<Config>(text).map(|config| config.rank);
    assert_eq!(rank("rank = 8"), Ok(Some(Rank::Channels(8))));
    assert_eq!(rank("rank = \"full\""), Ok(Some(Rank::Full(FullRank::Full))));
    let error = rank("rank = \"half\"").unwrap_err().to_string();
    assert!(error.contains("expected a number of channels, or \"full\""), "{error}");
}
