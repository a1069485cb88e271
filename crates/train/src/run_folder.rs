//! The folder of a run: created once, overwritten only on request, used by one process at a time.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use longwall_config::shell_quoted;
use longwall_data::{DataError, Tokenizer, TokenizerConfig, files};
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, RunConfig};
use crate::metrics::ValidationRecord;

/// What training writes into a run folder; `--force` removes these and nothing else, the configuration last: a
/// folder without it is no run.
const OURS: [&str; 11] = [
    TOKENIZER_FILE,
    "metrics.jsonl",
    "samples.txt",
    "finished.json",
    "tb",
    "checkpoints",
    "eval",
    "evals.json",
    "loss.svg",
    "report.html",
    CONFIG_FILE,
];

/// What a process may leave in the folder that was killed before the run began.
const BEFORE_A_RUN: [&str; 3] = [LOCK_FILE, LOG_FILE, "config.toml.tmp"];

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// The folder exists already.
    #[error("the run folder {} exists already\n  hint: continue it with --resume {}, choose another run.name, or start over with --force, which deletes it", path.display(), shell_quoted(path))]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// `--force` on a folder without a run.
    #[error("{} is not empty and holds no run (no config.toml): --force does not delete it\n  hint: choose another run.name or run.out_dir, or empty the folder yourself", path.display())]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// `--resume` of a folder without a run.
    #[error(transparent)]
    NoRun(#[from] NoRun),
    /// Another process trains this run.
    #[error("another process is training the run in {}\n  hint: wait until it has ended, or stop it (Ctrl-C lets it write a checkpoint)", path.display())]
    Locked {
        /// The folder.
        path: PathBuf,
    },
    /// The system reports an error.
    #[error("cannot write to the run folder {}: {source}\n  hint: check its permissions and the room on the disk, or set run.out_dir", path.display())]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The run's own configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// A folder without a run.
#[derive(Debug, thiserror::Error)]
#[error("{} holds no run: there is no config.toml in it\n  hint: give the folder of a run, for example runs/NAME", path.display())]
pub struct NoRun {
    /// The folder.
    pub path: PathBuf,
}

/// The contents of `finished.json`: the marker of a complete run, with its results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finished {
    /// Steps of the run.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Loss of the last step taken; `null` when the last step was skipped.
    pub loss: Option<f32>,
    /// The last validation, unless validation is off.
    pub validation: Option<ValidationRecord>,
    /// Skipped steps.
    pub skipped: u64,
    /// Median training throughput over the steps since the run was last started or resumed.
    pub tokens_per_second: f64,
    /// Seconds of training, over all resumed parts.
    pub seconds: f64,
    /// Parameters of the model.
    pub parameters: u64,
    /// The device.
    pub device: String,
}

/// An open run folder, locked until it is dropped.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    _lock: File,
}

