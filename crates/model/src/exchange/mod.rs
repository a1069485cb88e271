//! Exchange with Hugging Face's formats: the layouts of weights and configurations that `transformers` reads.
//!
//! A layout is one file here and a line in [`LAYOUTS`]. It says which models it can express, and how its tensors are
//! made of ours. What it cannot express is refused with the keys' names: an exported model computes the same logits.

mod files;
mod gpt2;
mod llama;
mod rope_scaling;
mod values;

use std::path::Path;

use longwall_config::Problems;
use longwall_kernels::attention::{AttentionConfig, rope};
use serde::Serialize;
use serde_json::Value;

pub use self::files::{ExchangeError, HfFolder, WriteHf};
use crate::config::{NormPosition, ValueResidual};
use crate::start::ModelSpec;
use crate::weights::TensorMap;
use crate::{ModelConfig, weights};

/// A layout of tensors and configuration.
pub trait Layout: Sync {
    /// The value of `model_type` in its config.json.
    fn model_type(&self) -> &'static str;

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
pub const LAYOUTS: &[&dyn Layout] = &[&gpt2::Gpt2, &llama::Llama];

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

/// How one tensor of a layout is made of ours.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRule {
    /// Its name.
    pub name: String,
    /// Our tensors, stacked along their first dimension. A vector that the model does not have is zero.
    pub ours: Vec<String>,
    /// Whether the stacked matrix is transposed.
    pub transposed: bool,
}

impl TensorRule {
    fn plain(name: impl Into<String>, ours: impl Into<String>) -> Self {
        TensorRule { name: name.into(), ours: vec![ours.into()], transposed: false }
    }
}

/// A tensor: shape and elements in row-major order.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// The tensors of `layout` for the model of `spec` with the weights `ours`. Rows that pad the vocabulary are left
/// out.
///
/// # Panics
/// When a matrix is missing: `ours` must be the weights of the model.
pub fn to_layout(
    layout: &dyn Layout,
    spec: &ModelSpec<'_>,
    ours: &TensorMap,
) -> Vec<(String, Tensor)> {
    let shapes = weights::parameter_shapes(spec.config, spec.vocab_size, spec.seq_len);
    let width_of = |name: &str| {
        // The vector of a bias that the model does not have has an element for each row of its matrix.
        let weight = name.replace(".bias", ".weight");
        shapes.iter().find(|(other, _)| *other == weight).map(|(_, shape)| shape[0])
    };
    let part = |name: &String| match ours.get(name) {
        Some((shape, data)) if is_vocabulary(name) => {
            let (rows, width) = (spec.vocab_size.min(shape[0]), shape[1]);
            (vec![rows, width], data[..rows * width].to_vec())
        }
        Some(tensor) => tensor.clone(),
        None => {
            let len = width_of(name).unwrap_or_else(|| panic!("{name} is missing"));
            (vec![len], vec![0.0; len])
        }
    };
    let make = |rule: TensorRule| {
        let stacked = stack(rule.ours.iter().map(part).collect());
        (rule.name, if rule.transposed { transpose(stacked) } else { stacked })
    };
    layout.tensors(spec.config).into_iter().map(make).collect()
}

