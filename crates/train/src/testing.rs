//! Helpers shared by the tests of several modules.

use std::ops::Range;
use std::path::Path;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use longwall_config::Problems;
use longwall_kernels::attention::AttentionConfig;
use longwall_model::{LanguageModel, ModelConfig};

use crate::config::RunConfig;
use crate::timeline::{Stage, Timeline};

/// The backend that tests run on.
pub(crate) type TestBackend = longwall_kernels::Cpu;
/// The model that tests train.
pub(crate) type TestModel = LanguageModel<Autodiff<TestBackend>>;

/// A small, valid run configuration.
pub(crate) const CONFIG: &str = r#"
[run]
seed = 3

[data]
seq_len = 512

[[data.sources]]
kind = "cargo-sources"
max_bytes = "8M"

[tokenizer]
kind = "bytes"

[model]
layers = 2
width = 64
heads = 4
attention = { kind = "rope" }

[train]
tokens = "1M"
batch_tokens = 4096
lr = 1e-3
"#;

/// [`CONFIG`] with overrides.
pub(crate) fn config(sets: &[&str]) -> RunConfig {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    RunConfig::parse(CONFIG, Path::new("configs/small.toml"), &sets).unwrap()
}

/// A run of one stage.
pub(crate) fn timeline(batch_tokens: u64, tokens: u64) -> Timeline {
    let base = Stage { batch_tokens, seq_len: 1, ..Stage::default() };
    Timeline::new(base, &[], tokens).0
}

/// A model with one layer of width 16 and 23 tokens.
pub(crate) fn tiny_model(seed: u64) -> TestModel {
    model_with("layers = 1", seed)
}

/// A model of width 16 and 23 tokens, with further `keys`.
pub(crate) fn model_with(keys: &str, seed: u64) -> TestModel {
    LanguageModel::new(&model_config(keys), 23, 16, seed, &Default::default())
}

/// A model with one layer of width 16.
pub(crate) fn model_of_vocabulary(vocab_size: usize) -> TestModel {
    LanguageModel::new(&model_config("layers = 1"), vocab_size, 16, 0, &Default::default())
}

/// A model of 23 tokens.
pub(crate) fn model_of(config: &ModelConfig) -> TestModel {
    LanguageModel::new(config, 23, 16, 0, &Default::default())
}

/// The configuration of [`model_with`].
pub(crate) fn model_config(keys: &str) -> ModelConfig {
    let table = format!("{keys}\nwidth = 16\nheads = 2\nattention = {{ kind = \"rope\" }}");
    toml::from_str(&table).unwrap()
}

/// Some rows of a fixed batch of 4 rows of 16 tokens: inputs and targets.
pub(crate) fn tiny_batch(rows: Range<usize>) -> [Tensor<Autodiff<TestBackend>, 2, Int>; 2] {
    [0, 1].map(|shift| {
        let token = |row: usize, at: usize| ((row * 7 + (at + shift) * (at + shift)) % 23) as i32;
        let data = rows.clone().flat_map(|row| (0..16).map(move |at| token(row, at)));
        let data = TensorData::new(data.collect::<Vec<i32>>(), [rows.len(), 16]);
        Tensor::from_data(data, &Default::default())
    })
}

/// Block configurations that together use every option; `[attention]` is added later.
const BLOCKS: [&str; 6] = [
    "arch = \"gpt2\"\nbias = true\npositions = \"learned\"\nembedding_norm = true",
    "arch = \"llama\"\nqk_norm = true\noutput_gate = true\nshort_conv = true\nkv_heads = 2",
    "arch = \"llama\"\nnorm_position = \"sandwich\"\nvalue_residual = \"learned\"",
    "arch = \"llama\"\nnorm_position = \"post\"\ntoken_shift = true\ntie_embeddings = true",
    "arch = \"rwkv7\"\nlogit_softcap = 5.0",
    "arch = \"rwkv7\"\nshort_conv = true\noutput_gate = true\nvalue_residual = \"learned\"",
];

/// Models whose layers differ in kind, with and without a value residual.
fn hybrids() -> impl Iterator<Item = ModelConfig> {
    let residuals = ["none", "learned", "gated"];
    let patterns = [["rwkv7", "rope", "wall", "fox"], ["rope", "power", "rope", "rwkv7"]];
    let tables = patterns.into_iter().flat_map(move |pattern| {
        residuals.map(|residual| {
            format!(
                "layers = 4\nwidth = 32\nheads = 4\nvalue_residual = {residual:?}\n\
                 pattern = {pattern:?}"
            )
        })
    });
    tables.map(|table| {
        let config: ModelConfig = toml::from_str(&table).unwrap();
        let mut problems = Problems::new();
        config.validate(&mut problems);
        assert!(problems.as_slice().is_empty(), "{table}: {:?}", problems.as_slice());
        config
    })
}

/// Every attention kind in all blocks that allow it, and models whose layers differ; the last blocks have a window if
/// the kind allows one.
pub(crate) fn models_of_all_layers() -> Vec<ModelConfig> {
    let mut configs = Vec::new();
    for (at, blocks) in BLOCKS.iter().enumerate() {
        for attention in AttentionConfig::defaults() {
            // Four layers: the values of the first reach three others.
            let table = format!("{blocks}\nlayers = 4\nwidth = 32\nheads = 4");
            let mut table: toml::Table = table.parse().unwrap();
            let attention = toml::Value::try_from(&attention).unwrap();
            table.insert("attention".to_owned(), attention);
            if at == 5 {
                table.insert("window".to_owned(), 5.into());
            }
            let config: ModelConfig = table.try_into().unwrap();
            let mut problems = Problems::new();
            config.validate(&mut problems);
            if problems.as_slice().is_empty() {
                configs.push(config);
            }
        }
    }
    assert!(configs.len() > 60, "{} configurations are left", configs.len());
    configs.extend(hybrids());
    configs
}
