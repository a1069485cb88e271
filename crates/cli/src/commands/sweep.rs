//! `longwall sweep FILE`.

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwall_config::shell_quoted;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{OnDevice, gpus as gpus_here};
use longwall_train::console::duration;
use longwall_train::device::{self, Compute};
use longwall_train::meters::Meters;
use longwall_train::peak;
use longwall_train::signals::StopFlag;
use longwall_train::sweep::{
    Machine, Plan, Rate, Slot, Status, SweepConfig, execute, execute_one, launch_current_exe,
};

use super::eval::{suites_in_the_loop, suites_of};
use crate::comparison::draw_comparison;
use crate::numbers::whole;
use crate::output::{outln, print};
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
    #[arg(long, value_name = "INDEX", value_parser = whole::<usize>(0..=u64::MAX), conflicts_with = "dry_run")]
    only: Option<usize>,

    /// GPUs to use at the same time, as `0,2`, or `all`; by default the first
    #[arg(long, value_name = "IDS", value_parser = Gpus::parse, conflicts_with_all = ["slurm", "only"])]
    gpus: Option<Gpus>,

    /// Runs at a time, on each GPU or on the CPU
    #[arg(
        long,
        default_value_t = 1,
        value_parser = whole::<u16>(1..=u16::MAX.into()),
        conflicts_with_all = ["slurm", "only"]
    )]
    jobs: u16,

    /// Only write the script of a Slurm job array that does the runs, one task each
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "only"])]
    slurm: Option<PathBuf>,
}

/// The answer to the first Ctrl-C, which the runs under way get, too.
const STOPPING: &str = "stopping when the runs under way have ended; what is finished is kept";

/// The variable by which a process is shown some GPUs only.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The choice of GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Gpus {
    All,
    /// Numbers among those that this process sees, all different.
    Some(Vec<usize>),
}

impl Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Gpus::All => f.write_str("all"),
            Gpus::Some(ids) => {
                let ids: Vec<_> = ids.iter().map(usize::to_string).collect();
                f.write_str(&ids.join(","))
            }
        }
    }
}

impl Gpus {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Gpus::All);
        }
        let ids: Result<Vec<usize>, _> = text.split(',').map(str::parse).collect();
        let ids =
            ids.map_err(|_| "expected numbers with commas between them, or \"all\"".to_owned())?;
        match ids.iter().enumerate().find(|(at, id)| ids[..*at].contains(id)) {
            Some((_, id)) => {
                Err(format!("GPU {id} is listed twice; for several runs on it, use --jobs"))
            }
            None => Ok(Gpus::Some(ids)),
        }
    }

    /// What each GPU is called in [`VISIBLE`], of `count` that this process sees and that `visible`, its own value
    /// of the variable, names.
    fn names(&self, count: usize, visible: Option<&str>) -> Result<Vec<String>> {
        let all = (0..count).collect();
        let ids = match self {
            Gpus::All => &all,
            Gpus::Some(ids) => ids,
        };
        if let Some(id) = ids.iter().find(|&&id| id >= count) {
            bail!("--gpus has {id}; allowed: 0 to {}, the GPUs that the driver shows", count - 1);
        }
        let visible: Option<Vec<&str>> =
            visible.map(|list| list.split(',').map(str::trim).collect());
        let name = |id: usize| match visible.as_ref().and_then(|names| names.get(id)) {
            Some(name) => (*name).to_owned(),
            None => id.to_string(),
        };
        Ok(ids.iter().map(|&id| name(id)).collect())
    }
}

