//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;

use super::{Config, StickBreaking};
use crate::Cuda;
use crate::attention::conformance::in_bf16::{agrees_at, agrees_on, decodes_on};
use crate::attention::conformance::rowwise::{dot, weighted};
use crate::attention::conformance::{Conformance, Problem, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::rowwise::{Rowwise, rowwise};
use crate::attention::{AttentionShape, ExecPath};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![Config::default(), Config { rotary: Rotary::new(true) }]
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
            let mut weights = vec![0.0; keys.len()];
            let mut left = 1.0;
            // From the query's predecessor backwards, each key takes its share of what is left.
            for (weight, j) in weights.iter_mut().zip(keys).rev().skip(1) {
                let share = 1.0 / (1.0 + (-dot(shape, [&q, &k], [0, b, h, i, j]) / root).exp());
                *weight = left * share;
                left *= 1.0 - share;
            }
            weights
        })
    }
}

/// One query after 65,535 keys whose scores are all large, all small, alternating and mixed.
#[test]
fn long_sticks_agree_with_the_recurrence() {
    type Ad = Autodiff<Flex>;
    let keys = 65_536;
    let mixed = |j: usize| ((j * 7919) % 97) as f32 - 80.0;
    let alternating = |j: usize| if j.is_multiple_of(2) { 60.0 } else { -60.0 };
    let slow = |j: usize| -11.0 + (j % 3) as f32;
    let cases: [(&str, &dyn Fn(usize) -> f32); 5] = [
        ("large", &|_| 60.0),
        ("small", &|_| -60.0),
        ("alternating", &alternating),
        ("mixed", &mixed),
        ("slow", &slow),
    ];
    let op = Rowwise { weights: StickBreaking, scale: 1.0, window: None };
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
        let (mut want, mut left) = (0.0f64, 1.0f64);
        for j in (0..keys - 1).rev() {
            let share = 1.0 / (1.0 + f64::from(-scores[j]).exp());
            want += left * share * f64::from(values[j]);
            left *= 1.0 - share;
        }
        let got = f64::from(o.into_scalar());
        // Up to 65,535 terms are summed one by one.
        assert!((got - want).abs() < 1e-4 * want, "{what}: {got} where {want} is right");
        for grad in [q.grad(&grads), k.grad(&grads)] {
            let grad: Vec<f32> = grad.expect("a gradient").into_data().to_vec().expect("f32");
            assert!(grad.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

/// Sticks that break within two tiles, in rows of many: the forward pass ends early, and the backward pass skips
/// what it did not reach.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_where_sticks_break_early() {
    let variant = Config::default();
    agrees_at::<Config, Cuda>(&variant, [4, 2, 64, 2, 700], None);
    agrees_at::<Config, Cuda>(&variant, [2, 1, 128, 1, 500], Some(300));
    let starts = [0, 90, 450];
    agrees_on::<Config, Cuda>(
        &variant,
        Problem::new(&variant, [2, 2, 64, 2, 600], None).packed(&starts),
    );
}

/// A problem whose scores, by `score` of the key's position, are about as large as given.
fn with_scores(variant: &Config, seq_len: usize, score: impl Fn(usize) -> f64) -> Problem {
    let head_dim = 64;
    let mut problem = Problem::new(variant, [4, 2, head_dim, 1, seq_len], None);
    let [q, k, ..] = &mut problem.inputs[..] else { panic!("q and k") };
    for (at, row) in q.data.chunks_exact_mut(head_dim).enumerate() {
        row[0] = if at % 2 == 0 { 4.0 } else { 2.0 };
    }
    for (at, row) in k.data.chunks_exact_mut(head_dim).enumerate() {
        // With 4 in the query, the scale 1/8 gives half of it.
        row[0] = 2.0 * score(at % seq_len);
    }
    problem
}

/// Sticks of which little is taken, so that all tiles and all splits of decoding matter, and sticks that a few keys
/// break at once.
#[test]
#[ignore = "needs a GPU"]
fn the_kernels_agree_where_sticks_last() {
    let variant = Config::default();
    let mixed = |j: usize| if j % 97 == 40 { 2.0 } else { -7.0 };
    let broken = |j: usize| if j % 150 == 70 { 100.0 } else { -6.0 };
    let scores: [&dyn Fn(usize) -> f64; 3] = [&|_| -6.0, &mixed, &broken];
    for score in scores {
        agrees_on::<Config, Cuda>(&variant, with_scores(&variant, 700, score));
        decodes_on::<Config, Cuda>(&variant, with_scores(&variant, 1300, score));
    }
    // Carries that are not saved.
    agrees_at::<Config, Cuda>(&variant, [2, 2, 8, 1, 1100], None);
}
