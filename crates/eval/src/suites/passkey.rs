//! Passkey retrieval: a number hidden in repeated text, asked for at the end.
//!
//! The protocol is that of the TRA/TDA paper, appendix D: the instruction, a garbage prefix, the
//! needle, a garbage suffix and the question, joined by newlines; x uniform in 1 to 50,000; greedy
//! decoding of at most 10 tokens; an answer is correct if its first number is x. The texts come from
//! [`longwall_data::synthetic::passkey`], from which training can draw too: other numbers are hidden there.

use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::passkey::PasskeyFitter;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::fit::check_floor;
use super::retrieval::{self, Depths, Found};
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_answer, check_count, check_lengths, depth_grid, parse_size, sample_rng,
    sizes,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval passkey`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct PasskeyOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = PasskeyOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Trials at each length (and each depth, with --depths)
    #[arg(long, default_value_t = PasskeyOptions::default().trials)]
    pub trials: usize,
    /// Put the needle at this many depths, evenly from start to end; without it, anywhere at random
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depths: Option<usize>,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = PasskeyOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for PasskeyOptions {
    fn default() -> Self {
        PasskeyOptions {
            lengths: (1..=8).map(|n| n * 500).collect(),
            trials: 100,
            depths: None,
            max_tokens: 10,
        }
    }
}

/// The suite.
pub struct Passkey {
    options: PasskeyOptions,
    fitter: PasskeyFitter,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Passkey {
    type Options = PasskeyOptions;
    type Verdict = Found;

    const NAME: &'static str = "passkey";
    const VERSION: u32 = 2;
    const STREAMS: Range<u64> = 1..2;
    const GENERATES: bool = true;

    fn validate(options: &PasskeyOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let trials = options.trials;
        let remedy = "the paper takes --trials 100";
        check_count("passkey.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let remedy = "the paper generates --max-tokens 10";
        check_count("passkey.max_tokens", options.max_tokens, 1..=1024, remedy, problems);
        let remedy = "a usual grid is --depths 11; leave it out for random positions";
        check_count("passkey.depths", options.depths.unwrap_or(1), 1..=1001, remedy, problems);
    }

    fn open(options: &PasskeyOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        check_answer(Self::NAME, options.max_tokens, " 50000", context.tokenizer)?;
        let fitter = PasskeyFitter::new(context.tokenizer);
        let (prompt, generation) = (fitter.shortest_prompt(), options.max_tokens);
        check_floor(Self::NAME, &options.lengths, prompt, generation, context.tokenizer)?;
        let OpenContext { seed, train_seq_len, .. } = *context;
        Ok(Passkey { options: options.clone(), fitter, seed, train_seq_len })
    }

    fn resolved(&self) -> Value {
        json!({})
    }

    fn trials(&self) -> Vec<Trial> {
        let depths = match self.options.depths {
            Some(count) => depth_grid(count).into_iter().map(Some).collect(),
            None => vec![None],
        };
        retrieval::grid_trials(&self.options.lengths, &depths, self.options.trials)
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let mut rng = sample_rng(self.seed, Self::STREAMS.start, trial);
        let budget = trial.length - self.options.max_tokens;
        let prompt = self
            .fitter
            .fit(&mut rng, budget, trial.depth, Part::Test, "--lengths")
            .map_err(|error| EvalError::Text {
                what: format!("passkey, length {}: {error}", trial.length),
                remedy: "ask for longer --lengths".to_string(),
            })?;
        Ok(Request {
            call: ModelCall::Generate {
                prompt: tokenizer.encode(&prompt.prompt),
                max_tokens: self.options.max_tokens,
            },
            expected: Some(prompt.answer.to_string()),
            depth: Some(prompt.depth),
            prompt: prompt.prompt,
        })
    }

    fn judge(&self, _trial: &Trial, request: &Request, answer: &Answer) -> Found {
        let correct = match answer {
            Answer::Text(output) => first_number(output) == request.expected.as_deref(),
            other => unreachable!("a generation was answered by {other:?}"),
        };
        Found { correct }
    }

    fn sample_score(verdict: &Found) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Found>]) -> Scoring {
        let depths = match self.options.depths {
            Some(_) => Depths::Grid,
            None => Depths::Random,
        };
        retrieval::score(outcomes, depths, self.train_seq_len)
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        retrieval::draw(scoring, "Passkey retrieval", title, self.train_seq_len, dir)
    }
}

/// The first run of digits, without leading zeros: integers of any length are compared by value.
fn first_number(text: &str) -> Option<&str> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let rest = &text[start..];
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some(rest[..end].trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_counts() {
        assert_eq!(first_number(" 12345."), Some("12345"));
        assert_eq!(first_number(" 00123"), Some("123"));
        assert_eq!(first_number("is 7, not 9"), Some("7"));
        assert_eq!(first_number("123456"), Some("123456"));
        assert_eq!(first_number("none"), None);
        assert_eq!(first_number(""), None);
    }
}
