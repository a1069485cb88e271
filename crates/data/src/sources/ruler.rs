//! Generated examples of RULER's tasks: prompt, answers, a full stop, end of text.
//! [`synthetic::ruler`](crate::synthetic::ruler) makes the prompts.

use longwall_config::Problems;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::prompts::{PromptTask, Prompted, prompt_rows, validate_lengths, validate_list};
use super::{OpenContext, Source, SourceData};
use crate::synthetic::haystack::{Filler, Haystack};
use crate::synthetic::held_out::Part;
use crate::synthetic::ruler::{Built, Material, Task, WordList};
use crate::{DataConfig, DataError, Tokenizer};

/// The keys of `kind = "ruler"`.
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
    /// The tasks, of which an example has one. Default all but `qa_1` and `qa_2`, whose questions come from files.
    pub tasks: Vec<Task>,
    /// What the tasks with text hide their needles in. Default `noise`.
    pub haystack: Filler,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            min_len: None,
            max_len: None,
            answer_only: true,
            tasks: generated(),
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
        let is_allowed = |task: Task| !task.takes_any();
        let allowed = generated().iter().map(|task| task.name()).collect::<Vec<_>>().join(", ");
        validate_list((key, "tasks"), &self.tasks, is_allowed, &allowed, problems);
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        let longest = self.max_len.unwrap_or(context.data.seq_len);
        let haystack = self.haystack.haystack(context.generator_seed(), longest, context.tokenizer);
        let what = format!("ruler {:?} {}", self.tasks, self.haystack);
        let task = Ruler { tasks: self.tasks.clone(), haystack };
        prompt_rows(context, task, &what, (self.min_len, self.max_len), self.answer_only)
    }
}

/// The tasks whose prompts are generated.
fn generated() -> Vec<Task> {
    Task::ALL.into_iter().filter(|task| !task.takes_any()).collect()
}

/// Prompts of several tasks.
#[derive(Debug)]
struct Ruler {
    tasks: Vec<Task>,
    haystack: Haystack,
}

impl PromptTask for Ruler {
    const NAME: &'static str = "ruler";

    fn draw(
        &self,
        rng: &mut ChaCha8Rng,
        length: usize,
        part: Part,
        tokenizer: &Tokenizer,
    ) -> Result<Prompted, usize> {
        let task = *self.tasks.choose(rng).expect("validation refuses an empty list");
        let material = Material { haystack: Some(&self.haystack), words: &WordList::MadeUp };
        // As in the suite, there is room for all that the task may generate.
        let rest = task.max_tokens(tokenizer) + 1;
        let sizes = (length, length.saturating_sub(rest));
        let Built { prompt, answers } =
            task.build(material, sizes, rng, tokenizer, part).map_err(|needed| needed + rest)?;
        Prompted::new(&task.completion(&answers), length, tokenizer, |_| Ok(prompt))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sources::testing::{Example, answers_of, tokenizer};

    impl Example for Config {
        const SEQ_LEN: usize = 2300;

        fn example(_folder: &Path) -> Self {
            Config { min_len: Some(2100), haystack: Filler::Repeat, ..Config::default() }
        }

        fn held_out(example: &[u32]) -> Vec<Vec<u8>> {
            let example = &tokenizer().decode(example);
            let (question, answer) = split(example);
            let answers = answer.split(", ");
            match question.contains("special magic") {
                true => answers.map(|answer| answer.as_bytes().to_vec()).collect(),
                // All words together.
                false => vec![answers.collect::<Vec<_>>().join(" ").into_bytes()],
            }
        }
    }

    /// A prompt and its answers, without the numbers of a list and the full stop.
    fn split(example: &str) -> (&str, String) {
        let ends = [" the list are:", "words are:", "they are:", " text are", " text is"];
        let at = ends.iter().filter_map(|end| Some(example.rfind(end)? + end.len())).max();
        let (prompt, answer) = example.split_at(at.unwrap());
        (prompt, answer.trim().trim_end_matches('.').to_string())
    }

    #[test]
    fn every_answer_is_in_its_prompt() {
        for task in generated() {
            let config = Config { tasks: vec![task], ..Config::default() };
            let examples = answers_of(&config.into(), 2000);
            assert!(!examples.is_empty(), "{task}");
            for (example, answer) in examples {
                let prompt = example.strip_suffix(&answer).unwrap();
                let answer = answer.trim().trim_end_matches('.');
                for word in answer.split(", ") {
                    assert!(prompt.contains(word), "{task}: {word} of {example}");
                }
                assert!(tokens_of(task) > answer.len(), "{task} can generate {answer}");
            }
        }
    }

    fn tokens_of(task: Task) -> usize {
        task.max_tokens(&tokenizer())
    }

    #[test]
    fn tasks_whose_questions_are_read_are_refused() {
        let mut problems = Problems::new();
        let dir = tempfile::tempdir().unwrap();
        let config = Config { tasks: vec![Task::Vt, Task::Qa1], ..Config::default() };
        let data = crate::sources::testing::config(&dir, 2000, vec![]);
        config.validate("source", &data, &mut problems);
        let error = problems.into_result().unwrap_err().to_string();
        assert!(error.contains("source.tasks is qa_1; allowed: niah_single_1, "), "{error}");
    }
}
