//! Kimi delta attention (Kimi Team, 2025): `KDAForCausalLM`.

use longwall_kernels::attention::AttentionConfig;
use serde_json::{Map, Value};

use super::delta_rule::{Heads, keys};
use super::{Attention, Check, convolutions, plain_rules, read_flags, read_none, table_of};
use crate::ModelConfig;
use crate::exchange::TensorRule;
use crate::exchange::values::Reader;

pub(in crate::exchange) struct Kda;

impl Attention for Kda {
    const MODEL_TYPE: &'static str = "kda";
    const CLASS: &'static str = "KDAForCausalLM";
    const KIND: &'static str = "kda";
    // It gives these layers the convolution that they have anyway.
    const HAS: &'static [&'static str] = &["short_conv"];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let attention = model.attention_of(0);
        let AttentionConfig::Kda(config) = attention else { return Map::new() };
        let value_dim = attention.value_dim(&model.attention_shape(0));
        let rank = config.rank.unwrap_or(value_dim.min(model.width));
        let allowed = format!("{value_dim}, the channels of a head's values,");
        check.attention("rank", rank == value_dim, rank, &allowed);
        let mut keys = keys(model, config.short_conv, check);
        keys.insert("allow_neg_eigval".into(), config.negative_eigenvalues.into());
        keys.insert("safe_gate".into(), false.into());
        keys.insert("lower_bound".into(), Value::Null);
        keys
    }

    fn table(&self, read: &mut Reader<'_>, _width: usize) -> toml::Table {
        let heads = Heads::read(read, (128, 1.0));
        let equal = heads.keys == heads.values;
        let allowed = format!("as num_heads, {}", heads.keys);
        read.refuse_unless(equal, "num_v_heads", &heads.values.to_string(), &allowed);
        read_flags(read, &["safe_gate"], false);
        read_none(read, &["lower_bound"]);
        let mut attention = toml::toml! { kind = "kda" };
        let sizes = [("value_dim", heads.value_dim), ("rank", heads.value_dim)];
        attention.extend(table_of(&sizes));
        let negative = read.flag("allow_neg_eigval", false);
        attention.insert("negative_eigenvalues".to_owned(), negative.into());
        heads.with(attention)
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let names = [
            ("f_proj.0.weight", "decay.inner.weight"),
            ("f_proj.1.weight", "decay.weight"),
            ("b_proj.weight", "beta.weight"),
            ("g_proj.0.weight", "gate.inner.weight"),
            ("g_proj.1.weight", "gate.weight"),
            ("g_proj.1.bias", "gate.bias"),
            ("A_log", "decay_rate"),
            ("dt_bias", "decay_bias"),
            ("o_norm.weight", "norm"),
        ];
        let convolutions = convolutions(model.attention_of(0), &model.attention_shape(0));
        plain_rules(&names).chain(convolutions).collect()
    }
}
