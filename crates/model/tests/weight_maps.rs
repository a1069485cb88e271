use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::attention::probe::Observation;
use longwall_kernels::attention::weights::{ENTROPY, LARGEST_WEIGHT, SINK_RATIO};
use longwall_model::layers::{LayerWeights, MapScale, WeightMap};
use longwall_model::{LanguageModel, ModelConfig};

const TOKENS: usize = 40;

fn tokens() -> Tensor<Flex, 2, Int> {
    let tokens: Vec<i32> = (0..TOKENS as i32).map(|t| t * t % 23).collect();
    Tensor::from_data(TensorData::new(tokens, [1, TOKENS]), &Default::default())
}

/// A model of two layers of each of these kinds, with scores that differ between keys.
fn model(kinds: &[&str], more: &str) -> LanguageModel<Flex> {
    let pattern = kinds.iter().map(|kind| format!("\"{kind}\"")).collect::<Vec<_>>().join(", ");
    let table = format!(
        "layers = {}\nwidth = 32\nheads = 4\nkv_heads = 2\nqk_norm = true\npattern = [{pattern}]\n{more}",
        2 * kinds.len()
    );
    let config: ModelConfig = toml::from_str(&table).expect("a valid table");
    LanguageModel::new(&config, 23, TOKENS, 3, &Default::default())
}

fn map(layer: &LayerWeights) -> &WeightMap {
    layer.map.as_ref().unwrap_or_else(|| panic!("no weights of {}", layer.kind))
}

/// Every kind that reports weights has a map; all others have none.
#[test]
fn kinds_without_weights_have_no_map() {
    for kind in AttentionConfig::defaults() {
        let layers = model(&[kind.kind()], "").attention_weights(tokens());
        assert_eq!(layers.len(), 2);
        for layer in layers {
            assert_eq!(layer.kind, kind.kind());
            let weighs = kind.thorough_metrics().contains(&LARGEST_WEIGHT);
            assert_eq!(layer.map.is_some(), weighs, "{}", layer.kind);
        }
    }
}

/// Row i has i + 1 weights that sum to 1, also with grouped heads, a window and values from the first layer.
#[test]
fn weights_of_softmax_kinds_sum_to_1() {
    let more = "window = 9\nvalue_residual = \"learned\"";
    let softmax = ["rope", "fox", "wall", "dex"];
    for layer in model(&softmax, more).attention_weights(tokens()) {
        let map = map(&layer);
        assert_eq!((map.scale, map.heads.len()), (MapScale::Weights, 4));
        for head in &map.heads {
            assert_eq!(head.len(), TOKENS);
            for (query, weights) in head.iter().enumerate() {
                assert_eq!(weights.len(), query + 1);
                let sum: f32 = weights.iter().sum();
                assert!((sum - 1.0).abs() < 1e-4, "{}: {sum}", layer.kind);
                let outside = &weights[..(query + 1).saturating_sub(9)];
                assert!(outside.iter().all(|weight| *weight == 0.0), "{}: {outside:?}", layer.kind);
                assert!(
                    weights.iter().all(|weight| *weight > -1e-5),
                    "{}: {weights:?}",
                    layer.kind
                );
            }
        }
    }
}

/// The metrics that a probe reports, from the map of a head.
fn check_metrics(observations: &[Observation], layer: usize, kind: &str, map: &WeightMap) {
    let find = |metric| {
        let found = observations.iter().find(|x| (x.layer, x.metric) == (layer, metric));
        &found.unwrap_or_else(|| panic!("{kind}: {}", metric.0)).heads[0]
    };
    for (head, rows) in map.heads.iter().enumerate() {
        let near = |metric, got: f64| {
            let want: f64 = find(metric)[head];
            // Heads without a weight have no entropy.
            let same = (got - want).abs() < 2e-3 * want.abs().max(0.1);
            assert!(same || (got.is_nan() && want.is_nan()), "{kind}: {got}, not {want}");
        };
        let (mut entropies, mut shares, mut equal) = (vec![], 0.0, 0.0);
        let mut largest = 0.0f64;
        for (query, weights) in rows.iter().enumerate() {
            let weights: Vec<f64> = weights.iter().map(|x| f64::from(*x)).collect();
            let total: f64 = weights.iter().sum();
            equal += 1.0 / (query + 1) as f64;
            if total > 0.0 {
                largest = weights.iter().copied().fold(largest, f64::max);
                shares += weights[0] / total;
                let p = weights.iter().map(|x| x / total).filter(|p| *p > 0.0);
                entropies.push(-p.map(|p| p * p.ln()).sum::<f64>());
            }
        }
        near(LARGEST_WEIGHT, largest);
        near(ENTROPY, entropies.iter().sum::<f64>() / entropies.len() as f64);
        near(SINK_RATIO, shares / equal);
    }
}

/// Of every kind with one view, with and without an output norm: entropies and sinks of its map are those that the
/// operation's own weights have.
#[test]
fn maps_of_one_view_have_the_metrics_that_a_probe_reports() {
    for kind in AttentionConfig::defaults() {
        if kind.views() > 1 || !kind.thorough_metrics().contains(&LARGEST_WEIGHT) {
            continue;
        }
        let model = model(&[kind.kind()], "");
        let probe = model.observe_thoroughly(tokens());
        for (at, layer) in model.attention_weights(tokens()).iter().enumerate() {
            check_metrics(probe.observations(), at, layer.kind, map(layer));
        }
    }
}

/// The difference of two views has weights of both signs; sizes sum to 1, or to 0 where no key has a weight.
#[test]
fn weights_of_differential_kinds_are_signed_shares() {
    for layer in model(&["diff", "tda", "diff_rela"], "").attention_weights(tokens()) {
        let map = map(&layer);
        assert_eq!((map.scale, map.heads.len()), (MapScale::Shares, 4));
        let all = || map.heads.iter().flatten().flatten();
        let signs = [1.0, -1.0].map(|sign| all().filter(|x| **x * sign > 1e-3).count());
        assert!(signs[0] > 0 && signs[1] > 0, "{}: {signs:?}", layer.kind);
        for weights in map.heads.iter().flatten() {
            let total: f32 = weights.iter().map(|x| x.abs()).sum();
            assert!(total == 0.0 || (total - 1.0).abs() < 1e-4, "{}: {total}", layer.kind);
        }
    }
}
