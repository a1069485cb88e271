//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::Flex;
use burn::tensor::{Distribution, Tensor};

use super::Config;
use crate::attention::conformance::rowwise::{dot, rows, softmax, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::{AttentionShape, Init, Inputs, VariantSpec, dispatch, rope};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![Config::default(), Config { rotary: Rotary::new(false) }]
    }

    /// Beside those of attention: the output before it is adapted, and its gradient. In emulation, the least
    /// accurate gradients have the error of five roundings.
    fn roundings(&self) -> u32 {
        7
    }

    /// The weight of a single key is 1.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, w_d, lambda] = inputs else { panic!("q, k, v and 2 parameters") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let d = shape.head_dim;
        let root = (d as f64).sqrt();
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let score = |j| dot(shape, [&q, &k], [0, b, h, i, j]) / root;
            softmax(&keys.map(score).collect::<Vec<_>>())
        });
        rows(&o, |row| {
            let mapped = |n: usize| (0..d).map(|m| row[m] * w_d.data[m * d + n]).sum::<f64>();
            (0..d).map(|n| row[n] - lambda.data[0] * mapped(n)).collect()
        })
    }
}

#[test]
fn it_starts_as_softmax_attention() {
    let shape = AttentionShape { layer: 3, layers: 4, ..AttentionShape::new(16, 2, 1, 8) };
    let device = Default::default();
    let random = |heads| {
        Tensor::<Flex, 4>::random([1, heads, 20, 8], Distribution::Normal(0.0, 1.0), &device)
    };
    let config = Config::default();
    let parameters = config.parameters(&shape).into_iter().map(|parameter| match parameter.init {
        Init::Constant(value) => Tensor::<Flex, 1>::full([parameter.elements], value, &device),
        other => panic!("{other:?}"),
    });
    let (q, k, v) = (random(2), random(1), random(1));
    let inputs = |parameters| {
        let (q, k, v) = (q.clone(), k.clone(), v.clone());
        Inputs { q, k, v, projections: vec![], parameters }
    };
    let dex = dispatch::attend(&config, &shape, inputs(parameters.collect()), None).into_data();
    assert_eq!(
        dex,
        dispatch::attend(&rope::Config::default(), &shape, inputs(vec![]), None).into_data()
    );
}
