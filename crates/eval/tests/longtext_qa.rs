//! The suite of questions about long texts on files of our own in the formats of LongBench and SCROLLS.

use std::path::{Path, PathBuf};

use longwall_eval::suites::longtext_qa::LongtextQaOptions;
use longwall_eval::{EvalError, Report};
use serde_json::{Value, json};

use crate::common::{FakeModel, evaluate, files, sorted_samples};

fn write(path: PathBuf, lines: &[Value]) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(path, text).unwrap();
}

fn longbench(input: &str, context: &str, answers: &[&str], length: usize) -> Value {
    json!({
        "input": input, "context": context, "answers": answers, "length": length,
        "dataset": "x", "language": "en", "all_classes": null, "_id": format!("{length}"),
    })
}

/// Two questions, one code line; a question with two answers and a summary.
pub(crate) fn options(dir: &Path) -> LongtextQaOptions {
    let (one, two) = (dir.join("longbench"), dir.join("scrolls"));
    let long = "The sky over the harbour was grey that day. ".repeat(40);
    write(
        one.join("qasper.jsonl"),
        &[
            longbench("What colour is the sky?", &long, &["blue", "grey"], 5000),
            longbench("What is green?", "The grass is green.", &["The grass"], 4),
        ],
    );
    write(one.join("lcc.jsonl"), &[longbench("", "def f(x):\n    y = x\n", &["    return y"], 6)]);
    let scrolls = |id: &str, input: &str, output: &str| json!({ "id": id, "pid": format!("{id}_0"), "input": input, "output": output });
    write(
        two.join("qasper/validation.jsonl"),
        &[
            scrolls("a", "Who wrote it?\n\nA text about Ada.\n\nIts end.", "Ada"),
            scrolls("a", "Who wrote it?\n\nA text about Ada.\n\nIts end.", "Ada Kelenford"),
        ],
    );
    let summary = "The harbour was grey.";
    write(two.join("gov_report/validation.jsonl"), &[scrolls("b", "A long\n\nreport.", summary)]);
    let lengths = Some(vec![700]);
    LongtextQaOptions { longbench: Some(one), scrolls: Some(two), lengths, ..Default::default() }
}

/// Knows some of the answers.
fn model() -> FakeModel {
    FakeModel::bytes(|prompt| {
        match prompt {
            prompt if prompt.ends_with("What colour is the sky?\nAnswer:") => " Grey.",
            prompt if prompt.ends_with("What is green?\nAnswer:") => " green grass everywhere",
            prompt if prompt.ends_with("y = x\n") => "    return x\n    return y",
            prompt if prompt.ends_with("Who wrote it?\nAnswer:") => " Ada K.\nQuestion: and then?",
            prompt if prompt.ends_with("Summary of the text above:") => " The harbour was blue",
            _ => "",
        }
        .to_string()
    })
}

fn value(report: &Report, metric: &str) -> f64 {
    let found = report.scores.iter().find(|score| score.metric == metric);
    found.unwrap_or_else(|| panic!("no {metric}")).estimate.value.unwrap()
}

