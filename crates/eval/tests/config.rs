//! Options from the command line and from configuration files, their errors, and the report's
//! shape.

mod common;

use clap::Parser;
use common::{FakeModel, evaluate, passkey};
use longwall_config::Problems;
use longwall_eval::SuiteConfig;
use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::suites::niah::{HaystackKind, NiahMode, NiahOptions};
use longwall_eval::suites::passkey::PasskeyOptions;

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
        ("passkey", SuiteConfig::Passkey(PasskeyOptions::default())),
        ("niah", SuiteConfig::Niah(NiahOptions::default())),
        ("extrapolate", SuiteConfig::Extrapolate(ExtrapolateOptions::default())),
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
    assert_eq!(passkey.lengths, [500, 1000, 1500, 2000, 2500, 3000, 3500, 4000]);
    assert_eq!((passkey.trials, passkey.depths, passkey.max_tokens), (100, None, 10));
}

#[test]
fn the_command_line_and_a_table_say_the_same() {
    let line = cli("niah --lengths 1k,4096 --depths 5 --mode easy --haystack noise --batch-tokens 8k");
    let table = "suite = \"niah\"\nlengths = [\"1k\", 4096]\ndepths = 5\nmode = \"easy\"\nhaystack = \"noise\"\nbatch_tokens = \"8k\"";
    let expected = SuiteConfig::Niah(NiahOptions {
        lengths: Some(vec![1000, 4096]),
        depths: 5,
        mode: NiahMode::Easy,
        haystack: HaystackKind::Noise,
        batch_tokens: 8000,
        ..NiahOptions::default()
    });
    assert_eq!(line.unwrap(), expected);
    assert_eq!(toml::from_str::<SuiteConfig>(table).unwrap(), expected);
    let text = toml::to_string(&expected).unwrap();
    assert_eq!(toml::from_str::<SuiteConfig>(&text).unwrap(), expected);
}

#[test]
fn unknown_keys_and_suites_are_errors() {
    let error = toml::from_str::<SuiteConfig>("suite = \"passkey\"\nlenghts = [500]").unwrap_err();
    insta::assert_snapshot!(error.message(), @"");
    let error = toml::from_str::<SuiteConfig>("suite = \"paskey\"").unwrap_err();
    insta::assert_snapshot!(error.message(), @"");
    let error = cli("passkey --lengths 500,many").unwrap_err().to_string();
    insta::assert_snapshot!(error, @"");
}

#[test]
fn every_option_out_of_range_is_reported_at_once() {
    let config = SuiteConfig::Passkey(PasskeyOptions {
        lengths: vec![0, 500, 500],
        trials: 0,
        depths: Some(0),
        max_tokens: 0,
        batch: 0,
        ..PasskeyOptions::default()
    });
    let dir = tempfile::tempdir().unwrap();
    let mut model = FakeModel::bytes(|_| String::new());
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"");

    let config = SuiteConfig::Niah(NiahOptions {
        min_length: 9000,
        max_length: 2000,
        length_count: 2,
        haystack: HaystackKind::Repeat,
        text: vec!["book.txt".into()],
        ..NiahOptions::default()
    });
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"");

    let config = SuiteConfig::Extrapolate(ExtrapolateOptions {
        lengths: Some(vec![1000, 1024]),
        packed: true,
        sequences: 0,
        ..ExtrapolateOptions::default()
    });
    let error = evaluate(&config, &mut model, dir.path()).unwrap_err();
    insta::assert_snapshot!(error, @"");
}

#[test]
fn results_json_keeps_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let config = SuiteConfig::Passkey(PasskeyOptions {
        lengths: vec![500],
        trials: 4,
        depths: Some(2),
        ..PasskeyOptions::default()
    });
    let mut model = FakeModel::bytes(|prompt| format!(" {}", passkey(prompt)));
    evaluate(&config, &mut model, dir.path()).unwrap();
    let json = std::fs::read_to_string(dir.path().join("results.json")).unwrap();
    insta::with_settings!({ filters => vec![("[0-9a-f]{64}", "SHA256")] }, {
        insta::assert_snapshot!(json, @"");
    });
    let csv = std::fs::read_to_string(dir.path().join("grid.csv")).unwrap();
    insta::assert_snapshot!(csv, @"");
    let names = common::files(dir.path());
    assert_eq!(
        names,
        ["accuracy.svg", "grid.csv", "heatmap.svg", "results.json", "samples.jsonl", "settings.json"]
    );
}
