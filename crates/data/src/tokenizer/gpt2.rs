//! GPT-2's byte-level BPE: 50,000 merges, 256 bytes and end of text, from `tiktoken-rs`.

use rayon::prelude::*;
use rustc_hash::FxHashMap;
use sha2::Digest;
use tiktoken_rs::CoreBPE;

use super::{END_OF_TEXT, Encoder, Inner, TokenTable, hex};
use crate::DataError;

const VOCAB_SIZE: u32 = 50_257;

/// Longer texts are encoded in parts of about this many bytes, in parallel.
const PART: usize = 256 * 1024;

/// From this many bytes on, `encode_ordinary` merges in less than quadratic time.
const LONG_PIECE: usize = 100;

/// The encoder. `tiktoken-rs` spends most of its time in its regex. Most text is ASCII, where this
/// encoder finds the pattern's pieces from the bytes; it leaves merging, and words with other
/// characters, to `tiktoken-rs`.
pub(super) struct Gpt2 {
    bpe: CoreBPE,
    /// Every token but end of text, by its bytes.
    tokens: FxHashMap<Vec<u8>, u32>,
}

pub(super) fn load() -> Result<Inner, DataError> {
    let fail = |reason: String| DataError::BuiltIn { name: "gpt2", reason };
    let bpe = tiktoken_rs::r50k_base().map_err(|error| fail(error.to_string()))?;
    let mut tokens = Vec::with_capacity(VOCAB_SIZE as usize);
    for token in 0..VOCAB_SIZE {
        tokens.push(bpe.decode_bytes(&[token]).map_err(|error| fail(error.to_string()))?);
    }
    let end_of_text = VOCAB_SIZE - 1;
    debug_assert_eq!(tokens[end_of_text as usize], END_OF_TEXT.as_bytes());
    let table = TokenTable::new(&tokens);
    tokens.truncate(end_of_text as usize);
    let tokens = tokens.into_iter().zip(0..).collect();
    let fingerprint = hex(&table.digest("gpt2").finalize());
    Ok(Inner {
        name: "gpt2".into(),
        encoder: Encoder::Gpt2(Box::new(Gpt2 { bpe, tokens })),
        tokens: table,
        end_of_text,
        fingerprint,
    })
}

impl Gpt2 {
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        if text.len() <= PART {
            return self.encode_part(text);
        }
        let encoded: Vec<Vec<u32>> =
            parts(text, PART).par_iter().map(|part| self.encode_part(part)).collect();
        encoded.concat()
    }

    /// Encodes words with characters outside ASCII through the regex, and the text between them from its
    /// bytes.
    fn encode_part(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while let Some(at) = rest.bytes().position(|byte| !byte.is_ascii()) {
            let (ascii, other) = rest.split_at(split_before(rest, at));
            self.encode_ascii(ascii, &mut tokens);
            let end = split_after(other, at - ascii.len() + 1).unwrap_or(other.len());
            let (word, behind) = other.split_at(end);
            tokens.extend(self.bpe.encode_ordinary(word));
            rest = behind;
        }
        self.encode_ascii(rest, &mut tokens);
        tokens
    }

    fn encode_ascii(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(ascii_piece(rest.as_bytes()));
            match self.tokens.get(piece.as_bytes()) {
                Some(&token) => tokens.push(token),
                None if piece.len() < LONG_PIECE => {
                    let parts = tiktoken_rs::byte_pair_split(piece.as_bytes(), &self.tokens);
                    tokens.extend(parts.into_iter().map(|part| self.tokens[part]));
                }
                None => tokens.extend(self.bpe.encode_ordinary(piece)),
            }
            rest = behind;
        }
    }
}

