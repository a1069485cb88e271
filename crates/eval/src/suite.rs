//! The trait that every suite implements, and the types that it uses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_kernels::attention::probe::{Metric, Observation};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::ranks::Ranks;
use crate::report::{Score, TextTable};
use crate::stats::Estimate;
use crate::{EvalError, EvalModel, LogLikelihood};

/// One evaluation: it lists its trials, makes each trial's request, judges the model's answer and
/// turns the verdicts into scores.
///
/// A trial's request is a pure function of the suite's options and the trial, so that a suite can be
/// interrupted and resumed, and gives the same samples whatever the order and the batch size.
pub trait Suite: Sized {
    /// The suite's own options, which a user sets on the command line or in a table of a configuration
    /// file, besides those that every suite has.
    type Options: clap::Args + Serialize + DeserializeOwned;
    /// The result of [`judge`](Self::judge), kept in a line of `samples.jsonl`.
    type Verdict: Serialize + DeserializeOwned;

    /// The suite's name on the command line, in configuration files and as its folder.
    const NAME: &'static str;
    /// Bumped whenever a change of the suite changes its numbers.
    const VERSION: u32;
    /// The random streams of its samples. No two suites share one, so that the same seed draws different
    /// samples in each.
    const STREAMS: Range<u64>;

    /// Whether its calls of the model generate text.
    const GENERATES: bool;
    /// Whether it needs text by default: the run's validation split, or the files of `--text`.
    const READS_TEXT: bool = false;

    /// Records every option that is out of range.
    fn validate(options: &Self::Options, problems: &mut Problems);

    /// Prepares the suite for a model: resolves defaults, reads text.
    ///
    /// # Errors
    /// Lengths too short for the prompt, text that is missing or too short.
    fn open(options: &Self::Options, context: &OpenContext<'_>) -> Result<Self, EvalError>;

    /// Values that the options did not set and [`open`](Self::open) chose: default lengths, the text read.
    /// Part of the settings that a resumed evaluation must share.
    fn resolved(&self) -> Value;

    /// All trials, by increasing length; each `id` is its index in the list.
    fn trials(&self) -> Vec<Trial>;

    /// The request of a trial.
    ///
    /// # Errors
    /// A prompt that does not fit.
    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError>;

    /// Judges the model's answer.
    fn judge(&self, trial: &Trial, request: &Request, answer: &Answer) -> Self::Verdict;

    /// The share of a sample's answer that is right, 0 to 1, if `accuracy` is the mean of these over all samples:
    /// paired tests between models compare them sample by sample. None for other suites.
    fn sample_score(_verdict: &Self::Verdict) -> Option<f64> {
        None
    }

    /// Further fields of the trial's line in `samples.jsonl`, for other programs to read.
    fn fields(
        &self,
        _trial: &Trial,
        _request: &Request,
        _verdict: &Self::Verdict,
    ) -> Map<String, Value> {
        Map::new()
    }

    /// Asks the model for what is no trial, after the last one. It writes nothing.
    ///
    /// # Errors
    /// [`EvalError::Model`] when the model cannot run.
    fn inspect(&self, _model: &mut dyn EvalModel) -> Result<Inspection, EvalError> {
        Ok(Inspection::default())
    }

    /// Turns the verdicts, which come in the order of the trials, into scores.
    fn score(&self, outcomes: &[Outcome<Self::Verdict>]) -> Scoring;

    /// Writes the suite's own files besides `results.json` and `grid.csv`: plots, further tables.
    /// `title` names the run.
    ///
    /// # Errors
    /// Files that cannot be written.
    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError>;
}

/// What a suite knows when it opens.
#[derive(Clone, Copy)]
pub struct OpenContext<'a> {
    /// The model's tokenizer; every length is in its tokens.
    pub tokenizer: &'a Tokenizer,
    /// Length of the sequences the model was trained on.
    pub train_seq_len: usize,
    /// The longest context the model can read, if it is limited.
    pub max_len: Option<usize>,
    /// The device, as [`EvalModel::device`](crate::EvalModel::device) names it.
    pub device: &'a str,
    /// The seed that all samples come from.
    pub seed: u64,
    /// The run's own held-out text, if it has any.
    pub held_out: Option<&'a dyn HeldOut>,
    /// What the model's layers measure: [`EvalModel::metrics`](crate::EvalModel::metrics).
    pub metrics: &'a [Metric],
}

/// Text that the run held out from training.
pub trait HeldOut {
    /// The first `wanted` tokens of the validation split, document after document, each ended by the
    /// end-of-text token; fewer if the split is smaller.
    ///
    /// # Errors
    /// [`EvalError::Text`] when the split cannot be read.
    fn validation_tokens(&self, wanted: usize) -> Result<Vec<u32>, EvalError>;

