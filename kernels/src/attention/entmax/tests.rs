//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;

use super::{Config, Entmax};
use crate::attention::conformance::prepared::PreparedCase;
use crate::attention::conformance::rowwise::{dot, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::rowwise::{Rowwise, rowwise};
use crate::attention::{AttentionShape, ExecPath};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![Config::default(), Config { rotary: Rotary::new(false) }]
    }

    /// Beside those of attention: the means of dP. A weight's relative error is that of its score over
    /// S/2 − τ, which makes it larger than softmax's: in emulation, the least accurate gradients have the error
    /// of ten roundings.
    fn roundings(&self) -> u32 {
        12
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
        let root = (shape.head_dim as f64).sqrt();
        weighted(shape, v, documents, |b, h, i, keys| {
            let scores = keys.map(|j| dot(shape, [&q, &k], [0, b, h, i, j]) / root);
            entmax(&scores.collect::<Vec<_>>())
        })
    }
}

/// 1.5-entmax of scores, its threshold by bisection.
fn entmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max) / 2.0;
    let weights = |tau: f64| scores.iter().map(move |s| (s / 2.0 - tau).max(0.0).powi(2));
    let (mut low, mut high) = (max - 1.0, max);
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if weights(middle).sum::<f64>() > 1.0 { low = middle } else { high = middle }
    }
    weights(high).collect()
}

