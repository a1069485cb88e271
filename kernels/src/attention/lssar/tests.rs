//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};

use super::{Config, Lssar};
use crate::attention::conformance::prepared::PreparedCase;
use crate::attention::conformance::rowwise::{cosine, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::rowwise::{Rowwise, rowwise};
use crate::attention::{AttentionShape, ExecPath, Inputs, dispatch};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![
            Config { p: 3, ..config.clone() },
            Config { p: 3, rotary: Rotary::new(false) },
            config,
            Config { p: 1, rotary: Rotary::new(false) },
        ]
    }

    /// Higher powers amplify the rounding of q and k, and with p = 1 gradients jump where a key is at the mean:
    /// in emulation of the suites' problems, errors of gradients reach those of some thousand roundings.
    fn kernel_cases() -> Vec<Self> {
        Self::cases().into_iter().filter(|config| config.p == 3).collect()
    }

    /// With p = 3, the kernels' case: every second key is more similar to queries than the others, so that no
    /// row's keys are all near its mean.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        if self.p != 3 {
            return;
        }
        let [q, k, ..] = inputs else { panic!("q and k") };
        q.data.iter_mut().for_each(|x| *x += 0.8);
        let [.., tokens, head_dim] = k.shape[..] else { panic!("k has 4 dimensions") };
        for (at, x) in k.data.iter_mut().enumerate() {
            *x += if (at / head_dim % tokens).is_multiple_of(2) { 0.8 } else { -0.8 };
        }
    }

    /// In emulation with p = 3, outputs have the error of up to 20 roundings, gradients of up to 50 where there
    /// are few rows: those of q and k amplified.
    fn roundings(&self) -> u32 {
        40
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

/// Of the kernels on prepared inputs: in emulation, the least accurate gradients have the error of ten, more
/// where the keys of a row are all near its mean.
const ROUNDINGS: u32 = 24;

/// Queries as long as the model makes them, in rows of `[queries, keys, head_dim]`.
fn prepared(power: u32, sizes: [usize; 3]) -> PreparedCase<Lssar> {
    let length = move |position: usize| (sizes[2] as f32).ln() * ((position + 1) as f32).ln();
    PreparedCase::new(Lssar { power }, sizes, length).kinks(power == 1)
}

#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_with_any_power() {
    for power in [1, 2, 3, 15, 32] {
        prepared(power, [200, 200, 64]).check(ROUNDINGS);
    }
    // Other tiles, separate kernels of dq and of dk and dv, fewer queries than keys.
    for sizes in [[140, 140, 128], [100, 100, 256], [70, 200, 64], [1, 90, 64]] {
        prepared(3, sizes).check(ROUNDINGS);
    }
    for power in [1, 3] {
        prepared(power, [200, 200, 64]).packed().check(ROUNDINGS);
        prepared(power, [200, 200, 64]).packed().window(90).check(ROUNDINGS);
    }
}

/// Scores far below 0, where φ is eˣ, and far above; rows that select nothing; rows of one to three keys.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_for_scores_of_any_size() {
    for (power, size) in [(1, 0.5), (3, 200.0), (3, 0.5)] {
        let case = PreparedCase::new(Lssar { power }, [200, 200, 64], |_| size).kinks(power == 1);
        case.clone().check(ROUNDINGS);
        case.window(3).check(ROUNDINGS);
    }
    let [o, dq, dk, dv] = prepared(15, [130, 130, 64]).equal_keys().on_cuda();
    assert!(o.iter().chain(&dq).chain(&dk).chain(&dv).all(|x| x.is_finite()));
    let rows = o.chunks_exact(64).enumerate();
    assert!(rows.filter(|(row, _)| row % 130 >= 3).all(|(_, o)| o.iter().all(|&x| x == 0.0)));
}

/// One query without gradients, over short and over split caches.
#[test]
#[ignore = "needs a GPU"]
fn decoding_agrees_with_the_reference() {
    for (keys, head_dim) in [(1, 64), (90, 64), (700, 64), (3000, 128), (300, 256)] {
        for power in [1, 15] {
            prepared(power, [1, keys, head_dim]).check_output(ROUNDINGS);
            prepared(power, [1, keys, head_dim]).window(70).check_output(ROUNDINGS);
        }
    }
}
