//! RULER (Hsieh et al., 2024): thirteen tasks of retrieval, tracing, counting and question answering at any length.
//!
//! The tasks, their texts, sizes, budgets of generated tokens and scores are those of the original's code. What
//! differs is what the original takes from other places: words (lists of our own, made-up words, or `--words`),
//! the long text of five of the needle tasks (held-out text in place of essays), and the questions, which the
//! user names with `--squad` and `--hotpot`.

mod questions;
mod words;

use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
pub use longwall_data::synthetic::ruler::Task;
use longwall_data::synthetic::ruler::{Built, Material, WordList};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::questions::Questions;
use super::counted::{self, Cells, Counted, Plot};
use super::niah::Haystack;
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_count, check_lengths, choice, parse_size, sample_rng, sizes,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval ruler`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct RulerOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = RulerOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Samples of each task at each length
    #[arg(long, default_value_t = RulerOptions::default().trials)]
    pub trials: usize,
    /// The tasks [default: all; qa_1 and qa_2 only with their files]
    #[arg(long, value_delimiter = ',', value_name = "TASK", value_parser = choice::<Task>(Task::ALL.map(Task::name)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<Vec<Task>>,
    /// Text files or folders to hide needles in [default: the run's validation split]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// A file of words, one a line, for cwe [default: made-up words]
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words: Option<PathBuf>,
    /// SQuAD's questions (dev-v2.0.json), for qa_1
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub squad: Option<PathBuf>,
    /// HotpotQA's questions (hotpot_dev_distractor_v1.json), for qa_2
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotpot: Option<PathBuf>,
}

impl Default for RulerOptions {
    fn default() -> Self {
        RulerOptions {
            lengths: vec![4096, 8192, 16_384, 32_768],
            trials: 500,
            tasks: None,
            text: Vec::new(),
            words: None,
            squad: None,
            hotpot: None,
        }
    }
}

impl RulerOptions {
    fn file(&self, task: Task) -> Option<&PathBuf> {
        match task {
            Task::Qa1 => self.squad.as_ref(),
            Task::Qa2 => self.hotpot.as_ref(),
            _ => None,
        }
    }

    /// The tasks to run: those asked for, or all but the questions without a file.
    fn tasks(&self) -> Vec<Task> {
        let possible = |task: &Task| !task.takes_any() || self.file(*task).is_some();
        self.tasks.clone().unwrap_or(Task::ALL.into_iter().filter(possible).collect())
    }
}

/// The suite.
pub struct Ruler {
    tasks: Vec<Task>,
    /// Tokens generated for each task.
    max_tokens: Vec<usize>,
    cells: Cells,
    haystack: Option<Haystack>,
    words: WordList,
    questions: [Option<Questions>; 2],
    left_out: Vec<String>,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Ruler {
    type Options = RulerOptions;
    type Verdict = Counted;

    const NAME: &'static str = "ruler";
    const VERSION: u32 = 2;
    /// One for each task.
    const STREAMS: Range<u64> = 40..53;
    const GENERATES: bool = true;
    const READS_TEXT: bool = true;

    fn validate(options: &RulerOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let (trials, remedy) = (options.trials, "the original has 500");
        check_count("ruler.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let asked = options.tasks.as_deref().unwrap_or_default();
        problems.check(
            options.tasks.as_ref().is_none_or(|tasks| !tasks.is_empty()),
            "ruler.tasks",
            "empty",
            "at least one task",
            "leave it out for all tasks",
        );
        for (at, &task) in asked.iter().enumerate() {
            let name = task.name();
            let twice = asked[..at].contains(&task);
            let remedy = "remove the repetition";
            problems.check(!twice, "ruler.tasks", format!("{name} twice"), "each once", remedy);
            let key = if task == Task::Qa1 { "squad" } else { "hotpot" };
            problems.check(
                !task.takes_any() || options.file(task).is_some(),
                "ruler.tasks",
                format!("{name} without ruler.{key}"),
                format!("{name} only beside a file of questions"),
                format!("name the file with --{key}"),
            );
        }
    }

    fn open(options: &RulerOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let tasks = options.tasks();
        let longest = options.lengths.iter().copied().max().unwrap_or_default();
        let haystack = match tasks.iter().any(|task| task.needs_text()) {
            true => Some(Haystack::of_text(Self::NAME, &options.text, context, longest)?),
            false => None,
        };
        let open = |task: Task| match (tasks.contains(&task), options.file(task)) {
            (true, Some(file)) => Questions::read(task, file).map(Some),
            _ => Ok(None),
        };
        let left_out = Task::ALL.iter().filter(|task| !tasks.contains(task));
        let left_out = left_out.map(|task| task.name().to_string()).collect();
        let suite = Ruler {
            max_tokens: tasks.iter().map(|task| task.max_tokens(tokenizer)).collect(),
            cells: Cells::grid(&options.lengths, tasks.len(), options.trials),
            words: words::read(options.words.as_deref())?,
            questions: [open(Task::Qa1)?, open(Task::Qa2)?],
            left_out,
            haystack,
            tasks,
            seed,
            train_seq_len,
        };
        suite.try_each_length(&options.lengths, tokenizer)?;
        Ok(suite)
    }

    fn resolved(&self) -> Value {
        let names = self.names();
        let budgets: Value = names.iter().cloned().zip(self.max_tokens.clone()).collect();
        let questions = self.questions.iter().flatten().map(Questions::describe);
        json!({
            "tasks": names,
            "max_tokens": budgets,
            "haystack": self.haystack.as_ref().map(Haystack::describe),
            "words_sha256": self.words.sha256(),
            "questions": questions.collect::<Vec<_>>(),
        })
    }

    fn trials(&self) -> Vec<Trial> {
        self.cells.trials()
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let (group, place) = self.cells.locate(trial);
        let Built { prompt, answers } = self.build(group, &place, tokenizer)?;
        Ok(Request {
            prompt: tokenizer.decode(&prompt),
            call: ModelCall::Generate { prompt, max_tokens: self.max_tokens[group] },
            expected: Some(serde_json::to_string(&answers).expect("texts are plain data")),
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, request: &Request, answer: &Answer) -> Counted {
        let task = self.tasks[self.cells.locate(trial).0];
        let answers = request.expected.as_deref().map(serde_json::from_str::<Vec<String>>);
        match (answer, answers) {
            (Answer::Text(output), Some(Ok(answers))) => judge(task, output, &answers),
            other => unreachable!("a request with references was answered by {other:?}"),
        }
    }

    fn sample_score(verdict: &Counted) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Counted>]) -> Scoring {
        let mut scoring = counted::score(outcomes, &self.cells, &self.names());
        if !self.left_out.is_empty() {
            let names = self.left_out.join(", ");
            scoring
                .notes
                .push(format!("the accuracy is not that of all 13 tasks: {names} did not run"));
        }
        scoring
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics = counted::metrics(&self.names(), str::to_string);
        counted::draw(scoring, &metrics, &Plot::accuracy("RULER", title), self.train_seq_len, dir)
    }
}

impl Ruler {
    fn names(&self) -> Vec<String> {
        self.tasks.iter().map(|task| task.name().to_string()).collect()
    }

    /// Rejects a file whose words do not fill a prompt.
    fn check_words(
        &self,
        length: usize,
        budget: usize,
        tokenizer: &Tokenizer,
    ) -> Result<(), EvalError> {
        self.words.check(length, budget, tokenizer).map_err(|(words, tokens)| EvalError::Text {
            what: format!(
                "ruler.words: the file holds {words} different words, enough for prompts of {tokens} tokens; \
                 length {length} has room for {budget}"
            ),
            remedy: "give a longer list, shorter --lengths, or leave out --words".to_string(),
        })
    }

    /// Index of the sample of a task whose shortest prompt is the longest: of questions, whose documents differ in
    /// length, that of all trials.
    fn longest_sample(&self, group: usize, tokenizer: &Tokenizer) -> usize {
        let questions = match self.tasks[group] {
            Task::Qa1 => &self.questions[0],
            Task::Qa2 => &self.questions[1],
            _ => &None,
        };
        questions.as_ref().map_or(0, |found| found.longest(self.cells.samples(), tokenizer))
    }

    /// Builds a sample of every task at every length, so that lengths too short are known at once.
    fn try_each_length(&self, lengths: &[usize], tokenizer: &Tokenizer) -> Result<(), EvalError> {
        for &length in lengths {
            for group in 0..self.tasks.len() {
                let index = self.longest_sample(group, tokenizer);
                let trial = Trial { length, index, ..Trial::default() };
                self.build(group, &trial, tokenizer)?;
                if self.tasks[group] == Task::Cwe {
                    self.check_words(length, length - self.max_tokens[group], tokenizer)?;
                }
            }
        }
        Ok(())
    }

    /// The prompt of a trial, whose index is that within its task.
    fn build(
        &self,
        group: usize,
        trial: &Trial,
        tokenizer: &Tokenizer,
    ) -> Result<Built, EvalError> {
        let task = self.tasks[group];
        let mut rng = sample_rng(self.seed, Self::STREAMS.start + task as u64, trial);
        let too_short = |needed: usize| EvalError::TooShort {
            suite: Self::NAME,
            length: trial.length,
            minimum: needed + self.max_tokens[group],
            prompt: needed,
            generation: self.max_tokens[group],
            tokenizer: format!("{} (task {})", tokenizer.name(), task.name()),
        };
        let budget =
            trial.length.checked_sub(self.max_tokens[group]).ok_or_else(|| too_short(1))?;
        self.build_task(task, trial, budget, &mut rng, tokenizer).map_err(too_short)
    }

    /// The prompt of a task with at most `budget` tokens; else the tokens it needs.
    fn build_task(
        &self,
        task: Task,
        trial: &Trial,
        budget: usize,
        rng: &mut ChaCha8Rng,
        tokenizer: &Tokenizer,
    ) -> Result<Built, usize> {
        match task {
            Task::Qa1 | Task::Qa2 => {
                let questions = &self.questions[usize::from(task == Task::Qa2)];
                let questions = questions.as_ref().expect("its file was read");
                questions.build(trial.index, budget, rng, tokenizer)
            }
            _ => {
                let haystack = self.haystack.as_ref().map(|haystack| &haystack.text);
                let material = Material { haystack, words: &self.words };
                task.build(material, (trial.length, budget), rng, tokenizer, Part::Test)
            }
        }
    }
}

/// How many references the output contains, in any case; of questions, whether it contains one.
fn judge(task: Task, output: &str, answers: &[String]) -> Counted {
    let answers: Vec<String> = answers.iter().map(|answer| answer.to_lowercase()).collect();
    let counted = Counted::contained(&output.to_lowercase(), &answers);
    match task.takes_any() {
        true => Counted { right: usize::from(counted.right > 0), of: 1 },
        false => counted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_count_by_their_share_and_of_questions_one_is_enough() {
        let answers = ["Alpha".to_string(), "beta".to_string()];
        let count = |task, output| judge(task, output, &answers);
        assert_eq!(count(Task::Cwe, "1. ALPHA 2. Beta"), Counted { right: 2, of: 2 });
        assert_eq!(count(Task::Cwe, "alpha, bet"), Counted { right: 1, of: 2 });
        assert_eq!(count(Task::Vt, ""), Counted { right: 0, of: 2 });
        assert_eq!(count(Task::Qa1, "It is beta."), Counted { right: 1, of: 1 });
        assert_eq!(count(Task::Qa2, "gamma"), Counted { right: 0, of: 1 });
    }
}