/// One query and 65,536 keys whose scores are equal, far apart, or nearly equal.
#[test]
fn long_rows_agree_with_the_oracle() {
    type Ad = Autodiff<Flex>;
    let keys = 65_536;
    let wave = |j: usize| ((j * 7919) % 1009) as f32 / 1009.0;
    let cases: [(&str, &dyn Fn(usize) -> f32); 4] = [
        ("equal", &|_| 3.0),
        ("far apart", &|j| 1000.0 * wave(j)),
        ("spread", &|j| 4.0 * wave(j)),
        ("nearly equal", &|j| 1e-3 * wave(j) - 20.0),
    ];
    let op = Rowwise { weights: Entmax, scale: 1.0, window: None };
    let device = Default::default();
    for (what, score) in cases {
        let scores: Vec<f32> = (0..keys).map(score).collect();
        let value = |j: usize| 1.0 + (j % 5) as f32;
        let values: Vec<f32> = (0..keys).map(value).collect();
        let row = |x: &[f32]| Tensor::<Ad, 1>::from_floats(x, &device).reshape([1, 1, keys, 1]);
        let q = Tensor::<Ad, 4>::ones([1, 1, 1, 1], &device).require_grad();
        let k = row(&scores).require_grad();
        let o = rowwise(&op, q.clone(), k.clone(), row(&values), None, None, ExecPath::Reference);
        let grads = o.clone().sum().backward();
        let weights = entmax(&scores.iter().map(|&s| f64::from(s)).collect::<Vec<_>>());
        let want: f64 = weights.iter().zip(&values).map(|(p, &v)| p * f64::from(v)).sum();
        let got = f64::from(o.into_scalar());
        assert!((got - want).abs() < 2e-5 * want, "{what}: {got} where {want} is right");
        for grad in [q.grad(&grads), k.grad(&grads)] {
            let grad: Vec<f32> = grad.expect("a gradient").into_data().to_vec().expect("f32");
            assert!(grad.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

/// Of the kernels on prepared inputs: in emulation, up to seven.
const ROUNDINGS: u32 = 10;

#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_for_scores_of_any_size() {
    for size in [0.2, 4.0, 25.0, 400.0] {
        for sizes in [[200, 200, 64], [140, 140, 128]] {
            PreparedCase::new(Entmax, sizes, |_| size).check(ROUNDINGS);
        }
    }
    // Separate kernels of dq and of dk and dv, fewer queries than keys.
    for sizes in [[100, 100, 256], [70, 200, 64], [1, 90, 64]] {
        PreparedCase::new(Entmax, sizes, |_| 25.0).check(ROUNDINGS);
    }
    PreparedCase::new(Entmax, [200, 200, 64], |_| 25.0).packed().check(ROUNDINGS);
    PreparedCase::new(Entmax, [200, 200, 64], |_| 25.0).packed().window(90).check(ROUNDINGS);
}

/// Rows that need many passes beside rows that need few: keys that are equal, far apart, and one at all.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_find_thresholds_of_all_kinds_of_rows() {
    let equal = |sizes| PreparedCase::new(Entmax, sizes, |_| 400.0).equal_keys();
    equal([300, 300, 64]).check_output(ROUNDINGS);
    equal([1, 3000, 64]).check_output(ROUNDINGS);
    let length = |position: usize| [0.0, 0.3, 400.0, 2.0][position % 4];
    PreparedCase::new(Entmax, [1000, 1000, 64], length).check_output(ROUNDINGS);
    let [o, dq, dk, _] = PreparedCase::new(Entmax, [130, 130, 64], length).window(1).on_cuda();
    assert!(o.iter().all(|x| x.is_finite()));
    let largest = dq.iter().chain(&dk).fold(0.0f64, |a, x| a.max(x.abs()));
    assert!(largest < 0.01, "a single key has no gradient, but {largest}");
}

/// Rows whose candidates fit, beside blocks with a row where they do not, for all sizes of heads.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_find_thresholds_of_few_and_of_many_candidates() {
    for (sizes, few) in [
        ([1000, 1000, 64], 8.0),
        ([300, 1111, 64], 8.0),
        ([130, 9000, 64], 8.0),
        ([600, 600, 128], 11.0),
        ([300, 700, 256], 16.0),
    ] {
        let case = |length: fn(usize, f32) -> f32| {
            PreparedCase::new(Entmax, sizes, |position| length(position, few))
        };
        case(|_, few| few).check_output(ROUNDINGS);
        // Support for every key in 1 of 384 rows, of every block in three.
        case(|at, few| if at % 384 == 100 { 0.1 } else { few }).check_output(ROUNDINGS);
        case(|at, few| few * [0.3, 1.0, 30.0][at / 50 % 3]).check_output(ROUNDINGS);
    }
    let case = PreparedCase::new(Entmax, [700, 700, 64], |_| 8.0);
    case.clone().window(300).check_output(ROUNDINGS);
    case.clone().packed().check_output(ROUNDINGS);
    case.packed().window(450).check_output(ROUNDINGS);
}

/// Scores that rise or fall with the distance: the lists fill again and again, or never.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_find_thresholds_of_sorted_scores() {
    for sizes in [[200, 900, 64], [130, 4000, 64]] {
        for factor in [|j: usize| 1.0 - j as f32 / 4096.0, |j: usize| (j + 1) as f32 / 4096.0] {
            let case = PreparedCase::new(Entmax, sizes, |_| 400.0);
            case.equal_keys().scaled_keys(factor).check_output(ROUNDINGS);
        }
    }
}

/// When lists are full depends on all rows of a warp; what a row finds does not.
#[test]
#[ignore = "needs a GPU"]
fn a_rows_output_does_not_depend_on_other_rows() {
    let output = |odd: f32| {
        let length = |position: usize| if position % 2 == 1 { odd } else { 8.0 };
        let [o, ..] = PreparedCase::new(Entmax, [900, 900, 64], length).on_cuda();
        o
    };
    let (sparse, sparser) = (output(9.0), output(40.0));
    for (at, (a, b)) in sparse.iter().zip(&sparser).enumerate() {
        let position = at / 64 % 900;
        assert!(position % 2 == 1 || a == b, "position {position}: {a} and {b}");
    }
}

/// One query without gradients, over short and over split caches.
#[test]
#[ignore = "needs a GPU"]
fn decoding_agrees_with_the_reference() {
    for (keys, head_dim) in [(1, 64), (90, 64), (700, 64), (3000, 128), (300, 256)] {
        for size in [0.2, 25.0, 400.0] {
            let case = PreparedCase::new(Entmax, [1, keys, head_dim], |_| size);
            case.clone().check_output(ROUNDINGS);
            case.window(70).check_output(ROUNDINGS);
        }
    }
}
