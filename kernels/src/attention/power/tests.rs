//! This variant's cases for the conformance suite, both forms against each other, and numerics at
//! length.

mod chunked;
mod cuda;
mod decoding;
mod length;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData, s};
use longwall_config::Problems;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Config, Form};
use crate::attention::conformance::{Conformance, YARN, rotated_and_scaled};
use crate::attention::{AttentionShape, DecodeState, Inputs, VariantSpec, dispatch};
use crate::testing::Tensor64;

type Ad = Autodiff<Flex>;

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let default = Config::default();
        let chunked = Config { form: Form::Chunked, chunk: Some(16), ..default.clone() };
        vec![
            default.clone(),
            Config { gate: false, scaling: YARN, ..default.clone() },
            Config { p: 4, gate: false, ..default.clone() },
            Config { form: Form::Attention, rope: false, p: 4, ..default.clone() },
            // Chunks shorter than the configuration allows, so that short sequences have many.
            chunked.clone(),
            Config { p: 4, ..chunked.clone() },
            Config { gate: false, rope: false, chunk: Some(7), ..chunked },
            Config { switch_len: Some(50), chunk: Some(16), ..default },
        ]
    }

    fn kernel_cases() -> Vec<Self> {
        let chunked = |case: &Self| case.form == Form::Chunked || case.switch_len.is_some();
        Self::cases().into_iter().filter(|case| !chunked(case)).collect()
    }

    /// The relative error of a score counts p times in its power. So the variances that the roundings of q
    /// and k cause grow by E[(p·s^(p−1))²] / E[s^(2p)], which is 4/3 for p = 2 and 16/7 for p = 4 with normally
    /// distributed scores; the other three roundings remain.
    fn roundings(&self) -> u32 {
        if self.p == 2 { 6 } else { 8 }
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v] = &inputs[..3] else { panic!("q, k and v") };
        let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
        let rotate = |x: &Tensor64| match self.rope {
            true => rotated_and_scaled(x, self.theta, self.scaling, d),
            false => x.clone(),
        };
        let (q, k) = (rotate(q), rotate(k));
        let gate = |b, t, h| inputs.get(3).map_or(1.0, |x| 1.0 / (1.0 + (-x.at(&[b, t, h])).exp()));
        let mut out = Tensor64::from_fn(&q.shape, |_| 0.0);
        let [batch, heads, seq_len, _] = q.shape[..] else { panic!("q has 4 dimensions") };
        let rows = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for (row, (b, h)) in rows.enumerate() {
            for i in 0..seq_len {
                let window = shape.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let mut decay = 1.0;
                let mut total = 0.0;
                let o = &mut out.data[(row * seq_len + i) * d..][..d];
                for j in (documents[b][i].max(window)..=i).rev() {
                    let dot: f64 =
                        (0..d).map(|n| q.at(&[b, h, i, n]) * k.at(&[b, h / group, j, n])).sum();
                    let weight = (dot / (d as f64).sqrt()).powi(self.p as i32) * decay;
                    total += weight;
                    for (n, o) in o.iter_mut().enumerate() {
                        *o += weight * v.at(&[b, h / group, j, n]);
                    }
                    decay *= gate(b, j, h / group);
                }
                o.iter_mut().for_each(|o| *o /= total);
            }
        }
        out
    }
}

/// Inputs with keys and queries of up to `size`.
fn random_inputs(config: &Config, shape: &AttentionShape, seq_len: usize, size: f32) -> Inputs<Ad> {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let mut random = |heads: usize, size: f32| {
        let n = heads * seq_len * shape.head_dim;
        let data: Vec<f32> = (0..n).map(|_| rng.random_range(-size..size)).collect();
        let data = TensorData::new(data, [1, heads, seq_len, shape.head_dim]);
        Tensor::<Ad, 4>::from_data(data, &Default::default())
    };
    let [q, k] = [shape.heads, shape.kv_heads].map(|heads| random(heads, size));
    let v = random(shape.kv_heads, 1.0);
    let gate = |_| Tensor::full([1, seq_len, shape.kv_heads], 6.9, &Default::default());
    let projections = config.projections(shape).iter().map(gate).collect();
    Inputs { q, k, v, projections, parameters: vec![] }
}

fn to_vec<const N: usize>(x: Tensor<Flex, N>) -> Vec<f32> {
    x.into_data().to_vec().unwrap()
}

#[test]
fn both_forms_agree() {
    let shape = AttentionShape::new(32, 4, 2, 8);
    for p in [2, 4] {
        for size in [1e-3, 1.0, 50.0] {
            let attention = Config { p, form: Form::Attention, ..Config::default() };
            let chunked = Config { form: Form::Chunked, chunk: Some(128), ..attention.clone() };
            let [want, got] = [attention, chunked].map(|config| {
                let inputs = random_inputs(&config, &shape, 1500, size);
                to_vec(dispatch::attend(&config, &shape, inputs, None).inner())
            });
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 1e-5, "{got} and {want} with p = {p}, {size}");
            }
        }
    }
}

#[test]
fn the_state_stops_growing() {
    let shape = AttentionShape::new(16, 2, 1, 8);
    for (form, switch_len) in [(Form::Chunked, None), (Form::Auto, Some(600))] {
        let config = Config { form, switch_len, chunk: Some(128), ..Config::default() };
        let inputs = random_inputs(&config, &shape, 128, 1.0);
        let mut state = dispatch::State::<_, Ad>::new(0);
        let mut sizes = vec![];
        for _ in 0..12 {
            dispatch::extend(&config, &shape, inputs.clone(), &mut state);
            sizes.push(state.elements());
        }
        let settled = sizes[8];
        assert!(settled < 3 * config.state_elements(&shape, 100_000) as usize);
        assert_eq!(sizes[8..], [settled; 4], "{form:?}: {sizes:?}");
    }
}

