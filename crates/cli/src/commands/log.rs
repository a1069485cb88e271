//! `longwall log export RUN`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwall_train::scalars::{export_csv, export_tensorboard};

use crate::output::outln;

/// What to do with the metrics.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Write the scalars of metrics.jsonl as CSV or as TensorBoard events
    Export(ExportArgs),
}

/// Arguments of `longwall log export`.
#[derive(clap::Args)]
pub struct ExportArgs {
    /// The run's folder
    run: PathBuf,

    /// The CSV file: one row per step, one column per scalar
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// The folder for a TensorBoard event file
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

/// Writes the files and prints their names.
pub fn run(command: Command) -> Result<()> {
    let Command::Export(ExportArgs { run, csv, tensorboard }) = command;
    if csv.is_none() && tensorboard.is_none() {
        bail!("no format was given\n  hint: add --csv FILE, --tensorboard DIR, or both");
    }
    if let Some(path) = csv {
        export_csv(&run, &path)?;
        outln!("{}", path.display())?;
    }
    if let Some(path) = tensorboard {
        export_tensorboard(&run, &path)?;
        outln!("{}", path.display())?;
    }
    Ok(())
}
