//! `longwall eval SUITE --run RUN` or `--checkpoint DIR`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use longwall_config::{Problems, culprit};
use longwall_data::{Loader, Rows, Split, Tokenizer};
use longwall_eval::memory::CallMemory;
use longwall_eval::{
    Discard, EvalError, HeldOut, Preset, Ranks, Report, RunContext, Silent, StopRequest,
    SuiteConfig, Summary, TrainedModel, write_index,
};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::OnDevice;
use longwall_train::config::{DeviceChoice, FOLDER_NAME, RunConfig, is_folder_name};
use longwall_train::distributed::StoreOptions;
use longwall_train::signals::StopFlag;
use serde::Serialize;

use crate::context::{OpenRun, RunArgs};
use crate::numbers::whole;
use crate::output::outln;
use crate::progress::{DataProgress, EvalProgress};
use crate::ranks;

/// How `longwall eval` is called.
const USAGE: &str = "longwall eval [OPTIONS] <SUITE>\n       longwall eval [OPTIONS] all --preset <PRESET>\n       \
                     longwall eval list    (names the suites)";

/// Arguments of `longwall eval`.
#[derive(clap::Args)]
#[command(override_usage = USAGE)]
pub struct Args {
    #[command(flatten)]
    run: RunArgs,

    /// Discard the samples and results of an earlier evaluation
    #[arg(long, global = true)]
    force: bool,

    /// Discard them if they were taken with other settings; otherwise go on from them
    #[arg(long, global = true, conflicts_with = "force")]
    force_if_changed: bool,

    /// Name of the results' folder in RUN/eval, to keep several evaluations of one suite [default: the
    /// suite's name]
    #[arg(long, global = true, value_name = "NAME", value_parser = folder_name)]
    out: Option<String>,

    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,

    /// Evaluate on this many GPUs of this machine, one process each, which take batches of samples in turn; the files
    /// are the same as on one GPU. With --device cpu, this many processes on the CPU. On several machines, torchrun or
    /// Slurm starts the processes instead
    #[arg(long, global = true, value_name = "N", value_parser = whole::<u16>(1..=u16::MAX.into()))]
    gpus: Option<u16>,

    #[command(subcommand)]
    what: What,
}

/// A suite, or one of the commands about several.
#[derive(clap::Subcommand)]
enum What {
    /// List the suites
    List,
    /// Run a fixed selection of suites and write one summary
    All {
        /// The selection
        #[arg(long, value_enum)]
        preset: Preset,
    },
    #[command(flatten)]
    Suite(SuiteConfig),
}

/// The answer to the first Ctrl-C.
const STOPPING: &str = "stopping after the file being written";

/// Runs one suite or several and prints the report.
pub fn run(args: Args) -> Result<()> {
    match (&args.what, args.out.as_deref()) {
        (What::List, _) => return list(args.json),
        (What::All { .. }, Some(_)) => bail!(
            "--out is given beside all, whose folders have names of their own\n  hint: leave out --out"
        ),
        (What::Suite(suite), Some(name)) => check_out("--out", name, suite)?,
        (_, None) => {}
    }
    let environment = ranks::of_environment(args.gpus)?;
    if let Some(gpus) = args.gpus.filter(|&gpus| gpus > 1) {
        if args.run.device_choice()? != DeviceChoice::Cpu {
            let remedy = "with --device cpu, the processes run on the CPU; or leave out --gpus";
            ranks::check_gpus(gpus.into(), remedy)?;
        }
        return ranks::launch(gpus.into(), None);
    }
    let stop = match &environment {
        Some(environment) if !environment.world.is_first() => StopFlag::install_quietly()?,
        _ => StopFlag::install(STOPPING)?,
    };
    let rank = match environment {
        Some(environment) => {
            let command = ("the command line".to_owned(), ranks::command_line());
            let store = ranks::connect(&environment, [command], StoreOptions::default(), &stop)?;
            Some((environment, store))
        }
        None => None,
    };
    ranks::together(rank.as_ref(), |ranks| {
        let run = args.run.open_on(rank.as_ref().map(|(environment, _)| environment))?;
        evaluate_and_print(args, run, ranks, &stop)
    })?;
    if let Some((_, store)) = &rank {
        store.close();
    }
    Ok(())
}

