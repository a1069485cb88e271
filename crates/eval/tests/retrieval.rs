//! The passkey and needle suites on models whose answers are known.

use std::collections::BTreeMap;

use crate::common::{FakeModel, Tokens, evaluate, evaluate_with, magic_number, passkey, samples};
use longwall_data::TokenizerConfig;
use longwall_eval::suites::niah::{HaystackKind, NiahMode, NiahOptions};
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::{EvalError, Report, SamplingOptions, SuiteConfig, SuiteOptions};

fn passkey_config(depths: Option<usize>) -> SuiteConfig {
    SuiteConfig::Passkey(SuiteOptions {
        own: PasskeyOptions {
            lengths: vec![500, 1000, 2000],
            trials: 12,
            depths,
            ..Default::default()
        },
        sampling: SamplingOptions { batch: 5, ..Default::default() },
    })
}

fn niah_config(haystack: HaystackKind, mode: NiahMode) -> SuiteConfig {
    SuiteConfig::from(NiahOptions {
        lengths: Some(vec![600, 1500]),
        depths: 3,
        trials: 4,
        haystack,
        mode,
        ..NiahOptions::default()
    })
}

pub(crate) fn right(prompt: &str) -> String {
    format!(" {}.", passkey(prompt))
}

#[test]
fn a_model_that_finds_every_passkey_scores_one() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = FakeModel::new(tokenizer, right);
        let report = evaluate(&passkey_config(None), &mut model, dir.path()).unwrap();
        assert_eq!(report.headline["accuracy"], Some(1.0));
        assert_eq!(report.samples, 36);
        assert!(report.scores.iter().all(|score| score.estimate.value == Some(1.0)));
    }
}

#[test]
fn a_model_that_says_something_else_scores_zero() {
    let dir = tempfile::tempdir().unwrap();
    for reply in [" 0", "", " nothing"] {
        let mut model = FakeModel::bytes(move |_| reply.to_string());
        let report =
            evaluate_with(&passkey_config(None), &mut model, dir.path(), true, None).unwrap();
        assert_eq!(report.headline["accuracy"], Some(0.0), "{reply}");
    }
}

#[test]
fn scores_and_intervals_are_those_of_the_samples() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|prompt| match passkey(prompt) % 3 {
        0 => " 0".to_string(),
        _ => right(prompt),
    });
    let report = evaluate(&passkey_config(None), &mut model, dir.path()).unwrap();
    let mut by_length = BTreeMap::<u64, (f64, f64)>::new();
    for sample in samples(dir.path()) {
        let x: u32 = sample["expected"].as_str().unwrap().parse().unwrap();
        assert_eq!(x, passkey(sample["prompt"].as_str().unwrap()));
        let right = !x.is_multiple_of(3);
        assert_eq!(sample["verdict"]["correct"], right);
        let cell = by_length.entry(sample["length"].as_u64().unwrap()).or_default();
        *cell = (cell.0 + f64::from(u8::from(right)), cell.1 + 1.0);
    }
    for (length, (correct, trials)) in by_length {
        let p = correct / trials;
        let score = report
            .scores
            .iter()
            .find(|score| score.length == Some(length as usize) && score.depth.is_none())
            .unwrap();
        assert_eq!(trials, 12.0);
        assert_eq!(score.estimate.value, Some(p));
        let [low, high] = longwall_eval::stats::wilson(p, 12.0);
        assert_eq!((score.estimate.low, score.estimate.high), (Some(low), Some(high)));
        assert!(low <= p && p <= high && low < high);
        assert!(score.estimate.standard_error.is_none());
    }
}

#[test]
fn prompt_and_generation_fit_the_length_and_fill_it() {
    for tokenizer in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let dir = tempfile::tempdir().unwrap();
        let mut model = FakeModel::new(tokenizer, right);
        evaluate(&passkey_config(Some(3)), &mut model, dir.path()).unwrap();
        for sample in samples(dir.path()) {
            let length = sample["length"].as_u64().unwrap();
            let used = sample["prompt_tokens"].as_u64().unwrap() + 10;
            assert!(used <= length && used + 3 >= length, "{used} of {length}");
        }
        assert!(model.calls.iter().all(|&(rows, _, generation)| rows <= 5 && generation == 10));
    }
}

