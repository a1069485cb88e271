//! The flip-flop suite on models whose answers are known.

use crate::common::{FakeModel, evaluate, files, samples};
use longwall_eval::suites::fflm::FflmOptions;
use longwall_eval::{Report, SuiteConfig};
use serde_json::Value;

const WRITE: u32 = b'w' as u32;
const READ: u32 = b'r' as u32;

fn config() -> SuiteConfig {
    SuiteConfig::from(FflmOptions {
        lengths: vec![64, 256],
        sequences: Some(40),
        sparse_sequences: Some(60),
        dense_sequences: Some(20),
    })
}

/// A model that is certain that the next bit is `answer(tokens read)`.
pub(crate) fn model(answer: impl Fn(&[u32]) -> u8 + 'static) -> FakeModel {
    FakeModel {
        token_log_p: Box::new(move |at, _, tokens| {
            let right = tokens[at + 1] == u32::from(answer(&tokens[..=at]));
            if right { -0.1 } else { -3.0 }
        }),
        ..FakeModel::bytes(|_| String::new())
    }
}

/// The last bit written, and how many tokens ago.
pub(crate) fn register(read: &[u32]) -> (u8, usize) {
    let place = read.iter().rposition(|&token| token == WRITE).unwrap();
    (read.get(place + 1).map_or(b'0', |&bit| bit as u8), read.len() - place)
}

fn error(report: &Report, set: &str, length: usize) -> f64 {
    let metric = format!("error_{set}");
    let found = report.scores.iter().find(|s| s.metric == metric && s.length == Some(length));
    found.unwrap().estimate.value.unwrap()
}

const SETS: [&str; 3] = ["in_distribution", "sparse", "dense"];

#[test]
fn a_model_that_remembers_makes_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let report = evaluate(&config(), &mut model(|read| register(read).0), dir.path()).unwrap();
    assert_eq!(report.samples, 2 * 120);
    for (set, length) in SETS.into_iter().flat_map(|set| [(set, 64), (set, 256)]) {
        assert_eq!(error(&report, set, length), 0.0);
        assert_eq!(report.headline[&format!("error_{set}@{length}")], Some(0.0));
    }
    let rates = report.details["error_rates"].as_array().unwrap();
    let dense = &rates[2];
    assert_eq!((&dense["set"], &dense["sequences"]), (&Value::from("dense"), &Value::from(20)));
    // No error in 20 sequences still allows a high error rate.
    let interval: Vec<f64> = serde_json::from_value(dense["confidence_95"].clone()).unwrap();
    assert!(interval[0] == 0.0 && (interval[1] - 0.1611).abs() < 1e-3, "{interval:?}");
    assert_eq!(
        files(dir.path()),
        ["errors.svg", "grid.csv", "results.json", "samples.jsonl", "settings.json"]
    );
}

#[test]
fn a_short_memory_fails_where_distances_are_long() {
    let dir = tempfile::tempdir().unwrap();
    let forgetful = |read: &[u32]| match register(read) {
        (bit, distance) if distance <= 12 => bit,
        _ => b'0',
    };
    let report = evaluate(&config(), &mut model(forgetful), dir.path()).unwrap();
    let [mixed, sparse, dense] = SETS.map(|set| error(&report, set, 256));
    assert!(dense < mixed && mixed < sparse && sparse < 0.7, "{dense}, {mixed}, {sparse}");
    // The rates are those of the samples, counted by hand.
    let (mut reads, mut errors) = (0, 0);
    for sample in samples(dir.path()).iter().filter(|s| s["length"] == 256).take(40) {
        let text: Vec<u32> = sample["prompt"].as_str().unwrap().bytes().map(u32::from).collect();
        assert_eq!(text.len(), 256);
        let places = (0..256).filter(|&at| text[at] == READ);
        let wrong = places.clone().filter(|&at| text[at + 1] != u32::from(forgetful(&text[..=at])));
        let (here, wrong) = (places.clone().count(), wrong.count());
        assert_eq!(sample["verdict"], serde_json::json!({ "reads": here, "errors": wrong }));
        reads += here;
        errors += wrong;
    }
    assert!((mixed - errors as f64 / reads as f64).abs() < 1e-12);
}

#[test]
fn the_sets_have_their_shares_of_ignored_instructions() {
    let dir = tempfile::tempdir().unwrap();
    evaluate(&config(), &mut model(|_| b'1'), dir.path()).unwrap();
    let samples = samples(dir.path());
    let long: Vec<&str> = samples
        .iter()
        .filter(|sample| sample["length"] == 256)
        .map(|sample| sample["prompt"].as_str().unwrap())
        .collect();
    for (texts, wanted) in [(&long[..40], 0.8), (&long[40..100], 0.98), (&long[100..], 0.1)] {
        let ignored: usize = texts.iter().map(|text| text.matches('i').count()).sum();
        let share = ignored as f64 / (128 * texts.len()) as f64;
        assert!((share - wanted).abs() < 0.03, "{share}, not {wanted}");
    }
}

#[test]
fn unsure_and_broken_models_are_wrong() {
    for log_p in [0.5f32.ln(), f32::NAN, f32::NEG_INFINITY] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = model(|_| b'0');
        model.token_log_p = Box::new(move |_, _, _| log_p);
        let report = evaluate(&config(), &mut model, dir.path()).unwrap();
        assert!(SETS.iter().all(|set| error(&report, set, 64) == 1.0), "ln p = {log_p}");
    }
}

#[test]
fn a_cut_evaluation_goes_on_to_the_same_scores() {
    let [whole, cut] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let remembering = || model(|read| if register(read).1 < 30 { register(read).0 } else { b'1' });
    let report = evaluate(&config(), &mut remembering(), whole.path()).unwrap();
    let mut stopped = FakeModel { stop_after: Some(2), ..remembering() };
    evaluate(&config(), &mut stopped, cut.path()).unwrap_err();
    let resumed = evaluate(&config(), &mut remembering(), cut.path()).unwrap();
    assert_eq!(report, resumed);
}
