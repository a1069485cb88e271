//! Runs a sweep: a process for each job, continuing from the state of the run folders.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use longwall_data::files;
use toml::{Table, Value};

use super::results::{RunResult, Status, SweepResults};
use super::watch::{SweepConsole, SweepStep, Watch};
use super::{Plan, PlannedRun, SweepError};
use crate::config::{Difference, eval_name};
use crate::run_folder::{self, LOG_FILE};
use crate::signals::StopFlag;

/// Holds the arguments that a run was evaluated with, by the evaluation's name.
const EVALS_FILE: &str = "evals.json";

/// A place for one run at a time, such as a GPU: the environment variables that its jobs get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Names and values.
    pub environment: Vec<(String, String)>,
}

/// One call of the `longwall` binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment variables that it gets besides this process's.
    pub environment: Vec<(String, String)>,
    /// The file that its output is appended to.
    pub log: PathBuf,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobStatus {
    /// With exit code 0.
    Success,
    /// With another exit code or by a signal; in words.
    Failure(String),
}

/// Starts a job, and waits for it; meanwhile calls its second argument several times a second.
pub type Launch<'a> = dyn Fn(&Job, &mut dyn FnMut()) -> io::Result<JobStatus> + Sync + 'a;

/// How often a job's progress is read.
const TICK: Duration = Duration::from_millis(100);

/// Runs `job` with the current executable, and calls `tick` until it ends: a [`Launch`].
///
/// # Errors
/// When the log cannot be opened or the process cannot be started.
pub fn launch_current_exe(job: &Job, tick: &mut dyn FnMut()) -> io::Result<JobStatus> {
    let log = open_log(&job.log)?;
    // The job's output is this file, and keeps it locked if this process is killed: see `wait_for_orphan`.
    let _ = log.try_lock();
    let mut child = Command::new(std::env::current_exe()?)
        .args(&job.args)
        .envs(job.environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    let status = loop {
        let status = child.try_wait()?;
        tick();
        if let Some(status) = status {
            break status;
        }
        thread::sleep(TICK);
    };
    Ok(if status.success() { JobStatus::Success } else { JobStatus::Failure(status.to_string()) })
}

fn open_log(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

/// Waits for the job of a sweep that was killed: it goes on without its sweep, and holds the lock of its log.
/// Returns early if `stop` is raised.
fn wait_for_orphan(log: &Path, stop: &StopFlag, console: &mut dyn SweepConsole) -> io::Result<()> {
    let file = open_log(log)?;
    let is_locked = || matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    if is_locked() {
        console.note(&format!("waiting for the job that writes {}", log.display()));
    }
    while is_locked() && !stop.is_raised() {
        thread::sleep(TICK);
    }
    Ok(())
}

/// What happens in a slot.
enum Event {
    Note(String),
    Step(Box<SweepStep>),
    EndTraining(usize),
    /// The run with this index has ended.
    End(usize, Status),
}

/// The console of a slot.
struct SlotConsole {
    events: Sender<Event>,
}

impl SlotConsole {
    fn send(&self, event: Event) {
        // The receiver lives until all slots have ended.
        let _ = self.events.send(event);
    }
}

impl SweepConsole for SlotConsole {
    fn note(&mut self, text: &str) {
        self.send(Event::Note(text.to_owned()));
    }

    fn step(&mut self, step: SweepStep) {
        self.send(Event::Step(Box::new(step)));
    }

    fn end_training(&mut self, run: usize) {
        self.send(Event::EndTraining(run));
    }
}

/// Runs the remaining jobs of `plan`, one run at a time in each of `slots`: calls `launch` for every job, shows lines
/// and steps on `console`, and updates `results.csv` and `results.jsonl` after every run. A run that fails does not
/// stop the others; a raised `stop` flag ends the sweep after the current jobs.
///
/// # Errors
/// When the sweep's own folder cannot be written. A run's failure is part of the results.
///
/// # Panics
/// Without slots.
pub fn execute(
    plan: &Plan,
    slots: &[Slot],
    launch: &Launch<'_>,
    stop: &StopFlag,
    console: &mut dyn SweepConsole,
) -> Result<SweepResults, SweepError> {
    assert!(!slots.is_empty(), "a sweep needs a slot");
    let dir = plan.sweep.dir();
    let write = |name: &str, text: String| {
        let path = dir.join(name);
        files::write_atomically(&path, text.as_bytes())
            .map_err(|source| SweepError::Write { path, source })
    };
    fs::create_dir_all(&dir).map_err(|source| SweepError::Write { path: dir.clone(), source })?;
    let mut results = SweepResults::new(plan);
    let mut written = Ok(());
    let (next, halted) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let (sender, events) = mpsc::channel();
        for slot in slots {
            let mut console = SlotConsole { events: sender.clone() };
            let place = Place { plan, slot, slots: slots.len(), launch, stop };
            let (next, halted) = (&next, &halted);
            scope.spawn(move || {
                while !stop.is_raised() && !halted.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= plan.runs.len() {
                        break;
                    }
                    let status = place.execute(at, &mut console);
                    console.send(Event::End(at, status));
                }
            });
        }
        drop(sender);
        for event in events {
            match event {
                Event::Note(text) => console.note(&text),
                Event::Step(step) => console.step(*step),
                Event::EndTraining(run) => console.end_training(run),
                Event::End(at, status) => {
                    collect(plan, &plan.runs[at], status, &mut results.runs[at]);
                    if written.is_ok() {
                        written = write("results.csv", results.to_csv())
                            .and_then(|()| write("results.jsonl", results.to_jsonl(plan)));
                        halted.store(written.is_err(), Ordering::Relaxed);
                    }
                }
            }
        }
    });
    written?;
    if stop.is_raised() && !results.is_complete() {
        console.note("stopped; start the same sweep again to go on");
    }
    Ok(results)
}

