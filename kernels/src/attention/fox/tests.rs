//! This variant's cases for the conformance suite, and its numerics at length.

use burn::backend::Flex;
use burn::tensor::{Distribution, Tensor};

use super::Config;
use crate::attention::AttentionShape;
use crate::attention::conformance::{Conformance, rotated, softmax_oracle};
use crate::attention::softmax::{Softmax, softmax};
use crate::testing::Oracle;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![Config::default(), Config { rope: true, ..Config::default() }]
    }

    fn oracle(&self, shape: &AttentionShape, inputs: &[Oracle], documents: &[Vec<usize>]) -> Oracle {
        let [q, k, v, logits] = inputs else { panic!("q, k, v and the gate") };
        let group = shape.heads / shape.kv_heads;
        let d = shape.head_dim;
        let rotate = |x: &Oracle| match self.rope {
            true => rotated(x, self.theta, d),
            false => x.clone(),
        };
        let (q, k) = (rotate(q), rotate(k));
        let log_decay = |b: usize, h: usize, t: usize| -(-logits.at(&[b, t, h])).exp().ln_1p();
        softmax_oracle(shape, [&q, v], documents, |b, h, i, j| {
            let dot: f64 = (0..d).map(|n| q.at(&[b, h, i, n]) * k.at(&[b, h / group, j, n])).sum();
            dot / (d as f64).sqrt() + (j + 1..=i).map(|s| log_decay(b, h, s)).sum::<f64>()
        })
    }
}

/// After 16,000 steps that decay by 30 each, the prefix sum is near −500,000, where neighbouring
/// f32 numbers lie 0.03 apart; gates of −0.001 after that must still tell.
#[test]
fn small_gates_count_after_long_strong_decay() {
    let (strong, weak) = (16_000, 40);
    let keys = strong + weak;
    let device = Default::default();
    let decay: Vec<f32> = (0..keys).map(|t| if t < strong { -30.0 } else { -0.001 }).collect();
    let log_decay = Tensor::<Flex, 1>::from_floats(&decay[..], &device).reshape([1, 1, keys]);
    let q = Tensor::<Flex, 4>::zeros([1, 1, 1, 8], &device);
    let k = Tensor::random([1, 1, keys, 8], Distribution::Default, &device);
    // The value is 1 at the last key alone: the output is that key's weight.
    let last = Tensor::<Flex, 4>::ones([1, 1, 1, 8], &device);
    let v = Tensor::cat(vec![Tensor::zeros([1, 1, keys - 1, 8], &device), last], 2);
    let shape = AttentionShape::new(8, 1, 1, 8);
    let o = softmax(&Softmax::of(&shape), q, k, v, Some(log_decay), None);
    let got = f64::from(o.into_data().to_vec::<f32>().unwrap()[0]);
    let total: f64 = (0..=weak).map(|n| (-0.001f64 * n as f64).exp()).sum();
    assert!((got - 1.0 / total).abs() < 1e-7, "{got} where {} is right", 1.0 / total);
}

crate::attention::conformance::bf16_suite!(Config);
