mod evaluations;
mod from;
mod layers;
mod options;
mod stages;
mod streams;

use std::fs;

use longwall_data::NoProgress;

use super::*;
use longwall_model::Precision;
use longwall_model::weights::read_tensors;

use crate::checkpoint::{Checkpoint, CheckpointSelector};
use crate::console::{RunInfo, SilentConsole, StepView};
use crate::evaluation::NoEvaluations;
use crate::metrics::{self, Record};
use crate::run_folder;
use crate::testing::TestBackend;

/// A corpus and a configuration in a temporary folder.
pub(crate) struct Sandbox(tempfile::TempDir);

impl Sandbox {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let corpus = folder.path().join("corpus");
        fs::create_dir(&corpus).unwrap();
        for file in 0..40 {
            let line = format!("Line of file {file}: the quick brown fox jumps over the dog.\n");
            fs::write(corpus.join(format!("{file}.txt")), line.repeat(8)).unwrap();
        }
        Sandbox(folder)
    }

    /// Twelve steps of four rows of 32 byte tokens, in two micro-batches.
    pub fn config(&self, sets: &[&str]) -> RunConfig {
        let path = |name: &str| self.0.path().join(name);
        let text = format!(
            r#"
            run = {{ out_dir = {out:?}, seed = 7 }}
            train = {{ tokens = 1536, batch_tokens = 128, micro_batch = 2, lr = 1e-2 }}
            [data]
            seq_len = 32
            validation_fraction = 0.2
            validation_tokens = 256
            cache_dir = {cache:?}
            sources = [{{ kind = "text", paths = [{corpus:?}] }}]
            [model]
            layers = 1
            width = 16
            heads = 2
            attention = {{ kind = "rope" }}
            "#,
            out = path("runs"),
            cache = path("cache"),
            corpus = path("corpus"),
        );
        let sets: Vec<String> = ["train.validate.every=5", "train.checkpoint.every=4"]
            .iter()
            .chain(sets)
            .map(|set| (*set).to_owned())
            .collect();
        RunConfig::parse(&text, Path::new("tiny.toml"), &sets).unwrap()
    }
}

/// Calls a function after each step.
pub(crate) struct After<F> {
    pub step: u64,
    pub action: F,
}

impl<F: FnMut()> Console for After<F> {
    fn begin(&mut self, _info: &RunInfo) {}
    fn step(&mut self, view: &StepView) {
        if view.record.step == self.step {
            (self.action)();
        }
    }
    fn validation(&mut self, _record: &ValidationRecord, _best: bool) {}
    fn sample(&mut self, _step: u64, _prompt: &str, _text: &str) {}
    fn note(&mut self, _text: &str) {}
    fn end(&mut self, _ending: &Ending) {}
}

fn run_with(
    config: &RunConfig,
    start: RunStart,
    stop: StopFlag,
    console: &mut dyn Console,
) -> Result<Outcome, TrainError> {
    run_in(Precision::F32, config, start, stop, console)
}

fn run_in(
    precision: Precision,
    config: &RunConfig,
    start: RunStart,
    stop: StopFlag,
    console: &mut dyn Console,
) -> Result<Outcome, TrainError> {
    run_from(None, precision, config, start, stop, console)
}

fn run_from(
    from: Option<Source>,
    precision: Precision,
    config: &RunConfig,
    start: RunStart,
    stop: StopFlag,
    console: &mut dyn Console,
) -> Result<Outcome, TrainError> {
    let options = TrainOptions { from, ..options(precision, start, stop) };
    train::<TestBackend>(config, &Default::default(), &options, console, &mut NoEvaluations)
}

pub(crate) fn options(
    precision: Precision,
    start: RunStart,
    stop: StopFlag,
) -> TrainOptions<'static> {
    TrainOptions {
        start,
        from: None,
        stop,
        progress: &NoProgress,
        device_name: "cpu".into(),
        precision,
        compiles: false,
        peak_flops: Some(1e9),
        available_memory: None,
        verify: false,
        memory: None,
    }
}

