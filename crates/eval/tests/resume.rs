//! Interrupted evaluations, and folders that hold something else.

use std::fs;
use std::path::Path;

use std::sync::Mutex;

use crate::common::{FakeModel, evaluate, evaluate_discarding, evaluate_with, files, passkey};
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::{
    Discard, EvalError, Progress, ProgressUpdate, Ranks, Report, RunContext, SamplingOptions,
    SuiteConfig, SuiteOptions, run,
};

fn options() -> SuiteOptions<PasskeyOptions> {
    SuiteOptions {
        own: PasskeyOptions { lengths: vec![500, 600], trials: 40, ..Default::default() },
        sampling: SamplingOptions { batch: 7, ..Default::default() },
    }
}

fn model() -> FakeModel {
    FakeModel::bytes(|prompt| match passkey(prompt) % 2 {
        0 => format!(" {}", passkey(prompt)),
        _ => " 0".to_string(),
    })
}

fn content(dir: &Path) -> Vec<(String, Vec<u8>)> {
    files(dir).into_iter().map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect()
}

#[test]
fn an_evaluation_cut_short_ends_as_an_unbroken_one() {
    let unbroken = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    let mut whole = model();
    evaluate(&config, &mut whole, unbroken.path()).unwrap();

    let broken = tempfile::tempdir().unwrap();
    let (mut calls, mut stops) = (0, 0);
    loop {
        let mut part = FakeModel { stop_after: Some(3), ..model() };
        match evaluate(&config, &mut part, broken.path()) {
            Err(EvalError::Stopped { done, total, .. }) => {
                assert!(done < total && total == 80);
                assert!(!broken.path().join("results.json").exists());
                stops += 1;
            }
            other => {
                other.unwrap();
                calls += part.calls.len();
                break;
            }
        }
        calls += part.calls.len();
        assert!(stops < 20, "an evaluation that resumes comes to an end");
    }
    assert!(stops >= 3);
    assert_eq!(calls, whole.calls.len(), "no batch is done twice");
    assert_eq!(content(broken.path()), content(unbroken.path()));
}

#[test]
fn a_line_that_was_cut_in_the_middle_is_done_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    evaluate(&config, &mut model(), dir.path()).unwrap();
    let before = content(dir.path());
    let samples = dir.path().join("samples.jsonl");
    let text = fs::read(&samples).unwrap();
    fs::write(&samples, &text[..text.len() - 100]).unwrap();
    fs::remove_file(dir.path().join("results.json")).unwrap();
    let mut rest = model();
    evaluate(&config, &mut rest, dir.path()).unwrap();
    assert_eq!(rest.calls.iter().map(|call| call.0).sum::<usize>(), 1);
    assert_eq!(content(dir.path()), before);
}

#[test]
fn a_finished_evaluation_asks_the_model_nothing() {
    let dir = tempfile::tempdir().unwrap();
    evaluate(&SuiteConfig::Passkey(options()), &mut model(), dir.path()).unwrap();
    let before = content(dir.path());
    let mut again = model();
    let sampling = SamplingOptions { batch: 64, batch_tokens: 1 << 20, ..Default::default() };
    let faster = SuiteOptions { sampling, ..options() };
    evaluate(&SuiteConfig::Passkey(faster), &mut again, dir.path()).unwrap();
    assert!(again.calls.is_empty(), "the size of a batch changes no sample");
    let samples = |files: &[(String, Vec<u8>)]| {
        files.iter().find(|(name, _)| name == "samples.jsonl").cloned()
    };
    assert_eq!(samples(&content(dir.path())), samples(&before));
}

