//! Tiles of keys that every channel has forgotten.

use burn::backend::Flex;
use burn::tensor::{FloatDType, Tensor};

use super::{random, values};
use crate::Cuda;
use crate::attention::conformance::bf16_agrees_at;
use crate::attention::wall::{Config, GateHeads, GateSource};
use crate::attention::{AttentionShape, Inputs, Variant};

/// Gates at the clamp forget what lies two whole tiles back.
fn closed() -> Config {
    Config { bias_init: -1000.0, prune: true, ..Config::default() }
}

#[test]
fn the_share_left_out_is_what_all_channels_forget() {
    let (shape, tokens) = (AttentionShape::new(8, 2, 1, 4), 700);
    let inputs = |open: usize| {
        let gate = |channels, logit| Tensor::<Flex, 3>::full([1, tokens, channels], logit, &Default::default());
        let [q, k, v] = [2, 1, 1].map(|heads| random([1, heads, tokens, 4], 1));
        let gates = match open {
            0 => gate(4, -1000.0),
            _ => Tensor::cat(vec![gate(open, 1000.0), gate(4 - open, -1000.0)], 2),
        };
        Inputs { q, k, v, projections: vec![gates], parameters: vec![] }
    };
    let queries = |tile: usize| 64.min(tokens - tile * 64);
    let want: usize = (3..11).map(|tile| queries(tile) * (tile - 2) * 64).sum();
    let share = closed().share_left_out(&shape, inputs(0)).expect("a share");
    assert_eq!(share, want as f64 / (tokens * (tokens + 1) / 2) as f64);
    assert_eq!(closed().share_left_out(&shape, inputs(1)), Some(0.0));
    assert_eq!(Config::default().share_left_out(&shape, inputs(0)), None);
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_pruned_tiles_count_as_if_they_were_read() {
    // Some 62 bits a tile, with slopes that count.
    let closing = Config { bias_init: -1.0, ..closed() };
    let query = Config { gate_heads: GateHeads::Query, ..closing.clone() };
    let key = Config { gate_source: GateSource::Key, ..closing.clone() };
    for (config, sizes) in [
        (closed(), [4, 2, 64, 2, 700]),
        (closing.clone(), [4, 2, 64, 2, 700]),
        (closing.clone(), [2, 1, 128, 1, 500]),
        (closing.clone(), [2, 2, 80, 1, 400]),
        (closing, [2, 1, 256, 1, 400]),
        (query, [4, 2, 64, 1, 400]),
        (key, [4, 2, 64, 1, 400]),
    ] {
        bf16_agrees_at::<Config, Cuda>(&config, sizes, None);
    }
}

/// Keys that all queries have forgotten but those nearby are not read.
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
    let [want, got] = [k, holed].map(|k| {
        let o = closed().attend(&shape, inputs(k), None);
        values(o.narrow(2, near, tokens - near))
    });
    assert_eq!(want, got);
}