/// Trains and evaluates run `at` of `plan`, or does what is left of it. Writes nothing but the run's own folder, so
/// that several processes may do runs of one sweep.
pub fn execute_one(
    plan: &Plan,
    at: usize,
    launch: &Launch<'_>,
    stop: &StopFlag,
    console: &mut dyn SweepConsole,
) -> Status {
    Place { plan, slot: &Slot::default(), slots: 1, launch, stop }.execute(at, console)
}

/// A slot, and what it works on.
#[derive(Clone, Copy)]
struct Place<'a> {
    plan: &'a Plan,
    slot: &'a Slot,
    /// Slots in all.
    slots: usize,
    launch: &'a Launch<'a>,
    stop: &'a StopFlag,
}

impl Place<'_> {
    fn execute(&self, at: usize, console: &mut dyn SweepConsole) -> Status {
        let run = &self.plan.runs[at];
        console.note(&format!("[{}/{}] {}", at + 1, self.plan.runs.len(), run.name));
        match self.do_run(at, console) {
            Ok(status) => status,
            Err(reason) => {
                console.note(&format!("{} failed: {reason}", run.name));
                Status::Failed(reason)
            }
        }
    }

    /// Runs one job to its end. The error is the reason in words.
    fn run(
        &self,
        what: &str,
        args: Vec<String>,
        log: &Path,
        tick: &mut dyn FnMut(),
    ) -> Result<(), String> {
        let environment = self.slot.environment.clone();
        let job = Job { args, environment, log: log.to_owned() };
        match (self.launch)(&job, tick) {
            Ok(JobStatus::Success) => Ok(()),
            Ok(JobStatus::Failure(how)) => {
                Err(format!("{what} ended with {how}; see {}", log.display()))
            }
            Err(error) => Err(format!("{what} could not be started: {error}")),
        }
    }

    /// Trains and evaluates one run, skipping what is done already. The error is the reason in words.
    fn do_run(&self, at: usize, console: &mut dyn SweepConsole) -> Result<Status, String> {
        let (plan, stop, run) = (self.plan, self.stop, &self.plan.runs[at]);
        let dir = run.dir();
        fs::create_dir_all(&dir)
            .map_err(|error| format!("cannot make {}: {error}", dir.display()))?;
        let log = dir.join(LOG_FILE);
        wait_for_orphan(&log, stop, console)
            .map_err(|error| format!("cannot write {}: {error}", log.display()))?;
        if stop.is_raised() {
            return Ok(Status::Pending);
        }
        let resumed = check_old_run(run)?;
        if is_finished(run)? {
            console.note(&format!("{} is trained already", run.name));
        } else {
            let mut watch = Watch::new(plan, at, self.slots);
            let mut tick = || {
                if let Some(step) = watch.poll() {
                    console.step(step);
                }
            };
            let trained = self.run("training", train_args(plan, run, resumed), &log, &mut tick);
            console.end_training(at + 1);
            let finished = is_finished(run)?;
            // A run that was stopped, not one that ended just before the signal came.
            if stop.is_raised() && !finished {
                return Ok(Status::Pending);
            }
            trained?;
            if !finished {
                return Err(format!("training ended before its last step; see {}", log.display()));
            }
        }
        self.evaluate(run, &log, console)
    }

    /// Evaluates a trained run, as [`Place::do_run`] does.
    fn evaluate(
        &self,
        run: &PlannedRun,
        log: &Path,
        console: &mut dyn SweepConsole,
    ) -> Result<Status, String> {
        let dir = run.dir();
        for eval in &self.plan.sweep.eval {
            let (name, args) = (name_of(eval), eval_args(eval, &dir));
            if is_evaluated(&dir, name, &args) {
                continue;
            }
            if self.stop.is_raised() {
                return Ok(Status::Pending);
            }
            console.note(&format!("{}: evaluation {name}", run.name));
            // What an interrupted sweep has left may be of other arguments.
            let all = args.iter().cloned().chain(["--force-if-changed".to_owned()]).collect();
            let done = self.run(name, all, log, &mut || {});
            if self.stop.is_raised() && done.is_err() {
                return Ok(Status::Pending);
            }
            done?;
            record_eval(&dir, name, args).map_err(|error| {
                format!("cannot write {}: {error}", dir.join(EVALS_FILE).display())
            })?;
        }
        Ok(Status::Finished)
    }
}

