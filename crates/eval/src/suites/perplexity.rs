//! Perplexity of text, per word, per byte and per token, with a strided window.
//!
//! A document is read after an end-of-text token, so that its first token has a probability too. A window
//! of length L reads at most L tokens; the windows of a document start `stride` tokens apart, and each
//! scores the tokens that no earlier window scored. With −Σ ln p over all tokens of all documents,
//!
//! - word perplexity is exp(−Σ ln p / words), where words are separated by white space;
//! - byte perplexity is exp(−Σ ln p / bytes) of the UTF-8 text;
//! - bits per byte are −Σ ln p / (bytes · ln 2).
//!
//! These are the definitions of lm-evaluation-harness. Word and byte perplexity do not depend on the
//! tokenizer; token perplexity does. Standard errors are over documents.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use longwall_config::Problems;
use longwall_data::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::retrieval::{boundary_x, length_scale};
use crate::EvalError;
use crate::options::{check_lengths, optional_size, optional_sizes, parse_size};
use crate::plot::{LineChart, Point, Scale, Series};
use crate::report::Score;
use crate::stats::Estimate;
use crate::suite::{Answer, ModelCall, OpenContext, Outcome, Request, Scoring, Suite, Trial};
use crate::text::{Document, list_files, no_text, read_document, source_of};

/// Tokens of the validation split that are scored unless the options say otherwise.
const VALIDATION_TOKENS: usize = 262_144;

/// Options of `longwall eval perplexity`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, default)]
pub struct PerplexityOptions {
    /// Lengths of the window, in tokens of the model's tokenizer [default: the training length]
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_sizes", skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<usize>>,
    /// Tokens from one window's start to the next; a token after a window's first has at least length −
    /// stride tokens of context [default: half of each length]
    #[arg(long, value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_size", skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Text files or folders, one file is one document [default: the run's validation split]
    #[arg(long, num_args = 1.., value_name = "PATH")]
    pub text: Vec<PathBuf>,
    /// Most tokens to score at each length [default: all of --text, 262,144 of the validation split]
    #[arg(long, value_name = "TOKENS", value_parser = parse_size)]
    #[serde(deserialize_with = "optional_size", skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// The score of one window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// Σ ln p of the tokens it scores, in nats; none if it is infinite or not a number.
    pub log_p: Option<f64>,
    /// How many tokens it scores.
    pub tokens: usize,
}

/// Part of a document: reads `tokens[start..start + read]` of it, and scores the last `scored` of the
/// tokens that follow each.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Window {
    document: usize,
    start: usize,
    read: usize,
    scored: usize,
}

/// The windows of a document with `count` tokens besides the end of text before it.
fn windows(document: usize, count: usize, length: usize, stride: usize) -> Vec<Window> {
    let (mut windows, mut done, mut start) = (Vec::new(), 0, 0);
    while done < count {
        let end = (start + length).min(count);
        windows.push(Window { document, start, read: end - start, scored: end - done });
        done = end;
        start += stride;
    }
    windows
}

/// The suite.
pub struct Perplexity {
    lengths: Vec<usize>,
    stride: Option<usize>,
    /// Each begins with an end of text.
    documents: Vec<Document>,
    /// Bytes and words of each document.
    sizes: Vec<(usize, usize)>,
    /// The windows of each length.
    windows: Vec<Vec<Window>>,
    source: String,
    train_seq_len: usize,
}

impl Suite for Perplexity {
    type Options = PerplexityOptions;
    type Verdict = Scored;

    const NAME: &'static str = "perplexity";
    const VERSION: u32 = 1;
    /// Empty: it draws nothing.
    const STREAMS: Range<u64> = 0..0;
    const GENERATES: bool = false;
    const READS_TEXT: bool = true;

    fn validate(options: &PerplexityOptions, problems: &mut Problems) {
        if let Some(lengths) = &options.lengths {
            check_lengths(Self::NAME, lengths, problems);
        }
        let least = options.lengths.iter().flatten().copied().min().unwrap_or(usize::MAX);
        if let Some(stride) = options.stride {
            problems.check(
                (1..=least).contains(&stride),
                "perplexity.stride",
                stride,
                match least {
                    usize::MAX => "1 or more, up to the training length".to_string(),
                    least => format!("1 to the shortest length, {least}"),
                },
                "leave it out for half of each length",
            );
        }
        problems.check(
            options.limit != Some(0),
            "perplexity.limit",
            0,
            "1 or more tokens",
            "leave it out to score all text",
        );
    }

