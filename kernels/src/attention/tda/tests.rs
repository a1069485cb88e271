//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};

use super::Config;
use crate::Cuda;
use crate::attention::conformance::in_bf16::{agrees_at, decodes_at};
use crate::attention::conformance::rowwise::{away_from_zero, cosine, rms_norm, rows, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::{AttentionShape, Inputs, dispatch};
use crate::testing::Tensor64;

impl Conformance for Config {
    const STEP: f64 = 1e-7;

    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![
            // The cosines of the inputs are about 0.8: some pass the thresholds, some do not.
            Config { beta: 0.5, ..config.clone() },
            Config {
                p: 1,
                beta: 0.65,
                kappa: 3.0,
                norm_eps: 1e-3,
                rotary: Rotary::new(false),
                ..config.clone()
            },
            Config { beta: 0.5, learn_beta: false, ..config.clone() },
            Config {
                p: 3,
                beta: 0.5,
                rotary: Rotary { theta: 100.0, ..Rotary::new(true) },
                ..config
            },
        ]
    }

    fn prepare(&self, inputs: &mut [Tensor64]) {
        away_from_zero(inputs, 2.0);
        inputs[3 + usize::from(self.learn_beta)].data[0] = 0.05; // λ
    }

    /// Beside those of attention: q and k when normalised, the difference of views, the norm's input and its
    /// gradient; in emulation, the least accurate gradients have the error of thirteen roundings.
    fn roundings(&self) -> u32 {
        20
    }

    fn has_kinks(&self) -> bool {
        self.p == 1
    }

    /// As for `rela`: the norm's gradient is orthogonal to its input, so that errors are relative to the size
    /// of all gradients.
    fn vanished(&self) -> f64 {
        1.0
    }

    fn cancelling(&self) -> &'static [&'static str] {
        if self.learn_beta { &["beta", "lambda"] } else { &["lambda"] }
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, parameters @ ..] = inputs else { panic!("q, k, v and the parameters") };
        let (beta, lambda, norm) = match parameters {
            [beta, lambda, norm] if self.learn_beta => (beta.data[0], lambda, norm),
            [lambda, norm] => (f64::from(self.beta), lambda, norm),
            _ => panic!("β, if it is learned, λ and the norm"),
        };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let lambda = lambda.data[0].clamp(0.0, 1.0);
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let place = (i - documents[b][i]) as f64;
            let log = ((place + 1.0) / f64::from(self.kappa)).ln().max(0.0);
            let tau = beta * (2.0 * log / shape.head_dim as f64).sqrt();
            let weight = |view: usize, j: usize| {
                let excess = cosine(shape, [&q, &k], [view, b, h, i, j]) - tau;
                excess.max(0.0).powi(self.p as i32)
            };
            keys.map(|j| weight(0, j) - lambda * weight(1, j)).collect()
        });
        rows(&o, |row| rms_norm(row, norm, f64::from(self.norm_eps)))
    }
}

type Ad = Autodiff<Flex>;

fn random(shape: [usize; 4]) -> Tensor<Ad, 4> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Default::default())
}

fn values<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
    x.into_data().to_vec().expect("an f32 tensor")
}

/// The output for q, k, v and λ, and the gradients of q and λ.
fn run([q, k, v]: [&Tensor<Ad, 4>; 3], lambda: f32) -> [Vec<f32>; 3] {
    let device = Default::default();
    let [_, heads, _, d] = v.dims();
    let shape = AttentionShape::new(heads * d, heads, heads, d);
    let q = q.clone().detach().require_grad();
    let lambda = Tensor::<Ad, 1>::from_floats([lambda], &device).require_grad();
    let beta = Tensor::from_floats([0.2], &device);
    let parameters = vec![beta, lambda.clone(), Tensor::ones([d], &device)];
    let (k, v) = (k.clone(), v.clone());
    let inputs = Inputs { q: q.clone(), k, v, projections: vec![], parameters };
    let o = dispatch::attend(&Config::default(), &shape, inputs, None);
    let weights = o.clone().detach() + 0.3;
    let grads = (o.clone() * weights).sum().backward();
    let [dq, dlambda] = [q.grad(&grads).map(values), lambda.grad(&grads).map(values)]
        .map(|x| x.expect("a gradient"));
    [values(o.inner()), dq, dlambda]
}

