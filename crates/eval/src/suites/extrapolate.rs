//! Length extrapolation: the loss on held-out text at growing context lengths, and by position.
//!
//! Stretches of text as long as the longest length are cut into windows of each length, so that every
//! length is scored on the same tokens and differs only in its context: a window of length L reads L
//! tokens and predicts the token after each of them. The suite reports:
//!
//! - mean loss (nats per token) and perplexity at each length;
//! - loss by position, in equal linear buckets of at most 2048 tokens, at least eight, and in
//!   logarithmic bins, two per octave: the in-context-learning curve;
//! - the best-context loss (appendix D of the power-attention paper, after Buckman and Gelada): that of
//!   the linear bucket whose 95 % interval has the lowest upper end, and its position. If the loss keeps
//!   falling, this is the last bucket; if the model breaks down past its training length, an earlier one.
//!   Linear buckets hold equal numbers of tokens, and a bucket wins by its bound: the lowest of noisy
//!   means would mostly be a bucket that happens to hold few or easy tokens.
//!
//! Standard errors are over documents: windows of one document are not independent.

mod bins;
mod plots;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::{Binning, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use self::bins::Bin;
use super::stretches::{Stretches, TextOptions};
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, optional_sizes, parse_size};
use crate::report::{Score, show};
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Default lengths are 1, 2, 4, … this many times the training length.
const LONGEST_FACTOR: usize = 32;

/// Options of `longwall eval extrapolate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct ExtrapolateOptions {
    /// Context lengths in tokens of the model's tokenizer; the longest must be a multiple of each
    /// [default: 1, 2, 4, … 32 times the training length, as far as text and model reach]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_sizes", skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<usize>>,
    /// Stretches of text of the longest length to score
    #[arg(long, default_value_t = ExtrapolateOptions::default().sequences)]
    pub sequences: usize,
    /// Text files or folders, one file is one document [default: the run's validation split, its
    /// documents joined]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// Join the documents of --text, each ended by end of text, instead of leaving out short ones
    #[arg(long)]
    pub packed: bool,
}

impl Default for ExtrapolateOptions {
    fn default() -> Self {
        ExtrapolateOptions { lengths: None, sequences: 16, text: Vec::new(), packed: false }
    }
}

impl ExtrapolateOptions {
    fn text(&self) -> TextOptions<'_> {
        TextOptions {
            suite: Extrapolate::NAME,
            lengths: self.lengths.as_deref(),
            sequences: self.sequences,
            text: &self.text,
            packed: self.packed,
        }
    }
}

/// Powers of two times the training length, as far as the model can read.
fn default_lengths(context: &OpenContext<'_>) -> Vec<usize> {
    let train = context.train_seq_len;
    let factors = (0..).map(|n| 1 << n).take_while(|&factor: &usize| factor <= LONGEST_FACTOR);
    factors
        .map(|factor| factor * train)
        .filter(|&length| length == train || context.max_len.is_none_or(|most| length <= most))
        .collect()
}

/// The mean losses of one window, in nats per token; none if a loss is infinite or not a number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Losses {
    /// Mean over the window.
    pub loss: Option<f64>,
    /// Mean over each linear bucket.
    pub linear: Vec<Option<f64>>,
    /// Mean over each logarithmic bin.
    pub logarithmic: Vec<Option<f64>>,
}

/// The suite.
pub struct Extrapolate {
    stretches: Stretches,
    train_seq_len: usize,
}

impl Suite for Extrapolate {
    type Options = ExtrapolateOptions;
    type Verdict = Losses;

    const NAME: &'static str = "extrapolate";
    const VERSION: u32 = 2;
    /// Empty: its samples are places in the text.
    const STREAMS: Range<u64> = 0..0;
    const GENERATES: bool = false;
    const READS_TEXT: bool = true;

    fn validate(options: &ExtrapolateOptions, problems: &mut Problems) {
        options.text().validate(problems);
        let remedy = "more --sequences give smaller standard errors; 16 is usual";
        let sequences = options.sequences;
        check_count("extrapolate.sequences", sequences, 1..=MOST_SAMPLES, remedy, problems);
    }

    fn open(options: &ExtrapolateOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let stretches = Stretches::open(&options.text(), default_lengths(context), context)?;
        let train_seq_len = context.train_seq_len;
        Ok(Extrapolate { stretches, train_seq_len })
    }

    fn resolved(&self) -> Value {
        self.stretches.describe()
    }