/// Runs as if the user pressed Ctrl-C during `step`.
fn run_until(config: &RunConfig, start: RunStart, step: u64) -> Result<Outcome, TrainError> {
    let stop = StopFlag::new();
    let mut console = After { step, action: || stop.raise() };
    run_with(config, start, stop.clone(), &mut console)
}

fn run(config: &RunConfig, start: RunStart) -> Result<Outcome, TrainError> {
    run_with(config, start, StopFlag::new(), &mut SilentConsole)
}

/// The lines of `metrics.jsonl`, without the times.
pub(crate) fn losses(run_dir: &Path) -> Vec<Record> {
    let mut records = metrics::read(&run_dir.join("metrics.jsonl")).unwrap();
    for record in &mut records {
        match record {
            Record::Step(step) => {
                (step.seconds, step.tokens_per_second, step.mfu) = (0.0, 0.0, None);
            }
            Record::Validation(validation) => validation.seconds = 0.0,
            Record::Norms(_) | Record::Noise(_) => {}
        }
    }
    records
}

pub(crate) fn weights(run_dir: &Path) -> Vec<u8> {
    let checkpoint = Checkpoint::open(run_dir, CheckpointSelector::Latest).unwrap();
    fs::read(checkpoint.weights().unwrap()).unwrap()
}

#[test]
fn a_run_leaves_everything_it_should() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&["train.sample.every=6", "run.tensorboard=true"]);
    let outcome = run(&config, RunStart::New).unwrap();
    assert!(outcome.is_finished());
    let dir = &outcome.run_dir;
    let records = losses(dir);
    let steps = records.iter().filter(|record| matches!(record, Record::Step(_))).count();
    assert_eq!((steps, records.len()), (12, 12 + 3), "validations after 5, 10 and 12 steps");
    let first = records.iter().find_map(|r| if let Record::Step(s) = r { s.loss } else { None });
    let last = run_folder::finished(dir).unwrap().unwrap();
    assert!(last.loss < first, "{:?} is not below {first:?}", last.loss);
    assert_eq!(last.validation, outcome.validation);
    assert!(last.tokens_per_second > 0.0);
    let samples = fs::read_to_string(dir.join("samples.txt")).unwrap();
    assert!(samples.starts_with("=== step 6, prompt \"\"\n") && samples.contains("=== step 12"));
    assert_eq!(fs::read_dir(dir.join("tb")).unwrap().count(), 1);
    assert_eq!(run_folder::config_of(dir, &[]).unwrap(), config);
    let best = Checkpoint::open(dir, CheckpointSelector::Best).unwrap();
    assert_eq!(read_tensors(&best.weights().unwrap()).unwrap()["embedding"].0[0], 257);
}

#[test]
fn after_a_panic_the_last_step_and_checkpoint_are_named() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[]);
    let mut console = After { step: 6, action: || panic!("a bug") };
    let run = std::panic::AssertUnwindSafe(|| {
        run_with(&config, RunStart::New, StopFlag::new(), &mut console)
    });
    assert!(std::panic::catch_unwind(run).is_err());
    let (dir, text) = (config.run_dir(), after_panic(&config.run_dir()));
    assert!(text.starts_with("the run ends after step 6, because of the panic above\n"), "{text}");
    let remedy = format!("continue from it with: longwall train --resume {}", dir.display());
    assert!(text.contains("checkpoints/step-5; ") && text.ends_with(&remedy), "{text}");
    assert!(after_panic(Path::new("/no/such")).ends_with("there is no checkpoint yet"));
}

