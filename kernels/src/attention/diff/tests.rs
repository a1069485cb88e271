//! This variant's cases for the conformance suite, and what is special to it.

use super::{Config, lambda_init};
use crate::attention::AttentionShape;
use crate::attention::conformance::rowwise::{dot, rms_norm, rows, softmax, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![config.clone(), Config { value_factor: 1, rotary: Rotary::new(false) }]
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, vectors @ .., norm] = inputs else { panic!("q, k, v and 5 parameters") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let inner = |a: &Tensor64, b: &Tensor64| {
            a.data.iter().zip(&b.data).map(|(a, b)| a * b).sum::<f64>()
        };
        let init = 0.8 - 0.6 * (-0.3 * shape.layer as f64).exp();
        let lambda =
            inner(&vectors[0], &vectors[1]).exp() - inner(&vectors[2], &vectors[3]).exp() + init;
        let root = (shape.head_dim as f64).sqrt();
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let map = |view| {
                let score = |j| dot(shape, [&q, &k], [view, b, h, i, j]) / root;
                softmax(&keys.clone().map(score).collect::<Vec<_>>())
            };
            map(0).iter().zip(map(1)).map(|(first, second)| first - lambda * second).collect()
        });
        rows(&o, |row| rms_norm(row, norm, 1e-5).iter().map(|x| x * (1.0 - init)).collect())
    }
}

#[test]
fn lambda_starts_as_the_paper_has_it() {
    for (layer, want) in [(0, 0.2), (1, 0.35551), (11, 0.77787)] {
        assert!((lambda_init(layer) - want).abs() < 1e-5, "layer {layer}: {}", lambda_init(layer));
    }
}
