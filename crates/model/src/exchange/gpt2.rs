//! GPT-2 (Radford et al., 2019): `GPT2LMHeadModel`.

use longwall_config::Problems;
use longwall_kernels::attention::rope::Position;
use serde_json::{Value, json};

use super::values::{Reader, is_norm_eps};
use super::{
    Form, ImportedModel, Layout, TensorRule, check_attention, check_plain, check_setting, shown,
};
use crate::config::{MlpKind, NormKind, Positions};
use crate::start::ModelSpec;
use crate::{ModelConfig, layers};

pub(super) struct Gpt2;

impl Layout for Gpt2 {
    fn model_type(&self) -> &'static str {
        "gpt2"
    }

    fn kind(&self) -> &'static str {
        "rope"
    }

    fn config(&self, spec: &ModelSpec<'_>, problems: &mut Problems) -> Value {
        let ModelSpec { config: model, vocab_size, seq_len } = *spec;
        check_plain(model, "GPT-2", &[], problems);
        let allowed =
            "kind = \"rope\" with position = \"none\" alone, in every layer, in the GPT-2 layout";
        check_attention(model, Position::None, allowed, problems);
        let shape = model.attention_shape(0);
        let mut is = |key: &str, ok: bool, value: String, allowed: &str| {
            check_setting(problems, ["GPT-2", "Llama"], key, ok, [&value, allowed]);
        };
        let learned = model.positions == Positions::Learned;
        is("positions", learned, shown(&model.positions), "learned");
        is("mlp", model.mlp == MlpKind::Gelu, shown(&model.mlp), "gelu");
        let layer_norm = model.norm == NormKind::LayerNorm;
        is("norm", layer_norm, shown(&model.norm), "layer-norm");
        is(
            "kv_heads",
            shape.kv_heads == shape.heads,
            shape.kv_heads.to_string(),
            "as many as heads",
        );
        let fills = shape.heads * shape.head_dim == model.width;
        is("head_dim", fills, shape.head_dim.to_string(), "width / heads");
        json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type(),
            "vocab_size": vocab_size,
            "n_positions": seq_len,
            "n_embd": model.width,
            "n_layer": model.layers,
            "n_head": shape.heads,
            "n_inner": model.mlp_hidden(),
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tie_embeddings,
            "dtype": "float32",
        })
    }

    fn model(&self, config: &Value, problems: &mut Problems) -> Option<ImportedModel> {
        let mut read = Reader::new(config, problems);
        let (width, heads, layers) =
            (read.size("n_embd"), read.size("n_head"), read.size("n_layer"));
        let (vocab_rows, seq_len) = (read.size("vocab_size"), read.size("n_positions"));
        let mlp_width = read.optional_size("n_inner").unwrap_or(4 * width);
        let tied = read.flag("tie_word_embeddings", true);
        let gelu = |value: &Value| value == "gelu_new" || value == "gelu_pytorch_tanh";
        read.expect("activation_function", "gelu_new".into(), "gelu_new, the tanh form", gelu);
        read.expect("layer_norm_epsilon", json!(1e-5), "1e-5", is_norm_eps);
        read.expect("scale_attn_weights", true.into(), "true", |value| value == true);
        for key in ["scale_attn_by_inverse_layer_idx", "add_cross_attention"] {
            read.expect(key, false.into(), "false", |value| value == false);
        }
        let mut table = toml::toml! {
            arch = "gpt2"
            bias = true
            positions = "learned"
        };
        let sizes =
            [("width", width), ("heads", heads), ("layers", layers), ("mlp_width", mlp_width)];
        table.insert("tie_embeddings".to_owned(), tied.into());
        let attention = toml::toml! { kind = "rope" position = "none" };
        table.insert("attention".to_owned(), attention.into());
        Some(ImportedModel::new(table, &sizes, [vocab_rows, seq_len]))
    }

    /// Linear layers are stored `[inputs, outputs]`, and q, k and v as one.
    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let plain = |name: String, ours: String| TensorRule::plain(name, ours);
        let mut rules = vec![
            plain("transformer.wte.weight".into(), "embedding".into()),
            plain("transformer.wpe.weight".into(), "positions".into()),
        ];
        for layer in 0..model.layers {
            let (h, block) = (format!("transformer.h.{layer}"), format!("blocks.{layer}"));
            for part in ["weight", "bias"] {
                let mut norm = |theirs: &str, ours: &str| {
                    let name = format!("{h}.{theirs}.{part}");
                    rules.push(plain(name, format!("{block}.{ours}.{part}")));
                };
                norm("ln_1", "attention_norm");
                norm("ln_2", "mlp_norm");
                let mut linear = |theirs: &str, ours: &[&str]| {
                    let name = format!("{h}.{theirs}.{part}");
                    let ours = ours.iter().map(|ours| format!("{block}.{ours}.{part}")).collect();
                    rules.push(TensorRule { name, ours, form: Form::Transposed });
                };
                linear("attn.c_attn", &["attention.q", "attention.k", "attention.v"]);
                linear("attn.c_proj", &["attention.output"]);
                linear("mlp.c_fc", &["mlp.up"]);
                linear("mlp.c_proj", &["mlp.down"]);
            }
        }
        for part in ["weight", "bias"] {
            rules.push(plain(format!("transformer.ln_f.{part}"), format!("norm.{part}")));
        }
        if !model.tie_embeddings {
            rules.push(plain("lm_head.weight".into(), "head".into()));
        }
        rules
    }

    /// The files of the released models leave the prefix out.
    fn full_name(&self, name: &str) -> String {
        let parts = ["wte.", "wpe.", "h.", "ln_f."];
        match parts.iter().any(|part| name.starts_with(part)) {
            true => format!("transformer.{name}"),
            false => name.to_owned(),
        }
    }

    /// Causal masks that older files store, and the tied output layer.
    fn is_ignored(&self, name: &str) -> bool {
        let is_mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
        is_mask || name == "lm_head.weight"
    }
}

const _: () = assert!(layers::NORM_EPS == 1e-5);
