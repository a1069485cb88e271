//! This variant's cases for the conformance suite, heads of keys that serve several heads of values, problems.

use longwall_config::Problems;

use super::Config;
use crate::attention::conformance::{Conformance, Problem};
use crate::attention::delta_rule::tests::{
    Definition, rms_norm, sigmoid, softplus, with_extremes, with_repeated_keys,
};
use crate::attention::{AttentionShape, VariantSpec};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![
            Config::default(),
            Config {
                value_dim: Some(5),
                key_heads: Some(1),
                negative_eigenvalues: true,
                short_conv: false,
                output_gate: false,
                chunk: 16,
            },
        ]
    }

    fn divided_cases() -> Vec<Self> {
        let two = Config { key_heads: Some(2), ..Config::default() };
        Self::cases().into_iter().chain([two]).collect()
    }

    /// With values of whole fragments.
    fn kernel_cases() -> Vec<Self> {
        let ungated = Config {
            value_dim: Some(48),
            key_heads: Some(1),
            negative_eigenvalues: true,
            short_conv: false,
            output_gate: false,
            chunk: 16,
        };
        vec![Config::default(), ungated]
    }

    const WIDEST_HEAD: usize = 128;

    /// Those of the gradient of β: unit queries and keys, scores, the state, Y, r, e, what enters the state, what
    /// enters its gradient, that gradient, dw, dv, the outputs, their gradient, and the scores' gradients.
    fn roundings(&self) -> u32 {
        15
    }

    /// Repeated keys; β of 0 and of its maximum; no decay, and decay to 0. Small values, so that the outputs' mean
    /// square is near that which the norm adds: otherwise the gradient of a single token's β is only rounding.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        inputs[2].data.iter_mut().for_each(|v| *v /= 16.0);
        with_repeated_keys(&mut inputs[1]);
        with_extremes(&mut inputs[3], 11, [(6, -1e3), (9, 1e5)]);
        with_extremes(&mut inputs[4], 7, [(3, -1e3), (5, 1e3)]);
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, decay, beta, rest @ ..] = inputs else { panic!("q, k, v, decay and beta") };
        let (gate, [rate, bias, norm]) = match rest {
            [rate, bias, norm] => (None, [rate, bias, norm]),
            [gate, rate, bias, norm] => (Some(gate), [rate, bias, norm]),
            _ => panic!("a gate and three vectors"),
        };
        let most = if self.negative_eigenvalues { 2.0 } else { 1.0 };
        let definition = Definition {
            shape,
            qkv: [q, k, v],
            beta: &|b, t, h| most * sigmoid(beta.at(&[b, t, h])),
            decay: &|b, t, h, _| {
                (-rate.data[h].exp() * softplus(decay.at(&[b, t, h]) + bias.data[h])).exp()
            },
            documents,
        };
        definition.outputs(|b, t, h, y| {
            let mut o = rms_norm(&y, |m| norm.data[m]);
            if let Some(gate) = gate {
                for (m, o) in o.iter_mut().enumerate() {
                    let z = gate.at(&[b, t, h * y.len() + m]);
                    *o *= z * sigmoid(z);
                }
            }
            o
        })
    }
}

/// Four heads of v, two of k: each head of k, with its queries, serves two.
#[test]
fn key_heads_serve_consecutive_heads_of_values() {
    let config = Config { key_heads: Some(2), ..Config::default() };
    for sizes in [[4, 4, 8, 2, 100], [8, 4, 8, 1, 70]] {
        let problem = Problem::new(&config, sizes, None);
        assert_eq!(problem.inputs[0].shape[1], sizes[0] / 2);
        problem.agrees_with_the_oracle(&config);
    }
}

#[test]
fn problems_name_key_value_and_remedy() {
    let shape = AttentionShape::new(24, 6, 3, 4);
    let config = Config { value_dim: Some(0), key_heads: Some(2), chunk: 8, ..Config::default() };
    let mut problems = Problems::new();
    config.validate("a", &shape, &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["a.value_dim", "a.key_heads", "a.chunk"]);
    assert_eq!(problems.as_slice()[1].value, "2");
    let mut problems = Problems::new();
    Config { key_heads: Some(3), ..Config::default() }.validate("a", &shape, &mut problems);
    assert_eq!(problems.as_slice(), []);
}
