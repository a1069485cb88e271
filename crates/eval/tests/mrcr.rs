//! Multi-round coreference on a model that repeats the right text, and on models that do not.

use crate::common::{FakeModel, Tokens, evaluate_with, sorted_samples};
use longwall_data::TokenizerConfig;
use longwall_eval::suites::mrcr::MrcrOptions;
use longwall_eval::{EvalError, Report, SuiteConfig};

const ORDINALS: [&str; 8] =
    ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

fn options(length: usize) -> MrcrOptions {
    MrcrOptions { lengths: vec![length], trials: 12, ..MrcrOptions::default() }
}

/// Text without repetitions.
fn text() -> String {
    (0..4000u32).map(|n| format!("w{} ", n.wrapping_mul(2_654_435_761) >> 8)).collect()
}

fn run(
    options: MrcrOptions,
    model: &mut FakeModel,
) -> Result<(Report, Vec<serde_json::Value>), EvalError> {
    let dir = tempfile::tempdir().unwrap();
    let held_out = Tokens(model.tokenizer.encode(&text()));
    let report =
        evaluate_with(&SuiteConfig::from(options), model, dir.path(), false, Some(&held_out))?;
    Ok((report, sorted_samples(dir.path())))
}

/// The texts of the request that is asked for, and which of them.
pub(crate) fn relevant(prompt: &str) -> (Vec<&str>, usize) {
    let (_, question) = prompt.rsplit_once("and then repeat the ").unwrap();
    let (ordinal, request) = question.split_once(' ').unwrap();
    let request = request.split_once('.').unwrap().0;
    let mark = format!("User: Write a {request}.\nAssistant: ");
    let texts = prompt.split(&mark).skip(1).map(|rest| rest.split("\n\n").next().unwrap());
    (texts.collect(), ORDINALS.iter().position(|name| *name == ordinal).unwrap())
}

pub(crate) fn code(prompt: &str) -> &str {
    let (_, rest) = prompt.rsplit_once("User: Write ").unwrap();
    rest.split(' ').next().unwrap()
}

#[test]
fn a_model_that_repeats_the_right_text_scores_one() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let mut model = FakeModel::new(tokenizer, |prompt| {
            let (texts, at) = relevant(prompt);
            format!(" {} {}", code(prompt), texts[at])
        });
        let (report, samples) = run(options(4000), &mut model).unwrap();
        assert_eq!(samples.len(), 36);
        for needles in [2, 4, 8] {
            assert_eq!(
                report.headline[&format!("similarity_{needles}@4000")],
                Some(1.0),
                "{report}"
            );
        }
    }
}

#[test]
fn models_that_do_not_count_or_read_score_the_noise_floors() {
    // Always the first text of the request.
    let first = |prompt: &str| format!(" {} {}", code(prompt), relevant(prompt).0[0]);
    let (report, _) =
        run(MrcrOptions { trials: 60, ..options(4000) }, &mut FakeModel::bytes(first)).unwrap();
    for needles in [2, 4, 8] {
        let score = |name: &str| report.headline[&format!("{name}_{needles}@4000")].unwrap();
        let (found, floor) = (score("similarity"), score("floor_relevant"));
        assert!((found - floor).abs() < 0.17, "{needles}: {found}, {floor}");
        // One of the texts is the right one, the others are similar by chance alone.
        assert!(floor > 1.0 / f64::from(needles) && floor < 1.0 / f64::from(needles) + 0.6);
        assert!(score("floor_any") < 0.7 && score("floor_any") > 0.0);
    }
    for reply in ["", " a text without the code"] {
        let (report, _) =
            run(options(4000), &mut FakeModel::bytes(move |_| reply.to_string())).unwrap();
        assert_eq!(report.headline["similarity_2@4000"], Some(0.0), "{reply}");
    }
}

#[test]
fn the_request_comes_as_often_as_asked_and_prompts_are_full() {
    let (_, samples) = run(options(6000), &mut FakeModel::bytes(|_| String::new())).unwrap();
    for (at, sample) in samples.iter().enumerate() {
        let prompt = sample["prompt"].as_str().unwrap();
        let (texts, ordinal) = relevant(prompt);
        assert_eq!(texts.len(), [2, 4, 8][at / 12]);
        let expected = format!("{} {}", code(prompt), texts[ordinal]);
        assert_eq!(sample["expected"].as_str().unwrap(), expected);
        assert!(expected.len() < 120, "it can be generated");
        let used = sample["prompt_tokens"].as_u64().unwrap() + 128;
        assert!((5800..=6000).contains(&used), "{used}");
        assert!(prompt.matches("User: Write a ").count() > 30);
    }
}

#[test]
fn lengths_below_eight_texts_are_refused() {
    let error = run(options(600), &mut FakeModel::bytes(|_| String::new())).unwrap_err();
    let EvalError::TooShort { minimum, generation: 128, .. } = error else { panic!("{error}") };
    run(options(minimum), &mut FakeModel::bytes(|_| String::new())).unwrap();
    let bad = MrcrOptions { needles: vec![9], max_tokens: 20, ..options(4000) };
    let error = run(bad, &mut FakeModel::bytes(|_| String::new())).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 2 problems:
    mrcr.needles is 9; allowed: 2 to 8
      hint: the original has --needles 2,4,8
    mrcr.max_tokens is 20; allowed: 112 to 4096
      hint: the default, 128, is enough for the code and the longest passage
    ");
}
