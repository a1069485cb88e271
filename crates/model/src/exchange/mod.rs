//! Exchange with Hugging Face's formats: the layouts of weights and configurations that `transformers` reads, with the
//! models of its own and of flash-linear-attention.
//!
//! A layout is one file here and a line in [`LAYOUTS`]. It says which models it can express, and how its tensors are
//! made of ours. What it cannot express is refused with the keys' names: an exported model computes the same logits.

mod files;
mod fla;
mod gpt2;
mod llama;
mod rope_scaling;
mod tensors;
mod values;

use std::path::Path;

use longwall_config::Problems;
use longwall_kernels::attention::{AttentionConfig, rope};
use serde::Serialize;
use serde_json::Value;

pub use self::files::{ExchangeError, HfFolder, WriteHf};
pub use self::tensors::{Form, Tensor, TensorRule, from_layout, to_layout};
use crate::ModelConfig;
use crate::config::{NormPosition, ValueResidual};
use crate::start::ModelSpec;

/// A layout of tensors and configuration.
pub trait Layout: Sync {
    /// The value of `model_type` in its config.json.
    fn model_type(&self) -> &'static str;

    /// The attention kind of its models.
    fn kind(&self) -> &'static str;

    /// The config.json of a model; records why the layout cannot express it.
    fn config(&self, spec: &ModelSpec<'_>, problems: &mut Problems) -> Value;

    /// The model of a config.json; records what is missing, or not supported here.
    fn model(&self, config: &Value, problems: &mut Problems) -> Option<ImportedModel>;

    /// The layout's tensors for a model that it can express.
    fn tensors(&self, model: &ModelConfig) -> Vec<TensorRule>;

    /// The name of a tensor that a file calls `name`.
    fn full_name(&self, name: &str) -> String {
        name.to_owned()
    }

    /// Whether a file's tensor has no counterpart and needs none, such as a stored causal mask.
    fn is_ignored(&self, name: &str) -> bool;
}

/// The layouts, in the order in which an export tries them.
pub const LAYOUTS: &[&dyn Layout] = &[
    &gpt2::Gpt2,
    &llama::Llama,
    &fla::Blocks(fla::ForgettingTransformer),
    &fla::Blocks(fla::GatedDeltaNet),
    &fla::Blocks(fla::Kda),
    &fla::Blocks(fla::GatedLinearAttention),
    &fla::Blocks(fla::LinearAttention),
    &fla::Blocks(fla::PathAttention),
    &fla::Rwkv7,
];

/// The model of a config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedModel {
    /// The `[model]` table.
    pub model: ModelConfig,
    /// Rows of the embedding.
    pub vocab_rows: usize,
    /// The longest sequence it was made for.
    pub seq_len: usize,
}

impl ImportedModel {
    /// From a `[model]` table without its `sizes`, which are whole numbers.
    fn new(
        mut table: toml::Table,
        sizes: &[(&str, usize)],
        [vocab_rows, seq_len]: [usize; 2],
    ) -> Self {
        for &(key, value) in sizes {
            table.insert(key.to_owned(), toml::Value::Integer(value as i64));
        }
        let model: ModelConfig = table.try_into().expect("a table of known keys");
        ImportedModel { model, vocab_rows, seq_len }
    }
}

/// A value as a configuration file has it.
fn shown<T: Serialize>(value: &T) -> String {
    toml::Value::try_from(value).expect("a value of a configuration").to_string()
}

/// Records a setting of `[model]` that the layout does not have, where the other one may.
fn check_setting(
    problems: &mut Problems,
    [layout, other]: [&str; 2],
    key: &str,
    ok: bool,
    [value, allowed]: [&str; 2],
) {
    problems.check(
        ok,
        format!("model.{key}"),
        value,
        format!("{allowed} in the {layout} layout"),
        format!("this model cannot be expressed there: try the {other} layout"),
    );
}