#[test]
fn a_resumed_run_equals_an_unbroken_one_to_the_bit() {
    let sandbox = Sandbox::new();
    let more = ["train.sample.every=3", "train.skip.outlier_z=3", "train.skip.window=8"];
    let unbroken = sandbox.config(&[&more[..], &["run.name=unbroken"]].concat());
    let unbroken = run(&unbroken, RunStart::New).unwrap().run_dir;
    // Stopped right before, at, and after a checkpoint and a validation, again and again.
    let broken = sandbox.config(&[&more[..], &["run.name=broken"]].concat());
    let mut outcome = run_until(&broken, RunStart::New, 3).unwrap();
    for step in [4, 5, 6, 11] {
        assert!(!outcome.is_finished());
        let start = RunStart::Resume(outcome.run_dir.clone());
        outcome = run_until(&broken, start, step).unwrap();
        assert_eq!(outcome.step, step);
    }
    let start = RunStart::Resume(outcome.run_dir.clone());
    let broken = run(&broken, start).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));
    let samples = |dir: &Path| fs::read_to_string(dir.join("samples.txt")).unwrap();
    assert_eq!(samples(&broken), samples(&unbroken));
}

#[test]
fn a_killed_run_resumes_from_its_last_checkpoint() {
    let sandbox = Sandbox::new();
    let unbroken = sandbox.config(&["run.name=unbroken"]);
    let unbroken = run(&unbroken, RunStart::New).unwrap().run_dir;
    let config = sandbox.config(&["run.name=killed", "train.checkpoint.keep_last=9"]);
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    // As if killed in step 11, while it wrote a checkpoint.
    fs::remove_file(dir.join("finished.json")).unwrap();
    fs::remove_dir_all(dir.join("checkpoints/step-12")).unwrap();
    fs::remove_dir_all(dir.join("checkpoints/step-10")).unwrap();
    fs::create_dir(dir.join("checkpoints/step-12.tmp")).unwrap();
    let outcome = run(&config, RunStart::Resume(dir.clone())).unwrap();
    assert!(outcome.is_finished());
    assert!(!dir.join("checkpoints/step-12.tmp").exists());
    assert_eq!(losses(&dir), losses(&unbroken));
    assert_eq!(weights(&dir), weights(&unbroken));
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_again() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[]);
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    let whole = losses(&dir);
    fs::remove_file(dir.join("finished.json")).unwrap();
    fs::remove_dir_all(dir.join("checkpoints")).unwrap();
    run(&config, RunStart::Resume(dir.clone())).unwrap();
    assert_eq!(losses(&dir), whole);
}

#[test]
fn a_finished_run_stays_as_it_is_unless_it_is_made_longer() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&["train.schedule.kind=constant"]);
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    let before = fs::read(dir.join("finished.json")).unwrap();
    run(&config, RunStart::Resume(dir.clone())).unwrap();
    assert_eq!(fs::read(dir.join("finished.json")).unwrap(), before);
    let longer = sandbox.config(&["train.schedule.kind=constant", "train.tokens=1792"]);
    let outcome = run(&longer, RunStart::Resume(dir.clone())).unwrap();
    assert_eq!((outcome.step, outcome.total_steps), (14, 14));
    assert_eq!(run_folder::finished(&dir).unwrap().unwrap().step, 14);
}

#[test]
fn a_run_folder_is_not_overwritten_unless_forced() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[]);
    run(&config, RunStart::New).unwrap();
    let error = run(&config, RunStart::New).unwrap_err();
    assert!(matches!(error, TrainError::Folder(run_folder::RunFolderError::Exists { .. })));
    run(&config, RunStart::Force).unwrap();
}

#[test]
fn a_run_that_cannot_start_leaves_no_folder() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&["data.sources.0.paths=[\"no/such/folder\"]"]);
    assert!(matches!(run(&config, RunStart::New), Err(TrainError::Data(_))));
    assert!(!config.run_dir().exists());
}

