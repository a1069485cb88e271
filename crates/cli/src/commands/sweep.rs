//! `longwall sweep FILE`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwall_config::shell_quoted;
use longwall_train::signals::StopFlag;
use longwall_train::sweep::{Plan, SweepConfig, execute, launch_current_exe};

use super::eval::{suites_in_the_loop, suites_of};
use crate::comparison::draw_comparison;
use crate::progress::SweepProgress;

/// Arguments of `longwall sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// The sweep file
    file: PathBuf,

    /// Only list the runs, and which of them exist
    #[arg(long)]
    dry_run: bool,
}

/// The answer to the first Ctrl-C, which the run under way gets, too.
const STOPPING: &str = "stopping when the run under way has ended; what is finished is kept";

/// Runs the rest of a sweep, prints the table of results and draws the comparison.
pub fn run(args: Args) -> Result<()> {
    let sweep = SweepConfig::load(&args.file)?;
    // Report a misspelt option of an evaluation before hours of training.
    suites_of("eval", &sweep.eval, &args.file)?;
    let plan = Plan::new(sweep)?;
    for run in &plan.runs {
        suites_in_the_loop(&run.config, &plan.sweep.base)?;
    }
    if args.dry_run {
        print!("{}", plan.describe()?);
        return Ok(());
    }
    let stop = StopFlag::install(STOPPING)?;
    let results = execute(&plan, &mut launch_current_exe, &stop, &mut SweepProgress::new())?;
    println!("{}{}\n", results.table(), results.legend());
    println!("{}", plan.sweep.dir().join("results.csv").display());
    match draw_comparison(&plan, &results) {
        Ok(pictures) => pictures.iter().for_each(|picture| println!("{}", picture.display())),
        Err(error) => tracing::warn!("no comparison: {error:#}"),
    }
    if stop.is_raised() && !results.is_complete() {
        let file = shell_quoted(&args.file);
        bail!("the sweep is not finished\n  hint: go on with longwall sweep {file}");
    }
    let failures: Vec<_> = results.failures().map(|(run, why)| format!("  {run}: {why}")).collect();
    if !failures.is_empty() {
        bail!("{} runs failed:\n{}", failures.len(), failures.join("\n"));
    }
    Ok(())
}
