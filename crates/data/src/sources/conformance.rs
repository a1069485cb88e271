//! The tests that the registry generates for every kind of source.

use longwall_config::{Problems, keys_of};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use super::SourceConfig;
use super::testing::{Example, config, examples_of, open};
use crate::synthetic::held_out::Part;
use crate::{DataConfig, Split};

/// The suite of the kind whose module is `$module`.
macro_rules! suite {
    ($module:ident) => {
        mod $module {
            use crate::sources::{conformance, $module::Config};

            #[test]
            fn a_table_survives_writing_and_reading() {
                conformance::table_survives::<Config>();
            }

            #[test]
            fn unknown_keys_are_refused() {
                conformance::unknown_keys_are_refused::<Config>();
            }

            #[test]
            fn rows_are_a_function_of_seed_and_number() {
                conformance::rows_are_computed::<Config>();
            }

            #[test]
            fn validation_is_the_same_for_every_seed() {
                conformance::validation_is_fixed::<Config>();
            }

            #[test]
            fn training_never_has_what_tests_ask_for() {
                conformance::parts_are_apart::<Config>();
            }

            #[test]
            fn every_key_is_documented() {
                conformance::keys_are_documented::<Config>();
            }
        }
    };
}
pub(super) use suite;

/// A configuration with only the kind's example.
fn example<C: Example>() -> (TempDir, DataConfig) {
    let dir = tempfile::tempdir().unwrap();
    let source: SourceConfig = C::example(dir.path()).into();
    let config = config(&dir, C::SEQ_LEN, vec![source]);
    (dir, config)
}

pub(super) fn table_survives<C: Example>() {
    let (_dir, config) = example::<C>();
    let text = toml::to_string(&config).unwrap();
    assert!(text.contains(&format!("kind = \"{}\"\nweight = 1.0\n", config.sources[0].kind())));
    assert_eq!(toml::from_str::<DataConfig>(&text).unwrap(), config);
    let without_weight = text.replace("weight = 1.0\n", "");
    assert_eq!(toml::from_str::<DataConfig>(&without_weight).unwrap(), config);
    let mut problems = Problems::new();
    config.validate(&mut problems);
    assert_eq!(problems.as_slice(), []);
}

pub(super) fn unknown_keys_are_refused<C: Example + DeserializeOwned>() {
    let (_dir, config) = example::<C>();
    let text = toml::to_string(&config).unwrap() + "wieght = 2\n";
    let error = toml::from_str::<DataConfig>(&text).unwrap_err().to_string();
    let keys = keys_of::<C>().join("`, `");
    let expected = format!("unknown field `wieght`, expected one of `weight`, `{keys}`");
    assert!(error.contains(&expected), "{error}");
}

pub(super) fn rows_are_computed<C: Example>() {
    let (_dir, config) = example::<C>();
    let batch = |seed, first, rows| open(&config, seed, Split::Train).unwrap().batch(first, rows);
    let whole = batch(9, 1000, 6);
    let cells = 2 * C::SEQ_LEN;
    for part in 0..3 {
        let slice = batch(9, 1000 + 2 * part as u64, 2);
        let at = part * cells..(part + 1) * cells;
        assert_eq!(slice.inputs, whole.inputs[at.clone()]);
        assert_eq!(slice.targets, whole.targets[at.clone()]);
        assert_eq!(slice.loss_weights, whole.loss_weights[at]);
    }
    assert_ne!(batch(10, 1000, 6), whole);
    assert_ne!(batch(9, 1006, 6), whole);
}

pub(super) fn validation_is_fixed<C: Example>() {
    let (_dir, config) = example::<C>();
    let loader = open(&config, 1, Split::Validation).unwrap();
    let rows = loader.validation_rows().unwrap();
    assert!((1..=8).contains(&rows), "{rows}");
    let batch = loader.batch(0, rows as usize);
    let again = open(&config, 2, Split::Validation).unwrap();
    assert_eq!(again.batch(0, rows as usize), batch);
    let train = open(&config, 1, Split::Train).unwrap();
    assert_ne!(train.batch(0, rows as usize).inputs, batch.inputs);
}

/// Every example of the training split is of one part, of the validation split of the other, by the hash of what it
/// asks for.
pub(super) fn parts_are_apart<C: Example>() {
    let (_dir, config) = example::<C>();
    let source = &config.sources[0];
    if !source.is_generated() {
        // Documents are divided by `validation_fraction`.
        assert!(C::held_out(&[]).is_empty());
        return;
    }
    for (split, part) in [(Split::Train, Part::Train), (Split::Validation, Part::Test)] {
        let examples = examples_of(source, C::SEQ_LEN, split);
        assert!(examples.len() >= 20, "{split:?}: {} examples", examples.len());
        for (example, _) in examples {
            let contents = C::held_out(&example);
            assert!(!contents.is_empty());
            for content in contents {
                let text = String::from_utf8_lossy(&content).into_owned();
                assert_eq!(Part::of(&content), part, "{text:?} in {split:?}");
            }
        }
    }
}

/// The table of sources in `docs/configuration.md` has a row for every key, below its kind's.
pub(super) fn keys_are_documented<C: Example + DeserializeOwned>() {
    let (_dir, config) = example::<C>();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
    let text = std::fs::read_to_string(path).unwrap();
    let kind = format!("| `{}` | ", config.sources[0].kind());
    let (_, rows) = text.split_once(&kind).unwrap_or_else(|| panic!("no row {kind}"));
    let of_kind = |row: &&str| row.starts_with("| |");
    let rows: Vec<&str> =
        rows.lines().take(1).chain(rows.lines().skip(1).take_while(of_kind)).collect();
    for key in keys_of::<C>() {
        let named = |row: &&str| row.trim_start_matches("| |").contains(&format!("`{key}`"));
        assert!(rows.iter().any(named), "docs/configuration.md lacks {key} of {kind}");
    }
}
