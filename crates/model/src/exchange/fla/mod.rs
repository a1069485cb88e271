//! Models of flash-linear-attention (`fla.models` of version 0.6).
//!
//! Most have the same blocks, [`Blocks`]: RMS norm, attention, RMS norm, SwiGLU, without biases. Such a model is one file
//! here, an [`Attention`], and a line in the registry of layouts.

mod delta_rule;
mod forgetting_transformer;
mod gated_deltanet;
mod gla;
mod kda;
mod linear_attn;
mod path_attn;
mod rwkv7;

use std::fmt::Display;

use longwall_config::Problems;
use longwall_kernels::attention::linear::{FeatureMap, Gate};
use longwall_kernels::attention::{AttentionConfig, AttentionShape};
use serde_json::{Map, Value, json};

pub(super) use self::forgetting_transformer::ForgettingTransformer;
pub(super) use self::gated_deltanet::GatedDeltaNet;
pub(super) use self::gla::GatedLinearAttention;
pub(super) use self::kda::Kda;
pub(super) use self::linear_attn::LinearAttention;
pub(super) use self::path_attn::PathAttention;
pub(super) use self::rwkv7::Rwkv7;
use super::values::{Reader, is_norm_eps};
use super::{ImportedModel, Layout, TensorRule, check_plain, shown};
use crate::ModelConfig;
use crate::config::{MlpKind, NormKind, Positions};
use crate::cost::channels;
use crate::layers::CONV_TAPS;
use crate::start::ModelSpec;

/// The attention layer of a model class.
pub(super) trait Attention: Sync {
    /// The class's `model_type`.
    const MODEL_TYPE: &'static str;

    /// The class.
    const CLASS: &'static str;

    /// The attention kind.
    const KIND: &'static str;

    /// Keys of `[model]` beyond plain blocks that the class has (see [`check_plain`]).
    const HAS: &'static [&'static str];

    /// The keys of config.json that describe attention; records what the class does not have.
    ///
    /// Called for models whose layers all have the kind, with the same settings.
    fn keys(&self, model: &ModelConfig, check: &mut Check<'_>) -> Map<String, Value>;

    /// The keys of `[model]` that describe attention; records what does not exist here.
    ///
    /// - `width`: `hidden_size`
    fn table(&self, read: &mut Reader<'_>, width: usize) -> toml::Table;

    /// The tensors of a layer beside the [`PROJECTIONS`], with names inside its `attn` and our `attention`.
    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule>;
}

/// A model of blocks with this attention.
pub(super) struct Blocks<A>(pub A);

impl<A: Attention> Layout for Blocks<A> {
    fn model_type(&self) -> &'static str {
        A::MODEL_TYPE
    }

    fn kind(&self) -> &'static str {
        A::KIND
    }

    fn config(&self, spec: &ModelSpec<'_>, problems: &mut Problems) -> Value {
        let model = spec.config;
        check_plain(model, A::MODEL_TYPE, A::HAS, problems);
        let mut check = Check { layout: A::MODEL_TYPE, problems };
        let (rms, swiglu) = (model.norm == NormKind::RmsNorm, model.mlp == MlpKind::Swiglu);
        check.model("norm", rms, shown(&model.norm), "\"rms-norm\"");
        check.model("mlp", swiglu, shown(&model.mlp), "\"swiglu\"");
        check.shared(model);
        let mut config = keys_of_model(spec, A::MODEL_TYPE, A::CLASS);
        config.insert("hidden_act".into(), "swish".into());
        if check.same_kind(model, A::KIND) {
            config.extend(self.0.keys(model, &mut check));
        }
        Value::Object(config)
    }

    fn model(&self, config: &Value, problems: &mut Problems) -> Option<ImportedModel> {
        let mut read = Reader::new(config, problems);
        let (width, layers) = (read.size("hidden_size"), read.size("num_hidden_layers"));
        let (vocab_rows, seq_len) = sizes(&mut read);
        let ratio = read.optional_size("hidden_ratio").unwrap_or(4);
        let default_width = (width.saturating_mul(ratio).min(MOST) * 2 / 3).next_multiple_of(256);
        let mlp_width = read.optional_size("intermediate_size").unwrap_or(default_width);
        let swish = |value: &Value| value == "swish";
        read.expect("hidden_act", "swish".into(), "\"swish\"", swish);
        read_shared(&mut read, 1e-6);
        read_none(&mut read, &["attnres_block_size"]);
        let mut table = toml::toml! { arch = "llama" };
        let tied = read.flag("tie_word_embeddings", false);
        table.insert("tie_embeddings".to_owned(), tied.into());
        table.extend(self.0.table(&mut read, width));
        let sizes = [("width", width), ("layers", layers), ("mlp_width", mlp_width)];
        Some(ImportedModel::new(table, &sizes, [vocab_rows, seq_len]))
    }

    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule> {
        let mut rules = vec![TensorRule::plain("model.embeddings.weight", "embedding")];
        let plain = [
            ("attn_norm.weight", "attention_norm.weight"),
            ("mlp_norm.weight", "mlp_norm.weight"),
            ("mlp.gate_proj.weight", "mlp.gate.weight"),
            ("mlp.up_proj.weight", "mlp.up.weight"),
            ("mlp.down_proj.weight", "mlp.down.weight"),
        ];
        for layer in 0..model.layers {
            let (theirs, ours) = (format!("model.layers.{layer}"), format!("blocks.{layer}"));
            let attention = plain_rules(&PROJECTIONS).chain(self.0.tensors(model));
            rules.extend(plain_rules(&plain).map(|rule| rule.inside(&theirs, &ours)));
            rules.extend(
                attention.map(|rule| {
                    rule.inside(&format!("{theirs}.attn"), &format!("{ours}.attention"))
                }),
            );
        }
        rules.push(TensorRule::plain("model.norm.weight", "norm.weight"));
        rules.extend(head(model));
        rules
    }

    fn is_ignored(&self, name: &str) -> bool {
        name == TIED_HEAD
    }
}

