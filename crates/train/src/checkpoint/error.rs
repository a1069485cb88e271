//! Why a checkpoint cannot be written, found, or used.

use std::path::{Path, PathBuf};

use longwall_config::shell_quoted;

use super::{CheckpointSelector, TokenizerIdentity};
use crate::config::ConfigError;
use crate::run_folder::NoRun;

/// Why a checkpoint cannot be written, found, or used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Writing failed.
    #[error("cannot write {}: {source}; nothing half-written is left\n  hint: make room on the disk, or check the permissions of the folder", path.display())]
    Write {
        /// What was being written.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// An old checkpoint or a leftover cannot be removed.
    #[error("cannot remove {}: {source}\n  hint: check the permissions of the folder", path.display())]
    Remove {
        /// What was being removed.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}\n  hint: check the path and its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is damaged.
    #[error("{} is damaged: {reason}\n  hint: {hint}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// What to do.
        hint: String,
    },
    /// A checkpoint cannot be verified.
    #[error("{} has no checksums.json: an earlier version of Longwall wrote it, which cannot be verified\n  hint: resume the run; its next checkpoints have checksums", path.display())]
    NoChecksums {
        /// The checkpoint's folder.
        path: PathBuf,
    },
    /// There is no run.
    #[error(transparent)]
    NoRun(#[from] NoRun),
    /// The run has no checkpoint.
    #[error("the run in {} has no checkpoint yet\n  hint: train it first: longwall train --resume {}", run_dir.display(), shell_quoted(run_dir))]
    NoCheckpoint {
        /// The run's folder.
        run_dir: PathBuf,
    },
    /// A folder is neither a checkpoint nor a run.
    #[error("{} is no checkpoint: there is no state.json in it\n  hint: give the folder of a checkpoint, for example runs/NAME/checkpoints/step-1000, or of a run", path.display())]
    NoCheckpointAt {
        /// The folder.
        path: PathBuf,
    },
    /// The requested checkpoint does not exist.
    #[error("{} has no {wanted} checkpoint; there: {}\n  hint: choose one of these", run_dir.display(), listed(there))]
    Missing {
        /// The run's folder.
        run_dir: PathBuf,
        /// The requested one.
        wanted: CheckpointSelector,
        /// The steps of the existing checkpoints.
        there: Vec<u64>,
    },
    /// The checkpoint has no averaged weights.
    #[error("{} has no average of the weights: the run was trained without train.ema\n  hint: leave out --weights, or train with --set train.ema=0.999", path.display())]
    NoAverage {
        /// The checkpoint's folder.
        path: PathBuf,
    },
    /// The checkpoint has weights, and no state of an optimiser.
    #[error("{} has weights only, which cannot be resumed\n  hint: start a run from them: longwall train --from {} --config FILE", path.display(), shell_quoted(path))]
    WeightsOnly {
        /// The checkpoint's folder.
        path: PathBuf,
    },
    /// A key that a trained model's use cannot change.
    #[error(
        "--set changes {key}; allowed with a trained model: keys of [model] that leave its weights as they are\n  hint: leave it out; for example model.attention.theta, model.attention.scaling and model.window may change"
    )]
    NotOfTheModel {
        /// The key.
        key: String,
    },
    /// A setting with which the model has other weights.
    #[error(
        "--set {sets} changes the model's weights ({weight}); allowed with a trained model: keys of [model] that leave them as they are\n  hint: train a model with this setting, or start one from these weights: longwall train --from"
    )]
    OtherWeights {
        /// The overrides.
        sets: String,
        /// A weight that only one of the two models has, or that differs in shape.
        weight: String,
    },
    /// The checkpoint was made with another tokenizer.
    #[error("{} was made with the tokenizer {} of {} tokens ({}), but the configuration gives {} of {} tokens ({})\n  hint: use the tokenizer the run was trained with", path.display(), theirs.name, theirs.vocab_size, theirs.short(), ours.name, ours.vocab_size, ours.short())]
    Tokenizer {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The tokenizer of the checkpoint.
        theirs: Box<TokenizerIdentity>,
        /// The tokenizer of the configuration.
        ours: Box<TokenizerIdentity>,
    },
    /// The checkpoint was made with a configuration that this one cannot continue.
    #[error("{} was made with another configuration:{}\n  hint: resume without changing these keys, or start a new run under another run.name", path.display(), shown(differences))]
    OtherConfig {
        /// The checkpoint's folder.
        path: PathBuf,
        /// `(key, value in the checkpoint, value asked for)`.
        differences: Vec<(String, String, String)>,
    },
    /// With this configuration, the steps before the checkpoint would have had other batches or another window.
    #[error("{} was made with other stages: with the train.stages and train.tokens of this configuration, the steps up to {step} would have had other batches or another window\n  hint: leave both as they were; later stages may change, and a stage that begins at a step or a token does not move when train.tokens changes", path.display())]
    OtherStages {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Its step.
        step: u64,
    },
    /// Weights or the optimiser's state cannot be encoded.
    #[error(transparent)]
    Tensors(#[from] longwall_model::weights::WeightsError),
    /// The configuration in the checkpoint cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl CheckpointError {
    /// Damage of the file `path`.
    pub(super) fn damaged(path: &Path, reason: String) -> Self {
        let hint = "remove the file, or restore it from a copy".to_owned();
        CheckpointError::Damaged { path: path.to_owned(), reason, hint }
    }
}

fn listed(steps: &[u64]) -> String {
    steps.iter().map(|step| format!("step {step}")).collect::<Vec<_>>().join(", ")
}

fn shown(differences: &[(String, String, String)]) -> String {
    let line = |(key, theirs, ours): &_| format!("\n  {key} was {theirs}, and is {ours} now");
    differences.iter().map(line).collect()
}
