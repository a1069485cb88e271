//! Small configurations that together use every option.

use longwall_kernels::attention::AttentionConfig;
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
    vocab_multiple = 8
    window = 3
    logit_softcap = 1.5
    attention = { kind = "rope" }
    "#,
    r#"
    arch = "llama"
    layers = 2
    width = 8
    heads = 2
    mlp_width = 12
    vocab_multiple = 16
    norm_position = "sandwich"
    value_residual = "learned"
    attention = { kind = "rope" }
    "#,
    r#"
    arch = "rwkv7"
    layers = 2
    width = 8
    heads = 4
    kv_heads = 2
    mlp_width = 12
    output_gate = true
    short_conv = true
    attention = { kind = "fox" }
    "#,
    r#"
    layers = 2
    width = 8
    heads = 2
    mlp_width = 12
    norm_position = "post"
    norm_bias = true
    attention = { kind = "rope" }
    "#,
    r#"
    layers = 3
    width = 8
    heads = 2
    mlp_width = 12
    window = 5
    output_gate = true
    value_residual = "learned"
    pattern = ["local", "fox"]
    kinds.local = { kind = "rope", window = 3 }
    kinds.fox = { kind = "fox", window = "none" }
    "#,
];

/// Hybrids of kinds that decode from caches and from states, some with their own windows.
const HYBRIDS: &[&str] = &[
    r#"
    layers = 5
    width = 16
    heads = 4
    kv_heads = 2
    mlp_width = 12
    qk_norm = true
    pattern = ["linear", "wall", "tda"]
    kinds.wall = { kind = "wall", window = 4, forget_gate = true }
    "#,
    r#"
    arch = "rwkv7"
    layers = 4
    width = 16
    heads = 4
    mlp_width = 12
    window = 3
    short_conv = true
    pattern = ["rwkv7", "rwkv7", "rwkv7", "rope"]
    kinds.rwkv7 = { kind = "rwkv7", window = "none" }
    "#,
    // Heads of k that serve two heads of v, values of other sizes, and convolutions in some layers only.
    r#"
    layers = 5
    width = 16
    heads = 4
    mlp_width = 12
    pattern = ["delta", "plain", "mamba2", "kda", "rope"]
    kinds.delta = { kind = "gated_delta_net", key_heads = 2, value_dim = 6 }
    kinds.plain = { kind = "gated_delta_net", output_gate = false, short_conv = false }
    kinds.mamba2 = { kind = "mamba2", key_heads = 2, value_dim = 3 }
    "#,
];

/// Blocks in which every registered attention kind is tested.
const BLOCKS: &[&str] = &[
    r#"
    layers = 2
    width = 16
    heads = 4
    kv_heads = 2
    mlp_width = 12
    qk_norm = true
    output_gate = true
    short_conv = true
    "#,
    r#"
    arch = "rwkv7"
    layers = 2
    width = 16
    heads = 4
    mlp_width = 12
    "#,
];

fn valid(config: ModelConfig) -> ModelConfig {
    let mut problems = longwall_config::Problems::new();
    config.validate(&mut problems);
    problems.into_result().expect("a valid configuration");
    config
}

/// Each configuration, parsed.
pub fn configs() -> impl Iterator<Item = ModelConfig> {
    CONFIGS.iter().map(|text| valid(toml::from_str(text).expect("a valid configuration")))
}

/// Each configuration, hybrids, and every registered attention kind in blocks of different
/// architectures.
pub fn configs_and_kinds() -> impl Iterator<Item = ModelConfig> {
    let kinds = AttentionConfig::defaults().into_iter().flat_map(|attention| {
        BLOCKS.iter().map(move |blocks| {
            let mut table: toml::Table = blocks.parse().expect("valid TOML");
            let attention = toml::Value::try_from(&attention).expect("a table");
            table.insert("attention".to_owned(), attention);
            valid(table.try_into().expect("a valid configuration"))
        })
    });
    let hybrids =
        HYBRIDS.iter().map(|text| valid(toml::from_str(text).expect("a valid configuration")));
    configs().chain(hybrids).chain(kinds)
}