/// Fills in `result` from the run's folder.
fn collect(plan: &Plan, run: &PlannedRun, status: Status, result: &mut RunResult) {
    let evals: Vec<&str> = plan.sweep.eval.iter().map(name_of).collect();
    if let Ok(Some(finished)) = run_folder::finished(&run.dir()) {
        result.read_figures(&run.dir(), &finished, &evals);
    }
    result.status = status;
}

/// Whether the run is trained and evaluated.
pub(super) fn is_done(plan: &Plan, run: &PlannedRun) -> Result<bool, SweepError> {
    let dir = run.dir();
    let done = |eval| is_evaluated(&dir, name_of(eval), &eval_args(eval, &dir));
    Ok(run_folder::finished(&dir)?.is_some() && plan.sweep.eval.iter().all(done))
}

/// Whether the run is trained.
fn is_finished(run: &PlannedRun) -> Result<bool, String> {
    let marker = run_folder::finished(&run.dir()).map_err(|error| error.to_string())?;
    Ok(marker.is_some())
}

/// Whether there is a run to resume. A run with the same name but another configuration is an
/// error.
fn check_old_run(run: &PlannedRun) -> Result<bool, String> {
    let dir = run.dir();
    if !dir.join("config.toml").is_file() {
        return Ok(false);
    }
    let old = run_folder::config_of(&dir, &[]).map_err(|error| error.to_string())?;
    let matters = |d: &Difference| !["run.threads", "run.tensorboard"].contains(&d.key.as_str());
    let changed = old.differences(&run.config).into_iter().find(matters);
    match changed {
        None => Ok(true),
        Some(Difference { key, ours, theirs }) => Err(format!(
            "{} holds a run with another configuration: {key} was {ours}, and is {theirs} now; rename the sweep, or remove that folder",
            dir.display()
        )),
    }
}

fn train_args(plan: &Plan, run: &PlannedRun, resumed: bool) -> Vec<String> {
    let mut args = vec!["train".to_owned()];
    if resumed {
        args.extend(["--resume".to_owned(), run.dir().display().to_string()]);
    } else {
        args.extend(["--config".to_owned(), plan.sweep.base.display().to_string()]);
        for set in &run.sets {
            args.extend(["--set".to_owned(), set.clone()]);
        }
    }
    args
}

/// The name of an evaluation; a valid sweep gives each one.
fn name_of(eval: &Table) -> &str {
    eval_name(eval).unwrap_or_default()
}

/// The command line of an evaluation: every key becomes an option, repeated for each value of an
/// array; `true` becomes a bare flag, `false` is left out.
fn eval_args(eval: &Table, run_dir: &Path) -> Vec<String> {
    let run = run_dir.display().to_string();
    let suite = eval.get("suite").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut args = vec!["eval".to_owned(), suite, "--run".to_owned(), run];
    let plain = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    for (key, value) in eval.iter().filter(|(key, _)| *key != "suite") {
        let option = format!("--{}", key.replace('_', "-"));
        match value {
            Value::Boolean(false) => {}
            Value::Boolean(true) => args.push(option),
            Value::Array(values) => {
                for value in values {
                    args.extend([option.clone(), plain(value)]);
                }
            }
            value => args.extend([option, plain(value)]),
        }
    }
    args
}

/// Whether the evaluation was finished with these arguments.
fn is_evaluated(run_dir: &Path, name: &str, args: &[String]) -> bool {
    let has_results = run_dir.join("eval").join(name).join("results.json").is_file();
    has_results && recorded_evals(run_dir).get(name).is_some_and(|recorded| recorded == args)
}

/// The arguments of the evaluations that were finished, by name.
fn recorded_evals(run_dir: &Path) -> BTreeMap<String, Vec<String>> {
    let bytes = fs::read(run_dir.join(EVALS_FILE)).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn record_eval(run_dir: &Path, name: &str, args: Vec<String>) -> io::Result<()> {
    let mut recorded = recorded_evals(run_dir);
    recorded.insert(name.to_owned(), args);
    files::write_atomically(&run_dir.join(EVALS_FILE), &serde_json::to_vec_pretty(&recorded)?)
}
