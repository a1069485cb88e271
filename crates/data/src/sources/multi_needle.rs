//! Generated prompts with several needles: repeated text with magic numbers, a question for all of them, the numbers,
//! a full stop, end of text. [`synthetic::multi_needle`](crate::synthetic::multi_needle) makes the prompts.

use longwall_config::Problems;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths, validate_list};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::held_out::Part;
use crate::synthetic::multi_needle::{MOST_NEEDLES, Needles};
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "multi-needle"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Shortest example in tokens; by default the shortest possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_len: Option<usize>,
    /// Longest example in tokens; by default `seq_len`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_len: Option<usize>,
    /// Whether only the answer's tokens count for the loss. Default true.
    pub answer_only: bool,
    /// Numbers of needles, of which an example has one, 2 to 16 each. Default 2 and 4.
    pub needles: Vec<usize>,
}

impl Default for Config {
    fn default() -> Self {
        Config { min_len: None, max_len: None, answer_only: true, needles: vec![2, 4] }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        validate_lengths(key, (self.min_len, self.max_len), data, problems);
        let is_allowed = |count| (2..=MOST_NEEDLES).contains(&count);
        validate_list((key, "needles"), &self.needles, is_allowed, "2 to 16", problems);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let what = format!("multi-needle {:?}", self.needles);
        let task = MultiNeedle { needles: self.needles.clone() };
        prompt_rows(context, task, &what, (self.min_len, self.max_len), self.answer_only)
    }
}

/// Prompts with several needles.
#[derive(Debug)]
struct MultiNeedle {
    needles: Vec<usize>,
}

impl PromptTask for MultiNeedle {
    const NAME: &'static str = "multi-needle";

    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let count = *self.needles.choose(rng).expect("validation refuses an empty list");
        let needles = Needles::draw(rng, count, part);
        let completion = format!(" {}.", needles.answers().join(", "));
        Prompted::new(&completion, length, tokenizer, |budget| {
            Ok(tokenizer.encode(&needles.fit(budget, tokenizer)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, answers_of, tokenizer};

    impl Example for Config {
        const SEQ_LEN: usize = 1000;

        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(900), needles: vec![2, 3], ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = &tokenizer().decode(example);
            let (_, numbers) = example.rsplit_once(" are ").unwrap();
            numbers
                .trim_end_matches('.')
                .split(", ")
                .map(|number| number.as_bytes().to_vec())
                .collect()
        }
    }

    #[test]
    fn the_numbers_come_in_the_order_of_the_question() {
        for (example, answer) in answers_of(&Config::default().into(), 1000) {
            let (text, question) = example.rsplit_once('\n').unwrap();
            let (_, keys) = question.split_once("numbers for ").unwrap();
            let (keys, _) = keys.split_once(" mentioned").unwrap();
            let numbers = answer.trim().trim_end_matches('.').split(", ");
            for (key, number) in keys.split(", ").zip(numbers) {
                let key = key.trim_start_matches("and ");
                assert!(text.contains(&format!("for {key} is: {number}.")), "{example}");
            }
        }
    }
}