/// The matrices of q, k, v and the output, which all attention layers of [`Blocks`] have.
const PROJECTIONS: [(&str, &str); 4] = [
    ("q_proj.weight", "q.weight"),
    ("k_proj.weight", "k.weight"),
    ("v_proj.weight", "v.weight"),
    ("o_proj.weight", "output.weight"),
];

/// The output layer's weight, which files may also have when it is tied to the embedding.
const TIED_HEAD: &str = "lm_head.weight";

/// The output layer, unless it is tied to the embedding.
fn head(model: &ModelConfig) -> Option<TensorRule> {
    (!model.tie_embeddings).then(|| TensorRule::plain(TIED_HEAD, "head"))
}

/// Tensors that are stored as they are: their names, and ours.
fn plain_rules<'a>(names: &'a [(&str, &str)]) -> impl Iterator<Item = TensorRule> + 'a {
    names.iter().map(|&(theirs, ours)| TensorRule::plain(theirs, ours))
}

/// The keys of config.json that describe no attention.
fn keys_of_model(spec: &ModelSpec<'_>, model_type: &str, class: &str) -> Map<String, Value> {
    let ModelSpec { config: model, vocab_size, seq_len } = *spec;
    object(json!({
        "architectures": [class],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_hidden(),
        "num_hidden_layers": model.layers,
        "norm_eps": 1e-5,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": "float32",
    }))
}

/// The keys of an object.
fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(keys) => keys,
        other => unreachable!("{other} is no object"),
    }
}

/// More than any size may be: products of sizes stop here, and are refused with the configuration.
const MOST: usize = 1 << 40;

/// The product of a size and a number, rounded by `round`.
fn product(size: usize, number: f64, round: fn(f64) -> f64) -> usize {
    (round(size as f64 * number) as usize).min(MOST)
}

/// The length that classes assume whose config.json does not say what theirs was made for.
const DEFAULT_LEN: usize = 2048;

/// Rows of the embedding, and the longest sequence.
fn sizes(read: &mut Reader<'_>) -> (usize, usize) {
    let rows = read.size("vocab_size");
    (rows, read.optional_size("max_position_embeddings").unwrap_or(DEFAULT_LEN))
}

/// Records what no class may have: another ε of the norms, and layers of softmax attention among its own.
///
/// - `default_eps`: the class's default
fn read_shared(read: &mut Reader<'_>, default_eps: f64) {
    read.expect("norm_eps", json!(default_eps), "1e-5", is_norm_eps);
    read_none(read, &["attn"]);
}

/// Records keys that must not be set.
fn read_none(read: &mut Reader<'_>, keys: &[&str]) {
    for key in keys {
        read.expect(key, Value::Null, "null", Value::is_null);
    }
}

/// Records flags that are not `wanted`, which is also the classes' default.
fn read_flags(read: &mut Reader<'_>, keys: &[&str], wanted: bool) {
    for key in keys {
        read.expect(key, wanted.into(), &wanted.to_string(), |value| *value == wanted);
    }
}

/// Records short convolutions of another length.
fn read_conv_size(read: &mut Reader<'_>) {
    let taps = |value: &Value| value == CONV_TAPS;
    read.expect("conv_size", CONV_TAPS.into(), &CONV_TAPS.to_string(), taps);
}

/// `heads` and `kv_heads`, of heads that fill the width.
fn read_heads(read: &mut Reader<'_>, width: usize) -> toml::Table {
    let heads = read.size("num_heads");
    let kv_heads = read.optional_size("num_kv_heads").unwrap_or(heads);
    let divides = width.is_multiple_of(heads);
    let allowed = format!("a divisor of hidden_size, {width}");
    read.refuse_unless(divides, "num_heads", &heads.to_string(), &allowed);
    table_of(&[("heads", heads), ("kv_heads", kv_heads)])
}

