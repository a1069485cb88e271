//! BABILong on a model that reads the facts, and on models that do not.

use std::collections::HashMap;
use std::path::Path;

use crate::common::{FakeModel, Tokens, evaluate, evaluate_with, samples};
use longwall_data::TokenizerConfig;
use longwall_eval::suites::babilong::{BabilongOptions, Task};
use longwall_eval::{EvalError, SuiteConfig};

const THINGS: [&str; 3] = ["apple", "football", "milk"];

fn options(lengths: &[usize], trials: usize) -> BabilongOptions {
    BabilongOptions { lengths: lengths.to_vec(), trials, ..BabilongOptions::default() }
}

pub(crate) fn held_out() -> Tokens {
    let text: String = (0..900).map(|n| format!("Line {n} of some other text. ")).collect();
    Tokens(text.bytes().map(u32::from).collect())
}

fn run(options: BabilongOptions, model: &mut FakeModel, dir: &Path) -> longwall_eval::Report {
    evaluate_with(&SuiteConfig::from(options), model, dir, true, Some(&held_out())).unwrap()
}

/// The words of every fact of a prompt, in order.
pub(crate) fn facts(text: &str) -> Vec<Vec<&str>> {
    let sentences = text.split_terminator(". ").map(str::trim);
    let words = sentences.map(|s| s.trim_end_matches('.').split(' ').collect::<Vec<_>>());
    let names = ["Daniel", "John", "Mary", "Sandra", "Bill", "Fred", "Jeff", "The"];
    words.filter(|words| names.contains(&words[0])).collect()
}

/// Answers any question from the facts.
pub(crate) fn solve(prompt: &str) -> String {
    let (_, rest) = prompt.rsplit_once("Text:").unwrap();
    let (text, question) = rest.split_once("\n\nQuestion: ").unwrap();
    let question: Vec<&str> = question.split_once('?').unwrap().0.split(' ').collect();
    let facts = facts(text);
    let find = |fits: &dyn Fn(&[&str]) -> Option<String>| {
        facts.iter().rev().find_map(|fact| fits(fact)).unwrap_or_default()
    };
    match question[..] {
        ["Where", "is", "the", thing] => trail(&facts, thing).pop().unwrap(),
        ["Where", "was", "the", thing, ..] => {
            trail(&facts, thing).into_iter().rev().nth(1).unwrap()
        }
        ["Where", "is", person] => {
            find(&|w| (w[0] == person).then(|| w.last().unwrap().to_string()))
        }
        ["What", "is", "the", room, side, "of"] => {
            find(&|w| (w[1] == room && w[3] == side).then(|| w[6].to_string()))
        }
        ["What", "is", side, "of", "the", room] => {
            find(&|w| (w[6] == room && w[3] == side).then(|| w[1].to_string()))
        }
        ["Who", "gave", "the", thing, "to", to] => {
            find(&|w| (gift(w) && w[3] == thing && w[5] == to).then(|| w[0].to_string()))
        }
        ["Who", "did", from, "give", "the", thing, "to"] => {
            find(&|w| (gift(w) && w[0] == from && w[3] == thing).then(|| w[5].to_string()))
        }
        ["What", "did", from, "give", "to", to] => {
            find(&|w| (gift(w) && w[0] == from && w[5] == to).then(|| w[3].to_string()))
        }
        _ => panic!("{question:?}"),
    }
}

fn gift(words: &[&str]) -> bool {
    words.len() == 6 && words[4] == "to" && THINGS.contains(&words[3])
}

/// Where a thing was since it was taken.
fn trail(facts: &[Vec<&str>], thing: &str) -> Vec<String> {
    let (mut places, mut holder) = (HashMap::new(), None);
    let mut trail: Vec<String> = Vec::new();
    for words in facts {
        let person = words[0];
        if words.contains(&thing) {
            holder = (words.last() == Some(&"there")).then_some(person);
        } else if !words.iter().any(|word| THINGS.contains(word)) {
            places.insert(person, words.last().unwrap().to_string());
        }
        if holder == Some(person) && trail.last() != places.get(person) {
            trail.push(places[person].clone());
        }
    }
    trail
}