    /// A description for the report, for example "validation split of runs/wall".
    fn describe(&self) -> String;
}

/// One sample to take.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trial {
    /// Index in the list of trials.
    pub id: u64,
    /// Requested length, in tokens.
    pub length: usize,
    /// Requested depth, 0 (start) to 1 (end); none if it is random or has no meaning.
    pub depth: Option<f64>,
    /// Index among the trials of this length and depth.
    pub index: usize,
}

/// A trial's call of the model, and what is needed to judge the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The call.
    pub call: ModelCall,
    /// The text of the prompt, kept in `samples.jsonl`.
    pub prompt: String,
    /// The correct answer, if there is one.
    pub expected: Option<String>,
    /// Where the information is in the prompt, 0 to 1.
    pub depth: Option<f64>,
}

/// A call of the model, like the request types of lm-evaluation-harness.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelCall {
    /// Greedy generation.
    Generate {
        /// Tokens of the prompt.
        prompt: Vec<u32>,
        /// The most tokens to generate.
        max_tokens: usize,
    },
    /// Log-likelihoods of continuations, each after its context.
    LogLikelihoods {
        /// Tokens of each context and of its continuation, none of them empty; at least one pair.
        pairs: Vec<(Vec<u32>, Vec<u32>)>,
    },
    /// Log-likelihood of every token but the first, each given all before it.
    RollingLogLikelihood {
        /// The tokens, one more than the model reads.
        tokens: Vec<u32>,
    },
    /// The most likely token after each of some places.
    Predict {
        /// The sequence.
        tokens: Vec<u32>,
        /// Indices of tokens; at least one.
        places: Vec<usize>,
    },
    /// What the layers measure while the model reads a sequence.
    Observe {
        /// The sequence.
        tokens: Vec<u32>,
    },
}

impl ModelCall {
    /// Tokens given to the model, in the longest sequence.
    pub fn input_len(&self) -> usize {
        match self {
            ModelCall::Generate { prompt, .. } => prompt.len(),
            ModelCall::LogLikelihoods { pairs } => {
                let read = |(context, continuation): &(Vec<u32>, Vec<u32>)| {
                    (context.len() + continuation.len()).saturating_sub(1)
                };
                pairs.iter().map(read).max().unwrap_or(0)
            }
            ModelCall::RollingLogLikelihood { tokens } => tokens.len().saturating_sub(1),
            ModelCall::Predict { tokens, .. } | ModelCall::Observe { tokens } => tokens.len(),
        }
    }

    /// The longest context the call needs: what it reads and what it generates.
    pub fn context_len(&self) -> usize {
        match self {
            ModelCall::Generate { prompt, max_tokens } => prompt.len() + max_tokens,
            _ => self.input_len(),
        }
    }

    /// Sequences that the model reads.
    pub(crate) fn sequences(&self) -> usize {
        match self {
            ModelCall::LogLikelihoods { pairs } => pairs.len(),
            _ => 1,
        }
    }

    /// In this order, calls that may share a batch are neighbours.
    pub(crate) fn batch_key(&self) -> (u8, usize, usize) {
        match self {
            ModelCall::Generate { prompt, max_tokens } => (0, *max_tokens, prompt.len()),
            // Of any lengths: the model pads them.
            ModelCall::LogLikelihoods { .. } => (1, 0, 0),
            ModelCall::RollingLogLikelihood { tokens } => (2, tokens.len(), 0),
            ModelCall::Observe { tokens } => (3, tokens.len(), 0),
            ModelCall::Predict { tokens, .. } => (4, tokens.len(), 0),
        }
    }

    /// Whether a call that does not come before this one may share its batch. A batch of prompts takes a step for each
    /// token that the longest has more than the shortest; a batch of its own takes `max_tokens` steps.
    pub(crate) fn may_share_batch(&self, other: &ModelCall) -> bool {
        let (kind, size, length) = self.batch_key();
        let longest = match self {
            ModelCall::Generate { max_tokens, .. } => length + max_tokens,
            _ => length,
        };
        let other = other.batch_key();
        (other.0, other.1) == (kind, size) && other.2 <= longest
    }
}

/// The model's answer to a [`ModelCall`].
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The generated text.
    Text(String),
    /// The log-likelihood of each continuation.
    LogLikelihoods(Vec<LogLikelihood>),
    /// ln p of every token but the first, in nats.
    TokenLogProbs(Vec<f32>),
    /// The most likely token at each place.
    Tokens(Vec<u32>),
    /// What the layers measured.
    Observations(Vec<Observation>),
}