/// Heads whose keys and values have `expand_k` and `expand_v` times the width in all, which must be equal.
///
/// - `defaults`: those of the class
fn read_expansion(read: &mut Reader<'_>, width: usize, defaults: [f64; 2]) -> toml::Table {
    let heads = read.size("num_heads");
    let kv_heads = read.optional_size("num_kv_heads").unwrap_or(heads);
    let expansions = [("expand_k", defaults[0]), ("expand_v", defaults[1])];
    let [keys, values] = expansions.map(|(key, default)| read.number(key, default));
    let equal = keys == values;
    read.refuse_unless(
        equal,
        "expand_v",
        &format!("{values:?}"),
        &format!("as expand_k, {keys:?}"),
    );
    let channels = product(width, keys, f64::round);
    let divides = channels > 0 && channels.is_multiple_of(heads);
    let allowed = format!("a divisor of hidden_size times expand_k, {channels}");
    read.refuse_unless(divides, "num_heads", &heads.to_string(), &allowed);
    table_of(&[("heads", heads), ("kv_heads", kv_heads), ("head_dim", channels / heads)])
}

/// The keys that the classes of linear attention share; records what the one with the gate `gate` and the feature maps
/// `maps`, whose names are the same, does not have.
fn keys_of_linear(
    model: &ModelConfig,
    gate: Gate,
    maps: &[FeatureMap],
    check: &mut Check<'_>,
) -> Map<String, Value> {
    let AttentionConfig::Linear(config) = model.attention_of(0) else { return Map::new() };
    check.attention("gate", config.gate == gate, shown(&config.gate), &shown(&gate));
    check.attention("rope", !config.rope, config.rope, "false");
    let map = config.feature_map;
    let allowed: Vec<String> = maps.iter().map(shown).collect();
    check.attention("feature_map", maps.contains(&map), shown(&map), &allowed.join(", "));
    check.attention("normalise", !config.normalise, config.normalise, "false");
    let shape = model.attention_shape(0);
    let expansion = (shape.heads * shape.head_dim) as f64 / model.width as f64;
    object(json!({
        "attn_mode": "chunk",
        "feature_map": map,
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "expand_k": expansion,
        "expand_v": expansion,
        "elementwise_affine": true,
    }))
}

/// The short convolutions of q, k and v.
fn convolutions(attention: &AttentionConfig, shape: &AttentionShape) -> [TensorRule; 3] {
    let [q, k, v] = channels(attention, shape);
    [("q", q), ("k", k), ("v", v)].map(|(part, channels)| {
        let shape = [channels, 1, CONV_TAPS];
        TensorRule::shaped(format!("{part}_conv1d.weight"), format!("{part}.conv"), &shape)
    })
}

/// A table of whole numbers.
fn table_of(sizes: &[(&str, usize)]) -> toml::Table {
    let value = |size: usize| toml::Value::Integer(size as i64);
    sizes.iter().map(|&(key, size)| (key.to_owned(), value(size))).collect()
}

/// Records the settings of a model that a class does not have.
pub(super) struct Check<'a> {
    layout: &'static str,
    problems: &'a mut Problems,
}

impl Check<'_> {
    /// Records `model.key`, with its value, unless `ok`.
    fn model(&mut self, key: &str, ok: bool, value: impl Display, allowed: &str) {
        self.problems.check(
            ok,
            format!("model.{key}"),
            value,
            format!("{allowed} in the {} layout", self.layout),
            "this model cannot be expressed there: share the run's folder instead",
        );
    }

    /// As [`Check::model`], for a key of `[model.attention]`.
    fn attention(&mut self, key: &str, ok: bool, value: impl Display, allowed: &str) {
        self.model(&format!("attention.{key}"), ok, value, allowed);
    }

    /// What no class has.
    fn shared(&mut self, model: &ModelConfig) {
        let none = model.positions == Positions::None;
        self.model("positions", none, shown(&model.positions), "\"none\"");
        self.model("bias", !model.bias, model.bias, "false");
    }

    /// Whether all layers have the kind `kind`, with the same settings. Records the first that does not.
    fn same_kind(&mut self, model: &ModelConfig, kind: &str) -> bool {
        let first = model.attention_of(0);
        let differs = |config: &AttentionConfig| config.kind() != kind || config != first;
        let other = (0..model.layers).find(|&layer| differs(model.attention_of(layer)));
        if let Some(layer) = other {
            let value = format!("{} in layer {layer}", shown(model.attention_of(layer)));
            let allowed = format!("kind = \"{kind}\", the same in every layer,");
            self.model("attention", false, value, &allowed);
        }
        other.is_none()
    }

    /// Records heads that do not fill the width.
    fn heads_fill_width(&mut self, model: &ModelConfig) {
        let shape = model.attention_shape(0);
        let fill = shape.heads * shape.head_dim == model.width;
        self.model("head_dim", fill, shape.head_dim, "width / heads");
    }
}
