//! Generated phone books: book, examples, name, number, end of text; rows hold whole examples.
//! [`synthetic::phonebook`](crate::synthetic::phonebook) makes the prompts.

use longwall_config::Problems;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{example, lengths, validate_lengths};
use super::{OpenContext, RowGenerator, Source, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::packing::{Example, pack};
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
        let asked = (self.min_len, self.max_len);
        let (min_len, max_len) = lengths("phonebook", asked, fitter.shortest_example(), context)?;
        let rows = PhonebookRows {
            fitter,
            tokenizer: context.tokenizer.clone(),
            lengths: (min_len, max_len),
            answer_only: self.answer_only,
            part: context.part(),
            seed: context.generator_seed(),
        };
        let fingerprint = format!("phonebook {:?} {max_len} {}", self.min_len, self.answer_only);
        Ok(SourceData::Generated { rows: Box::new(rows), fingerprint })
    }
}

#[derive(Debug)]
struct PhonebookRows {
    fitter: PhonebookFitter,
    tokenizer: Tokenizer,
    /// Shortest and longest example.
    lengths: (usize, usize),
    answer_only: bool,
    part: Part,
    seed: u64,
}

impl PhonebookRows {
    /// An example. With `answer_only`, the number and the end of its line count for the loss.
    fn example(&self, rng: &mut ChaCha8Rng) -> Example {
        let length = rng.random_range(self.lengths.0..=self.lengths.1);
        let budget = length - self.fitter.longest_completion() - 1;
        let prompt = match self.fitter.fit(rng, budget, None, self.part, "min_len") {
            Ok(prompt) => prompt,
            Err(error) => unreachable!("min_len was checked: {error}"),
        };
        example(&self.tokenizer, &prompt.prompt, &prompt.completion(), self.answer_only)
    }
}

impl RowGenerator for PhonebookRows {
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], weights: &mut [f32]) {
        let (seed, end) = ((self.seed, index), self.tokenizer.end_of_text());
        pack(seed, end, |rng| self.example(rng), (tokens, targets), weights);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, generator, row, tokenizer};
    use crate::{SourceConfig, Split};

    const SEQ_LEN: usize = 600;

    impl Example for Config {
        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(220), ..Config::default() }
        }
    }

    /// The examples of some rows, each with the text that counts for the loss.
    fn examples(answer_only: bool, split: Split) -> Vec<(String, String)> {
        let source = SourceConfig::from(Config { answer_only, ..Config::default() });
        let rows = generator(&source, SEQ_LEN, 1, split).unwrap();
        let mut found = vec![];
        for index in 0..40 {
            let (tokens, weights) = row(&*rows, index, SEQ_LEN);
            let mut start = 0;
            for end in (0..=SEQ_LEN).filter(|&at| tokens[at] == 256) {
                let text = |keep: &dyn Fn(usize) -> bool| {
                    let tokens = (start..end).filter(|&at| keep(at)).map(|at| tokens[at] as u32);
                    tokenizer().decode(&tokens.collect::<Vec<_>>())
                };
                let counted = text(&|at| at > 0 && weights[at - 1] == 1.0);
                if end > start {
                    found.push((text(&|_| true), counted));
                }
                start = end + 1;
            }
        }
        found
    }

    #[test]
    fn exactly_the_answers_count() {
        for (example, counted) in examples(true, Split::Train) {
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
        let whole = examples(false, Split::Train);
        // All but the first of a row.
        assert!(whole.iter().all(|(example, counted)| example.ends_with(counted.as_str())));
        assert!(whole.iter().all(|(example, counted)| counted.len() + 1 >= example.len()));
    }

    #[test]
    fn training_and_validation_ask_for_different_entries() {
        for (split, part) in [(Split::Train, Part::Train), (Split::Validation, Part::Test)] {
            for (example, _) in examples(true, split) {
                let (_, question) = example.rsplit_once("\n\n").unwrap();
                assert_eq!(Part::of(question.as_bytes()), part, "{question}");
            }
        }
    }

    #[test]
    fn lengths_below_the_shortest_example_are_refused() {
        let source = SourceConfig::from(Config { max_len: Some(100), ..Config::default() });
        let error = generator(&source, SEQ_LEN, 0, Split::Train).unwrap_err().to_string();
        assert!(error.contains("; max_len (by default data.seq_len) is 100"), "{error}");
    }
}