/// The validations of a run.
fn validations(run_dir: &Path) -> impl Iterator<Item = ValidationRecord> {
    losses(run_dir).into_iter().filter_map(|record| match record {
        Record::Validation(validation) => Some(validation),
        Record::Step(_) | Record::Norms(_) | Record::Noise(_) => None,
    })
}

/// A metric of the layers at each validation.
fn measured(metric: &str, sets: &[&str]) -> Vec<Option<f64>> {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[&["data.seq_len=64"], sets].concat());
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    let values: Vec<_> = validations(&dir).map(|v| v.probe.get(metric).copied()).collect();
    assert_eq!(values.len(), 3);
    values
}

#[test]
fn validations_report_the_pruned_fraction() {
    // Gates start half closed: of 64 tokens, all but the last 30 or so together weigh less than 2⁻²⁴.
    let fox = ["model.attention.kind=fox", "train.lr=1e-6"];
    let prune = [&fox[..], &["model.attention.prune=true"]].concat();
    for pruned in measured("pruned_fraction", &prune) {
        assert!(pruned.is_some_and(|pruned| (0.1..0.4).contains(&pruned)), "{pruned:?}");
    }
    assert!(measured("pruned_fraction", &fox).iter().all(Option::is_none));
}

#[test]
fn validations_report_how_many_weights_are_not_zero() {
    let tra = ["model.attention.kind=tra", "train.lr=1e-6"];
    for nonzero in measured("nonzero_fraction", &tra) {
        assert!(nonzero.is_some_and(|nonzero| (0.001..0.5).contains(&nonzero)), "{nonzero:?}");
    }
    let rope = ["model.attention.kind=rope", "train.lr=1e-6"];
    assert!(measured("nonzero_fraction", &rope).iter().all(Option::is_none));
}

#[test]
fn the_best_checkpoint_is_kept() {
    let sandbox = Sandbox::new();
    // The rate explodes at the end: the last validations are not the best.
    let sets = ["train.validate.every=2", "train.checkpoint.keep_last=1"];
    let config = sandbox.config(&[&sets[..], &["train.lr=0.5", "train.clip=\"off\""]].concat());
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    let validations: Vec<_> = validations(&dir).map(|v| (v.step, v.validation_loss)).collect();
    let best = validations.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    let checkpoint = Checkpoint::open(&dir, CheckpointSelector::Best).unwrap();
    assert_eq!(checkpoint.state.step, best.0);
    let kept = CheckpointFolder::new(&dir).steps().unwrap();
    assert!(kept.len() <= 2 && kept.last() == Some(&12), "{kept:?}");
}

#[test]
fn ten_skipped_steps_in_a_row_end_the_run_and_name_the_last_checkpoint() {
    let sandbox = Sandbox::new();
    let sets = ["train.schedule.kind=constant", "train.skip.max_in_a_row=3"];
    let config = sandbox.config(&sets);
    let dir = run_until(&config, RunStart::New, 4).unwrap().run_dir;
    // At this rate the weights overflow: every later loss is NaN.
    let wild = sandbox.config(&[&sets[..], &["train.lr=1e38"]].concat());
    let error = run(&wild, RunStart::Resume(dir.clone())).unwrap_err();
    let text = error.to_string().replace(&dir.display().to_string(), "RUN");
    assert!(
        text.starts_with("3 steps in a row were skipped, the last one, step 8, because"),
        "{text}"
    );
    assert!(text.contains("last good checkpoint is RUN/checkpoints/step-"), "{text}");
    let skipped: Vec<bool> = losses(&dir)
        .into_iter()
        .filter_map(
            |record| if let Record::Step(step) = record { Some(step.skipped) } else { None },
        )
        .collect();
    assert_eq!(skipped, [false, false, false, false, false, true, true, true]);
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_with_a_clear_error() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[]);
    let dir = run_until(&config, RunStart::New, 2).unwrap().run_dir;
    // Something takes the next checkpoint's name during the run: the rename fails as on a full disk.
    let taken = dir.join("checkpoints/step-4");
    let mut console = After { step: 3, action: || fs::write(&taken, "in the way").unwrap() };
    let start = RunStart::Resume(dir.clone());
    let error = run_with(&config, start, StopFlag::new(), &mut console).unwrap_err().to_string();
    let error = error.replace(&dir.display().to_string(), "RUN");
    insta::assert_snapshot!(error, @r"
    cannot write RUN/checkpoints/step-4: Not a directory (os error 20); nothing half-written is left
      hint: make room on the disk, or check the permissions of the folder
      the last good checkpoint is RUN/checkpoints/step-2; continue from it with: longwall train --resume RUN
    ");
    let left: Vec<_> = fs::read_dir(dir.join("checkpoints")).unwrap().collect();
    assert_eq!(left.len(), 2, "something half-written is left: {left:?}");
}

