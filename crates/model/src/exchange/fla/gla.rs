//! Gated linear attention (Yang et al., 2024): `GLAForCausalLM`.

use longwall_kernels::attention::AttentionConfig;
use longwall_kernels::attention::linear::{FeatureMap, Gate};
use serde_json::{Map, Value, json};

use super::{
    Attention, Check, convolutions, keys_of_linear, object, plain_rules, read_conv_size,
    read_expansion, read_flags, read_none,
};
use crate::ModelConfig;
use crate::exchange::TensorRule;
use crate::exchange::values::Reader;
use crate::layers::CONV_TAPS;

pub(in crate::exchange) struct GatedLinearAttention;

impl Attention for GatedLinearAttention {
    const MODEL_TYPE: &'static str = "gla";
    const CLASS: &'static str = "GLAForCausalLM";
    const KIND: &'static str = "linear";
    const HAS: &'static [&'static str] = &["short_conv"];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let mut keys = keys_of_linear(model, Gate::Diagonal, &[FeatureMap::Identity], check);
        keys.extend(object(json!({
            // The class has no name for the identity.
            "feature_map": null,
            "use_short_conv": model.short_conv,
            "conv_size": CONV_TAPS,
            "use_output_gate": false,
            "clamp_min": null,
        })));
        keys
    }

    fn table(&self, read: &mut Reader<'_>, width: usize) -> toml::Table {
        let mut table = read_expansion(read, width, [0.5, 1.0]);
        let off = |value: &Value| value == false;
        read.expect("use_output_gate", true.into(), "false", off);
        read_flags(read, &["elementwise_affine"], true);
        read_none(read, &["feature_map", "clamp_min"]);
        let short_conv = read.flag("use_short_conv", false);
        if short_conv {
            read_conv_size(read);
        }
        table.insert("short_conv".to_owned(), short_conv.into());
        let attention = toml::toml! { kind = "linear" gate = "diagonal" };
        table.insert("attention".to_owned(), attention.into());
        table
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let names = [
            ("gk_proj.0.weight", "gate.inner.weight"),
            ("gk_proj.1.weight", "gate.weight"),
            ("gk_proj.1.bias", "gate.bias"),
            ("g_norm.weight", "norm"),
        ];
        let mut rules: Vec<_> = plain_rules(&names).collect();
        if model.short_conv {
            let (attention, shape): (&AttentionConfig, _) =
                (model.attention_of(0), model.attention_shape(0));
            rules.extend(convolutions(attention, &shape));
        }
        rules
    }
}