/// Ids of tokens, separated by spaces.
pub(crate) fn show_tokens(tokens: &[u32]) -> String {
    tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// A finished trial, as the scores need it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome<V> {
    /// The trial.
    pub trial: Trial,
    /// Where the information was in the prompt, 0 to 1.
    pub depth: Option<f64>,
    /// The verdict on its answer.
    pub verdict: V,
}

/// What a suite found beside its trials.
#[derive(Clone, Debug, Default)]
pub struct Inspection {
    /// Files for the suite's folder: names and contents.
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// What a reader must know, a sentence each.
    pub notes: Vec<String>,
}

/// The scores of a suite.
#[derive(Clone, Debug, Default)]
pub struct Scoring {
    /// The few numbers that sweeps compare.
    pub headline: BTreeMap<String, Estimate>,
    /// Every score, with its standard error or interval.
    pub scores: Vec<Score>,
    /// Tables for the terminal, below that of the scores.
    pub tables: Vec<TextTable>,
    /// Whether the tables show all scores, and the table of scores by length is left out.
    pub tables_only: bool,
    /// What a reader must know about the scores, a sentence each.
    pub notes: Vec<String>,
    /// Further results specific to the suite: curves, bins.
    pub details: Value,
    /// Further fields of `results.json` beside those of every suite, for other programs to read.
    pub shared: Map<String, Value>,
}

/// Which earlier evaluation in the folder is discarded; any other is continued, or scored again if it is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// None: one with other settings is an error.
    Nothing,
    /// One with other settings that is not finished, or is of another checkpoint.
    Outdated,
    /// One with other settings.
    OtherSettings,
    /// Any.
    All,
}

/// The run to evaluate, where the results go, and who receives the progress.
pub struct RunContext<'a> {
    /// The folder of this suite's files, for example `runs/wall/eval/passkey`.
    pub out_dir: PathBuf,
    /// Name of the run the model comes from.
    pub run: String,
    /// Step of the checkpoint; none for a model without one.
    pub checkpoint_step: Option<u64>,
    /// How the model differs from the checkpoint's: other weights or settings, as `key=value`.
    pub model_changes: Vec<String>,
    /// The git commit of the working tree, if there is one.
    pub git_hash: Option<String>,
    /// What becomes of an earlier evaluation in the folder.
    pub discard: Discard,
    /// The run's held-out text, if it has any.
    pub held_out: Option<&'a dyn HeldOut>,
    /// Receives the progress.
    pub progress: &'a dyn Progress,
    /// Asks to stop; finished samples are kept.
    pub stop: Option<&'a dyn StopRequest>,
    /// The processes that take the samples together; all have the same context but for their rank.
    pub ranks: Ranks<'a>,
}

impl RunContext<'_> {
    pub(crate) fn stopped(&self) -> bool {
        self.stop.is_some_and(StopRequest::is_raised)
    }

    /// Calls `work`, which writes nothing, so that a stop request may end the process in it with the
    /// words of `stopped`.
    pub(crate) fn interruptible<T>(&self, stopped: &EvalError, work: impl FnOnce() -> T) -> T {
        let Some(stop) = self.stop else { return work() };
        let (mut work, mut result) = (Some(work), None);
        stop.interruptible(&stopped.to_string(), &mut || result = work.take().map(|work| work()));
        result.expect("interruptible calls its work once")
    }
}

/// A request to stop, which may come at any time.
pub trait StopRequest {
    /// Whether it has come. An evaluation asks between batches.
    fn is_raised(&self) -> bool;

    /// Calls `work` once. `work` writes nothing, so that a request during it may end the process, which
    /// first says `stopped`; by default the request waits for the end of `work`.
    fn interruptible(&self, _stopped: &str, work: &mut dyn FnMut()) {
        work();
    }
}

impl StopRequest for AtomicBool {
    fn is_raised(&self) -> bool {
        self.load(Ordering::Relaxed)
    }
}

/// How far an evaluation has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgressUpdate {
    /// Samples done, including those of an earlier run of the suite.
    pub done: u64,
    /// All samples.
    pub total: u64,
    /// Length of the current samples, in tokens.
    pub length: usize,
    /// Samples per second since this start; none before the first batch.
    pub samples_per_second: Option<f64>,
    /// Time left, from the tokens per second so far; none before the first batch.
    pub time_left: Option<Duration>,
}

/// Receives the progress of an evaluation; the binary draws it on stderr.
pub trait Progress {
    /// The suite begins; `done` of `total` samples exist from an earlier run.
    fn start(&self, suite: &str, done: u64, total: u64);
    /// A batch is done.
    fn update(&self, update: &ProgressUpdate);
    /// The suite has finished or stopped.
    fn finish(&self);
}

/// Reports nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _suite: &str, _done: u64, _total: u64) {}
    fn update(&self, _update: &ProgressUpdate) {}
    fn finish(&self) {}
}
