//! Writes checkpoints in a thread of their own, while training goes on.

use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use longwall_model::weights::{NamedTensors, WeightsError, write_tensors};

use super::{
    CARRIED_FILE, CheckpointError, CheckpointFolder, EMA_FILE, OPTIMIZER_FILE, State, WEIGHTS_FILE,
    write_texts,
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
    /// What the rows of the last step hand over, if they are rows of streams.
    pub carried: Option<NamedTensors>,
    /// The resolved configuration.
    pub config: RunConfig,
    /// Where the run stands.
    pub state: State,
}

impl Snapshot {
    /// Writes the checkpoint, marks it if it is the best, and removes old ones.
    fn write(self, folder: &CheckpointFolder) -> Result<PathBuf, CheckpointError> {
        let Snapshot { weights, optimizer, ema, carried, config, state } = self;
        let path = folder.write(state.step, |path| {
            write_tensors(&path.join(WEIGHTS_FILE), &weights).map_err(write_error)?;
            write_tensors(&path.join(OPTIMIZER_FILE), &optimizer).map_err(write_error)?;
            if let Some(ema) = &ema {
                write_tensors(&path.join(EMA_FILE), ema).map_err(write_error)?;
            }
            if let Some(carried) = &carried {
                write_tensors(&path.join(CARRIED_FILE), carried).map_err(write_error)?;
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

/// How long a process that ends because another rank has ended may go on writing a checkpoint.
pub(crate) const MOST_WRITING: Duration = Duration::from_secs(300);

/// How many checkpoints are being written.
#[derive(Default)]
struct Writes {
    count: Mutex<usize>,
    ended: Condvar,
}

/// Those of this process.
static WRITES: Writes = Writes { count: Mutex::new(0), ended: Condvar::new() };

impl Writes {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one until the result is dropped.
    fn begin(&self) -> Write<'_> {
        *self.count() += 1;
        Write(self)
    }

    /// Waits until none is under way, at most for `limit`.
    fn wait(&self, limit: Duration) {
        let waited = self.ended.wait_timeout_while(self.count(), limit, |count| *count > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// A checkpoint that is being written.
struct Write<'a>(&'a Writes);

impl Drop for Write<'_> {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.ended.notify_all();
    }
}

/// Whether this process is writing a checkpoint.
pub(crate) fn is_writing() -> bool {
    *WRITES.count() > 0
}

/// Counts as a checkpoint that is being written until the result is dropped: from when its tensors are in main memory.
pub(crate) fn about_to_write() -> impl Sized {
    WRITES.begin()
}

/// Waits until this process writes no checkpoint, at most for `limit`.
pub(crate) fn wait_for_writes(limit: Duration) {
    WRITES.wait(limit);
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
        let (folder, write) = (self.folder.clone(), WRITES.begin());
        self.thread = Some(std::thread::spawn(move || {
            let _write = write;
            snapshot.write(&folder)
        }));
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn waiting_ends_with_the_last_write_or_at_its_limit() {
        let writes = Writes::default();
        writes.wait(Duration::from_secs(60));
        let (one, other) = (writes.begin(), writes.begin());
        drop(one);
        let started = Instant::now();
        writes.wait(Duration::from_millis(100));
        assert!(started.elapsed() >= Duration::from_millis(100));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                writes.wait(Duration::from_secs(60));
                *writes.count()
            });
            std::thread::sleep(Duration::from_millis(50));
            drop(other);
            assert_eq!(waiting.join().unwrap(), 0);
        });
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}
