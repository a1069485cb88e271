//! The folder `checkpoints/`: lists, writes and removes checkpoints.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use longwall_data::files;
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::checksums::Checksums;

/// Written last into a checkpoint; a folder without it is not a checkpoint.
pub(super) const STATE_FILE: &str = "state.json";
/// The folder of a run's checkpoints, in that of the run.
pub(super) const CHECKPOINTS: &str = "checkpoints";
const BEST_FILE: &str = "best.json";
/// Ends the names of files and folders that are being written.
const TEMPORARY: &str = ".tmp";
/// How far the time of a file may be behind the clock.
const COARSE: Duration = Duration::from_millis(100);

/// The step with the lowest validation loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    /// Finished steps.
    pub step: u64,
    /// Its validation loss, in nats.
    pub validation_loss: f64,
}

/// The folder `checkpoints/` of a run.
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
}

impl CheckpointFolder {
    /// The checkpoints of the run in `run_dir`. Does not access the disk.
    pub fn new(run_dir: &Path) -> Self {
        CheckpointFolder { path: run_dir.join(CHECKPOINTS) }
    }

    /// The folder of `step`'s checkpoint, whether it exists or not.
    pub fn step_dir(&self, step: u64) -> PathBuf {
        self.path.join(format!("step-{step}"))
    }

