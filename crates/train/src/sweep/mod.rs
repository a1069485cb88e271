//! Sweeps: a base configuration, axes over any of its keys, seeds; one run after another, or several at a time.
//!
//! ```toml
//! base = "configs/small.toml"
//! seeds = [0, 1, 2]
//! set = { "train.tokens" = "5M" }
//!
//! [[axes]]
//! key = "model.attention"
//! values = [{ kind = "rope" }, { kind = "fox" }]
//!
//! [[axes]]
//! key = "train.lr"
//! values = [3e-4, 1e-3]
//!
//! [[eval]]
//! suite = "passkey"
//! lengths = [500, 1000]
//! ```
//!
//! An axis may also vary several keys together (`zip`), draw random values (`draw`), and apply only to some values of
//! earlier axes (`when`); `[[exclude]]` leaves out combinations.
//!
//! Every run is a separate process, so that a crash ends only that run. The run folders show what is
//! finished: a sweep that is started again does only what is missing.

mod axis;
mod config;
mod estimate;
mod execute;
mod figures;
mod plan;
mod results;
mod slurm;
mod watch;

use std::path::PathBuf;

pub use axis::{Axis, Draw, Point, Scale};
pub use config::SweepConfig;
pub use estimate::{EstimateError, Machine, Rate, RunEstimate};
pub use execute::{Job, JobStatus, Launch, Slot, execute, execute_one, launch_current_exe};
pub use figures::{Comparison, Figure, VariantFigure};
pub use plan::{Plan, PlannedRun};
pub use results::{RunResult, Status, SweepResults};
pub use watch::{SweepConsole, SweepStep};

use crate::config::ConfigError;
use crate::run_folder::RunFolderError;

/// Why a sweep cannot be planned or run.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The sweep file cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A combination of the axes gives an invalid configuration.
    #[error("the run {run} of the sweep cannot be configured: {source}")]
    Run {
        /// The run's name.
        run: String,
        /// What is wrong.
        source: ConfigError,
    },
    /// A run folder cannot be read.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
    /// The results cannot be written.
    #[error("cannot write {}: {source}\n  hint: check the permissions of the folder and the room on the disk", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests;
