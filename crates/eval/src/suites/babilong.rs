//! BABILong (Kuratov et al., 2024): facts of the bAbI tasks hidden in long text, and a question about them.
//!
//! The facts come from a simulator of our own, the text is held out by the user or the run. An answer is correct if
//! its first sentence names the right label and no other of the task, where labels of the question do not count.

use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
pub use longwall_data::synthetic::babilong::Task;
use longwall_data::synthetic::babilong::{Parts, Story};
use longwall_data::synthetic::held_out::Part;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cells, Counted, Plot};
use super::fit::{check_floor, too_short};
use super::niah::Haystack;
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_answer, check_count, check_lengths, choice, parse_size, sample_rng, sizes,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval babilong`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct BabilongOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = BabilongOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Samples of each task at each length
    #[arg(long, default_value_t = BabilongOptions::default().trials)]
    pub trials: usize,
    /// The tasks
    #[arg(long, value_delimiter = ',', value_name = "TASK", value_parser = choice::<Task>(Task::ALL.map(Task::name)),
          default_values_t = BabilongOptions::default().tasks)]
    pub tasks: Vec<Task>,
    /// Text files or folders to hide the facts in [default: the run's validation split]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// Give the facts alone, without text around them: BABILong's length 0k
    #[arg(long)]
    pub facts_only: bool,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = BabilongOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for BabilongOptions {
    fn default() -> Self {
        BabilongOptions {
            lengths: vec![4000, 8000, 16_000, 32_000],
            trials: 100,
            tasks: Task::ALL.to_vec(),
            text: Vec::new(),
            facts_only: false,
            max_tokens: 20,
        }
    }
}

/// The suite.
pub struct Babilong {
    options: BabilongOptions,
    cells: Cells,
    /// None if the facts stand alone.
    haystack: Option<Haystack>,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Babilong {
    type Options = BabilongOptions;
    type Verdict = Counted;

    const NAME: &'static str = "babilong";
    const VERSION: u32 = 3;
    /// One for each task.
    const STREAMS: Range<u64> = 60..65;
    const GENERATES: bool = true;
    const READS_TEXT: bool = true;

    fn validate(options: &BabilongOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let (trials, remedy) = (options.trials, "a usual number is --trials 100");
        check_count("babilong.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let remedy = "an answer is one word: --max-tokens 20 is enough";
        check_count("babilong.max_tokens", options.max_tokens, 1..=1024, remedy, problems);
        let key = "babilong.tasks";
        let allowed = "at least one of qa1 to qa5";
        problems.check(!options.tasks.is_empty(), key, "empty", allowed, "leave it out for all");
        for (at, task) in options.tasks.iter().enumerate() {
            let twice = options.tasks[..at].contains(task);
            let found = format!("{} twice", task.name());
            problems.check(!twice, key, found, "each once", "remove the repetition");
        }
        problems.check(
            options.text.is_empty() || !options.facts_only,
            "babilong.text",
            "given beside facts_only",
            "only without facts_only",
            "leave out --text, or --facts-only",
        );
        problems.check(
            options.lengths.len() <= 1 || !options.facts_only,
            "babilong.lengths",
            format!("{} lengths beside facts_only", options.lengths.len()),
            "one, beside facts_only",
            "the facts do not depend on it: give for example --lengths 4000",
        );
    }

    fn open(options: &BabilongOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        check_answer(Self::NAME, options.max_tokens, " bathroom.", tokenizer)?;
        let cells = Cells::grid(&options.lengths, options.tasks.len(), options.trials)
            .same_at_every_length();
        let longest = options.lengths.iter().copied().max().unwrap_or_default();
        let mut suite =
            Babilong { cells, options: options.clone(), haystack: None, seed, train_seq_len };
        // Every sample's own facts must fit.
        let facts = |trial: &Trial| {
            let (task, story, _) = suite.story(trial);
            Parts::of(task, &story, tokenizer).tokens()
        };
        let prompt = suite.trials().iter().map(facts).max().unwrap_or_default();
        check_floor(Self::NAME, &options.lengths, prompt, options.max_tokens, tokenizer)?;
        if !options.facts_only {
            suite.haystack = Some(Haystack::of_text(Self::NAME, &options.text, context, longest)?);
        }
        Ok(suite)
    }

    fn resolved(&self) -> Value {
        match &self.haystack {
            Some(haystack) => haystack.describe(),
            None => json!({ "haystack": null }),
        }
    }

    fn trials(&self) -> Vec<Trial> {
        self.cells.trials()
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let (task, story, mut rng) = self.story(trial);
        let parts = Parts::of(task, &story, tokenizer);
        let budget = trial.length - self.options.max_tokens;
        let prompt = match &self.haystack {
            None => parts.alone(),
            Some(haystack) => parts
                .hidden_in(&haystack.text, budget, &mut rng, tokenizer)
                .map_err(|needed| too_short(Self::NAME, trial, needed, budget, tokenizer))?,
        };
        Ok(Request {
            prompt: tokenizer.decode(&prompt),
            call: ModelCall::Generate { prompt, max_tokens: self.options.max_tokens },
            expected: Some(story.answer.to_string()),
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Counted {
        let (task, story, _) = self.story(trial);
        match answer {
            Answer::Text(output) => {
                Counted { right: usize::from(is_right(task, &story, output)), of: 1 }
            }
            other => unreachable!("a generation was answered by {other:?}"),
        }
    }

    fn sample_score(verdict: &Counted) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Counted>]) -> Scoring {
        counted::score(outcomes, &self.cells, &self.names())
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics = counted::metrics(&self.names(), str::to_string);
        counted::draw(
            scoring,
            &metrics,
            &Plot::accuracy("BABILong", title),
            self.train_seq_len,
            dir,
        )
    }
}

impl Babilong {
    fn names(&self) -> Vec<String> {
        self.options.tasks.iter().map(|task| task.name().to_string()).collect()
    }

    /// A trial's story, the same at every length, and the generator for the places of its facts.
    fn story(&self, trial: &Trial) -> (Task, Story, rand_chacha::ChaCha8Rng) {
        let (group, place) = self.cells.locate(trial);
        let place = Trial { length: 0, ..place };
        let task = self.options.tasks[group];
        let mut rng = sample_rng(self.seed, Self::STREAMS.start + task as u64, &place);
        let story = Story::draw(task, &mut rng, Part::Test);
        (task, story, rng)
    }
}

/// Whether the right label is the only one in the first sentence of the output, in any case, besides those of the
/// question.
fn is_right(task: Task, story: &Story, output: &str) -> bool {
    let output = output.trim_start().to_lowercase();
    let sentence = output.split(['.', '\n']).next().unwrap_or_default();
    let question = story.question.to_lowercase();
    let named = |label: &&&str| {
        let label = label.to_lowercase();
        sentence.contains(&label) && !question.contains(&label)
    };
    task.labels().iter().filter(named).eq([&story.answer])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_label_of_the_first_sentence_is_the_answer() {
        let story = Story {
            facts: vec![],
            question: "Where was the milk before the Garden?".to_string(),
            answer: "kitchen",
        };
        let right = |output| is_right(Task::Qa3, &story, output);
        for output in [
            " kitchen",
            "Kitchen.\nQuestion: Where is the office?",
            " in the kitchen, before the garden.",
            "\n\nkitchen",
        ] {
            assert!(right(output), "{output:?}");
        }
        for output in
            ["", " kitch", " office", " kitchen or office", " I do not know. kitchen", " garden"]
        {
            assert!(!right(output), "{output:?}");
        }
    }
}
