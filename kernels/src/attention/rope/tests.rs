//! This variant's cases for the conformance suite.

use super::{Config, Position, Scaling};
use crate::attention::AttentionShape;
use crate::attention::conformance::{Conformance, softmax_oracle};
use crate::attention::softmax::alibi_slopes;
use crate::testing::Oracle;

/// Channel n of row t, rotated.
fn rotated(x: &Oracle, at: [usize; 4], theta: f64, rotary_dims: usize) -> f64 {
    let [b, h, t, n] = at;
    let half = rotary_dims / 2;
    if n >= rotary_dims {
        return x.at(&[b, h, t, n]);
    }
    let pair = n % half;
    let angle = t as f64 * theta.powf(-2.0 * pair as f64 / rotary_dims as f64);
    let (first, second) = (x.at(&[b, h, t, pair]), x.at(&[b, h, t, pair + half]));
    if n < half {
        first * angle.cos() - second * angle.sin()
    } else {
        second * angle.cos() + first * angle.sin()
    }
}

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![
            config.clone(),
            Config { position: Position::None, softcap: Some(2.0), ..config.clone() },
            Config { position: Position::Alibi, ..config.clone() },
            Config {
                rotary_fraction: 0.5,
                theta: 100.0,
                scaling: Scaling::Ntk { factor: 4.0 },
                ..config
            },
        ]
    }

    fn oracle(&self, shape: &AttentionShape, inputs: &[Oracle], documents: &[Vec<usize>]) -> Oracle {
        let [q, k, v] = inputs else { panic!("q, k and v") };
        let group = shape.heads / shape.kv_heads;
        let d = shape.head_dim;
        let rotary_dims = match self.position {
            Position::Rope => (d as f64 * self.rotary_fraction) as usize,
            _ => 0,
        };
        let theta = match self.scaling {
            Scaling::None {} => self.theta,
            Scaling::Ntk { factor } => {
                let r = rotary_dims as f64;
                self.theta * factor.powf(r / (r - 2.0))
            }
        };
        let rotate = |x: &Oracle| {
            Oracle::from_fn(&x.shape, |at| rotated(x, at.try_into().unwrap(), theta, rotary_dims))
        };
        let (q, k) = (rotate(q), rotate(k));
        softmax_oracle(shape, [&q, v], documents, |b, h, i, j| {
            let dot: f64 = (0..d).map(|n| q.at(&[b, h, i, n]) * k.at(&[b, h / group, j, n])).sum();
            let mut score = dot / (d as f64).sqrt();
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

#[test]
fn alibi_slopes_are_the_papers() {
    assert_eq!(alibi_slopes(8), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
    let twelve = alibi_slopes(12);
    assert_eq!(twelve[..8], alibi_slopes(8));
    assert_eq!(twelve[8], 2f64.powf(-0.5) as f32);
    assert_eq!(twelve.len(), 12);
}
