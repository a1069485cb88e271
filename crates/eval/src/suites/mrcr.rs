//! Multi-round coreference resolution (MRCR): repeat the n-th of several texts that answered the same request.
//!
//! After MRCR v2 (Vodrahalli et al., "Michelangelo", 2024, and the code published since). A conversation has
//! rounds of a request (a format, a topic, a style) and a text; the same request comes two, four or eight times
//! among others that differ from it in one part or more. At the end the model is asked to write a random string
//! and then, word for word, the n-th text of that request. The score is how similar the output after the string is
//! to that text.
//!
//! The original's texts are written by a language model to the requests; these are passages of held-out text, and
//! have nothing to do with the requests. Only counting them tells which one is asked for, as in the original.

mod similarity;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use longwall_data::synthetic::held_out::Part;
use longwall_data::synthetic::mrcr::{CODE, Conversation, ORDINALS, PASSAGE};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::similarity::ratio;
use super::counted::{self, Cells, Plot};
use super::fit::{check_floor, too_short};
use super::niah::Haystack;
use crate::EvalError;
use crate::options::{MOST_SAMPLES, check_count, check_lengths, parse_size, sample_rng, sizes};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};

/// Options of `longwall eval mrcr`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct MrcrOptions {
    /// Lengths of prompt plus generation, in tokens of the model's tokenizer
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size,
          default_values_t = MrcrOptions::default().lengths)]
    #[serde(deserialize_with = "sizes")]
    pub lengths: Vec<usize>,
    /// How often the request comes: 2 to 8
    #[arg(long, value_delimiter = ',', value_name = "COUNT",
          default_values_t = MrcrOptions::default().needles)]
    pub needles: Vec<usize>,
    /// Samples at each length and number of needles
    #[arg(long, default_value_t = MrcrOptions::default().trials)]
    pub trials: usize,
    /// Text files or folders for the passages [default: the run's validation split]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// The most tokens generated for an answer
    #[arg(long, default_value_t = MrcrOptions::default().max_tokens)]
    pub max_tokens: usize,
}

impl Default for MrcrOptions {
    fn default() -> Self {
        MrcrOptions {
            lengths: vec![4000, 8000, 16_000, 32_000],
            needles: vec![2, 4, 8],
            trials: 100,
            text: Vec::new(),
            max_tokens: 128,
        }
    }
}

/// Passages of other requests that the noise floor of all texts is estimated from.
const FLOOR_SAMPLES: usize = 8;

/// The score of one sample, and those of answers without reading.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Similarity {
    /// Similarity of the output to the text, 0 to 1; 0 without the random string.
    pub score: f64,
    /// Mean similarity of the texts of the same request: those who do not count get this.
    pub floor_relevant: f64,
    /// Mean similarity of some of all texts.
    pub floor_any: f64,
}

