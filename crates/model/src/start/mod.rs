//! Starting a model from the weights of another run, whose configuration may differ.
//!
//! Every weight must be in both models with the same name and shape. Only the weights that an attention kind has of
//! its own may be new or left out, where the kinds of a layer differ and the new one can start from the old one
//! (`kinds.rs`). New weights have their initial values; gates start open if that makes the layer compute what the old
//! one did.

mod kinds;

use std::path::Path;

use longwall_kernels::backend::OpBackend;

use crate::weights::{self, EarlierNames, TensorMap, WeightsError};
use crate::{LanguageModel, ModelConfig};

/// A model's configuration, and what its shapes depend on besides.
#[derive(Clone, Copy, Debug)]
pub struct ModelSpec<'a> {
    /// The `[model]` table.
    pub config: &'a ModelConfig,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Training length: rows of the learned positions.
    pub seq_len: usize,
}

/// What became of the weights. Names have `*` for the number of a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StartReport {
    /// How many tensors were taken over.
    pub taken: usize,
    /// Tensors that the source does not have, with their initial values in words.
    pub new: Vec<String>,
    /// Tensors of the source that the model does not have.
    pub left_out: Vec<String>,
    /// How the layers' functions differ from those of the source; empty if gates that start open, or equal
    /// settings, keep them.
    pub changed: Vec<String>,
}

/// Gives `model`, made for `spec` with initial weights, the weights of the file `path`, which belong to a model of
/// `source`.
///
/// # Errors
/// When the file cannot be read, or with the names of all weights that do not fit.
pub fn start_from<B: OpBackend>(
    model: LanguageModel<B>,
    spec: &ModelSpec<'_>,
    source: &ModelSpec<'_>,
    path: &Path,
) -> Result<(LanguageModel<B>, StartReport), WeightsError> {
    let ModelSpec { config, vocab_size, seq_len } = *source;
    let blank = LanguageModel::<B>::blank(config, vocab_size, seq_len, &Default::default());
    let tensors = EarlierNames::of(&blank).replace(weights::read_tensors(path)?);
    let wanted = weights::shapes_of(&model);
    let mut start = Start::new(spec, source, tensors);
    start.check_kinds();
    for (name, shape) in &wanted {
        start.place(name, shape);
    }
    start.leave_out_rest();
    let Start { placed, problems, report, .. } = start;
    if !problems.is_empty() {
        return Err(WeightsError::NoStart { path: path.to_owned(), problems });
    }
    Ok((weights::with_tensors(model, placed), report))
}

/// A start under way.
struct Start<'a> {
    spec: &'a ModelSpec<'a>,
    source: &'a ModelSpec<'a>,
    /// Tensors of the source that have no place yet.
    tensors: TensorMap,
    /// Tensors of the model.
    placed: TensorMap,
    problems: Vec<String>,
    report: StartReport,
}

impl<'a> Start<'a> {
    fn new(spec: &'a ModelSpec<'a>, source: &'a ModelSpec<'a>, tensors: TensorMap) -> Self {
        let (placed, problems, report) = Default::default();
        Start { spec, source, tensors, placed, problems, report }
    }

    /// Compares the kinds of each layer.
    fn check_kinds(&mut self) {
        let layers = self.spec.config.layers.min(self.source.config.layers);
        for layer in 0..layers {
            let [new, old] = [self.spec, self.source].map(|spec| spec.config.attention_of(layer));
            if new == old {
                continue;
            }
            if !kinds::takes_projections(new, old) {
                let (new, old) = (new.kind(), old.kind());
                self.problems.push(format!(
                    "layer {layer} has kind {new}, which cannot start from kind {old}"
                ));
                continue;
            }
            let seq_len = self.spec.seq_len;
            let [new_form, old_form] =
                [new, old].map(|config| kinds::softmax_form(config, seq_len));
            let same = |new: &kinds::SoftmaxForm, old: &kinds::SoftmaxForm| {
                old.gates.is_empty() && (new.rotation, new.sinks) == (old.rotation, old.sinks)
            };
            let keeps = new_form.zip(old_form).is_some_and(|(new, old)| same(&new, &old));
            if !keeps {
                let line = match (new.kind(), old.kind()) {
                    (new, old) if new == old => format!("{new} with other settings"),
                    (new, old) => format!("{new} in place of {old}"),
                };
                push_once(&mut self.report.changed, line);
            }
        }
    }

