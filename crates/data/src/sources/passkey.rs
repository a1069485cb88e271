//! Generated passkey examples: prompt, answer, full stop, end of text; rows hold whole examples.
//! [`synthetic::passkey`](crate::synthetic::passkey) makes the prompts.

use longwall_config::Problems;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::passkey::PasskeyFitter;
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "passkey"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Shortest example in tokens; by default that of an example without garbage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_len: Option<usize>,
    /// Longest example in tokens; by default `seq_len`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_len: Option<usize>,
    /// Whether only the answer's tokens count for the loss. Default true.
    #[serde(default = "yes")]
    pub answer_only: bool,
}

fn yes() -> bool {
    true
}

impl Default for Config {
    fn default() -> Self {
        Config { min_len: None, max_len: None, answer_only: true }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        validate_lengths(key, (self.min_len, self.max_len), data, problems);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let fitter = PasskeyFitter::new(context.tokenizer);
        prompt_rows(context, fitter, "passkey 2", (self.min_len, self.max_len), self.answer_only)
    }
}

impl PromptTask for PasskeyFitter {
    const NAME: &'static str = "passkey";

    /// The completion is the answer and a full stop that ends it. There is room for the longest answer, so that the
    /// example fits whatever the answer is.
    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let reserved = self.shortest_example() - self.shortest_prompt();
        let prompt = match self.fit(rng, length - reserved, None, part, "min_len") {
            Ok(prompt) => prompt,
            Err(error) => unreachable!("min_len was checked: {error}"),
        };
        let tokens = tokenizer.encode(&prompt.prompt);
        Prompted::new(&prompt.completion(), length, tokenizer, |_| Ok(tokens))
    }

    fn shortest(&self, _tokenizer: &Tokenizer) -> usize {
        self.shortest_example()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::RowGenerator;
    use crate::sources::testing::{Example, generator, row, tokenizer};
    use crate::{SourceConfig, Split};

    const SEQ_LEN: usize = 1024;

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(260), ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = tokenizer().decode(example);
            let (_, answer) = example.rsplit_once("The pass key is ").unwrap();
            vec![answer.trim_end_matches('.').as_bytes().to_vec()]
        }
    }

    fn rows(answer_only: bool, seed: u64, split: Split) -> Box<dyn RowGenerator> {
        let source = Config { max_len: Some(500), answer_only, ..Config::default() };
        generator(&SourceConfig::from(source), SEQ_LEN, seed, split).unwrap()
    }

    #[test]
    fn exactly_the_answers_count() {
        let rows = rows(true, 1, Split::Train);
        for index in 0..50 {
            let (tokens, weights) = row(&*rows, index, SEQ_LEN);
            let tokens: Vec<u32> = tokens.iter().map(|&token| token as u32).collect();
            let text = tokenizer().decode(&tokens);
            let examples: Vec<&str> =
                text.split("<|endoftext|>").filter(|text| !text.is_empty()).collect();
            let expected: String = examples
                .iter()
                .map(|example| {
                    let answer = example.rsplit("The pass key is").next().unwrap();
                    let needle = format!("The pass key is{} Remember it.", answer);
                    assert!(example.contains(&needle), "{example}");
                    answer
                })
                .collect();
            let counted: Vec<u32> =
                (0..SEQ_LEN).filter(|&t| weights[t] == 1.0).map(|t| tokens[t + 1]).collect();
            assert_eq!(tokenizer().decode(&counted), expected);
            assert!(
                !examples.is_empty()
                    && weights.iter().all(|&weight| weight == 0.0 || weight == 1.0)
            );
        }
    }

    #[test]
    fn with_all_targets_only_the_padding_does_not_count() {
        let (tokens, weights) = row(&*rows(false, 1, Split::Train), 0, SEQ_LEN);
        let end = tokenizer().end_of_text() as i32;
        let text = tokens.iter().rposition(|&token| token != end).unwrap();
        assert!(weights[..=text].iter().all(|&weight| weight == 1.0));
        assert!(weights[text + 1..].iter().all(|&weight| weight == 0.0));
    }

    #[test]
    fn rows_depend_on_index_and_seed_and_splits_are_disjoint() {
        let row = |seed, split, index| row(&*rows(true, seed, split), index, SEQ_LEN);
        let first = row(1, Split::Train, 7);
        assert_eq!(first, row(1, Split::Train, 7));
        assert_ne!(first, row(1, Split::Train, 8));
        assert_ne!(first, row(2, Split::Train, 7));
        assert_eq!(row(1, Split::Validation, 7), row(2, Split::Validation, 7));
        assert_ne!(first, row(1, Split::Validation, 7));
    }

    #[test]
    fn lengths_below_the_shortest_example_are_refused() {
        let message = |min_len, max_len| {
            let source = Config { min_len, max_len: Some(max_len), answer_only: true };
            let opened = generator(&SourceConfig::from(source), SEQ_LEN, 0, Split::Train);
            opened.unwrap_err().to_string()
        };
        insta::assert_snapshot!(message(None, 128), @r"
        a passkey example takes at least 255 tokens with the tokenizer bytes; max_len (by default data.seq_len) is 128
          hint: raise max_len (by default data.seq_len) to 255 or more, or use a tokenizer with longer tokens
        ");
        insta::assert_snapshot!(message(Some(10), 512), @r"
        a passkey example takes at least 255 tokens with the tokenizer bytes; min_len is 10
          hint: raise min_len to 255 or more, or use a tokenizer with longer tokens
        ");
    }
}
