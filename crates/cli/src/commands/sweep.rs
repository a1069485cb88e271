//! `longwall sweep FILE`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwall_config::shell_quoted;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_train::console::duration;
use longwall_train::device::{self, Compute};
use longwall_train::meters::Meters;
use longwall_train::peak;
use longwall_train::signals::StopFlag;
use longwall_train::sweep::{
    Machine, Plan, Rate, Status, SweepConfig, execute, execute_one, launch_current_exe,
};

use super::eval::{suites_in_the_loop, suites_of};
use crate::comparison::draw_comparison;
use crate::progress::SweepProgress;

/// Arguments of `longwall sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// The sweep file
    file: PathBuf,

    /// Only list the runs, which of them exist, and what they are estimated to take on this machine
    #[arg(long)]
    dry_run: bool,

    /// Only do the run with this number in the list of --dry-run, from 0; the table and the pictures are left to a
    /// later call without it
    #[arg(long, value_name = "INDEX", conflicts_with = "dry_run")]
    only: Option<usize>,

    /// Only write the script of a Slurm job array that does the runs, one task each
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "only"])]
    slurm: Option<PathBuf>,
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
        return dry_run(&plan);
    }
    if let Some(script) = &args.slurm {
        return write_slurm(&plan, &args.file, script);
    }
    let stop = StopFlag::install(STOPPING)?;
    if let Some(at) = args.only {
        return do_one(&plan, at, &stop);
    }
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

/// Lists the runs with what they are estimated to take.
fn dry_run(plan: &Plan) -> Result<()> {
    print!("{}", plan.describe()?);
    let Some(first) = plan.runs.first() else { return Ok(()) };
    let run = &first.config.run;
    let device = device::open(run.device, run.threads);
    let compute = match device.and_then(|device| Compute::for_training(device, run.precision)) {
        Ok(compute) => compute,
        Err(error) => {
            println!("\nnot estimated, as this is not the machine for it: {error}");
            return Ok(());
        }
    };
    let meters = Meters::new(&compute.device);
    let known = meters.peak_flops(compute.precision);
    let (device, measured) = compute.run(Measure { known });
    let machine = Machine {
        device,
        precision: compute.precision,
        available_memory: meters.available_memory(),
        peak_flops: measured,
    };
    let (estimates, rate) = plan.estimates(&machine)?;
    println!("\nestimated on this machine ({}):", compute.device);
    for (at, (run, estimate)) in plan.runs.iter().zip(&estimates).enumerate() {
        let time = estimate.seconds.map_or("unknown time".to_owned(), duration);
        let done = if estimate.finished { ", finished" } else { "" };
        let memory = estimate.memory_bytes as f64 / 1e9;
        println!("{at} {}: {time}, {memory:.2} GB{done}", run.name);
    }
    let left = estimates.iter().filter(|estimate| !estimate.finished);
    let total: Option<f64> = left.map(|estimate| estimate.seconds).sum();
    let gflops = |rate: f64| format!("{:.0} GFLOP/s", rate / 1e9);
    match (total, rate) {
        (Some(total), Rate::Measured(rate)) => println!(
            "training left: {}, at the {} of the runs that are finished",
            duration(total),
            gflops(rate)
        ),
        (Some(total), Rate::Expected(rate)) => println!(
            "training left: {}, at {}, 40 % of the machine's peak",
            duration(total),
            gflops(rate)
        ),
        _ => println!("training left: unknown, because the device's peak rate is"),
    }
    Ok(())
}

/// Finds the kind of a device and, on the CPU, its peak rate.
struct Measure {
    known: Option<f64>,
}

impl OnDevice for Measure {
    type Output = (longwall_kernels::device::DeviceKind, Option<f64>);

    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
        let kind = B::device_kind();
        let on_cpu = kind == longwall_kernels::device::DeviceKind::Cpu;
        (kind, self.known.or_else(|| on_cpu.then(|| peak::of_this_machine::<B>(&device))))
    }
}

/// Writes the job array's script, and the folder that its logs go to.
fn write_slurm(plan: &Plan, file: &Path, script: &Path) -> Result<()> {
    let (exe, folder) = (std::env::current_exe()?, std::env::current_dir()?);
    let Some(text) = plan.slurm_script(file, &exe, &folder)? else {
        println!("all runs are finished: there is nothing to submit");
        return Ok(());
    };
    std::fs::create_dir_all(plan.sweep.dir())?;
    std::fs::write(script, text).map_err(|error| {
        anyhow::anyhow!(
            "cannot write --slurm {}: {error}\n  hint: choose another file",
            script.display()
        )
    })?;
    println!("{}", script.display());
    Ok(())
}

/// Does one run.
fn do_one(plan: &Plan, at: usize, stop: &StopFlag) -> Result<()> {
    let count = plan.runs.len();
    if at >= count {
        bail!(
            "--only is {at}; allowed: 0 to {}, the numbers of the {count} runs\n  hint: --dry-run lists them",
            count.saturating_sub(1)
        );
    }
    let status = execute_one(plan, at, &mut launch_current_exe, stop, &mut SweepProgress::new());
    let name = &plan.runs[at].name;
    match status {
        Status::Finished => {
            println!("{name}: finished");
            Ok(())
        }
        Status::Pending => bail!("{name} is not finished\n  hint: run the same command again"),
        Status::Failed(reason) => bail!("{name} failed: {reason}"),
    }
}
