//! Needle in a haystack: a magic number in long text, asked for at the end, over a grid of lengths and
//! depths; an answer is correct if it contains the number.
//!
//! `--mode standard` states the number in a sentence and asks for it. `--mode easy` puts the question
//! itself, with its answer, into the haystack, so that even a small base model that can only copy shows
//! whether it reaches that far.

mod haystack;

use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
pub use longwall_data::synthetic::niah::NiahMode;
use longwall_data::synthetic::niah::{Needle, longest_prompt};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(super) use self::haystack::Haystack;
pub use self::haystack::HaystackKind;
use super::fit::{check_floor, too_short};
use super::retrieval::{self, Depths, Found};
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_answer, check_count, check_lengths, choice, depth_grid, optional_sizes,
    parse_size, sample_rng, size,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval niah`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct NiahOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer [default: as many as
    /// --length-count, evenly from --min-length to --max-length]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_sizes", skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<usize>>,
    /// The shortest length, without --lengths
    #[arg(long, value_name = "TOKENS", value_parser = parse_size,
          default_value_t = NiahOptions::default().min_length)]
    #[serde(deserialize_with = "size")]
    pub min_length: usize,
    /// The longest length, without --lengths
    #[arg(long, value_name = "TOKENS", value_parser = parse_size,
          default_value_t = NiahOptions::default().max_length)]
    #[serde(deserialize_with = "size")]
    pub max_length: usize,
    /// How many lengths, without --lengths
    #[arg(long, default_value_t = NiahOptions::default().length_count)]
    pub length_count: usize,
    /// How many depths, evenly from start to end
    #[arg(long, default_value_t = NiahOptions::default().depths)]
    pub depths: usize,
    /// Trials at each length and depth
    #[arg(long, default_value_t = NiahOptions::default().trials)]
    pub trials: usize,
    /// How the needle is phrased
    #[arg(long, value_parser = choice::<NiahMode>(NiahMode::ALL.map(NiahMode::name)), default_value_t)]
    pub mode: NiahMode,
    /// What the needle is hidden in
    #[arg(long, value_enum, default_value_t)]
    pub haystack: HaystackKind,
    /// Text files or folders for the haystack [default: the run's validation split]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = NiahOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for NiahOptions {
    fn default() -> Self {
        NiahOptions {
            lengths: None,
            min_length: 1000,
            max_length: 32_000,
            length_count: 11,
            depths: 11,
            trials: 5,
            mode: NiahMode::Standard,
            haystack: HaystackKind::Text,
            text: Vec::new(),
            max_tokens: 32,
        }
    }
}

impl NiahOptions {
    /// The requested lengths, or evenly spaced ones from the shortest to the longest.
    fn lengths(&self) -> Vec<usize> {
        if let Some(lengths) = &self.lengths {
            return lengths.clone();
        }
        if self.length_count == 1 {
            return vec![self.max_length];
        }
        let step = self.max_length.saturating_sub(self.min_length) as f64
            / (self.length_count.max(2) - 1) as f64;
        (0..self.length_count)
            .map(|n| self.min_length + (n as f64 * step).round() as usize)
            .collect()
    }
}

/// The suite.
pub struct Niah {
    options: NiahOptions,
    lengths: Vec<usize>,
    haystack: Haystack,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Niah {
    type Options = NiahOptions;
    type Verdict = Found;

    const NAME: &'static str = "niah";
    const VERSION: u32 = 2;
    const STREAMS: Range<u64> = 2..3;
    const GENERATES: bool = true;
    const READS_TEXT: bool = true;

    fn validate(options: &NiahOptions, problems: &mut Problems) {
        problems.check(
            options.lengths.is_some() || options.min_length <= options.max_length,
            "niah.min_length",
            options.min_length,
            format!("up to niah.max_length, {}", options.max_length),
            "swap them, or give --lengths",
        );
        let remedy = "a usual grid has --length-count 11 or 35";
        check_count("niah.length_count", options.length_count, 1..=1001, remedy, problems);
        let remedy = "a usual grid has --depths 11 or 35";
        check_count("niah.depths", options.depths, 1..=1001, remedy, problems);
        let remedy = "a usual number is --trials 5";
        check_count("niah.trials", options.trials, 1..=MOST_SAMPLES, remedy, problems);
        let remedy = "the answer is a number of 7 digits: --max-tokens 32 is ample";
        check_count("niah.max_tokens", options.max_tokens, 1..=1024, remedy, problems);
        problems.check(
            options.text.is_empty() || options.haystack == HaystackKind::Text,
            "niah.text",
            format!("given beside haystack = \"{}\"", options.haystack.name()),
            "only beside haystack = \"text\"",
            "leave out --text, or use --haystack text",
        );
        let is_grid = options.min_length <= options.max_length && options.length_count <= 1001;
        if options.lengths.is_some() || is_grid {
            check_lengths(Self::NAME, &options.lengths(), problems);
        }
    }

    fn open(options: &NiahOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let tokenizer = context.tokenizer;
        check_answer(Self::NAME, options.max_tokens, " 9876543", tokenizer)?;
        let lengths = options.lengths();
        let prompt = longest_prompt(tokenizer, options.mode);
        check_floor(Self::NAME, &lengths, prompt, options.max_tokens, tokenizer)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let haystack = Haystack::open(options, context, longest)?;
        let OpenContext { seed, train_seq_len, .. } = *context;
        let options = options.clone();
        Ok(Niah { options, lengths, haystack, seed, train_seq_len })
    }

    fn resolved(&self) -> Value {
        self.haystack.describe()
    }

    fn trials(&self) -> Vec<Trial> {
        let depths: Vec<_> = depth_grid(self.options.depths).into_iter().map(Some).collect();
        retrieval::grid_trials(&self.lengths, &depths, self.options.trials)
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let mut rng = sample_rng(self.seed, Self::STREAMS.start, trial);
        let needle = Needle::draw(&mut rng, self.options.mode, Part::Test);
        let budget = trial.length - self.options.max_tokens;
        let (text, depth) = (&self.haystack.text, trial.depth.unwrap_or(0.5));
        let prompt = needle
            .prompt(text, depth, budget, &mut rng, tokenizer)
            .map_err(|needed| too_short(Self::NAME, trial, needed, budget, tokenizer))?;
        Ok(Request {
            prompt: tokenizer.decode(&prompt),
            call: ModelCall::Generate { prompt, max_tokens: self.options.max_tokens },
            expected: Some(needle.number),
            depth: trial.depth,
        })
    }

    fn judge(&self, _trial: &Trial, request: &Request, answer: &Answer) -> Found {
        let correct = match (answer, &request.expected) {
            (Answer::Text(output), Some(number)) => output.contains(number),
            other => unreachable!("a question for a number was answered by {other:?}"),
        };
        Found { correct }
    }

    fn sample_score(verdict: &Found) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Found>]) -> Scoring {
        retrieval::score(outcomes, Depths::Grid, self.train_seq_len)
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        retrieval::draw(scoring, "Needle in a haystack", title, self.train_seq_len, dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_grid_is_eleven_by_eleven_from_1k_to_32k() {
        let options = NiahOptions::default();
        let lengths = options.lengths();
        assert_eq!((lengths.len(), lengths[0], lengths[1], lengths[10]), (11, 1000, 4100, 32_000));
        assert_eq!(depth_grid(options.depths).len(), 11);
    }
}
