//! Options from the command line and from configuration files, their errors, and the report's
//! shape.

use crate::common::{FakeModel, evaluate, passkey};
use clap::Parser;
use longwall_config::Problems;
use longwall_eval::suites::babilong::BabilongOptions;
use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::suites::fflm::FflmOptions;
use longwall_eval::suites::mqar::MqarOptions;
use longwall_eval::suites::mqrar::MqrarOptions;
use longwall_eval::suites::mrcr::MrcrOptions;
use longwall_eval::suites::multi_needle::MultiNeedleOptions;
use longwall_eval::suites::niah::{HaystackKind, NiahMode, NiahOptions};
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::suites::perplexity::PerplexityOptions;
use longwall_eval::suites::phonebook::PhonebookOptions;
use longwall_eval::suites::ruler::RulerOptions;
use longwall_eval::suites::word_problem::WordProblemOptions;
use longwall_eval::{SamplingOptions, SuiteConfig, SuiteOptions};

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    suite: SuiteConfig,
}

fn cli(line: &str) -> Result<SuiteConfig, clap::Error> {
    Cli::try_parse_from(std::iter::once("eval").chain(line.split(' '))).map(|cli| cli.suite)
}

#[test]
fn the_command_line_is_sound() {
    use clap::CommandFactory;
    Cli::command().debug_assert();
}

#[test]
fn defaults_are_those_of_the_protocols_on_both_ways_in() {
    for (line, config) in [
        ("passkey", SuiteConfig::from(PasskeyOptions::default())),
        ("niah", SuiteConfig::from(NiahOptions::default())),
        ("extrapolate", SuiteConfig::from(ExtrapolateOptions::default())),
        ("fflm", SuiteConfig::from(FflmOptions::default())),
        ("perplexity", SuiteConfig::from(PerplexityOptions::default())),
        ("multi-needle", SuiteConfig::from(MultiNeedleOptions::default())),
        ("phonebook", SuiteConfig::from(PhonebookOptions::default())),
        ("ruler", SuiteConfig::from(RulerOptions::default())),
        ("babilong", SuiteConfig::from(BabilongOptions::default())),
        ("mrcr", SuiteConfig::from(MrcrOptions::default())),
        ("mqar", SuiteConfig::from(MqarOptions::default())),
        ("mqrar", SuiteConfig::from(MqrarOptions::default())),
        ("word-problem", SuiteConfig::from(WordProblemOptions::default())),
    ] {
        assert_eq!(cli(line).unwrap(), config);
        assert_eq!(toml::from_str::<SuiteConfig>(&format!("suite = \"{line}\"")).unwrap(), config);
        assert_eq!(config.name(), line);
        assert!(SuiteConfig::NAMES.contains(&line));
        let mut problems = Problems::new();
        config.validate(&mut problems);
        assert!(problems.as_slice().is_empty());
    }
    let SuiteConfig::Passkey(passkey) = cli("passkey").unwrap() else { unreachable!() };
    let passkey = passkey.own;
    assert_eq!(passkey.lengths, [500, 1000, 1500, 2000, 2500, 3000, 3500, 4000]);
    assert_eq!((passkey.trials, passkey.depths, passkey.max_tokens), (100, None, 10));
}

#[test]
fn the_command_line_and_a_table_say_the_same() {
    let line =
        cli("niah --lengths 1k,4096 --depths 5 --mode easy --haystack noise --batch-tokens 8k");
    let table = "suite = \"niah\"\nlengths = [\"1k\", 4096]\ndepths = 5\nmode = \"easy\"\nhaystack = \"noise\"\nbatch_tokens = \"8k\"";
    let expected = SuiteConfig::Niah(SuiteOptions {
        own: NiahOptions {
            lengths: Some(vec![1000, 4096]),
            depths: 5,
            mode: NiahMode::Easy,
            haystack: HaystackKind::Noise,
            ..Default::default()
        },
        sampling: SamplingOptions { batch_tokens: 8000, ..Default::default() },
    });
    assert_eq!(line.unwrap(), expected);
    assert_eq!(toml::from_str::<SuiteConfig>(table).unwrap(), expected);
    let text = toml::to_string(&expected).unwrap();
    assert_eq!(toml::from_str::<SuiteConfig>(&text).unwrap(), expected);
}

