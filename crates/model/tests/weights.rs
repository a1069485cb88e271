use std::collections::HashMap;

use burn::backend::Flex;
use longwall_model::weights::{load, named_tensors, parameter_shapes, save, write_tensors};
use longwall_model::{HeadBlocks, LanguageModel, ModelConfig};

use crate::configs::{SEQ_LEN, VOCAB, configs, configs_and_kinds};

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
            "blocks.0.attention.q.conv [8, 4]",
            "blocks.0.attention.k.weight [4, 8]",
            "blocks.0.attention.k.conv [4, 4]",
            "blocks.0.attention.v.weight [4, 8]",
            "blocks.0.attention.v.conv [4, 4]",
            "blocks.0.attention.output.weight [8, 8]",
            "blocks.0.attention.forget_gate.weight [4, 8]",
            "blocks.0.attention.forget_gate.bias [4]",
            "blocks.0.attention.q_norm.weight [2]",
            "blocks.0.attention.k_norm.weight [2]",
            "blocks.0.attention.output_gate.weight [8, 8]",
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
    let grouped = ModelConfig { short_conv: false, ..all[1].clone() };
    let error = load(model(&grouped, 0), &path).unwrap_err().to_string();
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

/// Options and depth do not change parameters that two models share, so that ablations start equal.
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

#[test]
fn every_weight_has_a_name_of_its_own() {
    for config in configs_and_kinds() {
        let mut names: Vec<_> =
            named_tensors(&model(&config, 0)).into_iter().map(|(name, ..)| name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{config:?}");
        let unnamed = |part: &str| part.parse::<usize>().is_ok();
        // Apart from `blocks.N`, no part of a name is a number.
        let bad =
            names.iter().find(|name| name.split('.').filter(|part| unnamed(part)).count() > 1);
        assert_eq!(bad, None, "{config:?}");
    }
}

/// The names in older files, listed for a model with every weight that was renamed.
#[test]
fn files_with_earlier_names_are_read() {
    let config: ModelConfig = toml::from_str(
        r#"
        arch = "rwkv7"
        layers = 2
        width = 8
        heads = 2
        mlp_width = 12
        short_conv = true
        output_gate = true
        pattern = ["path", "tda"]
        "#,
    )
    .expect("a valid configuration");
    let earlier: HashMap<&str, &str> = [
        ("blocks.0.attention.q.conv", "blocks.0.attention.convs.0"),
        ("blocks.0.attention.k.conv", "blocks.0.attention.convs.1"),
        ("blocks.0.attention.v.conv", "blocks.0.attention.convs.2"),
        ("blocks.0.attention.q.shift", "blocks.0.attention.shifts.0"),
        ("blocks.0.attention.k.shift", "blocks.0.attention.shifts.1"),
        ("blocks.0.attention.v.shift", "blocks.0.attention.shifts.2"),
        ("blocks.0.attention.w.shift", "blocks.0.attention.shifts.3"),
        ("blocks.0.attention.beta.shift", "blocks.0.attention.shifts.4"),
        ("blocks.0.attention.output_gate.shift", "blocks.0.attention.shifts.5"),
        ("blocks.0.attention.w.inner.weight", "blocks.0.attention.projections.0.inner.weight"),
        ("blocks.0.attention.w.weight", "blocks.0.attention.projections.0.outer.weight"),
        ("blocks.0.attention.w.conv", "blocks.0.attention.projections.0.conv"),
        ("blocks.0.attention.beta.weight", "blocks.0.attention.projections.1.outer.weight"),
        ("blocks.0.attention.beta.bias", "blocks.0.attention.projections.1.outer.bias"),
        ("blocks.1.attention.q.conv", "blocks.1.attention.convs.0"),
        ("blocks.1.attention.k.conv", "blocks.1.attention.convs.1"),
        ("blocks.1.attention.v.conv", "blocks.1.attention.convs.2"),
        ("blocks.1.attention.q.shift", "blocks.1.attention.shifts.0"),
        ("blocks.1.attention.k.shift", "blocks.1.attention.shifts.1"),
        ("blocks.1.attention.v.shift", "blocks.1.attention.shifts.2"),
        ("blocks.1.attention.output_gate.shift", "blocks.1.attention.shifts.3"),
        ("blocks.1.attention.beta", "blocks.1.attention.parameters.0"),
        ("blocks.1.attention.lambda", "blocks.1.attention.parameters.1"),
        ("blocks.1.attention.norm", "blocks.1.attention.parameters.2"),
        ("blocks.1.attention.value_gate.weight", "blocks.1.attention.value_gate.outer.weight"),
        ("blocks.1.attention.value_gate.bias", "blocks.1.attention.value_gate.outer.bias"),
    ]
    .into();
    let original = named_tensors(&model(&config, 1));
    let mut renamed = 0;
    let rename = |(name, shape, data): &(String, _, _)| {
        let name = match earlier.get(name.as_str()) {
            Some(earlier) => {
                renamed += 1;
                (*earlier).to_owned()
            }
            None => name.clone(),
        };
        (name, Vec::clone(shape), Vec::clone(data))
    };
    let written = original.iter().map(rename).collect();
    assert_eq!(renamed, earlier.len());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    write_tensors(&path, &written).unwrap();
    assert_eq!(named_tensors(&load(model(&config, 2), &path).unwrap()), original);
}

#[test]
fn a_tensor_under_both_its_names_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let model = || model(&configs().nth(1).unwrap(), 1);
    let mut tensors = named_tensors(&model());
    let gate = tensors.iter().find(|(name, ..)| name.contains("forget_gate.bias")).unwrap().clone();
    let earlier = gate.0.replace("forget_gate.bias", "projections.0.outer.bias");
    tensors.push((earlier.clone(), gate.1, gate.2));
    write_tensors(&path, &tensors).unwrap();
    let error = load(model(), &path).unwrap_err().to_string();
    assert!(error.contains("the file has 1 tensors beside") && error.contains(&earlier), "{error}");
}

