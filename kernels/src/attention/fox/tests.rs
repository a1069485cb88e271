//! This variant's cases for the conformance suite, and its numerics at length.

mod cuda;
mod length;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, ElementConversion, FloatDType, Int, Tensor, s};
use longwall_config::Problems;

use super::Config;
use super::op::{Forgetting, forgetting};
use crate::attention::conformance::{
    Conformance, YARN, observed_pruning, rotated_and_scaled, softmax_oracle,
};
use crate::attention::probe::{PRUNED_FRACTION, Probe};
use crate::attention::softmax::Softmax;
use crate::attention::{
    AttentionShape, DecodeState, ExecPath, Init, Inputs, VariantSpec, dispatch,
};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::testing::Tensor64;
use crate::{Cpu, Cuda};

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        vec![
            Config::default(),
            Config { rope: true, scaling: YARN, sinks: true, ..Config::default() },
            Config { prune: true, ..Config::default() },
            Config { prune: true, sinks: true, ..Config::default() },
        ]
    }

    /// With sinks one more: that of o in δ = dO · o. The gradients of a row's scores then do not sum to 0.
    fn roundings(&self) -> u32 {
        if self.sinks { 6 } else { 5 }
    }

    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, logits, sinks @ ..] = inputs else { panic!("q, k, v and the gate") };
        let group = shape.heads / shape.kv_heads;
        let d = shape.head_dim;
        let rotate = |x: &Tensor64| match self.rope {
            true => rotated_and_scaled(x, self.theta, self.scaling, d),
            false => x.clone(),
        };
        let (q, k) = (rotate(q), rotate(k));
        let log_decay = |b: usize, h: usize, t: usize| -(-logits.at(&[b, t, h])).exp().ln_1p();
        softmax_oracle(shape, [&q, v], sinks.first(), documents, |b, h, i, j| {
            let dot: f64 = (0..d).map(|n| q.at(&[b, h, i, n]) * k.at(&[b, h / group, j, n])).sum();
            dot / (d as f64).sqrt() + (j + 1..=i).map(|s| log_decay(b, h, s)).sum::<f64>()
        })
    }
}

#[test]
fn the_gates_bias_starts_where_it_is_told_to() {
    let shape = AttentionShape::new(8, 2, 2, 4);
    let config = Config { bias_init: 5.0, ..Config::default() };
    assert_eq!(config.projections(&shape)[0].bias, Some(Init::Constant(5.0)));
    let mut problems = Problems::new();
    Config { bias_init: f32::NAN, ..config }.validate("a", &shape, &mut problems);
    assert_eq!(problems.as_slice().len(), 1);
    assert_eq!(problems.as_slice()[0].key, "a.bias_init");
}

/// The operation of a layer.
fn of_layer(shape: &AttentionShape) -> Forgetting {
    Forgetting { core: Softmax::of(shape) }
}

/// After 16,000 steps that decay by 30 each, the prefix sum is near −500,000, where neighbouring f32
/// numbers are 0.03 apart; later gates of −0.001 must still have an effect.
#[test]
fn small_gates_count_after_long_strong_decay() {
    let (strong, weak) = (16_000, 40);
    let keys = strong + weak;
    let device = Default::default();
    let decay: Vec<f32> = (0..keys).map(|t| if t < strong { -30.0 } else { -0.001 }).collect();
    let log_decay = Tensor::<Flex, 1>::from_floats(&decay[..], &device).reshape([1, 1, keys]);
    let q = Tensor::<Flex, 4>::zeros([1, 1, 1, 8], &device);
    let k = Tensor::random([1, 1, keys, 8], Distribution::Default, &device);
    // Only the last key's value is 1: the output is that key's weight.
    let last = Tensor::<Flex, 4>::ones([1, 1, 1, 8], &device);
    let v = Tensor::cat(vec![Tensor::zeros([1, 1, keys - 1, 8], &device), last], 2);
    let shape = AttentionShape::new(8, 1, 1, 8);
    let path = ExecPath::Kernel(DeviceKind::Cpu);
    let o = forgetting(&of_layer(&shape), [q, k, v], log_decay, None, None, path);
    let got = f64::from(o.into_data().to_vec::<f32>().unwrap()[0]);
    let total: f64 = (0..=weak).map(|n| (-0.001f64 * n as f64).exp()).sum();
    assert!((got - 1.0 / total).abs() < 1e-7, "{got} where {} is right", 1.0 / total);
}

