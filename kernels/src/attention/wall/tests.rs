//! This variant's cases for the conformance suite; validation; saturated gates.

mod decoding;
mod forget;
mod length;
mod pruning;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde::de::value::{Error as ValueError, MapDeserializer};

use super::{Config, GateForm, GateHeads, GateSource, LARGEST_G_MAX};
use crate::attention::conformance::{Conformance, YARN, in_bf16, softmax_oracle};
use crate::attention::{AttentionConfig, AttentionShape, Inputs, VariantSpec, dispatch};
use crate::ops::rotary::tests::scaled_frequencies;
use crate::testing::Tensor64;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        let key = Config { gate_source: GateSource::Key, ..config.clone() };
        vec![
            // Gates that close, in channels of different speed.
            Config { bias_init: 0.0, ..config.clone() },
            // Evicts nothing here: with gates this open every key is kept.
            Config { rope: true, theta: 100.0, evict_below: Some(1e-3), ..config.clone() },
            Config {
                gate_heads: GateHeads::Query,
                gate_dims: Some(5),
                bias_init: 1.0,
                g_max: 0.3,
                ..config
            },
            Config { bias_init: 2.0, rope: true, scaling: YARN, ..key.clone() },
            // The one bias of a head sums the gradients of all tokens and channels. From 1 they
            // cancel to 1/2000 of their size in one problem, which leaves f32 no digits to compare.
            Config { gate_form: GateForm::Scalar, bias_init: 2.0, ..key.clone() },
            Config { gate_dims: Some(3), evict_below: None, ..key.clone() },
            Config { bias_init: 1.0, sinks: true, g_max: 1.0, ..Config::default() },
            Config { bias_init: 1.0, gate_form: GateForm::Scalar, ..Config::default() },
            Config { bias_init: 2.0, sinks: true, ..key.clone() },
            Config { bias_init: 1.0, forget_gate: true, rope: true, ..Config::default() },
            Config {
                gate_heads: GateHeads::Query,
                gate_dims: Some(5),
                bias_init: 1.0,
                g_max: 0.3,
                forget_gate: true,
                forget_bias_init: Some(2.0),
                sinks: true,
                ..Config::default()
            },
            Config { bias_init: 2.0, forget_gate: true, ..key },
        ]
    }

    /// Beside those of softmax attention: the rescaled q and k; with sinks, that of o in δ = dO · o.
    fn roundings(&self) -> u32 {
        7 + u32::from(self.sinks)
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let [q, k] = [&inputs[0], &inputs[1]].map(|x| self.oracle_rotated(x, documents));
        let (of_gate, forget) = match (&inputs[3..], self.gate_source) {
            (rest, _) if !self.forget_gate => (rest, None),
            (rest, GateSource::Hidden) => (rest, Some(&rest[1])),
            (rest, GateSource::Key) => (&rest[1..], Some(&rest[0])),
        };
        let kept = products(&self.oracle_retention(shape, &k, of_gate));
        let forget = forget.map(forget_sums);
        let sinks = inputs.last().filter(|_| self.sinks);
        let gate_head = |h: usize| if self.gate_heads == GateHeads::Query { h } else { h / group };
        softmax_oracle(shape, [&q, &inputs[2]], sinks, documents, |b, h, i, j| {
            let kept = channels(&kept, &[b, gate_head(h), i, j]);
            let (q, k) = (channels(&q, &[b, h, i]), channels(&k, &[b, h / group, j]));
            let score = (0..d).map(|n| kept[n] * q[n] * k[n]).sum::<f64>() / (d as f64).sqrt();
            score + forget.as_ref().map_or(0.0, |sums| sums.at(&[b, i, h]) - sums.at(&[b, j, h]))
        })
    }
}

/// The elements along the last dimension at `index`.
fn channels<'a>(x: &'a Tensor64, index: &[usize]) -> &'a [f64] {
    let row = index.iter().zip(&x.shape).fold(0, |row, (i, size)| row * size + i);
    let width = *x.shape.last().expect("a dimension");
    &x.data[row * width..][..width]
}

/// Π_{u=j+1..i} of the retention, `[batch, gate heads, i, j, head_dim]`, 0 for j > i.
fn products(retention: &Tensor64) -> Tensor64 {
    let [batch, heads, seq_len, d] = retention.shape[..] else { panic!("4 dimensions") };
    let mut data = vec![];
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for i in 0..seq_len {
            let mut row = vec![0.0; seq_len * d];
            row[i * d..][..d].fill(1.0);
            for j in (0..i).rev() {
                for (n, kept) in channels(retention, &[b, h, j + 1]).iter().enumerate() {
                    row[j * d + n] = row[(j + 1) * d + n] * kept;
                }
            }
            data.extend(row);
        }
    }
    Tensor64::new(&[batch, heads, seq_len, seq_len, d], data)
}

