//! The word problem of A5 or S5: the product of all elements so far, at every step of a word.
//!
//! After Merrill et al. (2024), as in the PaTH paper, section 4.1. A prediction is correct if the product is
//! the model's most likely token. The words come from [`longwall_data::synthetic::word_problem`], from which
//! training can draw too: a fifth of all words, by their hash, is for tests. Beginnings of a test word may
//! be words of training; the product of the whole word, `final_accuracy`, is one that training never showed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::symbols::{Labelled, SymbolTokens};
use longwall_data::synthetic::word_problem::{Group, WordProblem as Task};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cells, Counted, Plot};
use super::labelled::{labels, predicted, predictions, request, task_error};
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, check_lengths, parse_size, sample_rng, sizes};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Answer, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval word-problem`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct WordProblemOptions {
    /// Lengths of the words: a token is an element
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = WordProblemOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Words of each length
    #[arg(long, default_value_t = WordProblemOptions::default().trials)]
    pub trials: usize,
    /// The group: a5 (60 elements) or s5 (120)
    #[arg(long, default_value_t)]
    pub group: Group,
}

impl Default for WordProblemOptions {
    fn default() -> Self {
        let lengths = (2..=20).collect();
        WordProblemOptions { lengths, trials: 500, group: Group::A5 }
    }
}

/// The steps of one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steps {
    /// Right products, and all.
    #[serde(flatten)]
    pub steps: Counted,
    /// Whether the last product, that of the whole word, is right.
    pub last: bool,
}

/// The metrics, and what they count of a word.
const METRICS: [(&str, &str); 2] =
    [("accuracy", "all products"), ("final_accuracy", "the product of the whole word")];

/// The suite.
pub struct WordProblem {
    options: WordProblemOptions,
    task: Task,
    tokens: SymbolTokens,
    cells: Cells,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for WordProblem {
    type Options = WordProblemOptions;
    type Verdict = Steps;

    const NAME: &'static str = "word-problem";
    const VERSION: u32 = 1;
    /// One for each group.
    const STREAMS: Range<u64> = 25..27;
    const GENERATES: bool = false;

    fn validate(options: &WordProblemOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        for &length in options.lengths.iter().filter(|&&length| length > 0) {
            let allowed = "2 or more elements";
            let remedy = "the paper's words have 2 to 20";
            problems.check(length >= 2, "word-problem.lengths", length, allowed, remedy);
        }
        let remedy = "a usual number is --trials 500";
        let trials = options.trials;
        check_count("word-problem.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
    }

    fn open(options: &WordProblemOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let order = options.group.order();
        Ok(WordProblem {
            tokens: SymbolTokens::new(tokenizer, order, Self::NAME).map_err(task_error)?,
            task: Task::new(options.group),
            cells: Cells::grid(&options.lengths, 1, options.trials),
            options: options.clone(),
            seed,
            train_seq_len,
        })
    }

    fn resolved(&self) -> Value {
        json!({})
    }

    fn trials(&self) -> Vec<Trial> {
        self.cells.trials()
    }

    fn request(&self, trial: &Trial, _tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        Ok(request(&self.word(trial), &self.tokens))
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Steps {
        let word = self.word(trial);
        let last = predictions(answer).last() == labels(&word, &self.tokens).last();
        Steps { steps: predicted(answer, &word, &self.tokens), last }
    }

    fn score(&self, outcomes: &[Outcome<Steps>]) -> Scoring {
        let (mut scores, mut headline) = (Vec::new(), BTreeMap::new());
        let mut push = |length: Option<usize>, outcomes: &[Outcome<Steps>]| {
            for ((metric, _), estimate) in METRICS.iter().zip(estimates(outcomes)) {
                let metric = metric.to_string();
                headline.insert(
                    length.map_or(metric.clone(), |length| format!("{metric}@{length}")),
                    estimate,
                );
                scores.push(Score { metric, length, depth: None, estimate });
            }
        };
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            push(Some(outcomes[0].trial.length), outcomes);
        }
        push(None, outcomes);
        // One length of many is enough to compare by.
        let longest = self.options.lengths.iter().max().copied().unwrap_or_default();
        headline.retain(|name, _| !name.contains('@') || name.ends_with(&format!("@{longest}")));
        Scoring { headline, scores, ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics = METRICS.map(|(metric, label)| (metric.to_string(), label.to_string()));
        let task = format!("Word problem of {}", self.options.group.name().to_uppercase());
        counted::draw(scoring, &metrics, &Plot::accuracy(&task, title), self.train_seq_len, dir)
    }
}

impl WordProblem {
    fn word(&self, trial: &Trial) -> Labelled {
        let mut rng = sample_rng(self.seed, Self::STREAMS.start + self.options.group as u64, trial);
        Part::Test.draw(&mut rng, |rng| {
            let word = self.task.draw(rng, trial.length);
            let content = word.content();
            (word, content)
        })
    }
}

/// The metrics of some words, in the order of [`METRICS`].
fn estimates(outcomes: &[Outcome<Steps>]) -> [Estimate; 2] {
    let last = outcomes.iter().filter(|outcome| outcome.verdict.last).count();
    let steps = outcomes.iter().map(|outcome| (outcome.trial.id, outcome.verdict.steps));
    [counted::share(steps), Estimate::proportion(last, outcomes.len())]
}