/// Several chunks enter the sums at once, then single tokens, then a piece that ends inside a chunk.
#[test]
fn a_prefill_hands_over_its_state() {
    let shape = AttentionShape::new(32, 4, 2, 8);
    for (form, switch_len) in [(Form::Chunked, None), (Form::Auto, Some(600))] {
        let config = Config { form, switch_len, chunk: Some(128), ..Config::default() };
        let inputs = random_inputs(&config, &shape, 1200, 1.0);
        let part = |first, n| {
            let of = |x: &Tensor<Ad, 4>| x.clone().narrow(2, first, n);
            let projections = inputs.projections.iter().map(|x| x.clone().narrow(1, first, n));
            Inputs {
                q: of(&inputs.q),
                k: of(&inputs.k),
                v: of(&inputs.v),
                projections: projections.collect(),
                parameters: vec![],
            }
        };
        let mut state = dispatch::State::<_, Ad>::new(0);
        let mut outputs = vec![];
        let mut first = 0;
        for n in [900, 1, 1, 1, 200, 97] {
            outputs.push(dispatch::extend(&config, &shape, part(first, n), &mut state));
            first += n;
        }
        let got = to_vec(Tensor::cat(outputs, 2).inner());
        let want = to_vec(dispatch::attend(&config, &shape, part(0, 1200), None).inner());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-5, "{got} and {want} with {config:?}");
        }
    }
}

/// Queries whose scores are all 0: at the start, in a document of their own and at a chunk's end.
#[test]
fn queries_without_a_score_get_nothing_and_pass_no_gradient() {
    let shape = AttentionShape::new(8, 1, 1, 8);
    for p in [2, 4] {
        for form in [Form::Attention, Form::Chunked] {
            let config = Config { p, form, chunk: Some(128), ..Config::default() };
            let mut inputs = random_inputs(&config, &shape, 700, 1.0);
            inputs.k = inputs.k.slice_fill(s![.., .., 0..400, ..], 0.0);
            inputs.q = inputs.q.slice_fill(s![.., .., 600..650, ..], 0.0);
            let tensors = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            let tensors = tensors.map(|x| {
                *x = x.clone().detach().require_grad();
                x.clone()
            });
            let o = dispatch::attend(&config, &shape, inputs, None);
            let grads = (o.clone() * o.clone() + o.clone()).sum().backward();
            let o = to_vec(o.inner());
            for (t, o) in o.chunks(8).enumerate() {
                let nothing = t < 400 || (600..650).contains(&t);
                assert_eq!(o.iter().all(|&x| x == 0.0), nothing, "token {t}: {o:?}");
            }
            for x in tensors {
                let grad = to_vec(x.grad(&grads).unwrap());
                assert!(grad.iter().all(|x| x.is_finite()));
                assert!(grad[..8 * 399].iter().all(|&x| x == 0.0));
                assert!(grad[8 * 450..].iter().any(|&x| x != 0.0));
            }
        }
    }
}

#[test]
fn problems_name_key_value_and_remedy() {
    let shape = AttentionShape::new(18, 2, 1, 9);
    let bad = Config { p: 3, chunk: Some(64), switch_len: Some(0), ..Config::default() };
    let mut problems = Problems::new();
    bad.validate("model.attention", &shape, &mut problems);
    let keys: Vec<_> = problems.as_slice().iter().map(|x| x.key.as_str()).collect();
    let own = |key| format!("model.attention.{key}");
    assert_eq!(keys, [&own("p"), "model.head_dim", &own("chunk"), &own("switch_len")]);
    assert!(!Config { form: Form::Chunked, ..Config::default() }.allows_window());
    for (config, head_dim, ok) in [
        (Config::default(), 128, true),
        (Config { p: 4, ..Config::default() }, 128, true),
        (Config { p: 4, form: Form::Chunked, ..Config::default() }, 64, true),
        (Config { p: 4, form: Form::Chunked, ..Config::default() }, 128, false),
    ] {
        let mut problems = Problems::new();
        config.validate("a", &AttentionShape::new(2 * head_dim, 2, 1, head_dim), &mut problems);
        assert_eq!(problems.as_slice().is_empty(), ok, "{config:?}: {problems}");
    }
}

/// Table 2 of the source: weight FLOPs against state FLOPs of a 124M GPT-2 (12 layers, width 768,
/// 85M weights in them). The table rounds to powers of two.
#[test]
fn state_flops_are_those_of_the_source() {
    let shape = AttentionShape::new(768, 12, 12, 64);
    let attention = Config { form: Form::Attention, ..Config::default() };
    let weights = 2.0 * 12.0 * 12.0 * 768.0 * 768.0;
    for (seq_len, ratio) in
        [(1_024, 8.0), (8_192, 1.0), (65_536, 1.0 / 8.0), (1_000_000, 1.0 / 125.0)]
    {
        let got = weights / (12.0 * attention.flops_per_token(&shape, seq_len));
        assert!((0.8..1.25).contains(&(got / ratio)), "{got} where {ratio} is right");
    }
    // In the chunked form, long sequences cost in proportion to the state's size.
    let chunked = Config { form: Form::Chunked, ..Config::default() };
    let [short, long] = [1 << 16, 1 << 20].map(|t| chunked.flops_per_token(&shape, t));
    assert!(long / short < 1.02);
    let sums = 4.0 * 2304.0 * 65.0 * 12.0;
    assert!(long > sums && long < 1.5 * sums);
}
