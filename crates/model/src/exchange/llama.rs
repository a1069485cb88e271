//! Llama (Touvron et al., 2023): `LlamaForCausalLM`.

use longwall_config::Problems;
use longwall_kernels::attention::rope::Position;
use longwall_kernels::attention::rotation::Scaling;
use serde_json::{Value, json};

use super::values::{Reader, is_norm_eps};
use super::{
    ImportedModel, Layout, TensorRule, check_attention, check_plain, check_setting, rope_scaling,
    shown,
};
use crate::ModelConfig;
use crate::config::{MlpKind, NormKind, Positions};
use crate::start::ModelSpec;

pub(super) struct Llama;

impl Layout for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn kind(&self) -> &'static str {
        "rope"
    }

    fn config(&self, spec: &ModelSpec<'_>, problems: &mut Problems) -> Value {
        let ModelSpec { config: model, vocab_size, seq_len } = *spec;
        check_plain(model, "Llama", &[], problems);
        let allowed = "kind = \"rope\" with theta and scaling alone, the same in every layer, in the Llama layout";
        let attention = check_attention(model, Position::Rope, allowed, problems);
        let (theta, scaling) =
            attention.map_or((0.0, Scaling::None {}), |config| (config.theta, config.scaling));
        let mut is = |key: &str, ok: bool, value: String, allowed: &str| {
            check_setting(problems, ["Llama", "GPT-2"], key, ok, [&value, allowed]);
        };
        let none = model.positions == Positions::None;
        is("positions", none, shown(&model.positions), "none");
        is("mlp", model.mlp == MlpKind::Swiglu, shown(&model.mlp), "swiglu");
        is("norm", model.norm == NormKind::RmsNorm, shown(&model.norm), "rms-norm");
        let shape = model.attention_shape(0);
        let rope = rope_scaling::parameters(theta, scaling, shape.head_dim);
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type(),
            "vocab_size": vocab_size,
            "max_position_embeddings": seq_len,
            "hidden_size": model.width,
            "intermediate_size": model.mlp_hidden(),
            "num_hidden_layers": model.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": rope["rope_theta"],
            "rope_parameters": rope,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "attention_dropout": 0.0,
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tie_embeddings,
            "dtype": "float32",
        });
        // Versions of transformers before 5 read this key alone.
        if rope["rope_type"] != "default" {
            config["rope_scaling"] = rope;
        }
        config
    }

    fn model(&self, config: &Value, problems: &mut Problems) -> Option<ImportedModel> {
        let mut read = Reader::new(config, problems);
        let (width, heads) = (read.size("hidden_size"), read.size("num_attention_heads"));
        let (layers, mlp_width) = (read.size("num_hidden_layers"), read.size("intermediate_size"));
        let (vocab_rows, seq_len) = (read.size("vocab_size"), read.size("max_position_embeddings"));
        let kv_heads = read.optional_size("num_key_value_heads").unwrap_or(heads);
        let head_dim = read.optional_size("head_dim").unwrap_or(width / heads);
        let tied = read.flag("tie_word_embeddings", false);
        let bias = read.flag("attention_bias", false);
        let mlp_bias = read.flag("mlp_bias", false);
        let as_attention = "as attention_bias: all linear layers have biases, or none";
        read.refuse_unless(bias == mlp_bias, "mlp_bias", &mlp_bias.to_string(), as_attention);
        read.expect("hidden_act", "silu".into(), "silu", |value| value == "silu");
        // The default of transformers is 1e-6.
        read.expect("rms_norm_eps", json!(1e-6), "1e-5", is_norm_eps);
        let (theta, scaling) = rope_scaling::read(&mut read, seq_len);
        let mut table = toml::toml! { arch = "llama" };
        let sizes = [
            ("width", width),
            ("heads", heads),
            ("layers", layers),
            ("mlp_width", mlp_width),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ];
        table.insert("tie_embeddings".to_owned(), tied.into());
        table.insert("bias".to_owned(), bias.into());
        let mut attention = toml::toml! { kind = "rope" };
        attention.insert("theta".to_owned(), theta.into());
        if scaling != (Scaling::None {}) {
            let scaling = toml::Value::try_from(scaling).expect("a table of numbers");
            attention.insert("scaling".to_owned(), scaling);
        }
        table.insert("attention".to_owned(), attention.into());
        Some(ImportedModel::new(table, &sizes, [vocab_rows, seq_len]))
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let mut rules = vec![TensorRule::plain("model.embed_tokens.weight", "embedding")];
        let parts: &[&str] = if model.bias { &["weight", "bias"] } else { &["weight"] };
        let linears = [
            ("self_attn.q_proj", "attention.q"),
            ("self_attn.k_proj", "attention.k"),
            ("self_attn.v_proj", "attention.v"),
            ("self_attn.o_proj", "attention.output"),
            ("mlp.gate_proj", "mlp.gate"),
            ("mlp.up_proj", "mlp.up"),
            ("mlp.down_proj", "mlp.down"),
        ];
        let norms =
            [("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")];
        for layer in 0..model.layers {
            let mut rule = |theirs: &str, ours: &str, part: &str| {
                let name = format!("model.layers.{layer}.{theirs}.{part}");
                rules.push(TensorRule::plain(name, format!("blocks.{layer}.{ours}.{part}")));
            };
            norms.iter().for_each(|(theirs, ours)| rule(theirs, ours, "weight"));
            for (theirs, ours) in linears {
                parts.iter().for_each(|part| rule(theirs, ours, part));
            }
        }
        rules.push(TensorRule::plain("model.norm.weight", "norm.weight"));
        if !model.tie_embeddings {
            rules.push(TensorRule::plain("lm_head.weight", "head"));
        }
        rules
    }

    /// The rotary frequencies that older files store, and the tied output layer.
    fn is_ignored(&self, name: &str) -> bool {
        name.ends_with("rotary_emb.inv_freq") || name == "lm_head.weight"
    }
}
