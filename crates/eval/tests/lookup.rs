//! The multi-needle and phone book suites on models whose answers are known.

use std::collections::HashSet;

use crate::common::{FakeModel, evaluate, evaluate_with, files, samples, sorted_samples};
use longwall_data::TokenizerConfig;
use longwall_data::synthetic::held_out::Part;
use longwall_eval::suites::multi_needle::MultiNeedleOptions;
use longwall_eval::suites::phonebook::PhonebookOptions;
use longwall_eval::{EvalError, SuiteConfig};

fn needles_config() -> SuiteConfig {
    SuiteConfig::from(MultiNeedleOptions {
        lengths: vec![900, 2000],
        trials: 10,
        ..MultiNeedleOptions::default()
    })
}

fn phonebook_config(depths: Option<usize>) -> SuiteConfig {
    SuiteConfig::from(PhonebookOptions {
        lengths: vec![300, 1000],
        trials: 20,
        depths,
        ..PhonebookOptions::default()
    })
}

#[test]
fn prompts_of_like_lengths_share_batches() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    evaluate(&phonebook_config(None), &mut model, dir.path()).unwrap();
    let lengths: Vec<_> = samples(dir.path()).iter().map(|s| s["prompt_tokens"].as_u64()).collect();
    let different: HashSet<_> = lengths.iter().collect();
    // 20 samples of each of two lengths, in batches of up to as many tokens apart as they may generate.
    assert!(different.len() > 8, "{different:?}");
    assert_eq!(model.calls.iter().map(|call| call.0).sum::<usize>(), 40);
    assert!(model.calls.len() < different.len().min(10), "{:?}", model.calls);
}

/// The numbers of the keys that the question names, in its order, found in the text.
pub(crate) fn numbers(prompt: &str) -> Vec<String> {
    let (text, question) = prompt.rsplit_once('\n').unwrap();
    let (_, keys) = question.split_once("numbers for ").unwrap();
    let (keys, _) = keys.split_once(" mentioned").unwrap();
    let number = |key: &str| {
        let key = key.trim_start_matches("and ");
        let (_, rest) = text.split_once(&format!("numbers for {key} is: ")).unwrap();
        rest.split_once('.').unwrap().0.to_string()
    };
    keys.split(", ").map(number).collect()
}

/// The line of the book with the name at the end.
pub(crate) fn phone_number(prompt: &str) -> String {
    let name = prompt.rsplit('\n').next().unwrap();
    let line = prompt.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_once(": ").unwrap().1.to_string()
}

#[test]
fn a_model_that_reads_all_needles_scores_one() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let mut model =
            FakeModel::new(tokenizer, |prompt| format!(" {}.", numbers(prompt).join(", ")));
        let report = evaluate(&needles_config(), &mut model, dir.path()).unwrap();
        assert!(report.scores.iter().all(|score| score.estimate.value == Some(1.0)), "{report}");
        assert_eq!(report.samples, 40);
        assert!(report.headline.contains_key("accuracy_2_needles"));
        let expected =
            ["accuracy.svg", "grid.csv", "results.json", "samples.jsonl", "settings.json"];
        assert_eq!(files(dir.path()), expected);
    }
}

#[test]
fn a_needle_that_is_left_out_costs_its_share() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|prompt| numbers(prompt)[0].clone());
    let report = evaluate(&needles_config(), &mut model, dir.path()).unwrap();
    assert_eq!(report.headline["accuracy_2_needles"], Some(0.5));
    assert_eq!(report.headline["accuracy_4_needles"], Some(0.25));
    assert_eq!(report.headline["accuracy"], Some(0.375));
    for reply in ["", " 1234567, 7654321", "123456"] {
        let mut model = FakeModel::bytes(move |_| reply.to_string());
        let report = evaluate_with(&needles_config(), &mut model, dir.path(), true, None).unwrap();
        assert_eq!(report.headline["accuracy"], Some(0.0), "{reply}");
    }
}

#[test]
fn a_number_that_is_cut_off_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|prompt| numbers(prompt)[0][..6].to_string());
    let report = evaluate(&needles_config(), &mut model, dir.path()).unwrap();
    assert_eq!(report.headline["accuracy"], Some(0.0));
}

#[test]
fn needles_are_far_apart_and_prompts_are_full() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    evaluate(&needles_config(), &mut model, dir.path()).unwrap();
    for sample in samples(dir.path()) {
        let (length, prompt) =
            (sample["length"].as_u64().unwrap(), sample["prompt"].as_str().unwrap());
        let used = sample["prompt_tokens"].as_u64().unwrap() + 64;
        // To within a sentence of garbage.
        assert!(used <= length && used + 25 >= length, "{used} of {length}");
        let numbers = numbers(prompt);
        let expected = sample["expected"].as_str().unwrap();
        assert_eq!(numbers.join(", "), expected);
        assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), numbers.len());
        let blocks: Vec<&str> = prompt.split('\n').collect();
        let garbage = blocks.iter().filter(|block| !block.contains("magic")).map(|b| b.len());
        let garbage: Vec<usize> = garbage.collect();
        if length == 2000 {
            // One block before, after and between: those between are half a part or more.
            assert_eq!(garbage.len(), numbers.len() + 1);
            let part = garbage.iter().sum::<usize>() / numbers.len();
            let between = &garbage[1..numbers.len()];
            assert!(between.iter().all(|&block| block + 60 > part / 2), "{garbage:?}");
        }
    }
}