#[test]
fn lambda_is_clamped_and_can_come_back() {
    let [q, k] = [(); 2].map(|()| random([1, 4, 40, 8]));
    let v = random([1, 2, 40, 8]);
    let run = |lambda| run([&q, &k, &v], lambda);
    for (outside, edge) in [(1.4, 1.0), (-0.3, 0.0)] {
        let ([o, _, slope], [want, _, want_slope]) = (run(outside), run(edge));
        let worst = o.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(worst < 1e-4, "λ = {outside} differs from {edge} by {worst}");
        assert!(slope[0] != 0.0 && (slope[0] - want_slope[0]).abs() < 1e-2 * want_slope[0].abs());
    }
}

/// Equal views with λ = 1 cancel: every weight is 0.
#[test]
fn equal_views_cancel_to_zero_with_finite_gradients() {
    let [q, k, v] = [(); 3].map(|()| random([1, 2, 40, 8]));
    let [q, k] = [q, k].map(|x| Tensor::cat(vec![x.clone(), x], 1));
    let [o, dq, dlambda] = run([&q, &k, &v], 1.0);
    assert!(o.iter().all(|&x| x == 0.0));
    assert!(dq.iter().chain(&dlambda).all(|x| x.is_finite()));
}

/// The last tokens of 65,536, decoded at once, agree with the definition in f64, under a window: the
/// threshold counts all tokens before.
#[test]
fn thresholds_count_tokens_that_left_the_window() {
    let (tokens, last, d, window) = (65_536, 8, 8, 64);
    let shape = AttentionShape { window: Some(window), ..AttentionShape::new(d, 1, 1, d) };
    let config = Config { rotary: Rotary::new(false), ..Config::default() };
    let device = Default::default();
    let [q, k] = [(); 2].map(|()| random([1, 2, tokens, d]).inner());
    let v = random([1, 1, tokens, d]).inner();
    let beta = 0.2;
    let inputs = |first: usize, n: usize| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(2, first, n));
        let norm = Tensor::ones([d], &device);
        let parameters =
            vec![Tensor::from_floats([beta], &device), Tensor::from_floats([0.5], &device), norm];
        Inputs { q, k, v, projections: vec![], parameters }
    };
    let mut state = dispatch::State::<_, Flex>::new(0);
    dispatch::extend(&config, &shape, inputs(0, tokens - last), &mut state);
    let o = values(dispatch::extend(&config, &shape, inputs(tokens - last, last), &mut state));
    let cut = |x: &Tensor<Flex, 4>| {
        let x = x.clone().narrow(2, tokens - last - window, last + window);
        Tensor64::new(&x.dims(), values(x).into_iter().map(f64::from).collect())
    };
    let (q, k, v) = (cut(&q), cut(&k), cut(&v));
    for i in 0..last {
        let place = (tokens - last + i + 1) as f64;
        let tau = beta * (2.0 * place.ln() / d as f64).sqrt();
        let at = window + i;
        let weight = |view: usize, j: usize| {
            (cosine(&shape, [&q, &k], [view, 0, 0, at, j]) - tau).max(0.0).powi(2)
        };
        let keys = at + 1 - window..at + 1;
        let sum = |n: usize| -> f64 {
            let term = |j: usize| (weight(0, j) - 0.5 * weight(1, j)) * v.at(&[0, 0, j, n]);
            keys.clone().map(term).sum()
        };
        let want = rms_norm(
            &(0..d).map(sum).collect::<Vec<_>>(),
            &Tensor64::new(&[d], vec![1.0; d]),
            1e-6,
        );
        for (n, want) in want.iter().enumerate() {
            let got = f64::from(o[i * d + n]);
            assert!((got - want).abs() < 1e-4, "row {i}: {got} where {want} is right");
        }
    }
}

/// Thresholds that some keys pass, and near 0. `rectified::tests` has rows without a survivor.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_at_any_share_of_survivors() {
    let config = Config::default();
    for (p, beta) in [(2, 1.2), (4, 1.2), (2, 1e-3), (1, 1e-3)] {
        let variant = Config { p, beta, ..config.clone() };
        agrees_at::<Config, Cuda>(&variant, [4, 2, 64, 2, 200], None);
        agrees_at::<Config, Cuda>(&variant, [2, 1, 128, 1, 140], Some(65));
    }
    decodes_at::<Config, Cuda>(&Config { beta: 1.2, ..config }, [4, 2, 64, 2, 700]);
}
