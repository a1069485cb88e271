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
        vec![Config::default(), Config { rotary: Rotary::new(false) }]
    }

    fn prepare(&self, inputs: &mut [Tensor64]) {
        away_from_zero(inputs, 1.0);
    }

    /// Beside those of attention the sum that the norm reads, and the norm's gradient; and scores that rounding
    /// moves past 0, whose gradients appear or vanish: by emulation they count as six more.
    fn roundings(&self) -> u32 {
        16
    }

    /// What the norm gives back is orthogonal to the sum that it read, so that the gradients of scores, and
    /// of q and k, are differences of large terms: rounding is held to the size of all gradients.
    fn vanished(&self) -> f64 {
        1.0
    }

    /// A norm follows, so that the weight of a single key does not matter.
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
        rows(&o, |row| layer_norm(row, norm, bias, 1e-5))
    }
}
