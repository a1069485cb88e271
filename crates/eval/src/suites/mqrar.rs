//! N-back recall: which value a variable had N assignments ago.
//!
//! After the PaTH paper, section 4.1: 32 variables, length 768. A model is trained for one N; the suite asks
//! for none, but compares the same predictions with the values of the last assignment but 0, 1, 2 and 3, so
//! that it also shows what a model confuses the N-th last value with. The sequences come from
//! [`longwall_data::synthetic::mqrar`], from which training can draw too: other sequences, by their hash.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::mqrar::Mqrar as Task;
use longwall_data::synthetic::symbols::{Labelled, SymbolTokens, content};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cells, Counted, Plot};
use super::labelled::{predictions, request, task_error};
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, check_lengths, parse_size, sample_rng, sizes};
use crate::report::Score;
use crate::suite::{Answer, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// The greatest N.
const MOST_BACK: usize = 4;

/// Options of `longwall eval mqrar`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct MqrarOptions {
    /// Lengths of the sequences, two tokens for each assignment
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = MqrarOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Sequences of each length
    #[arg(long, default_value_t = MqrarOptions::default().trials)]
    pub trials: usize,
    /// Variables
    #[arg(long, default_value_t = MqrarOptions::default().keys)]
    pub keys: usize,
    /// Values
    #[arg(long, default_value_t = MqrarOptions::default().values)]
    pub values: usize,
}

impl Default for MqrarOptions {
    fn default() -> Self {
        MqrarOptions { lengths: vec![768], trials: 100, keys: 32, values: 64 }
    }
}

/// The predictions of one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByBack {
    /// For N = 1, 2, …: predictions that are the value of the N-th last assignment, and variables with one.
    pub back: [Counted; MOST_BACK],
}

/// The suite.
pub struct Mqrar {
    options: MqrarOptions,
    tokens: SymbolTokens,
    cells: Cells,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Mqrar {
    type Options = MqrarOptions;
    type Verdict = ByBack;

    const NAME: &'static str = "mqrar";
    const VERSION: u32 = 1;
    const STREAMS: Range<u64> = 27..28;
    const GENERATES: bool = false;

    fn validate(options: &MqrarOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let MqrarOptions { keys, values, trials, .. } = *options;
        let least = least_length(keys);
        for &length in options.lengths.iter().filter(|&&length| length > 0) {
            problems.check(
                length >= least && length.is_multiple_of(2),
                "mqrar.lengths",
                length,
                format!("even lengths of {least} or more, so that {keys} variables come {MOST_BACK} times"),
                "the paper's is 768",
            );
            problems.check(
                keys == 0 || values == 0 || Task { length, keys, values }.has_enough_sequences(),
                "mqrar.values",
                format!("{values} beside {keys} keys and length {length}"),
                format!("numbers that give {} different sequences", Task::LEAST_SEQUENCES),
                "raise it: training and tests draw different sequences",
            );
        }
        let remedy = "the defaults are --keys 32 --values 64";
        check_count("mqrar.keys", keys, 1..=1 << 20, remedy, problems);
        check_count("mqrar.values", values, 1..=1 << 20, remedy, problems);
        let remedy = "a usual number is --trials 100";
        check_count("mqrar.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
    }

    fn open(options: &MqrarOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let symbols = options.keys + options.values;
        Ok(Mqrar {
            tokens: SymbolTokens::new(tokenizer, symbols, Self::NAME).map_err(task_error)?,
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
        // Predictions for N = 1 stand at all variables that any N has a label at.
        let symbols = self.symbols(trial);
        let labels = self.task(trial).labels(&symbols, 1);
        let request = request(&Labelled { symbols, labels }, &self.tokens);
        Ok(Request { expected: None, ..request })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> ByBack {
        let (symbols, task) = (self.symbols(trial), self.task(trial));
        let places = task.labels(&symbols, 1);
        let places = places.iter().map(|&(place, _)| place);
        let predicted: BTreeMap<usize, u32> =
            places.zip(predictions(answer).iter().copied()).collect();
        let count = |at: usize| {
            let labels = task.labels(&symbols, at + 1);
            let right = labels
                .iter()
                .filter(|(place, label)| predicted.get(place) == Some(&self.tokens.token(*label)));
            Counted { right: right.count(), of: labels.len() }
        };
        ByBack { back: std::array::from_fn(count) }
    }

    fn score(&self, outcomes: &[Outcome<ByBack>]) -> Scoring {
        let (mut scores, mut headline) = (Vec::new(), BTreeMap::new());
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            for at in 0..MOST_BACK {
                let counts = outcomes.iter().map(|o| (o.trial.id, o.verdict.back[at]));
                let (metric, estimate) = (metric(at + 1), counted::share(counts));
                headline.insert(format!("{metric}@{length}"), estimate);
                scores.push(Score { metric, length: Some(length), depth: None, estimate });
            }
        }
        let notes = vec![
            "a model is trained for one N (`back` of the source): its accuracy is that of N-back; \
             the others show which values it confuses with it"
                .to_string(),
        ];
        Scoring { headline, scores, notes, ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics: Vec<(String, String)> =
            (1..=MOST_BACK).map(|back| (metric(back), format!("{back}-back"))).collect();
        counted::draw(
            scoring,
            &metrics,
            &Plot::accuracy("N-back recall", title),
            self.train_seq_len,
            dir,
        )
    }
}

impl Mqrar {
    fn task(&self, trial: &Trial) -> Task {
        let MqrarOptions { keys, values, .. } = self.options;
        Task { length: trial.length, keys, values }
    }

    fn symbols(&self, trial: &Trial) -> Vec<u32> {
        let mut rng = sample_rng(self.seed, Self::STREAMS.start, trial);
        let task = self.task(trial);
        Part::Test.draw(&mut rng, |rng| {
            let symbols = task.draw(rng);
            let content = content(&symbols);
            (symbols, content)
        })
    }
}

fn metric(back: usize) -> String {
    format!("accuracy_{back}_back")
}

/// With this many assignments, some variable comes more than [`MOST_BACK`] times.
fn least_length(keys: usize) -> usize {
    keys.saturating_mul(MOST_BACK).saturating_add(1).saturating_mul(2)
}