fn evaluate_and_print(args: Args, run: OpenRun, ranks: Ranks<'_>, stop: &StopFlag) -> Result<()> {
    let discard = match (args.force, args.force_if_changed) {
        (true, _) => Discard::All,
        (false, true) => Discard::OtherSettings,
        (false, false) => Discard::Nothing,
    };
    let suite = match args.what {
        What::List => unreachable!("needs no run"),
        What::All { preset } => return run_all(run, preset, discard, args.json, ranks, stop),
        What::Suite(suite) => suite,
    };
    for report in evaluate(run, &[(suite, args.out)], discard, ranks, stop)? {
        print(&report, args.json)?;
    }
    Ok(())
}

/// Prints what may also be read by a program.
fn print<T: Serialize + Display>(result: &T, json: bool) -> Result<()> {
    match json {
        true => outln!("{}", serde_json::to_string_pretty(result)?),
        false => outln!("{result}"),
    }
}

/// Prints every suite and what it is.
fn list(json: bool) -> Result<()> {
    let suites = SuiteConfig::list();
    if json {
        let suites: BTreeMap<String, String> = suites.into_iter().collect();
        return outln!("{}", serde_json::to_string_pretty(&suites)?);
    }
    let width = suites.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, about) in suites {
        outln!("{name:width$}  {about}")?;
    }
    Ok(())
}

/// Runs a preset's suites, those after one that cannot run too; writes and prints the summary.
fn run_all(
    run: OpenRun,
    preset: Preset,
    discard: Discard,
    json: bool,
    ranks: Ranks<'_>,
    stop: &StopFlag,
) -> Result<()> {
    if !run.changes.is_empty() {
        bail!(
            "eval all is given with a changed model ({}); allowed: the checkpoint's own\n  \
             hint: evaluate the suites one by one, with --out",
            run.changes.join(", ")
        );
    }
    let mut summary = Summary {
        preset: preset.name().to_owned(),
        run: run.checkpoint.config.run.name.clone(),
        checkpoint_step: run.checkpoint.state.step,
        suites: Vec::new(),
    };
    let folder = run.dir.join("eval");
    let suites: Vec<NamedSuite> =
        preset.suites().into_iter().map(|(suite, name)| (suite, Some(name))).collect();
    evaluate_each(run, &suites, discard, ranks, stop, &mut |(suite, name), result| {
        use EvalError::{Lost, Stopped, StoppedEarly};
        if let Err(error @ (Stopped { .. } | StoppedEarly { .. } | Lost { .. })) = result {
            return Err(error.into());
        }
        if let Some(result) = result.transpose() {
            summary.push(suite.name(), name.as_deref().unwrap_or(suite.name()), result);
        }
        Ok(())
    })?;
    if !ranks.is_first() {
        return Ok(());
    }
    std::fs::create_dir_all(&folder)?;
    summary.save(&folder)?;
    print(&summary, json)?;
    match summary.failures() {
        0 => Ok(()),
        count => bail!(
            "{count} of {} suites did not run\n  hint: the summary names the reasons",
            summary.suites.len()
        ),
    }
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

/// Runs suites on a checkpoint; their files go to `eval/SUITE/` or `eval/NAME/` in the run's folder, and
/// `eval/index.json` lists them. Rank 0 returns the reports.
pub fn evaluate(
    run: OpenRun,
    suites: &[NamedSuite],
    discard: Discard,
    ranks: Ranks<'_>,
    stop: &StopFlag,
) -> Result<Vec<Report>> {
    let mut reports = Vec::with_capacity(suites.len());
    evaluate_each(run, suites, discard, ranks, stop, &mut |_, result| {
        reports.extend(result?);
        Ok(())
    })?;
    Ok(reports)
}

/// Receives a suite's report, which rank 0 has, or why it did not run; an error ends the evaluation.
type Sink<'a> = dyn FnMut(&NamedSuite, Result<Option<Report>, EvalError>) -> Result<()> + 'a;

/// As [`evaluate`], with each result given to `sink`.
fn evaluate_each(
    run: OpenRun,
    suites: &[NamedSuite],
    discard: Discard,
    ranks: Ranks<'_>,
    stop: &StopFlag,
    sink: &mut Sink<'_>,
) -> Result<()> {
    struct Evaluate<'a, 's>(
        OpenRun,
        &'a [NamedSuite],
        Discard,
        Ranks<'a>,
        &'a StopFlag,
        &'a mut Sink<'s>,
    );
    impl OnDevice for Evaluate<'_, '_> {
        type Output = Result<()>;
        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let Evaluate(run, suites, discard, ranks, stop, sink) = self;
            evaluate_on::<B>(&run, suites, discard, (ranks, stop), sink, device)
        }
    }
    run.compute.clone().run(Evaluate(run, suites, discard, ranks, stop, sink))
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
    discard: Discard,
    (ranks, stop): (Ranks<'_>, &StopFlag),
    sink: &mut Sink<'_>,
    device: B::Device,
) -> Result<()> {
    let config = &run.config;
    let loading = "the model was being loaded\n  hint: run the same command again";
    let model = stop.interruptible(loading, || run.load::<B>(&device))?;
    let memory = CallMemory::new(&config.model, run.compute.precision);
    let (tokenizer, seq_len) = (run.tokenizer.clone(), config.data.seq_len);
    let mut model = TrainedModel::new(model, tokenizer, seq_len, memory, device);
    let held_out = ValidationText { config, tokenizer: &run.tokenizer, stop };
    let progress = EvalProgress::new();
    let stop = StopEvaluation(stop);
    let folder = run.dir.join("eval");
    let mut evaluate = |(suite, name): &NamedSuite| {
        let out_dir = folder.join(name.as_deref().unwrap_or(suite.name()));
        let context = RunContext {
            out_dir,
            run: config.run.name.clone(),
            checkpoint_step: Some(run.checkpoint.state.step),
            model_changes: run.changes.clone(),
            git_hash: git_hash(),
            discard,
            held_out: Some(&held_out),
            progress: if ranks.is_first() { &progress } else { &Silent },
            stop: Some(&stop),
            ranks,
        };
        longwall_eval::run_on_rank(suite, &mut model, &context)
    };
    for suite in suites {
        let result = evaluate(suite);
        if matches!(result, Ok(Some(_))) {
            write_index(&folder)?;
        }
        sink(suite, result)?;
    }
    Ok(())
}

/// More tokens than any split has.
const ALL: u64 = 1 << 40;

/// The run's own validation split, as text to extrapolate on.
pub struct ValidationText<'a> {
    /// The run's configuration.
    pub config: &'a RunConfig,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Asks to stop.
    pub stop: &'a StopFlag,
}

