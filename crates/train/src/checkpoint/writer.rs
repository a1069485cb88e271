//! Writes checkpoints in a thread of their own, while training goes on.

use std::path::PathBuf;
use std::thread::JoinHandle;

use longwall_model::weights::{NamedTensors, WeightsError, write_tensors};

use super::{
    CheckpointError, CheckpointFolder, EMA_FILE, OPTIMIZER_FILE, State, WEIGHTS_FILE, write_texts,
};
use crate::config::RunConfig;

/// All of a checkpoint, in main memory.
pub(crate) struct Snapshot {
    /// The model's weights.
    pub weights: NamedTensors,
    /// The optimiser's state.
    pub optimizer: NamedTensors,
    /// The moving average of the weights, if the run keeps one.
    pub ema: Option<NamedTensors>,
    /// The resolved configuration.
    pub config: RunConfig,
    /// Where the run stands.
    pub state: State,
}

impl Snapshot {
    /// Writes the checkpoint, marks it if it is the best, and removes old ones.
    fn write(self, folder: &CheckpointFolder) -> Result<PathBuf, CheckpointError> {
        let Snapshot { weights, optimizer, ema, config, state } = self;
        let path = folder.write(state.step, |path| {
            write_tensors(&path.join(WEIGHTS_FILE), &weights).map_err(write_error)?;
            write_tensors(&path.join(OPTIMIZER_FILE), &optimizer).map_err(write_error)?;
            if let Some(ema) = &ema {
                write_tensors(&path.join(EMA_FILE), ema).map_err(write_error)?;
            }
            write_texts(path, &config, &state)
        })?;
        if let Some(best) = state.best_here(&config) {
            folder.mark_best(best)?;
        }
        folder.prune(config.train.checkpoint.keep_last)?;
        Ok(path)
    }
}

impl CheckpointFolder {
    /// Writes a checkpoint that has weights and no state of an optimiser.
    ///
    /// # Errors
    /// When it cannot be written; nothing is left then.
    pub(crate) fn write_weights(
        &self,
        weights: &NamedTensors,
        config: &RunConfig,
        state: &State,
    ) -> Result<PathBuf, CheckpointError> {
        self.write(state.step, |path| {
            write_tensors(&path.join(WEIGHTS_FILE), weights).map_err(write_error)?;
            write_texts(path, config, state)
        })
    }
}

/// A failed write of tensors, reported as a failed write of their checkpoint.
fn write_error(error: WeightsError) -> CheckpointError {
    match error {
        WeightsError::Io { path, source, .. } => CheckpointError::Write { path, source },
        other => CheckpointError::Tensors(other),
    }
}

/// Writes one checkpoint at a time. Dropping it waits for the one under way.
pub(crate) struct CheckpointWriter {
    folder: CheckpointFolder,
    thread: Option<JoinHandle<Result<PathBuf, CheckpointError>>>,
}

impl CheckpointWriter {
    /// A writer into `folder`.
    pub fn new(folder: CheckpointFolder) -> Self {
        CheckpointWriter { folder, thread: None }
    }

    /// Starts to write a checkpoint, after the one under way. Returns the folder of that one.
    ///
    /// # Errors
    /// Why the one before could not be written.
    pub fn start(&mut self, snapshot: Snapshot) -> Result<Option<PathBuf>, CheckpointError> {
        let written = self.wait()?;
        let folder = self.folder.clone();
        self.thread = Some(std::thread::spawn(move || snapshot.write(&folder)));
        Ok(written)
    }

    /// The folder of the checkpoint under way, once it is written; does not wait for it.
    ///
    /// # Errors
    /// Why it could not be written.
    pub fn poll(&mut self) -> Result<Option<PathBuf>, CheckpointError> {
        match &self.thread {
            Some(thread) if thread.is_finished() => self.wait(),
            _ => Ok(None),
        }
    }

    /// Waits for the checkpoint under way, and returns its folder.
    ///
    /// # Errors
    /// Why it could not be written.
    pub fn wait(&mut self) -> Result<Option<PathBuf>, CheckpointError> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(written)) => written.map(Some),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        // An error before this one ends the run; the checkpoint under way is whole or not there.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