/// Our tensors from those of a layout, for the model of `spec`, whose vocabulary has the file's rows.
///
/// # Errors
/// With the name of every tensor that is missing, left over or of another shape.
pub fn from_layout(
    layout: &dyn Layout,
    spec: &ModelSpec<'_>,
    theirs: TensorMap,
) -> Result<TensorMap, Vec<String>> {
    let shapes = weights::parameter_shapes(spec.config, spec.vocab_size, spec.seq_len);
    let shape_of = |name: &String| {
        let found = shapes.iter().find(|(other, _)| other == name);
        found.map(|(_, shape)| shape.clone()).unwrap_or_else(|| panic!("no weight {name}"))
    };
    let named = theirs.into_iter().map(|(name, tensor)| (layout.full_name(&name), tensor));
    let mut theirs: TensorMap = named.collect();
    let (mut ours, mut problems) = (TensorMap::new(), vec![]);
    for rule in layout.tensors(spec.config) {
        let Some(tensor) = theirs.remove(&rule.name) else {
            problems.push(format!("{} is missing", rule.name));
            continue;
        };
        let parts: Vec<Vec<usize>> = rule.ours.iter().map(shape_of).collect();
        let mut wanted = parts[0].clone();
        wanted[0] = parts.iter().map(|shape| shape[0]).sum();
        let as_stored = if rule.transposed { transposed_shape(&wanted) } else { wanted };
        if tensor.0 != as_stored {
            let name = rule.name;
            problems.push(format!("{name} has shape {:?}, expected {as_stored:?}", tensor.0));
            continue;
        }
        let (_, data) = if rule.transposed { transpose(tensor) } else { tensor };
        let mut rest = &data[..];
        for (name, shape) in rule.ours.into_iter().zip(parts) {
            let (part, behind) = rest.split_at(shape.iter().product());
            ours.insert(name, (shape, part.to_vec()));
            rest = behind;
        }
    }
    let mut left: Vec<_> = theirs.into_keys().filter(|name| !layout.is_ignored(name)).collect();
    left.sort();
    problems.extend(left.into_iter().map(|name| format!("{name} is left over")));
    if problems.is_empty() { Ok(ours) } else { Err(problems) }
}

/// Whether a weight has a row for each token.
fn is_vocabulary(name: &str) -> bool {
    ["embedding", "head"].contains(&name)
}

/// Tensors one after another along their first dimension.
fn stack(parts: Vec<Tensor>) -> Tensor {
    let mut shape = parts[0].0.clone();
    shape[0] = parts.iter().map(|(shape, _)| shape[0]).sum();
    (shape, parts.into_iter().flat_map(|(_, data)| data).collect())
}

fn transposed_shape(shape: &[usize]) -> Vec<usize> {
    shape.iter().rev().copied().collect()
}

/// The transpose of a matrix; a vector as it is.
fn transpose((shape, data): Tensor) -> Tensor {
    let [rows, columns] = shape[..] else { return (shape, data) };
    let of = |at: usize| data[at % rows * columns + at / rows];
    (vec![columns, rows], (0..rows * columns).map(of).collect())
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

/// Records everything beside the block architecture that no layout here has.
fn check_plain(model: &ModelConfig, layout: &str, problems: &mut Problems) {
    let mut off = |key: &str, is_off: bool, off_value: &str| {
        problems.check(
            is_off,
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
/// The problems of the layout called `wanted`, or of all.
pub fn layout_of(
    spec: &ModelSpec<'_>,
    wanted: Option<&str>,
) -> Result<(&'static dyn Layout, Value), ExchangeError> {
    let mut all = vec![];
    for &layout in LAYOUTS {
        if wanted.is_some_and(|wanted| wanted != layout.model_type()) {
            continue;
        }
        let mut problems = Problems::new();
        let config = layout.config(spec, &mut problems);
        match problems.into_result() {
            Ok(()) => return Ok((layout, config)),
            Err(problems) => all.push((layout.model_type(), problems)),
        }
    }
    Err(ExchangeError::Inexpressible { problems: all })
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
    fn a_transpose_of_a_transpose_is_the_matrix() {
        let matrix = (vec![2, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let turned = transpose(matrix.clone());
        assert_eq!(turned, (vec![3, 2], vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        assert_eq!(transpose(turned), matrix);
        assert_eq!(transpose((vec![2], vec![1.0, 2.0])), (vec![2], vec![1.0, 2.0]));
    }

    #[test]
    fn layouts_have_names_of_their_own() {
        let names: Vec<_> = LAYOUTS.iter().map(|layout| layout.model_type()).collect();
        assert_eq!(names, ["gpt2", "llama"]);
    }
}
