//! The haystack: held-out text, noise, or a repeated sentence.

use std::path::PathBuf;

use longwall_data::Tokenizer;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::NiahOptions;
use crate::EvalError;
use crate::suite::OpenContext;
use crate::text::{list_files, no_text, read_text, source_of};

const SENTENCE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n";

/// The suite reads as much text as this many prompts of the longest length, so that trials differ.
const TEXTS_PER_LENGTH: usize = 16;
/// Text may be repeated up to this many times in the longest prompt; more would be a test of `repeat`.
const MOST_REPEATS: usize = 8;
/// The needle moves back by fewer than this many tokens, to follow a complete sentence.
const LOOK_BACK: usize = 200;

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

/// Tokens to hide needles in; reading wraps around at the end.
pub(in crate::suites) struct Haystack {
    kind: HaystackKind,
    tokens: Vec<u32>,
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
        let (source, tokens) = match kind {
            HaystackKind::Text => {
                return Haystack::of_text("niah", &options.text, context, longest);
            }
            HaystackKind::Noise => {
                let tokens = noise(context.seed, longest * TEXTS_PER_LENGTH, tokenizer);
                ("sentences of made-up words".to_string(), tokens)
            }
            HaystackKind::Repeat => ("a repeated text".to_string(), tokenizer.encode(SENTENCE)),
        };
        Ok(Haystack::new(kind, source, tokens, longest))
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
        check_text(suite, &tokens, &source, longest)?;
        if tokens.len() < longest {
            tracing::warn!(
                "the haystack has {} tokens, less than the longest length, {longest}: it is repeated",
                tokens.len()
            );
        }
        Ok(Haystack::new(HaystackKind::Text, source, tokens, longest))
    }

    fn new(kind: HaystackKind, source: String, tokens: Vec<u32>, longest: usize) -> Self {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let sha256 = format!("{:x}", Sha256::digest(&bytes));
        Haystack { kind, tokens, source, sha256, longest }
    }

    /// Describes the haystack for the report; its hash ensures that a resumed evaluation has the same.
    pub(in crate::suites) fn describe(&self) -> Value {
        json!({
            "haystack": self.kind.name(),
            "haystack_source": self.source,
            "haystack_tokens": self.tokens.len(),
            "haystack_sha256": self.sha256,
            "haystack_repeats": self.tokens.len() < self.longest,
        })
    }

    /// `count` tokens, starting at a random place; the repeated text always starts at its beginning.
    pub(in crate::suites) fn take(&self, rng: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
        let start = match self.kind {
            HaystackKind::Repeat => 0,
            _ => rng.random_range(0..self.tokens.len()),
        };
        self.tokens.iter().cycle().skip(start).take(count).copied().collect()
    }

    /// The index in `hay` for a needle at this depth: after the last sentence that ends within
    /// [`LOOK_BACK`] tokens before the depth, else at the depth itself.
    pub(in crate::suites) fn place(&self, hay: &[u32], depth: f64, tokenizer: &Tokenizer) -> usize {
        let at = ((depth.clamp(0.0, 1.0) * hay.len() as f64).round() as usize).min(hay.len());
        if at == hay.len() {
            return at;
        }
        let ends = |token: u32| {
            matches!(tokenizer.decode_bytes(&[token]).last(), Some(b'.' | b'!' | b'?' | b'\n'))
        };
        (at.saturating_sub(LOOK_BACK) + 1..=at)
            .rev()
            .find(|&place| ends(hay[place - 1]))
            .unwrap_or(at)
    }
}

/// Rejects text that is empty, or so short that a prompt would hold little but repetitions.
fn check_text(suite: &str, tokens: &[u32], source: &str, longest: usize) -> Result<(), EvalError> {
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
    let remedy = match suite {
        "niah" => "give more text with --text, shorter --lengths, or --haystack noise or repeat",
        _ => "give more text with --text, or shorter --lengths",
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

/// Sentences of 6 to 14 made-up words of 2 to 4 syllables, at least `wanted` tokens.
fn noise(seed: u64, wanted: usize, tokenizer: &Tokenizer) -> Vec<u32> {
    const ONSETS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut tokens = Vec::new();
    while tokens.len() < wanted.max(1) {
        let mut text = String::new();
        for word in 0..rng.random_range(6..=14) {
            if word > 0 {
                text.push(' ');
            }
            for _ in 0..rng.random_range(2..=4) {
                text.push(char::from(ONSETS[rng.random_range(0..ONSETS.len())]));
                text.push(char::from(VOWELS[rng.random_range(0..VOWELS.len())]));
            }
        }
        text.push_str(".\n");
        tokens.extend(tokenizer.encode(&text));
    }
    tokens
}

#[cfg(test)]
mod tests {
    use longwall_data::TokenizerConfig;

    use super::*;

    fn haystack(kind: HaystackKind) -> (Haystack, Tokenizer) {
        let tokenizer = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
        let context = OpenContext {
            tokenizer: &tokenizer,
            train_seq_len: 64,
            max_len: None,
            device: "cpu",
            seed: 0,
            held_out: None,
            metrics: &[],
        };
        let options = NiahOptions { haystack: kind, ..NiahOptions::default() };
        (Haystack::open(&options, &context, 500).unwrap(), tokenizer)
    }

    #[test]
    fn needles_stand_behind_whole_sentences() {
        for kind in [HaystackKind::Noise, HaystackKind::Repeat] {
            let (haystack, tokenizer) = haystack(kind);
            let hay = haystack.take(&mut ChaCha8Rng::seed_from_u64(1), 2000);
            assert_eq!(hay.len(), 2000);
            assert_eq!(haystack.place(&hay, 0.0, &tokenizer), 0);
            assert_eq!(haystack.place(&hay, 1.0, &tokenizer), 2000);
            for depth in [0.25, 0.5, 0.75] {
                let at = haystack.place(&hay, depth, &tokenizer);
                let asked = (depth * 2000.0) as usize;
                assert!(at <= asked && asked - at < LOOK_BACK, "{kind:?}: {at} for {asked}");
                assert!([u32::from(b'.'), u32::from(b'\n')].contains(&hay[at - 1]));
            }
        }
    }

    #[test]
    fn text_without_sentences_takes_the_needle_where_it_is_asked() {
        let (haystack, tokenizer) = haystack(HaystackKind::Repeat);
        let hay = vec![u32::from(b'x'); 1000];
        assert_eq!(haystack.place(&hay, 0.5, &tokenizer), 500);
    }
}