#[test]
fn a_batch_holds_no_more_tokens_than_asked() {
    let dir = tempfile::tempdir().unwrap();
    let SuiteConfig::Passkey(options) = passkey_config(None) else { unreachable!() };
    let sampling = SamplingOptions { batch: 8, batch_tokens: 1100, ..options.sampling };
    let options = SuiteOptions { sampling, ..options };
    let mut model = FakeModel::bytes(right);
    evaluate(&SuiteConfig::Passkey(options), &mut model, dir.path()).unwrap();
    for (rows, length, generation) in model.calls {
        assert!(rows == 1 || rows * (length + generation) <= 1100, "{rows} rows of {length}");
    }
}

#[test]
fn positions_are_random_or_a_grid() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(right);
    evaluate(&passkey_config(None), &mut model, dir.path()).unwrap();
    let depths = |dir| -> Vec<f64> {
        samples(dir).iter().map(|sample| sample["depth"].as_f64().unwrap()).collect()
    };
    let random = depths(dir.path());
    let mean = random.iter().sum::<f64>() / random.len() as f64;
    assert!((0.3..0.7).contains(&mean), "{mean}");
    assert!(random.iter().any(|depth| *depth < 0.2) && random.iter().any(|depth| *depth > 0.8));

    let grid = tempfile::tempdir().unwrap();
    let report = evaluate(&passkey_config(Some(3)), &mut model, grid.path()).unwrap();
    for (depth, wanted) in depths(grid.path()).chunks(12).zip([0.0, 0.5, 1.0].iter().cycle()) {
        assert!(depth.iter().all(|depth| (depth - wanted).abs() < 0.01), "{depth:?}");
    }
    let cells = report.scores.iter().filter(|score| score.depth.is_some());
    assert_eq!(cells.count(), 9);
}

#[test]
fn samples_depend_on_the_seed_and_on_their_own_length_alone() {
    let prompts = |lengths: Vec<usize>, seed: u64| -> Vec<(u64, String)> {
        let dir = tempfile::tempdir().unwrap();
        let own = PasskeyOptions { lengths, trials: 3, ..Default::default() };
        let sampling = SamplingOptions { seed, ..Default::default() };
        let config = SuiteConfig::Passkey(SuiteOptions { own, sampling });
        evaluate(&config, &mut FakeModel::bytes(right), dir.path()).unwrap();
        samples(dir.path())
            .iter()
            .map(|s| (s["length"].as_u64().unwrap(), s["prompt"].as_str().unwrap().to_string()))
            .collect()
    };
    let both = prompts(vec![500, 700], 0);
    assert_eq!(both, prompts(vec![700, 500], 0));
    assert_eq!(both[3..], prompts(vec![700], 0));
    assert_ne!(both, prompts(vec![500, 700], 1));
}

#[test]
fn needles_are_found_in_every_haystack() {
    let text: String = (0..400).map(|n| format!("Line {n} of a held-out file. ")).collect();
    let held_out = Tokens(text.bytes().map(u32::from).chain([256]).collect());
    for haystack in [HaystackKind::Text, HaystackKind::Noise, HaystackKind::Repeat] {
        for mode in [NiahMode::Standard, NiahMode::Easy] {
            let dir = tempfile::tempdir().unwrap();
            let mut model = FakeModel::bytes(|prompt| format!(" It is {}.", magic_number(prompt)));
            let config = niah_config(haystack, mode);
            let report =
                evaluate_with(&config, &mut model, dir.path(), false, Some(&held_out)).unwrap();
            assert_eq!(report.headline["accuracy"], Some(1.0), "{haystack:?}");
            assert_eq!(report.headline["accuracy_past_train_length"], Some(1.0));
            for (rows, prompt, generation) in model.calls {
                assert!(prompt + generation == 600 || prompt + generation == 1500);
                assert!(rows <= 16);
            }
        }
    }
}

#[test]
fn the_needle_stands_at_its_depth_and_the_question_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let config = niah_config(HaystackKind::Noise, NiahMode::Standard);
    evaluate(&config, &mut FakeModel::bytes(|_| String::new()), dir.path()).unwrap();
    for sample in samples(dir.path()) {
        let prompt = sample["prompt"].as_str().unwrap();
        let number = sample["expected"].as_str().unwrap();
        assert_eq!(sample["verdict"]["correct"], false);
        let at = prompt.find(number).unwrap() as f64 / prompt.len() as f64;
        let depth = sample["depth"].as_f64().unwrap();
        assert!((at - depth).abs() < 0.35, "{at} for {depth}");
        let question = prompt.rsplit('\n').next().unwrap();
        assert!(question.ends_with(" is") && question.contains("magic number"), "{question}");
    }
}