    /// Finds the tensor `name` of the model.
    fn place(&mut self, name: &str, shape: &[usize]) {
        let own = own_weight(self.spec.config, name);
        let changed = own.is_some_and(|(layer, _)| self.differs(layer));
        match self.tensors.get(name) {
            Some((found, _)) if found == shape => {
                let tensor = self.tensors.remove(name).expect("it is there");
                self.placed.insert(name.to_owned(), tensor);
                self.report.taken += 1;
                return;
            }
            // A weight of the new kind that happens to be called like one of the old.
            Some(_) if changed && self.other_kind(name) => {}
            Some((found, _)) => {
                self.problems.push(format!("{name} has shape {found:?}, here {shape:?}"));
                self.tensors.remove(name);
                return;
            }
            None if !changed => {
                self.problems.push(format!("{name} is missing: the source does not have it"));
                return;
            }
            None => {}
        }
        let gate = own.and_then(|(layer, own)| self.gate_value(layer, own));
        let value = match gate {
            Some(value) => {
                let elements = shape.iter().product();
                let tensor = (shape.to_vec(), vec![value; elements]);
                self.placed.insert(name.to_owned(), tensor);
                format!("{} = {value}", starred(name))
            }
            None => format!("{} (initial values)", starred(name)),
        };
        push_once(&mut self.report.new, value);
    }

    /// What is left must be of an old kind that its layer no longer has.
    fn leave_out_rest(&mut self) {
        let mut names: Vec<String> = self.tensors.drain().map(|(name, _)| name).collect();
        names.sort();
        for name in names {
            match own_weight(self.source.config, &name) {
                Some((layer, _)) if layer < self.spec.config.layers && self.differs(layer) => {
                    push_once(&mut self.report.left_out, starred(&name));
                }
                _ => {
                    self.problems.push(format!("{name} is left over: the model has no such weight"))
                }
            }
        }
    }

    /// Whether a layer's kind or its settings differ.
    fn differs(&self, layer: usize) -> bool {
        layer < self.source.config.layers
            && self.spec.config.attention_of(layer) != self.source.config.attention_of(layer)
    }

    /// Whether the layer that the weight `name` belongs to has another kind, not only other settings.
    fn other_kind(&self, name: &str) -> bool {
        own_weight(self.spec.config, name).is_some_and(|(layer, _)| {
            let [new, old] = [self.spec, self.source].map(|spec| spec.config.attention_of(layer));
            new.kind() != old.kind()
        })
    }

    /// The value with which the layer's own weight `own` opens a gate, if the source's layer has none.
    fn gate_value(&self, layer: usize, own: &str) -> Option<f32> {
        let old = kinds::softmax_form(self.source.config.attention_of(layer), self.spec.seq_len)?;
        let new = kinds::softmax_form(self.spec.config.attention_of(layer), self.spec.seq_len)?;
        let value = new.gates.iter().find(|(name, _)| *name == own).map(|(_, value)| *value);
        value.filter(|_| old.gates.is_empty())
    }
}

/// The layer of the weight `name`, and its name there, if it is one that the layer's kind has of its own.
fn own_weight<'n>(config: &ModelConfig, name: &'n str) -> Option<(usize, &'n str)> {
    let (layer, rest) = name.strip_prefix("blocks.")?.split_once('.')?;
    let layer = layer.parse().ok().filter(|&layer| layer < config.layers)?;
    let own = rest.strip_prefix("attention.")?;
    let (shape, kind) = (config.attention_shape(layer), config.attention_of(layer));
    let first = own.split('.').next()?;
    let is_own = kind.projections(&shape).iter().any(|spec| spec.name == first)
        || kind.parameters(&shape).iter().any(|spec| spec.name == first);
    is_own.then_some((layer, own))
}

/// `name` with `*` for the number of a block.
fn starred(name: &str) -> String {
    match name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
        Some((_, rest)) => format!("blocks.*.{rest}"),
        None => name.to_owned(),
    }
}

fn push_once(list: &mut Vec<String>, line: String) {
    if !list.contains(&line) {
        list.push(line);
    }
}
