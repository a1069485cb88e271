//! This variant's cases for the conformance suite, and its numerics at length.

mod cuda;
mod length;

use longwall_config::Problems;

use super::{Config, EPS, FeatureMap, Gate, SUM_EPS};
use crate::attention::conformance::{Conformance, YARN, rotated_and_scaled};
use crate::attention::{AttentionShape, Init, VariantSpec};
use crate::testing::Tensor64;

/// With weights that sum to 1.
fn normalised() -> Config {
    Config { feature_map: FeatureMap::Elu, normalise: true, ..Config::default() }
}

/// The recurrence, one step at a time.
impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let default = Config::default();
        vec![
            default.clone(),
            Config { gate: Gate::Scalar, rope: true, scaling: YARN, ..default.clone() },
            Config { gate: Gate::None, chunk: 16, ..default.clone() },
            Config { chunk: 16, ..default.clone() },
            Config { gate: Gate::None, ..normalised() },
            Config { feature_map: FeatureMap::Elu, ..default },
            normalised(),
        ]
    }

    /// Those that have a kernel on CUDA.
    fn kernel_cases() -> Vec<Self> {
        let default = Config::default();
        vec![
            Config { gate: Gate::Scalar, rope: true, scaling: YARN, ..default.clone() },
            Config { gate: Gate::None, chunk: 16, ..default.clone() },
            Config { gate: Gate::Diagonal, ..default },
            Config { feature_map: FeatureMap::Elu, gate: Gate::Scalar, ..Config::default() },
            Config { gate: Gate::Scalar, ..normalised() },
            normalised(),
        ]
    }

    const WIDEST_HEAD: usize = 128;

    /// With `normalise` those of the gradient of k: the features of q and k, the scores, the state, values without their
    /// mean, do / n, the gradients of scores and of the state, and the result.
    fn roundings(&self) -> u32 {
        if self.normalise { 9 } else { 5 }
    }

    /// Small queries, so that short sequences have outputs whose mean square is near [`EPS`]. Otherwise a
    /// norm's output does not depend on the size of its input, and the gradient of a single token's score is
    /// only rounding.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        if self.feature_map == FeatureMap::Identity {
            inputs[0].data.iter_mut().for_each(|q| *q /= 256.0);
        }
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, rest @ ..] = inputs else { panic!("q, k and v") };
        let (d, kv_heads) = (shape.head_dim, shape.kv_heads);
        let norm = rest.last();
        let rotate = |x: &Tensor64| match self.rope {
            true => rotated_and_scaled(x, self.theta, self.scaling, d),
            false => x.clone(),
        };
        let features = |x: &Tensor64| {
            let mut x = rotate(x);
            if self.feature_map == FeatureMap::Elu {
                x.data.iter_mut().for_each(|x| *x = x.max(0.0) + x.min(0.0).exp());
            }
            x
        };
        let (q, k) = (features(q), features(k));
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gate = |b: usize, h: usize, t: usize, n: usize| match self.gate {
            Gate::None => 1.0,
            Gate::Scalar => sigmoid(rest[0].at(&[b, t, h])),
            Gate::Diagonal => sigmoid(rest[0].at(&[b, t, h * d + n])).powf(1.0 / 16.0),
        };
        let mut out = Tensor64::from_fn(&q.shape, |_| 0.0);
        let [batch, heads, seq_len, _] = q.shape[..] else { panic!("q has 4 dimensions") };
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let kv = h / (heads / kv_heads);
            // The last channel is that of the sum of weights.
            let mut state = vec![vec![0.0; d + 1]; d];
            for t in 0..seq_len {
                if documents[b][t] == t {
                    state = vec![vec![0.0; d + 1]; d];
                }
                let mut y = vec![0.0; d + 1];
                for (n, state) in state.iter_mut().enumerate() {
                    for (m, s) in state.iter_mut().enumerate() {
                        let v = if m < d { v.at(&[b, kv, t, m]) } else { 1.0 };
                        *s = gate(b, kv, t, n) * *s + k.at(&[b, kv, t, n]) * v;
                        y[m] += q.at(&[b, h, t, n]) * *s;
                    }
                }
                let sum = y.pop().expect("the sum of weights");
                let of = |m: usize| ((b * heads + h) * seq_len + t) * d + m;
                if self.normalise {
                    for (m, y) in y.iter().enumerate() {
                        out.data[of(m)] = y / (sum + f64::from(SUM_EPS));
                    }
                    continue;
                }
                y.iter_mut().for_each(|y| *y /= (d as f64).sqrt());
                let square = y.iter().map(|y| y * y).sum::<f64>() / d as f64;
                for (m, y) in y.iter().enumerate() {
                    let scale = norm.expect("the norm's scales").at(&[m]);
                    out.data[of(m)] = y / (square + f64::from(EPS)).sqrt() * scale;
                }
            }
        }
        out
    }
}

#[test]
fn problems_name_key_value_and_remedy() {
    let shape = AttentionShape::new(18, 2, 1, 9);
    let mut problems = Problems::new();
    Config { chunk: 48, rope: true, ..Config::default() }.validate("a", &shape, &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["a.chunk", "model.head_dim"]);
    let mut problems = Problems::new();
    Config { normalise: true, ..Config::default() }.validate("a", &shape, &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["a.normalise"]);
    let mut problems = Problems::new();
    Config::default().validate("a", &shape, &mut problems);
    assert_eq!(problems.as_slice(), []);
}

#[test]
fn the_scalar_gate_starts_at_the_decays_of_retention() {
    let config = Config { gate: Gate::Scalar, ..Config::default() };
    let projections = config.projections(&AttentionShape::new(128, 8, 8, 16));
    let Some(Init::Values(biases)) = &projections[0].bias else { panic!("one bias a head") };
    for (head, bias) in biases.iter().enumerate() {
        let decay = 1.0 / (1.0 + (-f64::from(*bias)).exp());
        assert!((decay - (1.0 - 2f64.powi(-5 - head as i32))).abs() < 1e-6);
    }
}