#[test]
fn other_settings_are_refused_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("passkey");
    evaluate(&SuiteConfig::Passkey(options()), &mut model(), &folder).unwrap();
    let before = content(&folder);
    let mut other = options();
    (other.own.trials, other.sampling.seed) = (3, 1);
    let other = SuiteConfig::Passkey(other);
    let error = evaluate(&other, &mut model(), &folder).unwrap_err();
    insta::assert_snapshot!(error.to_string().replace(dir.path().to_str().unwrap(), "DIR"), @r"
    DIR/passkey holds an evaluation with other settings:
      options.seed was 0, now it is 1
      options.trials was 40, now it is 3
      hint: use the same settings to resume it, --force to throw its samples away, or --out NAME to keep both
    ");
    assert_eq!(content(&folder), before);
    let report = evaluate_with(&other, &mut model(), &folder, true, None).unwrap();
    assert_eq!(report.samples, 6);
}

/// Evaluates so many trials of each length, up to the call `stop_after`. Also returns how many samples were taken.
fn evaluate_trials(
    dir: &Path,
    discard: Discard,
    trials: usize,
    stop_after: Option<usize>,
) -> (Result<Report, EvalError>, usize) {
    let mut options = options();
    options.own.trials = trials;
    let mut model = FakeModel { stop_after, ..model() };
    let config = SuiteConfig::Passkey(options);
    let result = evaluate_discarding(&config, &mut model, dir, discard, None);
    (result, model.calls.iter().map(|call| call.0).sum())
}

/// An interrupted evaluation goes on with the same settings, and begins again with others.
#[test]
fn samples_with_other_settings_are_discarded_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let evaluate = |trials, stop_after| {
        evaluate_trials(dir.path(), Discard::OtherSettings, trials, stop_after)
    };
    let (stopped, taken) = evaluate(40, Some(3));
    assert!(matches!(stopped, Err(EvalError::Stopped { .. })) && taken < 80, "{taken}");
    let (report, rest) = evaluate(40, None);
    assert_eq!((report.unwrap().samples, taken + rest), (80, 80));
    let (stopped, taken) = evaluate(30, Some(2));
    assert!(matches!(stopped, Err(EvalError::Stopped { .. })) && taken < 60, "{taken}");
    assert!(!dir.path().join("results.json").exists());
    let (report, rest) = evaluate(30, None);
    assert_eq!((report.unwrap().samples, taken + rest), (60, 60));
    let (report, again) = evaluate(3, None);
    assert_eq!((report.unwrap().samples, again), (6, 6));
}

/// Finished results are kept unless they are of another checkpoint.
#[test]
fn only_outdated_samples_are_discarded_after_training() {
    let dir = tempfile::tempdir().unwrap();
    let evaluate =
        |trials, stop_after| evaluate_trials(dir.path(), Discard::Outdated, trials, stop_after).0;
    assert!(matches!(evaluate(40, Some(3)), Err(EvalError::Stopped { .. })));
    assert_eq!(evaluate(3, None).unwrap().samples, 6);
    let before = content(dir.path());
    assert!(matches!(evaluate(4, None), Err(EvalError::OtherSettings { .. })));
    assert_eq!(content(dir.path()), before);
    // As of an earlier checkpoint.
    let settings = dir.path().join("settings.json");
    let text = fs::read_to_string(&settings).unwrap();
    let earlier = text.replace("\"checkpoint_step\": 100", "\"checkpoint_step\": 50");
    assert_ne!(earlier, text);
    fs::write(&settings, earlier).unwrap();
    assert_eq!(evaluate(4, None).unwrap().samples, 8);
}

#[test]
fn another_checkpoint_or_tokenizer_is_other_settings() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    evaluate(&config, &mut model(), dir.path()).unwrap();
    let gpt2 = longwall_data::TokenizerConfig::Gpt2;
    let mut other =
        FakeModel { tokenizer: FakeModel::new(gpt2, |_| String::new()).tokenizer, ..model() };
    let error = evaluate(&config, &mut other, dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.name was \"bytes\", now it is \"gpt2\""), "{error}");
}