    /// The steps of all complete checkpoints, in ascending order.
    ///
    /// # Errors
    /// When the folder exists but cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps = Vec::new();
        for (name, path) in self.entries()? {
            let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
            if let Some(step) = step
                && path.join(STATE_FILE).is_file()
            {
                steps.push(step);
            }
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// Whether a checkpoint is partly written that was begun at `since` or later: older ones are of a killed process.
    pub(crate) fn has_unfinished(&self, since: SystemTime) -> bool {
        let begun = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
        let is_unfinished = |(name, path): &(String, PathBuf)| {
            name.starts_with("step-")
                && name.ends_with(TEMPORARY)
                && begun(path).is_some_and(|begun| begun + COARSE >= since)
        };
        self.entries().is_ok_and(|entries| entries.iter().any(is_unfinished))
    }

    /// Removes checkpoints that a killed run left partly written or partly removed.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        for (name, path) in self.entries()? {
            let unfinished = name.ends_with(TEMPORARY)
                || (name.starts_with("step-") && !path.join(STATE_FILE).is_file());
            if unfinished {
                tracing::info!("removing the unfinished {}", path.display());
                let removed =
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|source| CheckpointError::Remove { path: path.clone(), source })?;
            }
        }
        Ok(())
    }

    /// Lets `fill` write the checkpoint of `step` into a temporary folder, adds the checksums, flushes it to
    /// disk, and renames it into place.
    ///
    /// # Errors
    /// Those of `fill` and of the system; then the temporary folder is removed, and every other
    /// checkpoint is unchanged.
    pub fn write(
        &self,
        step: u64,
        fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        let target = self.step_dir(step);
        let temporary = files::with_suffix(&target, TEMPORARY);
        let io = |source| CheckpointError::Write { path: target.clone(), source };
        let write = || {
            fs::create_dir_all(&temporary).map_err(io)?;
            fill(&temporary)?;
            Checksums::write(&temporary).map_err(io)?;
            files::sync_files_in(&temporary).map_err(io)?;
            fs::rename(&temporary, &target).map_err(io)?;
            files::sync_folder(&self.path).map_err(io)
        };
        write().inspect_err(|_| {
            let _ = fs::remove_dir_all(&temporary);
        })?;
        Ok(target)
    }

    /// What is wrong with the files of the checkpoint of `step`, by file; `None` for a file that is sound.
    ///
    /// # Errors
    /// When the checkpoint has no checksums, or they cannot be read.
    pub fn verify(
        &self,
        step: u64,
    ) -> Result<Vec<(PathBuf, Option<CheckpointError>)>, CheckpointError> {
        let path = self.step_dir(step);
        let Some(checksums) = Checksums::read(&path)? else {
            return Err(CheckpointError::NoChecksums { path });
        };
        let verified = |name| (path.join(name), checksums.check(&path, name).err());
        Ok(checksums.names().map(verified).collect())
    }

    /// Adds to the `error` of a damaged checkpoint which other one is sound.
    pub(super) fn name_sound_one(&self, error: CheckpointError, step: u64) -> CheckpointError {
        let CheckpointError::Damaged { path, reason, .. } = error else { return error };
        let is_sound = |other: &u64| {
            self.verify(*other).is_ok_and(|files| files.iter().all(|(_, error)| error.is_none()))
        };
        let others = self.steps().unwrap_or_default().into_iter().filter(|&other| other != step);
        let hint = match others.rev().find(is_sound) {
            Some(other) => format!(
                "step {other} is sound: remove {} to resume from it; commands with --checkpoint take {other} there",
                self.step_dir(step).display()
            ),
            None => "restore it from a copy: no other checkpoint of the run is sound".to_owned(),
        };
        CheckpointError::Damaged { path, reason, hint }
    }

    /// `best.json`.
    pub fn best_file(&self) -> PathBuf {
        self.path.join(BEST_FILE)
    }

    /// Records the best checkpoint in `best.json`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn mark_best(&self, best: Best) -> Result<(), CheckpointError> {
        let path = self.best_file();
        let text = serde_json::to_vec_pretty(&best).expect("a step and a loss have a JSON form");
        files::write_atomically(&path, &text)
            .map_err(|source| CheckpointError::Write { path, source })
    }

    /// The contents of `best.json`, if it exists.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn best(&self) -> Result<Option<Best>, CheckpointError> {
        let path = self.best_file();
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path, source }),
        };
        let best = serde_json::from_slice(&bytes);
        best.map(Some).map_err(|error| CheckpointError::damaged(&path, error.to_string()))
    }

    /// Removes all checkpoints but the newest `keep_last` and the best.
    ///
    /// # Errors
    /// When one cannot be removed.
    pub fn prune(&self, keep_last: usize) -> Result<(), CheckpointError> {
        let best = self.best()?.map(|best| best.step);
        let steps = self.steps()?;
        let old = &steps[..steps.len().saturating_sub(keep_last)];
        for &step in old.iter().filter(|&&step| Some(step) != best) {
            let path = self.step_dir(step);
            // The state goes first, so that an interrupted removal leaves nothing that looks complete.
            fs::remove_file(path.join(STATE_FILE))
                .and_then(|()| fs::remove_dir_all(&path))
                .map_err(|source| CheckpointError::Remove { path, source })?;
        }
        Ok(())
    }

    /// Names and paths of the folder's entries; none if the folder does not exist.
    fn entries(&self) -> Result<Vec<(String, PathBuf)>, CheckpointError> {
        let io = |source| CheckpointError::Read { path: self.path.clone(), source };
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io(error)),
        };
        entries
            .map(|entry| {
                let entry = entry.map_err(io)?;
                Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &CheckpointFolder, step: u64) -> Result<PathBuf, CheckpointError> {
        folder.write(step, |path| {
            fs::write(path.join("weights.safetensors"), [0; 100]).unwrap();
            fs::write(path.join(STATE_FILE), step.to_string()).unwrap();
            Ok(())
        })
    }

    fn names(run: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(run.join("checkpoints"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn steps_are_in_numeric_order_and_complete() {
        let run = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(run.path());
        assert_eq!(folder.steps().unwrap(), [0; 0]);
        for step in [100, 20, 3] {
            write(&folder, step).unwrap();
        }
        fs::create_dir(folder.step_dir(7)).unwrap();
        fs::create_dir(run.path().join("checkpoints/step-9.tmp")).unwrap();
        assert_eq!(folder.steps().unwrap(), [3, 20, 100]);
        folder.remove_leftovers().unwrap();
        assert_eq!(names(run.path()), ["step-100", "step-20", "step-3"]);
    }

    #[test]
    fn a_checkpoint_that_fails_halfway_leaves_nothing_and_spares_the_others() {
        let run = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(run.path());
        write(&folder, 1).unwrap();
        let error = folder.write(2, |path| {
            fs::write(path.join("weights.safetensors"), [0; 100]).unwrap();
            let source = io::Error::from(io::ErrorKind::StorageFull);
            Err(CheckpointError::Write { path: path.join("optimizer.safetensors"), source })
        });
        assert!(error.unwrap_err().to_string().contains("optimizer.safetensors"));
        assert_eq!(names(run.path()), ["step-1"]);
        assert_eq!(folder.steps().unwrap(), [1]);
    }

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let run = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(run.path());
        for step in 1..=5 {
            write(&folder, step).unwrap();
            if step == 2 {
                folder.mark_best(Best { step, validation_loss: 1.5 }).unwrap();
            }
            folder.prune(2).unwrap();
        }
        assert_eq!(folder.steps().unwrap(), [2, 4, 5]);
        assert_eq!(folder.best().unwrap(), Some(Best { step: 2, validation_loss: 1.5 }));
        folder.mark_best(Best { step: 5, validation_loss: 1.25 }).unwrap();
        folder.prune(2).unwrap();
        assert_eq!(folder.steps().unwrap(), [4, 5]);
    }

    #[test]
    fn a_damaged_best_file_is_an_error() {
        let run = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(run.path());
        write(&folder, 1).unwrap();
        fs::write(run.path().join("checkpoints/best.json"), "{").unwrap();
        assert!(matches!(folder.best(), Err(CheckpointError::Damaged { .. })));
    }
}
