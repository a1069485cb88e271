//! The run configuration: one TOML file, dotted overrides, every problem reported at once.

mod error;
mod evals;
mod extends;
mod kind;
mod overrides;
mod scalars;
mod stages;
#[cfg(test)]
mod tests;
mod train;

use std::path::Path;

use longwall_config::Problems;
use longwall_data::{DataConfig, Rows, TokenizerConfig};
use longwall_kernels::attention::AttentionConfig;
use longwall_model::config::Positions;
use longwall_model::cost::train_flops_per_token;
use longwall_model::{ModelConfig, Precision};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use self::extends::Layer;
use crate::optimiser::{Rules, validate_patterns};
use crate::timeline::{Stage, Timeline};

/// The most threads that a run may ask for.
const MOST_THREADS: usize = 1024;

pub use error::ConfigError;
pub(crate) use evals::validate_without_average;
pub use evals::{
    EvaluateConfig, FOLDER_NAME, eval_name, eval_weights, is_folder_name, validate_evals,
};
pub use kind::{KindError, SizeNames, check_kind, parse_kind};
pub use overrides::Override;
pub use scalars::{Every, OrOff, PhaseLength};
pub use stages::StageConfig;
pub use train::{
    CheckpointConfig, NoiseScaleConfig, NormsConfig, SampleConfig, SkipConfig, TrainConfig,
    ValidateConfig,
};

/// Everything that defines a run: the TOML tree of a file in `configs/`.
///
/// Relative paths in it are relative to the current folder; the one of `extends` to the file's folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Name, seed, device, and where the run's folder goes.
    #[serde(default)]
    pub run: RunTable,
    /// The text trained on.
    pub data: DataConfig,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: TokenizerConfig,
    /// The model.
    pub model: ModelConfig,
    /// Length, batch, optimiser, schedule.
    pub train: TrainConfig,
    /// Evaluation suites to run after training; each table names its `suite`, may name its results' folder
    /// (`out`) and which weights it reads (`weights`), and the other keys are the suite's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval: Vec<Table>,
}

/// The table `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunTable {
    /// Name of the run and of its folder. Default: the file's name without its extension.
    pub name: String,
    /// Seed of the initial weights, the data's order and the samples.
    pub seed: u64,
    /// The device.
    pub device: DeviceChoice,
    /// Type of matrices and activations. Default: bf16 on CUDA, f32 on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Threads on the CPU. Default: as many as there are cores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The folder that run folders go into.
    pub out_dir: std::path::PathBuf,
    /// Whether TensorBoard event files are written beside `metrics.jsonl`.
    pub tensorboard: bool,
}

impl Default for RunTable {
    fn default() -> Self {
        RunTable {
            name: String::new(),
            seed: 0,
            device: DeviceChoice::Auto,
            precision: None,
            threads: None,
            out_dir: "runs".into(),
            tensorboard: false,
        }
    }
}

/// The device that a run asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceChoice {
    /// CUDA if a driver and a GPU respond, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA; an error on a machine without it.
    Cuda,
}

