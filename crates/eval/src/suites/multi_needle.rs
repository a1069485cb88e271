//! Retrieval of several needles: two or four numbers far apart in repeated text, asked for together.
//!
//! After the TRA/TDA paper, section 6.4, which gives lengths and numbers of needles but no texts: the needles
//! and the question are RULER's (Hsieh et al., 2024), the garbage that of the passkey task. The text is
//! divided into as many equal parts as there are needles; each needle stands in the middle half of its part,
//! so that two are never closer than half a part.

use std::ops::Range;
use std::path::Path;

use longwall_config::Problems;
use longwall_data::Tokenizer;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::counted::{self, Cells, Counted, Plot};
use super::fit::{check_floor, greatest};
use super::niah::{all_keys, distinct_keys};
use crate::EvalError;
use crate::options::{
    MOST_SAMPLES, check_answer, check_count, check_lengths, parse_size, sample_rng, sizes,
};
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

const INSTRUCTION: &str = "Some special magic numbers are hidden within the following text. \
    Make sure to memorize it. I will quiz you about the numbers afterwards.";
const SENTENCES: [&str; 5] = [
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
];

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

/// The needles and the question of a trial.
struct Needles {
    /// Keys and numbers, in the order of the text.
    pairs: Vec<(String, String)>,
    /// Indices of the pairs in the order of the question.
    asked: Vec<usize>,
    /// Each needle's place in its part, 0.25 to 0.75.
    places: Vec<f64>,
}

impl Needles {
    fn draw(rng: &mut rand_chacha::ChaCha8Rng, count: usize) -> Self {
        let keys = distinct_keys(rng, count);
        let number = |key| (key, rng.random_range(1_000_000..=9_999_999u32).to_string());
        let pairs = keys.into_iter().map(number).collect();
        let places = (0..count).map(|_| rng.random_range(0.25..0.75)).collect();
        let mut asked: Vec<usize> = (0..count).collect();
        asked.shuffle(rng);
        Needles { pairs, asked, places }
    }

    /// The most tokens of a prompt without garbage.
    fn longest(tokenizer: &Tokenizer, count: usize) -> usize {
        let tokens = |text: &str| tokenizer.encode(text).len();
        let mut keys = all_keys();
        keys.sort_by_key(|key| std::cmp::Reverse(tokens(key)));
        let number = "9876543".to_string();
        let spare = 7usize.saturating_sub(tokens(&number));
        let pairs = keys.into_iter().take(count).map(|key| (key, number.clone())).collect();
        let needles = Needles { pairs, asked: (0..count).collect(), places: vec![0.5; count] };
        // A number takes at most seven tokens.
        tokens(&needles.prompt(0)) + spare * count
    }

    /// The numbers, in the order of the question.
    fn answers(&self) -> Vec<String> {
        self.asked.iter().map(|&at| self.pairs[at].1.clone()).collect()
    }

    /// The prompt with this many sentences of garbage.
    fn prompt(&self, sentences: usize) -> String {
        let garbage = |from: usize, to: usize| {
            let texts: Vec<&str> = (from..to).map(|at| SENTENCES[at % SENTENCES.len()]).collect();
            texts.join(" ")
        };
        let (mut blocks, mut done) = (vec![INSTRUCTION.to_string()], 0);
        for (part, ((key, number), place)) in self.pairs.iter().zip(&self.places).enumerate() {
            let share = (part as f64 + place) / self.pairs.len() as f64;
            let at = (share * sentences as f64).round() as usize;
            blocks.push(garbage(done, at));
            blocks.push(format!("One of the special magic numbers for {key} is: {number}."));
            done = at;
        }
        blocks.push(garbage(done, sentences));
        blocks.push(self.question());
        blocks.retain(|block| !block.is_empty());
        blocks.join("\n")
    }

    fn question(&self) -> String {
        let keys: Vec<&str> = self.asked.iter().map(|&at| self.pairs[at].0.as_str()).collect();
        let keys = match keys.split_last() {
            Some((last, rest)) if !rest.is_empty() => format!("{}, and {last}", rest.join(", ")),
            _ => keys.concat(),
        };
        format!(
            "What are all the special magic numbers for {keys} mentioned in the provided text? \
             The special magic numbers for {keys} mentioned in the provided text are"
        )
    }
}

/// The suite.
pub struct MultiNeedle {
    options: MultiNeedleOptions,
    cells: Cells,
    names: Vec<String>,
    /// Tokens of a sentence of garbage, on average.
    sentence_tokens: f64,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for MultiNeedle {
    type Options = MultiNeedleOptions;
    type Verdict = Counted;

    const NAME: &'static str = "multi-needle";
    const VERSION: u32 = 1;
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
        let tokens = |text: &str| tokenizer.encode(text).len();
        let shortest = Needles::longest(tokenizer, most);
        check_floor(Self::NAME, &options.lengths, shortest, options.max_tokens, tokenizer)?;
        Ok(MultiNeedle {
            cells: Cells::grid(&options.lengths, options.needles.len(), options.trials),
            names: options.needles.iter().map(|count| format!("{count}_needles")).collect(),
            sentence_tokens: tokens(&SENTENCES.join(" ").repeat(20)) as f64 / 100.0,
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
        let tokens = |sentences| tokenizer.encode(&needles.prompt(sentences)).len();
        let guess = budget.saturating_sub(tokens(0)) as f64 / self.sentence_tokens;
        let sentences = greatest(0, budget, guess as usize, |count| tokens(count) <= budget);
        let prompt = needles.prompt(sentences);
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
        Needles::draw(&mut sample_rng(self.seed, Self::STREAMS.start, &place), count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_of_a_prompt() {
        let pair = |key: &str, number: &str| (key.to_string(), number.to_string());
        let needles = Needles {
            pairs: vec![pair("quiet-harbour", "1234567"), pair("brave-island", "7654321")],
            asked: vec![1, 0],
            places: vec![0.5, 0.5],
        };
        assert_eq!(
            needles.prompt(8),
            "Some special magic numbers are hidden within the following text. Make sure to memorize it. \
             I will quiz you about the numbers afterwards.\n\
             The grass is green. The sky is blue.\n\
             One of the special magic numbers for quiet-harbour is: 1234567.\n\
             The sun is yellow. Here we go. There and back again. The grass is green.\n\
             One of the special magic numbers for brave-island is: 7654321.\n\
             The sky is blue. The sun is yellow.\n\
             What are all the special magic numbers for brave-island, and quiet-harbour mentioned in the \
             provided text? The special magic numbers for brave-island, and quiet-harbour mentioned in the \
             provided text are"
        );
        assert_eq!(needles.answers(), ["7654321", "1234567"]);
    }
}
