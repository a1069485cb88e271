//! The options that every suite has, and helpers for the suites' own options.

use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use longwall_config::{Problems, parse_count, side_by_side};
use longwall_data::Tokenizer;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::EvalError;
use crate::suite::Trial;

/// The options that every suite has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingOptions {
    /// Seed of the samples
    #[arg(long, default_value_t = SamplingOptions::default().seed)]
    pub seed: u64,
    /// The most sequences in a forward pass
    #[arg(long, default_value_t = SamplingOptions::default().batch)]
    pub batch: usize,
    /// The most tokens in a forward pass; a longer sequence runs alone
    #[arg(long, value_name = "TOKENS", value_parser = parse_size,
          default_value_t = SamplingOptions::default().batch_tokens)]
    #[serde(deserialize_with = "size")]
    pub batch_tokens: usize,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions { seed: 0, batch: 64, batch_tokens: 65_536 }
    }
}

impl SamplingOptions {
    /// The keys that affect only a suite's speed, not its samples.
    pub const SPEED_KEYS: [&str; 2] = ["batch", "batch_tokens"];

    /// Records every option that is out of range; `suite` is the suite's name.
    pub(crate) fn validate(&self, suite: &str, problems: &mut Problems) {
        let any = 1..=usize::MAX;
        let remedy = "--batch 1 takes least memory";
        check_count(format!("{suite}.batch"), self.batch, any.clone(), remedy, problems);
        let (key, remedy) = (
            format!("{suite}.batch_tokens"),
            "--batch-tokens 1 puts every sequence in a call of its own",
        );
        check_count(key, self.batch_tokens, any, remedy, problems);
    }
}

/// The options of a suite: its own and those that every suite has, in one table of a configuration
/// file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, clap::Args)]
pub struct SuiteOptions<O: clap::Args> {
    /// The suite's own options.
    #[command(flatten)]
    #[serde(flatten)]
    pub own: O,
    /// Which samples are taken, and how many at a time.
    #[command(flatten)]
    #[serde(flatten)]
    pub sampling: SamplingOptions,
}

impl<O: clap::Args> From<O> for SuiteOptions<O> {
    fn from(own: O) -> Self {
        SuiteOptions { own, sampling: SamplingOptions::default() }
    }
}

impl<'de, O: clap::Args + DeserializeOwned> Deserialize<'de> for SuiteOptions<O> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (own, sampling) = side_by_side(deserializer)?;
        Ok(SuiteOptions { own, sampling })
    }
}

/// The longest length, in tokens: that of a training row.
const LONGEST: usize = 1 << 24;
/// The most samples of one kind at one length, so that their total does not overflow.
pub(crate) const MOST_SAMPLES: usize = 100_000_000;

/// Parses a length or a number of tokens on the command line: `4096`, `32k`.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    parse_count(text).map(|count| count as usize)
}

/// A size in a configuration file: a number, or text with a suffix.
#[derive(Deserialize)]
struct Size(#[serde(deserialize_with = "longwall_config::count")] u64);

/// For `#[serde(deserialize_with)]`: `batch_tokens = "64k"`.
pub(crate) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    Ok(Size::deserialize(deserializer)?.0 as usize)
}

/// For `#[serde(deserialize_with, default)]`: an optional size.
pub(crate) fn optional_size<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<usize>, D::Error> {
    size(deserializer).map(Some)
}

/// For `#[serde(deserialize_with)]`: `lengths = [500, "32k"]`.
pub(crate) fn sizes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    let sizes = Vec::<Size>::deserialize(deserializer)?;
    Ok(sizes.into_iter().map(|size| size.0 as usize).collect())
}

/// For `#[serde(deserialize_with, default)]`: optional lengths.
pub(crate) fn optional_sizes<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<usize>>, D::Error> {
    sizes(deserializer).map(Some)
}