#[test]
fn every_task_is_scored_by_its_own_scorer() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let report = evaluate(&options(dir.path()).into(), &mut model(), &out).unwrap();
    let close = |metric: &str, wanted: f64| {
        let found = value(&report, metric);
        assert!((found - wanted).abs() < 1e-9, "{metric}: {found}, not {wanted}");
    };
    // "grey" is one of the answers; of "green grass everywhere", one word of three, the answer is one word.
    close("longbench/qasper:f1", (1.0 + 0.5) / 2.0);
    // 11 of 12 characters in common: 2 · 11 / 24, rounded.
    close("longbench/lcc:edit_similarity", 0.92);
    // "Ada K" and "Ada": 2 / 3; with "Ada Kelenford": 1 / 2.
    close("scrolls/qasper:f1", 2.0 / 3.0);
    // "the harbour was" of four words each; "the harbour", "harbour was" of three pairs.
    close("scrolls/gov_report:rouge1", 0.75);
    close("scrolls/gov_report:rouge2", 2.0 / 3.0);
    close("scrolls/gov_report:rougeL", 0.75);
    close("scrolls/gov_report:rouge_geometric_mean", (0.75f64 * 0.75 * 2.0 / 3.0).cbrt());
    close("longbench:mean", (0.75 + 0.92) / 2.0);
    let names = ["grid.csv", "results.json", "samples.jsonl", "scores.svg", "settings.json"];
    assert_eq!(files(&out), names);
    // Buckets by the number of words: 4 and 5000.
    let bucket = |words: &str| {
        let all = report.details["buckets"].as_array().unwrap();
        let of = |b: &&Value| b["task"] == "longbench/qasper" && b["words"] == words;
        all.iter().find(of).unwrap()["estimate"]["value"].as_f64()
    };
    assert_eq!((bucket("0-4k"), bucket("4-8k"), bucket("8k+")), (Some(0.5), Some(1.0), None));
    insta::assert_snapshot!(report, @"
    longtext-qa (version 1): run wall, step 100, 5 samples, seed 0, fake

                  task                metric  length  documents            all  0-4k words  4-8k words  8k+ words
      longbench/qasper                    f1     700          2  0.750 ± 0.250   0.500 ± ?   1.000 ± ?
         longbench/lcc       edit_similarity     700          1      0.920 ± ?   0.920 ± ?
    scrolls/gov_report                rouge1     700          1      0.750 ± ?   0.750 ± ?
    scrolls/gov_report                rouge2     700          1      0.667 ± ?   0.667 ± ?
    scrolls/gov_report                rougeL     700          1      0.750 ± ?   0.750 ± ?
    scrolls/gov_report  rouge_geometric_mean     700          1      0.721 ± ?   0.721 ± ?
        scrolls/qasper                    f1     700          1      0.667 ± ?   0.667 ± ?
             longbench       mean of 2 tasks     700          3      0.835 ± ?
               scrolls       mean of 2 tasks     700          2      0.694 ± ?
    lengths in tokens of the bytes tokenizer (trained at 1024); ± is the standard error; ± ? where a single sample or document gives no standard error
    note: 1 of 5 prompts fill length 700: they have lost their middle, where they are longer
    note: not run, because their files are not there: longbench/narrativeqa, longbench/multifieldqa_en, longbench/hotpotqa, longbench/2wikimqa, longbench/musique, longbench/gov_report, longbench/qmsum, longbench/multi_news, longbench/trec, longbench/triviaqa, longbench/samsum, longbench/passage_count, longbench/passage_retrieval_en, longbench/repobench-p, scrolls/summ_screen_fd, scrolls/qmsum, scrolls/narrative_qa, scrolls/quality, scrolls/contract_nli
    ");
}

#[test]
fn long_prompts_lose_their_middle_and_keep_the_question() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut model = model();
    evaluate(&options(dir.path()).into(), &mut model, &out).unwrap();
    let samples = sorted_samples(&out);
    let sky =
        samples.iter().find(|s| s["task"] == "longbench/qasper" && s["words"] == 5000).unwrap();
    let prompt = sky["prompt"].as_str().unwrap();
    assert_eq!((sky["prompt_tokens"].as_u64(), prompt.len()), (Some(572), 572));
    assert!(prompt.starts_with("The sky over the harbour") && prompt.ends_with("sky?\nAnswer:"));
    assert_eq!(sky["expected"], "blue\ngrey");
    assert!(model.calls.iter().all(|(_, read, generated)| read + generated <= 700));
    let ada = samples.iter().find(|s| s["task"] == "scrolls/qasper").unwrap();
    assert_eq!(ada["prompt"], "A text about Ada.\n\nIts end.\n\nQuestion: Who wrote it?\nAnswer:");
}

#[test]
fn tasks_limits_and_budgets_can_be_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let options = LongtextQaOptions {
        tasks: vec!["longbench/qasper".to_string()],
        limit: Some(1),
        max_tokens: Some(3),
        ..options(dir.path())
    };
    let mut model = model();
    let report = evaluate(&options.into(), &mut model, &dir.path().join("out")).unwrap();
    assert_eq!((report.samples, model.calls[0].2), (1, 3));
    // " Gr" is cut off.
    assert_eq!(value(&report, "longbench/qasper:f1"), 0.0);
    assert_eq!(report.notes.len(), 1, "tasks not asked for are not missed: {:?}", report.notes);
}

