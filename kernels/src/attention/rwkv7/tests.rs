//! This variant's cases for the conformance suite, its numerics at length, its initial values.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Config;
use crate::attention::conformance::Conformance;
use crate::attention::{
    AttentionShape, DecodeState, Init, Inputs, ParameterSpec, ProjectionSpec, VariantSpec, dispatch,
};
use crate::backend::OpBackend;
use crate::testing::{Tensor64, assert_budget};

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![
            Config::default(),
            Config { decay_rank: Some(2), rate_rank: Some(3), gate_rank: Some(1) },
        ]
    }

    const WIDEST_HEAD: usize = 128;

    /// Those of the gradient of r: κ̂, a ⊙ κ̂ and k̃, readers and writers as they decay, scores, T, W, C, the state,
    /// the recurrence's outputs, their gradient, dQ, dC, dD, and r's as the recurrence gives it.
    fn roundings(&self) -> u32 {
        16
    }

    /// Small values, so that the variance of the recurrence's outputs is near the norm's eps: otherwise the gradient of
    /// a single token's r through the norm is only rounding.
    fn prepare(&self, inputs: &mut [Tensor64]) {
        inputs[2].data.iter_mut().for_each(|v| *v /= 64.0);
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, ..] = inputs else { panic!("at least q") };
        let mut out = q.clone();
        let [batch, heads, seq_len, d] = q.shape[..] else { panic!("q has 4 dimensions") };
        for b in 0..batch {
            for h in 0..heads {
                let rows = head(shape, inputs, &documents[b], b, h);
                for (t, row) in rows.iter().enumerate() {
                    let at = ((b * heads + h) * seq_len + t) * d;
                    out.data[at..at + d].copy_from_slice(row);
                }
            }
        }
        out
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The outputs of one query head, token by token, equations 4 to 22.
fn head(
    shape: &AttentionShape,
    inputs: &[Tensor64],
    documents: &[usize],
    b: usize,
    h: usize,
) -> Vec<Vec<f64>> {
    let [q, k, v, decay, rate, gate, xi, alpha, rho, scale, bias] = inputs else {
        panic!("q, k, v, three projections and five vectors")
    };
    let d = shape.head_dim;
    let kv = h / (shape.heads / shape.kv_heads);
    let mut state = vec![vec![0.0; d]; d];
    let token = |t: usize| {
        if documents[t] == t {
            state = vec![vec![0.0; d]; d];
        }
        let of_keys = |x: &Tensor64, n: usize| x.at(&[b, t, kv * d + n]);
        let channels = 0..d;
        let k: Vec<f64> = channels.clone().map(|n| k.at(&[b, kv, t, n])).collect();
        let r: Vec<f64> = channels.clone().map(|n| q.at(&[b, h, t, n])).collect();
        let a: Vec<f64> = channels.clone().map(|n| sigmoid(of_keys(rate, n))).collect();
        let w: Vec<f64> = channels
            .clone()
            .map(|n| (-(-0.5f64).exp() * sigmoid(of_keys(decay, n))).exp())
            .collect();
        let kappa: Vec<f64> = channels.clone().map(|n| k[n] * xi.data[kv * d + n]).collect();
        let norm = (kappa.iter().map(|x| x * x).sum::<f64>() + 1e-12).sqrt();
        let key: Vec<f64> = channels
            .clone()
            .map(|n| k[n] * (1.0 + (a[n] - 1.0) * alpha.data[kv * d + n]))
            .collect();
        // The transition matrix of equation 19.
        let g = |i: usize, j: usize| {
            let diagonal = if i == j { w[i] } else { 0.0 };
            diagonal - kappa[i] / norm * (a[j] * kappa[j] / norm)
        };
        state = (0..d)
            .map(|m| {
                let kept = |j: usize| (0..d).map(|i| state[m][i] * g(i, j)).sum::<f64>();
                channels.clone().map(|j| kept(j) + v.at(&[b, kv, t, m]) * key[j]).collect()
            })
            .collect();
        let o: Vec<f64> =
            state.iter().map(|row| row.iter().zip(&r).map(|(s, r)| s * r).sum()).collect();
        let mean = o.iter().sum::<f64>() / d as f64;
        let variance = o.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / d as f64;
        let weight: f64 = channels.clone().map(|n| r[n] * rho.data[h * d + n] * key[n]).sum();
        channels
            .map(|m| {
                let normal = (o[m] - mean) / (variance + 1e-5 * d as f64).sqrt();
                let p = normal * scale.data[h * d + m] + bias.data[h * d + m];
                (p + weight * v.at(&[b, kv, t, m])) * gate.at(&[b, t, h * d + m])
            })
            .collect()
    };
    (0..documents.len()).map(token).collect()
}