#[test]
fn a_model_that_reads_the_facts_scores_one_in_every_task() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = FakeModel::new(tokenizer, |prompt| format!(" {}.", solve(prompt)));
        let tokens = model.tokenizer.encode(&"Line 7 of some other text. ".repeat(900));
        let config = SuiteConfig::from(options(&[2500, 4000], 20));
        let report =
            evaluate_with(&config, &mut model, dir.path(), true, Some(&Tokens(tokens))).unwrap();
        assert_eq!(report.samples, 200);
        assert!(report.scores.iter().all(|score| score.estimate.value == Some(1.0)), "{report}");
        let facts_only = BabilongOptions { facts_only: true, ..options(&[2500], 20) };
        let report = run(facts_only, &mut model, dir.path());
        assert_eq!(report.headline["accuracy"], Some(1.0));
    }
}

#[test]
fn a_model_that_names_any_label_scores_one_in_as_many() {
    let dir = tempfile::tempdir().unwrap();
    let rooms = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"];
    // A room that depends on the prompt in no simple way.
    let guess = move |prompt: &str| {
        let hash =
            prompt.bytes().fold(7u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        rooms[(hash >> 20) as usize % rooms.len()].to_string()
    };
    let tasks = vec![Task::Qa1];
    let report = run(
        BabilongOptions { tasks, ..options(&[2000], 600) },
        &mut FakeModel::bytes(guess),
        dir.path(),
    );
    let found = report.headline["accuracy"].unwrap();
    assert!((found - 1.0 / 6.0).abs() < 0.05, "{found}");
    // The questions of these tasks name no room: with two in the answer, neither counts.
    for reply in ["", " kitchen office", " nowhere"] {
        let mut model = FakeModel::bytes(move |_| reply.to_string());
        let tasks = vec![Task::Qa1, Task::Qa2];
        let report = run(BabilongOptions { tasks, ..options(&[2500], 5) }, &mut model, dir.path());
        assert_eq!(report.headline["accuracy"], Some(0.0), "{reply}");
    }
}

#[test]
fn facts_are_spread_over_the_text_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    run(options(&[4000], 10), &mut FakeModel::bytes(|_| String::new()), dir.path());
    let mut places = Vec::new();
    for sample in samples(dir.path()) {
        let prompt = sample["prompt"].as_str().unwrap();
        assert_eq!(sample["prompt_tokens"], 4000 - 20);
        let (before, text) = prompt.split_once("Text:").unwrap();
        assert_eq!(before.matches("Answer: ").count(), 2);
        assert!(prompt.ends_with("?\nAnswer:"));
        let place =
            |fact: &Vec<&str>| text.find(&fact.join(" ")).unwrap() as f64 / text.len() as f64;
        places.extend(facts(text).iter().map(place));
    }
    let mean = places.iter().sum::<f64>() / places.len() as f64;
    assert!((0.35..0.65).contains(&mean), "{mean}");
    assert!(places.iter().any(|place| *place < 0.15) && places.iter().any(|place| *place > 0.85));
}

#[test]
fn lengths_below_the_facts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    let facts_only = |length| BabilongOptions { facts_only: true, ..options(&[length], 30) };
    let error = evaluate(&SuiteConfig::from(facts_only(300)), &mut model, dir.path()).unwrap_err();
    let EvalError::TooShort { minimum, generation: 20, .. } = error else { panic!("{error}") };
    evaluate(&SuiteConfig::from(facts_only(minimum)), &mut model, dir.path()).unwrap();
    let bad = BabilongOptions {
        tasks: vec![Task::Qa2, Task::Qa2],
        text: vec!["book.txt".into()],
        ..facts_only(3000)
    };
    let error = evaluate(&SuiteConfig::from(bad), &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 2 problems:
    babilong.tasks is qa2 twice; allowed: each once
      hint: remove the repetition
    babilong.text is given beside facts_only; allowed: only without facts_only
      hint: leave out --text, or --facts-only
    ");
}