    fn open(options: &PerplexityOptions, context: &OpenContext<'_>) -> Result<Self, EvalError> {
        let (source, documents) = read(options, context)?;
        let mut lengths = options.lengths.clone().unwrap_or(vec![context.train_seq_len]);
        lengths.sort_unstable();
        if options.stride.is_some_and(|stride| stride > lengths[0]) {
            let mut problems = Problems::new();
            problems.check(
                false,
                "perplexity.stride",
                options.stride.unwrap_or_default(),
                format!("1 to the training length, {}", lengths[0]),
                "leave it out for half of each length",
            );
            problems.into_result()?;
        }
        let sizes = documents.iter().map(|document| {
            let bytes = context.tokenizer.decode_bytes(&document.tokens[1..]);
            (bytes.len(), String::from_utf8_lossy(&bytes).split_whitespace().count())
        });
        let windows = lengths.iter().map(|&length| {
            let stride = options.stride.unwrap_or(length.div_ceil(2));
            let of = |(at, document): (usize, &Document)| {
                windows(at, document.tokens.len() - 1, length, stride)
            };
            documents.iter().enumerate().flat_map(of).collect()
        });
        Ok(Perplexity {
            sizes: sizes.collect(),
            windows: windows.collect(),
            stride: options.stride,
            train_seq_len: context.train_seq_len,
            lengths,
            documents,
            source,
        })
    }

    fn resolved(&self) -> Value {
        let mut hash = Sha256::new();
        for document in &self.documents {
            let bytes = document.tokens.iter().flat_map(|token| token.to_le_bytes());
            hash.update(bytes.collect::<Vec<u8>>());
        }
        let strides = self.lengths.iter().map(|l| self.stride.unwrap_or(l.div_ceil(2)));
        json!({
            "lengths": self.lengths,
            "strides": strides.collect::<Vec<_>>(),
            "text": self.source,
            "documents": self.documents.len(),
            "tokens": self.documents.iter().map(|d| d.tokens.len() - 1).sum::<usize>(),
            "bytes": self.sizes.iter().map(|(bytes, _)| bytes).sum::<usize>(),
            "words": self.sizes.iter().map(|(_, words)| words).sum::<usize>(),
            "text_sha256": format!("{:x}", hash.finalize()),
        })
    }

    fn trials(&self) -> Vec<Trial> {
        let mut list = Vec::new();
        for (&length, windows) in self.lengths.iter().zip(&self.windows) {
            for index in 0..windows.len() {
                list.push(Trial { id: list.len() as u64, length, depth: None, index });
            }
        }
        list
    }

    fn request(&self, trial: &Trial, tokenizer: &Tokenizer) -> Result<Request, EvalError> {
        let Window { document, start, read, .. } = self.window(trial);
        let tokens = self.documents[document].tokens[start..=start + read].to_vec();
        Ok(Request {
            prompt: tokenizer.decode(&tokens),
            call: ModelCall::RollingLogLikelihood { tokens },
            expected: None,
            depth: None,
        })
    }

    fn judge(&self, trial: &Trial, _request: &Request, answer: &Answer) -> Scored {
        let Answer::TokenLogProbs(values) = answer else {
            unreachable!("a rolling log-likelihood was answered by {answer:?}");
        };
        let Window { read, scored, .. } = self.window(trial);
        let sum: f64 = values[read - scored..].iter().map(|&value| f64::from(value)).sum();
        Scored { log_p: Some(sum).filter(|sum| sum.is_finite()), tokens: scored }
    }

    fn score(&self, outcomes: &[Outcome<Scored>]) -> Scoring {
        let (mut scores, mut headline) = (Vec::new(), BTreeMap::new());
        for outcomes in outcomes.chunk_by(|a, b| a.trial.length == b.trial.length) {
            let length = outcomes[0].trial.length;
            for (metric, estimate) in self.estimates(outcomes) {
                headline.insert(format!("{metric}@{length}"), estimate);
                let metric = metric.to_string();
                scores.push(Score { metric, length: Some(length), depth: None, estimate });
            }
        }
        let undefined = headline.values().any(|estimate: &Estimate| estimate.value.is_none());
        let notes = undefined
            .then(|| "a token with a probability of 0 or none leaves no perplexity".to_string());
        Scoring { headline, scores, notes: notes.into_iter().collect(), ..Scoring::default() }
    }

