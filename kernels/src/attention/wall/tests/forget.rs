//! The forget gate on top of Wall's gates.

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use longwall_config::Problems;

use super::{random, values};
use crate::Cuda;
use crate::attention::conformance::{Problem, in_bf16};
use crate::attention::wall::{Config, GateHeads, GateSource};
use crate::attention::{AttentionConfig, AttentionShape, Init, Inputs, VariantSpec, dispatch, fox};

fn forgetting() -> Config {
    Config { forget_gate: true, ..Config::default() }
}

fn problems(config: Config) -> Vec<String> {
    let mut problems = Problems::new();
    let shape = AttentionShape::new(64, 4, 2, 16);
    AttentionConfig::Wall(config).validate(&shape, &mut problems);
    problems.as_slice().iter().map(|problem| problem.key.clone()).collect()
}

#[test]
fn the_forget_gate_excludes_eviction_and_pruning() {
    assert!(problems(forgetting()).is_empty());
    let evicting = Config { evict_below: Some(1e-3), ..forgetting() };
    assert_eq!(problems(evicting), ["model.attention.evict_below"]);
    let pruning = Config { prune: true, ..forgetting() };
    assert_eq!(problems(pruning), ["model.attention.prune"]);
}

#[test]
fn a_bias_is_only_for_a_forget_gate() {
    let shape = AttentionShape::new(64, 4, 2, 16);
    let biased = Config { forget_bias_init: Some(5.0), ..forgetting() };
    let projections = biased.projections(&shape);
    assert_eq!((projections[1].name, projections[1].features), ("forget_gate", 4));
    assert_eq!(projections[1].bias, Some(Init::Constant(5.0)));
    assert_eq!(forgetting().projections(&shape)[1].bias, Some(Init::Constant(0.0)));
    assert_eq!(Config::default().projections(&shape).len(), 1);
    assert!(problems(biased.clone()).is_empty());
    let key = ["model.attention.forget_bias_init"];
    assert_eq!(problems(Config { forget_gate: false, ..biased.clone() }), key);
    assert_eq!(problems(Config { forget_bias_init: Some(f32::NAN), ..biased }), key);
}

fn inputs(logits: [f32; 2], tokens: usize) -> Inputs<Flex> {
    let of_gate = Tensor::full([2, tokens, 16], logits[0], &Default::default());
    Inputs {
        q: random([2, 4, tokens, 8], 1),
        k: random([2, 2, tokens, 8], 2),
        v: random([2, 2, tokens, 8], 3),
        projections: vec![of_gate, random([2, tokens, 4], 4) + logits[1]],
        parameters: vec![],
    }
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// With Wall's gates open it is forgetting attention, and with the forget gate open Wall attention.
#[test]
fn each_gate_alone_is_its_own_kind() {
    let shape = AttentionShape::new(32, 4, 2, 8);
    let tokens = 300;
    let both =
        |logits| values(dispatch::attend(&forgetting(), &shape, inputs(logits, tokens), None));
    let mut of_fox = inputs([1000.0, 1.0], tokens);
    of_fox.projections.remove(0);
    let of_fox = values(dispatch::attend(&fox::Config::default(), &shape, of_fox, None));
    let difference = largest_difference(&both([1000.0, 1.0]), &of_fox);
    assert!(difference < 1e-5, "{difference:.1e} from forgetting attention");
    let mut of_wall = inputs([1.0, 1000.0], tokens);
    of_wall.projections.pop();
    let of_wall = values(dispatch::attend(&Config::default(), &shape, of_wall, None));
    let difference = largest_difference(&both([1.0, 1000.0]), &of_wall);
    assert!(difference < 1e-5, "{difference:.1e} from Wall attention");
    assert!(largest_difference(&both([1.0, 1.0]), &of_wall) > 1e-2);
}

/// A key whose channels have all decayed to 0 still has a weight, which the forget gate takes away.
#[test]
fn the_forget_gate_takes_the_weight_of_forgotten_keys() {
    let shape = AttentionShape::new(8, 1, 1, 8);
    let tokens = 100;
    let device = Default::default();
    // Only the first token's value is 1: the last output is that key's weight.
    let mut v = vec![0.0f32; tokens * 8];
    v[..8].fill(1.0);
    let weight = |forget: f32| {
        let inputs = Inputs::<Flex> {
            q: random([1, 1, tokens, 8], 1) * 0.0,
            k: random([1, 1, tokens, 8], 2),
            v: Tensor::from_data(TensorData::new(v.clone(), [1, 1, tokens, 8]), &device),
            projections: vec![
                Tensor::full([1, tokens, 8], -1000.0, &device),
                Tensor::full([1, tokens, 1], forget, &device),
            ],
            parameters: vec![],
        };
        let o = dispatch::attend(&forgetting(), &shape, inputs, None);
        *values(o).last().expect("outputs")
    };
    let open = weight(1000.0);
    assert!((open * tokens as f64 - 1.0).abs() < 1e-5, "{open}");
    // ln σ(0) = −ln 2: the weights are 2^−(tokens − 1 − j), over a sum of 2.
    let (half, want) = (weight(0.0), 0.5f64.powi(tokens as i32));
    assert!((half / want - 1.0).abs() < 1e-4, "{half:e} where {want:e} is right");
}

/// Heads above and below 64 channels, where the kernels have other tiles; groups, whose heads take turns in the sums of
/// dS; a window that begins inside a tile, and documents.
#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_agrees_with_a_forget_gate() {
    let config = Config { bias_init: 1.0, ..forgetting() };
    let sinks = Config { sinks: true, ..config.clone() };
    let query = Config { gate_heads: GateHeads::Query, ..config.clone() };
    let key = Config { bias_init: 2.0, gate_source: GateSource::Key, ..config.clone() };
    for (config, sizes, window) in [
        (&key, [2, 2, 64, 1, 257], None),
        (&config, [6, 2, 64, 1, 200], None),
        (&config, [2, 1, 128, 1, 140], Some(97)),
        (&config, [2, 1, 16, 1, 33], None),
        (&config, [2, 1, 192, 1, 70], None),
        (&sinks, [2, 1, 256, 1, 100], None),
        (&query, [4, 2, 80, 1, 129], None),
    ] {
        in_bf16::agrees_at::<Config, Cuda>(config, sizes, window);
    }
    let packed = Problem::new(&config, [4, 1, 128, 2, 200], None).packed(&[0, 1, 90, 130, 199]);
    in_bf16::agrees_on::<Config, Cuda>(&config, packed);
}

/// Steps and pieces of prompts, in wide heads, with many query heads to a gate, and over several tiles.
#[test]
#[ignore = "needs a GPU"]
fn cuda_bf16_decodes_with_a_forget_gate() {
    let config = Config { bias_init: 1.0, forget_bias_init: Some(2.0), ..forgetting() };
    let query = Config { gate_heads: GateHeads::Query, sinks: true, ..config.clone() };
    let key = Config { gate_source: GateSource::Key, ..config.clone() };
    for (config, sizes) in [
        (&config, [40, 2, 80, 1, 70]),
        (&config, [2, 2, 128, 1, 700]),
        (&config, [2, 1, 256, 1, 90]),
        (&query, [4, 2, 64, 2, 130]),
        (&key, [4, 2, 64, 2, 130]),
    ] {
        in_bf16::decodes_at::<Config, Cuda>(config, sizes);
    }
    let windowed = Problem::new(&config, [4, 2, 64, 1, 500], Some(70));
    in_bf16::decodes_on::<Config, Cuda>(&config, windowed);
}