/// Outputs and gradients of the queries from 320 on, with and without pruning, where the values of negligible
/// keys are NaN.
fn pruning_leaves_out_what_does_not_matter<B: OpBackend>(device: &B::Device, dtype: FloatDType) {
    let (tokens, far, near) = (600, 128, 320);
    let normal = Distribution::Normal(0.0, 0.3);
    let random = |heads: usize| {
        Tensor::<Autodiff<B>, 4>::random([2, heads, tokens, 64], normal, device).cast(dtype)
    };
    let [q, k, v] = [random(4), random(2), random(2)].map(|x| x.detach().require_grad());
    let log_decay = Tensor::full([2, 4, tokens], -0.5, device);
    let path = ExecPath::Kernel(B::device_kind());
    let results = |prune: bool, v: Tensor<Autodiff<B>, 4>| {
        let mut op = of_layer(&AttentionShape::new(256, 4, 2, 64));
        op.core.prune = prune;
        let qkv = [q.clone(), k.clone(), v.clone()];
        let o = forgetting(&op, qkv, log_decay.clone(), None, None, path);
        let o = o.slice(s![.., .., near.., ..]).cast(FloatDType::F32);
        let grads = o.clone().powi_scalar(2).sum().backward();
        let grads = [&q, &k, &v].map(|x| x.grad(&grads).expect("a gradient").cast(FloatDType::F32));
        (o.inner(), grads)
    };
    let nothing = Tensor::<_, 4>::full([2, 2, far, 64], f32::NAN, device).cast(dtype);
    let holed = Tensor::cat(vec![nothing, v.clone().slice(s![.., .., far.., ..])], 2);
    let (want, want_grads) = results(false, v);
    let (got, got_grads) = results(true, holed.detach().require_grad());
    // Pruning may round a result the other way.
    let unit = if dtype == FloatDType::BF16 { 2f32.powi(-8) } else { 2f32.powi(-20) };
    let check = |name: &str, want: Tensor<B, 4>, got: Tensor<B, 4>| {
        let largest: f32 = want.clone().abs().max().into_scalar().elem();
        let worst: f32 = (want - got).abs().max().into_scalar().elem();
        assert!(worst <= unit * largest, "{name} is off by {worst}, of {largest}");
    };
    check("o", want, got);
    for (name, (want, got)) in ["dq", "dk", "dv"].iter().zip(want_grads.into_iter().zip(got_grads))
    {
        let from = if *name == "dq" { near } else { far };
        check(name, want.slice(s![.., .., from.., ..]), got.slice(s![.., .., from.., ..]));
    }
}

