//! Generated examples of BABILong: facts hidden in text, a question, one word, a full stop, end of text.
//! [`synthetic::babilong`](crate::synthetic::babilong) makes the prompts.

use longwall_config::Problems;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths, validate_list};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::babilong::{Parts, Story, Task};
use crate::synthetic::haystack::{Filler, Haystack};
use crate::synthetic::held_out::Part;
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "babilong"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Shortest example in tokens; by default the shortest possible: nearly any story
    /// fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_len: Option<usize>,
    /// Longest example in tokens; by default `seq_len`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_len: Option<usize>,
    /// Whether only the answer's tokens count for the loss. Default true.
    pub answer_only: bool,
    /// The tasks, of which an example has one. Default all.
    pub tasks: Vec<Task>,
    /// What the facts are hidden in. Default `noise`.
    pub haystack: Filler,
    /// Whether the facts stand alone, without text around them: examples do not fill their length. Default false.
    pub facts_only: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            min_len: None,
            max_len: None,
            answer_only: true,
            tasks: Task::ALL.to_vec(),
            haystack: Filler::default(),
            facts_only: false,
        }
    }
}

impl Source for Config {
    fn is_generated(&self) -> bool {
        true
    }

    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems) {
        validate_lengths(key, (self.min_len, self.max_len), data, problems);
        validate_list((key, "tasks"), &self.tasks, |_| true, "qa1 to qa5", problems);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let longest = self.max_len.unwrap_or(context.data.seq_len);
        let make = || self.haystack.haystack(context.generator_seed(), longest, context.tokenizer);
        let haystack = (!self.facts_only).then(make);
        let what = format!("babilong {:?} {} {}", self.tasks, self.haystack, self.facts_only);
        let task = Babilong { tasks: self.tasks.clone(), haystack };
        prompt_rows(context, task, &what, (self.min_len, self.max_len), self.answer_only)
    }
}

/// Prompts of several tasks.
#[derive(Debug)]
struct Babilong {
    tasks: Vec<Task>,
    /// None if the facts stand alone.
    haystack: Option<Haystack>,
}

impl PromptTask for Babilong {
    const NAME: &'static str = "babilong";

    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let task = *self.tasks.choose(rng).expect("validation refuses an empty list");
        let story = Story::draw(task, rng, part);
        let parts = Parts::of(task, &story, tokenizer);
        let completion = format!(" {}.", story.answer);
        Prompted::new(&completion, length, tokenizer, |budget| match &self.haystack {
            Some(haystack) => parts.hidden_in(haystack, budget, rng, tokenizer),
            None if parts.tokens() > budget => Err(parts.tokens()),
            None => Ok(parts.alone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, answers_of, tokenizer};

    impl Example for Config {
        const SEQ_LEN: usize = 2500;

        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(2300), ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = &tokenizer().decode(example);
            let (_, rest) = example.rsplit_once("Text:").unwrap();
            let (text, question) = rest.split_once("\n\nQuestion: ").unwrap();
            let (question, _) = question.split_once("\nAnswer:").unwrap();
            // The made-up words have no capital letters.
            let fact = |sentence: &str| {
                let start = sentence.find(char::is_uppercase)?;
                Some(format!("{}.", &sentence[start..]))
            };
            let facts: Vec<String> = text.split('.').filter_map(fact).collect();
            vec![format!("{} {question}", facts.join(" ")).into_bytes()]
        }
    }

    #[test]
    fn answers_are_labels_and_facts_may_stand_alone() {
        for (task, facts_only) in [(Task::Qa1, true), (Task::Qa5, false)] {
            let config = Config { tasks: vec![task], facts_only, ..Config::default() };
            for (example, answer) in answers_of(&config.into(), 2500) {
                let answer = answer.trim().trim_end_matches('.');
                assert!(task.labels().contains(&answer), "{answer}");
                let (_, rest) = example.rsplit_once("Text:").unwrap();
                let (text, _) = rest.split_once("\n\nQuestion: ").unwrap();
                assert_eq!(text.contains(".\n"), !facts_only, "{example}");
            }
        }
    }
}
