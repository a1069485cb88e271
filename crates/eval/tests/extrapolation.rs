//! The extrapolation suite on models whose loss is known.

use std::path::Path;

use crate::common::{FakeModel, Tokens, evaluate, evaluate_with, files, samples};
use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::{Report, SuiteConfig};

fn config(lengths: Option<Vec<usize>>, text: &Path) -> SuiteConfig {
    SuiteConfig::from(ExtrapolateOptions {
        lengths,
        text: vec![text.to_path_buf()],
        sequences: 4,
        ..ExtrapolateOptions::default()
    })
}

/// Six documents of 5000 characters and one short one.
fn documents(dir: &Path) -> std::path::PathBuf {
    let folder = dir.join("text");
    std::fs::create_dir(&folder).unwrap();
    for n in 0..6u8 {
        let letter = char::from(b'a' + n);
        std::fs::write(folder.join(format!("{letter}.txt")), letter.to_string().repeat(5000))
            .unwrap();
    }
    std::fs::write(folder.join("short.txt"), "short").unwrap();
    folder
}

fn score(report: &Report, metric: &str, length: usize) -> (f64, f64) {
    let found = report.scores.iter().find(|s| s.metric == metric && s.length == Some(length));
    let estimate = found.unwrap().estimate;
    (estimate.value.unwrap(), estimate.standard_error.unwrap())
}

fn silent() -> FakeModel {
    FakeModel { train_seq_len: 64, ..FakeModel::bytes(|_| String::new()) }
}

#[test]
fn a_uniform_model_has_the_loss_of_its_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    let report = evaluate(&config(Some(vec![64, 1024, 4096]), &text), &mut silent(), &out).unwrap();
    for length in [64, 1024, 4096] {
        for metric in ["loss", "best_context_loss"] {
            let (loss, error) = score(&report, metric, length);
            assert!((loss - 257f64.ln()).abs() < 1e-6 && error < 1e-9, "{metric} {loss} {error}");
        }
        let (perplexity, _) = score(&report, "perplexity", length);
        assert!((perplexity - 257.0).abs() < 1e-3, "{perplexity}");
    }
    assert_eq!(
        files(&out),
        [
            "grid.csv",
            "in_context_learning.svg",
            "loss_by_length.svg",
            "loss_by_position.svg",
            "positions.csv",
            "results.json",
            "samples.jsonl",
            "settings.json"
        ]
    );
}

#[test]
fn positions_and_best_context_are_those_of_a_model_that_breaks_down() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    // The loss falls with the logarithm of the context up to 256 tokens, and is 9 beyond.
    let loss = |read: usize| {
        if read <= 256 { 8.0 - (read as f32).log2() / 2.0 } else { 9.0 }
    };
    let mut model = silent();
    model.token_log_p = Box::new(move |at, _, _| -loss(at + 1));
    let report = evaluate(&config(Some(vec![64, 1024]), &text), &mut model, &out).unwrap();

    let mean = |from: usize, to: usize| {
        (from..to).map(|at| f64::from(loss(at + 1))).sum::<f64>() / (to - from) as f64
    };
    assert!((score(&report, "loss", 64).0 - mean(0, 64)).abs() < 1e-6);
    assert!((score(&report, "loss", 1024).0 - mean(0, 1024)).abs() < 1e-6);
    let bins = report.details["positions"].as_array().unwrap();
    for bin in bins {
        let (from, to) = (bin["from"].as_u64().unwrap(), bin["to"].as_u64().unwrap());
        let expected = mean(from as usize, to as usize);
        assert!((bin["value"].as_f64().unwrap() - expected).abs() < 1e-6, "{bin}");
    }
    let linear = |bin: &&serde_json::Value| bin["binning"] == "linear" && bin["length"] == 1024;
    assert_eq!(bins.iter().filter(linear).count(), 8);
    let best = &report.details["best_context_positions"]["1024"];
    assert_eq!((best["from"].as_u64(), best["to"].as_u64()), (Some(128), Some(256)));
    assert!((score(&report, "best_context_loss", 1024).0 - mean(128, 256)).abs() < 1e-6);
    let headline = report.headline_estimates["best_context_loss"];
    assert_eq!(headline.value, report.headline["best_context_loss"]);
    assert!(headline.standard_error.is_some() && headline.high.is_some());
    insta::assert_snapshot!(report.notes.join("\n"), @r"
    length 1024 is beyond the training length, 64: such scores show how the model extrapolates
    the best-context loss of length 1024 is that of the positions 129 to 256: 4.219 ± 0.000, at most 4.219 with 95 % confidence
    ");
}

#[test]
fn a_lucky_position_is_not_the_best_context() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    // The first documents find their fourth token easy, the others hard; later tokens are all alike.
    let mut model = silent();
    model.token_log_p = Box::new(|at, _, tokens| match (at, tokens[0] % 2) {
        (3, 0) => -0.01,
        (3, _) => -2.5,
        _ => -1.5,
    });
    let report = evaluate(&config(Some(vec![64, 1024]), &text), &mut model, &out).unwrap();
    let (best, error) = score(&report, "best_context_loss", 1024);
    assert!((best - 1.5).abs() < 1e-6 && error < 1e-6, "{best} ± {error}");
}

#[test]
fn one_document_gives_no_best_context() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("only.txt");
    std::fs::write(&text, "x".repeat(5000)).unwrap();
    let out = dir.path().join("out");
    let report = evaluate(&config(Some(vec![64, 1024]), &text), &mut silent(), &out).unwrap();
    assert!(!report.headline.contains_key("best_context_loss"));
    let table = report.to_string();
    assert!(table.contains("5.549 ± ?") && table.contains("no best-context loss"), "{table}");
}