#[test]
fn text_files_make_a_haystack_that_is_read_round_when_it_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::create_dir(&text).unwrap();
    std::fs::write(text.join("a.txt"), "A short file. It ends soon. ".repeat(10)).unwrap();
    let SuiteConfig::Niah(options) = niah_config(HaystackKind::Text, NiahMode::Easy) else {
        unreachable!()
    };
    let config = SuiteConfig::from(NiahOptions { text: vec![text], ..options.own });
    let out = dir.path().join("out");
    let mut model = FakeModel::bytes(magic_number);
    let report = evaluate(&config, &mut model, &out).unwrap();
    assert_eq!(report.headline["accuracy"], Some(1.0));
    assert_eq!(report.resolved["haystack_repeats"], true);
}

/// The error of `niah` on a file of this text, with the file's folder left out.
fn haystack_error(text: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    std::fs::write(&path, text).unwrap();
    let SuiteConfig::Niah(options) = niah_config(HaystackKind::Text, NiahMode::Easy) else {
        unreachable!()
    };
    let config = SuiteConfig::from(NiahOptions { text: vec![path], ..options.own });
    let out = dir.path().join("out");
    let mut model = FakeModel::bytes(magic_number);
    let error = evaluate(&config, &mut model, &out).unwrap_err();
    assert!(model.calls.is_empty() && !out.exists());
    error.to_string().replace(dir.path().to_str().unwrap(), "DIR")
}

#[test]
fn an_empty_haystack_is_refused() {
    insta::assert_snapshot!(haystack_error(""), @r"
    niah: the haystack is empty: there is no text in the file DIR/text.txt of --text
      hint: give more text with --text, shorter --lengths, or --haystack noise or repeat
    ");
    assert_eq!(haystack_error(" \n\n\t"), haystack_error(""));
}

#[test]
fn a_haystack_much_shorter_than_the_prompt_is_refused() {
    insta::assert_snapshot!(haystack_error("A short file. It ends soon."), @r"
    niah: the haystack has 28 tokens (the file DIR/text.txt of --text); length 1500 needs 188, or its prompts repeat the text more than 8 times
      hint: give more text with --text, shorter --lengths, or --haystack noise or repeat
    ");
}

#[test]
fn a_validation_split_of_empty_documents_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = niah_config(HaystackKind::Text, NiahMode::Standard);
    let empty = Tokens(vec![256; 5000]);
    let mut model = FakeModel::bytes(magic_number);
    let error = evaluate_with(&config, &mut model, dir.path(), false, Some(&empty)).unwrap_err();
    assert!(error.to_string().starts_with("niah: the haystack is empty"), "{error}");
}

#[test]
fn the_depths_of_a_table_are_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(right);
    // At random positions, the first length has samples in few tenths of the depth.
    let own = PasskeyOptions { lengths: vec![500, 1000, 2000], trials: 6, ..Default::default() };
    let report = evaluate(&SuiteConfig::from(own), &mut model, dir.path()).unwrap();
    let table = report.to_string();
    let header = table.lines().nth(1).unwrap();
    let depths: Vec<u32> =
        header.split(" %").filter_map(|part| part.rsplit(' ').next()?.parse().ok()).collect();
    assert!(depths.len() > 5 && depths.is_sorted(), "{header}");
    assert!(table.contains("1.000 [0.610, 1.000]"), "{table}");
}

#[test]
fn a_call_that_cannot_fit_into_memory_is_refused_before_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let error = |sampling: SamplingOptions, free: u64| {
        let own = PasskeyOptions { lengths: vec![500, 4000], ..Default::default() };
        let config = SuiteConfig::Passkey(SuiteOptions { own, sampling });
        // The fake model needs 1 MiB for each token.
        let mut model = FakeModel { free_memory: Some(free << 20), ..FakeModel::bytes(right) };
        let error = evaluate(&config, &mut model, &dir.path().join("out")).unwrap_err();
        assert!(model.calls.is_empty() && !dir.path().join("out").exists());
        error
    };
    insta::assert_snapshot!(error(SamplingOptions::default(), 5000), @r"
    passkey: length 500 needs at least 31.2 GiB of memory, besides the weights, for 64 sequences at a time; 4.9 GiB are free
      hint: give --batch 1: one sequence at a time may fit
    ");
    let one = SamplingOptions { batch: 1, ..Default::default() };
    insta::assert_snapshot!(error(one, 3000), @r"
    passkey: length 4000 needs at least 3.9 GiB of memory, besides the weights, for 1 sequence at a time; 2.9 GiB are free
      hint: ask for shorter --lengths, certainly below 3001, or use a larger machine
    ");
}

#[test]
fn a_call_that_fits_into_memory_runs() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel { free_memory: Some(10_000 << 20), ..FakeModel::bytes(right) };
    evaluate(&passkey_config(None), &mut model, dir.path()).unwrap();
}

