//! The check of a run's files.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointFolder, CheckpointSelector, TokenizerIdentity,
};
use crate::config::RunConfig;
use crate::metrics;
use crate::run_folder::{self, NoRun, RunFolderError, load_tokenizer};

/// One file of a run. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedFile {
    /// The file, or the folder of a checkpoint.
    pub path: PathBuf,
    /// What is wrong with it, if anything is.
    pub problem: Option<String>,
}

impl VerifiedFile {
    fn new<T, E: Display>(path: PathBuf, result: Result<T, E>) -> Self {
        VerifiedFile { path, problem: result.err().map(|error| error.to_string()) }
    }
}

impl Display for VerifiedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.problem {
            None => write!(f, "{}: ok", self.path.display()),
            Some(problem) => {
                let path = self.path.display().to_string();
                // Without the hint, and without the path that many messages begin with.
                let problem = problem.lines().next().unwrap_or_default();
                let rest = problem.strip_prefix(&path).filter(|rest| rest.starts_with([' ', ':']));
                let rest = rest.unwrap_or(problem).trim_start_matches(':').trim();
                write!(f, "{path}: {rest}")
            }
        }
    }
}

/// Checks a run: that its configuration, metrics and results can be read, that every file of its checkpoints
/// is as it was written, and that its metrics and its tokenizer are those of the newest sound checkpoint.
///
/// # Errors
/// When `run_dir` holds no run, or its checkpoints cannot be listed. Damaged files are part of the result.
pub fn verify_run(run_dir: &Path) -> Result<Vec<VerifiedFile>, VerifyError> {
    if !run_folder::is_run(run_dir) {
        return Err(RunFolderError::from(NoRun { path: run_dir.to_owned() }).into());
    }
    let config_path = run_dir.join("config.toml");
    let config = run_folder::config_of(run_dir, &[]);
    let metrics_path = run_dir.join("metrics.jsonl");
    let metrics = metrics::read(&metrics_path).map(drop).map_err(|error| error.to_string());
    let mut files = vec![VerifiedFile::new(config_path, config.as_ref())];
    let finished = run_folder::finished(run_dir);
    if !matches!(finished, Ok(None)) {
        files.push(VerifiedFile::new(run_dir.join("finished.json"), finished));
    }
    let folder = CheckpointFolder::new(run_dir);
    let mut newest_sound = None;
    for step in folder.steps()? {
        let checked = folder.verify(step);
        let is_sound = match &checked {
            Ok(files) => files.iter().all(|(_, error)| error.is_none()),
            // Nothing is known against it.
            Err(error) => matches!(error, CheckpointError::NoChecksums { .. }),
        };
        newest_sound = is_sound.then_some(step).or(newest_sound);
        match checked {
            Ok(checked) => files.extend(checked.into_iter().map(|(path, error)| {
                let problem = error.map(|error| error.to_string());
                VerifiedFile { path, problem }
            })),
            Err(error) => files.push(VerifiedFile::new(folder.step_dir(step), Err::<(), _>(error))),
        }
    }
    if let Err(error) = folder.best() {
        files.push(VerifiedFile::new(folder.best_file(), Err::<(), _>(error)));
    }
    // Opening a damaged one would verify all others again, to name one that is sound.
    let newest = newest_sound
        .and_then(|step| Checkpoint::open(run_dir, CheckpointSelector::Step(step)).ok());
    let whole = |checkpoint: &Checkpoint| check_length(&metrics_path, checkpoint);
    let metrics = metrics.and_then(|()| newest.as_ref().map_or(Ok(()), whole));
    files.insert(1, VerifiedFile::new(metrics_path, metrics));
    if let (Ok(config), Some(checkpoint)) = (config, newest) {
        files.extend(check_tokenizer(run_dir, &config, &checkpoint));
    }
    Ok(files)
}

/// Whether the metrics are as long as they were at the checkpoint, or longer.
fn check_length(metrics: &Path, checkpoint: &Checkpoint) -> Result<(), String> {
    let (had, step) = (checkpoint.state.metrics_bytes, checkpoint.state.step);
    match metrics.metadata().map_or(0, |metadata| metadata.len()) {
        has if has < had => Err(format!("has {has} bytes, but had {had} at step {step}")),
        _ => Ok(()),
    }
}

/// Compares the run's tokenizer with that of a checkpoint. One that is built in has no file.
fn check_tokenizer(
    run_dir: &Path,
    config: &RunConfig,
    checkpoint: &Checkpoint,
) -> Option<VerifiedFile> {
    let tokenizer = load_tokenizer(run_dir, &config.tokenizer)
        .map_err(|error| error.to_string())
        .and_then(|tokenizer| {
            let ours = TokenizerIdentity::of(&tokenizer);
            checkpoint.check_tokenizer(&ours).map_err(|error| error.to_string())
        });
    let file = run_dir.join("tokenizer.json");
    (file.is_file() || tokenizer.is_err()).then(|| VerifiedFile::new(file, tokenizer))
}

/// Why a run cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// There is no run.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
    /// Its checkpoints cannot be listed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
