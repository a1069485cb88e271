//! Generated conversations of multi-round coreference: conversation, random string, the n-th text, end of text.
//! [`synthetic::mrcr`](crate::synthetic::mrcr) makes the prompts; the texts are of made-up words.

use longwall_config::Problems;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths, validate_list};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::haystack::Haystack;
use crate::synthetic::held_out::Part;
use crate::synthetic::mrcr::{Conversation, ORDINALS};
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "mrcr"`.
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
    /// How often the request comes, of which an example has one, 2 to 8 each. Default 2, 4 and 8.
    pub needles: Vec<usize>,
}

impl Default for Config {
    fn default() -> Self {
        Config { min_len: None, max_len: None, answer_only: true, needles: vec![2, 4, 8] }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        validate_lengths(key, (self.min_len, self.max_len), data, problems);
        let is_allowed = |count| (2..=ORDINALS.len()).contains(&count);
        validate_list((key, "needles"), &self.needles, is_allowed, "2 to 8", problems);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let longest = self.max_len.unwrap_or(context.data.seq_len);
        let haystack = Haystack::noise(context.generator_seed(), longest, context.tokenizer);
        let what = format!("mrcr {:?}", self.needles);
        let task = Mrcr { needles: self.needles.clone(), haystack };
        prompt_rows(context, task, &what, (self.min_len, self.max_len), self.answer_only)
    }
}

/// Conversations about made-up texts.
#[derive(Debug)]
struct Mrcr {
    needles: Vec<usize>,
    haystack: Haystack,
}

impl PromptTask for Mrcr {
    const NAME: &'static str = "mrcr";

    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let needles = *self.needles.choose(rng).expect("validation refuses an empty list");
        let conversation =
            Conversation::draw(rng, needles, length, &self.haystack, tokenizer, part);
        let completion = format!(" {} {}\n", conversation.code, conversation.answer());
        Prompted::new(&completion, length, tokenizer, |budget| {
            Ok(tokenizer.encode(&conversation.fit(budget, tokenizer)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, answers_of, tokenizer};

    impl Example for Config {
        const SEQ_LEN: usize = 1200;

        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(1000), needles: vec![2], ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = &tokenizer().decode(example);
            let (_, answer) = example.rsplit_once("Assistant: ").unwrap();
            vec![answer.trim_end().as_bytes().to_vec()]
        }
    }

    #[test]
    fn the_answer_is_the_code_and_a_text_of_the_conversation() {
        let config = Config { needles: vec![2, 3], ..Config::default() };
        for (example, answer) in answers_of(&config.into(), 1200) {
            let (code, text) = answer.trim().split_once(' ').unwrap();
            assert!(example.contains(&format!("User: Write {code} and then repeat the ")));
            assert_eq!(example.matches(text).count(), 2, "{example}");
        }
    }
}
