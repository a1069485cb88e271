//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;

use super::{Config, StickBreaking};
use crate::attention::conformance::rowwise::{dot, weighted};
use crate::attention::conformance::{Conformance, rotated};
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