#[test]
fn lengths_below_four_needles_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        |length| MultiNeedleOptions { lengths: vec![length], trials: 40, ..Default::default() };
    let mut model = FakeModel::bytes(|_| String::new());
    let error = evaluate(&SuiteConfig::from(options(300)), &mut model, dir.path()).unwrap_err();
    let EvalError::TooShort { minimum, generation: 64, .. } = error else { panic!("{error}") };
    // The minimum is enough for all samples.
    evaluate(&SuiteConfig::from(options(minimum)), &mut model, dir.path()).unwrap();
    let short = MultiNeedleOptions { max_tokens: 10, ..options(2000) };
    let error = evaluate(&SuiteConfig::from(short), &mut model, dir.path()).unwrap_err();
    assert!(error.to_string().contains("multi-needle.max_tokens is 10; allowed: "), "{error}");
    let none = MultiNeedleOptions { needles: vec![1, 2, 2], ..options(2000) };
    let error = evaluate(&SuiteConfig::from(none), &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 2 problems:
    multi-needle.needles is 1; allowed: 2 to 16
      hint: the paper has --needles 2,4
    multi-needle.needles is 2 twice; allowed: every number once
      hint: remove one
    ");
}

#[test]
fn a_model_that_looks_numbers_up_scores_one() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let mut model =
            FakeModel::new(tokenizer, |prompt| format!(" {}\nAda", phone_number(prompt)));
        let report = evaluate(&phonebook_config(None), &mut model, dir.path()).unwrap();
        assert_eq!((report.headline["accuracy"], report.samples), (Some(1.0), 40));
    }
}

#[test]
fn a_model_that_guesses_numbers_scores_zero() {
    let dir = tempfile::tempdir().unwrap();
    let replies = [" 0123456789\n", "", "\n", " 012345678"];
    for reply in replies {
        let mut model = FakeModel::bytes(move |_| reply.to_string());
        let report =
            evaluate_with(&phonebook_config(None), &mut model, dir.path(), true, None).unwrap();
        assert_eq!(report.headline["accuracy"], Some(0.0), "{reply:?}");
    }
    // The number of another line of the book is wrong, too.
    let other =
        |prompt: &str| prompt.lines().rev().nth(2).unwrap().split_once(':').unwrap().1.to_string();
    let mut model = FakeModel::bytes(other);
    let report =
        evaluate_with(&phonebook_config(None), &mut model, dir.path(), true, None).unwrap();
    assert_eq!(report.headline["accuracy"], Some(0.0));
}

#[test]
fn books_fill_the_length_and_ask_for_held_out_entries() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    evaluate(&phonebook_config(Some(3)), &mut model, dir.path()).unwrap();
    let samples = sorted_samples(dir.path());
    for sample in &samples {
        let (length, prompt) =
            (sample["length"].as_u64().unwrap(), sample["prompt"].as_str().unwrap());
        let used = sample["prompt_tokens"].as_u64().unwrap() + 16;
        assert!(used <= length && used + 36 > length, "{used} of {length}");
        let name = prompt.rsplit('\n').next().unwrap();
        let line = format!("{name} {}\n", sample["expected"].as_str().unwrap());
        assert!(prompt.starts_with(&line) || prompt.contains(&format!("\n{line}")));
        assert_eq!(Part::of(line.as_bytes()), Part::Test);
    }
    let depth = |at: usize| samples[at]["depth"].as_f64().unwrap();
    assert_eq!((depth(0), depth(59)), (0.0, 1.0));
    let again = tempfile::tempdir().unwrap();
    evaluate(&phonebook_config(Some(3)), &mut model, again.path()).unwrap();
    assert_eq!(samples, sorted_samples(again.path()));
}

#[test]
fn lengths_below_three_entries_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        |length| PhonebookOptions { lengths: vec![length], trials: 40, ..Default::default() };
    let mut model = FakeModel::bytes(|_| String::new());
    let error = evaluate(&SuiteConfig::from(options(100)), &mut model, dir.path()).unwrap_err();
    let EvalError::TooShort { minimum, generation: 16, .. } = error else { panic!("{error}") };
    evaluate(&SuiteConfig::from(options(minimum)), &mut model, dir.path()).unwrap();
    let short = PhonebookOptions { max_tokens: 5, ..options(1000) };
    let error = evaluate(&SuiteConfig::from(short), &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 1 problem:
    phonebook.max_tokens is 5; allowed: 11 or more
      hint: raise --max-tokens: the answer ` 9182736450` takes 11 tokens
    ");
}
