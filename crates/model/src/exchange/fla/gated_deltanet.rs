//! Gated DeltaNet (Yang et al., 2025): `GatedDeltaNetForCausalLM`.

use longwall_kernels::attention::AttentionConfig;
use serde_json::{Map, Value};

use super::delta_rule::{Heads, keys};
use super::{Attention, Check, convolutions, plain_rules, table_of};
use crate::ModelConfig;
use crate::exchange::TensorRule;
use crate::exchange::values::Reader;

pub(in crate::exchange) struct GatedDeltaNet;

impl Attention for GatedDeltaNet {
    const MODEL_TYPE: &'static str = "gated_deltanet";
    const CLASS: &'static str = "GatedDeltaNetForCausalLM";
    const KIND: &'static str = "gated_delta_net";
    // It gives these layers the convolution that they have anyway.
    const HAS: &'static [&'static str] = &["short_conv"];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let AttentionConfig::GatedDeltaNet(config) = model.attention_of(0) else {
            return Map::new();
        };
        let mut keys = keys(model, config.short_conv, check);
        keys.insert("use_gate".into(), config.output_gate.into());
        keys.insert("output_gate_activation".into(), "swish".into());
        keys.insert("allow_neg_eigval".into(), config.negative_eigenvalues.into());
        keys
    }

    fn table(&self, read: &mut Reader<'_>, _width: usize) -> toml::Table {
        let heads = Heads::read(read, (256, 2.0));
        let swish = |value: &Value| value == "swish" || value == "silu";
        read.expect("output_gate_activation", "swish".into(), "\"swish\"", swish);
        let mut attention = toml::toml! { kind = "gated_delta_net" };
        let sizes = [("value_dim", heads.value_dim), ("key_heads", heads.keys)];
        attention.extend(table_of(&sizes));
        let flags = [
            ("output_gate", read.flag("use_gate", true)),
            ("negative_eigenvalues", read.flag("allow_neg_eigval", false)),
        ];
        attention.extend(flags.map(|(key, value)| (key.to_owned(), value.into())));
        heads.with(attention)
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let attention = model.attention_of(0);
        let AttentionConfig::GatedDeltaNet(config) = attention else { return vec![] };
        let names = [
            ("a_proj.weight", "decay.weight"),
            ("b_proj.weight", "beta.weight"),
            ("A_log", "decay_rate"),
            ("dt_bias", "decay_bias"),
            ("o_norm.weight", "norm"),
        ];
        let mut rules: Vec<_> = plain_rules(&names).collect();
        if config.output_gate {
            rules.push(TensorRule::plain("g_proj.weight", "gate.weight"));
        }
        rules.extend(convolutions(attention, &model.attention_shape(0)));
        rules
    }
}
