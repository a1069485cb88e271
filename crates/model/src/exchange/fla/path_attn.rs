//! PaTH (Yang et al., 2025): `PaTHAttentionForCausalLM`.

use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::attention::path::{Config, FullRank, Rank, WActivation};
use serde_json::{Map, Value, json};

use super::{Attention, Check, object, plain_rules, read_flags, read_heads};
use crate::ModelConfig;
use crate::exchange::values::Reader;
use crate::exchange::{TensorRule, shown};

/// Inner channels of the class's low-rank projection.
const RANK: usize = 32;

/// Sizes of a head that the class computes.
const HEAD_DIMS: [usize; 4] = [16, 32, 64, 128];

/// Taps of the class's convolution of w.
const TAPS: usize = 3;

pub(in crate::exchange) struct PathAttention;

impl Attention for PathAttention {
    const MODEL_TYPE: &'static str = "path_attn";
    const CLASS: &'static str = "PaTHAttentionForCausalLM";
    const KIND: &'static str = "path";
    const HAS: &'static [&'static str] = &[];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let AttentionConfig::Path(config) = model.attention_of(0) else { return Map::new() };
        // The class multiplies the gate's sums by the scale, too.
        check.attention("forget_gate", !config.forget_gate, config.forget_gate, "false");
        let silu = config.w_activation == WActivation::Silu;
        check.attention("w_activation", silu, shown(&config.w_activation), "\"silu\"");
        let rank = rank_of(config, model.width);
        let allowed = rank.is_none_or(|rank| rank == RANK);
        check.attention("rank", allowed, rank.unwrap_or(0), "32 or \"full\"");
        check.heads_fill_width(model);
        let shape = model.attention_shape(0);
        let computed = HEAD_DIMS.contains(&shape.head_dim);
        check.model("head_dim", computed, shape.head_dim, "16, 32, 64 or 128");
        object(json!({
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "use_forget_gate": false,
            "use_w_shortconv": true,
            "use_low_rank_w": rank.is_some(),
        }))
    }

    fn table(&self, read: &mut Reader<'_>, width: usize) -> toml::Table {
        let mut table = read_heads(read, width);
        read_flags(read, &["use_forget_gate"], false);
        read_flags(read, &["use_w_shortconv"], true);
        let mut attention = toml::toml! { kind = "path" w_activation = "silu" };
        let rank = match read.flag("use_low_rank_w", true) {
            true => toml::Value::Integer(RANK as i64),
            false => "full".into(),
        };
        attention.insert("rank".to_owned(), rank);
        table.insert("attention".to_owned(), attention.into());
        table
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let AttentionConfig::Path(config) = model.attention_of(0) else { return vec![] };
        let shape = model.attention_shape(0);
        let names = [("bt_proj.weight", "beta.weight"), ("bt_proj.bias", "beta.bias")];
        let w: &[_] = match rank_of(config, model.width) {
            Some(_) => &[("w_proj.0.weight", "w.inner.weight"), ("w_proj.1.weight", "w.weight")],
            None => &[("w_proj.weight", "w.weight")],
        };
        let taps = [shape.kv_heads * shape.head_dim, 1, TAPS];
        let conv = TensorRule::shaped("w_conv1d.weight", "w.conv", &taps);
        plain_rules(&names).chain(plain_rules(w)).chain([conv]).collect()
    }
}

/// Inner channels of the projection to w; none for one matrix.
fn rank_of(config: &Config, width: usize) -> Option<usize> {
    match config.rank {
        None => Some(width.min(RANK)),
        Some(Rank::Channels(channels)) => Some(channels),
        Some(Rank::Full(FullRank::Full)) => None,
    }
}
