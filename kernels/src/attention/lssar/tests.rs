//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};

use super::{Config, Lssar};
use crate::attention::conformance::rowwise::{cosine, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::rowwise::{Rowwise, rowwise};
use crate::attention::{AttentionShape, ExecPath, Inputs, dispatch};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![config.clone(), Config { p: 1, rotary: Rotary::new(false) }]
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v] = inputs else { panic!("q, k and v") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        weighted(shape, v, documents, |b, h, i, keys| {
            let n = keys.len() as f64;
            let scale = (shape.head_dim as f64).ln() * n.ln();
            let phi = |j| (scale * cosine(shape, [&q, &k], [0, b, h, i, j])).exp().ln_1p();
            let phi: Vec<f64> = keys.map(phi).collect();
            let total: f64 = phi.iter().sum();
            let offset = if n <= 3.0 { 0.0 } else { 1.0 };
            let sharpen = |phi: &f64| (n * phi / total - offset).max(0.0).powi(self.p as i32);
            let sharp: Vec<f64> = phi.iter().map(sharpen).collect();
            let total: f64 = sharp.iter().sum();
            sharp.iter().map(|r| r / total).collect()
        })
    }
}

type Ad = Autodiff<Flex>;

fn values<const D: usize>(x: Tensor<Flex, D>) -> Vec<f32> {
    x.into_data().to_vec().expect("an f32 tensor")
}

/// From the fourth on, a query whose keys all have the same similarity selects none of them.
#[test]
fn equal_keys_give_zero_and_finite_gradients() {
    let shape = AttentionShape::new(8, 1, 1, 8);
    let random = |tokens| {
        let shape = [1, 1, tokens, 8];
        Tensor::<Ad, 4>::random(shape, Distribution::Normal(0.0, 1.0), &Default::default())
    };
    let q = random(20).require_grad();
    let k = random(1).repeat_dim(2, 20).require_grad();
    let v = random(20);
    let config = Config { rotary: Rotary::new(false), ..Config::default() };
    let (projections, parameters) = (vec![], vec![]);
    let inputs = Inputs { q: q.clone(), k: k.clone(), v, projections, parameters };
    let o = dispatch::attend(&config, &shape, inputs, None);
    let grads = o.clone().sum().backward();
    let o = values(o.inner());
    assert!(o[..3 * 8].iter().all(|&x| x != 0.0) && o[3 * 8..].iter().all(|&x| x == 0.0), "{o:?}");
    for grad in [q.grad(&grads), k.grad(&grads)] {
        assert!(values(grad.expect("a gradient")).iter().all(|x| x.is_finite()));
    }
}

/// One query and 65,536 keys, with similarities from −1 to 1, or one key unlike the others.
#[test]
fn long_rows_agree_with_the_oracle() {
    let keys = 65_536;
    let scale = 64f32.ln() * (keys as f32).ln();
    let wave = |j: usize| ((j * 7919) % 1009) as f32 / 504.5 - 1.0;
    let cases: [(&str, &dyn Fn(usize) -> f32); 3] = [
        ("spread", &wave),
        ("one above", &|j| if j == 777 { 1.0 } else { -1.0 }),
        ("one below", &|j| if j == 777 { -1.0 } else { 0.5 + 0.1 * wave(j) }),
    ];
    let op = Rowwise { weights: Lssar { power: 15 }, scale: 1.0, window: None };
    let device = Default::default();
    for (what, cosine) in cases {
        let scores: Vec<f32> = (0..keys).map(|j| scale * cosine(j)).collect();
        let value: Vec<f32> = (0..keys).map(|j| 1.0 + (j % 5) as f32).collect();
        let row = |x: &[f32]| Tensor::<Ad, 1>::from_floats(x, &device).reshape([1, 1, keys, 1]);
        let q = Tensor::<Ad, 4>::ones([1, 1, 1, 1], &device).require_grad();
        let k = row(&scores).require_grad();
        let o = rowwise(&op, q.clone(), k.clone(), row(&value), None, None, ExecPath::Reference);
        let grads = o.clone().sum().backward();
        let phi: Vec<f64> = scores.iter().map(|&s| f64::from(s).exp().ln_1p()).collect();
        let mean = phi.iter().sum::<f64>() / keys as f64;
        let sharp: Vec<f64> = phi.iter().map(|f| (f / mean - 1.0).max(0.0).powi(15)).collect();
        let sum: f64 = sharp.iter().zip(&value).map(|(r, &v)| r * f64::from(v)).sum();
        let want = sum / sharp.iter().sum::<f64>();
        let got = f64::from(o.into_scalar());
        assert!((got - want).abs() < 1e-4 * want, "{what}: {got} where {want} is right");
        for grad in [q.grad(&grads), k.grad(&grads)] {
            assert!(values(grad.expect("a gradient")).iter().all(|x| x.is_finite()), "{what}");
        }
    }
}