/// Similarities of a sample's outputs, in the order of the metrics.
type Metric = (&'static str, fn(&Similarity) -> f64);
const METRICS: [Metric; 3] = [
    ("similarity", |verdict| verdict.score),
    ("floor_relevant", |verdict| verdict.floor_relevant),
    ("floor_any", |verdict| verdict.floor_any),
];

/// The suite.
pub struct Mrcr {
    options: MrcrOptions,
    cells: Cells,
    haystack: Haystack,
    tokenizer: Tokenizer,
    seed: u64,
    train_seq_len: usize,
}

impl Suite for Mrcr {
    type Options = MrcrOptions;
    type Verdict = Similarity;

    const NAME: &'static str = "mrcr";
    const VERSION: u32 = 2;
    const STREAMS: Range<u64> = 70..71;
    const GENERATES: bool = true;
    const READS_TEXT: bool = true;

    fn validate(options: &MrcrOptions, problems: &mut Problems) {
        check_lengths(Self::NAME, &options.lengths, problems);
        let key = "mrcr.needles";
        let remedy = "the original has --needles 2,4,8";
        problems.check(!options.needles.is_empty(), key, "empty", "at least one number", remedy);
        for (at, &needles) in options.needles.iter().enumerate() {
            check_count(key, needles, 2..=ORDINALS.len(), remedy, problems);
            let twice = options.needles[..at].contains(&needles);
            problems.check(!twice, key, format!("{needles} twice"), "each once", "remove one");
        }
        let (trials, remedy) = (options.trials, "a usual number is --trials 100");
        check_count("mrcr.trials", trials, 1..=MOST_SAMPLES, remedy, problems);
        let least = CODE + PASSAGE.end() + 4;
        let remedy = "the default, 128, is enough for the code and the longest passage";
        check_count("mrcr.max_tokens", options.max_tokens, least..=4096, remedy, problems);
    }

    fn open(options: &MrcrOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let OpenContext { tokenizer, seed, train_seq_len, .. } = *context;
        let longest = options.lengths.iter().copied().max().unwrap_or_default();
        let suite = Mrcr {
            cells: Cells::grid(&options.lengths, options.needles.len(), options.trials),
            haystack: Haystack::of_text(Self::NAME, &options.text, context, longest)?,
            tokenizer: tokenizer.clone(),
            options: options.clone(),
            seed,
            train_seq_len,
        };
        let most = options.needles.iter().copied().max().unwrap_or_default();
        let prompt = Conversation::longest(most, tokenizer);
        check_floor(Self::NAME, &options.lengths, prompt, options.max_tokens, tokenizer)?;
        Ok(suite)
    }

    fn resolved(&self) -> Value {
        self.haystack.describe()
    }

    fn trials(&self) -> Vec<Trial> {
        self.cells.trials()
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let budget = trial.length - self.options.max_tokens;
        let conversation = self.conversation(trial, budget);
        let prompt = conversation
            .fit(budget, tokenizer)
            .map_err(|needed| too_short(Self::NAME, trial, needed, budget, tokenizer))?;
        Ok(Request {
            call: ModelCall::Generate {
                prompt: tokenizer.encode(&prompt),
                max_tokens: self.options.max_tokens,
            },
            prompt,
            expected: Some(format!("{} {}", conversation.code, conversation.answer())),
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Similarity {
        let budget = trial.length - self.options.max_tokens;
        match answer {
            Answer::Text(output) => judge(&self.conversation(trial, budget), output),
            other => unreachable!("a generation was answered by {other:?}"),
        }
    }

    fn score(&self, outcomes: &[Outcome<Similarity>]) -> Scoring {
        let (mut scores, mut headline) = (Vec::new(), BTreeMap::new());
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            for (group, needles) in self.options.needles.iter().enumerate() {
                let of = outcomes.iter().filter(|o| self.cells.locate(&o.trial).0 == group);
                let of: Vec<_> = of.collect();
                for (name, value) in METRICS {
                    let values = of.iter().map(|o| (o.trial.id, value(&o.verdict)));
                    let (metric, estimate) =
                        (format!("{name}_{needles}"), Estimate::clustered(values));
                    headline.insert(format!("{metric}@{length}"), estimate);
                    scores.push(Score { metric, length: Some(length), depth: None, estimate });
                }
            }
        }
        let notes = vec![
            "floor_relevant is the similarity of an answer with any of the texts of the request, \
             floor_any with any text: compare similarity with them"
                .to_string(),
        ];
        Scoring { headline, scores, notes, ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let label = |needles: &usize| {
            let similarity = (format!("similarity_{needles}"), format!("{needles} needles"));
            [similarity, (format!("floor_relevant_{needles}"), format!("noise floor of {needles}"))]
        };
        let metrics: Vec<(String, String)> = self.options.needles.iter().flat_map(label).collect();
        let plot = Plot {
            task: "Coreference (MRCR)",
            title,
            y_label: "similarity",
            bars: "bars: one standard error",
        };
        counted::draw(scoring, &metrics, &plot, self.train_seq_len, dir)
    }
}

impl Mrcr {
    fn conversation(&self, trial: &Trial, budget: usize) -> Conversation {
        let (group, place) = self.cells.locate(trial);
        let needles = self.options.needles[group];
        // The number of needles takes the place of the depth, so that no two groups share their draws.
        let place = Trial { depth: Some(needles as f64), ..place };
        let mut rng = sample_rng(self.seed, Self::STREAMS.start, &place);
        let text = &self.haystack.text;
        Conversation::draw(&mut rng, needles, budget, text, &self.tokenizer, Part::Test)
    }
}

/// The similarity of an output, and the noise floors.
fn judge(conversation: &Conversation, output: &str) -> Similarity {
    let similar = |text: &str| ratio(conversation.answer(), text);
    let mean =
        |texts: Vec<&str>| texts.iter().map(|text| similar(text)).sum::<f64>() / texts.len() as f64;
    let all = conversation.others.iter().take(FLOOR_SAMPLES).map(|(_, text)| text.as_str());
    Similarity {
        score: similar_after(&conversation.code, output, conversation.answer()),
        floor_relevant: mean(conversation.needles.iter().map(String::as_str).collect()),
        floor_any: mean(all.collect()),
    }
}

/// The similarity to `answer` of what follows the last occurrence of `code`; 0 without it. A model that goes on
/// writes the next round, which is no part of its answer.
fn similar_after(code: &str, output: &str, answer: &str) -> f64 {
    let output = output.split("\nUser:").next().unwrap_or_default();
    match output.rsplit_once(code) {
        Some((_, text)) => ratio(answer, text.trim()),
        None => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_similarity_is_that_of_the_text_after_the_code() {
        let similar = |output| similar_after("abcdefghijkl", output, "the old mill");
        assert_eq!(similar(" abcdefghijkl the old mill"), 1.0);
        assert_eq!(similar("abcdefghijkl no abcdefghijkl the old mill \n"), 1.0);
        assert_eq!(similar("abcdefghijkl the old mill\n\nUser: Write abcdefghijkl and"), 1.0);
        assert_eq!(similar("the old mill"), 0.0);
        assert_eq!(similar(""), 0.0);
        let cut = similar("abcdefghijkl the old");
        assert!((cut - 14.0 / 19.0).abs() < 1e-12, "{cut}");
    }
}