/// Parses one of the values with these names, which `--help` lists.
pub(crate) fn choice<T>(
    names: impl IntoIterator<Item = &'static str>,
) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err = String> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// Checks a list of lengths: at least one, none 0, none too long, none twice.
pub(crate) fn check_lengths(suite: &str, lengths: &[usize], problems: &mut Problems) {
    let key = format!("{suite}.lengths");
    problems.check(
        !lengths.is_empty(),
        &key,
        "empty",
        "at least one length in tokens",
        "give lengths, for example --lengths 500,1000",
    );
    for (at, &length) in lengths.iter().enumerate() {
        problems.check(length > 0, &key, length, "lengths above 0, in tokens", "remove the 0");
        problems.check(
            length <= LONGEST,
            &key,
            length,
            format!("lengths up to {LONGEST}, in tokens"),
            "ask for shorter ones",
        );
        problems.check(
            !lengths[..at].contains(&length),
            &key,
            format!("{length} twice"),
            "every length once",
            "remove the repetition",
        );
    }
}

/// Checks that a count is within a range.
pub(crate) fn check_count(
    key: impl Into<String>,
    value: usize,
    allowed: std::ops::RangeInclusive<usize>,
    remedy: &str,
    problems: &mut Problems,
) {
    let text = match *allowed.end() {
        usize::MAX => format!("{} or more", allowed.start()),
        end => format!("{} to {end}", allowed.start()),
    };
    problems.check(allowed.contains(&value), key, value, text, remedy);
}

/// Checks that the longest answer fits into `max_tokens`: a truncated answer is never correct.
///
/// # Errors
/// [`EvalError::Options`] when it does not.
pub(crate) fn check_answer(
    suite: &str,
    max_tokens: usize,
    answer: &str,
    tokenizer: &Tokenizer,
) -> Result<(), EvalError> {
    let needed = tokenizer.encode(answer).len();
    let mut problems = Problems::new();
    let remedy = format!("raise --max-tokens: the answer `{answer}` takes {needed} tokens");
    let key = format!("{suite}.max_tokens");
    problems.check(max_tokens >= needed, key, max_tokens, format!("{needed} or more"), remedy);
    Ok(problems.into_result()?)
}

/// The random generator of one sample. Its key is the seed and the trial's length, depth and index, so
/// that a sample never depends on which others are taken; `stream` is one of the suite's own
/// ([`Suite::STREAMS`](crate::Suite::STREAMS)).
pub(crate) fn sample_rng(seed: u64, stream: u64, trial: &Trial) -> ChaCha8Rng {
    let depth = trial.depth.map_or(u64::MAX, f64::to_bits);
    let mut key = [0; 32];
    for (bytes, number) in
        key.chunks_exact_mut(8).zip([seed, trial.length as u64, depth, trial.index as u64])
    {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(stream);
    rng
}

/// `count` depths, evenly spaced from 0 to 1; a single one is the middle.
pub(crate) fn depth_grid(count: usize) -> Vec<f64> {
    match count {
        1 => vec![0.5],
        _ => (0..count).map(|n| n as f64 / (count - 1) as f64).collect(),
    }
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;

    #[test]
    fn depths_reach_both_ends() {
        assert_eq!(depth_grid(1), [0.5]);
        assert_eq!(depth_grid(5), [0.0, 0.25, 0.5, 0.75, 1.0]);
    }

    #[test]
    fn samples_depend_on_seed_suite_length_depth_and_index_alone() {
        let trial = Trial { id: 3, length: 500, depth: Some(0.5), index: 0 };
        let draw = |seed, stream, trial: &Trial| sample_rng(seed, stream, trial).random::<u64>();
        let first = draw(0, 1, &trial);
        assert_eq!(first, draw(0, 1, &Trial { id: 9, ..trial.clone() }));
        for other in [
            draw(1, 1, &trial),
            draw(0, 2, &trial),
            draw(0, 1, &Trial { length: 501, ..trial.clone() }),
            draw(0, 1, &Trial { depth: None, ..trial.clone() }),
            draw(0, 1, &Trial { index: 1, ..trial.clone() }),
        ] {
            assert_ne!(first, other);
        }
    }
}
