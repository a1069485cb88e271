//! `longwall train --config FILE`, `longwall train --resume RUN`, on one GPU or several.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::ArgGroup;
use longwall_config::shell_quoted;
use longwall_data::{NoProgress, Progress};
use longwall_eval::{Discard, SuiteConfig};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{OnDevice, keep_kernels};
use longwall_model::{Positions, Precision};
use longwall_train::checkpoint::{CheckpointSelector, WeightsSelector};
use longwall_train::config::{DeviceChoice, RunConfig, RunTable, eval_weights};
use longwall_train::console::SilentConsole;
use longwall_train::device::{self, Compute, DeviceError};
use longwall_train::distributed::{
    Alone, Collective, Environment, Nccl, StoreOptions, World, nccl_version,
};
use longwall_train::meters::Meters;
use longwall_train::run::{Outcome, RunStart, Source, TrainOptions, train_as_rank};
use longwall_train::signals::StopFlag;
use longwall_train::{console, run_folder};

use super::eval::{NamedSuite, evaluate, suites_in_the_loop, suites_of};
use super::plot::draw_run;
use crate::context::{DeviceArg, open_run};
use crate::evaluator::LoopEvaluator;
use crate::numbers::whole;
use crate::output;
use crate::progress::DataProgress;
use crate::ranks::{self, Rank};

/// Arguments of `longwall train`.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("start").required(true).args(["config", "resume"])))]
pub struct Args {
    /// The run's configuration
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Continue the run in this folder from its newest checkpoint
    #[arg(long, value_name = "RUN", conflicts_with = "force")]
    resume: Option<PathBuf>,

    /// Start a new run from the weights of a run's newest checkpoint, or of a checkpoint (RUN/checkpoints/step-N),
    /// with a new optimiser, schedule and data; the model may only differ in its attention kind
    #[arg(long, value_name = "RUN|CHECKPOINT", conflicts_with = "resume")]
    from: Option<PathBuf>,

    /// Which weights to start from: `model`, or `ema`, their moving average
    #[arg(long, value_name = "WHICH", default_value_t, requires = "from")]
    weights: WeightsSelector,

    /// Override a key of the configuration, for example `--set train.lr=6e-4`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,

    /// The device, overriding run.device
    #[arg(long)]
    device: Option<DeviceArg>,

    /// Compare every byte of the shards with its checksum first; without this, a sample of blocks
    #[arg(long)]
    verify: bool,

    /// Delete the run that is in the run's folder, and start over
    #[arg(long)]
    force: bool,

    /// Train on this many GPUs of this machine, one process each: GPUs 0 to N−1 of those that are visible. Each step's
    /// rows are divided over them; the run is the same as on one GPU, up to rounding. On several machines, torchrun or
    /// Slurm starts the processes instead
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=u16::MAX.into()))]
    gpus: Option<u16>,

    /// Seconds after which a run on several GPUs ends if a step has not finished; the first step, also of each stage,
    /// has three times as long
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        value_parser = whole::<u32>(1..=u32::MAX.into())
    )]
    rank_timeout: u32,
}

/// The answer to the first Ctrl-C.
const STOPPING: &str = "stopping after this micro-batch, or after the validation or the evaluation's batch \
                        under way; then a checkpoint is written";

/// As [`STOPPING`], on several GPUs.
const STOPPING_RANKS: &str = "all GPUs stop after this step, or after the validation or the evaluation's batch under \
                              way; then a checkpoint is written";