/// F, the sums of ln σ(logit) up to each token, `[batch, seq_len, heads]`.
fn forget_sums(logits: &Tensor64) -> Tensor64 {
    let [_, seq_len, heads] = logits.shape[..] else { panic!("3 dimensions") };
    let mut sums = Tensor64::from_fn(&logits.shape, |at| -(-logits.at(at)).exp().ln_1p());
    for at in 0..sums.data.len() {
        if at / heads % seq_len > 0 {
            sums.data[at] += sums.data[at - heads];
        }
    }
    sums
}

impl Config {
    /// q or k with rotary positions that start from 0 in every document, by their definition.
    fn oracle_rotated(&self, x: &Tensor64, documents: &[Vec<usize>]) -> Tensor64 {
        if !self.rope {
            return x.clone();
        }
        let half = x.shape[3] / 2;
        let (omega, amplitude) = scaled_frequencies(self.theta, self.scaling, 2 * half);
        Tensor64::from_fn(&x.shape, |at| {
            let [b, h, t, n] = at[..] else { panic!("q and k have 4 dimensions") };
            let position = (t - documents[b][t]) as f64;
            let angle = position * omega[n % half];
            let other = x.at(&[b, h, t, (n + half) % (2 * half)]);
            let sign = if n < half { -1.0 } else { 1.0 };
            amplitude * (x.at(at) * angle.cos() + sign * other * angle.sin())
        })
    }

    /// exp(g), `[batch, gate heads, seq_len, head_dim]`; `inputs` is the gate's projection or its
    /// two parameters.
    fn oracle_retention(
        &self,
        shape: &AttentionShape,
        k: &Tensor64,
        inputs: &[Tensor64],
    ) -> Tensor64 {
        let (batch, seq_len, d) = (k.shape[0], k.shape[2], shape.head_dim);
        let dims = self.gate_dims.unwrap_or(d);
        let heads = match self.gate_heads {
            GateHeads::Kv => shape.kv_heads,
            GateHeads::Query => shape.heads,
        };
        let outputs = if self.gate_form == GateForm::Scalar { 1 } else { dims };
        Tensor64::from_fn(&[batch, heads, seq_len, d], |at| {
            let [b, h, t, n] = at[..] else { panic!("4 dimensions") };
            if n >= dims {
                return 1.0;
            }
            let logit = match self.gate_source {
                GateSource::Hidden => inputs[0].at(&[b, t, h * outputs + n.min(outputs - 1)]),
                GateSource::Key => {
                    let o = n.min(outputs - 1);
                    let weight = |m: usize| inputs[0].at(&[(h * d + m) * outputs + o]);
                    let product: f64 = (0..d).map(|m| k.at(&[b, h, t, m]) * weight(m)).sum();
                    product + inputs[1].at(&[h * outputs + o])
                }
            };
            retention(logit, f64::from(self.g_max))
        })
    }
}

/// exp(−g_max (1 − σ(logit)^(1/g_max))).
fn retention(logit: f64, g_max: f64) -> f64 {
    let sigmoid = 1.0 / (1.0 + (-logit).exp());
    (-g_max * (1.0 - sigmoid.powf(1.0 / g_max))).exp()
}

/// A tensor of uniform numbers in −1.7..1.7.
fn random<B: crate::backend::OpBackend, const D: usize>(
    shape: [usize; D],
    seed: u64,
) -> Tensor<B, D> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.7..1.7)).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

fn values<B: crate::backend::OpBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn saturated_gates_are_the_clamp_and_zero() {
    let shape = AttentionShape::new(4, 1, 1, 4);
    let logits = Tensor::<Autodiff<Flex>, 4>::from_floats(
        [[[[-1000.0, 1000.0, -1e30, 1e30]]]],
        &Default::default(),
    )
    .require_grad();
    let config = Config::default();
    let g = config.log_decay(&shape, logits.clone());
    let grads = g.clone().sum().backward();
    assert_eq!(values(g), [-0.86f32, 0.0, -0.86, 0.0].map(f64::from));
    let slope = logits.grad(&grads).expect("logits have a gradient");
    assert_eq!(values(slope), [0.0; 4]);
}

#[test]
fn nearly_open_gates_keep_their_digits() {
    let shape = AttentionShape::new(5, 1, 1, 5);
    let logits = [0.0f32, 5.0, 7.0, 10.0, 14.0];
    let tensor = Tensor::<Flex, 4>::from_floats([[[logits]]], &Default::default());
    let got = values(Config::default().log_decay(&shape, tensor));
    for (got, logit) in got.iter().zip(logits) {
        // g = g_max · (e^y − 1), here with a function made for small y.
        let y = -(-f64::from(logit)).exp().ln_1p() / 0.86;
        let want = 0.86 * y.exp_m1();
        assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} where {want} is right");
    }
}