#[test]
fn a_missing_file_is_an_error_with_a_hint() {
    let error = load(model(&configs().next().unwrap(), 1), std::path::Path::new("no/such"));
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("cannot read the weights file no/such: "), "{error}");
    assert!(error.contains("\n  hint: check the path"), "{error}");
}

#[test]
fn shapes_are_known_without_a_model() {
    for config in configs_and_kinds() {
        let named = named_tensors(&model(&config, 0));
        let shapes: Vec<_> = named.into_iter().map(|(name, shape, _)| (name, shape)).collect();
        assert_eq!(parameter_shapes(&config, VOCAB, SEQ_LEN), shapes);
    }
    // 70 billion parameters.
    let table = "layers = 80\nwidth = 8192\nheads = 64\nattention = { kind = \"rope\" }";
    let shapes = parameter_shapes(&toml::from_str(table).unwrap(), 50_257, 4096);
    let elements: usize = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert!(elements > 60_000_000_000, "{elements}");
}

/// Each block of q, k and v has the channels of one head; the output's blocks have those of a head's values.
#[test]
fn projections_of_attention_are_blocks_of_heads() {
    let mut found = 0;
    for config in configs_and_kinds() {
        for (path, shape) in parameter_shapes(&config, VOCAB, SEQ_LEN) {
            let Some(HeadBlocks { dim, count }) = config.head_blocks(&path) else { continue };
            let layer = path.split('.').nth(1).unwrap().parse().unwrap();
            let (attention, heads) = (config.attention_of(layer), config.attention_shape(layer));
            let name = path.split('.').nth(3).unwrap();
            let channels = match name {
                "q" | "k" => heads.head_dim,
                _ => attention.value_dim(&heads),
            };
            assert_eq!(shape[dim], count * channels, "{path} of {attention:?}");
            assert_eq!(dim, usize::from(name == "output"), "{path}");
            found += 1;
        }
    }
    assert!(found > 100, "{found}");
    let config = configs().next().unwrap();
    for path in ["embedding", "blocks.0.mlp.up.weight", "blocks.9.attention.q.weight", "head"] {
        assert_eq!(config.head_blocks(path), None, "{path}");
    }
}

/// The root mean square of the weights whose names end like this.
fn rms(config: &ModelConfig, end: &str) -> f32 {
    let weights = named_tensors(&model(config, 0));
    let found = weights.into_iter().find(|(name, _, _)| name.ends_with(end)).unwrap().2;
    (found.iter().map(|w| w * w).sum::<f32>() / found.len() as f32).sqrt()
}

#[test]
fn the_initial_deviation_is_the_configured_one() {
    let of = |more: &str| -> ModelConfig {
        let sizes = "layers = 8\nwidth = 64\nheads = 2\nattention = { kind = \"rope\" }";
        toml::from_str(&format!("{sizes}\n{more}")).unwrap()
    };
    let near = |found: f32, expected: f32| {
        assert!((found / expected - 1.0).abs() < 0.05, "{found} instead of {expected}");
    };
    let (usual, large) = (of(""), of("init_std = 0.1"));
    near(rms(&usual, "mlp.up.weight"), 0.02);
    near(rms(&usual, "mlp.down.weight"), 0.02 / 4.0);
    near(rms(&large, "mlp.up.weight"), 0.1);
    near(rms(&large, "attention.output.weight"), 0.1 / 4.0);
    near(rms(&of("scale_residual_init = false"), "mlp.down.weight"), 0.02);
    near(rms(&large, "embedding"), 0.1 * (rms(&usual, "embedding") / 0.02));
}
