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
    }

    /// Beside those of attention: the norm's input, the norm's gradient, and scores that rounding moves across
    /// 0, whose gradients appear or vanish; in emulation these amount to six more roundings.
    fn roundings(&self) -> u32 {
        16
    }

    fn has_kinks(&self) -> bool {
        true
    }

    /// The norm's gradient is orthogonal to its input, so that the gradients of scores, q and k are
    /// differences of large terms: errors are relative to the size of all gradients.
    fn vanished(&self) -> f64 {
        1.0
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, norm, bias] = inputs else { panic!("q, k, v and the norm") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let root = (shape.head_dim as f64).sqrt();
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            keys.map(|j| (dot(shape, [&q, &k], [0, b, h, i, j]) / root).max(0.0)).collect()
        });
        rows(&o, |row| layer_norm(row, norm, bias, f64::from(self.norm_eps)))
    }
}