#[test]
fn pruning_leaves_out_what_does_not_matter_on_the_cpu() {
    pruning_leaves_out_what_does_not_matter::<Cpu>(&Default::default(), FloatDType::F32);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_pruning_leaves_out_what_does_not_matter() {
    pruning_leaves_out_what_does_not_matter::<Cuda>(&Default::default(), FloatDType::BF16);
}

/// With queries and keys of constant norm, and so one bound U on a head's scores, and a decay of ℓ per step,
/// the query at position i keeps keys less than (24 ln 2 + ln (i + 1) + 2 U) / −ℓ positions back.
#[test]
fn the_pruned_fraction_counts_visible_pairs() {
    let (tokens, decays) = (200, [0.5f64, 1.0, 0.25, 2.0]);
    // The norms of the kv heads' keys; queries have norm 1.
    let lengths = [0.0f32, 4.0];
    let device = Default::default();
    let inputs = || {
        let of_length = |length: f32| {
            let first = Tensor::<Flex, 4>::full([2, 1, tokens, 1], length, &device);
            Tensor::cat(vec![first, Tensor::zeros([2, 1, tokens, 7], &device)], 3)
        };
        let q = of_length(1.0).repeat_dim(1, 4);
        let k = Tensor::cat(lengths.map(of_length).to_vec(), 1);
        // ln σ(z) = −decay.
        let logits = decays.map(|decay| -(decay.exp() - 1.0).ln());
        let logits = Tensor::<Flex, 1>::from_floats(logits, &device).reshape([1, 1, 4]);
        let projections = vec![logits.expand([2, tokens, 4])];
        Inputs { q, k: k.clone(), v: k, projections, parameters: vec![] }
    };
    // The first sequence's second document begins at 70.
    let start = |b: usize, i: usize| if b == 0 && i >= 70 { 70 } else { 0 };
    let documents: Vec<i32> =
        (0..2 * tokens).map(|at| start(at / tokens, at % tokens) as i32).collect();
    let documents = Tensor::<Flex, 1, Int>::from_ints(&documents[..], &device).reshape([2, tokens]);
    for (window, packed) in [(None, false), (Some(60), false), (None, true), (Some(60), true)] {
        let (mut left_out, mut pairs) = (0, 0);
        for (b, h, i) in
            (0..2).flat_map(|b| (0..4).flat_map(move |h| (0..tokens).map(move |i| (b, h, i))))
        {
            // A little more than 2 U.
            let bound = 2.001 * f64::from(lengths[h / 2]) / 8f64.sqrt();
            let kept = (24.0 * 2f64.ln() + (i as f64 + 1.0).ln() + bound) / decays[h];
            let first = (i as f64 - kept).floor() as i64 + 1;
            let hidden = if packed { start(b, i) } else { 0 };
            let hidden = hidden.max((i + 1).saturating_sub(window.unwrap_or(tokens)));
            left_out += (first - hidden as i64).max(0);
            pairs += i + 1 - hidden;
        }
        let shape = AttentionShape { window, ..AttentionShape::new(32, 4, 2, 8) };
        let config = Config { prune: true, ..Config::default() };
        let pruned = observed_pruning(&config, &shape, inputs(), packed.then(|| documents.clone()));
        assert_eq!(
            pruned,
            Some(left_out as f64 / pairs as f64),
            "window {window:?}, packed {packed}"
        );
        assert_eq!(observed_pruning(&Config::default(), &shape, inputs(), None), None);
    }
}

/// Steps of decoding, with and without pruning, where the values of negligible keys are NaN.
#[test]
#[ignore = "needs a GPU"]
fn cuda_steps_leave_out_what_does_not_matter() {
    let (tokens, far) = (600, 128);
    let shape = AttentionShape::new(256, 4, 2, 64);
    let device = Default::default();
    let normal = Distribution::Normal(0.0, 0.3);
    let random = |heads: usize| {
        Tensor::<Cuda, 4>::random([2, heads, tokens, 64], normal, &device).cast(FloatDType::BF16)
    };
    let [q, k, v] = [random(4), random(2), random(2)];
    // σ(0.43) = e^−0.5.
    let logits = Tensor::<Cuda, 3>::full([2, tokens, 4], 0.43, &device);
    let steps = |prune: bool, v: &Tensor<Cuda, 4>| {
        let config = Config { prune, ..Config::default() };
        let mut state = dispatch::State::<_, Cuda>::new(0);
        let mut extend = |first: usize, n: usize| {
            let [q, k, v] = [&q, &k, v].map(|x| x.clone().narrow(2, first, n));
            let projections = vec![logits.clone().narrow(1, first, n)];
            dispatch::extend(
                &config,
                &shape,
                Inputs { q, k, v, projections, parameters: vec![] },
                &mut state,
            )
        };
        extend(0, 400);
        let steps = (400..tokens).map(|t| extend(t, 1)).collect();
        let mut probe = Probe::default();
        state.observe(&mut probe);
        let share = probe.mean(PRUNED_FRACTION);
        (Tensor::cat(steps, 2).cast(FloatDType::F32), share)
    };
    let nothing =
        Tensor::<Cuda, 4>::full([2, 2, far, 64], f32::NAN, &device).cast(FloatDType::BF16);
    let holed = Tensor::cat(vec![nothing, v.clone().slice(s![.., .., far.., ..])], 2);
    let ((want, none), (got, share)) = (steps(false, &v), steps(true, &holed));
    assert_eq!(none, None);
    // About (24 ln 2 + ln 600) / 0.5 = 46 keys matter, and more by the bound on their scores.
    assert!(share.is_some_and(|share| (0.8..1.0 - 46.0 / 600.0).contains(&share)), "{share:?}");
    let largest: f32 = want.clone().abs().max().into_scalar().elem();
    let worst: f32 = (want - got).abs().max().into_scalar().elem();
    assert!(worst <= largest / 256.0, "off by {worst}, of {largest}");
}
