//! RULER on a model that works every answer out from its prompt, and on models that do not.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::common::{FakeModel, evaluate, evaluate_with, sorted_samples};
use longwall_data::TokenizerConfig;
use longwall_eval::suites::ruler::{RulerOptions, Task};
use longwall_eval::{EvalError, SuiteConfig};

/// Files of text, and of questions in the forms of SQuAD and HotpotQA: each asks for a code in a document.
struct Files {
    text: PathBuf,
    squad: PathBuf,
    hotpot: PathBuf,
}

fn write(dir: &Path) -> Files {
    let path = |name: &str| dir.join(name);
    let text: String = (0..900).map(|n| format!("Line {n} of a held-out file. ")).collect();
    std::fs::write(path("text.txt"), text).unwrap();
    let sentence =
        |n: usize| format!("The code of house {n} is c{}x. {}", n * 7, "It stands. ".repeat(8));
    let question = |n: usize| (format!("What is the code of house {n}?"), format!("C{}X", n * 7));
    let paragraphs: Vec<serde_json::Value> = (0..150)
        .map(|n| {
            let (text, answer) = question(n);
            let qas = serde_json::json!([{ "question": text, "answers": [{ "text": "none" }, { "text": answer }] }]);
            serde_json::json!({ "context": sentence(n), "qas": qas })
        })
        .collect();
    let squad = serde_json::json!({ "data": [{ "paragraphs": paragraphs }] });
    std::fs::write(path("squad.json"), squad.to_string()).unwrap();
    let hotpot: Vec<serde_json::Value> = (0..150)
        .map(|n| {
            let (text, answer) = question(n);
            let context = serde_json::json!([
                [format!("House {n}"), [sentence(n)]],
                ["Barn", ["It is new."]]
            ]);
            serde_json::json!({ "question": text, "answer": answer, "context": context })
        })
        .collect();
    std::fs::write(path("hotpot.json"), serde_json::json!(hotpot).to_string()).unwrap();
    Files { text: path("text.txt"), squad: path("squad.json"), hotpot: path("hotpot.json") }
}

fn options(files: &Files) -> RulerOptions {
    RulerOptions {
        lengths: vec![10_000],
        trials: 3,
        text: vec![files.text.clone()],
        squad: Some(files.squad.clone()),
        hotpot: Some(files.hotpot.clone()),
        ..RulerOptions::default()
    }
}

/// The words of a text by how often they come, the most frequent first.
fn ranked(text: &str) -> Vec<String> {
    let mut counts = HashMap::<&str, usize>::new();
    text.split(' ')
        .filter(|word| !word.ends_with('.'))
        .for_each(|w| *counts.entry(w).or_default() += 1);
    let mut words: Vec<(usize, &str)> = counts.into_iter().map(|(word, n)| (n, word)).collect();
    words.sort_by(|a, b| b.cmp(a));
    words.into_iter().map(|(_, word)| word.to_string()).collect()
}

/// The answer to a prompt of any task.
pub(crate) fn solve(prompt: &str) -> String {
    let after = |text: &'static str| prompt.rsplit(text).next().unwrap();
    if prompt.contains("special magic") {
        let (text, question) = prompt.rsplit_once('\n').unwrap();
        let keys = question.split_once(" for ").unwrap().1.split_once(" mentioned").unwrap().0;
        let values = keys.split(", ").flat_map(|key| {
            let mark = format!(" for {} is: ", key.trim_start_matches("and "));
            text.split(&mark)
                .skip(1)
                .map(|rest| rest.split('.').next().unwrap().to_string())
                .collect::<Vec<_>>()
        });
        return values.collect::<Vec<_>>().join(", ");
    }
    if prompt.starts_with("Memorize and track") {
        let text = after("Memorize and track");
        let value = text.split_once("assigned the value ").unwrap().1[..5].to_string();
        let (mut right, mut found) = (value, Vec::new());
        while let Some(at) = text.find(&format!(" = {right}")) {
            let name = text[..at].rsplit(' ').next().unwrap();
            found.push(name.to_string());
            right = format!("VAR {name}");
        }
        return found.join(" ");
    }
    if prompt.starts_with("Below is a numbered list") {
        let list = after("most often.\n").split_once("\nQuestion").unwrap().0;
        return ranked(list)[..10].join(" ");
    }
    if prompt.starts_with("Read the following coded text") {
        let text = after("coded words. ").split_once("\nQuestion").unwrap().0;
        return ranked(text)[..3].join(" ");
    }
    let house = after("the code of ").split_once('?').unwrap().0;
    let code = prompt.split_once(&format!("The code of {house} is ")).unwrap().1;
    code.split_once('.').unwrap().0.to_string()
}

#[test]
fn a_model_that_reads_its_prompt_scores_one_in_every_task() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let files = write(dir.path());
        let out = dir.path().join("out");
        let mut model = FakeModel::new(tokenizer, solve);
        let report = evaluate(&SuiteConfig::from(options(&files)), &mut model, &out).unwrap();
        assert_eq!(report.samples, 39);
        assert!(report.scores.iter().all(|score| score.estimate.value == Some(1.0)), "{report}");
        assert_eq!(report.headline.len(), 15);
        assert!(report.notes.iter().all(|note| !note.contains("13 tasks")));
    }
}

