//! `longwall eval SUITE --run RUN`.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use longwall_config::{Problems, culprit};
use longwall_data::{Loader, Split, Tokenizer};
use longwall_eval::memory::CallMemory;
use longwall_eval::{
    EvalError, HeldOut, Report, RunContext, StopRequest, SuiteConfig, TrainedModel, write_index,
};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_train::config::{FOLDER_NAME, RunConfig, is_folder_name};
use longwall_train::signals::StopFlag;

use crate::context::{OpenRun, RunArgs};
use crate::progress::{DataProgress, EvalProgress};

/// Arguments of `longwall eval`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// Discard the results of an earlier evaluation with other settings
    #[arg(long, global = true)]
    force: bool,

    /// Name of the results' folder in RUN/eval, to keep several evaluations of one suite [default: the
    /// suite's name]
    #[arg(long, global = true, value_name = "NAME", value_parser = folder_name)]
    out: Option<String>,

    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    suite: SuiteConfig,
}

/// Runs one suite and prints its report.
pub fn run(args: Args) -> Result<()> {
    if let Some(name) = args.out.as_deref() {
        check_out("--out", name, &args.suite)?;
    }
    let run = args.run.open()?;
    let stop = StopFlag::install("stopping after the file being written")?;
    let replace = if args.force { DiscardResults::All } else { DiscardResults::Nothing };
    let suites = [(args.suite, args.out)];
    let report = evaluate(run, &suites, replace, &stop)?;
    for report in report {
        if args.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        } else {
            println!("{report}");
        }
    }
    Ok(())
}

/// Rejects the folder of another suite as the place of `suite`'s results; `key` is where it was given.
fn check_out(key: &str, name: &str, suite: &SuiteConfig) -> Result<()> {
    if name != suite.name() && SuiteConfig::NAMES.contains(&name) {
        bail!(
            "{key} is {name}, the folder of another suite; allowed: any name but {}\n  hint: \
             choose a name such as {}-long",
            SuiteConfig::NAMES.join(", "),
            suite.name()
        );
    }
    Ok(())
}

/// Parses a folder's name, which stays within the folder it is for.
fn folder_name(name: &str) -> Result<String, String> {
    match is_folder_name(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("allowed: {FOLDER_NAME}, for example passkey-long")),
    }
}

/// A suite, and the name of its results' folder if it is not the suite's own.
pub type NamedSuite = (SuiteConfig, Option<String>);

/// Which results of an earlier evaluation are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardResults {
    /// None: other settings are an error.
    Nothing,
    /// Those of other checkpoints of the run.
    OtherCheckpoints,
    /// All.
    All,
}

/// Runs suites on a checkpoint; their files go to `eval/SUITE/` or `eval/NAME/` in the run's folder, and
/// `eval/index.json` lists them.
pub fn evaluate(
    run: OpenRun,
    suites: &[NamedSuite],
    replace: DiscardResults,
    stop: &StopFlag,
) -> Result<Vec<Report>> {
    struct Evaluate<'a>(OpenRun, &'a [NamedSuite], DiscardResults, &'a StopFlag);
    impl OnDevice for Evaluate<'_> {
        type Output = Result<Vec<Report>>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let Evaluate(run, suites, replace, stop) = self;
            evaluate_on::<B>(&run, suites, replace, stop, device)
        }
    }
    run.compute.clone().run(Evaluate(run, suites, replace, stop))
}

/// A [`StopFlag`] as evaluations see it.
struct StopEvaluation<'a>(&'a StopFlag);

impl StopRequest for StopEvaluation<'_> {
    fn is_raised(&self) -> bool {
        self.0.is_raised()
    }

    fn interruptible(&self, stopped: &str, work: &mut dyn FnMut()) {
        self.0.interruptible(stopped, work);
    }
}

fn evaluate_on<B: OpBackend>(
    run: &OpenRun,
    suites: &[NamedSuite],
    replace: DiscardResults,
    stop: &StopFlag,
    device: B::Device,
) -> Result<Vec<Report>> {
    let config = &run.checkpoint.config;
    let loading = "the model was being loaded\n  hint: run the same command again";
    let model = stop.interruptible(loading, || run.load::<B>(&device))?;
    let memory = CallMemory::new(&config.model, run.compute.precision);
    let (tokenizer, seq_len) = (run.tokenizer.clone(), config.data.seq_len);
    let mut model = TrainedModel::new(model, tokenizer, seq_len, memory, device);
    let held_out = ValidationText { config, tokenizer: &run.tokenizer, stop };
    let progress = EvalProgress::new();
    let stop = StopEvaluation(stop);
    let folder = run.dir.join("eval");
    let evaluate = |(suite, name): &NamedSuite| {
        let out_dir = folder.join(name.as_deref().unwrap_or(suite.name()));
        let step = run.checkpoint.state.step;
        let force = match replace {
            DiscardResults::Nothing => false,
            DiscardResults::OtherCheckpoints => Report::load(&out_dir.join("results.json"))
                .is_ok_and(|old| old.checkpoint_step != Some(step)),
            DiscardResults::All => true,
        };
        let context = RunContext {
            out_dir,
            run: config.run.name.clone(),
            checkpoint_step: Some(step),
            git_hash: git_hash(),
            force,
            held_out: Some(&held_out),
            progress: &progress,
            stop: Some(&stop),
        };
        let report = longwall_eval::run(suite, &mut model, &context)?;
        write_index(&folder)?;
        Ok(report)
    };
    suites.iter().map(evaluate).collect()
}

