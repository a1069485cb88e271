//! Phone book lookup: a name's number among as many lines of names and numbers as fit.
//!
//! After Jelassi et al. (2024), as in the PaTH paper: the book, a blank line, two of its lines as examples, a
//! blank line, and the name that is asked for. An answer is correct if its first line is the number. The
//! prompts come from [`longwall_data::synthetic::phonebook`], from which training can draw too: other
//! entries are asked for there.

use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::phonebook::PhonebookFitter;
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

/// Options of `longwall eval phonebook`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct PhonebookOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = PhonebookOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Trials at each length (and each depth, with --depths)
    #[arg(long, default_value_t = PhonebookOptions::default().trials)]
    pub trials: usize,
    /// Ask for entries at this many depths, evenly from start to end; without it, anywhere at random
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depths: Option<usize>,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = PhonebookOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for PhonebookOptions {
    fn default() -> Self {
        let lengths = vec![2000, 4000, 8000];
        PhonebookOptions { lengths, trials: 100, depths: None, max_tokens: 16 }
    }
}

/// The suite.
pub struct Phonebook {
    options: PhonebookOptions,
    fitter: PhonebookFitter,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Phonebook {
    type Options = PhonebookOptions;
    type Verdict = Found;

    const NAME: &'static str = "phonebook";
    const VERSION: u32 = 1;
    const STREAMS: Range<u64> = 21..22;
    const GENERATES: bool = true;

    fn validate(options: &PhonebookOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let remedy = "a usual number is --trials 100";
        let trials = options.trials;
        check_count("phonebook.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let remedy = "a number has ten digits: --max-tokens 16 is enough";
        check_count("phonebook.max_tokens", options.max_tokens, 1..=1024, remedy, problems);
        let remedy = "a usual grid is --depths 11; leave it out for random positions";
        check_count("phonebook.depths", options.depths.unwrap_or(1), 1..=1001, remedy, problems);
    }

    fn open(options: &PhonebookOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        // The end of the line ends the number.
        check_answer(Self::NAME, options.max_tokens, " 9182736450", tokenizer)?;
        let fitter = PhonebookFitter::new(tokenizer);
        let prompt = fitter.shortest_prompt();
        check_floor(Self::NAME, &options.lengths, prompt, options.max_tokens, tokenizer)?;
        Ok(Phonebook { options: options.clone(), fitter, seed, train_seq_len })
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
        let prompt = self.fitter.fit(&mut rng, budget, trial.depth, Part::Test, "--lengths");
        let prompt = prompt.map_err(|error| EvalError::Text {
            what: format!("phonebook, length {}: {error}", trial.length),
            remedy: "ask for longer --lengths".to_string(),
        })?;
        Ok(Request {
            call: ModelCall::Generate {
                prompt: tokenizer.encode(&prompt.prompt),
                max_tokens: self.options.max_tokens,
            },
            expected: Some(prompt.answer),
            depth: Some(prompt.depth),
            prompt: prompt.prompt,
        })
    }

    fn judge(&self, _trial: &Trial, request: &Request, answer: &Answer) -> Found {
        let correct = match answer {
            Answer::Text(output) => is_number(output, request.expected.as_deref()),
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
        retrieval::draw(scoring, "Phone book lookup", title, self.train_seq_len, dir)
    }
}

/// Whether the first line of the output is the number, and nothing else but blanks.
fn is_number(output: &str, number: Option<&str>) -> bool {
    output.lines().next().map(str::trim) == number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_the_answer() {
        let right = |output| is_number(output, Some("0123456789"));
        assert!(
            [" 0123456789", "0123456789\nAda Balaby: 1", " 0123456789 \n"].into_iter().all(right)
        );
        for wrong in
            ["", "\n0123456789", " 012345678", " 01234567890", " 0123456789.", " 9876543210"]
        {
            assert!(!right(wrong), "{wrong:?}");
        }
    }
}
