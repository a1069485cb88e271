//! A tokenizer as a Hugging Face `tokenizer.json`.

use std::path::Path;

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::{Encoder, Tokenizer};
use crate::DataError;

impl Tokenizer {
    /// The tokenizer as a `tokenizer.json`, which gives the same tokens: a file's own content, or for a built-in
    /// tokenizer a byte-level BPE.
    ///
    /// # Errors
    /// When the file it was loaded from can no longer be read.
    pub fn to_hugging_face(&self) -> Result<Vec<u8>, DataError> {
        let (is_gpt2, count) = match &self.0.encoder {
            Encoder::File(_) => {
                let path = Path::new(self.name());
                return std::fs::read(path).map_err(|source| DataError::read(path, source));
            }
            Encoder::Gpt2(_) => (true, self.0.end_of_text),
            Encoder::Bytes => (false, self.0.end_of_text),
        };
        let tokens: Vec<&[u8]> =
            (0..count).map(|id| self.0.tokens.get(id).expect("an id below the size")).collect();
        let json = byte_level(&tokens, &self.decode(&[self.0.end_of_text]), is_gpt2);
        Ok(serde_json::to_vec_pretty(&json).expect("JSON has a text form"))
    }
}

/// A byte-level BPE of `tokens`, whose ids are their places and their ranks in merging; `words` splits text by
/// GPT-2's pattern first. The end-of-text token follows the others.
fn byte_level(tokens: &[&[u8]], end_of_text: &str, words: bool) -> Value {
    let ranks: FxHashMap<&[u8], usize> = tokens.iter().copied().zip(0..).collect();
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (shown(token), id.into())).collect();
    let merges: Vec<String> = tokens
        .iter()
        .enumerate()
        .filter(|(_, token)| token.len() > 1)
        .map(|(id, token)| {
            let (left, right) = halves(token, id, &ranks);
            format!("{} {}", shown(left), shown(right))
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": tokens.len(), "content": end_of_text, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    })
}

/// The two tokens that are merged into `token`, of rank `rank`: what merging by the ranks below it leaves.
fn halves<'t>(
    token: &'t [u8],
    rank: usize,
    ranks: &FxHashMap<&[u8], usize>,
) -> (&'t [u8], &'t [u8]) {
    let mut starts: Vec<usize> = (0..=token.len()).collect();
    while starts.len() > 3 {
        let pair = |at: usize| ranks.get(&token[starts[at]..starts[at + 2]]).copied();
        let lowest = (0..starts.len() - 2)
            .filter_map(|at| pair(at).filter(|&pair| pair < rank).map(|pair| (pair, at)))
            .min();
        let (_, at) = lowest.expect("merges of lower rank lead to two parts");
        starts.remove(at + 1);
    }
    token.split_at(starts[1])
}

/// Bytes as the characters that byte-level files write: printable Latin-1 for itself, the other 68 bytes as U+0100
/// and up.
fn shown(bytes: &[u8]) -> String {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let character = |byte: u8| match printable(byte) {
        true => char::from(byte),
        false => {
            let place = (0..byte).filter(|&other| !printable(other)).count() as u32;
            char::from_u32(256 + place).expect("a character above Latin-1")
        }
    };
    bytes.iter().map(|&byte| character(byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerConfig;

    const TEXTS: [&str; 5] = [
        "Hello, world! It's 12345 o'clock.\n\n  fn main() {}\t",
        "Καλημέρα, 世界! 🙂 naïve café",
        "   leading and trailing   ",
        "a<|endoftext|>b",
        "\u{0}\u{7f}\u{a0}\u{ad}é\r\n",
    ];

    #[test]
    fn built_in_tokenizers_give_the_same_tokens_from_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        for config in [TokenizerConfig::Gpt2, TokenizerConfig::Bytes] {
            let own = Tokenizer::load(&config).unwrap();
            std::fs::write(&path, own.to_hugging_face().unwrap()).unwrap();
            let file = Tokenizer::load(&TokenizerConfig::File { path: path.clone() }).unwrap();
            assert_eq!(file.vocab_size(), own.vocab_size());
            assert_eq!(file.end_of_text(), own.end_of_text());
            for text in TEXTS {
                assert_eq!(file.encode(text), own.encode(text), "{config:?}: {text:?}");
            }
            for id in 0..own.vocab_size() as u32 {
                assert_eq!(file.decode_bytes(&[id]), own.decode_bytes(&[id]), "{config:?}: {id}");
            }
            // A file is exported as it is.
            assert_eq!(file.to_hugging_face().unwrap(), std::fs::read(&path).unwrap());
        }
    }
}