/// Saturated gates in whole rows: decay at the clamp, none, and both in one row.
#[test]
fn saturated_gates_agree_with_the_oracle() {
    let config = Config::default();
    let shape = AttentionShape::new(8, 2, 1, 4);
    let seq_len = 150;
    let oracle = |x: Tensor<Flex, 4>| Tensor64::new(&x.dims(), values(x));
    let (q, k) = (random([1, 2, seq_len, 4], 1), random([1, 1, seq_len, 4], 2));
    let v = random([1, 1, seq_len, 4], 3);
    let patterns: [&dyn Fn(usize, usize) -> f32; 3] = [&|_, _| -1000.0, &|_, _| 1000.0, &|t, n| {
        if (t + n) % 3 == 0 || t / 40 == n { -1000.0 } else { 1000.0 }
    }];
    for pattern in patterns {
        let logits: Vec<f32> = (0..seq_len * 4).map(|at| pattern(at / 4, at % 4)).collect();
        let logits = TensorData::new(logits, [1, seq_len, 4]);
        let logits = Tensor::<Flex, 3>::from_data(logits, &Default::default());
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: vec![logits.clone()],
            parameters: vec![],
        };
        let got = values(dispatch::attend(&config, &shape, inputs, None));
        let logits = Tensor64::new(&[1, seq_len, 4], values(logits));
        let inputs = [oracle(q.clone()), oracle(k.clone()), oracle(v.clone()), logits];
        let want = config.oracle(&shape, &inputs, &[vec![0; seq_len]]);
        for (got, want) in got.iter().zip(want.data) {
            assert!((got - want).abs() < 1e-5, "{got} where {want} is right");
        }
    }
}

#[test]
fn bad_values_are_reported_with_their_keys() {
    let shape = AttentionShape::new(64, 4, 2, 16);
    let keys = |config: &Config| {
        let mut problems = Problems::new();
        config.validate("model.attention", &shape, &mut problems);
        problems
            .as_slice()
            .iter()
            .map(|p| p.key.replace("model.attention.", ""))
            .collect::<Vec<_>>()
    };
    let config = Config::default();
    assert!(Config::cases().iter().all(|config| keys(config).is_empty()));
    let bad = Config {
        gate_dims: Some(17),
        bias_init: f32::NAN,
        g_max: 1.01,
        rope: true,
        theta: 1.0,
        evict_below: Some(1.0),
        ..config.clone()
    };
    let want = ["theta", "gate_dims", "bias_init", "g_max", "evict_below"];
    assert_eq!(keys(&bad), want);
    let contradictory = Config {
        gate_heads: GateHeads::Query,
        gate_source: GateSource::Key,
        gate_dims: Some(8),
        evict_below: Some(0.1),
        ..config.clone()
    };
    assert_eq!(keys(&contradictory), ["gate_heads", "evict_below"]);
    assert_eq!(keys(&Config { gate_dims: Some(0), g_max: 0.0, ..config }), ["gate_dims", "g_max"]);
}

#[test]
fn a_window_and_eviction_exclude_each_other() {
    let shape = AttentionShape { window: Some(8), ..AttentionShape::new(64, 4, 2, 16) };
    let evicting = Config { evict_below: Some(1e-3), ..Config::default() };
    let count = |config: Config| {
        let mut problems = Problems::new();
        AttentionConfig::Wall(config).validate(&shape, &mut problems);
        problems.as_slice().len()
    };
    assert_eq!((count(evicting), count(Config::default())), (1, 0));
}

#[test]
fn names_are_kebab_case_and_unknown_keys_are_refused() {
    type Table =
        MapDeserializer<'static, std::array::IntoIter<(&'static str, &'static str), 2>, ValueError>;
    let read = |table: [(&'static str, &'static str); 2]| {
        Config::deserialize(Table::new(table.into_iter()))
    };
    let config = read([("gate_heads", "query"), ("gate_source", "key")]).expect("a valid table");
    assert_eq!((config.gate_heads, config.gate_source), (GateHeads::Query, GateSource::Key));
    assert!(read([("gate_heads", "kv"), ("gates", "hidden")]).is_err());
    // The former name of gate_form.
    let scalar = read([("gate_source", "key"), ("key_gate", "scalar")]).expect("a valid table");
    assert_eq!(scalar.gate_form, GateForm::Scalar);
}

/// Closed gates: within a tile of 64 tokens the keys' and queries' factors span 2^±79, with the largest `g_max` 2^±93.
#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_agrees_with_closed_gates() {
    let closed = Config { bias_init: -20.0, ..Config::default() };
    let mixed = Config { bias_init: -3.0, ..Config::default() };
    let fastest = Config { g_max: LARGEST_G_MAX, ..closed.clone() };
    let forgetting = Config { g_max: LARGEST_G_MAX, forget_gate: true, ..mixed.clone() };
    for variant in [closed, mixed, fastest.clone(), forgetting] {
        for sizes in [[4, 2, 64, 2, 200], [2, 1, 128, 1, 140]] {
            in_bf16::agrees_at::<Config, crate::Cuda>(&variant, sizes, None);
        }
    }
    in_bf16::decodes_at::<Config, crate::Cuda>(&fastest, [4, 2, 64, 2, 200]);
    // A window that begins in the middle of a tile of gates.
    in_bf16::agrees_at::<Config, crate::Cuda>(&Config::default(), [2, 1, 128, 1, 140], Some(97));
}
