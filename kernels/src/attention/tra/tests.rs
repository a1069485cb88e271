//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use longwall_config::Problems;
use serde::de::value::{Error, MapDeserializer};

use super::Config;
use crate::Cuda;
use crate::attention::conformance::in_bf16::{agrees_at, decodes_at};
use crate::attention::conformance::rowwise::{away_from_zero, cosine, rms_norm, rows, weighted};
use crate::attention::conformance::{Conformance, rotated_and_scaled};
use crate::attention::kv_cache_variant::{KvCacheVariant, Prepared};
use crate::attention::rectified::{Rectified, l2_normalise};
use crate::attention::rotary::Rotary;
use crate::attention::rotation::Scaling;
use crate::attention::rowwise::Weights;
use crate::attention::{AttentionShape, ExecPath, Inputs, VariantSpec, dispatch};
use crate::ops::matmul::MatMul;
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
                rotary: Rotary {
                    theta: 100.0,
                    scaling: Scaling::Ntk { factor: 4.0 },
                    ..Rotary::new(true)
                },
                ..config
            },
        ]
    }

    fn prepare(&self, inputs: &mut [Tensor64]) {
        away_from_zero(inputs, 2.0);
    }

    /// Beside those of attention: q and k when normalised, the norm's input and its gradient; in
    /// emulation, the least accurate gradients have the error of ten roundings.
    fn roundings(&self) -> u32 {
        16
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
        if self.learn_beta { &["beta"] } else { &[] }
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, parameters @ ..] = inputs else { panic!("q, k, v and the parameters") };
        let (beta, norm) = match parameters {
            [beta, norm] if self.learn_beta => (beta.data[0], norm),
            [norm] => (f64::from(self.beta), norm),
            _ => panic!("β, if it is learned, and the norm"),
        };
        let d = shape.head_dim as f64;
        let Rotary { theta, scaling, .. } = self.rotary;
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated_and_scaled(x, theta, scaling, shape.head_dim),
            false => x.clone(),
        });
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let place = (i - documents[b][i]) as f64;
            let log = ((place + 1.0) / f64::from(self.kappa)).ln();
            let tau = if log > 0.0 { beta * (2.0 * log / d).sqrt() } else { 0.0 };
            let excess = |j| cosine(shape, [&q, &k], [0, b, h, i, j]) - tau;
            keys.map(|j| excess(j).max(0.0).powi(self.p as i32)).collect()
        });
        rows(&o, |row| rms_norm(row, norm, f64::from(self.norm_eps)))
    }
}

type Ad = Autodiff<Flex>;

fn random(shape: [usize; 4]) -> Tensor<Ad, 4> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Default::default())
}

/// The output for q, k, v and β, and the gradients of all four.
fn run([q, k, v]: [Tensor<Ad, 4>; 3], beta: f32) -> [Vec<f32>; 5] {
    let device = Default::default();
    let [_, heads, _, d] = q.dims();
    let shape = AttentionShape::new(heads * d, heads, heads, d);
    let [q, k, v] = [q, k, v].map(|x| x.detach().require_grad());
    let beta = Tensor::<Ad, 1>::from_floats([beta], &device).require_grad();
    let parameters = vec![beta.clone(), Tensor::ones([d], &device)];
    let inputs =
        Inputs { q: q.clone(), k: k.clone(), v: v.clone(), projections: vec![], parameters };
    let o = dispatch::attend(&Config::default(), &shape, inputs, None);
    let grads = (o.clone() * random(o.dims())).sum().backward();
    let [dq, dk, dv] = [q, k, v].map(|x| values(x.grad(&grads).expect("a gradient")));
    [values(o.inner()), dq, dk, dv, values(beta.grad(&grads).expect("a gradient"))]
}

fn values<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
    x.into_data().to_vec().expect("an f32 tensor")
}

#[test]
fn rows_without_a_survivor_give_zero_and_finite_gradients() {
    let (tokens, d) = (50, 8);
    let inputs = [(); 3].map(|()| random([1, 2, tokens, d]));
    // The threshold of row 0 is 0, all others are above 1.
    let [o, dq, rest @ ..] = run(inputs, 10.0);
    for head in 0..2 {
        let rows = (head * tokens + 1) * d..(head + 1) * tokens * d;
        assert!(o[rows.clone()].iter().all(|&x| x == 0.0), "outputs {:?}", &o[rows]);
        assert!(dq[rows.clone()].iter().all(|&x| x == 0.0), "gradients of q {:?}", &dq[rows]);
    }
    assert!(rest.iter().flatten().all(|x| x.is_finite()));
}

