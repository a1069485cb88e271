//! The perplexity suite on models whose answers are known.

use std::path::{Path, PathBuf};

use crate::common::{FakeModel, Tokens, evaluate, evaluate_with, files, samples};
use longwall_eval::suites::perplexity::PerplexityOptions;
use longwall_eval::{Report, SuiteConfig};

/// A folder of two documents: 5 words in 24 bytes, 2 words in 8 bytes.
fn folder(dir: &Path) -> PathBuf {
    let folder = dir.join("text");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("a.txt"), "one two  three\nfour five").unwrap();
    std::fs::write(folder.join("b.txt"), "six 7.\n\n").unwrap();
    folder
}

fn value(report: &Report, metric: &str, length: usize) -> f64 {
    let found = report.scores.iter().find(|s| s.metric == metric && s.length == Some(length));
    found.unwrap().estimate.value.unwrap()
}

fn model(token_log_p: impl Fn(usize, usize, &[u32]) -> f32 + 'static) -> FakeModel {
    FakeModel { token_log_p: Box::new(token_log_p), ..FakeModel::bytes(|_| String::new()) }
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-5 * b.abs().max(1.0), "{a}, not {b}");
}

#[test]
fn a_uniform_model_has_the_perplexity_of_its_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let text = vec![folder(dir.path())];
    let options = PerplexityOptions { lengths: Some(vec![4, 16]), text, ..Default::default() };
    let mut uniform = FakeModel::bytes(|_| String::new());
    let out = dir.path().join("out");
    let report = evaluate(&SuiteConfig::from(options), &mut uniform, &out).unwrap();
    for length in [4, 16] {
        close(value(&report, "byte_perplexity", length), 257.0);
        close(value(&report, "token_perplexity", length), 257.0);
        close(value(&report, "bits_per_byte", length), 257f64.log2());
        close(value(&report, "word_perplexity", length), (257f64.ln() * 32.0 / 7.0).exp());
    }
    assert_eq!(report.resolved["words"], 7);
    assert_eq!(report.resolved["bytes"], 32);
    assert_eq!(report.resolved["strides"], serde_json::json!([2, 8]));
    let names = ["bits_per_byte.svg", "grid.csv", "results.json", "samples.jsonl", "settings.json"];
    assert_eq!(files(&out), names);
}

#[test]
fn a_model_that_knows_the_text_has_perplexity_one() {
    let dir = tempfile::tempdir().unwrap();
    let options = PerplexityOptions { text: vec![folder(dir.path())], ..Default::default() };
    let out = dir.path().join("out");
    let report = evaluate(&SuiteConfig::from(options), &mut model(|_, _, _| 0.0), &out).unwrap();
    for metric in ["byte_perplexity", "word_perplexity", "token_perplexity"] {
        assert_eq!(report.headline[&format!("{metric}@1024")], Some(1.0));
    }
    assert_eq!(report.headline["bits_per_byte@1024"], Some(0.0));
}

#[test]
fn every_token_counts_once_and_documents_begin_after_an_end_of_text() {
    let dir = tempfile::tempdir().unwrap();
    let text = vec![folder(dir.path())];
    // Stride 3 of 8: after the first window, each scores three tokens after five of context.
    let options =
        PerplexityOptions { lengths: Some(vec![8]), stride: Some(3), text, ..Default::default() };
    // ln p is minus the predicted byte: the sum over all bytes, whatever the windows.
    let mut known = model(|at, _, tokens| -(tokens[at + 1] as f32) / 100.0);
    let out = dir.path().join("out");
    let report = evaluate(&SuiteConfig::from(options), &mut known, &out).unwrap();
    let bytes = "one two  three\nfour fivesix 7.\n\n".bytes();
    let total: f64 = bytes.map(|byte| f64::from(byte) / 100.0).sum();
    close(value(&report, "bits_per_byte", 8), total / 32.0 / 2f64.ln());
    close(value(&report, "token_perplexity", 8), (total / 32.0).exp());
    let samples = samples(&out);
    let scored: u64 = samples.iter().map(|s| s["verdict"]["tokens"].as_u64().unwrap()).sum();
    assert_eq!(scored, 32);
    let begins = samples.iter().filter(|s| s["prompt"].as_str().unwrap().starts_with("<|endof"));
    assert_eq!(begins.count(), 2);
}

#[test]
fn the_validation_split_is_text_too_and_the_limit_cuts_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut tokens: Vec<u32> = "ab cd".bytes().map(u32::from).collect();
    tokens.extend([256, 256]);
    tokens.extend("efghij".bytes().map(u32::from));
    let options = PerplexityOptions { limit: Some(10), ..Default::default() };
    let config = SuiteConfig::from(options);
    let mut known = model(|_, _, _| -1.0);
    let held_out = Tokens(tokens);
    let report = evaluate_with(&config, &mut known, dir.path(), false, Some(&held_out)).unwrap();
    assert_eq!((&report.resolved["documents"], &report.resolved["tokens"]), (&2.into(), &8.into()));
    assert_eq!(report.resolved["words"], 3);
    close(value(&report, "word_perplexity", 1024), (8f64 / 3.0).exp());
}

#[test]
fn impossible_probabilities_leave_no_value() {
    let dir = tempfile::tempdir().unwrap();
    for log_p in [f32::NEG_INFINITY, f32::NAN] {
        let options = PerplexityOptions { text: vec![], ..Default::default() };
        let held_out = Tokens("some text".bytes().map(u32::from).collect());
        let mut broken = model(move |_, _, _| log_p);
        let config = SuiteConfig::from(options);
        let report =
            evaluate_with(&config, &mut broken, dir.path(), true, Some(&held_out)).unwrap();
        assert!(report.headline.values().all(Option::is_none), "{:?}", report.headline);
    }
}

#[test]
fn bad_strides_and_missing_text_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = |options: PerplexityOptions| {
        let out = dir.path().join("out");
        let mut uniform = FakeModel::bytes(|_| String::new());
        evaluate(&SuiteConfig::from(options), &mut uniform, &out)
            .unwrap_err()
            .to_string()
            .replace(dir.path().to_str().unwrap(), "DIR")
    };
    let options = || PerplexityOptions { lengths: Some(vec![8]), ..Default::default() };
    insta::assert_snapshot!(
        error(PerplexityOptions { stride: Some(9), limit: Some(0), ..options() }), @r"
    the configuration has 2 problems:
    perplexity.stride is 9; allowed: 1 to the shortest length, 8
      hint: leave it out for half of each length
    perplexity.limit is 0; allowed: 1 or more tokens
      hint: leave it out to score all text
    ");
    let text = vec![folder(dir.path())];
    insta::assert_snapshot!(
        error(PerplexityOptions { stride: Some(2000), text, ..Default::default() }), @r"
    the configuration has 1 problem:
    perplexity.stride is 2000; allowed: 1 to the training length, 1024
      hint: leave it out for half of each length
    ");
    insta::assert_snapshot!(error(options()), @r"
    perplexity needs held-out text, and this run has no validation split to take it from
      hint: name text files or folders the model was not trained on: --text FILES
    ");
    std::fs::write(dir.path().join("empty.txt"), "").unwrap();
    let text = vec![dir.path().join("empty.txt")];
    insta::assert_snapshot!(error(PerplexityOptions { text, ..options() }), @r"
    perplexity: there is no text in the file DIR/empty.txt of --text
      hint: give files that hold text: --text FILES
    ");
}