#[test]
fn keys_that_define_the_run_cannot_be_changed_on_resume() {
    let sandbox = Sandbox::new();
    let dir = run_until(&sandbox.config(&[]), RunStart::New, 2).unwrap().run_dir;
    let other = sandbox.config(&["model.layers=2"]);
    let error = run(&other, RunStart::Resume(dir.clone())).unwrap_err().to_string();
    assert!(error.contains("model.layers was 1, and is 2 now"), "{error}");
}

#[test]
fn recomputed_blocks_change_no_weight() {
    let sandbox = Sandbox::new();
    let run = |name: &str, recompute: &str| {
        let sets = [format!("run.name={name}"), format!("train.recompute={recompute}")];
        let config = sandbox.config(&[&sets[0], &sets[1], "model.layers=3"]);
        run(&config, RunStart::New).unwrap().run_dir
    };
    let (kept, recomputed) = (run("kept", "false"), run("recomputed", "true"));
    assert_eq!(losses(&kept), losses(&recomputed));
    assert_eq!(weights(&kept), weights(&recomputed));
}

/// bf16 as on a GPU: the CPU computes it through references.
#[test]
fn a_run_in_bf16_learns_as_one_in_f32_and_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let more = ["train.sample.every=6", "model.token_shift=true", "model.output_gate=true"];
    let config = |name: &str| sandbox.config(&[&more[..], &[&format!("run.name={name}")]].concat());
    let bf16 = |config: &RunConfig, start, stop: StopFlag, console: &mut dyn Console| {
        run_in(Precision::Bf16, config, start, stop, console).unwrap().run_dir
    };
    let exact = run(&config("f32"), RunStart::New).unwrap().run_dir;
    let whole = bf16(&config("whole"), RunStart::New, StopFlag::new(), &mut SilentConsole);
    let stop = StopFlag::new();
    let mut console = After { step: 7, action: || stop.raise() };
    let broken = bf16(&config("broken"), RunStart::New, stop.clone(), &mut console);
    let start = RunStart::Resume(broken.clone());
    bf16(&config("broken"), start, StopFlag::new(), &mut SilentConsole);
    assert_eq!(losses(&broken), losses(&whole));
    assert_eq!(weights(&broken), weights(&whole));

    assert_ne!(weights(&exact), weights(&whole));
    for (exact, rounded) in losses(&exact).iter().zip(&losses(&whole)) {
        if let (Record::Step(exact), Record::Step(rounded)) = (exact, rounded) {
            let (exact, rounded) = (exact.loss.unwrap(), rounded.loss.unwrap());
            assert!((exact - rounded).abs() < 0.02 * exact, "{exact} and {rounded}");
        }
    }
    // Files hold the f32 masters, not the rounded copies.
    let tensors = read_tensors(
        &Checkpoint::open(&whole, CheckpointSelector::Latest).unwrap().weights().unwrap(),
    );
    let finer = |x: &f32| x.to_bits() & 0xffff != 0;
    assert!(tensors.unwrap()["embedding"].1.iter().filter(|x| finer(x)).count() > 1000);
}
