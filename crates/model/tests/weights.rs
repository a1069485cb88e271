use burn::backend::Flex;
use longwall_model::weights::{load, named_tensors, save};
use longwall_model::{LanguageModel, ModelConfig};

use crate::configs::{SEQ_LEN, VOCAB, configs};

fn model(config: &ModelConfig, seed: u64) -> LanguageModel<Flex> {
    LanguageModel::new(config, VOCAB, SEQ_LEN, seed, &Default::default())
}

#[test]
fn weights_survive_a_round_trip_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    for config in configs() {
        let original = model(&config, 1);
        save(&original, &path).unwrap();
        let other = model(&config, 2);
        assert_ne!(named_tensors(&original), named_tensors(&other));
        assert_eq!(named_tensors(&original), named_tensors(&load(other, &path).unwrap()));
    }
}

#[test]
fn tensors_are_named_by_their_place() {
    let names: Vec<_> = named_tensors(&model(&configs().nth(1).unwrap(), 0))
        .into_iter()
        .map(|(name, shape, _)| format!("{name} {shape:?}"))
        .collect();
    assert_eq!(
        names,
        [
            "embedding [11, 8]",
            "blocks.0.attention_norm.weight [8]",
            "blocks.0.attention.q.weight [8, 8]",
            "blocks.0.attention.k.weight [4, 8]",
            "blocks.0.attention.v.weight [4, 8]",
            "blocks.0.attention.output.weight [8, 8]",
            "blocks.0.attention.projections.0.outer.weight [4, 8]",
            "blocks.0.attention.projections.0.outer.bias [4]",
            "blocks.0.attention.q_norm.weight [2]",
            "blocks.0.attention.k_norm.weight [2]",
            "blocks.0.attention.output_gate.weight [8, 8]",
            "blocks.0.attention.convs.0 [8, 4]",
            "blocks.0.attention.convs.1 [4, 4]",
            "blocks.0.attention.convs.2 [4, 4]",
            "blocks.0.mlp_norm.weight [8]",
            "blocks.0.mlp.gate.weight [12, 8]",
            "blocks.0.mlp.up.weight [12, 8]",
            "blocks.0.mlp.down.weight [8, 12]",
            "norm.weight [8]",
            "head [11, 8]",
        ]
    );
}

#[test]
fn another_models_weights_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let all: Vec<_> = configs().collect();
    save(&model(&all[0], 0), &path).unwrap();
    let error = load(model(&all[1], 0), &path).unwrap_err().to_string();
    assert!(
        error.contains("blocks.0.attention.k.weight has shape [8, 8], the model's [4, 8]"),
        "{error}"
    );
    let mut deeper = all[0].clone();
    deeper.layers = 1;
    let error = load(model(&deeper, 0), &path).unwrap_err().to_string();
    assert!(error.contains("tensors beside the model's"), "{error}");
    std::fs::write(&path, b"not weights at all").unwrap();
    let error = load(model(&all[0], 0), &path).unwrap_err().to_string();
    assert!(error.contains("is not a valid safetensors file"), "{error}");
}

/// Options and depth change no parameter that both models have, so that ablations start equal.
#[test]
fn initial_weights_depend_on_the_name_alone() {
    let config = configs().nth(2).unwrap();
    let gated = ModelConfig { output_gate: true, ..config.clone() };
    let plain = named_tensors(&model(&config, 5));
    let gated = named_tensors(&model(&gated, 5));
    assert!(gated.len() > plain.len());
    for tensor in &plain {
        assert!(gated.contains(tensor), "{}", tensor.0);
    }
}
