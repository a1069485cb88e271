mod axes;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Barrier, Mutex};

use super::*;
use crate::metrics::ValidationRecord;
use crate::run_folder::{Finished, RunFolder};
use crate::signals::StopFlag;
use crate::testing::CONFIG;

/// A folder with a base configuration, and the text of a sweep over it.
struct Sandbox {
    folder: tempfile::TempDir,
    sweep: String,
}

impl Sandbox {
    fn new(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("base.toml"), CONFIG).unwrap();
        let (base, out) = (folder.path().join("base.toml"), folder.path().join("runs"));
        let sweep = format!("base = {base:?}\nout_dir = {out:?}\n{more}");
        Sandbox { folder, sweep }
    }

    fn plan(&self) -> Result<Plan, SweepError> {
        Plan::new(SweepConfig::parse(&self.sweep, Path::new("sweeps/kinds.toml"))?)
    }

    fn error(&self) -> String {
        let error = self.plan().unwrap_err().to_string();
        error.replace(&self.folder.path().display().to_string(), "SANDBOX")
    }
}

const KINDS: &str = r#"
seeds = [0, 1]
set = { "train.tokens" = "2M" }

[[axes]]
key = "model.attention"
values = [{ kind = "rope" }, { kind = "fox" }]

[[eval]]
suite = "passkey"
lengths = [500, 1000]
easy_mode = true
"#;

fn value<'a>(args: &'a [String], option: &str) -> Option<&'a str> {
    args.iter().position(|arg| arg == option).map(|at| args[at + 1].as_str())
}

fn setting<'a>(args: &'a [String], key: &str) -> Option<&'a str> {
    args.iter().find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='))
}

/// What the sweep reads of an evaluation's results.
const RESULTS: &str = r#"{"headline": {"accuracy": 0.5}, "headline_estimates":
    {"accuracy": {"value": 0.5, "standard_error": null, "low": 0.3, "high": 0.7, "samples": 20}}}"#;

struct Quiet;

impl SweepConsole for Quiet {
    fn note(&mut self, _text: &str) {}
    fn step(&mut self, _step: SweepStep) {}
    fn end_training(&mut self, _run: usize) {}
}

/// A stand-in for the binary: writes the files that training and evaluation would leave.
#[derive(Default)]
struct FakeBinary {
    jobs: Vec<String>,
    /// Fails jobs whose arguments contain this.
    broken: Option<&'static str>,
    /// The job after which the user presses Ctrl-C.
    stop_after: Option<(usize, StopFlag)>,
    /// Whether that job ends all the same: the signal came too late to stop it.
    completes_the_last: bool,
}

impl FakeBinary {
    fn launch(&mut self, job: &Job, tick: &mut dyn FnMut()) -> io::Result<JobStatus> {
        let line = job.args.join(" ");
        self.jobs.push(line.clone());
        if self.broken.is_some_and(|broken| line.contains(broken)) {
            return Ok(JobStatus::Failure("exit status: 1".into()));
        }
        if let Some((jobs, stop)) = &self.stop_after
            && self.jobs.len() >= *jobs
        {
            stop.raise();
            if !self.completes_the_last {
                return Ok(JobStatus::Failure("exit status: 130".into()));
            }
        }
        match job.args[0].as_str() {
            "train" => {
                self.train(job);
                tick();
            }
            _ => {
                let run = PathBuf::from(value(&job.args, "--run").unwrap());
                let name = value(&job.args, "--out").unwrap_or(&job.args[1]);
                let folder = run.join("eval").join(name);
                fs::create_dir_all(&folder)?;
                fs::write(folder.join("results.json"), RESULTS)?;
            }
        }
        Ok(JobStatus::Success)
    }

    fn train(&self, job: &Job) {
        let dir = job.log.parent().unwrap();
        let config = match value(&job.args, "--config") {
            Some(base) => {
                let sets: Vec<String> = job
                    .args
                    .windows(2)
                    .filter(|pair| pair[0] == "--set")
                    .map(|pair| pair[1].clone())
                    .collect();
                crate::config::RunConfig::load(Path::new(base), &sets).unwrap()
            }
            None => crate::run_folder::config_of(dir, &[]).unwrap(),
        };
        let loss = if config.run.seed == 0 { 2.0 } else { 2.5 };
        let run = RunFolder::open(dir).or_else(|_| RunFolder::create(dir, false)).unwrap();
        run.start(&config).unwrap();
        run.finish(&Finished {
            step: config.total_steps(),
            tokens: config.train.tokens,
            loss: Some(2.0),
            validation: Some(ValidationRecord {
                step: config.total_steps(),
                tokens: config.train.tokens,
                flops: None,
                validation_loss: loss,
                perplexity: f64::exp(loss),
                bits_per_byte: loss / 2.0,
                loss_by_position: vec![],
                best_context_loss: None,
                probe: Default::default(),
                ema_validation_loss: None,
                seconds: 1.0,
            }),
            skipped: 0,
            tokens_per_second: 5000.0,
            seconds: 1.0,
            parameters: 1,
            device: "cpu".into(),
        })
        .unwrap();
    }

