//! Small configurations that between them use every option.

use longwall_model::ModelConfig;

pub const VOCAB: usize = 11;
pub const SEQ_LEN: usize = 7;

const CONFIGS: &[&str] = &[
    r#"
    layers = 2
    width = 8
    heads = 2
    bias = true
    positions = "learned"
    attention = { kind = "rope", position = "none" }
    "#,
    r#"
    layers = 1
    width = 8
    heads = 4
    kv_heads = 2
    mlp = "swiglu"
    mlp_width = 12
    norm = "rms-norm"
    tie_embeddings = false
    qk_norm = true
    output_gate = true
    short_conv = true
    attention = { kind = "fox" }
    "#,
    r#"
    layers = 2
    width = 8
    heads = 2
    head_dim = 6
    mlp = "relu-squared"
    window = 3
    attention = { kind = "rope" }
    "#,
];

/// Each configuration, parsed.
pub fn configs() -> impl Iterator<Item = ModelConfig> {
    CONFIGS.iter().map(|text| {
        let config: ModelConfig = toml::from_str(text).expect("a valid configuration");
        let mut problems = longwall_config::Problems::new();
        config.validate(&mut problems);
        problems.into_result().expect("a valid configuration");
        config
    })
}