#[test]
fn a_model_that_says_something_else_scores_zero() {
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path());
    for reply in ["", "7", "I do not know."] {
        let mut model = FakeModel::bytes(move |_| reply.to_string());
        let config = SuiteConfig::from(options(&files));
        let report =
            evaluate_with(&config, &mut model, &dir.path().join("out"), true, None).unwrap();
        assert_eq!(report.headline["accuracy"], Some(0.0), "{reply}");
    }
}

#[test]
fn an_answer_in_part_counts_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path());
    let first = |prompt: &str| {
        let answer = solve(prompt);
        answer.split([' ', ',']).next().unwrap().to_string()
    };
    let mut model = FakeModel::bytes(first);
    let out = dir.path().join("out");
    let report = evaluate(&SuiteConfig::from(options(&files)), &mut model, &out).unwrap();
    for (task, share) in [
        ("niah_multivalue", 0.25),
        ("niah_multiquery", 0.25),
        ("vt", 0.2),
        ("cwe", 0.1),
        ("qa_1", 1.0),
    ] {
        assert_eq!(report.headline[&format!("accuracy_{task}")], Some(share), "{task}");
    }
    let third = report.headline["accuracy_fwe"].unwrap();
    assert!((third - 1.0 / 3.0).abs() < 1e-12, "{third}");
}

#[test]
fn prompts_fill_the_length_and_depend_on_seed_and_index_alone() {
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path());
    let prompts = |trials, name: &str| {
        let out = dir.path().join(name);
        let options = RulerOptions { trials, ..options(&files) };
        evaluate(&SuiteConfig::from(options), &mut FakeModel::bytes(solve), &out).unwrap();
        sorted_samples(&out)
    };
    let (three, two) = (prompts(3, "three"), prompts(2, "two"));
    let prompt = |samples: &[serde_json::Value], task: usize, index: usize| {
        samples[task * samples.len() / 13 + index]["prompt"].as_str().unwrap().to_string()
    };
    for task in 0..13 {
        assert_eq!(prompt(&three, task, 1), prompt(&two, task, 1), "{task}");
        assert_ne!(prompt(&three, task, 1), prompt(&three, task, 2), "{task}");
        // Budgets with byte tokens; a document has less than 200 characters, a word's three entries less than 60.
        let used = prompt(&three, task, 0).len() + 140;
        assert!(used > 9_700, "task {task}: {used}");
    }
}

#[test]
fn questions_run_only_with_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path());
    let without = RulerOptions { squad: None, hotpot: None, ..options(&files) };
    let mut model = FakeModel::bytes(solve);
    let out = dir.path().join("out");
    let report = evaluate(&SuiteConfig::from(without.clone()), &mut model, &out).unwrap();
    assert_eq!(report.samples, 33);
    let note = "the accuracy is not that of all 13 tasks: qa_1, qa_2 did not run";
    assert!(report.notes.contains(&note.to_string()), "{:?}", report.notes);
    let error = |options: RulerOptions| {
        let out = dir.path().join("error");
        let error = evaluate(&SuiteConfig::from(options), &mut FakeModel::bytes(solve), &out);
        error.unwrap_err()
    };
    let tasks = Some(vec![Task::Qa1, Task::Vt, Task::Vt]);
    insta::assert_snapshot!(error(RulerOptions { tasks, trials: 0, ..without.clone() }), @r"
    the configuration has 3 problems:
    ruler.trials is 0; allowed: 1 to 100000000
      hint: the original has 500
    ruler.tasks is qa_1 without ruler.squad; allowed: qa_1 only beside a file of questions
      hint: name the file with --squad
    ruler.tasks is vt twice; allowed: each once
      hint: remove the repetition
    ");
    let tasks = Some(vec![Task::NiahSingle2]);
    let missing = RulerOptions { tasks, text: vec![], ..without.clone() };
    assert!(error(missing).to_string().starts_with("ruler needs held-out text"));
    let missing = RulerOptions { squad: Some("none.json".into()), ..without.clone() };
    assert!(error(missing).to_string().starts_with("cannot read none.json"));
}

#[test]
fn lengths_too_short_for_a_task_name_the_task() {
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path());
    let options = |length| RulerOptions {
        lengths: vec![length],
        tasks: Some(vec![Task::Cwe]),
        ..options(&files)
    };
    let mut model = FakeModel::bytes(solve);
    let out = dir.path().join("out");
    let error = evaluate(&SuiteConfig::from(options(900)), &mut model, &out).unwrap_err();
    let EvalError::TooShort { minimum, ref tokenizer, .. } = error else { panic!("{error}") };
    assert_eq!(tokenizer, "bytes (task cwe)");
    assert!(minimum > 900 && model.calls.is_empty());
    // With some room for longer words.
    evaluate(&SuiteConfig::from(options(minimum + 300)), &mut model, &out).unwrap();
}