#[test]
fn positions_have_their_bounds_in_table_and_plots() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    let mut model = silent();
    model.token_log_p = Box::new(|at, _, tokens| -((tokens[0] % 4) as f32) - 1.0 / (at + 1) as f32);
    evaluate(&config(Some(vec![64, 1024]), &text), &mut model, &out).unwrap();
    for plot in ["loss_by_position.svg", "in_context_learning.svg"] {
        let svg = std::fs::read_to_string(out.join(plot)).unwrap();
        assert_eq!(svg.matches("<polygon").count(), 2, "{plot} has a band for each length");
        assert!(svg.contains("one standard error"), "{plot}");
    }
    let csv = std::fs::read_to_string(out.join("positions.csv")).unwrap();
    assert!(csv.lines().all(|line| line.split(',').count() == 9 && !line.contains(",,")), "{csv}");
}

#[test]
fn empty_documents_are_no_packed_text() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("text");
    std::fs::create_dir(&folder).unwrap();
    for n in 0..100 {
        std::fs::write(folder.join(format!("{n}.txt")), "").unwrap();
    }
    let options = ExtrapolateOptions {
        lengths: Some(vec![16]),
        text: vec![folder],
        packed: true,
        ..Default::default()
    };
    let out = dir.path().join("out");
    let error = evaluate(&SuiteConfig::from(options), &mut silent(), &out).unwrap_err();
    insta::assert_snapshot!(error, @r"
    extrapolate: the text has 0 tokens (100 files of --text); length 16 needs 17
      hint: give more text, or shorter --lengths
    ");
}

#[test]
fn standard_errors_are_over_documents() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    // A document's loss is the number of its letter.
    let mut model = silent();
    model.token_log_p = Box::new(|_, _, tokens| -((tokens[0] - u32::from(b'a')) as f32));
    let report = evaluate(&config(Some(vec![64, 4096]), &text), &mut model, &out).unwrap();
    let losses: Vec<f64> = samples(&out)
        .iter()
        .filter(|sample| sample["length"] == 4096)
        .map(|sample| sample["verdict"]["loss"].as_f64().unwrap())
        .collect();
    assert_eq!(losses.len(), 4);
    let mean = losses.iter().sum::<f64>() / 4.0;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / 3.0;
    let expected = (mean, (variance / 4.0).sqrt());
    assert!(expected.1 > 0.1);
    // 64 windows of a document carry no more information than one: the errors are equal at both lengths.
    for length in [64, 4096] {
        let (loss, error) = score(&report, "loss", length);
        assert!((loss - expected.0).abs() < 1e-9 && (error - expected.1).abs() < 1e-9);
    }
}

#[test]
fn default_lengths_go_as_far_as_text_and_model() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let lengths = |model: &mut FakeModel, out: &str| {
        let report = evaluate(&config(None, &text), model, &dir.path().join(out)).unwrap();
        (report.resolved["lengths"].to_string(), report.resolved["lengths_left_out"].to_string())
    };
    let all = "[64,128,256,512,1024,2048]";
    assert_eq!(lengths(&mut silent(), "all"), (all.into(), "[]".into()));
    let mut longer = FakeModel { train_seq_len: 256, ..silent() };
    assert_eq!(lengths(&mut longer, "text"), ("[256,512,1024,2048,4096]".into(), "[8192]".into()));
    let mut bounded = FakeModel { max_len: Some(200), ..silent() };
    assert_eq!(lengths(&mut bounded, "model"), ("[64,128]".into(), "[]".into()));
    assert!(bounded.calls.iter().all(|&(_, tokens, _)| tokens <= 129));
}

#[test]
fn the_validation_split_is_read_packed() {
    let dir = tempfile::tempdir().unwrap();
    let held_out = Tokens((0..2000).map(|n| if n % 100 == 99 { 256 } else { 97 }).collect());
    let options =
        ExtrapolateOptions { lengths: Some(vec![64, 256]), sequences: 4, ..Default::default() };
    let config = SuiteConfig::from(options);
    let report = evaluate_with(&config, &mut silent(), dir.path(), false, Some(&held_out)).unwrap();
    assert_eq!(report.resolved["packed"], true);
    assert_eq!(report.resolved["text"], "validation split of a test");
    let windows = samples(dir.path()).iter().filter(|sample| sample["length"] == 256).count();
    assert_eq!(windows, 4);
}

#[test]
fn losses_that_are_no_numbers_are_null_and_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    let mut model = silent();
    model.token_log_p = Box::new(|at, _, _| if at < 512 { -1.0 } else { f32::NAN });
    let report = evaluate(&config(Some(vec![64, 1024]), &text), &mut model, &out).unwrap();
    assert_eq!(report.headline["loss@64"], Some(1.0));
    assert_eq!(report.headline["loss@1024"], None);
    assert!(report.to_string().contains("not finite"), "{report}");
    assert_eq!(Report::load(&out.join("results.json")).unwrap(), report);
}

#[test]
fn text_that_is_too_short_is_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let text = documents(dir.path());
    let out = dir.path().join("out");
    let error = evaluate(&config(Some(vec![8192]), &text), &mut silent(), &out).unwrap_err();
    insta::assert_snapshot!(error, @r"
    extrapolate: the longest document has 5000 tokens (7 files of --text); length 8192 needs 8193
      hint: give longer documents, shorter --lengths, or --packed to join short documents
    ");
    let options = ExtrapolateOptions {
        lengths: Some(vec![8192]),
        text: vec![text],
        packed: true,
        ..Default::default()
    };
    let report = evaluate(&SuiteConfig::from(options), &mut silent(), &out).unwrap();
    assert_eq!(report.samples, 3);
}
