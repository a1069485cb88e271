//! Checkpoints: written atomically, kept by age and by validation loss, and opened to resume.
//!
//! `checkpoints/step-N/` holds `weights.safetensors`, `optimizer.safetensors`, with `train.ema` also
//! `ema.safetensors`, with rows of streams `carried.safetensors`, `config.toml`, `state.json` and the checksums of all of them, which are verified when a file is read; `checkpoints/best.json` names the
//! step with the lowest validation loss.

mod checksums;
mod error;
mod folder;
mod selectors;
mod state;
mod writer;

use std::fs;
use std::path::{Path, PathBuf};

use checksums::Checksums;
pub use error::CheckpointError;
pub use folder::{Best, CheckpointFolder};
use longwall_data::Rows;
use longwall_model::config::Window;
use longwall_model::weights::parameter_shapes;
pub use selectors::{CheckpointSelector, WeightsSelector};
pub use state::{StageMicroBatch, State, TokenizerIdentity};
pub(crate) use writer::{
    CheckpointWriter, MOST_WRITING, Snapshot, about_to_write, is_writing, wait_for_writes,
};

use crate::config::{Difference, RunConfig};
use crate::optimiser::OptimiserConfig;
use crate::run_folder::{NoRun, is_run};

/// A weight's name and shape.
type NameAndShape = (String, Vec<usize>);

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
            return Err(match is_run(&run_dir) {
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

    /// Opens the checkpoint in the folder `path`, or the newest of the run in the folder `path`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; [`CheckpointError::NoCheckpointAt`] for a folder that is neither.
    pub fn at(path: &Path) -> Result<Self, CheckpointError> {
        if is_at(path) {
            return Self::read(path.to_owned());
        }
        match Self::open(path, CheckpointSelector::Latest) {
            Err(CheckpointError::NoRun(_)) => Err(Self::not_at(path)),
            opened => opened,
        }
    }

    /// Why there is no checkpoint in the folder `path`, which is none of a run either.
    fn not_at(path: &Path) -> CheckpointError {
        let missing = || {
            let wanted = path.file_name()?.to_str()?.parse().ok()?;
            let run_dir = run_dir_of(path)?.to_owned();
            let there = CheckpointFolder::new(&run_dir).steps().ok()?;
            (!there.is_empty()).then_some(CheckpointError::Missing { run_dir, wanted, there })
        };
        missing().unwrap_or_else(|| CheckpointError::NoCheckpointAt { path: path.to_owned() })
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

    /// The configuration of the checkpoint's model: `model.window` is that of its last step, whatever the run's
    /// stages set.
    pub fn trained_config(&self) -> RunConfig {
        RunConfig { model: self.config.model_after(self.state.step), ..self.config.clone() }
    }

    /// The folder of the run that the checkpoint lies in; none for a checkpoint that was copied elsewhere.
    pub fn run_dir(&self) -> Option<PathBuf> {
        // The path may be relative to the run's own folders.
        run_dir_of(&self.path).map(Path::to_owned).or_else(|| {
            let real = self.path.canonicalize().ok()?;
            run_dir_of(&real).map(Path::to_owned)
        })
    }

    /// The file with the model's weights.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when it is not as it was written.
    pub fn weights(&self) -> Result<PathBuf, CheckpointError> {
        self.sound(WEIGHTS_FILE)
    }

    /// Rejects a checkpoint that was written without the optimiser's state.
    ///
    /// # Errors
    /// [`CheckpointError::WeightsOnly`].
    pub fn check_resumable(&self) -> Result<(), CheckpointError> {
        let listed = |checksums: &Checksums| checksums.names().any(|name| name == OPTIMIZER_FILE);
        match self.checksums.as_ref().is_none_or(listed) {
            true => Ok(()),
            false => Err(CheckpointError::WeightsOnly { path: self.path.clone() }),
        }
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

    /// The file with what the rows of the last step hand over, if they are rows of streams.
    ///
    /// # Errors
    /// As [`Checkpoint::weights`].
    pub fn carried(&self) -> Result<Option<PathBuf>, CheckpointError> {
        match self.config.data.rows {
            Rows::Streams => self.sound(CARRIED_FILE).map(Some),
            _ => Ok(None),
        }
    }

    /// The file with the weights that `selector` names.
    ///
    /// # Errors
    /// As [`Checkpoint::weights`]; [`CheckpointError::NoAverage`] when there is no average.
    pub fn selected(&self, selector: WeightsSelector) -> Result<PathBuf, CheckpointError> {
        match selector {
            WeightsSelector::Model => self.weights(),
            WeightsSelector::Ema => {
                let none = || CheckpointError::NoAverage { path: self.path.clone() };
                self.ema()?.ok_or_else(none)
            }
        }
    }

    /// The checksum of the weights that `selector` names, unless an earlier version wrote the checkpoint.
    pub(crate) fn crc32c(&self, selector: WeightsSelector) -> Option<u32> {
        let name = match selector {
            WeightsSelector::Model => WEIGHTS_FILE,
            WeightsSelector::Ema => EMA_FILE,
        };
        self.checksums.as_ref()?.crc32c(name)
    }

    fn sound(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let check = |checksums: &Checksums| checksums.check(&self.path, name);
        self.checksums.as_ref().map_or(Ok(()), check).map_err(|error| match self.run_dir() {
            Some(run) => CheckpointFolder::new(&run).name_sound_one(error, self.state.step),
            None => error,
        })?;
        Ok(self.path.join(name))
    }

    /// [`Checkpoint::trained_config`] with the overrides `sets`, which may only change settings of the model that
    /// leave all its weights as they are.
    ///
    /// # Errors
    /// When the result is invalid, or a key is another one: [`CheckpointError::NotOfTheModel`],
    /// [`CheckpointError::OtherWeights`].
    pub fn config_with(
        &self,
        sets: &[String],
        vocab_size: usize,
    ) -> Result<RunConfig, CheckpointError> {
        let trained = self.trained_config();
        if sets.is_empty() {
            return Ok(trained);
        }
        let window = trained.model.window;
        let of_stage = format!("model.window={}", Window::of(window));
        let of_stage = (window != self.config.model.window).then_some(of_stage);
        let all: Vec<String> = of_stage.into_iter().chain(sets.iter().cloned()).collect();
        let config = RunConfig::load(&self.path.join(CONFIG_FILE), &all)?;
        let mut changes = trained.differences(&config).into_iter();
        if let Some(Difference { key, .. }) = changes.find(|d| !d.key.starts_with("model.")) {
            return Err(CheckpointError::NotOfTheModel { key });
        }
        let seq_len = config.data.seq_len;
        let shapes = |config: &RunConfig| parameter_shapes(&config.model, vocab_size, seq_len);
        let (ours, theirs) = (shapes(&self.config), shapes(&config));
        let differs = |a: &[NameAndShape], b: &[NameAndShape]| {
            a.iter().find(|tensor| !b.contains(tensor)).map(|(name, _)| name.clone())
        };
        match differs(&ours, &theirs).or_else(|| differs(&theirs, &ours)) {
            Some(weight) => {
                Err(CheckpointError::OtherWeights { sets: sets.join(" --set "), weight })
            }
            None => Ok(config),
        }
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
            return self.check_stages(config);
        }
        let differences = fixed.into_iter().map(|d| (d.key, d.ours, d.theirs)).collect();
        Err(CheckpointError::OtherConfig { path: self.path.clone(), differences })
    }
}

impl Checkpoint {
    /// Rejects stages with which the steps so far would have had other batches or another window.
    fn check_stages(&self, config: &RunConfig) -> Result<(), CheckpointError> {
        let (step, theirs, ours) = (self.state.step, self.config.timeline(), config.timeline());
        match theirs.past(step) == ours.past(step) {
            true => Ok(()),
            false => Err(CheckpointError::OtherStages { path: self.path.clone(), step }),
        }
    }
}

/// Keys that a resumed run cannot change, because its weights, its optimiser state or its position in
/// the data depend on them.
fn is_fixed(key: &str) -> bool {
    const FREE_DATA: [&str; 2] = ["data.cache_dir", "data.validation_tokens"];
    let below = |table: &str| key.strip_prefix(table).is_some_and(|rest| rest.starts_with('.'));
    let of_optimiser = |key: &str| key == "kind" || OptimiserConfig::state_keys().contains(&key);
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
        || key.starts_with("train.noise_scale.")
        || ["run.name", "run.out_dir", "run.tensorboard", "data.cache_dir", "train.recompute"]
            .contains(&key);
    !harmless
}

/// Whether the folder `path` is a checkpoint.
pub(crate) fn is_at(path: &Path) -> bool {
    path.join(folder::STATE_FILE).is_file()
}

/// The run whose `checkpoints/` the path lies in, by its name and its configuration.
pub(crate) fn run_dir_of(path: &Path) -> Option<&Path> {
    let folder = path.parent().filter(|parent| parent.ends_with(folder::CHECKPOINTS))?;
    folder.parent().filter(|run| run.join(CONFIG_FILE).is_file())
}

const CONFIG_FILE: &str = "config.toml";
/// The model's weights.
const WEIGHTS_FILE: &str = "weights.safetensors";
/// The optimiser's state.
const OPTIMIZER_FILE: &str = "optimizer.safetensors";

/// The moving average of the weights, under their names.
const EMA_FILE: &str = "ema.safetensors";

/// What the rows of the last step hand over to the next ones.
const CARRIED_FILE: &str = "carried.safetensors";

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
