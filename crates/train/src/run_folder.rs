//! The folder of a run: created once, overwritten only on request, used by one process at a time.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use longwall_config::shell_quoted;
use longwall_data::{DataError, Tokenizer, TokenizerConfig, files};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{self, WeightsSelector};
use crate::config::{ConfigError, RunConfig};
use crate::metrics::ValidationRecord;

/// What training writes into a run folder; `--force` removes these and nothing else, the configuration last: a
/// folder without it is no run.
const OURS: [&str; 12] = [
    TOKENIZER_FILE,
    ORIGIN_FILE,
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

/// What a process may leave in the folder that was killed before the run began, besides temporary files.
const BEFORE_A_RUN: [&str; 3] = [LOCK_FILE, LOG_FILE, ORIGIN_FILE];

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
    /// A file of the run cannot be read.
    #[error("cannot read {}: {source}\n  hint: check its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that says how the run began or ended is damaged.
    #[error("{} is damaged: {reason}\n  hint: restore it from a copy, or remove it: training goes on without it", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The run's own configuration cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// A folder without a run.
#[derive(Debug, thiserror::Error)]
#[error("{}", no_run(path))]
pub struct NoRun {
    /// The folder.
    pub path: PathBuf,
}

fn no_run(path: &Path) -> String {
    let shown = path.display();
    if !checkpoint::is_at(path) {
        return format!(
            "{shown} holds no run: there is no config.toml in it\n  hint: give the folder of a run, for example runs/NAME"
        );
    }
    let run = match checkpoint::run_dir_of(path) {
        Some(run) if run.as_os_str().is_empty() => Path::new("."),
        run => run.unwrap_or(Path::new("runs/NAME")),
    };
    let run = run.display();
    format!(
        "{shown} is a checkpoint, and no run\n  hint: give the folder of its run, {run}; commands with --checkpoint take {shown} there"
    )
}

/// Whether the folder `path` holds a run. A checkpoint has a configuration, too.
pub(crate) fn is_run(path: &Path) -> bool {
    path.join(CONFIG_FILE).is_file() && !checkpoint::is_at(path)
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

/// The contents of `started_from.json`: the weights that a run started from, and what became of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The name of the run that they are of.
    pub run: String,
    /// The folder of its checkpoint.
    pub checkpoint: PathBuf,
    /// Finished steps of that run.
    pub step: u64,
    /// Tokens that it had seen.
    pub tokens: u64,
    /// Which weights of the checkpoint.
    pub weights: WeightsSelector,
    /// CRC-32C of their file, unless an earlier version wrote the checkpoint.
    pub crc32c: Option<u32>,
    /// How many tensors were taken over.
    pub taken: usize,
    /// As [`StartReport::new`](longwall_model::start::StartReport::new).
    pub new: Vec<String>,
    /// As [`StartReport::left_out`](longwall_model::start::StartReport::left_out).
    pub left_out: Vec<String>,
    /// As [`StartReport::changed`](longwall_model::start::StartReport::changed).
    pub changed: Vec<String>,
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
            let before = BEFORE_A_RUN.iter().any(|before| name == *before);
            taken |= !before && !files::is_temporary(&name);
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
        if !is_run(path) {
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
        self.clear_temporary();
        Ok(())
    }

    /// Removes files of a run that killed processes left half-written.
    fn clear_temporary(&self) {
        let is_ours = |name: &OsStr| {
            let name = name.to_string_lossy();
            OURS.iter()
                .any(|ours| name.strip_prefix(ours).is_some_and(|rest| rest.starts_with('.')))
        };
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if files::is_temporary(&name) && is_ours(&name) {
                // What stays is not read.
                let _ = fs::remove_file(entry.path());
            }
        }
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

    /// Records which weights a new run starts from; `None` for initial ones.
    ///
    /// # Errors
    /// When the file cannot be written or removed.
    pub fn record_origin(&self, origin: Option<&Origin>) -> Result<(), RunFolderError> {
        let Some(origin) = origin else {
            let path = self.path.join(ORIGIN_FILE);
            return match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    Err(RunFolderError::Io { path, source })
                }
                _ => Ok(()),
            };
        };
        let text = serde_json::to_vec_pretty(origin).expect("an origin has a JSON form");
        self.write(ORIGIN_FILE, &text)
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
/// The weights that the run started from.
const ORIGIN_FILE: &str = "started_from.json";

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
    read_json(path.join(FINISHED_FILE))
}

/// The weights that the run in `path` started from, if not initial ones.
///
/// # Errors
/// When the file exists but cannot be read.
pub fn origin(path: &Path) -> Result<Option<Origin>, RunFolderError> {
    read_json(path.join(ORIGIN_FILE))
}

/// The contents of a file, if it exists.
fn read_json<T: DeserializeOwned>(file: PathBuf) -> Result<Option<T>, RunFolderError> {
    match fs::read(&file) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| RunFolderError::Damaged { path: file, reason: error.to_string() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(RunFolderError::Read { path: file, source }),
    }
}

#[cfg(test)]
mod tests;
