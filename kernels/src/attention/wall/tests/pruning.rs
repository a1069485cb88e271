//! Key tiles that every channel has forgotten, and gates from keys in decoding.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};

use super::{random, values};
use crate::Cuda;
use crate::attention::conformance::{in_bf16, observed_pruning};
use crate::attention::wall::prune::pruned_fraction;
use crate::attention::wall::{Config, GateForm, GateHeads, GateSource};
use crate::attention::{AttentionShape, Inputs, dispatch};

/// Gates at the clamp forget keys two whole tiles back.
fn closed() -> Config {
    Config { bias_init: -1000.0, prune: true, ..Config::default() }
}

#[test]
fn the_pruned_fraction_is_what_all_channels_forget() {
    let tokens = 700;
    let device = Default::default();
    // At the clamp, 79.4 bits per tile, and `open` channels that forget nothing.
    let share = |open: usize, starts: &[usize]| {
        let gate = |channels, g| Tensor::<Flex, 4>::full([1, 1, tokens, channels], g, &device);
        let g = match open {
            0 => gate(4, -0.86),
            _ => Tensor::cat(vec![gate(open, 0.0), gate(4 - open, -0.86)], 3),
        };
        let start = |t: usize| *starts.iter().rfind(|&&s| s <= t).expect("a first document");
        let documents: Vec<i32> = (0..tokens).map(|t| start(t) as i32).collect();
        let documents = Tensor::<Flex, 1, Int>::from_ints(&documents[..], &device);
        let (mut left_out, mut pairs) = (0, 0);
        for t in 0..tokens {
            // The two tiles before a query's own are remembered.
            left_out += ((t / 64).saturating_sub(2) * 64).saturating_sub(start(t));
            pairs += t + 1 - start(t);
        }
        let want = if open > 0 { 0.0 } else { left_out as f64 / pairs as f64 };
        let packed = (starts.len() > 1).then(|| documents.reshape([1, tokens]));
        (pruned_fraction(g, packed), want)
    };
    for open in [0, 1] {
        for starts in [&[0][..], &[0, 70, 320, 450]] {
            let (got, want) = share(open, starts);
            assert_eq!(got, want, "{open} open channels, documents from {starts:?}");
        }
    }
    let q = || random::<Flex, 4>([1, 1, tokens, 4], 1);
    let gates = Tensor::full([1, tokens, 4], -1000.0, &device);
    let inputs = Inputs { q: q(), k: q(), v: q(), projections: vec![gates], parameters: vec![] };
    let none = observed_pruning(&closed(), &AttentionShape::new(4, 1, 1, 4), inputs, None);
    assert_eq!(none, None, "the CPU prunes nothing");
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_pruned_tiles_count_as_if_they_were_read() {
    // About 62 bits per tile, with slopes that matter.
    let closing = Config { bias_init: -1.0, ..closed() };
    let query = Config { gate_heads: GateHeads::Query, ..closing.clone() };
    let key = Config { gate_source: GateSource::Key, ..closing.clone() };
    for (config, sizes) in [
        (closed(), [4, 2, 64, 2, 700]),
        (closing.clone(), [4, 2, 64, 2, 700]),
        (closing.clone(), [2, 1, 128, 1, 500]),
        (Config { sinks: true, ..closing.clone() }, [2, 2, 80, 1, 400]),
        (closing, [2, 1, 256, 1, 400]),
        (query, [4, 2, 64, 1, 400]),
        (key, [4, 2, 64, 1, 400]),
    ] {
        in_bf16::agrees_at::<Config, Cuda>(&config, sizes, None);
        // Documents of one token, within a tile, and of many tiles; with and without ends at tile edges.
        let starts: &[usize] = match sizes[4] {
            700 => &[0, 1, 20, 64, 448, 690],
            _ => &[0, 1, 20, 64, 384, 385],
        };
        in_bf16::agrees_pruned_and_packed::<Config, Cuda>(&config, sizes, starts);
    }
}

/// A later document with scores far below 0, and so a tiny softmax denominator, changes no bit of an earlier
/// one's gradients.
#[test]
#[ignore = "needs a GPU"]
fn cuda_pruned_documents_do_not_reach_each_other() {
    let (shape, tokens, end) = (AttentionShape::new(256, 4, 2, 64), 700, 600);
    let device = Default::default();
    let leaf = |x: Tensor<Cuda, 4>| {
        Tensor::<Autodiff<Cuda>, 4>::from_inner(x.cast(FloatDType::BF16)).require_grad()
    };
    let starts: Vec<i32> =
        (0..2 * tokens).map(|at| if at % tokens < end { 0 } else { end as i32 }).collect();
    let gradients = |factor: f64| {
        let (k, v) = (random::<Cuda, 4>([2, 2, tokens, 64], 2), random([2, 2, tokens, 64], 3));
        let q = random::<Cuda, 4>([2, 4, tokens, 64], 1);
        // Its queries look away from all of its keys, which are alike.
        let ones = |heads| Tensor::ones([2, heads, tokens - end, 64], &device);
        let q = Tensor::cat(vec![q.narrow(2, 0, end), ones(4) * factor], 2);
        let k = Tensor::cat(vec![k.narrow(2, 0, end), ones(2)], 2);
        let [q, k, v] = [q, k, v].map(leaf);
        let gates = Tensor::full([2, tokens, 128], -1000.0, &device);
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: vec![gates],
            parameters: vec![],
        };
        let data = TensorData::new(starts.clone(), [2, tokens]);
        let documents = Tensor::<Autodiff<Cuda>, 2, Int>::from_data(data, &device);
        let o = dispatch::attend(&closed(), &shape, inputs, Some(documents));
        let grads = o.powi_scalar(2).sum().backward();
        [&q, &k, &v].map(|x| values(x.grad(&grads).expect("a gradient")))
    };
    // First scores of 8, −20 and −200.
    let [want, some, far] = [1.0, -2.5, -25.0].map(gradients);
    for got in [some, far] {
        for (name, (want, got)) in ["q", "k", "v"].iter().zip(want.iter().zip(&got)) {
            assert!(got.iter().all(|x| x.is_finite()), "the gradient of {name}");
            let rows = want.chunks_exact(64).zip(got.chunks_exact(64));
            for (at, (want, got)) in rows.enumerate().filter(|(at, _)| at % tokens < end) {
                assert_eq!(want, got, "the gradient of {name} in row {at}");
            }
        }
    }
}