impl RunFolder {
    /// Checks that a new run may use `path`, without changing anything, so that a run fails before it
    /// prepares its data. Returns whether there is an old run to delete.
    ///
    /// # Errors
    /// [`RunFolderError::Exists`] when the folder is not empty, unless it is a run and `force` is set;
    /// [`RunFolderError::Io`] when the folder cannot be written.
    pub fn check_new(path: &Path, force: bool) -> Result<bool, RunFolderError> {
        let io = |source| RunFolderError::Io { path: path.to_owned(), source };
        let entries = match fs::read_dir(path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return check_writable(path).map(|()| false).map_err(io);
            }
            Err(error) => return Err(io(error)),
        };
        check_writable(path).map_err(io)?;
        let mut taken = false;
        for entry in entries {
            let name = entry.map_err(io)?.file_name();
            taken |= BEFORE_A_RUN.iter().all(|before| name != *before);
        }
        if taken && !force {
            return Err(RunFolderError::Exists { path: path.to_owned() });
        }
        if taken && !path.join(CONFIG_FILE).is_file() {
            return Err(RunFolderError::NotARun { path: path.to_owned() });
        }
        Ok(taken)
    }

    /// Creates the folder `path` for a new run; with `force`, removes the files of an existing run.
    ///
    /// # Errors
    /// As [`RunFolder::check_new`].
    pub fn create(path: &Path, force: bool) -> Result<Self, RunFolderError> {
        let io = |source| RunFolderError::Io { path: path.to_owned(), source };
        let taken = Self::check_new(path, force)?;
        fs::create_dir_all(path).map_err(io)?;
        let folder = Self::lock(path)?;
        if taken {
            tracing::warn!("deleting the run in {}, as --force asks", path.display());
            folder.clear()?;
        }
        Ok(folder)
    }

    /// Opens the folder of an existing run.
    ///
    /// # Errors
    /// When there is no run, or another process trains it.
    pub fn open(path: &Path) -> Result<Self, RunFolderError> {
        if !path.join(CONFIG_FILE).is_file() {
            return Err(NoRun { path: path.to_owned() }.into());
        }
        Self::lock(path)
    }

    fn lock(path: &Path) -> Result<Self, RunFolderError> {
        let file = path.join(LOCK_FILE);
        let io = |source| RunFolderError::Io { path: file.clone(), source };
        let lock = File::options().create(true).append(true).open(&file).map_err(io)?;
        match lock.try_lock() {
            Ok(()) => Ok(RunFolder { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(RunFolderError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => Err(io(source)),
        }
    }

    /// Removes the files of an old run.
    fn clear(&self) -> Result<(), RunFolderError> {
        for name in OURS {
            let path = self.path.join(name);
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            match removed {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(RunFolderError::Io { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `metrics.jsonl`.
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `samples.txt`.
    pub fn samples(&self) -> PathBuf {
        self.path.join("samples.txt")
    }

    /// The folder of TensorBoard's event files.
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tb")
    }

    /// Writes the resolved configuration and, for a tokenizer of `kind = "file"`, a copy of the file, unless
    /// the run has one; removes the marker of a finished run.
    ///
    /// # Errors
    /// When a file cannot be written or removed.
    pub fn start(&self, config: &RunConfig) -> Result<(), RunFolderError> {
        let finished = self.path.join(FINISHED_FILE);
        match fs::remove_file(&finished) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(RunFolderError::Io { path: finished, source });
            }
            _ => {}
        }
        // First, so that a run that is killed here can be resumed, which copies the tokenizer.
        self.write(CONFIG_FILE, config.to_toml().as_bytes())?;
        if let TokenizerConfig::File { path } = &config.tokenizer
            && !self.path.join(TOKENIZER_FILE).exists()
        {
            let io = |source| RunFolderError::Io { path: path.clone(), source };
            self.write(TOKENIZER_FILE, &fs::read(path).map_err(io)?)?;
        }
        Ok(())
    }

    /// Marks the run as finished.
    ///
    /// # Errors
    /// When the marker cannot be written.
    pub fn finish(&self, finished: &Finished) -> Result<(), RunFolderError> {
        let text = serde_json::to_vec_pretty(finished).expect("results have a JSON form");
        self.write(FINISHED_FILE, &text)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), RunFolderError> {
        let path = self.path.join(name);
        files::write_atomically(&path, bytes).map_err(|source| RunFolderError::Io { path, source })
    }
}

/// Creates and removes a file in `path`, or in its nearest existing parent folder.
fn check_writable(path: &Path) -> io::Result<()> {
    let absolute = std::path::absolute(path)?;
    let there = absolute.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    let probe = there.join(format!(".longwall-{}", std::process::id()));
    File::create(&probe)?;
    fs::remove_file(probe)
}

const LOCK_FILE: &str = "lock";
const CONFIG_FILE: &str = "config.toml";
/// A run's own copy of a tokenizer file.
const TOKENIZER_FILE: &str = "tokenizer.json";
const FINISHED_FILE: &str = "finished.json";

/// The console output of a run that a sweep started.
pub const LOG_FILE: &str = "log.txt";

/// The resolved configuration of the run in `path`, with the overrides `sets`.
///
/// # Errors
/// When there is no run, or the configuration with the overrides is invalid.
pub fn config_of(path: &Path, sets: &[String]) -> Result<RunConfig, RunFolderError> {
    let file = path.join(CONFIG_FILE);
    if !file.is_file() {
        return Err(NoRun { path: path.to_owned() }.into());
    }
    Ok(RunConfig::load(&file, sets)?)
}

/// The tokenizer of the run in `path`: its own copy of a tokenizer file if it has one, because the file that
/// the configuration names may have changed, or be elsewhere for a run that was moved.
///
/// # Errors
/// As [`Tokenizer::load`].
pub fn load_tokenizer(path: &Path, config: &TokenizerConfig) -> Result<Tokenizer, DataError> {
    let copy = path.join(TOKENIZER_FILE);
    match config {
        TokenizerConfig::File { .. } if copy.is_file() => {
            Tokenizer::load(&TokenizerConfig::File { path: copy })
        }
        config => Tokenizer::load(config),
    }
}

/// The results of the run in `path`, if it is finished.
///
/// # Errors
/// When the marker exists but cannot be read.
pub fn finished(path: &Path) -> Result<Option<Finished>, RunFolderError> {
    let file = path.join(FINISHED_FILE);
    let io = |source| RunFolderError::Io { path: file.clone(), source };
    match fs::read(&file) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| io(error.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(io(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::config;

    fn results() -> Finished {
        Finished {
            step: 10,
            tokens: 640,
            loss: Some(1.5),
            validation: None,
            skipped: 0,
            tokens_per_second: 5000.0,
            seconds: 2.0,
            parameters: 1000,
            device: "cpu".into(),
        }
    }

    #[test]
    fn a_run_is_never_overwritten_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs/small");
        let run = RunFolder::create(&path, false).unwrap();
        run.start(&config(&[])).unwrap();
        fs::write(run.metrics(), "{}").unwrap();
        fs::write(path.join("notes.md"), "mine").unwrap();
        drop(run);
        let error = RunFolder::create(&path, false).unwrap_err();
        assert!(matches!(&error, RunFolderError::Exists { .. }));
        assert!(error.to_string().contains("--resume"), "{error}");
        let run = RunFolder::create(&path, true).unwrap();
        assert!(!run.metrics().exists());
        assert!(path.join("notes.md").exists(), "--force removed a file that is not the run's");
    }

    #[test]
    fn force_spares_folders_that_hold_no_run() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "years of work").unwrap();
        let error = RunFolder::create(folder.path(), true).unwrap_err();
        assert!(matches!(error, RunFolderError::NotARun { .. }));
        assert!(folder.path().join("thesis.tex").exists());
    }

    #[test]
    fn what_was_killed_before_the_run_began_can_start_again() {
        let folder = tempfile::tempdir().unwrap();
        drop(RunFolder::create(folder.path(), false).unwrap());
        fs::write(folder.path().join("config.toml.tmp"), "[mod").unwrap();
        let run = RunFolder::create(folder.path(), false).unwrap();
        let tokenizer = folder.path().join("bpe.json");
        let set = format!("tokenizer={{kind=\"file\", path={:?}}}", tokenizer.to_str().unwrap());
        let config = config(&[&set]);
        // Killed after the configuration was written.
        assert!(run.start(&config).is_err());
        drop(run);
        fs::write(&tokenizer, "{}").unwrap();
        RunFolder::open(folder.path()).unwrap().start(&config).unwrap();
        assert_eq!(fs::read(folder.path().join(TOKENIZER_FILE)).unwrap(), b"{}");
    }

    #[test]
    fn one_process_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::create(folder.path(), false).unwrap();
        run.start(&config(&[])).unwrap();
        let error = RunFolder::open(folder.path()).unwrap_err();
        assert!(matches!(error, RunFolderError::Locked { .. }));
        drop(run);
        RunFolder::open(folder.path()).unwrap();
    }

    #[test]
    fn the_mark_of_a_finished_run_goes_when_it_starts_again() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::create(folder.path(), false).unwrap();
        run.start(&config(&[])).unwrap();
        assert_eq!(finished(folder.path()).unwrap(), None);
        run.finish(&results()).unwrap();
        assert_eq!(finished(folder.path()).unwrap(), Some(results()));
        run.start(&config(&["train.tokens=2M"])).unwrap();
        assert_eq!(finished(folder.path()).unwrap(), None);
        assert_eq!(config_of(folder.path(), &[]).unwrap(), config(&["train.tokens=2M"]));
    }

    #[test]
    fn a_folder_without_a_run_cannot_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let error = RunFolder::open(folder.path()).unwrap_err();
        assert!(matches!(error, RunFolderError::NoRun { .. }));
    }

    #[cfg(unix)]
    #[test]
    fn an_unwritable_place_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let path = folder.path().join("file/run");
        assert!(RunFolder::check_new(&path, false).is_err());
        let error = RunFolder::create(&path, false).unwrap_err().to_string();
        assert!(error.contains("file/run") && error.contains("run.out_dir"), "{error}");
    }
}
