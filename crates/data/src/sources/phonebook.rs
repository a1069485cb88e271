//! Generated phone books: book, examples, name, number, end of text; rows hold whole examples.
//! [`synthetic::phonebook`](crate::synthetic::phonebook) makes the prompts.

use longwall_config::Problems;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::phonebook::PhonebookFitter;
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "phonebook"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Shortest example in tokens; by default that of a book of three entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_len: Option<usize>,
    /// Longest example in tokens; by default `seq_len`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_len: Option<usize>,
    /// Whether only the answer's tokens count for the loss. Default true.
    pub answer_only: bool,
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
        let fitter = PhonebookFitter::new(context.tokenizer);
        prompt_rows(context, fitter, "phonebook", (self.min_len, self.max_len), self.answer_only)
    }
}

impl PromptTask for PhonebookFitter {
    const NAME: &'static str = "phonebook";

    /// The completion is the number and the end of its line.
    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let budget = length - self.longest_completion() - 1;
        let prompt = match self.fit(rng, budget, None, part, "min_len") {
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
    use crate::sources::testing::{Example, answers_of, generator, tokenizer};
    use crate::{SourceConfig, Split};

    const SEQ_LEN: usize = 600;

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(220), ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = tokenizer().decode(example);
            let (_, question) = example.rsplit_once("\n\n").unwrap();
            vec![question.as_bytes().to_vec()]
        }
    }

    fn examples(answer_only: bool) -> Vec<(String, String)> {
        answers_of(&Config { answer_only, ..Config::default() }.into(), SEQ_LEN)
    }

    #[test]
    fn exactly_the_answers_count() {
        for (example, counted) in examples(true) {
            let (_, question) = example.rsplit_once("\n\n").unwrap();
            let (name, answer) = question.split_once(':').unwrap();
            assert_eq!(counted, answer);
            assert!(answer.len() == 12 && answer.ends_with('\n'), "{answer:?}");
            assert!(example.starts_with(question) || example.contains(&format!("\n{question}")));
            assert!(name.contains(' '));
        }
    }

    #[test]
    fn without_answer_only_every_token_counts() {
        let whole = examples(false);
        // All but the first of a row.
        assert!(whole.iter().all(|(example, counted)| example.ends_with(counted.as_str())));
        assert!(whole.iter().all(|(example, counted)| counted.len() + 1 >= example.len()));
    }

    #[test]
    fn lengths_below_the_shortest_example_are_refused() {
        let source = SourceConfig::from(Config { max_len: Some(100), ..Config::default() });
        let error = generator(&source, SEQ_LEN, 0, Split::Train).unwrap_err().to_string();
        assert!(error.contains("; max_len (by default data.seq_len) is 100"), "{error}");
    }
}