#[test]
fn queries_and_keys_of_zeros_are_safe() {
    let [k, v] = [(); 2].map(|()| random([1, 1, 30, 8]));
    let results = run([k.zeros_like(), k.clone(), v.clone()], 1.0);
    assert!(results[0].iter().all(|&x| x == 0.0), "{:?}", results[0]);
    assert!(results.iter().flatten().all(|x| x.is_finite()));
    let results = run([k.clone(), k.zeros_like(), v], 0.1);
    assert!(results.iter().flatten().all(|x| x.is_finite()));
}

/// Theorem 4.3: of random keys, at most κ pass the threshold on average, at any length.
#[test]
fn chance_survivors_stay_below_kappa() {
    let (queries, keys, d) = (64, 8192, 64);
    let [q, k] = [queries, keys].map(|n| l2_normalise(random([1, 1, n, d]).inner()));
    let tau = (2.0 * (keys as f32).ln() / d as f32).sqrt();
    let scores = q.mm(k.transpose()) - tau;
    let nothing_hidden = scores.clone().is_nan();
    let weights = Rectified { power: 2 }.weigh(scores, nothing_hidden);
    let survivors = values(weights).iter().filter(|&&a| a > 0.0).count();
    assert!(survivors <= queries, "{survivors} survivors of {queries} queries");
}

/// The last rows of a sequence of 65,536 tokens agree with the definition in f64, and have finite
/// gradients.
#[test]
fn long_sequences_agree_with_the_oracle() {
    let (tokens, last, d, beta) = (65_536, 32, 16, 0.6);
    let shape = AttentionShape::new(d, 1, 1, d);
    let config = Config { rotary: Rotary::new(false), ..Config::default() };
    let [q, k, v] = [last, tokens, tokens].map(|n| random([1, 1, n, d]).require_grad());
    let device = Default::default();
    let learned = Tensor::<Ad, 1>::from_floats([beta], &device).require_grad();
    let parameters = [learned.clone(), Tensor::ones([d], &device)];
    let first = tokens - last;
    let call = Prepared {
        q: l2_normalise(q.clone()),
        k: l2_normalise(k.clone()),
        v: v.clone(),
        parameters: &parameters,
        first,
        documents: None,
        path: ExecPath::Reference,
    };
    let o = config.output(&shape, call);
    let grads = o.clone().powi_scalar(3).sum().backward();
    let grads = [q.grad(&grads), k.grad(&grads), v.grad(&grads)].map(|x| x.expect("a gradient"));
    assert!(grads.into_iter().flat_map(values).all(|x| x.is_finite()));
    let o = values(o.inner());
    let f64s = |x: Tensor<Ad, 4>| values(x.inner()).into_iter().map(f64::from).collect::<Vec<_>>();
    let (q, k, v) = (f64s(q), f64s(k), f64s(v));
    let row = |x: &[f64], t: usize| x[t * d..(t + 1) * d].to_vec();
    let inner = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for i in [0, 7, 31] {
        let query = row(&q, i);
        let place = tokens - last + i;
        let tau = beta * (2.0 * ((place + 1) as f64).ln() / d as f64).sqrt();
        let mut want = vec![0.0; d];
        for j in 0..=place {
            let key = row(&k, j);
            let length = (inner(&query, &query) * inner(&key, &key)).sqrt();
            let weight = (inner(&query, &key) / length - tau).max(0.0).powi(2);
            want.iter_mut().zip(row(&v, j)).for_each(|(o, v)| *o += weight * v);
        }
        let want = rms_norm(&want, &Tensor64::new(&[d], vec![1.0; d]), 1e-6);
        for (n, want) in want.iter().enumerate() {
            let got = f64::from(o[i * d + n]);
            assert!((got - want).abs() < 3e-5, "row {i}: {got} where {want} is right");
        }
    }
}

#[test]
fn bad_values_are_reported_with_what_is_allowed() {
    let rotary = Rotary { theta: 0.5, ..Rotary::new(true) };
    let config =
        Config { p: 0, kappa: 0.0, beta: f32::NAN, norm_eps: 0.0, rotary, ..Config::default() };
    let mut problems = Problems::new();
    config.validate("model.attention", &AttentionShape::new(10, 2, 2, 5), &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|problem| problem.key.as_str()).collect();
    let table =
        ["p", "kappa", "beta", "norm_eps", "theta"].map(|key| format!("model.attention.{key}"));
    assert_eq!(keys[..5], table);
    assert!(keys[5..].contains(&"model.head_dim"), "{keys:?}");
    let mut problems = Problems::new();
    Config::default().validate(
        "model.attention",
        &AttentionShape::new(64, 1, 1, 64),
        &mut problems,
    );
    assert_eq!(problems.as_slice(), []);
    let misspelt = MapDeserializer::<_, Error>::new([("bta", 1.0f32)].into_iter());
    assert!(Config::deserialize(misspelt).is_err());
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
