//! Generated needles in a haystack: text with a magic number, a question for it, the number, a full stop, end of text.
//! [`synthetic::niah`](crate::synthetic::niah) makes the prompts.

use longwall_config::Problems;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::haystack::{Filler, Haystack};
use crate::synthetic::held_out::Part;
use crate::synthetic::niah::{Needle, NiahMode};
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "niah"`.
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
    /// How the needle is phrased. Default `standard`.
    pub mode: NiahMode,
    /// What it is hidden in. Default `noise`.
    pub haystack: Filler,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            min_len: None,
            max_len: None,
            answer_only: true,
            mode: NiahMode::default(),
            haystack: Filler::default(),
        }
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
        let longest = self.max_len.unwrap_or(context.data.seq_len);
        let haystack = self.haystack.haystack(context.generator_seed(), longest, context.tokenizer);
        let what = format!("niah {} {}", self.mode, self.haystack);
        let task = Niah { mode: self.mode, haystack };
        prompt_rows(context, task, &what, (self.min_len, self.max_len), self.answer_only)
    }
}

/// Prompts with one needle.
#[derive(Debug)]
struct Niah {
    mode: NiahMode,
    haystack: Haystack,
}

impl PromptTask for Niah {
    const NAME: &'static str = "niah";

    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let needle = Needle::draw(rng, self.mode, part);
        let depth = rng.random();
        Prompted::new(&format!(" {}.", needle.number), length, tokenizer, |budget| {
            needle.prompt(&self.haystack, depth, budget, rng, tokenizer)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, answers_of, tokenizer};
    use crate::synthetic::haystack::Filler;

    impl Example for Config {
        const SEQ_LEN: usize = 600;

        fn example(_folder: &Path) -> Self {
            let mode = NiahMode::Easy;
            Config { min_len: Some(400), mode, haystack: Filler::Repeat, ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = &tokenizer().decode(example);
            let (_, number) = example.rsplit_once(" is ").unwrap();
            vec![number.trim_end_matches('.').as_bytes().to_vec()]
        }
    }

    #[test]
    fn the_answer_is_in_the_text_and_the_example_fills_its_length() {
        for (mode, haystack) in
            [(NiahMode::Standard, Filler::Noise), (NiahMode::Easy, Filler::Repeat)]
        {
            let config = Config { mode, haystack, min_len: Some(500), ..Config::default() };
            for (example, answer) in answers_of(&config.into(), 600) {
                let number = answer.trim().trim_end_matches('.');
                assert_eq!((number.len(), example.matches(number).count()), (7, 2), "{example}");
                assert!((499..600).contains(&example.len()), "{}", example.len());
            }
        }
    }
}