#[test]
fn damaged_samples_are_named_by_line() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    evaluate(&config, &mut model(), dir.path()).unwrap();
    let samples = dir.path().join("samples.jsonl");
    let text = fs::read_to_string(&samples).unwrap();
    let error = |text: String| {
        fs::write(&samples, text).unwrap();
        let error = evaluate(&config, &mut model(), dir.path()).unwrap_err().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    let second = text.lines().nth(1).unwrap();
    insta::assert_snapshot!(error(text.replace(second, "{\"id\": 1")), @r"
    DIR/samples.jsonl:2: not a sample of this suite: EOF while parsing an object at line 2 column 0
      hint: remove the line, or start again with --force
    ");
    let first = text.lines().next().unwrap();
    insta::assert_snapshot!(error(text.replace(second, first)), @r"
    DIR/samples.jsonl:2: sample 0 stands here twice
      hint: remove the line, or start again with --force
    ");
    fs::remove_file(dir.path().join("settings.json")).unwrap();
    insta::assert_snapshot!(error(text), @r"
    DIR holds an evaluation with other settings:
      samples.jsonl is there without settings.json
      hint: use the same settings to resume it, --force to throw its samples away, or --out NAME to keep both
    ");
}

#[test]
fn a_model_that_fails_keeps_what_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    let mut failing = FakeModel { fail_at: Some(4), ..model() };
    let error = evaluate(&config, &mut failing, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the model failed on 7 sequences of 490 tokens: out of memory
      hint: lower --batch or --batch-tokens if memory ran out
    ");
    assert_eq!(crate::common::samples(dir.path()).len(), 21);
    assert!(!dir.path().join("results.json").exists());
    let report = evaluate(&config, &mut model(), dir.path()).unwrap();
    assert_eq!(report.samples, 80);
}

/// Records the progress it receives.
#[derive(Default)]
struct Record(Mutex<Vec<String>>);

impl Progress for Record {
    fn start(&self, suite: &str, done: u64, total: u64) {
        self.0.lock().unwrap().push(format!("{suite}: {done} of {total}"));
    }

    fn update(&self, update: &ProgressUpdate) {
        assert!(update.samples_per_second.unwrap() > 0.0);
        assert_eq!(update.time_left.unwrap().is_zero(), update.done == update.total);
        self.0.lock().unwrap().push(format!("{} at {}", update.done, update.length));
    }

    fn finish(&self) {
        self.0.lock().unwrap().push("finish".to_string());
    }
}

#[test]
fn progress_counts_what_was_there_before() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    evaluate(&config, &mut FakeModel { stop_after: Some(9), ..model() }, dir.path()).unwrap_err();
    let record = Record::default();
    let context = RunContext {
        out_dir: dir.path().to_path_buf(),
        run: "wall".to_string(),
        checkpoint_step: Some(100),
        model_changes: vec![],
        git_hash: Some("a later commit".to_string()),
        discard: Discard::Nothing,
        held_out: None,
        progress: &record,
        stop: None,
        ranks: Ranks::ALONE,
    };
    let report = run(&config, &mut model(), &context).unwrap();
    assert_eq!(report.git_hash.as_deref(), Some("0123abc"), "that of the first samples");
    assert_eq!(
        record.0.into_inner().unwrap(),
        ["passkey: 61 of 80", "68 at 600", "75 at 600", "80 at 600", "finish"]
    );
}

#[test]
fn one_folder_takes_one_evaluation_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("samples.jsonl");
    let other = fs::File::create(&path).unwrap();
    other.lock().unwrap();
    let config = SuiteConfig::Passkey(options());
    let error = evaluate(&config, &mut model(), dir.path()).unwrap_err();
    assert!(matches!(error, EvalError::Busy { .. }), "{error}");
    drop(other);
    evaluate(&config, &mut model(), dir.path()).unwrap();
}

#[test]
fn a_model_that_breaks_its_contract_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    let mut losing = FakeModel { loses_answers: true, ..model() };
    let error = evaluate(&config, &mut losing, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the model gave 6 values for answers to a batch; expected 7
    ");
    assert_eq!(crate::common::samples(dir.path()).len(), 0);
}
