//! Text to tokens and back: GPT-2's vocabulary and bytes, both built in, and any
//! `tokenizer.json`.

mod export;
mod file;
mod gpt2;
mod train;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::DataError;

pub use train::{TrainBpe, TrainBpeReport, train_bpe};

/// The text that the end-of-text token decodes to.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";

/// The `[tokenizer]` table.
///
/// ```toml
/// [tokenizer]
/// kind = "file"                      # or "gpt2", or "bytes" (the default)
/// path = "runs/tokenizer.json"       # only for "file"
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", from = "TokenizerTable")]
pub enum TokenizerConfig {
    /// GPT-2's byte-level BPE, 50,257 tokens; nothing to download.
    Gpt2,
    /// One token per byte, and 256 for end of text.
    #[default]
    Bytes,
    /// A Hugging Face `tokenizer.json`, for example one written by [`train_bpe`].
    File {
        /// The `tokenizer.json`.
        path: PathBuf,
    },
}

/// The table as it is read: serde accepts any key beside a unit variant of a tagged enum; these
/// variants reject them.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum TokenizerTable {
    Gpt2 {},
    Bytes {},
    File { path: PathBuf },
}

impl From<TokenizerTable> for TokenizerConfig {
    fn from(table: TokenizerTable) -> Self {
        match table {
            TokenizerTable::Gpt2 {} => TokenizerConfig::Gpt2,
            TokenizerTable::Bytes {} => TokenizerConfig::Bytes,
            TokenizerTable::File { path } => TokenizerConfig::File { path },
        }
    }
}

/// Encodes text to tokens and decodes them. Cloning is cheap: clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    name: String,
    encoder: Encoder,
    /// The bytes of every token, by id.
    tokens: TokenTable,
    end_of_text: u32,
    fingerprint: String,
}

enum Encoder {
    Gpt2(Box<gpt2::Gpt2>),
    Bytes,
    File(Box<file::FileEncoder>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.name(), self.vocab_size())
    }
}

impl Tokenizer {
    /// Loads the tokenizer the configuration names.
    ///
    /// # Errors
    /// When a tokenizer file is missing, malformed, has no end-of-text token, or cannot encode
    /// every text.
    pub fn load(config: &TokenizerConfig) -> Result<Self, DataError> {
        let inner = match config {
            TokenizerConfig::Gpt2 => gpt2::load()?,
            TokenizerConfig::Bytes => bytes(),
            TokenizerConfig::File { path } => file::load(path)?,
        };
        Ok(Tokenizer(Arc::new(inner)))
    }

    /// The tokens of `text`. Special tokens spelled out in the text are ordinary text: a document
    /// that quotes `<|endoftext|>` does not end there. No tokens are added before or after.
    ///
    /// # Panics
    /// When [`try_encode`](Self::try_encode) fails.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        match self.try_encode(text) {
            Ok(tokens) => tokens,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`encode`](Self::encode), with an error for a tokenizer file that cannot encode this text.
    ///
    /// # Errors
    /// [`DataError::Tokenizer`] for some damaged files; the built-in tokenizers encode every text.
    pub fn try_encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.0.encoder {
            Encoder::Gpt2(encoder) => Ok(encoder.encode(text)),
            Encoder::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Encoder::File(encoder) => encoder.encode(text).map_err(|reason| DataError::Tokenizer {
                path: self.0.name.clone().into(),
                reason: format!("it fails on a text of {} bytes: {reason}", text.len()),
                hint: "fetch the file again, or train one with `longwall tokenizer train`".into(),
            }),
        }
    }

    /// The text of `tokens`; bytes that are not UTF-8 become U+FFFD. End of text becomes
    /// `<|endoftext|>`, or as its file spells it.
    pub fn decode(&self, tokens: &[u32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(tokens)).into_owned()
    }

    /// The bytes of `tokens`: exact for `gpt2`, `bytes` and byte-level files. An id outside the
    /// vocabulary (a model's may be padded) gives U+FFFD; files that are not byte-level skip it.
    pub fn decode_bytes(&self, tokens: &[u32]) -> Vec<u8> {
        if let Encoder::File(encoder) = &self.0.encoder
            && !encoder.is_byte_level()
            && let Some(text) = encoder.decode(tokens)
        {
            return text.into_bytes();
        }
        let mut bytes = Vec::with_capacity(tokens.len() * 4);
        for &token in tokens {
            bytes.extend_from_slice(self.0.tokens.get(token).unwrap_or("\u{fffd}".as_bytes()));
        }
        bytes
    }

    /// One more than the largest token: 50,257 for `gpt2`, 257 for `bytes`.
    pub fn vocab_size(&self) -> usize {
        self.0.tokens.len()
    }

    /// The token that ends every document.
    pub fn end_of_text(&self) -> u32 {
        self.0.end_of_text
    }

    /// SHA-256, in hex, of everything that determines a text's tokens. Shards and checkpoints record
    /// it, so that they are never mixed with another tokenizer's.
    pub fn fingerprint(&self) -> String {
        self.0.fingerprint.clone()
    }

    /// How many bytes of text each token encodes, for bits per byte; end of text encodes none. For files
    /// that are not byte-level, a space that the tokenizer adds before a text counts as a byte.
    pub fn token_byte_lengths(&self) -> Vec<u32> {
        let mut lengths = self.0.tokens.lengths();
        lengths[self.0.end_of_text as usize] = 0;
        lengths
    }

    /// `gpt2`, `bytes`, or the path of the file.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

/// The bytes of every token, one after the other.
struct TokenTable {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl TokenTable {
    fn new<T: AsRef<[u8]>>(tokens: impl IntoIterator<Item = T>) -> Self {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for token in tokens {
            bytes.extend_from_slice(token.as_ref());
            ends.push(bytes.len());
        }
        TokenTable { bytes, ends }
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn get(&self, token: u32) -> Option<&[u8]> {
        let at = token as usize;
        let end = *self.ends.get(at)?;
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Some(&self.bytes[start..end])
    }

    fn lengths(&self) -> Vec<u32> {
        (0..self.len() as u32)
            .map(|token| self.get(token).map_or(0, |bytes| bytes.len() as u32))
            .collect()
    }

    /// SHA-256 over every token's length and bytes, in order.
    fn digest(&self, scheme: &str) -> Sha256 {
        let mut sha = Sha256::new_with_prefix(scheme.as_bytes());
        for token in 0..self.len() as u32 {
            let bytes = self.get(token).unwrap_or_default();
            sha.update((bytes.len() as u64).to_le_bytes());
            sha.update(bytes);
        }
        sha
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes() -> Inner {
    let single = (0..=255u8).map(|byte| vec![byte]);
    let tokens = TokenTable::new(single.chain([END_OF_TEXT.as_bytes().to_vec()]));
    let fingerprint = hex(&tokens.digest("bytes").finalize());
    Inner { name: "bytes".into(), encoder: Encoder::Bytes, tokens, end_of_text: 256, fingerprint }
}

#[cfg(test)]
mod tests;
