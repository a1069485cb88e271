//! This variant's cases for the conformance suite.

use super::{Config, Position};
use crate::attention::conformance::{Conformance, YARN, rotated_and_scaled, softmax_oracle};
use crate::attention::softmax::alibi_slopes;
use crate::attention::{AttentionShape, HeadParts};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn divided_cases() -> Vec<Self> {
        Self::cases().into_iter().filter(|case| case.position != Position::Alibi).collect()
    }

    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![
            config.clone(),
            Config { position: Position::None, softcap: Some(2.0), ..config.clone() },
            Config { position: Position::Alibi, ..config.clone() },
            Config { rotary_fraction: 0.5, theta: 100.0, scaling: YARN, ..config.clone() },
            Config { ssmax: true, theta: 100.0, ..config.clone() },
            Config { position: Position::None, ssmax: true, softcap: Some(3.0), ..config.clone() },
            Config { sinks: true, ..config.clone() },
            Config { position: Position::Alibi, ssmax: true, sinks: true, ..config },
        ]
    }

    fn roundings(&self) -> u32 {
        // q is multiplied by its factor, and so is its gradient.
        let factor = if self.ssmax { 2 } else { 0 };
        // With sinks, that of o in δ = dO · o: the gradients of a row's scores then do not sum to 0.
        5 + factor + u32::from(self.sinks)
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, rest @ ..] = inputs else { panic!("q, k and v") };
        let group = shape.heads / shape.kv_heads;
        let d = shape.head_dim;
        let rotary_dims = match self.position {
            Position::Rope => (d as f64 * self.rotary_fraction) as usize,
            _ => 0,
        };
        let rotate = |x| rotated_and_scaled(x, self.theta, self.scaling, rotary_dims);
        let [q, k] = [rotate(q), rotate(k)];
        let sinks = rest.last().filter(|_| self.sinks);
        softmax_oracle(shape, [&q, v], sinks, documents, |b, h, i, j| {
            let dot: f64 = (0..d).map(|n| q.at(&[b, h, i, n]) * k.at(&[b, h / group, j, n])).sum();
            let mut score = dot / (d as f64).sqrt();
            if self.ssmax {
                score *= rest[0].data[h] * ((i - documents[b][i] + 1) as f64).ln();
            }
            if let Some(cap) = self.softcap {
                score = f64::from(cap) * (score / f64::from(cap)).tanh();
            }
            if self.position == Position::Alibi {
                score -= f64::from(alibi_slopes(shape.heads)[h]) * (i - j) as f64;
            }
            score
        })
    }
}

/// Its slopes depend on the number of the head.
#[test]
fn heads_with_alibi_are_not_divided() {
    let parts = |position| {
        let config = Config { position, ..Config::default() };
        HeadParts::of(&config, &AttentionShape::new(64, 4, 4, 16), 2)
    };
    assert!(parts(Position::Alibi).is_none() && parts(Position::Rope).is_some());
}

#[test]
fn alibi_slopes_are_the_papers() {
    assert_eq!(
        alibi_slopes(8),
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    );
    let twelve = alibi_slopes(12);
    assert_eq!(twelve[..8], alibi_slopes(8));
    assert_eq!(twelve[8], 2f64.powf(-0.5) as f32);
    assert_eq!(twelve.len(), 12);
}