/// More tokens than any split has.
const ALL: u64 = 1 << 40;

/// The run's own validation split, as text to extrapolate on.
struct ValidationText<'a> {
    config: &'a RunConfig,
    tokenizer: &'a Tokenizer,
    stop: &'a StopFlag,
}

impl HeldOut for ValidationText<'_> {
    fn validation_tokens(&self, wanted: usize) -> Result<Vec<u32>, EvalError> {
        let mut data = self.config.data.clone();
        // Contexts longer than a row need text that continues from row to row: open all rows of the
        // split, and read the first. Generated examples are not text.
        data.validation_tokens = ALL;
        data.sources.retain(|source| !source.is_generated());
        let seed = self.config.run.seed;
        let unreadable = |error| EvalError::Text {
            what: format!("the run's validation split cannot be read: {error}"),
            remedy: "give other held-out text with --text".to_owned(),
        };
        // Text that is not encoded yet is now, into files.
        let progress = DataProgress::new(Some(self.stop.clone()));
        let open = || Loader::open(&data, self.tokenizer, seed, Split::Validation, &progress);
        let loader = self.stop.uninterruptible(open).map_err(unreadable)?;
        let rows = loader.validation_rows().unwrap_or(0) as usize;
        let rows = rows.min(wanted.div_ceil(data.seq_len));
        let batch = loader.try_batch(0, rows).map_err(unreadable)?;
        Ok(batch.inputs.iter().take(wanted).map(|&token| token as u32).collect())
    }

    fn describe(&self) -> String {
        format!("the validation split of {}", self.config.run.name)
    }
}

/// The git commit of the current folder, if it is in a repository.
fn git_hash() -> Option<String> {
    let mut git = std::process::Command::new("git");
    let output = git.args(["rev-parse", "HEAD"]).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Parses `[[eval]]` tables of a configuration file, whose names [`validate_evals`] has checked.
///
/// [`validate_evals`]: longwall_train::config::validate_evals
pub fn suites_of(tables: &[toml::Table], path: &Path) -> Result<Vec<NamedSuite>> {
    let parse = |(at, table): (usize, &toml::Table)| {
        let place = format!("{}: eval.{at}", path.display());
        let mut table = table.clone();
        let out = table.remove("out").and_then(|out| out.as_str().map(str::to_owned));
        let suite: SuiteConfig = table
            .clone()
            .try_into()
            .map_err(|error: toml::de::Error| table_error(&place, &table, error.message()))?;
        let mut problems = Problems::new();
        suite.validate(&mut problems);
        problems.into_result().map_err(|problems| anyhow!("{}: {problems}", path.display()))?;
        if let Some(name) = &out {
            check_out(&format!("{place}.out"), name, &suite)?;
        }
        Ok((suite, out))
    };
    tables.iter().enumerate().map(parse).collect()
}

/// The error of the `[[eval]]` table at `place` for which serde gave `message`.
fn table_error(place: &str, table: &toml::Table, message: &str) -> anyhow::Error {
    let suite = table.get("suite").and_then(toml::Value::as_str);
    let Some(suite) = suite.filter(|suite| SuiteConfig::NAMES.contains(suite)) else {
        let found = table.get("suite").map_or_else(|| "missing".to_owned(), toml::Value::to_string);
        let names = SuiteConfig::NAMES.join(", ");
        return anyhow!("{place}.suite is {found}; allowed: {names}\n  hint: use one of these");
    };
    let error_of = |table: toml::Table| {
        let parsed: Result<SuiteConfig, toml::de::Error> = table.try_into();
        parsed.err().map(|error| error.message().to_owned())
    };
    let culprit = culprit(table, "suite", message, error_of).filter(|key| *key != "suite");
    let key = culprit.map_or_else(String::new, |key| format!(".{key} is {}", table[key]));
    anyhow!("{place}{key}; {message}\n  hint: docs/evaluation.md lists the options of {suite}")
}
