//! The haystack: held-out text, noise, or a repeated sentence.

use std::path::PathBuf;

use longwall_data::synthetic::haystack::{Haystack as Text, TEXTS_PER_LENGTH};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::NiahOptions;
use crate::EvalError;
use crate::suite::OpenContext;
use crate::text::{list_files, no_text, read_text, source_of};

/// Text may be repeated up to this many times in the longest prompt; more would be a test of `repeat`.
const MOST_REPEATS: usize = 8;

/// Kinds of haystacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum HaystackKind {
    /// Held-out text: --text, or the run's validation split
    #[default]
    Text,
    /// Sentences of made-up words
    Noise,
    /// One short text repeated
    Repeat,
}

impl HaystackKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            HaystackKind::Text => "text",
            HaystackKind::Noise => "noise",
            HaystackKind::Repeat => "repeat",
        }
    }
}

/// Text to hide needles in, and where it comes from.
pub(in crate::suites) struct Haystack {
    kind: HaystackKind,
    /// The text.
    pub text: Text,
    source: String,
    sha256: String,
    longest: usize,
}

impl Haystack {
    /// Reads or generates text for prompts of up to `longest` tokens.
    pub(super) fn open(
        options: &NiahOptions,
        context: &OpenContext<'_>,
        longest: usize,
    ) -> Result<Self, EvalError> {
        let (kind, tokenizer) = (options.haystack, context.tokenizer);
        let (source, text) = match kind {
            HaystackKind::Text => {
                let remedy =
                    "give more text with --text, shorter --lengths, or --haystack noise or repeat";
                return Haystack::read("niah", &options.text, context, longest, remedy);
            }
            HaystackKind::Noise => {
                let text = Text::noise(context.seed, longest, tokenizer);
                ("sentences of made-up words".to_string(), text)
            }
            HaystackKind::Repeat => ("a repeated text".to_string(), Text::repeated(tokenizer)),
        };
        Ok(Haystack::new(kind, source, text, longest))
    }

    /// Reads text for prompts of up to `longest` tokens: files, or the run's validation split if `text` is empty.
    ///
    /// # Errors
    /// Text that is missing, empty, or so short that a prompt would hold little but repetitions.
    pub(in crate::suites) fn of_text(
        suite: &'static str,
        text: &[PathBuf],
        context: &OpenContext<'_>,
        longest: usize,
    ) -> Result<Self, EvalError> {
        let remedy = "give more text with --text, or shorter --lengths";
        Haystack::read(suite, text, context, longest, remedy)
    }

    /// As [`Haystack::of_text`]; `remedy` says what to do if the text is too short.
    fn read(
        suite: &'static str,
        text: &[PathBuf],
        context: &OpenContext<'_>,
        longest: usize,
        remedy: &str,
    ) -> Result<Self, EvalError> {
        let wanted = longest * TEXTS_PER_LENGTH;
        let tokenizer = context.tokenizer;
        let (source, tokens) = if text.is_empty() {
            let held_out = context.held_out.ok_or_else(|| no_text(suite))?;
            let newline = tokenizer.encode("\n");
            let tokens = held_out
                .validation_tokens(wanted)?
                .split(|&token| token == tokenizer.end_of_text())
                .filter(|document| !document.is_empty())
                .collect::<Vec<_>>()
                .join(newline.as_slice());
            (held_out.describe(), tokens)
        } else {
            (source_of(&list_files(text)?), from_files(text, context, wanted)?)
        };
        check_text(suite, &tokens, &source, longest, remedy)?;
        if tokens.len() < longest {
            tracing::warn!(
                "the haystack has {} tokens, less than the longest length, {longest}: it is repeated",
                tokens.len()
            );
        }
        Ok(Haystack::new(HaystackKind::Text, source, Text::of(tokens), longest))
    }

    fn new(kind: HaystackKind, source: String, text: Text, longest: usize) -> Self {
        let bytes: Vec<u8> = text.tokens().iter().flat_map(|token| token.to_le_bytes()).collect();
        let sha256 = format!("{:x}", Sha256::digest(&bytes));
        Haystack { kind, text, source, sha256, longest }
    }

    /// Describes the haystack for the report; its hash ensures that a resumed evaluation has the same.
    pub(in crate::suites) fn describe(&self) -> Value {
        json!({
            "haystack": self.kind.name(),
            "haystack_source": self.source,
            "haystack_tokens": self.text.tokens().len(),
            "haystack_sha256": self.sha256,
            "haystack_repeats": self.text.tokens().len() < self.longest,
        })
    }
}

/// Rejects text that is empty, or so short that a prompt would hold little but repetitions.
fn check_text(
    suite: &str,
    tokens: &[u32],
    source: &str,
    longest: usize,
    remedy: &str,
) -> Result<(), EvalError> {
    let least = longest.div_ceil(MOST_REPEATS);
    if tokens.len() >= least {
        return Ok(());
    }
    let what = match tokens.len() {
        0 => format!("{suite}: the haystack is empty: there is no text in {source}"),
        count => format!(
            "{suite}: the haystack has {count} tokens ({source}); length {longest} needs {least}, or its \
             prompts repeat the text more than {MOST_REPEATS} times"
        ),
    };
    Err(EvalError::Text { what, remedy: remedy.to_string() })
}

/// Whole files in a seeded order, until there are enough tokens. Files of blanks alone are left out: the
/// newlines between files are no text.
fn from_files(
    text: &[PathBuf],
    context: &OpenContext<'_>,
    wanted: usize,
) -> Result<Vec<u32>, EvalError> {
    let mut files = list_files(text)?;
    files.shuffle(&mut ChaCha8Rng::seed_from_u64(context.seed));
    let newline = context.tokenizer.encode("\n");
    let mut tokens = Vec::new();
    for file in files {
        if tokens.len() >= wanted {
            break;
        }
        let text = read_text(&file)?;
        if !text.trim().is_empty() {
            tokens.extend(context.tokenizer.encode(&text));
            tokens.extend(&newline);
        }
    }
    Ok(tokens)
}