/// The length of the first piece of ASCII text, by GPT-2's pattern:
/// `'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$|\s+(?!\S)|\s`.
fn ascii_piece(text: &[u8]) -> usize {
    let contraction = match text {
        [b'\'', b's' | b'd' | b'm' | b't', ..] => 2,
        [b'\'', b'l', b'l', ..] | [b'\'', b'v', b'e', ..] | [b'\'', b'r', b'e', ..] => 3,
        _ => 0,
    };
    if contraction > 0 {
        return contraction;
    }
    let run = |from: usize, kind: Kind| {
        from + text[from..].iter().take_while(|&&byte| Kind::of(byte) == kind).count()
    };
    let word = usize::from(text[0] == b' ');
    match text.get(word).map(|&byte| Kind::of(byte)) {
        Some(kind) if kind != Kind::Space => run(word, kind),
        _ => {
            let end = run(0, Kind::Space);
            // Before other text, the last character starts the next piece.
            if end == text.len() { end } else { (end - 1).max(1) }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Digit,
    Space,
    Other,
}

impl Kind {
    fn of(byte: u8) -> Self {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Kind::Letter,
            b'0'..=b'9' => Kind::Digit,
            b'\t'..=b'\r' | b' ' => Kind::Space,
            _ => Kind::Other,
        }
    }
}

/// The last place up to `at` where `text` may be split (see [`parts`]), else 0. All bytes before
/// `at` are ASCII.
fn split_before(text: &str, at: usize) -> usize {
    let bytes = text.as_bytes();
    let space = |at: usize| Kind::of(bytes[at]) == Kind::Space;
    let mut next_is_space = text[at..].chars().next().is_some_and(char::is_whitespace);
    for place in (1..at).rev() {
        if space(place) && (!space(place - 1) || !next_is_space) {
            return place;
        }
        next_is_space = space(place);
    }
    0
}

/// Splits `text` only where that does not change its tokens. GPT-2's pattern never looks back, and
/// - no piece has white space after anything else: a piece starts with every run of white space;
/// - a run before other text is one piece up to its last character, which starts the next.
///
/// The second split also keeps long runs at the end of a part, where the pattern matches them
/// without backtracking; elsewhere a run of a million characters overflows the regex's stack.
fn parts(text: &str, at_least: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = split_after(rest, at_least) {
        let (part, tail) = rest.split_at(at);
        parts.push(part);
        rest = tail;
    }
    parts.push(rest);
    parts
}

fn split_after(text: &str, at_least: usize) -> Option<usize> {
    let from = text.floor_char_boundary(at_least);
    let is_space = |character: Option<char>| character.is_some_and(char::is_whitespace);
    let mut after_space = is_space(text[..from].chars().next_back());
    let mut characters = text[from..].char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let next = characters.peek().map(|&(_, next)| next);
        let ends_run = next.is_some() && !is_space(next);
        if character.is_whitespace() && (!after_space || ends_run) && from + at > 0 {
            return Some(from + at);
        }
        after_space = character.is_whitespace();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn white_space_is_what_the_pattern_says_it_is() {
        // `\s` is Unicode's White_Space, as `char::is_whitespace` is; a difference would make
        // `parts` split inside a piece.
        let bpe = tiktoken_rs::r50k_base().unwrap();
        for character in (0..=0x10ffffu32).filter_map(char::from_u32).filter(|c| c.is_whitespace())
        {
            let whole = bpe.encode_ordinary(&format!("a{character}b"));
            let split =
                [bpe.encode_ordinary("a"), bpe.encode_ordinary(&format!("{character}b"))].concat();
            assert_eq!(whole, split, "U+{:04X}", character as u32);
        }
    }

    static ENCODER: LazyLock<Gpt2> = LazyLock::new(|| match load().unwrap().encoder {
        Encoder::Gpt2(encoder) => *encoder,
        _ => unreachable!("another encoder"),
    });

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]
        #[test]
        fn tokens_are_those_of_the_regex(text in "([ab1.'slvremdt \n\t\u{b}\u{1c}\u{a0}\u{3000}é٣🙂]|  |\n\n|'ll|the){0,40}") {
            let bpe = &ENCODER.bpe;
            prop_assert_eq!(ENCODER.encode_part(&text), bpe.encode_ordinary(&text));
        }

        #[test]
        fn tokens_do_not_depend_on_the_parts(text in "[ab1.'s \n\t\u{a0}é🙂]{0,80}", at_least in 1usize..20) {
            let encoded: Vec<Vec<u32>> =
                parts(&text, at_least).iter().map(|part| ENCODER.encode_part(part)).collect();
            prop_assert_eq!(encoded.concat(), ENCODER.bpe.encode_ordinary(&text));
        }
    }

    #[test]
    fn any_pair_of_ascii_characters_is_cut_as_the_regex_does() {
        for (a, b) in (0..128u8).flat_map(|a| (0..128u8).map(move |b| (a, b))) {
            let text = format!("{0}{1}x{1}{0} {0}", a as char, b as char);
            assert_eq!(ENCODER.encode_part(&text), ENCODER.bpe.encode_ordinary(&text), "{text:?}");
        }
    }
}