impl HeldOut for ValidationText<'_> {
    fn validation_tokens(&self, wanted: usize) -> Result<Vec<u32>, EvalError> {
        let mut data = self.config.data.clone();
        // Contexts longer than a row need text that continues from row to row: open all rows of the
        // split, packed, and read the first. Generated examples are not text.
        data.validation_tokens = ALL;
        data.rows = Rows::Packed;
        data.sources.retain(|source| !source.is_generated());
        if data.sources.is_empty() {
            return Err(EvalError::Text {
                what: "the run was trained on generated examples, so it has no held-out text"
                    .to_owned(),
                remedy: "name text files or folders: --text FILES".to_owned(),
            });
        }
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
pub fn git_hash() -> Option<String> {
    let mut git = std::process::Command::new("git");
    let output = git.args(["rev-parse", "HEAD"]).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Parses the tables of the list `key` (`eval`, for `[[eval]]`) of a configuration file, whose names and weights
/// [`validate_evals`] has checked.
///
/// [`validate_evals`]: longwall_train::config::validate_evals
pub fn suites_of<'a>(
    key: &str,
    tables: impl IntoIterator<Item = &'a toml::Table>,
    path: &Path,
) -> Result<Vec<NamedSuite>> {
    let parse = |(at, table): (usize, &toml::Table)| {
        let place = format!("{}: {key}.{at}", path.display());
        let mut table = table.clone();
        let out = table.remove("out").and_then(|out| out.as_str().map(str::to_owned));
        table.remove("weights");
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
    tables.into_iter().enumerate().map(parse).collect()
}

/// The suites of `[[train.evaluate]]`.
pub fn suites_in_the_loop(config: &RunConfig, path: &Path) -> Result<Vec<NamedSuite>> {
    suites_of("train.evaluate", config.train.evaluate.iter().map(|table| &table.eval), path)
}

/// The error of the table at `place` for which serde gave `message`.
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
