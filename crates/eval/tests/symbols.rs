//! The suites of labelled sequences of symbols, on models whose answers are known.

use std::collections::HashSet;

use crate::common::{FakeModel, evaluate, files, samples};
use longwall_data::TokenizerConfig;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::mqar::Form;
use longwall_data::synthetic::word_problem::{Group, WordProblem};
use longwall_eval::suites::mqar::MqarOptions;
use longwall_eval::suites::mqrar::MqrarOptions;
use longwall_eval::suites::word_problem::WordProblemOptions;
use longwall_eval::{Report, SamplingOptions, SuiteConfig, SuiteOptions};
use serde_json::Value;

pub(crate) fn model(predict: impl Fn(&[u32], usize) -> u32 + 'static) -> FakeModel {
    FakeModel { predict: Box::new(predict), ..FakeModel::bytes(|_| String::new()) }
}

/// A symbol that depends on the sequence and the place in no simple way.
pub(crate) fn noise(tokens: &[u32], place: usize) -> u64 {
    let mix = |hash: u64, token: &u32| (hash ^ u64::from(*token)).wrapping_mul(0x100_0000_01b3);
    let hash = tokens.iter().fold(0xcbf2_9ce4_8422_2325 ^ place as u64, mix);
    (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
}

fn score(report: &Report, metric: &str, length: Option<usize>) -> f64 {
    let found = report.scores.iter().find(|s| s.metric == metric && s.length == length);
    found.unwrap_or_else(|| panic!("{metric}: {report}")).estimate.value.unwrap()
}

/// The tokens of a sample's prompt.
pub(crate) fn tokens(sample: &Value) -> Vec<u32> {
    sample["prompt"].as_str().unwrap().split(' ').map(|id| id.parse().unwrap()).collect()
}

pub(crate) fn mqar(form: Form, lengths: &[usize], trials: usize) -> SuiteConfig {
    let lengths = lengths.to_vec();
    SuiteConfig::from(MqarOptions { form, lengths, trials, ..MqarOptions::default() })
}

/// The symbol after the last earlier place of the key that ends at `place`.
pub(crate) fn after_last(tokens: &[u32], place: usize, key: usize) -> u32 {
    let wanted = &tokens[place + 1 - key..=place];
    let starts = (0..place + 1 - key).rev();
    // The pairs stand at multiples of their width, before anything random.
    let pair = starts.filter(|at| at % (key + 1) == 0).find(|&at| &tokens[at..at + key] == wanted);
    tokens[pair.unwrap() + key]
}

#[test]
fn a_model_that_recalls_pairs_scores_one_in_every_form() {
    for (form, key) in [(Form::Standard, 1), (Form::Forgetting, 1), (Form::Compositional, 2)] {
        let dir = tempfile::tempdir().unwrap();
        // Random symbols may look like a key: only what stands before the first query counts.
        let mut recall = model(move |tokens, place| {
            let context = match (form, tokens.len()) {
                (Form::Standard, 64) => None,
                (Form::Standard, n) => Some(n / 2),
                (Form::Forgetting, 64) => Some(24),
                (Form::Forgetting, _) => Some(48),
                (Form::Compositional, 64) => Some(27),
                (Form::Compositional, _) => Some(48),
            };
            let mut known = tokens[..context.unwrap_or(place).min(place)].to_vec();
            known.truncate(known.len() / (key + 1) * (key + 1));
            known.extend(&tokens[place + 1 - key..=place]);
            after_last(&known, known.len() - 1, key)
        });
        let lengths: &[usize] = if form == Form::Standard { &[128, 256] } else { &[64, 128] };
        let report = evaluate(&mqar(form, lengths, 20), &mut recall, dir.path()).unwrap();
        assert!(report.scores.iter().all(|s| s.estimate.value == Some(1.0)), "{form}: {report}");
        let expected =
            ["accuracy.svg", "grid.csv", "results.json", "samples.jsonl", "settings.json"];
        assert_eq!(files(dir.path()), expected);
    }
}

#[test]
fn a_model_that_guesses_values_scores_one_in_as_many() {
    let dir = tempfile::tempdir().unwrap();
    let mut guess = model(|tokens, place| 128 + (noise(tokens, place) % 128) as u32);
    let report = evaluate(&mqar(Form::Standard, &[64, 256], 200), &mut guess, dir.path()).unwrap();
    let chance = 1.0 / 128.0;
    let found = score(&report, "accuracy_64_pairs", Some(256));
    assert!((found - chance).abs() < 0.003, "{found}");
    let found = score(&report, "accuracy", None);
    assert!((found - chance).abs() < 0.006, "{found}");
}

#[test]
fn the_default_sizes_of_mqar_are_those_of_the_paper() {
    let dir = tempfile::tempdir().unwrap();
    let mut wrong = FakeModel::new(TokenizerConfig::Gpt2, |_| String::new());
    let config = mqar(Form::Standard, &[64, 128, 256, 512, 1024], 2);
    let report = evaluate(&config, &mut wrong, dir.path()).unwrap();
    assert_eq!(report.resolved["vocab"], 8192);
    let sizes = [[64, 4], [64, 8], [64, 16], [128, 32], [256, 64], [512, 128], [1024, 256]];
    assert_eq!(report.resolved["lengths_and_pairs"], serde_json::json!(sizes));
    assert_eq!(report.headline["accuracy"], Some(0.0));
    for sample in samples(dir.path()) {
        let tokens = tokens(&sample);
        assert_eq!(tokens.len() as u64, sample["length"].as_u64().unwrap());
        assert!(tokens[0] < 4096 && tokens[1] >= 4096 && tokens.iter().all(|&t| t < 8192));
        let expected = sample["expected"].as_str().unwrap().split(' ').count();
        assert_eq!(sample["verdict"]["of"], expected);
    }
}

#[test]
fn test_sequences_are_never_training_sequences() {
    let configs = [
        mqar(Form::Standard, &[64], 20),
        SuiteConfig::from(MqrarOptions { lengths: vec![300], trials: 20, ..Default::default() }),
        SuiteConfig::from(WordProblemOptions {
            lengths: vec![2, 5],
            trials: 50,
            ..Default::default()
        }),
    ];
    for config in configs {
        let dir = tempfile::tempdir().unwrap();
        evaluate(&config, &mut model(|_, _| 0), dir.path()).unwrap();
        let mut different = HashSet::new();
        for sample in samples(dir.path()) {
            // With byte tokens, symbols are tokens.
            let content: Vec<u8> = tokens(&sample).iter().flat_map(|t| t.to_le_bytes()).collect();
            assert_eq!(Part::of(&content), Part::Test, "{}", config.name());
            different.insert(content);
        }
        assert!(different.len() > 15, "{}", config.name());
    }
}

#[test]
fn sequences_are_the_seeds_whatever_else_is_taken() {
    let prompts = |lengths: &[usize], trials, seed| -> Vec<Vec<u32>> {
        let dir = tempfile::tempdir().unwrap();
        let own = MqarOptions { lengths: lengths.to_vec(), trials, ..Default::default() };
        let sampling = SamplingOptions { seed, ..Default::default() };
        let config = SuiteConfig::Mqar(SuiteOptions { own, sampling });
        evaluate(&config, &mut model(|_, _| 0), dir.path()).unwrap();
        samples(dir.path()).iter().map(tokens).filter(|tokens| tokens.len() == 128).collect()
    };
    let first = prompts(&[128], 3, 0);
    assert_eq!(first, prompts(&[64, 128], 3, 0));
    assert_eq!(first, prompts(&[128], 9, 0)[..3]);
    assert_ne!(first, prompts(&[128], 3, 1));
}

#[test]
fn a_model_that_multiplies_scores_one() {
    for group in [Group::A5, Group::S5] {
        let dir = tempfile::tempdir().unwrap();
        let problem = WordProblem::new(group);
        let mut multiply = model(move |tokens, place| {
            tokens[..=place].iter().fold(0, |product, &element| problem.product(product, element))
        });
        let options = WordProblemOptions { trials: 20, group, ..Default::default() };
        let report = evaluate(&SuiteConfig::from(options), &mut multiply, dir.path()).unwrap();
        assert!(report.scores.iter().all(|score| score.estimate.value == Some(1.0)), "{report}");
        let lengths: Vec<usize> = report.scores.iter().filter_map(|score| score.length).collect();
        assert_eq!((lengths[0], lengths[lengths.len() - 1]), (2, 20));
        let names: Vec<&String> = report.headline.keys().collect();
        assert_eq!(names, ["accuracy", "accuracy@20", "final_accuracy", "final_accuracy@20"]);
    }
}

#[test]
fn a_model_that_guesses_products_scores_one_in_sixty() {
    let dir = tempfile::tempdir().unwrap();
    let mut guess = model(|tokens, place| (noise(tokens, place) % 60) as u32);
    let options = WordProblemOptions { lengths: vec![10], trials: 2000, ..Default::default() };
    let report = evaluate(&SuiteConfig::from(options), &mut guess, dir.path()).unwrap();
    for (metric, margin) in [("accuracy", 0.004), ("final_accuracy", 0.012)] {
        let found = score(&report, metric, Some(10));
        assert!((found - 1.0 / 60.0).abs() < margin, "{metric} {found}");
    }
}

#[test]
fn a_model_that_knows_beginnings_fails_at_ends() {
    let dir = tempfile::tempdir().unwrap();
    let problem = WordProblem::new(Group::A5);
    let mut shallow = model(move |tokens, place| match place {
        0..5 => tokens[..=place].iter().fold(0, |p, &element| problem.product(p, element)),
        _ => 255,
    });
    let options = WordProblemOptions { lengths: vec![4, 10], trials: 20, ..Default::default() };
    let report = evaluate(&SuiteConfig::from(options), &mut shallow, dir.path()).unwrap();
    assert_eq!(score(&report, "final_accuracy", Some(4)), 1.0);
    assert_eq!(score(&report, "accuracy", Some(10)), 0.5);
    assert_eq!(score(&report, "final_accuracy", Some(10)), 0.0);
}

/// The value that the variable at `place` had `back` assignments ago.
pub(crate) fn recalled(tokens: &[u32], place: usize, back: usize) -> u32 {
    let places = (0..place).rev().filter(|at| at % 2 == 0 && tokens[*at] == tokens[place]);
    places.take(back).nth(back - 1).map_or(0, |at| tokens[at + 1])
}

#[test]
fn each_n_counts_the_predictions_of_that_n() {
    for back in 1..=4 {
        let dir = tempfile::tempdir().unwrap();
        let mut recall = model(move |tokens, place| recalled(tokens, place, back));
        let options = MqrarOptions { trials: 20, ..MqrarOptions::default() };
        let report = evaluate(&SuiteConfig::from(options), &mut recall, dir.path()).unwrap();
        for other in 1..=4 {
            let found = score(&report, &format!("accuracy_{other}_back"), Some(768));
            match other == back {
                true => assert_eq!(found, 1.0, "{back}"),
                // Another assignment has the same value by chance, one in 64.
                false => assert!((found - 1.0 / 64.0).abs() < 0.01, "{back}, {other}: {found}"),
            }
        }
        let sample = &samples(dir.path())[0];
        assert_eq!(tokens(sample).len(), 768);
        // Of 384 assignments, all but each variable's first have a past.
        assert_eq!(sample["verdict"]["back"][0]["of"], 384 - 32);
    }
}

#[test]
fn a_model_that_guesses_assignments_scores_one_in_sixty_four() {
    let dir = tempfile::tempdir().unwrap();
    let mut guess = model(|tokens, place| 32 + (noise(tokens, place) % 64) as u32);
    let options = MqrarOptions { trials: 40, ..MqrarOptions::default() };
    let report = evaluate(&SuiteConfig::from(options), &mut guess, dir.path()).unwrap();
    let found = score(&report, "accuracy_1_back", Some(768));
    assert!((found - 1.0 / 64.0).abs() < 0.005, "{found}");
}

#[test]
fn sizes_out_of_range_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = |config: SuiteConfig| {
        evaluate(&config, &mut model(|_, _| 0), &dir.path().join("out")).unwrap_err().to_string()
    };
    insta::assert_snapshot!(error(mqar(Form::Standard, &[1024], 2)), @r"
    mqar: 256 pairs need a vocabulary of 514 symbols; here it has 256, of the 257 tokens of the tokenizer bytes
      hint: ask for shorter --lengths or fewer --pairs, or evaluate a model with more tokens
    ");
    let options =
        MqarOptions { lengths: vec![2, 63], pairs: None, power: 2.0, ..Default::default() };
    insta::assert_snapshot!(error(SuiteConfig::from(options)), @r"
    the configuration has 3 problems:
    mqar.lengths is 2; allowed: even lengths with room for the pairs: 4 tokens for each, 5 in the form forgetting, 6 in the form compositional
      hint: the paper's are 64 to 1024
    mqar.lengths is 63; allowed: even lengths with room for the pairs: 4 tokens for each, 5 in the form forgetting, 6 in the form compositional
      hint: the paper's are 64 to 1024
    mqar.power is 2; allowed: above 0, up to 1
      hint: the paper's is 0.01
    ");
    let options = WordProblemOptions { lengths: vec![1], trials: 0, ..Default::default() };
    insta::assert_snapshot!(error(SuiteConfig::from(options)), @r"
    the configuration has 2 problems:
    word-problem.lengths is 1; allowed: 2 or more elements
      hint: the paper's words have 2 to 20
    word-problem.trials is 0; allowed: 1 to 100000000
      hint: a usual number is --trials 500
    ");
    let options = MqrarOptions { lengths: vec![100, 769], values: 500, ..Default::default() };
    insta::assert_snapshot!(error(SuiteConfig::from(options)), @r"
    the configuration has 2 problems:
    mqrar.lengths is 100; allowed: even lengths of 258 or more, so that 32 variables come 4 times
      hint: the paper's is 768
    mqrar.lengths is 769; allowed: even lengths of 258 or more, so that 32 variables come 4 times
      hint: the paper's is 768
    ");
    let options = MqrarOptions { values: 500, ..Default::default() };
    insta::assert_snapshot!(error(SuiteConfig::from(options)), @r"
    mqrar needs 532 tokens besides the end of text; the tokenizer bytes has 256
      hint: evaluate a model with another tokenizer
    ");
}
