//! Generated sequences of N-back recall; rows hold whole sequences.
//! [`synthetic::mqrar`](crate::synthetic::mqrar) draws them.

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::labelled::labelled_rows;
use super::{OpenContext, Source, SourceData};
use crate::synthetic::mqrar::Mqrar;
use crate::synthetic::symbols::SymbolTokens;
use crate::{DataConfig, DataError};

/// The keys of `kind = "mqrar"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// N: the label is the value of the N-th last assignment. Default 1.
    pub back: usize,
    /// Tokens in a sequence, two for each assignment; even, at most `seq_len`. Default 768.
    pub length: usize,
    /// Variables. Default 32.
    pub keys: usize,
    /// Values. Default 64.
    pub values: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config { back: 1, length: 768, keys: 32, values: 64 }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        problems.check(
            (4..=data.seq_len).contains(&self.length) && self.length.is_multiple_of(2),
            format!("{key}.length"),
            self.length,
            format!("even lengths from 4 to data.seq_len = {}", data.seq_len),
            "the paper's is 768: lower it, or raise data.seq_len",
        );
        for (name, count) in [("keys", self.keys), ("values", self.values)] {
            problems.check(
                (1..=1 << 20).contains(&count),
                format!("{key}.{name}"),
                count,
                "1 to 1048576",
                "the defaults are keys = 32, values = 64",
            );
        }
        let Config { length, keys, values, .. } = *self;
        problems.check(
            keys == 0 || values == 0 || Mqrar { length, keys, values }.has_enough_sequences(),
            format!("{key}.values"),
            format!("{values} beside keys = {keys} and length = {length}"),
            format!("numbers that give {} different sequences", Mqrar::LEAST_SEQUENCES),
            "raise it: training and validation draw different sequences",
        );
        problems.check(
            (1..self.length / 2).contains(&self.back),
            format!("{key}.back"),
            self.back,
            format!("1 to below {} assignments", self.length / 2),
            "the paper's are 1, 2, 3 and 4",
        );
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let Config { back, length, keys, values } = *self;
        let tokens = SymbolTokens::new(context.tokenizer, keys + values, "mqrar")?;
        let task = Mqrar { length, keys, values };
        let fingerprint = format!("{task:?} {back}");
        Ok(labelled_rows(context, tokens, fingerprint, move |rng| task.draw_labelled(rng, back)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Split;
    use crate::sources::labelled::testing::{sequences, splits_are_disjoint};
    use crate::sources::testing::Example;
    use crate::synthetic::symbols::content;

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { back: 2, length: 90, keys: 4, values: 30 }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            // Symbols are byte tokens.
            vec![content(example)]
        }
    }

    #[test]
    fn exactly_the_variables_with_a_past_count() {
        let config = Config { back: 2, length: 100, keys: 5, values: 20 };
        for (symbols, labels) in sequences(&config.into(), Split::Train, 300) {
            let task = Mqrar { length: 100, keys: 5, values: 20 };
            assert_eq!(labels, task.labels(&symbols, 2));
            assert!(labels.len() >= 40 && labels.iter().all(|(place, _)| place % 2 == 0));
        }
    }

    #[test]
    fn too_few_different_sequences_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = |config: Config| {
            let mut problems = Problems::new();
            let data = crate::sources::testing::config(&dir, 768, Vec::new());
            config.validate("source", &data, &mut problems);
            problems.into_result().map_err(|problems| problems.to_string())
        };
        let text = error(Config { keys: 1, values: 1, ..Config::default() }).unwrap_err();
        assert!(
            text.contains("source.values is 1 beside keys = 1 and length = 768; allowed"),
            "{text}"
        );
        assert_eq!(error(Config { keys: 1, values: 2, ..Config::default() }), Ok(()));
    }

    #[test]
    fn training_and_validation_have_no_sequence_in_common() {
        splits_are_disjoint(&Config { length: 40, ..Config::default() }.into(), 260);
    }
}
