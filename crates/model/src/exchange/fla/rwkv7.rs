//! RWKV-7 (Peng et al., 2025): `RWKV7ForCausalLM`.

use longwall_config::Problems;
use serde_json::{Map, Value, json};

use super::{
    Check, MOST, TIED_HEAD, head, keys_of_model, object, plain_rules, read_shared, sizes, table_of,
};
use crate::ModelConfig;
use crate::config::{MlpKind, NormKind, ValueResidual};
use crate::exchange::values::Reader;
use crate::exchange::{ImportedModel, Layout, TensorRule, check_plain, shown};
use crate::start::ModelSpec;

pub(in crate::exchange) struct Rwkv7;

const MODEL_TYPE: &str = "rwkv7";

/// Keys of `[model]` beyond plain blocks that the class has.
const HAS: &[&str] = &["embedding_norm", "token_shift", "value_residual"];

impl Layout for Rwkv7 {
    fn model_type(&self) -> &'static str {
        MODEL_TYPE
    }

    fn kind(&self) -> &'static str {
        "rwkv7"
    }

    fn config(&self, spec: &ModelSpec<'_>, problems: &mut Problems) -> Value {
        let model = spec.config;
        check_plain(model, MODEL_TYPE, HAS, problems);
        let mut check = Check { layout: MODEL_TYPE, problems };
        check_blocks(model, &mut check);
        let mut config = keys_of_model(spec, MODEL_TYPE, "RWKV7ForCausalLM");
        if check.same_kind(model, "rwkv7") {
            config.extend(attention_keys(model));
        }
        Value::Object(config)
    }

    fn model(&self, config: &Value, problems: &mut Problems) -> Option<ImportedModel> {
        let mut read = Reader::new(config, problems);
        let (width, layers) = (read.size("hidden_size"), read.size("num_hidden_layers"));
        let (vocab_rows, seq_len) = sizes(&mut read);
        let ratio = read.optional_size("hidden_ratio").unwrap_or(4);
        let default_width = width.saturating_mul(ratio).min(MOST).next_multiple_of(32);
        let mlp_width = read.optional_size("intermediate_size").unwrap_or(default_width);
        let squared = |value: &Value| value == "sqrelu";
        read.expect("hidden_act", "sqrelu".into(), "\"sqrelu\"", squared);
        read_shared_of_rwkv7(&mut read, width);
        let heads = read_heads(&mut read, width);
        let mut rank = |key: &str, default| read.optional_size(key).unwrap_or(default);
        let ranks = [
            ("decay_rank", rank("decay_low_rank_dim", 64)),
            ("rate_rank", rank("a_low_rank_dim", 64)),
            ("gate_rank", rank("gate_low_rank_dim", 128)),
        ];
        let value_rank = rank("v_low_rank_dim", 16);
        let flags = [
            ("norm_bias", read.flag("norm_bias", true)),
            ("embedding_norm", read.flag("norm_first", true)),
            ("tie_embeddings", read.flag("tie_word_embeddings", false)),
        ];
        let mut attention = toml::toml! { kind = "rwkv7" };
        attention.extend(table_of(&ranks));
        let mut table = toml::toml! { arch = "rwkv7" };
        table.extend(flags.map(|(key, value)| (key.to_owned(), value.into())));
        table.insert("attention".to_owned(), attention.into());
        let sizes =
            [("width", width), ("layers", layers), ("mlp_width", mlp_width), ("heads", heads)];
        let imported = ImportedModel::new(table, &sizes, [vocab_rows, seq_len]);
        let expected = imported.model.value_residual_rank();
        let same = value_rank == expected;
        let allowed = format!("{expected}, the rank here for this hidden_size");
        read.refuse_unless(same, "v_low_rank_dim", &value_rank.to_string(), &allowed);
        Some(imported)
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let norm = |theirs: &str, ours: &str| {
            let parts: &[&str] = if model.norm_bias { &["weight", "bias"] } else { &["weight"] };
            let rule = |part: &&str| {
                TensorRule::plain(format!("{theirs}.{part}"), format!("{ours}.{part}"))
            };
            parts.iter().map(rule).collect::<Vec<_>>()
        };
        let mut rules = vec![TensorRule::plain("model.embeddings.weight", "embedding")];
        if model.embedding_norm {
            rules.extend(norm("model.layers.0.pre_norm", "embedding_norm"));
        }
        for layer in 0..model.layers {
            let (theirs, ours) = (format!("model.layers.{layer}"), format!("blocks.{layer}"));
            let mut block = norm("attn_norm", "attention_norm");
            block.extend(norm("ffn_norm", "mlp_norm"));
            let ffn = [
                ("ffn.x_k", "mlp.shift"),
                ("ffn.key.weight", "mlp.up.weight"),
                ("ffn.value.weight", "mlp.down.weight"),
            ];
            block.extend(plain_rules(&ffn));
            rules.extend(block.into_iter().map(|rule| rule.inside(&theirs, &ours)));
            rules.extend(
                time_mix(model, layer).into_iter().map(|rule| {
                    rule.inside(&format!("{theirs}.attn"), &format!("{ours}.attention"))
                }),
            );
        }
        rules.extend(norm("model.norm", "norm"));
        rules.extend(head(model));
        rules
    }

    fn is_ignored(&self, name: &str) -> bool {
        name == TIED_HEAD
    }
}