/// Trains, then plots the losses and runs the evaluations that the configuration names.
pub fn run(args: Args) -> Result<()> {
    let (config, start, source) = configuration(&args)?;
    // Report a misspelt suite before hours of training.
    let suites = suites_of("eval", &config.eval, &source)?;
    let in_the_loop = suites_in_the_loop(&config, &source)?;
    let rank = ranks::of_environment(args.gpus)?;
    if let Some(gpus) = args.gpus.filter(|&gpus| gpus > 1) {
        return launch(gpus.into(), &config, &start);
    }
    let stop = match rank.as_ref().map(|rank| rank.world.is_first()) {
        None => StopFlag::install(STOPPING)?,
        Some(true) => StopFlag::install(STOPPING_RANKS)?,
        Some(false) => StopFlag::install_quietly()?,
    };
    let rank = match rank {
        Some(environment) => Some(connect(environment, &args, &config, &start, &stop)?),
        None => None,
    };
    let from = match &args.from {
        Some(path) => Some(Source::open(path, args.weights)?),
        None => None,
    };
    let compute = open_compute(&config, rank.as_ref())?;
    let is_first = rank.as_ref().is_none_or(|(environment, _)| environment.world.is_first());
    let start = (start, from);
    let (outcome, rank) =
        train_on(&compute, &config, start, rank, args.verify, &stop, (&in_the_loop, &suites))?;
    let stopped_in_loop = stop.is_raised() && !in_the_loop.is_empty();
    let say_goodbye = || rank.iter().for_each(|(_, store)| store.close());
    if !outcome.is_finished() || stopped_in_loop {
        // No evaluation follows; a rank that ends without a word has failed.
        say_goodbye();
    }
    if is_first {
        match draw_run(&outcome.run_dir) {
            Ok(plot) => tracing::info!("loss curves: {}", plot.display()),
            // Only a warning: a run stopped before its first step has nothing to draw.
            Err(error) => tracing::warn!("no loss curves: {error:#}"),
        }
    }
    if !outcome.is_finished() {
        bail!(
            "{} is trained up to step {} of {}, and was not evaluated\n  \
             hint: go on with longwall train --resume {}",
            outcome.run_dir.display(),
            outcome.step,
            outcome.total_steps,
            shell_quoted(&outcome.run_dir)
        );
    }
    if stopped_in_loop {
        bail!(
            "{} is trained; its last evaluations in the loop may not be finished\n  \
             hint: go on with longwall train --resume {}",
            outcome.run_dir.display(),
            shell_quoted(&outcome.run_dir)
        );
    }
    evaluate_after(&config, &outcome.run_dir, &suites, rank.as_ref(), &stop)?;
    say_goodbye();
    if is_first {
        print(format_args!("{}", next_commands(&config, &outcome.run_dir)));
    }
    Ok(())
}

/// The configuration, how the run starts, and the file that the configuration is from.
fn configuration(args: &Args) -> Result<(RunConfig, RunStart, PathBuf)> {
    let (mut config, start, source) = match (&args.resume, &args.config) {
        (Some(run), _) => {
            let config = run_folder::config_of(run, &args.sets)?;
            (config, RunStart::Resume(run.clone()), run.join("config.toml"))
        }
        (None, Some(path)) => {
            let config = RunConfig::load(path, &args.sets)?;
            let start = if args.force { RunStart::Force } else { RunStart::New };
            (config, start, path.clone())
        }
        (None, None) => unreachable!("the parser asks for one of them"),
    };
    if let Some(device) = args.device {
        config.run.device = device.into();
    }
    Ok((config, start, source))
}

/// Trains on several GPUs of this machine: starts this program once for each.
fn launch(gpus: usize, config: &RunConfig, start: &RunStart) -> Result<()> {
    let (size, rank) = (gpus, 0);
    if config.run.device == DeviceChoice::Cpu {
        return Err(DeviceError::RanksOnCpu { ranks: size }.into());
    }
    let remedy = "leave out --gpus; with --device cpu, one process trains on all cores";
    ranks::check_gpus(gpus, remedy)?;
    // Report a missing library once.
    nccl_version()?;
    for stage in config.timeline().stages() {
        stage.of_rank(World { rank, size })?;
    }
    let run_dir = match start {
        RunStart::Resume(run_dir) => run_dir.clone(),
        RunStart::New | RunStart::Force => config.run_dir(),
    };
    ranks::launch(gpus, Some(&run_dir))
}

