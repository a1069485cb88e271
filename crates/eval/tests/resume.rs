//! Evaluations that were cut short, and folders that hold something else.

mod common;

use std::fs;
use std::path::Path;

use common::{FakeModel, evaluate, evaluate_with, files, passkey};
use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::{EvalError, SuiteConfig};

fn options() -> PasskeyOptions {
    PasskeyOptions { lengths: vec![500, 600], trials: 40, batch: 7, ..PasskeyOptions::default() }
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
    let faster = PasskeyOptions { batch: 64, batch_tokens: 1 << 20, ..options() };
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
    let other = SuiteConfig::Passkey(PasskeyOptions { trials: 3, seed: 1, ..options() });
    let error = evaluate(&other, &mut model(), &folder).unwrap_err();
    insta::with_settings!({ filters => vec![(dir.path().to_str().unwrap(), "DIR")] }, {
        insta::assert_snapshot!(error, @"");
    });
    assert_eq!(content(&folder), before);
    let report = evaluate_with(&other, &mut model(), &folder, true, None).unwrap();
    assert_eq!(report.samples, 6);
}

#[test]
fn another_checkpoint_or_tokeniser_is_other_settings() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(options());
    evaluate(&config, &mut model(), dir.path()).unwrap();
    let gpt2 = longwall_data::TokenizerConfig::Gpt2;
    let mut other = FakeModel { tokenizer: FakeModel::new(gpt2, |_| String::new()).tokenizer, ..model() };
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
    insta::assert_snapshot!(error(text.replace(second, "{\"id\": 1")), @"");
    let first = text.lines().next().unwrap();
    insta::assert_snapshot!(error(text.replace(second, first)), @"");
    fs::remove_file(dir.path().join("settings.json")).unwrap();
    insta::assert_snapshot!(error(text), @"");
}

#[test]
fn a_model_that_fails_keeps_what_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("a.txt");
    fs::write(&text, "x".repeat(3000)).unwrap();
    let options = ExtrapolateOptions {
        lengths: Some(vec![64, 256]),
        text: vec![text],
        sequences: 2,
        ..ExtrapolateOptions::default()
    };
    let config = SuiteConfig::Extrapolate(options);
    let out = dir.path().join("out");
    let mut short = FakeModel::bytes(|_| String::new());
    short.token_log_p = Box::new(|_, length, _| {
        assert!(length > 0);
        -1.0
    });
    let report = evaluate(&config, &mut short, &out).unwrap();
    assert_eq!(report.samples, 10);
}