    fn run(&mut self, plan: &Plan) -> SweepResults {
        let stop = self.stop_after.as_ref().map_or_else(StopFlag::new, |(_, stop)| stop.clone());
        let binary = Mutex::new(self);
        let launch = |job: &Job, tick: &mut dyn FnMut()| binary.lock().unwrap().launch(job, tick);
        execute(plan, &[Slot::default()], &launch, &stop, &mut Quiet).unwrap()
    }

    fn count(&self, what: &str) -> usize {
        self.jobs.iter().filter(|job| job.starts_with(what)).count()
    }
}

#[test]
fn the_grid_has_every_combination_and_seed_once() {
    let sandbox = Sandbox::new(
        "seeds = [3, 5]
        [[axes]]
        key = \"model.attention\"
        values = [{ kind = \"rope\" }, { kind = \"fox\" }]
        [[axes]]
        key = \"train.lr\"
        values = [1e-3, 3e-4, 1e-4]
        names = [\"high\", \"middle\", \"low\"]",
    );
    let plan = sandbox.plan().unwrap();
    let names: Vec<&str> = plan.runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names.len(), 12);
    assert_eq!(names[..3], ["rope-high-seed3", "rope-high-seed5", "rope-middle-seed3"]);
    assert_eq!(names[11], "fox-low-seed5");
    let last = &plan.runs[11].config;
    assert_eq!((last.run.seed, last.train.lr), (5, 1e-4));
    assert_eq!(last.run_dir(), sandbox.folder.path().join("runs/kinds/fox-low-seed5"));
    assert!(last.to_toml().contains("kind = \"fox\""));
}

#[test]
fn without_axes_the_seeds_alone_are_swept() {
    let plan = Sandbox::new("seeds = [0, 1, 2]").plan().unwrap();
    let names: Vec<&str> = plan.runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, ["seed0", "seed1", "seed2"]);
}

#[test]
fn an_axis_without_a_key_sets_several_keys_at_once() {
    let plan = Sandbox::new(
        "set = { train.schedule.kind = \"wsd\" }
        [[axes]]
        values = [{ \"train.lr\" = 1e-3, \"model.heads\" = 2 }, { train = { lr = 2e-3 } }]
        names = [\"few heads\", \"fast\"]",
    );
    let plan = plan.plan().unwrap();
    let lrs: Vec<f64> = plan.runs.iter().map(|run| run.config.train.lr).collect();
    assert_eq!(lrs, [1e-3, 2e-3]);
    assert_eq!(plan.runs[0].name, "few-heads-seed0");
    assert!(plan.runs[1].config.to_toml().contains("kind = \"wsd\""));
}

#[test]
fn a_sweep_trains_evaluates_and_tabulates() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let mut binary = FakeBinary::default();
    let results = binary.run(&plan);
    assert!(results.is_complete());
    assert_eq!((binary.count("train"), binary.count("eval")), (4, 4));
    let first = &plan.runs[0];
    assert!(binary.jobs[0].contains("--set train.tokens=\"2M\""), "{}", binary.jobs[0]);
    assert_eq!(setting(&first.sets, "run.seed"), Some("0"));
    let eval = format!(
        "eval passkey --run {} --easy-mode --lengths 500 --lengths 1000 --force-if-changed",
        first.dir().display()
    );
    assert_eq!(binary.jobs[1], eval);
    insta::assert_snapshot!(results.table(), @r"
    model.attention  seeds  validation_loss  bits_per_byte  tokens_per_second  skipped_steps  passkey.accuracy
    rope             2/2    2.25 ± 0.25      1.12 ± 0.12    5000 ± 0           0 ± 0          0.500 ± 0.000 [0.300, 0.700]
    fox              2/2    2.25 ± 0.25      1.12 ± 0.12    5000 ± 0           0 ± 0          0.500 ± 0.000 [0.300, 0.700]
    ");
    let csv = fs::read_to_string(plan.sweep.dir().join("results.csv")).unwrap();
    insta::assert_snapshot!(csv, @r"
    run,model.attention,seed,status,validation_loss,bits_per_byte,tokens_per_second,skipped_steps,passkey.accuracy,passkey.accuracy.low,passkey.accuracy.high
    rope-seed0,rope,0,finished,2,1,5000,0,0.5,0.3,0.7
    rope-seed1,rope,1,finished,2.5,1.25,5000,0,0.5,0.3,0.7
    fox-seed0,fox,0,finished,2,1,5000,0,0.5,0.3,0.7
    fox-seed1,fox,1,finished,2.5,1.25,5000,0,0.5,0.3,0.7
    ");
}

#[test]
fn a_restart_does_only_what_is_left() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let stop = StopFlag::new();
    let mut first = FakeBinary { stop_after: Some((4, stop)), ..FakeBinary::default() };
    let results = first.run(&plan);
    assert_eq!(first.jobs.len(), 4);
    assert_eq!(results.runs[1].status, Status::Pending);
    assert!(!results.is_complete());
    let mut second = FakeBinary::default();
    assert!(second.run(&plan).is_complete());
    assert_eq!((second.count("train"), second.count("eval")), (2, 3));
    let mut third = FakeBinary::default();
    assert!(third.run(&plan).is_complete());
    assert_eq!(third.jobs, [""; 0]);
}

#[test]
fn an_unfinished_run_is_resumed() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let run = &plan.runs[2];
    RunFolder::create(&run.dir(), false).unwrap().start(&run.config).unwrap();
    assert!(plan.describe().unwrap().contains("fox-seed0 (unfinished)"));
    let mut binary = FakeBinary::default();
    assert!(binary.run(&plan).is_complete());
    let resume = format!("train --resume {}", run.dir().display());
    assert!(binary.jobs.contains(&resume), "{:?}", binary.jobs);
}

#[test]
fn a_failed_run_does_not_stop_the_rest() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let mut binary = FakeBinary { broken: Some("run.name=\"rope-seed1\""), ..Default::default() };
    let results = binary.run(&plan);
    let failures: Vec<(&str, &str)> = results.failures().collect();
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].0, "rope-seed1");
    assert!(failures[0].1.contains("exit status: 1; see"), "{}", failures[0].1);
    assert_eq!((binary.count("train"), binary.count("eval")), (4, 3));
    assert!(results.table().contains("1/2"), "{}", results.table());
    let mut again = FakeBinary::default();
    assert!(again.run(&plan).is_complete());
    assert_eq!((again.count("train"), again.count("eval")), (1, 1));
}