/// Connects this rank with the others, which must have the same program, configuration and start.
fn connect(
    environment: Environment,
    args: &Args,
    config: &RunConfig,
    start: &RunStart,
    stop: &StopFlag,
) -> Result<Rank> {
    let start = match start {
        RunStart::New => "a new run".to_owned(),
        RunStart::Force => "a new run by --force".to_owned(),
        RunStart::Resume(run_dir) => format!("--resume {}", run_dir.display()),
    };
    let from = args.from.as_ref().map_or("(unset)".to_owned(), |from| from.display().to_string());
    let own = [("the start", start), ("--from", from), ("--weights", args.weights.to_string())];
    let own = own.map(|(name, value)| (name.to_owned(), value));
    let facts = own.into_iter().chain(config.leaves());
    let step = Duration::from_secs(args.rank_timeout.into());
    let options = StoreOptions { step, ..StoreOptions::default() };
    let store = ranks::connect(&environment, facts, options, stop)?;
    Ok((environment, store))
}

/// The device and precision of a run, or of a rank, which tells the others if it has none.
fn open_compute(config: &RunConfig, rank: Option<&Rank>) -> Result<Compute> {
    let RunTable { device, threads, precision, .. } = config.run;
    let opened = match rank {
        None => device::open(device, threads),
        Some((Environment { world, local_rank, .. }, _)) => {
            device::open_for_rank(device, threads, *world, *local_rank)
        }
    };
    let compute = opened.and_then(|device| Compute::for_training(device, precision));
    if let (Err(error), Some((_, store))) = (&compute, rank) {
        store.fail(&error.to_string());
    }
    Ok(compute?)
}

fn train_on(
    compute: &Compute,
    config: &RunConfig,
    (start, from): (RunStart, Option<Source>),
    rank: Option<Rank>,
    verify: bool,
    stop: &StopFlag,
    (in_the_loop, after): (&[NamedSuite], &[NamedSuite]),
) -> Result<(Outcome, Option<Rank>)> {
    struct Train<'a> {
        config: &'a RunConfig,
        start: RunStart,
        from: Option<Source>,
        rank: Option<Rank>,
        verify: bool,
        stop: &'a StopFlag,
        in_the_loop: &'a [NamedSuite],
        after: &'a [NamedSuite],
        meters: Meters,
        device_name: String,
        precision: Precision,
        compiles: bool,
    }
    impl OnDevice for Train<'_> {
        type Output = Result<(Outcome, Option<Rank>)>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let run_dir = match &self.start {
                RunStart::Resume(run_dir) => run_dir.clone(),
                RunStart::New | RunStart::Force => self.config.run_dir(),
            };
            // Before memory is measured: NCCL takes some.
            let nccl = match self.rank {
                Some((environment, store)) => {
                    let connect = || Nccl::connect(store, environment.local_rank);
                    let farewell = "the GPUs were not connected yet";
                    let nccl = self.stop.interruptible(farewell, connect)?;
                    Some((environment, nccl))
                }
                None => None,
            };
            let collective: &dyn Collective<B> = match &nccl {
                Some((_, nccl)) => nccl,
                None => &Alone,
            };
            let mut evaluator = LoopEvaluator::<B> {
                config: self.config,
                folder: run_dir.join("eval"),
                suites: self.in_the_loop,
                after: self.after,
                stop: self.stop,
                precision: self.precision,
                device: device.clone(),
                tokenizer: None,
                collective,
            };
            let world = collective.world();
            let memory = || self.meters.peak_memory();
            let shown = DataProgress::new(Some(self.stop.clone()));
            let progress: &dyn Progress = if world.is_first() { &shown } else { &NoProgress };
            let options = TrainOptions {
                start: self.start,
                from: self.from,
                verify: self.verify,
                stop: self.stop.clone(),
                progress,
                device_name: match world.size {
                    1 => self.device_name,
                    size => format!("{size} × {}", self.device_name),
                },
                precision: self.precision,
                compiles: self.compiles,
                available_memory: self.meters.available_memory(),
                peak_flops: self.meters.peak_flops(self.precision),
                memory: self.meters.has_memory().then_some(&memory),
            };
            let mut console = match world.is_first() {
                true => console::for_terminal(),
                false => Box::new(SilentConsole),
            };
            let (console, evaluator) = (console.as_mut(), &mut evaluator);
            let outcome =
                train_as_rank(self.config, &device, &options, collective, console, evaluator)?;
            let rank = nccl.map(|(environment, nccl)| (environment, nccl.into_store()));
            Ok((outcome, rank))
        }
    }
    let Compute { device, precision } = compute;
    let (meters, device_name, precision) = (Meters::new(device), device.to_string(), *precision);
    let compiles = keep_kernels(device).is_empty();
    compute.run(Train {
        config,
        start,
        from,
        rank,
        verify,
        stop,
        in_the_loop,
        after,
        meters,
        device_name,
        precision,
        compiles,
    })
}