/// Records what the class's blocks do not have.
fn check_blocks(model: &ModelConfig, check: &mut Check<'_>) {
    check.shared(model);
    let layer_norm = model.norm == NormKind::LayerNorm;
    check.model("norm", layer_norm, shown(&model.norm), "\"layer-norm\"");
    let squared = model.mlp == MlpKind::ReluSquared;
    check.model("mlp", squared, shown(&model.mlp), "\"relu-squared\"");
    check.model("token_shift", model.token_shift, model.token_shift, "true");
    let gated = model.value_residual == ValueResidual::Gated;
    check.model("value_residual", gated, shown(&model.value_residual), "\"gated\"");
    // The class divides by layers - 1.
    check.model("layers", model.layers > 1, model.layers, "2 or more");
    let shape = model.attention_shape(0);
    let equal = shape.heads == shape.kv_heads;
    check.model("kv_heads", equal, shape.kv_heads, "as many as heads");
    check.heads_fill_width(model);
}

/// The keys of config.json that describe blocks and time mix.
fn attention_keys(model: &ModelConfig) -> Map<String, Value> {
    let shape = model.attention_shape(0);
    let attention = model.attention_of(0);
    let rank = |name: &str| {
        let spec = attention.projections(&shape).into_iter().find(|spec| spec.name == name);
        spec.and_then(|spec| spec.low_rank).map(|low_rank| low_rank.rank)
    };
    object(json!({
        "attn_mode": "chunk",
        "hidden_act": "sqrelu",
        "head_dim": shape.head_dim,
        "num_heads": shape.heads,
        "decay_low_rank_dim": rank("decay"),
        "a_low_rank_dim": rank("rate"),
        "gate_low_rank_dim": rank("gate"),
        "v_low_rank_dim": model.value_residual_rank(),
        "norm_first": model.embedding_norm,
        "norm_bias": model.norm_bias,
        // The fused norm of removal keys adds 1e-6 to the square of their length.
        "fuse_norm": false,
    }))
}

/// Records what does not exist here.
fn read_shared_of_rwkv7(read: &mut Reader<'_>, width: usize) {
    read_shared(read, 1e-5);
    let allowed = "false: fused, the length of a removal key has another epsilon";
    read.expect("fuse_norm", true.into(), allowed, |value| value == false);
    let is_width = |value: &Value| *value == width;
    let fills = |value: &Value| match value {
        Value::Array(widths) => widths.iter().all(is_width),
        value => is_width(value),
    };
    read.expect("value_dim", width.into(), "hidden_size in every layer", fills);
}

/// The number of heads, from the key that the class prefers.
fn read_heads(read: &mut Reader<'_>, width: usize) -> usize {
    let by_number = read.get("head_dim").is_none() && read.get("num_heads").is_some();
    let (key, size) = match by_number {
        true => ("num_heads", read.size("num_heads")),
        false => ("head_dim", read.optional_size("head_dim").unwrap_or(64)),
    };
    let allowed = format!("a divisor of hidden_size, {width}");
    read.refuse_unless(width.is_multiple_of(size), key, &size.to_string(), &allowed);
    if by_number { size } else { width / size }
}

/// The tensors of a layer's time mix, with names inside its `attn` and our `attention`.
fn time_mix(model: &ModelConfig, layer: usize) -> Vec<TensorRule> {
    let shape = model.attention_shape(layer);
    let names = [
        ("r_proj.weight", "q.weight"),
        ("k_proj.weight", "k.weight"),
        ("v_proj.weight", "v.weight"),
        ("o_proj.weight", "output.weight"),
        ("w_lora.lora.0.weight", "decay.inner.weight"),
        ("w_lora.lora.2.weight", "decay.weight"),
        ("w_lora.lora.2.bias", "decay.bias"),
        ("a_lora.lora.0.weight", "rate.inner.weight"),
        ("a_lora.lora.2.weight", "rate.weight"),
        ("a_lora.lora.2.bias", "rate.bias"),
        ("g_lora.lora.0.weight", "gate.inner.weight"),
        ("g_lora.lora.2.weight", "gate.weight"),
        ("k_k", "removal_scale"),
        ("k_a", "replacement"),
        ("g_norm.weight", "norm_scale"),
        ("g_norm.bias", "norm_bias"),
    ];
    // The first layer supplies the values that later ones mix in.
    let value_gate: &[_] = match layer {
        0 => &[],
        _ => &[
            ("v_lora.lora.0.weight", "value_gate.inner.weight"),
            ("v_lora.lora.2.weight", "value_gate.weight"),
            ("v_lora.lora.2.bias", "value_gate.bias"),
        ],
    };
    let shifts = [("r", "q"), ("w", "decay"), ("k", "k"), ("v", "v"), ("a", "rate"), ("g", "gate")];
    let shift = |(theirs, ours)| {
        let ours = format!("{ours}.shift");
        TensorRule::shaped(format!("x_{theirs}"), ours, &[1, 1, model.width])
    };
    let bonus = TensorRule::shaped("r_k", "bonus", &[shape.heads, shape.head_dim]);
    plain_rules(&names)
        .chain(plain_rules(value_gate))
        .chain(shifts.map(shift))
        .chain([bonus])
        .collect()
}
