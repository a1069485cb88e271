//! What the tests of several modules share.

use std::path::Path;

use crate::config::RunConfig;

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
