//! This variant's cases for the conformance suite.

use super::Config;
use crate::attention::AttentionShape;
use crate::attention::conformance::rowwise::{away_from_zero, dot, layer_norm, rows, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::testing::Tensor64;

impl Conformance for Config {
    const STEP: f64 = 1e-7;

    fn cases() -> Vec<Self> {
        let rotary = Rotary::new(false);
        vec![Config::default(), Config { norm_eps: 0.01, rotary }]
    }

    fn prepare(&self, inputs: &mut [Tensor64]) {
        away_from_zero(inputs, 1.0);
        inputs[3].data[0] = 0.2; // λ
    }

    /// As for `rela`, and those of the difference of views; in emulation, the least accurate gradients have the
    /// error of fourteen.
    fn roundings(&self) -> u32 {
        20
    }

    fn has_kinks(&self) -> bool {
        true
    }

    /// As for `rela`.
    fn vanished(&self) -> f64 {
        1.0
    }

    fn cancelling(&self) -> &'static [&'static str] {
        &["lambda"]
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, lambda, norm, bias] = inputs else { panic!("q, k, v and 3 parameters") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let root = (shape.head_dim as f64).sqrt();
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let weight = |view, j| (dot(shape, [&q, &k], [view, b, h, i, j]) / root).max(0.0);
            keys.map(|j| weight(0, j) - lambda.data[0] * weight(1, j)).collect()
        });
        rows(&o, |row| layer_norm(row, norm, bias, f64::from(self.norm_eps)))
    }
}