/// Random inputs of a long row, with logits of decay and rate by token and channel.
fn long_row(
    shape: &AttentionShape,
    seq_len: usize,
    decay: impl Fn(usize, usize) -> f64,
    rate: impl Fn(usize, usize) -> f64,
) -> Vec<Tensor64> {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut random = |dims: &[usize]| {
        let len = dims.iter().product();
        let data = (0..len).map(|_| f64::from(rng.random_range(-1.7f32..1.7))).collect();
        Tensor64::new(dims, data)
    };
    let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
    let mut inputs: Vec<_> =
        [heads, kv_heads, kv_heads].map(|heads| random(&[1, heads, seq_len, head_dim])).into();
    let logits = [1, seq_len, kv_heads * head_dim];
    inputs.push(Tensor64::from_fn(&logits, |at| decay(at[1], at[2])));
    inputs.push(Tensor64::from_fn(&logits, |at| rate(at[1], at[2])));
    inputs.push(random(&[1, seq_len, heads * head_dim]));
    for ParameterSpec { elements, init, .. } in Config::default().parameters(shape) {
        let Init::Constant(value) = init else { panic!("vectors start at one value") };
        inputs.push(Tensor64::new(&[elements], vec![f64::from(value); elements]));
    }
    inputs
}

fn tensor<B: OpBackend, const D: usize>(x: &Tensor64) -> Tensor<B, D> {
    let data = x.data.iter().map(|&x| x as f32).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(data, x.shape.clone()), &Default::default())
}

fn inputs<B: OpBackend>(all: &[Tensor64]) -> Inputs<B> {
    let [q, k, v] = [0, 1, 2].map(|i| tensor::<B, 4>(&all[i]));
    let projections = all[3..6].iter().map(tensor::<B, 3>).collect();
    let parameters = all[6..].iter().map(tensor::<B, 1>).collect();
    Inputs { q, k, v, projections, parameters }
}

/// Tokens `first` to `first + n` of the inputs.
fn part(all: &Inputs<Flex>, first: usize, n: usize) -> Inputs<Flex> {
    let part = |x: &Tensor<Flex, 4>| x.clone().narrow(2, first, n);
    Inputs {
        q: part(&all.q),
        k: part(&all.k),
        v: part(&all.v),
        projections: all.projections.iter().map(|x| x.clone().narrow(1, first, n)).collect(),
        parameters: all.parameters.clone(),
    }
}

/// Compares all outputs of a long row with the oracle's.
fn check_long_row(what: &str, shape: &AttentionShape, row: &[Tensor64]) {
    let seq_len = row[0].shape[2];
    let got = dispatch::attend::<_, Flex>(&Config::default(), shape, inputs(row), None);
    let got: Vec<f64> = got.into_data().iter::<f64>().collect();
    let want = Config::default().oracle(shape, row, &[vec![0; seq_len]]);
    assert_budget(what, &got, &got, &want.data);
}

const LONG: usize = 65_536;

/// Logits whose sigmoid is 1, or so small that nothing decays.
const ALL: f64 = 40.0;

#[test]
fn decays_hold_at_length() {
    let shape = AttentionShape::new(8, 1, 1, 8);
    type Logit = fn(usize, usize) -> f64;
    let decays: [(&str, Logit); 4] = [
        ("strongest", |_, _| ALL),
        ("none", |_, _| -ALL),
        ("alternating", |t, n| if (t + n) % 2 == 0 { ALL } else { -ALL }),
        ("mixed", |t, n| match (t / 5_000 + n) % 3 {
            0 => ALL,
            1 => -ALL,
            _ => ((t * 31 + n) % 17) as f64 - 8.0,
        }),
    ];
    for (what, decay) in decays {
        check_long_row(
            what,
            &shape,
            &long_row(&shape, LONG, decay, |t, n| ((t + n) % 9) as f64 - 4.0),
        );
    }
}

/// The same key in every token, fully replaced each time: the triangular system inside a chunk has its
/// largest entries, and the state at a token is the last value alone.
///
/// Receptances are near the key: for an orthogonal one every output would be 0, and the norm would amplify
/// the rounding of a state that no decay clears.
#[test]
fn identical_keys_replace_each_other() {
    let shape = AttentionShape::new(8, 2, 1, 8);
    for decay in [-ALL, 0.0, ALL] {
        let mut row = long_row(&shape, LONG, |_, _| decay, |_, _| 12.0);
        let key = |n: usize| (n as f64 * 0.7).cos();
        row[1] = Tensor64::from_fn(&row[1].shape, |at| key(at[3]));
        row[0] = Tensor64::from_fn(&row[0].shape, |at| key(at[3]) + 0.2 * row[0].at(at));
        check_long_row(&format!("identical keys, decay {decay}"), &shape, &row);
    }
}

