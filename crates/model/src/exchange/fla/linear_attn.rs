//! Linear attention (Katharopoulos et al., 2020): `LinearAttentionForCausalLM`.

use longwall_kernels::attention::linear::{FeatureMap, Gate};
use serde_json::{Map, Value, json};

use super::{Attention, Check, keys_of_linear, object, read_expansion, read_flags};
use crate::ModelConfig;
use crate::exchange::TensorRule;
use crate::exchange::values::Reader;

pub(in crate::exchange) struct LinearAttention;

impl Attention for LinearAttention {
    const MODEL_TYPE: &'static str = "linear_attn";
    const CLASS: &'static str = "LinearAttentionForCausalLM";
    const KIND: &'static str = "linear";
    const HAS: &'static [&'static str] = &[];

    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value> {
        let maps = [FeatureMap::Identity, FeatureMap::Elu];
        let mut keys = keys_of_linear(model, Gate::None, &maps, check);
        keys.extend(object(json!({
            "tie_feature_map_qk": false,
            "norm_q": false,
            "norm_k": false,
            "norm_feature_map": false,
        })));
        keys
    }

    fn table(&self, read: &mut Reader<'_>, width: usize) -> toml::Table {
        let mut table = read_expansion(read, width, [1.0, 1.0]);
        let map = read.get("feature_map").and_then(Value::as_str).unwrap_or("elementwise_product");
        let known = ["identity", "elu"].contains(&map);
        read.refuse_unless(known, "feature_map", &format!("{map:?}"), "\"identity\", \"elu\"");
        read_flags(read, &["norm_q", "norm_k", "norm_feature_map"], false);
        read_flags(read, &["elementwise_affine"], true);
        let mut attention = toml::toml! { kind = "linear" gate = "none" };
        if map == "elu" {
            attention.insert("feature_map".to_owned(), map.into());
        }
        table.insert("attention".to_owned(), attention.into());
        table
    }

    fn tensors(&self, _model: &ModelConfig) -> Vec<TensorRule> {
        vec![TensorRule::plain("norm.weight", "norm")]
    }
}
