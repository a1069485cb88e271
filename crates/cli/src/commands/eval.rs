//! `longwall eval SUITE --run RUN`.

use std::path::Path;

use anyhow::Result;
use longwall_data::{Loader, NoProgress, Split, Tokenizer};
use longwall_eval::{EvalError, HeldOut, Report, RunContext, SuiteConfig, TrainedModel};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_train::config::RunConfig;
use longwall_train::signals::StopFlag;

use crate::context::{OpenRun, RunArgs};
use crate::progress::EvalProgress;

/// Arguments of `longwall eval`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// Throw away the results of an earlier evaluation with other settings
    #[arg(long, global = true)]
    force: bool,

    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    suite: SuiteConfig,
}

/// Runs one suite and prints its report.
pub fn run(args: Args) -> Result<()> {
    let run = args.run.open()?;
    let stop = StopFlag::install()?;
    let report = evaluate(run, std::slice::from_ref(&args.suite), args.force, &stop)?;
    for report in report {
        if args.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            println!("{report}");
        }
    }
    Ok(())
}

/// Runs suites on a checkpoint; their files go to `eval/SUITE/` in the run's folder.
pub fn evaluate(
    run: OpenRun,
    suites: &[SuiteConfig],
    force: bool,
    stop: &StopFlag,
) -> Result<Vec<Report>> {
    struct Evaluate<'a>(OpenRun, &'a [SuiteConfig], bool, &'a StopFlag);
    impl OnDevice for Evaluate<'_> {
        type Output = Result<Vec<Report>>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let Evaluate(run, suites, force, stop) = self;
            evaluate_on::<B>(&run, suites, force, stop, device)
        }
    }
    run.device.clone().run(Evaluate(run, suites, force, stop))
}

fn evaluate_on<B: OpBackend>(
    run: &OpenRun,
    suites: &[SuiteConfig],
    force: bool,
    stop: &StopFlag,
    device: B::Device,
) -> Result<Vec<Report>> {
    let config = &run.checkpoint.config;
    let model = run.load::<B>(&device)?;
    let mut model = TrainedModel::new(model, run.tokenizer.clone(), config.data.seq_len, device);
    let held_out = ValidationText { config, tokenizer: &run.tokenizer };
    let progress = EvalProgress::new();
    let evaluate = |suite: &SuiteConfig| {
        let context = RunContext {
            out_dir: run.dir.join("eval").join(suite.name()),
            run: config.run.name.clone(),
            checkpoint_step: Some(run.checkpoint.state.step),
            git_hash: git_hash(),
            force,
            held_out: Some(&held_out),
            progress: &progress,
            stop: Some(stop.as_atomic()),
        };
        Ok(longwall_eval::run(suite, &mut model, &context)?)
    };
    suites.iter().map(evaluate).collect()
}

/// The run's own validation split, as text to extrapolate on.
struct ValidationText<'a> {
    config: &'a RunConfig,
    tokenizer: &'a Tokenizer,
}

impl HeldOut for ValidationText<'_> {
    fn validation_tokens(&self, wanted: usize) -> Result<Vec<u32>, EvalError> {
        let mut data = self.config.data.clone();
        data.validation_tokens = (wanted as u64).max(data.seq_len as u64);
        let open = Loader::open(
            &data,
            self.tokenizer,
            self.config.run.seed,
            Split::Validation,
            &NoProgress,
        );
        let loader = open.map_err(|error| EvalError::model("the run's validation split", error))?;
        let rows = loader.validation_rows().unwrap_or(0) as usize;
        let rows = rows.min(wanted.div_ceil(data.seq_len));
        let batch = loader.batch(0, rows);
        Ok(batch.inputs.iter().take(wanted).map(|&token| token as u32).collect())
    }

    fn describe(&self) -> String {
        format!("the validation split of {}", self.config.run.name)
    }
}

/// The commit of the working tree in the current folder, if it is one.
fn git_hash() -> Option<String> {
    let mut git = std::process::Command::new("git");
    let output = git.args(["rev-parse", "HEAD"]).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Parses `[[eval]]` tables of a configuration file.
pub fn suites_of(tables: &[toml::Table], path: &Path) -> Result<Vec<SuiteConfig>> {
    let parse = |(at, table): (usize, &toml::Table)| {
        let suite: SuiteConfig = table.clone().try_into().map_err(|error: toml::de::Error| {
            anyhow::anyhow!(
                "{}: eval.{at}: {}\n  hint: allowed suites: {}",
                path.display(),
                error.message(),
                SuiteConfig::NAMES.join(", ")
            )
        })?;
        let mut problems = longwall_config::Problems::new();
        suite.validate(&mut problems);
        problems.into_result()?;
        Ok(suite)
    };
    tables.iter().enumerate().map(parse).collect()
}