#[test]
fn lengths_below_the_shortest_prompt_name_the_minimum() {
    let dir = tempfile::tempdir().unwrap();
    let options = PasskeyOptions { lengths: vec![200], ..PasskeyOptions::default() };
    let config = SuiteConfig::from(options.clone());
    let error = evaluate(&config, &mut FakeModel::bytes(right), dir.path()).unwrap_err();
    let EvalError::TooShort { minimum, .. } = &error else { panic!("{error}") };
    insta::assert_snapshot!(error, @r"
    passkey: length 200 is too short; allowed: at least 257 tokens of the bytes tokenizer (247 for the shortest prompt, 10 for the answer)
      hint: ask for --lengths of 257 or more
    ");
    let options = PasskeyOptions { lengths: vec![*minimum], trials: 50, ..options };
    let config = SuiteConfig::from(options);
    evaluate(&config, &mut FakeModel::bytes(right), dir.path()).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let options = NiahOptions {
        lengths: Some(vec![100]),
        haystack: HaystackKind::Noise,
        depths: 2,
        ..NiahOptions::default()
    };
    let config = SuiteConfig::from(options.clone());
    let mut model = FakeModel::new(TokenizerConfig::Gpt2, |_| String::new());
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    let EvalError::TooShort { minimum, .. } = &error else { panic!("{error}") };
    insta::assert_snapshot!(error, @r"
    niah: length 100 is too short; allowed: at least 110 tokens of the gpt2 tokenizer (78 for the shortest prompt, 32 for the answer)
      hint: ask for --lengths of 110 or more
    ");
    let options = NiahOptions { lengths: Some(vec![*minimum]), trials: 50, ..options };
    evaluate(&SuiteConfig::from(options), &mut model, dir.path()).unwrap();
}

#[test]
fn lengths_beyond_learned_positions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel { max_len: Some(1024), ..FakeModel::bytes(right) };
    let error = evaluate(&passkey_config(None), &mut model, dir.path()).unwrap_err();
    assert!(model.calls.is_empty());
    insta::assert_snapshot!(error, @r"
    passkey: length 2000 is longer than the model can read; allowed: at most 1024 tokens, because its positions are learned
      hint: ask for --lengths of 1024 or less, or train a model with relative positions
    ");
}

#[test]
fn an_answer_that_cannot_be_generated_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = PasskeyOptions { max_tokens: 3, ..PasskeyOptions::default() };
    let config = SuiteConfig::from(options);
    let error = evaluate(&config, &mut FakeModel::bytes(right), dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 1 problem:
    passkey.max_tokens is 3; allowed: 6 or more
      hint: raise --max-tokens: the answer ` 50000` takes 6 tokens
    ");
}

#[test]
fn missing_held_out_text_has_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let config = niah_config(HaystackKind::Text, NiahMode::Standard);
    let error = evaluate(&config, &mut FakeModel::bytes(right), dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    niah needs held-out text, and this run has no validation split to take it from
      hint: name text files or folders the model was not trained on: --text FILES
    ");
}

#[test]
fn a_report_prints_as_a_table_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let report =
        evaluate(&passkey_config(Some(3)), &mut FakeModel::bytes(right), dir.path()).unwrap();
    assert_eq!(Report::load(&dir.path().join("results.json")).unwrap(), report);
    insta::assert_snapshot!(report, @r"
    passkey (version 2): run wall, step 100, 108 samples, seed 0, fake
    length              accuracy  at 0 %  at 50 %  at 100 %
       500  1.000 [0.904, 1.000]   12/12    12/12     12/12
      1000  1.000 [0.904, 1.000]   12/12    12/12     12/12
      2000  1.000 [0.904, 1.000]   12/12    12/12     12/12
       all  1.000 [0.966, 1.000]
    lengths in tokens of the bytes tokenizer (trained at 1024); brackets hold the 95 % interval (Wilson); depths show correct/samples, their intervals are in grid.csv
    note: length 2000 is beyond the training length, 1024: such scores show how the model extrapolates
    ");
}