    /// A trial's index counts windows: first those of the first stretch, then of the second, and so on.
    fn trials(&self) -> Vec<Trial> {
        self.stretches.trials()
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let tokens = self.stretches.window(trial.length, trial.index).to_vec();
        Ok(Request {
            prompt: tokenizer.decode(&tokens),
            call: ModelCall::RollingLogLikelihood { tokens },
            expected: None,
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Losses {
        let Answer::TokenLogProbs(values) = answer else {
            unreachable!("a rolling log-likelihood was answered by {answer:?}");
        };
        let mean = |from: usize, to: usize| {
            let sum: f64 = values[from..to].iter().map(|&value| -f64::from(value)).sum();
            Some(sum / (to - from) as f64).filter(|mean| mean.is_finite())
        };
        let means =
            |bins: Vec<(usize, usize)>| bins.into_iter().map(|(from, to)| mean(from, to)).collect();
        Losses {
            loss: mean(0, trial.length),
            linear: means(Binning::Linear.edges(trial.length)),
            logarithmic: means(Binning::Logarithmic.edges(trial.length)),
        }
    }

    fn score(&self, outcomes: &[Outcome<Losses>]) -> Scoring {
        let mut scores = Vec::new();
        let mut headline = BTreeMap::new();
        let mut bins = Vec::new();
        let mut best_positions = BTreeMap::new();
        let mut notes = Vec::new();
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            let loss = self.estimate(outcomes, |losses| losses.loss);
            let mut push = |metric: &str, estimate: Estimate| {
                scores.push(Score {
                    metric: metric.to_string(),
                    length: Some(length),
                    depth: None,
                    estimate,
                });
            };
            push("loss", loss);
            push("perplexity", loss.exp());
            headline.insert(format!("loss@{length}"), loss);
            let linear = self.bins(outcomes, Binning::Linear, |losses| &losses.linear);
            let curve = self.bins(outcomes, Binning::Logarithmic, |losses| &losses.logarithmic);
            if let Some(bin) = best(&linear) {
                push("best_context_loss", bin.loss);
                // Of the longest length, which comes last.
                headline.insert("best_context_loss".to_string(), bin.loss);
                best_positions
                    .insert(length.to_string(), json!({ "from": bin.from, "to": bin.to }));
                notes = vec![best_note(bin)];
            }
            bins.extend(linear.into_iter().chain(curve));
        }
        let details = json!({
            "losses": "nats per token",
            "positions": bins,
            "best_context_positions": best_positions,
        });
        if best_positions.is_empty() {
            notes.push(NO_BEST.to_string());
        }
        Scoring { headline, scores, notes, details, ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        plots::draw(scoring, title, self.train_seq_len, dir)
    }
}

impl Extrapolate {
    /// Mean over windows, with a standard error over documents; has no value if a window has none.
    fn estimate(
        &self,
        outcomes: &[Outcome<Losses>],
        value: impl Fn(&Losses) -> Option<f64>,
    ) -> Estimate {
        Estimate::clustered(outcomes.iter().map(|outcome| {
            let document = self.stretches.document(outcome.trial.length, outcome.trial.index);
            (document as u64, value(&outcome.verdict).unwrap_or(f64::NAN))
        }))
    }

    fn bins(
        &self,
        outcomes: &[Outcome<Losses>],
        binning: Binning,
        values: impl Fn(&Losses) -> &Vec<Option<f64>>,
    ) -> Vec<Bin> {
        let length = outcomes[0].trial.length;
        let edges = binning.edges(length).into_iter().enumerate();
        edges
            .map(|(n, (from, to))| {
                let loss = self.estimate(outcomes, |losses| values(losses).get(n).copied()?);
                Bin { length, binning, from, to, loss }
            })
            .collect()
    }
}

/// The bucket whose 95 % interval has the lowest upper end; none if none has an interval.
fn best(bins: &[Bin]) -> Option<&Bin> {
    let bounded = bins.iter().filter_map(|bin| Some((bin, bin.loss.high?)));
    bounded.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(bin, _)| bin)
}

/// Says where the best-context loss is, and its bound.
fn best_note(bin: &Bin) -> String {
    let Bin { length, from, to, loss, .. } = bin;
    let bound =
        loss.high.map_or(String::new(), |high| format!(", at most {high:.3} with 95 % confidence"));
    format!(
        "the best-context loss of length {length} is that of the positions {} to {to}: {}{bound}",
        from + 1,
        show(loss)
    )
}

const NO_BEST: &str =
    "there is no best-context loss: it takes finite losses of two documents or more";

#[cfg(test)]
mod tests {
    use super::*;

    fn bin(from: usize, losses: [f64; 4]) -> Bin {
        let loss = Estimate::clustered((0..4).map(|n| (n as u64, losses[n])));
        Bin { length: 100, binning: Binning::Linear, from, to: from + 50, loss }
    }

    #[test]
    fn the_best_bucket_has_the_lowest_bound_and_not_the_lowest_mean() {
        let noisy = bin(0, [0.2, 2.0, 0.3, 2.1]);
        let steady = bin(50, [1.3, 1.31, 1.29, 1.3]);
        assert!(noisy.loss.value < steady.loss.value);
        let bins = [noisy, steady];
        assert_eq!(best(&bins).map(|bin| bin.from), Some(50));
        assert!(best_note(&bins[1]).starts_with(
            "the best-context loss of length 100 is that of the positions 51 to 100: 1.300 ± 0.004, at most 1.313"
        ));
    }

    #[test]
    fn a_bucket_without_an_interval_is_never_the_best() {
        let single = Estimate::clustered([(0, 0.5)]);
        let bin = Bin { length: 10, binning: Binning::Linear, from: 0, to: 10, loss: single };
        assert_eq!(best(&[bin]), None);
    }
}