#[test]
fn the_prompts_of_longbench_can_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("dataset2prompt.json");
    let tasks = vec!["longbench/qasper".to_string()];
    let options = LongtextQaOptions { prompts: Some(path.clone()), tasks, ..options(dir.path()) };
    let run = |text: &str, out: &str| {
        std::fs::write(&path, text).unwrap();
        evaluate(&options.clone().into(), &mut model(), &dir.path().join(out))
    };
    run(r#"{"qasper": "Article: {context}\nQ: {input}\nA:"}"#, "out").unwrap();
    let samples = sorted_samples(&dir.path().join("out"));
    assert_eq!(samples[1]["prompt"], "Article: The grass is green.\nQ: What is green?\nA:");
    let error = |text: &str| run(text, "none").unwrap_err().to_string();
    assert!(error("{}").contains("there is no prompt of qasper"));
    assert!(error(r#"{"qasper": "Q: {input}"}"#).contains("must have {context} once"));
    assert!(error("{").contains("dataset2prompt.json: EOF"));
}

#[test]
fn files_that_do_not_fit_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let good = options(dir.path());
    let run = |options: &LongtextQaOptions| -> EvalError {
        evaluate(&options.clone().into(), &mut model(), &dir.path().join("out")).unwrap_err()
    };
    let text = |error: EvalError| error.to_string().replace(dir.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(text(run(&LongtextQaOptions::default())), @"
    the configuration has 1 problem:
    longtext-qa.longbench is missing, and so is longtext-qa.scrolls; allowed: a folder for at least one of them
      hint: docs/evaluation.md says where the files come from
    ");
    let task = |task: &str| LongtextQaOptions { tasks: vec![task.to_string()], ..good.clone() };
    assert!(
        text(run(&task("qasper"))).contains("longtext-qa.tasks is qasper; allowed: longbench/")
    );
    let missing = text(run(&task("scrolls/qmsum")));
    assert!(missing.contains("scrolls/qmsum has no file in DIR/scrolls"), "{missing}");
    let without = LongtextQaOptions { scrolls: None, ..task("scrolls/qmsum") };
    assert!(text(run(&without)).contains("scrolls/qmsum needs longtext-qa.scrolls"));
    let even = LongtextQaOptions { even: true, scrolls: None, ..good.clone() };
    assert!(text(run(&even)).contains("there is no file of any task"));
    let none = LongtextQaOptions { scrolls: Some(dir.path().join("none")), ..good.clone() };
    assert!(text(run(&none)).starts_with("cannot read DIR/none"));
    let short = LongtextQaOptions { lengths: Some(vec![500]), ..good.clone() };
    assert!(
        text(run(&short)).contains("longtext-qa: length 500 is too short; allowed: at least 576")
    );

    let damaged = |file: &str, line: Value| {
        let path = dir.path().join(file);
        write(path, &[line]);
        text(run(&good))
    };
    let field = damaged("longbench/qasper.jsonl", json!({ "input": "", "context": "" }));
    insta::assert_snapshot!(field, @"
    DIR/longbench/qasper.jsonl:1: missing field `answers` at line 1 column 25
      hint: the file should hold LongBench's lines: input, context, answers, length, all_classes, _id
    ");
    let answer = damaged("longbench/qasper.jsonl", longbench("Q", "text", &[], 1));
    assert!(answer.contains("qasper.jsonl:1: document 1 has no answer"), "{answer}");
    std::fs::remove_file(dir.path().join("longbench/qasper.jsonl")).unwrap();
    let line = json!({ "id": "a", "pid": "a", "input": "no blank line", "output": "x" });
    let blank = damaged("scrolls/qasper/validation.jsonl", line);
    assert!(blank.contains("validation.jsonl:1: input has no blank line"), "{blank}");
    let test = json!({ "id": "a", "pid": "a", "input": "Q\n\ntext", "output": null });
    let test = damaged("scrolls/qasper/validation.jsonl", test);
    assert!(test.contains("document a has no output, as in the test split"), "{test}");
}