impl RunConfig {
    /// Reads `path` and the files that it extends, applies the overrides `sets` (`key=value` with dotted
    /// keys) in order, and validates the result.
    ///
    /// # Errors
    /// See [`ConfigError`]; values out of range are all reported at once.
    pub fn load(path: &Path, sets: &[String]) -> Result<Self, ConfigError> {
        let source = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&source, path, sets)
    }

    /// As [`RunConfig::load`], from the text `source` of the file `path`.
    ///
    /// # Errors
    /// As [`RunConfig::load`].
    pub fn parse(source: &str, path: &Path, sets: &[String]) -> Result<Self, ConfigError> {
        let (table, layers) = extends::read(source, path)?;
        let sets = sets.iter().map(|set| Override::parse(set)).collect::<Result<Vec<_>, _>>()?;
        let mut config: RunConfig = deserialize(table, &layers, &sets)?;
        if config.run.name.is_empty() {
            config.run.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        }
        let mut problems = Problems::new();
        config.validate(&mut problems);
        problems.into_result().map_err(|problems| {
            let problems = error::with_places(&problems, &layers, &sets);
            ConfigError::Invalid { path: path.to_owned(), problems }
        })?;
        Ok(config)
    }

    /// Records every problem of the configuration.
    pub fn validate(&self, problems: &mut Problems) {
        let name = &self.run.name;
        problems.check(
            is_folder_name(name),
            "run.name",
            format!("\"{name}\""),
            FOLDER_NAME,
            "use for example \"wall-124m\"; run.out_dir says where the folder goes",
        );
        problems.check(
            self.run.threads.is_none_or(|threads| (1..=MOST_THREADS).contains(&threads)),
            "run.threads",
            self.run.threads.unwrap_or_default(),
            format!("1 to {MOST_THREADS}"),
            "leave it out to use every core",
        );
        let precision = self.run.precision.unwrap_or_default();
        problems.check(
            self.run.device != DeviceChoice::Cpu || precision == Precision::F32,
            "run.precision",
            format!("\"{precision}\" with run.device = \"cpu\""),
            "\"f32\" on the CPU",
            "leave it out: bf16 is the default on CUDA, f32 on the CPU",
        );
        self.data.validate(problems);
        // Separately: the model's checks stop at their first problem, and must not see those above.
        let mut model = Problems::new();
        self.model.validate(&mut model);
        for p in model.as_slice() {
            problems.check(false, &p.key, &p.value, &p.allowed, &p.remedy);
        }
        if model.as_slice().is_empty() {
            validate_patterns(&self.train.groups, &self.model, problems);
            for (at, stage) in self.train.stages.iter().enumerate() {
                stage.validate_window(at, &self.model, problems);
            }
        }
        self.train.validate(self.data.seq_len, problems);
        self.validate_cut_rows(problems);
        self.validate_streams(model.as_slice().is_empty(), problems);
        self.validate_shared_rows(model.as_slice().is_empty(), problems);
        let evals: Vec<&Table> = self.eval.iter().collect();
        validate_evals("eval", &evals, problems);
        if self.train.ema.0.is_none() {
            validate_without_average("eval", &evals, problems);
        }
    }

    /// Records a stage that would cut rows of several generated examples, whose parts mean nothing on their own. Rows that
    /// begin with their documents are left to the user.
    fn validate_cut_rows(&self, problems: &mut Problems) {
        if self.data.rows.are_documents() {
            return;
        }
        let whole = self.data.seq_len;
        let cuts = |stage: &StageConfig| stage.seq_len.is_some_and(|len| len != whole);
        let generated = self.data.sources.iter().find(|source| source.is_generated());
        if let (Some(at), Some(source)) = (self.train.stages.iter().position(cuts), generated) {
            let len = self.train.stages[at].seq_len.unwrap_or_default();
            problems.check(
                false,
                format!("train.stages.{at}.seq_len"),
                format!("{len} with a source of kind \"{}\"", source.kind()),
                format!("data.seq_len ({whole}): rows of generated sources are not cut"),
                "remove seq_len from the stages, train on text alone, or set data.rows = \"documents\"",
            );
        }
    }

    /// Records what rows of streams do not allow: layers without a state, and batches of several shapes. The model's
    /// layers are checked if it is `valid`.
    fn validate_streams(&self, valid: bool, problems: &mut Problems) {
        if self.data.rows != Rows::Streams {
            return;
        }
        let remedy = "set data.rows = \"packed\"";
        let kinds = if valid { self.model.layers_by_kind() } else { vec![] };
        for kind in kinds.iter().filter(|kind| !kind.attention.carries_state()) {
            let defaults = AttentionConfig::defaults();
            let carrying = defaults.iter().filter(|kind| kind.carries_state());
            let carrying: Vec<_> = carrying.map(AttentionConfig::kind).collect();
            let layers: Vec<String> = kind.layers.iter().map(usize::to_string).collect();
            let (all, layers) =
                (if layers.len() == 1 { "layer" } else { "layers" }, layers.join(", "));
            problems.check(
                false,
                "data.rows",
                format!("\"streams\" with kind = \"{}\" in {all} {layers}", kind.attention.kind()),
                format!(
                    "kinds whose past is a state, without rotated keys: {}",
                    carrying.join(", ")
                ),
                format!("{remedy}, or give the {all} such a kind"),
            );
        }
        problems.check(
            self.model.positions != Positions::Learned,
            "data.rows",
            "\"streams\" with model.positions = \"learned\"",
            "no learned positions: a document may be longer than a row",
            format!("{remedy}, or model.positions = \"none\""),
        );
        let shape = |stage: &Stage| (stage.batch_tokens, stage.seq_len);
        let (base, timeline) = (shape(&self.base_stage()), self.timeline());
        problems.check(
            timeline.stages().iter().all(|stage| shape(stage) == base),
            "train.stages",
            "batches of another shape with data.rows = \"streams\"",
            "train.batch_tokens and data.seq_len in all steps: each row of a batch is one stream",
            format!("remove batch_tokens and seq_len from the stages, or {remedy}"),
        );
    }

    /// Records what ranks that share rows do not allow: heads that do not divide, and rows of streams. The model's
    /// layers are checked if it is `valid`.
    fn validate_shared_rows(&self, valid: bool, problems: &mut Problems) {
        let shared = self.train.context_parallel;
        if shared <= 1 {
            return;
        }
        let remedy = "leave train.context_parallel out";
        problems.check(
            self.data.rows != Rows::Streams,
            "data.rows",
            format!("\"streams\" with train.context_parallel = {shared}"),
            "\"packed\", \"documents\" or \"cut-documents\" if ranks share rows",
            format!("set data.rows = \"packed\", or {remedy}"),
        );
        let layers = if valid { self.model.layers } else { 0 };
        let undivided = (0..layers).find(|&layer| {
            let shape = self.model.attention_shape(layer);
            self.model.attention_of(layer).head_parts(&shape, shared).is_none()
        });
        if let Some(layer) = undivided {
            let (shape, kind) =
                (self.model.attention_shape(layer), self.model.attention_of(layer).kind());
            let divisors = (1..=shape.kv_heads).filter(|&parts| {
                parts == 1 || self.model.attention_of(layer).head_parts(&shape, parts).is_some()
            });
            let divisors: Vec<_> = divisors.map(|parts| parts.to_string()).collect();
            let allowed = format!(
                "{} with the {} heads of keys and values and kind = \"{kind}\" of layer {layer}",
                divisors.join(", "),
                shape.kv_heads
            );
            let instead = "give the layer other heads, or another kind or configuration";
            problems.check(
                false,
                "train.context_parallel",
                shared,
                allowed,
                format!("{remedy}, or {instead}"),
            );
        }
    }

    /// The stages of the run.
    pub fn timeline(&self) -> Timeline {
        self.train.timeline(self.data.seq_len, self.model.window)
    }

    /// Optimiser steps of the run: without stages, `ceil(tokens / batch_tokens)`.
    pub fn total_steps(&self) -> u64 {
        self.timeline().total_steps()
    }

    /// FLOPs of the whole run's training, with a vocabulary of `vocab_size` tokens.
    pub fn train_flops(&self, vocab_size: usize) -> f64 {
        let timeline = self.timeline();
        let of = |(stage, tokens): (&Stage, u64)| {
            tokens as f64 * self.flops_per_token(stage, vocab_size)
        };
        let tokens = timeline.tokens_by_stage(timeline.total_steps());
        timeline.stages().iter().zip(tokens).map(of).sum()
    }

    /// FLOPs of training per token during `stage`, with a vocabulary of `vocab_size` tokens.
    pub fn flops_per_token(&self, stage: &Stage, vocab_size: usize) -> f64 {
        train_flops_per_token(&self.model_of(stage), vocab_size, stage.seq_len)
    }

    /// Steps with `train.batch_tokens`, `data.seq_len` and `model.window`, whatever `train.stages` change.
    pub fn base_stage(&self) -> Stage {
        self.train.base_stage(self.data.seq_len, self.model.window)
    }

    /// The model during `stage`: with its window.
    pub fn model_of(&self, stage: &Stage) -> ModelConfig {
        self.model.with_window(stage.window)
    }

    /// The model that `step` finished steps give: with the window of the last of them.
    pub fn model_after(&self, step: u64) -> ModelConfig {
        self.model_of(self.timeline().last_stage(step))
    }

    /// The model with the widest window of the run: the one that reads and keeps most.
    pub fn widest_model(&self) -> ModelConfig {
        let width = |stage: &&Stage| stage.window.unwrap_or(usize::MAX);
        let timeline = self.timeline();
        let widest = timeline.stages().iter().max_by_key(width).expect("a run has a stage");
        self.model_of(widest)
    }

    /// How the optimiser updates the model's parameters.
    pub fn rules(&self) -> Rules<'_> {
        let TrainConfig { optimiser, groups, .. } = &self.train;
        Rules { optimiser, groups, model: &self.model }
    }

    /// The folder of the run.
    pub fn run_dir(&self) -> std::path::PathBuf {
        self.run.out_dir.join(&self.run.name)
    }

    /// The whole configuration as TOML, defaults included.
    ///
    /// # Panics
    /// Never: every value of the configuration has a TOML form.
    pub fn to_toml(&self) -> String {
        toml::to_string_pretty(self).expect("a configuration has a TOML form")
    }

    /// All dotted keys, with their values as TOML.
    pub fn leaves(&self) -> std::collections::BTreeMap<String, String> {
        let mut leaves = std::collections::BTreeMap::new();
        let tree = Value::try_from(self).expect("a configuration has a TOML form");
        flatten(&tree, String::new(), &mut leaves);
        leaves
    }

    /// The keys whose values differ between `self` and `other`, with both values as TOML; where a key is
    /// missing, its value is `(unset)`.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (ours, theirs) = (self.leaves(), other.leaves());
        let mut keys: Vec<&String> = ours.keys().chain(theirs.keys()).collect();
        keys.sort_unstable();
        keys.dedup();
        let shown = |value: Option<&String>| value.cloned().unwrap_or_else(|| "(unset)".to_owned());
        keys.into_iter()
            .filter(|key| ours.get(*key) != theirs.get(*key))
            .map(|key| Difference {
                key: key.clone(),
                ours: shown(ours.get(key)),
                theirs: shown(theirs.get(key)),
            })
            .collect()
    }
}

