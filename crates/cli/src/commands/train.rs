//! `longwall train --config FILE`, `longwall train --resume RUN`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use longwall_config::shell_quoted;
use longwall_eval::SuiteConfig;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{OnDevice, keep_kernels};
use longwall_model::{Positions, Precision};
use longwall_train::checkpoint::{CheckpointSelector, WeightsSelector};
use longwall_train::config::{RunConfig, eval_weights};
use longwall_train::device::{self, Compute};
use longwall_train::meters::Meters;
use longwall_train::run::{Outcome, RunStart, Source, TrainOptions, train};
use longwall_train::signals::StopFlag;
use longwall_train::{console, run_folder};

use super::eval::{DiscardResults, NamedSuite, evaluate, suites_in_the_loop, suites_of};
use super::plot::draw_run;
use crate::context::{DeviceArg, open_run};
use crate::evaluator::LoopEvaluator;
use crate::progress::DataProgress;

/// Arguments of `longwall train`.
#[derive(clap::Args)]
pub struct Args {
    /// The run's configuration
    #[arg(long, value_name = "FILE", required_unless_present = "resume")]
    config: Option<PathBuf>,

    /// Continue the run in this folder from its newest checkpoint
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "force"])]
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
}

/// The answer to the first Ctrl-C.
const STOPPING: &str = "stopping after this micro-batch, or after the validation or the evaluation's batch \
                        under way; then a checkpoint is written";

/// Trains, then plots the losses and runs the evaluations that the configuration names.
pub fn run(args: Args) -> Result<()> {
    let (mut config, start, source) = match (args.resume, args.config) {
        (Some(run), _) => {
            let config = run_folder::config_of(&run, &args.sets)?;
            let source = run.join("config.toml");
            (config, RunStart::Resume(run), source)
        }
        (None, Some(path)) => {
            let config = RunConfig::load(&path, &args.sets)?;
            (config, if args.force { RunStart::Force } else { RunStart::New }, path)
        }
        (None, None) => unreachable!("the parser asks for one of them"),
    };
    if let Some(device) = args.device {
        config.run.device = device.into();
    }
    // Report a misspelt suite before hours of training.
    let suites = suites_of("eval", &config.eval, &source)?;
    let in_the_loop = suites_in_the_loop(&config, &source)?;
    let device = device::open(config.run.device, config.run.threads)?;
    let compute = Compute::for_training(device, config.run.precision)?;
    let stop = StopFlag::install(STOPPING)?;
    let from = match &args.from {
        Some(path) => Some(Source::open(path, args.weights)?),
        None => None,
    };
    let outcome = train_on(&compute, &config, (start, from), args.verify, &stop, &in_the_loop)?;
    match draw_run(&outcome.run_dir) {
        Ok(plot) => tracing::info!("loss curves: {}", plot.display()),
        // Only a warning: a run stopped before its first step has nothing to draw.
        Err(error) => tracing::warn!("no loss curves: {error:#}"),
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
    if stop.is_raised() && !in_the_loop.is_empty() {
        bail!(
            "{} is trained; its last evaluations in the loop may not be finished\n  \
             hint: go on with longwall train --resume {}",
            outcome.run_dir.display(),
            shell_quoted(&outcome.run_dir)
        );
    }
    evaluate_after(&config, &outcome.run_dir, &suites, &stop)?;
    print_next(&config, &outcome.run_dir);
    Ok(())
}

fn train_on(
    compute: &Compute,
    config: &RunConfig,
    (start, from): (RunStart, Option<Source>),
    verify: bool,
    stop: &StopFlag,
    suites: &[NamedSuite],
) -> Result<Outcome> {
    struct Train<'a> {
        config: &'a RunConfig,
        start: RunStart,
        from: Option<Source>,
        verify: bool,
        stop: &'a StopFlag,
        suites: &'a [NamedSuite],
        meters: Meters,
        device_name: String,
        precision: Precision,
        compiles: bool,
    }
    impl OnDevice for Train<'_> {
        type Output = Result<Outcome>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let run_dir = match &self.start {
                RunStart::Resume(run_dir) => run_dir.clone(),
                RunStart::New | RunStart::Force => self.config.run_dir(),
            };
            let mut evaluator = LoopEvaluator::<B> {
                config: self.config,
                folder: run_dir.join("eval"),
                suites: self.suites,
                stop: self.stop,
                precision: self.precision,
                device: device.clone(),
                tokenizer: None,
            };
            let memory = || self.meters.peak_memory();
            let options = TrainOptions {
                start: self.start,
                from: self.from,
                verify: self.verify,
                stop: self.stop.clone(),
                progress: &DataProgress::new(Some(self.stop.clone())),
                device_name: self.device_name,
                precision: self.precision,
                compiles: self.compiles,
                available_memory: self.meters.available_memory(),
                peak_flops: self.meters.peak_flops(self.precision),
                memory: self.meters.has_memory().then_some(&memory),
            };
            let mut console = console::for_terminal();
            Ok(train::<B>(self.config, &device, &options, console.as_mut(), &mut evaluator)?)
        }
    }
    let Compute { device, precision } = compute;
    let (meters, device_name, precision) = (Meters::new(device), device.to_string(), *precision);
    let compiles = keep_kernels(device).is_empty();
    compute.run(Train {
        config,
        start,
        from,
        verify,
        stop,
        suites,
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
    stop: &StopFlag,
) -> Result<()> {
    let weights: Vec<WeightsSelector> = config.eval.iter().map(eval_weights).collect();
    let mut first = 0;
    // A model is loaded once for neighbours that read the same weights.
    for group in weights.chunk_by(|a, b| a == b) {
        let suites = &suites[first..first + group.len()];
        first += group.len();
        let run = open_run(run_dir, CheckpointSelector::Latest, Some(config.run.device))?;
        let run = run.with_weights(group[0])?;
        // Replaces results of an earlier last checkpoint, if the run was extended.
        for report in evaluate(run, suites, DiscardResults::OtherCheckpoints, stop)? {
            println!("{report}");
        }
    }
    Ok(())
}

fn print_next(config: &RunConfig, run_dir: &Path) {
    let exe = shell_quoted(Path::new(&std::env::args().next().unwrap_or_default()));
    let run = shell_quoted(run_dir);
    println!("\nNext, for example:");
    let generated = generated_suites(config);
    match generated.as_deref() {
        Some(suites) => {
            for suite in suites {
                println!("  {exe} eval {suite} --run {run}");
            }
        }
        None => {
            println!("  {exe} generate --run {run} --max-tokens 200");
            if config.model.positions == Positions::None {
                println!("  {exe} eval passkey --run {run} --lengths 500,1000 --trials 20");
            }
        }
    }
    println!("  {exe} plot {run} --out loss.png");
    println!("  {exe} report {run}");
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