/// The places for runs: `jobs` on each chosen GPU, or on the device of the runs' configurations.
fn slots(gpus: Option<&Gpus>, jobs: u16) -> Result<Vec<Slot>> {
    let variable = |name: &str, value| Slot { environment: vec![(name.to_owned(), value)] };
    let on_each: Vec<Slot> = match gpus {
        Some(gpus) => {
            let count = gpus_here().map_err(|why| {
                let hint = "leave out --gpus; --jobs N does N runs at a time on the CPU";
                anyhow::anyhow!("--gpus is {gpus}, but {why}\n  hint: {hint}")
            })?;
            let names = gpus.names(count, std::env::var(VISIBLE).ok().as_deref())?;
            names.into_iter().map(|name| variable(VISIBLE, name)).collect()
        }
        // Several runs share the cores, unless run.threads says how many each one takes.
        None if jobs > 1 => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = (cores / usize::from(jobs)).max(1);
            vec![variable("RAYON_NUM_THREADS", threads.to_string())]
        }
        None => vec![Slot::default()],
    };
    Ok((0..jobs).flat_map(|_| on_each.clone()).collect())
}

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
        return dry_run(&plan, slots(args.gpus.as_ref(), args.jobs)?.len());
    }
    if let Some(script) = &args.slurm {
        return write_slurm(&plan, &args.file, script);
    }
    let stop = StopFlag::install(STOPPING)?;
    if let Some(at) = args.only {
        return do_one(&plan, at, &stop);
    }
    let slots = slots(args.gpus.as_ref(), args.jobs)?;
    let results = execute(&plan, &slots, &launch_current_exe, &stop, &mut SweepProgress::new())?;
    // Before the table, whose reader may close stdout.
    let pictures = draw_comparison(&plan, &results);
    outln!("{}{}\n", results.table(), results.legend())?;
    outln!("{}", plan.sweep.dir().join("results.csv").display())?;
    match pictures {
        Ok(pictures) => pictures.iter().try_for_each(|picture| outln!("{}", picture.display()))?,
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

/// Lists the runs with what they are estimated to take, `slots` at a time.
fn dry_run(plan: &Plan, slots: usize) -> Result<()> {
    print(format_args!("{}", plan.describe()?))?;
    let Some(first) = plan.runs.first() else { return Ok(()) };
    let run = &first.config.run;
    let device = device::open(run.device, run.threads);
    let compute = match device.and_then(|device| Compute::for_training(device, run.precision)) {
        Ok(compute) => compute,
        Err(error) => {
            outln!("\nnot estimated, as this is not the machine for it: {error}")?;
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
    outln!("\nestimated on this machine ({}):", compute.device)?;
    for (at, (run, estimate)) in plan.runs.iter().zip(&estimates).enumerate() {
        let time = estimate.seconds.map_or("unknown time".to_owned(), duration);
        let done = if estimate.finished { ", finished" } else { "" };
        let memory = estimate.memory_bytes as f64 / 1e9;
        outln!("{at} {}: {time}, {memory:.2} GB{done}", run.name)?;
    }
    let left = estimates.iter().filter(|estimate| !estimate.finished);
    let total: Option<f64> = left.map(|estimate| estimate.seconds).sum();
    let total = total.map(|seconds| seconds / slots as f64);
    let gflops = |rate: f64| format!("{:.0} GFLOP/s", rate / 1e9);
    match (total, rate) {
        (Some(total), Rate::Measured(rate)) => outln!(
            "training left: {}, at the {} of the runs that are finished",
            duration(total),
            gflops(rate)
        ),
        (Some(total), Rate::Expected(rate)) => outln!(
            "training left: {}, at {}, 40 % of the machine's peak",
            duration(total),
            gflops(rate)
        ),
        _ => outln!("training left: unknown, because the device's peak rate is"),
    }
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
        return outln!("all runs are finished: there is nothing to submit");
    };
    std::fs::create_dir_all(plan.sweep.dir())?;
    std::fs::write(script, text).map_err(|error| {
        anyhow::anyhow!(
            "cannot write --slurm {}: {error}\n  hint: choose another file",
            script.display()
        )
    })?;
    outln!("{}", script.display())
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
    let status = execute_one(plan, at, &launch_current_exe, stop, &mut SweepProgress::new());
    let name = &plan.runs[at].name;
    match status {
        Status::Finished => outln!("{name}: finished"),
        Status::Pending => bail!("{name} is not finished\n  hint: run the same command again"),
        Status::Failed(reason) => bail!("{name} failed: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_numbers_among_those_that_are_visible() {
        let names = |text: &str, visible| Gpus::parse(text).unwrap().names(4, visible).unwrap();
        assert_eq!(names("all", None), ["0", "1", "2", "3"]);
        assert_eq!(names("3,1", None), ["3", "1"]);
        assert_eq!(names("3,1", Some("4,GPU-ab, 6,7")), ["7", "GPU-ab"]);
        let error = Gpus::Some(vec![0, 4]).names(4, None).unwrap_err().to_string();
        assert_eq!(error, "--gpus has 4; allowed: 0 to 3, the GPUs that the driver shows");
        for bad in ["", "one", "0;1", "-1", "0,"] {
            assert!(Gpus::parse(bad).unwrap_err().starts_with("expected numbers"), "{bad}");
        }
        assert!(Gpus::parse("0,1,0").unwrap_err().starts_with("GPU 0 is listed twice"));
    }

    #[test]
    fn several_runs_share_the_cores() {
        assert_eq!(slots(None, 1).unwrap(), [Slot::default()]);
        let three = slots(None, 3).unwrap();
        assert_eq!(three.len(), 3);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / 3).max(1).to_string();
        assert_eq!(three[2].environment, [("RAYON_NUM_THREADS".to_owned(), threads)]);
    }
}