/// Deserialises the text `source` of the file `path`; an error says which key is wrong and where it was
/// set.
pub(crate) fn read_toml<T: DeserializeOwned + Serialize>(
    source: &str,
    path: &Path,
) -> Result<T, ConfigError> {
    let layer = Layer { path: path.to_owned(), source: source.to_owned() };
    deserialize(extends::parse(&layer)?, &[layer], &[])
}

/// Deserialises `table`, read from the files `layers`, with the overrides `sets`.
fn deserialize<T: DeserializeOwned + Serialize>(
    mut table: Table,
    layers: &[Layer],
    sets: &[Override],
) -> Result<T, ConfigError> {
    for set in sets {
        set.apply(&mut table)?;
    }
    let retry = |table: Table| {
        let result: Result<T, _> = Value::Table(table).try_into();
        result.err().map(|error| error.message().to_owned())
    };
    let given = Value::Table(table.clone());
    let config: T = serde_path_to_error::deserialize(given.clone())
        .map_err(|error| error::key_error(layers, &table, sets, &error, retry))?;
    let read = Value::try_from(&config).expect("a configuration has a TOML form");
    match error::array_read_as_table(&given, &read) {
        Some(key) => Err(error::no_table(layers, &table, sets, &key, retry)),
        None => Ok(config),
    }
}

/// A key whose value differs between two configurations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The dotted key.
    pub key: String,
    /// Its value here.
    pub ours: String,
    /// Its value there.
    pub theirs: String,
}

fn flatten(value: &Value, key: String, leaves: &mut std::collections::BTreeMap<String, String>) {
    let join = |segment: &str| {
        if key.is_empty() { segment.to_owned() } else { format!("{key}.{segment}") }
    };
    match value {
        Value::Table(table) => {
            for (name, inner) in table {
                flatten(inner, join(name), leaves);
            }
        }
        Value::Array(array) if array.iter().any(Value::is_table) => {
            for (index, inner) in array.iter().enumerate() {
                flatten(inner, join(&index.to_string()), leaves);
            }
        }
        leaf => {
            leaves.insert(key, leaf.to_string());
        }
    }
}
