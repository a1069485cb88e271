//! Checkpoints: written atomically, kept by age and by validation loss, and opened to resume.
//!
//! `checkpoints/step-N/` holds `weights.safetensors`, `optimizer.safetensors`, with `train.ema` also
//! `ema.safetensors`, `config.toml`, `state.json` and the checksums of all of them, which are verified when a file is read; `checkpoints/best.json` names the
//! step with the lowest validation loss.

mod checksums;
mod folder;
mod state;
mod writer;

use std::fmt::{self, Display};
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use checksums::Checksums;
pub use folder::{Best, CheckpointFolder};
use longwall_config::shell_quoted;
pub use state::{State, TokenizerIdentity};
pub(crate) use writer::{CheckpointWriter, Snapshot};

use crate::config::{ConfigError, RunConfig};
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
    /// Weights or the optimiser's state cannot be encoded.
    #[error(transparent)]
    Tensors(#[from] longwall_model::weights::WeightsError),
    /// The configuration in the checkpoint cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl CheckpointError {
    /// Damage of the file `path`.
    fn damaged(path: &Path, reason: String) -> Self {
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

/// Selects a checkpoint of a run: `latest`, `best`, or a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointSelector {
    /// The newest.
    #[default]
    Latest,
    /// The one with the lowest validation loss.
    Best,
    /// The one after this many steps.
    Step(u64),
}

impl FromStr for CheckpointSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "latest" => Ok(Self::Latest),
            "best" => Ok(Self::Best),
            _ => text.strip_prefix("step-").unwrap_or(text).parse().map(Self::Step).map_err(|_| {
                format!("`{text}` is no checkpoint; allowed: latest, best, or a step such as 1000")
            }),
        }
    }
}

impl Display for CheckpointSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str("latest"),
            Self::Best => f.write_str("best"),
            Self::Step(step) => write!(f, "step-{step}"),
        }
    }
}

/// A complete checkpoint on the disk.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Where the run stood.
    pub state: State,
    /// The resolved configuration it was made with.
    pub config: RunConfig,
    /// The checksums of its files, unless an earlier version wrote it.
    checksums: Option<Checksums>,
}

impl Checkpoint {
    /// Opens a checkpoint of the run in `run_dir`.
    ///
    /// # Errors
    /// When it is not there, or its state or configuration cannot be read.
    pub fn open(run_dir: &Path, wanted: CheckpointSelector) -> Result<Self, CheckpointError> {
        let folder = CheckpointFolder::new(run_dir);
        let steps = folder.steps()?;
        if steps.is_empty() {
            let run_dir = run_dir.to_owned();
            return Err(match run_dir.join(CONFIG_FILE).is_file() {
                true => CheckpointError::NoCheckpoint { run_dir },
                false => NoRun { path: run_dir }.into(),
            });
        }
        let step = match wanted {
            CheckpointSelector::Latest => steps.last().copied(),
            CheckpointSelector::Best => folder.best()?.map(|best| best.step),
            CheckpointSelector::Step(step) => Some(step),
        };
        let Some(step) = step.filter(|step| steps.contains(step)) else {
            let run_dir = run_dir.to_owned();
            return Err(CheckpointError::Missing { run_dir, wanted, there: steps });
        };
        Self::read(folder.step_dir(step)).map_err(|error| folder.name_sound_one(error, step))
    }

    fn read(path: PathBuf) -> Result<Self, CheckpointError> {
        let checksums = Checksums::read(&path)?;
        if checksums.is_none() {
            tracing::warn!("{} has no checksums: damage would not be noticed", path.display());
        }
        for name in [folder::STATE_FILE, CONFIG_FILE] {
            checksums.iter().try_for_each(|checksums| checksums.check(&path, name))?;
        }
        let state = State::read(&path.join(folder::STATE_FILE))?;
        let config = RunConfig::load(&path.join(CONFIG_FILE), &[])?;
        if let Some(reason) = state.impossible(&config) {
            return Err(CheckpointError::damaged(&path.join(folder::STATE_FILE), reason));
        }
        Ok(Checkpoint { path, state, config, checksums })
    }

    /// The folder of the run.
    pub fn run_dir(&self) -> &Path {
        self.path.ancestors().nth(2).unwrap_or(Path::new("."))
    }

    /// The file with the model's weights.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when it is not as it was written.
    pub fn weights(&self) -> Result<PathBuf, CheckpointError> {
        self.sound(WEIGHTS_FILE)
    }