/// Records everything beside the block architecture that the layout does not have.
///
/// - `has`: keys among these that it does have
fn check_plain(model: &ModelConfig, layout: &str, has: &[&str], problems: &mut Problems) {
    let mut off = |key: &str, is_off: bool, off_value: &str| {
        problems.check(
            is_off || has.contains(&key),
            format!("model.{key}"),
            "set",
            format!("{off_value} in the {layout} layout"),
            "this model cannot be expressed there: share the run's folder instead",
        );
    };
    off("norm_position", model.norm_position == NormPosition::Pre, "\"pre\"");
    off("embedding_norm", !model.embedding_norm, "false");
    off("logit_softcap", model.logit_softcap.is_none(), "none");
    off("qk_norm", !model.qk_norm, "false");
    off("output_gate", !model.output_gate, "false");
    off("short_conv", !model.short_conv, "false");
    off("token_shift", !model.token_shift, "false");
    off("value_residual", model.value_residual == ValueResidual::None, "\"none\"");
    let windows = (0..model.layers).any(|layer| model.attention_shape(layer).window.is_some());
    off("window", !windows, "none");
}

/// Records layers whose attention is not plain softmax with the position encoding `position`, described by
/// `allowed`; returns the configuration of the first.
fn check_attention<'m>(
    model: &'m ModelConfig,
    position: rope::Position,
    allowed: &str,
    problems: &mut Problems,
) -> Option<&'m rope::Config> {
    let first = model.attention_of(0);
    for layer in 0..model.layers {
        let config = model.attention_of(layer);
        let plain = match config {
            AttentionConfig::Rope(config) => {
                let rope::Config { theta, scaling, .. } = *config;
                let plain = rope::Config { position, theta, scaling, ..Default::default() };
                *config == plain
            }
            _ => false,
        };
        if !plain || config != first {
            problems.check(
                false,
                "model.attention",
                format!("{} in layer {layer}", shown(config)),
                allowed,
                "no other kind of attention can be expressed there: share the run's folder instead",
            );
            return None;
        }
    }
    match first {
        AttentionConfig::Rope(config) => Some(config),
        _ => None,
    }
}

/// The layout that can express the model of `spec`, and its config.json.
///
/// # Errors
/// The problems of the layout called `wanted`, or of all whose models have the attention kind of the first layer. When
/// there are none, the kinds that have one.
pub fn layout_of(
    spec: &ModelSpec<'_>,
    wanted: Option<&str>,
) -> Result<(&'static dyn Layout, Value), ExchangeError> {
    let kind = spec.config.attention_of(0).kind();
    let fits = |layout: &&&dyn Layout| match wanted {
        Some(wanted) => layout.model_type() == wanted,
        None => layout.kind() == kind,
    };
    let mut all = vec![];
    for &layout in LAYOUTS.iter().filter(fits) {
        let mut problems = Problems::new();
        let config = layout.config(spec, &mut problems);
        match problems.into_result() {
            Ok(()) => return Ok((layout, config)),
            Err(problems) => all.push((layout.model_type(), problems)),
        }
    }
    if all.is_empty() {
        return Err(ExchangeError::NoLayout { kind, known: known_kinds() });
    }
    Err(ExchangeError::Inexpressible { problems: all })
}

/// The attention kinds that have a layout, each once.
fn known_kinds() -> String {
    let mut kinds: Vec<_> = LAYOUTS.iter().map(|layout| layout.kind()).collect();
    kinds.dedup();
    kinds.join(", ")
}

/// The layout of a config.json.
///
/// # Errors
/// When its `model_type` is none of [`LAYOUTS`].
pub fn layout_named(config: &Value, path: &Path) -> Result<&'static dyn Layout, ExchangeError> {
    let found = config["model_type"].as_str().unwrap_or_default();
    let layout = LAYOUTS.iter().find(|layout| layout.model_type() == found).copied();
    layout.ok_or_else(|| ExchangeError::UnknownLayout {
        path: path.to_owned(),
        found: found.to_owned(),
        known: LAYOUTS.iter().map(|l| l.model_type()).collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_have_names_of_their_own() {
        let names: Vec<_> = LAYOUTS.iter().map(|layout| layout.model_type()).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{names:?}");
    }
}
