//! This variant's cases for the conformance suite, and problems.

use longwall_config::Problems;

use super::Config;
use crate::attention::conformance::Conformance;
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
                rank: Some(3),
                negative_eigenvalues: true,
                short_conv: false,
                chunk: 16,
            },
        ]
    }

    fn kernel_cases() -> Vec<Self> {
        let reflecting =
            Config { value_dim: Some(48), negative_eigenvalues: true, ..Config::default() };
        vec![Config::default(), reflecting]
    }

    const WIDEST_HEAD: usize = 128;

    /// Channels that remember for long beside those that forget, of which the initial decay has only the latter.
    /// Repeated keys; β of 0 and of its maximum; no decay, and decay to 0.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        with_repeated_keys(&mut inputs[1]);
        for (channel, logit) in inputs[3].data.iter_mut().enumerate() {
            *logit -= [2.0, 4.0, 7.0][channel % 3];
        }
        with_extremes(&mut inputs[3], 11, [(6, -1e3), (9, 1e5)]);
        with_extremes(&mut inputs[4], 7, [(3, -1e3), (5, 1e3)]);
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, decay, beta, gate, rate, bias, norm] = inputs else {
            panic!("q, k, v, three projections and three vectors")
        };
        let most = if self.negative_eigenvalues { 2.0 } else { 1.0 };
        let d = shape.head_dim;
        let definition = Definition {
            shape,
            qkv: [q, k, v],
            beta: &|b, t, h| most * sigmoid(beta.at(&[b, t, h])),
            decay: &|b, t, h, n| {
                let step = softplus(decay.at(&[b, t, h * d + n]) + bias.data[h * d + n]);
                (-rate.data[h].exp() * step).exp()
            },
            documents,
        };
        definition.outputs(|b, t, h, y| {
            let o = rms_norm(&y, |m| norm.data[m]).into_iter().enumerate();
            o.map(|(m, o)| o * sigmoid(gate.at(&[b, t, h * y.len() + m]))).collect()
        })
    }
}

#[test]
fn problems_name_key_value_and_remedy() {
    let shape = AttentionShape::new(24, 6, 3, 4);
    let config = Config { value_dim: Some(5_000), rank: Some(25), chunk: 48, ..Config::default() };
    let mut problems = Problems::new();
    config.validate("a", &shape, &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
    assert_eq!(keys, ["a.value_dim", "a.rank", "a.chunk"]);
}

#[test]
fn ranks_default_to_the_channels_of_a_heads_values() {
    let rank = |config: Config, width| {
        let projections = config.projections(&AttentionShape::new(width, 2, 2, 32));
        [&projections[0], &projections[2]].map(|p| p.low_rank.unwrap().rank)
    };
    assert_eq!(rank(Config::default(), 64), [32, 32]);
    assert_eq!(rank(Config { value_dim: Some(100), ..Config::default() }, 64), [64, 64]);
    assert_eq!(rank(Config { rank: Some(7), ..Config::default() }, 64), [7, 7]);
}
