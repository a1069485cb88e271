//! This variant's cases for the conformance suite, groups of heads, problems, initial values.

use longwall_config::Problems;

use super::Config;
use crate::attention::conformance::{Conformance, Problem};
use crate::attention::delta_rule::tests::{rms_norm, sigmoid, softplus, with_extremes};
use crate::attention::{AttentionShape, HeadParts, Init, VariantSpec};
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![
            Config::default(),
            Config { value_dim: Some(5), key_heads: 1, short_conv: false, chunk: 16 },
        ]
    }

    /// With values of whole fragments.
    fn kernel_cases() -> Vec<Self> {
        vec![
            Config::default(),
            Config { value_dim: Some(48), key_heads: 1, short_conv: false, chunk: 16 },
        ]
    }

    fn divided_cases() -> Vec<Self> {
        [2, 4].map(|key_heads| Config { key_heads, ..Config::default() }).into()
    }

    const WIDEST_HEAD: usize = 128;

    /// Nine of the gradient of a step: scores, the state, what enters it, what enters its gradient, that gradient, the
    /// outputs, their gradient, the scores' gradients, and the result. A third more, because tokens that read one
    /// state share the errors of its rounding, which the budget takes for independent.
    fn roundings(&self) -> u32 {
        12
    }

    /// One number per head each, whose gradients are sums over all tokens that the norm makes nearly cancel. Those of
    /// the steps, token by token, are checked, and tests of the core check those of the decays.
    fn cancelling(&self) -> &'static [&'static str] {
        &["decay_rate", "step_bias"]
    }

    /// No decay and nothing added; decay to 0, with a step of moderate size.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        with_extremes(&mut inputs[3], 11, [(6, -1e3), (9, 20.0)]);
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, step, gate, rate, bias, skip, norm] = inputs else {
            panic!("q, k, v, two projections and four vectors")
        };
        let [batch, kv_heads, seq_len, values] = v.shape[..] else { panic!("4 dimensions") };
        let (d, heads, group) = (shape.head_dim, shape.heads, shape.group());
        let serves = kv_heads / self.key_heads;
        let mut out = Tensor64::from_fn(&[batch, heads, seq_len, values], |_| 0.0);
        for b in 0..batch {
            let mut states = vec![vec![vec![0.0; values]; d]; kv_heads];
            for t in 0..seq_len {
                // y ⊙ SiLU(z) of all heads.
                let mut gated = vec![];
                for (kv, state) in states.iter_mut().enumerate() {
                    if documents[b][t] == t {
                        *state = vec![vec![0.0; values]; d];
                    }
                    let step = softplus(step.at(&[b, t, kv]) + bias.data[kv]);
                    let decay = (-rate.data[kv].exp() * step).exp();
                    let value = |m: usize| v.at(&[b, kv, t, m]);
                    for (n, row) in state.iter_mut().enumerate() {
                        for (m, s) in row.iter_mut().enumerate() {
                            *s = decay * *s + step * k.at(&[b, kv / serves, t, n]) * value(m);
                        }
                    }
                    for h in kv * group..(kv + 1) * group {
                        let query = kv / serves * group + h % group;
                        gated.extend((0..values).map(|m| {
                            let read = |n: usize| q.at(&[b, query, t, n]) * state[n][m];
                            let y = (0..d).map(read).sum::<f64>() + skip.data[h] * value(m);
                            let z = gate.at(&[b, t, h * values + m]);
                            y * z * sigmoid(z)
                        }));
                    }
                }
                let together = heads * values / self.key_heads;
                let groups = gated.chunks_exact(together).enumerate();
                let o: Vec<f64> = groups
                    .flat_map(|(g, y)| rms_norm(y, |at| norm.data[g * together + at]))
                    .collect();
                for (h, o) in o.chunks_exact(values).enumerate() {
                    let at = ((b * heads + h) * seq_len + t) * values;
                    out.data[at..at + values].copy_from_slice(o);
                }
            }
        }
        out
    }
}

/// As many heads of k as of v, and half as many.
#[test]
fn groups_have_their_own_keys_and_their_own_norm() {
    for (key_heads, sizes) in [(2, [2, 2, 8, 2, 100]), (2, [8, 4, 8, 1, 70])] {
        let config = Config { key_heads, ..Config::default() };
        Problem::new(&config, sizes, None).agrees_with_the_oracle(&config);
    }
}

#[test]
fn problems_name_key_value_and_remedy() {
    let shape = AttentionShape::new(24, 6, 3, 4);
    for key_heads in [0, 2] {
        let config = Config { key_heads, chunk: 512, ..Config::default() };
        let mut problems = Problems::new();
        config.validate("a", &shape, &mut problems);
        let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
        assert_eq!(keys, ["a.key_heads", "a.chunk"]);
    }
}

#[test]
fn steps_and_decay_rates_start_in_the_papers_ranges() {
    let parameters = Config::default().parameters(&AttentionShape::new(8, 2, 2, 4));
    let ends = |init: &Init| [1e-6, 0.5, 1.0].map(|u| f64::from(init.quantile(u)));
    let near = |got: [f64; 3], want: [f64; 3]| {
        got.iter().zip(want).for_each(|(got, want)| {
            assert!((got - want).abs() <= 1e-4 * want, "{got} where {want} is right");
        });
    };
    near(ends(&parameters[0].init).map(f64::exp), [1.0, 8.5, 16.0]);
    near(ends(&parameters[1].init).map(softplus), [0.001, 0.01, 0.1]);
}

/// The norm needs all heads that share a head of k.
#[test]
fn heads_that_share_a_head_of_k_are_not_divided() {
    let shape = AttentionShape::new(64, 4, 4, 16);
    let parts = |key_heads, parts| {
        let config = Config { key_heads, ..Config::default() };
        HeadParts::of(&config, &shape, parts).map(|part| part.variant.key_heads)
    };
    assert_eq!(
        [(1, 2), (2, 2), (2, 4), (4, 4)].map(|(k, n)| parts(k, n)),
        [None, Some(1), None, Some(1)]
    );
}