#[test]
fn changed_evaluations_are_done_again() {
    let sandbox = Sandbox::new(KINDS);
    FakeBinary::default().run(&sandbox.plan().unwrap());
    let changed = Sandbox { sweep: sandbox.sweep.replace("1000]", "2000]"), ..sandbox };
    let mut binary = FakeBinary::default();
    assert!(binary.run(&changed.plan().unwrap()).is_complete());
    assert_eq!((binary.count("train"), binary.count("eval")), (0, 4));
    assert!(binary.jobs.iter().all(|job| job.ends_with("--lengths 2000 --force-if-changed")));
}

#[test]
fn runs_of_another_configuration_are_not_taken_for_this_ones() {
    let sandbox = Sandbox::new(KINDS);
    FakeBinary::default().run(&sandbox.plan().unwrap());
    let changed = Sandbox { sweep: sandbox.sweep.replace("\"2M\"", "\"3M\""), ..sandbox };
    let mut binary = FakeBinary::default();
    let results = binary.run(&changed.plan().unwrap());
    assert_eq!(binary.jobs, [""; 0]);
    let (_, reason) = results.failures().next().unwrap();
    assert!(reason.contains("train.tokens was 2000000, and is 3000000 now"), "{reason}");
}

#[test]
fn a_signal_after_the_last_job_leaves_a_finished_sweep() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let stop = StopFlag::new();
    let stop_after = Some((8, stop.clone()));
    let mut binary = FakeBinary { stop_after, completes_the_last: true, ..Default::default() };
    let results = binary.run(&plan);
    assert!(stop.is_raised() && results.is_complete());
    // One that arrives earlier ends the sweep after the job that it does not stop.
    fs::remove_dir_all(plan.runs[3].dir()).unwrap();
    let stop_after = Some((1, StopFlag::new()));
    let mut binary = FakeBinary { stop_after, completes_the_last: true, ..Default::default() };
    assert!(!binary.run(&plan).is_complete());
    assert_eq!((binary.count("train"), binary.count("eval")), (1, 0));
}