/// Runs the suites of `[[eval]]` on the last checkpoint, each with the weights that its table names.
fn evaluate_after(
    config: &RunConfig,
    run_dir: &Path,
    suites: &[NamedSuite],
    rank: Option<&Rank>,
    stop: &StopFlag,
) -> Result<()> {
    let weights: Vec<WeightsSelector> = config.eval.iter().map(eval_weights).collect();
    let mut first = 0;
    // A model is loaded once for neighbours that read the same weights.
    for group in weights.chunk_by(|a, b| a == b) {
        let suites = &suites[first..first + group.len()];
        first += group.len();
        // Not finished results of this checkpoint with other options.
        let discard = Discard::Outdated;
        let reports = ranks::together(rank, |ranks| {
            let (device, environment) = (Some(config.run.device), rank.map(|(x, _)| x));
            let run = open_run(run_dir, CheckpointSelector::Latest, device, environment)?;
            evaluate(run.with_weights(group[0])?, suites, discard, ranks, stop)
        })?;
        for report in reports {
            print(format_args!("{report}\n"));
        }
    }
    Ok(())
}

/// Prints to stdout, which a run does not need: what cannot be printed is dropped, with a warning.
fn print(text: fmt::Arguments<'_>) {
    if let Err(error) = output::print(text) {
        tracing::warn!("not everything was printed: {error:#}");
    }
}

/// What to do with a trained run.
fn next_commands(config: &RunConfig, run_dir: &Path) -> String {
    let exe = shell_quoted(Path::new(&std::env::args().next().unwrap_or_default()));
    let run = shell_quoted(run_dir);
    let mut text = "\nNext, for example:\n".to_owned();
    let generated = generated_suites(config);
    match generated.as_deref() {
        Some(suites) => {
            for suite in suites {
                // The run has no text of its own to hide things in.
                let reads_text = SuiteConfig::text_readers().any(|name| name == suite);
                let files = if reads_text { " --text FILES" } else { "" };
                text += &format!("  {exe} eval {suite} --run {run}{files}\n");
            }
        }
        None => {
            text += &format!("  {exe} generate --run {run} --max-tokens 200\n");
            if config.model.positions == Positions::None {
                let sizes = "--lengths 500,1000 --trials 20";
                text += &format!("  {exe} eval passkey --run {run} {sizes}\n");
            }
        }
    }
    text + &format!("  {exe} plot {run} --out loss.png\n  {exe} report {run}\n")
}

/// The suites of the tasks that a run was trained on, by their common names; none if it was trained on text too.
fn generated_suites(config: &RunConfig) -> Option<Vec<String>> {
    let sources = &config.data.sources;
    let generated = sources.iter().all(|source| source.is_generated());
    let mut suites: Vec<String> =
        sources.iter().map(|source| source.kind().replace('_', "-")).collect();
    suites.retain(|suite| SuiteConfig::NAMES.contains(&suite.as_str()));
    suites.sort_unstable();
    suites.dedup();
    generated.then_some(suites)
}