/// A gate with one output for all channels, and for few channels, with several heads.
#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_decodes_with_key_gates() {
    let key = Config { gate_source: GateSource::Key, bias_init: 2.0, ..Config::default() };
    for config in [
        Config { gate_form: GateForm::Scalar, ..key.clone() },
        Config { gate_dims: Some(3), ..key.clone() },
        Config { gate_form: GateForm::Scalar, gate_dims: Some(40), ..key },
    ] {
        in_bf16::decodes_at::<Config, Cuda>(&config, [4, 2, 80, 2, 130]);
    }
}

/// Keys that all but nearby queries have forgotten are not read.
#[test]
#[ignore = "needs a GPU"]
fn cuda_pruned_keys_are_not_read() {
    let (shape, tokens, far, near) = (AttentionShape::new(256, 4, 2, 64), 600, 128, 320);
    let inputs = |k| {
        let q = random::<Cuda, 4>([2, 4, tokens, 64], 1);
        let v = random([2, 2, tokens, 64], 3);
        let gates = Tensor::full([2, tokens, 128], -1000.0, &Default::default());
        let [q, k, v] = [q, k, v].map(|x: Tensor<Cuda, 4>| x.cast(FloatDType::BF16));
        Inputs { q, k, v, projections: vec![gates], parameters: vec![] }
    };
    let k = random::<Cuda, 4>([2, 2, tokens, 64], 2);
    let nothing = Tensor::full([2, 2, far, 64], f32::NAN, &Default::default());
    let holed = Tensor::cat(vec![nothing, k.clone().narrow(2, far, tokens - far)], 2);
    let pruned = observed_pruning(&closed(), &shape, inputs(k.clone()), None);
    assert!(pruned.is_some_and(|pruned| pruned > 0.5), "{pruned:?}");
    let [want, got] = [k, holed].map(|k| {
        let o = dispatch::attend(&closed(), &shape, inputs(k), None);
        values(o.narrow(2, near, tokens - near))
    });
    assert_eq!(want, got);
}