#[test]
fn one_suite_is_evaluated_under_several_names() {
    let sandbox = Sandbox::new(
        "[[eval]]\nsuite = \"passkey\"\n[[eval]]\nsuite = \"passkey\"\nout = \"long\"",
    );
    let plan = sandbox.plan().unwrap();
    let mut binary = FakeBinary::default();
    let results = binary.run(&plan);
    assert_eq!(binary.count("eval passkey"), 2);
    assert!(
        results.to_csv().contains("passkey.accuracy.high,long.accuracy,"),
        "{}",
        results.to_csv()
    );
    let recorded = fs::read_to_string(plan.runs[0].dir().join("evals.json")).unwrap();
    let recorded: serde_json::Value = serde_json::from_str(&recorded).unwrap();
    assert!(recorded["passkey"].is_array() && recorded["long"].is_array(), "{recorded}");
    let mut again = FakeBinary::default();
    assert!(again.run(&plan).is_complete());
    assert_eq!(again.jobs, [""; 0]);
}

#[test]
fn the_dry_run_lists_every_run() {
    let plan = Sandbox::new(KINDS).plan().unwrap();
    let text = plan.describe().unwrap();
    let (_, runs) = text.split_once('\n').unwrap();
    insta::assert_snapshot!(runs, @r#"
    rope-seed0 (new): train.tokens="2M", model.attention={ kind = "rope" }, run.seed=0
    rope-seed1 (new): train.tokens="2M", model.attention={ kind = "rope" }, run.seed=1
    fox-seed0 (new): train.tokens="2M", model.attention={ kind = "fox" }, run.seed=0
    fox-seed1 (new): train.tokens="2M", model.attention={ kind = "fox" }, run.seed=1
    "#);
}

#[test]
fn mistakes_in_the_sweep_file_are_named() {
    insta::assert_snapshot!(Sandbox::new("seed = [1]").error(), @r"
    sweeps/kinds.toml:3: seed is no known key; allowed here: name, base, out_dir, set, axes, exclude, seeds, eval
      hint: did you mean `seeds`?
    ");
    insta::assert_snapshot!(Sandbox::new("seeds = [1, 1]").error(), @r"
    sweeps/kinds.toml: the configuration has 1 problem:
    seeds is [1, 1]; allowed: one or more seeds, each once
      hint: use for example seeds = [0, 1, 2]
    ");
    let axis = "[[axes]]\nkey = \"train.lrr\"\nvalues = [1.0]";
    insta::assert_snapshot!(Sandbox::new(axis).error(), @r"
    the run 1.0-seed0 of the sweep cannot be configured: --set train.lrr=1.0: train.lrr is no known key; allowed here: tokens, batch_tokens, micro_batch, recompute, context_parallel, lr, z_loss, clip, optimiser, groups, stages, schedule, ema, skip, norms, noise_scale, validate, evaluate, sample, checkpoint
      hint: did you mean `lr`?
    ");
    let axis = "[[axes]]\nkey = \"train.lr\"\nvalues = [1.0, 1.0]\n[[axes]]\nkey = \"run.seed\"\nvalues = [1]\nnames = [\"a\", \"b\"]";
    insta::assert_snapshot!(Sandbox::new(axis).error(), @r"
    sweeps/kinds.toml: the configuration has 3 problems:
    axes.0.names is 1.0; allowed: a different name for every value
      hint: give names = [...] that differ
    axes.1.key is run.seed; allowed: any key but the run's name, folder and seed, which the sweep sets
      hint: give seeds in `seeds`
    axes.1.names is 2 names; allowed: as many as there are values (1)
      hint: name every value, or leave names out
    ");
    let axis = "[[axes]]\nkey = \"train.lr\"\nvalues = [1.0, 2.0]\nnames = [\"a/b\", \"a b\"]";
    insta::assert_snapshot!(Sandbox::new(axis).error(), @r#"
    the sweep: two runs would both be called a-b-seed0: ["a/b"] and ["a b"]
      hint: give the axes names = [...] that differ in letters and digits
    "#);
    let evals = "[[eval]]\nsuite = \"niah\"\n[[eval]]\nsuite = \"niah\"\n[[eval]]\nsuite = \"niah\"\nout = \"../a\"";
    insta::assert_snapshot!(Sandbox::new(evals).error(), @r#"
    sweeps/kinds.toml: the configuration has 2 problems:
    eval.1.out is missing; allowed: a name of its own: eval.0 has the name niah already
      hint: add for example out = "niah-2", or join the two tables
    eval.2.out is "../a"; allowed: the name of a folder, which holds no / or \ and does not begin with a dot
      hint: use for example out = "passkey-long"
    "#);
}

#[test]
fn a_grid_of_too_many_runs_is_refused() {
    let axes = |count: usize, n: usize| -> String {
        let values: Vec<String> = (0..n).map(|value| value.to_string()).collect();
        let axis = |at: usize| {
            format!("[[axes]]\nkey = \"train.a{at}\"\nvalues = [{}]\n", values.join(", "))
        };
        (0..count).map(axis).collect()
    };
    let error = Sandbox::new(&axes(2, 101)).error();
    assert_eq!(
        error,
        "the sweep: the axes have 101 · 101 values, with 1 seeds each; allowed: 10000 runs\n  \
         hint: remove values, or split the sweep into several files"
    );
    // 2⁶⁴ runs.
    assert!(Sandbox::new(&axes(16, 16)).error().contains("16 · 16 · 16"));
}

/// Both slots must be in a job at once, or the barrier never opens.
#[test]
fn slots_work_at_the_same_time_each_with_its_environment() {
    let sandbox = Sandbox::new(KINDS);
    let plan = sandbox.plan().unwrap();
    let slot = |id: &str| Slot { environment: vec![("CUDA_VISIBLE_DEVICES".into(), id.into())] };
    let (binary, both) = (Mutex::new(FakeBinary::default()), Barrier::new(2));
    let seen = Mutex::new(std::collections::BTreeMap::<String, usize>::new());
    let launch = |job: &Job, tick: &mut dyn FnMut()| {
        let [(name, id)] = &job.environment[..] else { panic!("{:?}", job.environment) };
        assert_eq!(name, "CUDA_VISIBLE_DEVICES");
        *seen.lock().unwrap().entry(id.clone()).or_default() += 1;
        if job.args[0] == "train" {
            both.wait();
        }
        binary.lock().unwrap().launch(job, tick)
    };
    let slots = [slot("4"), slot("7")];
    let results = execute(&plan, &slots, &launch, &StopFlag::new(), &mut Quiet).unwrap();
    assert!(results.is_complete() && results.failures().next().is_none());
    let binary = binary.into_inner().unwrap();
    assert_eq!((binary.count("train"), binary.count("eval")), (4, 4));
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.keys().collect::<Vec<_>>(), ["4", "7"]);
    // In the order of the plan, whichever slot was first.
    let names = plan.runs.iter().map(|run| run.name.as_str());
    assert!(results.runs.iter().map(|run| run.name.as_str()).eq(names));
}

#[test]
fn an_evaluation_may_read_the_averaged_weights() {
    let average = "set = { \"train.ema\" = 0.9 }\n[[eval]]\nsuite = \"passkey\"\nweights = \"ema\"";
    let sandbox = Sandbox::new(average);
    let mut binary = FakeBinary::default();
    let results = binary.run(&sandbox.plan().unwrap());
    assert!(binary.jobs[1].ends_with(" --weights ema --force-if-changed"), "{:?}", binary.jobs);
    assert!(results.legend().ends_with("passkey: of the averaged weights"), "{}", results.legend());
    let without = average.replace("\"train.ema\" = 0.9", "");
    insta::assert_snapshot!(Sandbox::new(&without).error(), @r#"
    the sweep: eval.0.weights is "ema" in a run that keeps no average (seed0); allowed: "model", or "ema" with train.ema
      hint: add "train.ema" = 0.999 to set, or leave weights out
    "#);
}

/// A run of a sweep has one GPU.
#[test]
fn rows_that_need_several_gpus_are_refused() {
    let shared = "set = { \"train.context_parallel\" = 2 }";
    insta::assert_snapshot!(Sandbox::new(shared).error(), @r#"
    the sweep: train.context_parallel is 2 (seed0); allowed: 1, a run of a sweep has one GPU
      hint: set "train.context_parallel" = 1, or train the runs one by one with --gpus
    "#);
}
