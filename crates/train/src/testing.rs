//! Helpers shared by the tests of several modules.

use std::ops::Range;
use std::path::Path;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
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