    /// The file with the optimiser's state.
    ///
    /// # Errors
    /// As [`Checkpoint::weights`].
    pub fn optimizer(&self) -> Result<PathBuf, CheckpointError> {
        self.sound(OPTIMIZER_FILE)
    }

    /// The file with the moving average of the weights, if the run that wrote the checkpoint kept one.
    ///
    /// # Errors
    /// As [`Checkpoint::weights`].
    pub fn ema(&self) -> Result<Option<PathBuf>, CheckpointError> {
        match self.config.train.ema.0 {
            Some(_) => self.sound(EMA_FILE).map(Some),
            None => Ok(None),
        }
    }

    fn sound(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let check = |checksums: &Checksums| checksums.check(&self.path, name);
        self.checksums.as_ref().map_or(Ok(()), check).map_err(|error| {
            CheckpointFolder::new(self.run_dir()).name_sound_one(error, self.state.step)
        })?;
        Ok(self.path.join(name))
    }

    /// Rejects a tokenizer other than the one the checkpoint was made with.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`], with both.
    pub fn check_tokenizer(&self, ours: &TokenizerIdentity) -> Result<(), CheckpointError> {
        if self.state.tokenizer.fingerprint == ours.fingerprint {
            return Ok(());
        }
        let (theirs, ours) = (Box::new(self.state.tokenizer.clone()), Box::new(ours.clone()));
        Err(CheckpointError::Tokenizer { path: self.path.clone(), theirs, ours })
    }

    /// Rejects a configuration that cannot continue the run; changes of keys that only affect how it
    /// continues (learning rate, intervals, length) are logged.
    ///
    /// # Errors
    /// [`CheckpointError::OtherConfig`], with every such key.
    pub fn check_config(&self, config: &RunConfig) -> Result<(), CheckpointError> {
        let (fixed, free): (Vec<_>, Vec<_>) =
            self.config.differences(config).into_iter().partition(|d| is_fixed(&d.key));
        for change in free.iter().filter(|d| affects_results(&d.key)) {
            tracing::warn!(
                "{} was {} up to the checkpoint and is {} from now on",
                change.key,
                change.ours,
                change.theirs
            );
        }
        if fixed.is_empty() {
            return Ok(());
        }
        let differences = fixed.into_iter().map(|d| (d.key, d.ours, d.theirs)).collect();
        Err(CheckpointError::OtherConfig { path: self.path.clone(), differences })
    }
}

/// Keys that a resumed run cannot change, because its weights, its optimiser state or its position in
/// the data depend on them.
fn is_fixed(key: &str) -> bool {
    const FREE_DATA: [&str; 2] = ["data.cache_dir", "data.validation_tokens"];
    let below = |table: &str| key.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'));
    // These may decide which tensors the optimiser's state has.
    let of_optimiser = |table: &str| ["kind", "per_head"].contains(&table);
    let state = match key.strip_prefix("train.") {
        Some(key) => match key.split('.').collect::<Vec<_>>()[..] {
            ["optimiser", key] => of_optimiser(key),
            ["groups", _, "match"] => true,
            ["groups", _, "optimiser", key] => of_optimiser(key),
            _ => false,
        },
        None => false,
    };
    (below("data") && !FREE_DATA.contains(&key))
        || below("model")
        || below("tokenizer")
        || state
        || ["run.seed", "train.batch_tokens"].contains(&key)
}

/// Whether the value of a dotted key of the configuration can change a run's losses or speed.
pub fn affects_results(key: &str) -> bool {
    let harmless = key.starts_with("eval.")
        || key.starts_with("train.evaluate")
        || key.starts_with("train.sample.")
        || key.starts_with("train.checkpoint.")
        || key.starts_with("train.norms.")
        || ["run.name", "run.out_dir", "run.tensorboard", "data.cache_dir", "train.recompute"]
            .contains(&key);
    !harmless
}

const CONFIG_FILE: &str = "config.toml";
/// The model's weights.
const WEIGHTS_FILE: &str = "weights.safetensors";
/// The optimiser's state.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// The moving average of the weights, under their names.
const EMA_FILE: &str = "ema.safetensors";

/// Writes the text files of a checkpoint; the state goes last.
///
/// # Errors
/// When a file cannot be written.
fn write_texts(folder: &Path, config: &RunConfig, state: &State) -> Result<(), CheckpointError> {
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|source| CheckpointError::Write { path, source })
    };
    write(CONFIG_FILE, config.to_toml().as_bytes())?;
    write(folder::STATE_FILE, &state.to_json())
}

#[cfg(test)]
mod tests;
