//! FoX (Lin et al., 2025): `ForgettingTransformerForCausalLM`.

use longwall_kernels::attention::AttentionConfig;
use serde_json::{Map, Value, json};

use super::{Attention, Check, object, plain_rules, read_flags, read_heads, read_none};
use crate::ModelConfig;
use crate::exchange::TensorRule;
use crate::exchange::values::Reader;

pub(in crate::exchange) struct ForgettingTransformer;

impl Attention for ForgettingTransformer {
    const MODEL_TYPE: &'static str = "forgetting_transformer";
    const CLASS: &'static str = "ForgettingTransformerForCausalLM";
    const KIND: &'static str = "fox";
    const HAS: &'static [&'static str] = &["qk_norm", "output_gate"];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let AttentionConfig::Fox(fox) = model.attention_of(0) else { return Map::new() };
        check.attention("rope", !fox.rope, fox.rope, "false");
        check.attention("sinks", !fox.sinks, fox.sinks, "false");
        check.heads_fill_width(model);
        let shape = model.attention_shape(0);
        object(json!({
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "qkv_bias": false,
            "qk_norm": model.qk_norm,
            "use_output_gate": model.output_gate,
            "window_size": null,
        }))
    }

    fn table(&self, read: &mut Reader<'_>, width: usize) -> toml::Table {
        let mut table = read_heads(read, width);
        read_flags(read, &["qkv_bias"], false);
        // The class applies a window when it decodes from its cache, and only then.
        read_none(read, &["window_size"]);
        table.insert("qk_norm".to_owned(), read.flag("qk_norm", false).into());
        table.insert("output_gate".to_owned(), read.flag("use_output_gate", false).into());
        table.insert("attention".to_owned(), toml::toml! { kind = "fox" }.into());
        table
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let shape = model.attention_shape(0);
        let names = [("f_proj.weight", "forget_gate.weight"), ("f_proj.bias", "forget_gate.bias")];
        let mut rules: Vec<_> = plain_rules(&names).collect();
        if model.output_gate {
            rules.push(TensorRule::plain("g_proj.weight", "output_gate.weight"));
        }
        if model.qk_norm {
            // One scale per channel of each head there, one per channel of all heads here.
            let norms = [("q_norm.weight", shape.heads), ("k_norm.weight", shape.kv_heads)];
            rules.extend(norms.map(|(name, heads)| TensorRule::repeated(name, name, heads)));
        }
        rules
    }
}
