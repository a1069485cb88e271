//! Why a report cannot be written.

use std::path::PathBuf;

use longwall_eval::EvalError;
use longwall_train::metrics::MetricsError;
use longwall_train::run_folder::RunFolderError;

/// Why a report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A folder without runs.
    #[error("{} holds no run: there is no config.toml in it, nor in its folders, two levels deep\n  hint: give folders of runs or sweeps, for example runs/NAME", path.display())]
    NoRuns {
        /// The folder.
        path: PathBuf,
    },
    /// A file or folder cannot be read.
    #[error("cannot read {}: {source}\n  hint: check that the path exists and that you may read it", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The page cannot be written.
    #[error("cannot write {}: {source}\n  hint: check that the folder exists and may be written, or choose another --output", path.display())]
    Write {
        /// The page.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The page cannot be served.
    #[error(
        "cannot serve the report on 127.0.0.1:{port}: {reason}\n  hint: choose another --port, or 0 for any that is free"
    )]
    Serve {
        /// The port.
        port: u16,
        /// What the system said.
        reason: String,
    },
    /// The configuration or the results of a run.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
    /// The metrics of a run.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// An evaluation.
    #[error(transparent)]
    Eval(#[from] EvalError),
}

impl ReportError {
    pub(crate) fn read(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> ReportError {
        let path = path.to_owned();
        move |source| ReportError::Read { path, source }
    }
}