    fn draw(&self, scoring: &Scoring, title: &str, dir: &Path) -> Result<(), EvalError> {
        let bits = scoring.scores.iter().filter(|score| score.metric == "bits_per_byte");
        let points = bits.filter_map(|score| {
            let Estimate { value, .. } = score.estimate;
            Some(Point { x: score.length? as f64, y: value?, bar: score.estimate.bar() })
        });
        let points: Vec<Point> = points.collect();
        if points.is_empty() {
            return Ok(());
        }
        let chart = LineChart {
            title: format!("Bits per byte: {title}"),
            x_label: "window (tokens)".to_string(),
            y_label: "bits per byte".to_string(),
            x_scale: length_scale(&self.lengths),
            y_scale: Scale::Linear,
            y_range: None,
            note: None,
            series: vec![Series {
                name: String::new(),
                points,
                colour: 0,
                faint: false,
                dots: true,
                band: false,
            }],
            boundary: boundary_x(&self.lengths, self.train_seq_len),
        };
        chart.save(&dir.join("bits_per_byte.svg"))
    }
}

impl Perplexity {
    fn window(&self, trial: &Trial) -> Window {
        let at = self.lengths.iter().position(|&length| length == trial.length);
        self.windows[at.expect("a trial has one of the lengths")][trial.index]
    }

    /// The metrics at one length.
    fn estimates(&self, outcomes: &[Outcome<Scored>]) -> [(&'static str, Estimate); 4] {
        let mut nats = vec![0.0; self.documents.len()];
        for outcome in outcomes {
            let document = self.window(&outcome.trial).document;
            nats[document] -= outcome.verdict.log_p.unwrap_or(f64::NAN);
        }
        let per = |unit: &dyn Fn(usize) -> usize| {
            let pairs: Vec<(f64, f64)> =
                nats.iter().enumerate().map(|(at, &nats)| (nats, unit(at) as f64)).collect();
            Estimate::ratio(&pairs)
        };
        let per_byte = per(&|at| self.sizes[at].0);
        [
            ("bits_per_byte", per_byte.scaled(1.0 / 2f64.ln())),
            ("byte_perplexity", per_byte.exp()),
            ("word_perplexity", per(&|at| self.sizes[at].1).exp()),
            ("token_perplexity", per(&|at| self.documents[at].tokens.len() - 1).exp()),
        ]
    }
}

/// The text's name and its documents, each after an end of text, up to the limit.
fn read(
    options: &PerplexityOptions,
    context: &OpenContext<'_>,
) -> Result<(String, Vec<Document>), EvalError> {
    let end = context.tokenizer.end_of_text();
    let (source, documents, limit) = if options.text.is_empty() {
        let held_out = context.held_out.ok_or_else(|| no_text(Perplexity::NAME))?;
        let limit = options.limit.unwrap_or(VALIDATION_TOKENS);
        let tokens = held_out.validation_tokens(limit)?;
        let document =
            |tokens: &[u32]| Document { name: held_out.describe(), tokens: tokens.to_vec() };
        let documents = tokens.split(|&token| token == end).map(document).collect();
        (held_out.describe(), documents, limit)
    } else {
        let files = list_files(&options.text)?;
        let limit = options.limit.unwrap_or(usize::MAX);
        let (mut documents, mut tokens) = (Vec::new(), 0);
        for file in &files {
            if tokens >= limit {
                break;
            }
            let document = read_document(file, context.tokenizer)?;
            tokens += document.tokens.len();
            documents.push(document);
        }
        (source_of(&files), documents, limit)
    };
    let mut left = limit;
    let mut kept = Vec::new();
    for Document { name, mut tokens } in documents {
        tokens.truncate(left);
        left -= tokens.len();
        if !tokens.is_empty() {
            tokens.insert(0, end);
            kept.push(Document { name, tokens });
        }
    }
    if kept.is_empty() {
        return Err(EvalError::Text {
            what: format!("perplexity: there is no text in {source}"),
            remedy: "give files that hold text: --text FILES".to_string(),
        });
    }
    Ok((source, kept))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_score_every_token_once_with_the_context_that_the_stride_leaves() {
        for (count, length, stride) in
            [(1, 8, 4), (8, 8, 4), (9, 8, 4), (30, 8, 3), (30, 8, 8), (30, 1, 1)]
        {
            let mut next = 0;
            for window in windows(0, count, length, stride) {
                let end = window.start + window.read;
                assert!(window.read <= length && window.scored > 0);
                assert_eq!(end - window.scored, next, "{count}, {length}, {stride}");
                let context = window.read - window.scored;
                assert!(window.start == 0 || context >= length - stride);
                next = end;
            }
            assert_eq!(next, count);
        }
    }
}