#[test]
fn gradients_stay_finite_at_length() {
    let shape = AttentionShape::new(8, 1, 1, 8);
    let decay = |t: usize, n: usize| [ALL, -ALL, 200.0, -200.0][(t / 3 + n) % 4];
    let rate = |t: usize, n: usize| [ALL, -ALL, 0.0][(t / 1_000 + n) % 3];
    let mut row = long_row(&shape, LONG, decay, rate);
    // Zero keys as well as large ones.
    row[1] = Tensor64::from_fn(&row[1].shape, |at| match at[2] % 7 {
        0 => 0.0,
        1 => 100.0,
        t => ((t * 8 + at[3]) as f64).sin(),
    });
    type Ad = Autodiff<Flex>;
    let mut inputs = inputs::<Ad>(&row);
    inputs.k = inputs.k.require_grad();
    inputs.projections = inputs.projections.into_iter().map(Tensor::require_grad).collect();
    let (k, projections) = (inputs.k.clone(), inputs.projections.clone());
    let grads = dispatch::attend(&Config::default(), &shape, inputs, None).sum().backward();
    let finite = |values: Vec<f32>| values.iter().all(|x| x.is_finite());
    assert!(finite(k.grad(&grads).unwrap().into_data().to_vec().unwrap()));
    for logits in projections {
        let grad = logits.grad(&grads).unwrap().into_data().to_vec::<f32>().unwrap();
        assert!(grad.iter().any(|&x| x != 0.0));
        assert!(finite(grad));
    }
}

/// A row of several segments, with documents that start at, before and after segment boundaries.
#[test]
fn documents_stay_apart_across_segments() {
    let shape = AttentionShape::new(128, 4, 2, 32);
    let (seq_len, starts) = (5_000, [0, 1, 700, 2_512, 2_600, 4_999]);
    let row = long_row(&shape, seq_len, |t, n| ((t + n) % 9) as f64 - 6.0, |t, _| (t % 5) as f64);
    let all = inputs::<Flex>(&row);
    let of: Vec<i32> =
        (0..seq_len as i32).map(|t| *starts.iter().rfind(|&&s| s <= t).unwrap()).collect();
    let documents = Tensor::from_data(TensorData::new(of, [1, seq_len]), &Default::default());
    let config = Config::default();
    let packed = dispatch::attend(&config, &shape, all.clone(), Some(documents));
    for (at, &start) in starts.iter().enumerate() {
        let (start, end) = (start as usize, starts.get(at + 1).map_or(seq_len, |&s| s as usize));
        let alone = dispatch::attend(&config, &shape, part(&all, start, end - start), None);
        let error = (packed.clone().narrow(2, start, end - start) - alone).abs().max();
        let error = error.into_data().iter::<f64>().next().unwrap();
        assert!(error < 2e-5, "document {at} is off by {error}");
    }
}

#[test]
fn the_state_does_not_grow() {
    let shape = AttentionShape::new(32, 4, 2, 8);
    let row = long_row(&shape, 4_000, |_, _| -3.0, |_, _| 0.0);
    let all = inputs::<Flex>(&row);
    let config = Config::default();
    let mut state = dispatch::State::<_, Flex>::new(0);
    for first in [0, 1_000, 2_000, 3_000] {
        dispatch::extend(&config, &shape, part(&all, first, 1_000), &mut state);
        assert_eq!(state.elements(), 2 * 8 * 8);
    }
}

#[test]
fn ranks_are_the_papers() {
    let config = Config::default();
    // Table 16: width, decay and learning rate, gate.
    let table = [
        (768, 64, 128),
        (1024, 64, 128),
        (2048, 96, 256),
        (2560, 96, 320),
        (4096, 128, 480),
        (6144, 128, 640),
    ];
    for (width, keys, gate) in table {
        let got = [config.decay_rank(width), config.rate_rank(width), config.gate_rank(width)];
        assert_eq!(got, [keys, keys, gate], "width {width}");
    }
    assert_eq!(config.gate_rank(16), 16);
}

#[test]
fn starts_depend_on_channel_and_layer() {
    let shape = |layer| AttentionShape { layer, layers: 3, ..AttentionShape::new(64, 2, 2, 32) };
    let decay = |layer| match &Config::default().projections(&shape(layer))[0] {
        ProjectionSpec { bias: Some(Init::Values(values)), .. } => values.clone(),
        other => panic!("no values in {other:?}"),
    };
    let (first, last) = (decay(0), decay(2));
    for values in [&first, &last] {
        assert_eq!([values[0], values[63]], [-6.5, -1.5]);
        assert!(values.is_sorted());
    }
    assert!(first[30] > last[30]);
    let scale = |layer| Config::default().parameters(&shape(layer))[3].init.clone();
    assert_eq!(scale(2), Init::Constant(1.0));
    assert_eq!(scale(0), Init::Constant((1.0f32 / 3.0).powf(0.7)));
    // A model of one layer does not divide by zero.
    let alone = Config::default().projections(&AttentionShape::new(1, 1, 1, 1));
    assert_eq!(alone[0].bias, Some(Init::Values(vec![-6.5])));
}

#[test]
fn ranks_outside_the_width_are_reported() {
    let config = Config { decay_rank: Some(0), rate_rank: Some(9), gate_rank: Some(8) };
    let mut problems = Problems::new();
    config.validate("model.attention", &AttentionShape::new(8, 1, 1, 8), &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|p| p.key.as_str()).collect();
    assert_eq!(keys, ["model.attention.decay_rank", "model.attention.rate_rank"]);
}