#[test]
fn every_suite_is_listed_with_a_line() {
    let list = SuiteConfig::list();
    let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, SuiteConfig::NAMES);
    assert!(list.iter().all(|(_, about)| (20..100).contains(&about.len())), "{list:?}");
}

#[test]
fn unknown_keys_and_suites_are_errors() {
    let error = toml::from_str::<SuiteConfig>("suite = \"passkey\"\nlenghts = [500]").unwrap_err();
    insta::assert_snapshot!(error.message(), @r"
    unknown field `lenghts`, expected one of `lengths`, `trials`, `depths`, `max_tokens`, `seed`, `batch`, `batch_tokens`
    ");
    let error = toml::from_str::<SuiteConfig>("suite = \"paskey\"").unwrap_err();
    insta::assert_snapshot!(error.message(), @r"
    unknown variant `paskey`, expected one of `passkey`, `niah`, `multi-needle`, `ruler`, `babilong`, `mrcr`, `phonebook`, `extrapolate`, `perplexity`, `zero-shot`, `longtext-qa`, `fflm`, `mqar`, `mqrar`, `word-problem`, `attention-stats`
    ");
    let error = cli("passkey --lengths 500,many").unwrap_err().to_string();
    insta::assert_snapshot!(error, @r"
    error: invalid value 'many' for '--lengths <TOKENS>': `many` is not a count; allowed: a whole number with an optional k, M or B, for example 20k or 1.5M

    For more information, try '--help'.
    ");
}

#[test]
fn every_option_out_of_range_is_reported_at_once() {
    let own =
        PasskeyOptions { lengths: vec![0, 500, 500], trials: 0, depths: Some(0), max_tokens: 0 };
    let sampling = SamplingOptions { batch: 0, ..Default::default() };
    let config = SuiteConfig::Passkey(SuiteOptions { own, sampling });
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 6 problems:
    passkey.lengths is 0; allowed: lengths above 0, in tokens
      hint: remove the 0
    passkey.lengths is 500 twice; allowed: every length once
      hint: remove the repetition
    passkey.trials is 0; allowed: 1 to 100000000
      hint: the paper takes --trials 100
    passkey.max_tokens is 0; allowed: 1 to 1024
      hint: the paper generates --max-tokens 10
    passkey.depths is 0; allowed: 1 to 1001
      hint: a usual grid is --depths 11; leave it out for random positions
    passkey.batch is 0; allowed: 1 or more
      hint: --batch 1 takes least memory
    ");

    let config = SuiteConfig::from(NiahOptions {
        min_length: 9000,
        max_length: 2000,
        length_count: 2,
        haystack: HaystackKind::Repeat,
        text: vec!["book.txt".into()],
        ..NiahOptions::default()
    });
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    the configuration has 2 problems:
    niah.min_length is 9000; allowed: up to niah.max_length, 2000
      hint: swap them, or give --lengths
    niah.text is given beside haystack = "repeat"; allowed: only beside haystack = "text"
      hint: leave out --text, or use --haystack text
    "#);

    let config = SuiteConfig::from(ExtrapolateOptions {
        lengths: Some(vec![1000, 1024]),
        packed: true,
        sequences: 0,
        ..ExtrapolateOptions::default()
    });
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 3 problems:
    extrapolate.lengths is 1000; allowed: divisors of the longest length, 1024
      hint: use powers of two: all lengths are scored on the same tokens
    extrapolate.packed is true without extrapolate.text; allowed: only beside --text
      hint: leave out --packed: the validation split is packed anyway
    extrapolate.sequences is 0; allowed: 1 to 100000000
      hint: more --sequences give smaller standard errors; 16 is usual
    ");

    let config = SuiteConfig::from(FflmOptions {
        lengths: vec![2, 33, 1 << 25],
        sequences: Some(usize::MAX),
        dense_sequences: Some(0),
        ..FflmOptions::default()
    });
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    the configuration has 5 problems:
    fflm.lengths is 33554432; allowed: lengths up to 16777216, in tokens
      hint: ask for shorter ones
    fflm.lengths is 2; allowed: even lengths of 24 or more: an instruction is two tokens, and shorter sequences are too few to keep some from training
      hint: the paper's is 512
    fflm.lengths is 33; allowed: even lengths of 24 or more: an instruction is two tokens, and shorter sequences are too few to keep some from training
      hint: the paper's is 512
    fflm.sequences is 18446744073709551615; allowed: 1 to 100000000
      hint: leave it out for the default
    fflm.dense_sequences is 0; allowed: 1 to 100000000
      hint: leave it out for the default
    ");
}

#[test]
fn results_json_keeps_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::from(PasskeyOptions {
        lengths: vec![500],
        trials: 4,
        depths: Some(2),
        ..PasskeyOptions::default()
    });
    let mut model = FakeModel::bytes(|prompt| format!(" {}", passkey(prompt)));
    evaluate(&config, &mut model, dir.path()).unwrap();
    let json = std::fs::read_to_string(dir.path().join("results.json")).unwrap();
    let fingerprint = model.tokenizer.fingerprint();
    insta::assert_snapshot!(json.replace(&fingerprint, "SHA256"), @r#"
    {
      "suite": "passkey",
      "suite_version": 2,
      "run": "wall",
      "checkpoint_step": 100,
      "git_hash": "0123abc",
      "longwall_version": "0.1.0",
      "device": "fake",
      "tokenizer": {
        "name": "bytes",
        "fingerprint": "SHA256",
        "vocab_size": 257
      },
      "train_seq_len": 1024,
      "seed": 0,
      "config": {
        "batch": 64,
        "batch_tokens": 65536,
        "depths": 2,
        "lengths": [
          500
        ],
        "max_tokens": 10,
        "seed": 0,
        "trials": 4
      },
      "resolved": {},
      "samples": 8,
      "headline": {
        "accuracy": 1.0,
        "accuracy_to_train_length": 1.0
      },
      "headline_estimates": {
        "accuracy": {
          "value": 1.0,
          "standard_error": null,
          "low": 0.6755924351161198,
          "high": 1.0,
          "samples": 8
        },
        "accuracy_to_train_length": {
          "value": 1.0,
          "standard_error": null,
          "low": 0.6755924351161198,
          "high": 1.0,
          "samples": 8
        }
      },
      "scores": [
        {
          "metric": "accuracy",
          "length": 500,
          "depth": null,
          "value": 1.0,
          "standard_error": null,
          "low": 0.6755924351161198,
          "high": 1.0,
          "samples": 8
        },
        {
          "metric": "accuracy",
          "length": 500,
          "depth": 0.0,
          "value": 1.0,
          "standard_error": null,
          "low": 0.5101091635454027,
          "high": 1.0,
          "samples": 4
        },
        {
          "metric": "accuracy",
          "length": 500,
          "depth": 1.0,
          "value": 1.0,
          "standard_error": null,
          "low": 0.5101091635454027,
          "high": 1.0,
          "samples": 4
        },
        {
          "metric": "accuracy",
          "length": null,
          "depth": null,
          "value": 1.0,
          "standard_error": null,
          "low": 0.6755924351161198,
          "high": 1.0,
          "samples": 8
        }
      ],
      "notes": [],
      "details": {
        "depths": "grid"
      }
    }
    "#);
    let csv = std::fs::read_to_string(dir.path().join("grid.csv")).unwrap();
    insta::assert_snapshot!(csv, @r"
    metric,length,depth,value,standard_error,low,high,samples
    accuracy,500,,1,,0.6755924351161198,1,8
    accuracy,500,0,1,,0.5101091635454027,1,4
    accuracy,500,1,1,,0.5101091635454027,1,4
    accuracy,,,1,,0.6755924351161198,1,8
    ");
    let names = crate::common::files(dir.path());
    assert_eq!(
        names,
        [
            "accuracy.svg",
            "grid.csv",
            "heatmap.svg",
            "results.json",
            "samples.jsonl",
            "settings.json"
        ]
    );
}
