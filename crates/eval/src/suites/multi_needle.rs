//! Retrieval of several needles: two or four numbers far apart in repeated text, asked for together.
//!
//! After the TRA/TDA paper, section 6.4. The prompts come from [`longwall_data::synthetic::multi_needle`], from which
//! training can draw too: other numbers are asked for there.

use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::multi_needle::Needles;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cells, Counted, Plot};
use super::fit::{check_floor, too_short};
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_answer, check_count, check_lengths, parse_size, sample_rng, sizes,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval multi-needle`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct MultiNeedleOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = MultiNeedleOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// Numbers of needles in a prompt
    #[arg(long, value_delimiter = ',', value_name = "COUNT",
          default_values_t = MultiNeedleOptions::default().needles)]
    pub needles: Vec<usize>,
    /// Trials at each length and number of needles
    #[arg(long, default_value_t = MultiNeedleOptions::default().trials)]
    pub trials: usize,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = MultiNeedleOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for MultiNeedleOptions {
    fn default() -> Self {
        MultiNeedleOptions {
            lengths: vec![500, 1000, 2000, 4000],
            needles: vec![2, 4],
            trials: 100,
            max_tokens: 64,
        }
    }
}

/// The suite.
pub struct MultiNeedle {
    options: MultiNeedleOptions,
    cells: Cells,
    names: Vec<String>,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for MultiNeedle {
    type Options = MultiNeedleOptions;
    type Verdict = Counted;

    const NAME: &'static str = "multi-needle";
    const VERSION: u32 = 2;
    const STREAMS: Range<u64> = 20..21;
    const GENERATES: bool = true;

    fn validate(options: &MultiNeedleOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let key = "multi-needle.needles";
        problems.check(
            !options.needles.is_empty(),
            key,
            "empty",
            "at least one number",
            "the paper has --needles 2,4",
        );
        for (at, &needles) in options.needles.iter().enumerate() {
            check_count(key, needles, 2..=16, "the paper has --needles 2,4", problems);
            let twice = options.needles[..at].contains(&needles);
            let allowed = "every number once";
            problems.check(!twice, key, format!("{needles} twice"), allowed, "remove one");
        }
        let remedy = "a usual number is --trials 100";
        let trials = options.trials;
        check_count("multi-needle.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let remedy = "the default, 64, is enough for four numbers";
        let key = "multi-needle.max_tokens";
        check_count(key, options.max_tokens, 1..=4096, remedy, problems);
    }

    fn open(options: &MultiNeedleOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let most = options.needles.iter().copied().max().unwrap_or_default();
        let answer =
            format!("{}, and 7654321.", " 1234567,".repeat(most - 1).trim_end_matches(','));
        check_answer(Self::NAME, options.max_tokens, &answer, tokenizer)?;
        let shortest = Needles::longest(tokenizer, most);
        check_floor(Self::NAME, &options.lengths, shortest, options.max_tokens, tokenizer)?;
        Ok(MultiNeedle {
            cells: Cells::grid(&options.lengths, options.needles.len(), options.trials),
            names: options.needles.iter().map(|count| format!("{count}_needles")).collect(),
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

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let needles = self.needles(trial);
        let budget = trial.length - self.options.max_tokens;
        let prompt = needles
            .fit(budget, tokenizer)
            .map_err(|needed| too_short(Self::NAME, trial, needed, budget, tokenizer))?;
        Ok(Request {
            call: ModelCall::Generate {
                prompt: tokenizer.encode(&prompt),
                max_tokens: self.options.max_tokens,
            },
            expected: Some(needles.answers().join(", ")),
            depth: None,
            prompt,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Counted {
        match answer {
            Answer::Text(output) => Counted::contained(output, &self.needles(trial).answers()),
            other => unreachable!("a generation was answered by {other:?}"),
        }
    }

    fn sample_score(verdict: &Counted) -> Option<f64> {
        Some(verdict.share())
    }

    fn score(&self, outcomes: &[Outcome<Counted>]) -> Scoring {
        counted::score(outcomes, &self.cells, &self.names)
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let metrics = counted::metrics(&self.names, |name| name.replace('_', " "));
        counted::draw(
            scoring,
            &metrics,
            &Plot::accuracy("Several needles", title),
            self.train_seq_len,
            dir,
        )
    }
}

impl MultiNeedle {
    fn needles(&self, trial: &Trial) -> Needles {
        let (group, place) = self.cells.locate(trial);
        let count = self.options.needles[group];
        // The number of needles takes the place of the depth, so that no two groups share their draws.
        let place = Trial { depth: Some(count as f64), ..place };
        Needles::draw(&mut sample_rng(self.seed, Self::STREAMS.start, &place), count, Part::Test)
    }
}
