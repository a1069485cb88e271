//! GPT-2's byte-level BPE: 50,000 merges, 256 bytes and end of text, from `tiktoken-rs`.

use rayon::prelude::*;
use sha2::Digest;
use tiktoken_rs::CoreBPE;

use super::{END_OF_TEXT, Encoder, Inner, TokenTable, hex};
use crate::DataError;

const VOCAB_SIZE: u32 = 50_257;

/// Longer texts are encoded in parts of about this many bytes, in parallel.
const PART: usize = 256 * 1024;

pub(super) fn load() -> Result<Inner, DataError> {
    let fail = |reason: String| DataError::BuiltIn { name: "gpt2", reason };
    let bpe = tiktoken_rs::r50k_base().map_err(|error| fail(error.to_string()))?;
    let mut tokens = Vec::with_capacity(VOCAB_SIZE as usize);
    for token in 0..VOCAB_SIZE {
        tokens.push(bpe.decode_bytes(&[token]).map_err(|error| fail(error.to_string()))?);
    }
    let end_of_text = VOCAB_SIZE - 1;
    debug_assert_eq!(tokens[end_of_text as usize], END_OF_TEXT.as_bytes());
    let tokens = TokenTable::new(tokens);
    let fingerprint = hex(&tokens.digest("gpt2").finalize());
    Ok(Inner {
        name: "gpt2".into(),
        encoder: Encoder::Gpt2(Box::new(bpe)),
        tokens,
        end_of_text,
        fingerprint,
    })
}

pub(super) fn encode(bpe: &CoreBPE, text: &str) -> Vec<u32> {
    if text.len() <= PART {
        return bpe.encode_ordinary(text);
    }
    let encoded: Vec<Vec<u32>> =
        parts(text, PART).par_iter().map(|part| bpe.encode_ordinary(part)).collect();
    encoded.concat()
}

/// Splits `text` where the tokens cannot tell. GPT-2's pattern never looks back, and
/// - no piece has white space after anything else: a piece starts with every run of white space;
/// - a run in front of other text is one piece up to its last character, which starts the next.
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
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn tokens_do_not_depend_on_the_parts(text in "[ab1.'s \n\t\u{a0}é🙂]{0,80}", at_least in 1usize..20) {
            let bpe = tiktoken_rs::r50k_base_singleton();
            let encoded: Vec<Vec<u32>> =
                parts(&text, at_least).iter().map(|part| bpe.encode_ordinary(part)).collect();
            prop_assert_eq!(encoded.concat(), bpe.encode_ordinary(&text));
        }
    }
}
