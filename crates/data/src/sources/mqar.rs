//! Generated sequences of multi-query associative recall; rows hold whole sequences.
//! [`synthetic::mqar`](crate::synthetic::mqar) draws them.

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::labelled::labelled_rows;
use super::{OpenContext, Source, SourceData};
use crate::synthetic::mqar::{Form, Mqar};
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "mqar"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The form of the task. Default `standard`.
    pub form: Form,
    /// Tokens in a sequence, even; at most `seq_len`. Default 64.
    pub length: usize,
    /// Keys in a sequence. Default 4.
    pub pairs: usize,
    /// Keys that get a second value, with `form = "forgetting"`. Default half of `pairs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updates: Option<usize>,
    /// Symbols. Default 8192, or all tokens besides the end of text if the tokenizer has fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab: Option<usize>,
    /// Exponent of the power law of the queries' places. Default 0.01.
    pub power: f64,
}

impl Default for Config {
    fn default() -> Self {
        let form = Form::Standard;
        Config { form, length: 64, pairs: 4, updates: None, vocab: None, power: 0.01 }
    }
}

impl Config {
    fn task(&self, vocab: usize) -> Mqar {
        let Config { form, length, pairs, power, .. } = *self;
        let updates = self.updates.unwrap_or(Mqar::default_updates(form, pairs));
        Mqar { form, length, pairs, updates, vocab, power }
    }

    fn task_for(&self, tokenizer: &Tokenizer) -> Mqar {
        let task = self.task(self.vocab.unwrap_or(Mqar::default_vocab(tokenizer)));
        Mqar { vocab: task.vocab.max(task.least_vocab()), ..task }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        let task = self.task(self.vocab.unwrap_or_default());
        task.check(key, problems);
        problems.check(
            self.length <= data.seq_len,
            format!("{key}.length"),
            self.length,
            format!("at most data.seq_len = {}", data.seq_len),
            "lower it, or raise data.seq_len",
        );
        if let Some(vocab) = self.vocab {
            problems.check(
                vocab >= task.least_vocab(),
                format!("{key}.vocab"),
                vocab,
                format!("{} or more, for {} pairs", task.least_vocab(), self.pairs),
                "leave it out for 8192, or all of the tokenizer's tokens",
            );
        }
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let task = self.task_for(context.tokenizer);
        let tokens = task.tokens(context.tokenizer)?;
        let fingerprint = format!("{task:?}");
        Ok(labelled_rows(context, tokens, fingerprint, move |rng| task.draw(rng)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::labelled::testing::{sequences, splits_are_disjoint};
    use crate::sources::testing::{Example, generator};
    use crate::synthetic::symbols::content;
    use crate::{SourceConfig, Split};

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            let form = Form::Forgetting;
            Config { form, updates: Some(3), vocab: Some(200), ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            // Symbols are byte tokens.
            vec![content(example)]
        }
    }

    #[test]
    fn exactly_the_queries_count_and_their_targets_are_the_values() {
        let source = SourceConfig::from(Config { length: 70, pairs: 16, ..Config::default() });
        let sequences = sequences(&source, Split::Train, 300);
        // Four of 71 tokens with their ends of text in a row.
        assert_eq!(sequences.len(), 80);
        for (symbols, labels) in sequences {
            assert_eq!((symbols.len(), labels.len()), (70, 16));
            for (place, value) in labels {
                let at = symbols[..32].iter().step_by(2).position(|&key| key == symbols[place]);
                assert_eq!(value, symbols[2 * at.unwrap() + 1]);
                assert!(place >= 32 && value >= 128);
            }
        }
    }

    #[test]
    fn training_and_validation_have_no_sequence_in_common() {
        for form in Form::ALL {
            splits_are_disjoint(&Config { form, ..Config::default() }.into(), 260);
        }
    }

    #[test]
    fn a_vocabulary_too_small_is_refused() {
        let message = |config: Config| {
            generator(&config.into(), 300, 0, Split::Train).unwrap_err().to_string()
        };
        insta::assert_snapshot!(
            message(Config { vocab: Some(8192), ..Config::default() }), @r#"
        mqar needs 8192 tokens besides the end of text; the tokenizer bytes has 256
          hint: ask for fewer symbols, or use a tokenizer with more tokens, for example kind = "gpt2"
        "#);
        let pairs = 200;
        insta::assert_snapshot!(
            message(Config { pairs, length: 800, ..Config::default() }), @r#"
        mqar needs 402 tokens besides the end of text; the tokenizer bytes has 256
          hint: ask for fewer symbols, or use a tokenizer with more tokens, for example kind = "gpt2"
        "#);
    }
}
