//! A Hugging Face `tokenizer.json`.

use std::path::Path;

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer as HfTokenizer;

use super::{Encoder, Inner, TokenTable, hex};
use crate::DataError;
use crate::panics::{Panicked, without_panic};

/// Names of the token that ends a document; the first that exists is used.
const END_OF_TEXT_NAMES: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]"];

/// Any tokenizer that can encode this can encode every text.
const PROBE: &str = "a B\u{0}\u{7f}é中🙂\u{10ffff}\n";

/// Vocabularies are smaller; memory is reserved for every token below the greatest.
const MOST_TOKENS: u32 = 1 << 24;

pub(super) struct FileEncoder {
    tokenizer: HfTokenizer,
    byte_level: bool,
}

impl FileEncoder {
    pub(super) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// The tokens of a text, or why it cannot be encoded: `load` has encoded [`PROBE`], so only damaged
    /// files fail.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        encode(&self.tokenizer, text)
    }

    /// The text of tokens, unless the file's decoder fails on them.
    pub(super) fn decode(&self, tokens: &[u32]) -> Option<String> {
        without_panic(|| self.tokenizer.decode(tokens, false)).ok()?.ok()
    }
}

fn encode(tokenizer: &HfTokenizer, text: &str) -> Result<Vec<u32>, String> {
    match without_panic(|| tokenizer.encode_fast(text, false)) {
        Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(Panicked) => Err("the encoder failed".into()),
    }
}

pub(super) fn load(path: &Path) -> Result<Inner, DataError> {
    let content = std::fs::read(path).map_err(|source| missing_or_unreadable(path, source))?;
    let fail = |reason: String, hint: &str| DataError::Tokenizer {
        path: path.to_path_buf(),
        reason,
        hint: hint.into(),
    };
    let json_hint =
        "give a Hugging Face tokenizer.json, or make one with `longwall tokenizer train`";
    let json: Value = serde_json::from_slice(&content)
        .map_err(|error| fail(format!("it is not JSON: {error}"), json_hint))?;
    let mut tokenizer = without_panic(|| HfTokenizer::from_bytes(&content))
        .map_err(|Panicked| fail("its content is damaged".into(), json_hint))?
        .map_err(|error| fail(error.to_string(), json_hint))?;
    tokenizer.set_encode_special_tokens(true);
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|error| fail(error.to_string(), json_hint))?;

    let probe = encode(&tokenizer, PROBE).map_err(|error| {
        let reason = format!("it cannot encode every text: {error}");
        fail(reason, "give it a token for unknown characters, or train a byte-level one with `longwall tokenizer train`")
    })?;
    let byte_level =
        has_part(&json["decoder"], "ByteLevel") || has_part(&json["pre_tokenizer"], "ByteLevel");
    let encoder = FileEncoder { tokenizer, byte_level };
    if !byte_level && encoder.decode(&probe).is_some_and(|text| !text.contains('中')) {
        tracing::warn!(tokenizer = %path.display(), "the tokenizer is not byte-level: characters outside its vocabulary are lost");
    }

    let tokenizer = &encoder.tokenizer;
    let end_of_text =
        END_OF_TEXT_NAMES.iter().find_map(|name| tokenizer.token_to_id(name)).ok_or_else(|| {
            let reason =
                format!("it has no end-of-text token; looked for {}", END_OF_TEXT_NAMES.join(", "));
            fail(reason, "add one of these to its added_tokens, with \"special\": true")
        })?;
    let tokens = token_table(tokenizer, byte_level).map_err(|greatest| {
        let reason = format!("its greatest token is {greatest}; allowed: below {MOST_TOKENS}");
        fail(reason, "fetch the file again: no vocabulary is so large")
    })?;
    let fingerprint = fingerprint(&tokens, &json);
    let encoder = Encoder::File(Box::new(encoder));
    Ok(Inner { name: path.display().to_string(), encoder, tokens, end_of_text, fingerprint })
}

fn missing_or_unreadable(path: &Path, source: std::io::Error) -> DataError {
    if source.kind() == std::io::ErrorKind::NotFound {
        return DataError::Missing {
            what: "tokenizer file",
            path: path.to_path_buf(),
            hint: "check tokenizer.path, or make one with `longwall tokenizer train`".into(),
        };
    }
    DataError::read(path, source)
}

/// Whether a pre-tokenizer or decoder, or a member of its sequence, is of this type.
fn has_part(part: &Value, kind: &str) -> bool {
    let members = ["decoders", "pretokenizers"].into_iter().filter_map(|key| part[key].as_array());
    part["type"] == kind || members.flatten().any(|member| has_part(member, kind))
}

/// The bytes of every token, or the greatest token if it is out of range.
fn token_table(tokenizer: &HfTokenizer, byte_level: bool) -> Result<TokenTable, u32> {
    let vocab = tokenizer.get_vocab(true);
    let greatest = vocab.values().max().copied().unwrap_or(0);
    if greatest >= MOST_TOKENS {
        return Err(greatest);
    }
    let size = if vocab.is_empty() { 0 } else { greatest as usize + 1 };
    let added = tokenizer.get_added_tokens_decoder();
    let mut tokens = vec![Vec::new(); size];
    for (token, id) in vocab {
        tokens[id as usize] = if added.contains_key(&id) {
            token.into_bytes()
        } else if byte_level {
            token.chars().flat_map(byte_of_character).collect()
        } else {
            plain_bytes(&token)
        };
    }
    Ok(TokenTable::new(tokens))
}

/// Inverts GPT-2's table, which maps every byte to a printable character: printable Latin-1 to
/// itself, the other 68 bytes to U+0100 and up.
fn byte_of_character(character: char) -> Vec<u8> {
    let stands_for_itself = |code: u32| matches!(code, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = character as u32;
    if stands_for_itself(code) {
        return vec![code as u8];
    }
    let shifted =
        (0..256u32).filter(|&byte| !stands_for_itself(byte)).nth(code.wrapping_sub(256) as usize);
    match shifted {
        Some(byte) => vec![byte as u8],
        None => character.to_string().into_bytes(),
    }
}

/// The bytes of a token that is not byte-level: `▁` is a space, `<0x0A>` a byte, `##` a mark.
pub(super) fn plain_bytes(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    if let Some(byte) = byte
        .filter(|digits| digits.len() == 2)
        .and_then(|digits| u8::from_str_radix(digits, 16).ok())
    {
        return vec![byte];
    }
    let token = match token.strip_prefix("##") {
        Some(rest) if !rest.is_empty() => rest,
        _ => token,
    };
    token.replace('\u{2581}', " ").into_bytes()
}

/// Hashes the vocabulary and the tokenizer's rules, independently of the file's layout.
fn fingerprint(tokens: &TokenTable, json: &Value) -> String {
    let mut sha = tokens.digest("file");
    for part in ["normalizer", "pre_tokenizer", "model", "added_tokens"] {
        hash_json(&json[part], &mut sha);
    }
    hex(&sha.finalize())
}

fn hash_json(value: &Value, sha: &mut Sha256) {
    match value {
        Value::Array(items) => {
            sha.update(b"[");
            items.iter().for_each(|item| hash_json(item, sha));
            sha.update(b"]");
        }
        Value::Object(members) => {
            let mut keys: Vec<&String> = members.keys().collect();
            keys.sort();
            sha.update(b"{");
            for key in keys {
                hash_json(&Value::String(key.clone()), sha);
                hash_json(&members[key], sha);
            }
            sha.update(b"}");
        }
        leaf => {
            let text = leaf.to_string();
            sha.update((text.len() as u64).to_le_bytes());
            sha.update(text.as_bytes());
        }
    }
}
