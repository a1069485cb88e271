//! Reading shards.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{HEADER_BYTES, MAGIC, Width};
use crate::{DataError, Tokenizer, files};

/// An open shard. It is not memory-mapped: there, a disk that fails or a file that is cut short would kill the
/// process, where reading gives an error.
#[derive(Debug)]
pub(crate) struct Shard {
    path: PathBuf,
    file: File,
    length: u64,
    width: Width,
    tokens: u64,
}

impl Shard {
    /// Opens the shard at `path` and checks its header and length.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let read_error = |source| DataError::read(path, source);
        let file = File::open(path).map_err(read_error)?;
        let length = file.metadata().map_err(read_error)?.len();
        let fail = |reason: String, hint: &str| DataError::Shard {
            path: path.to_path_buf(),
            reason,
            hint: hint.into(),
        };
        if length < HEADER_BYTES {
            let reason = format!("it has {length} bytes, and the header alone has {HEADER_BYTES}");
            return Err(fail(
                reason,
                "the file was cut short, or is no shard; make it again with `longwall prepare`",
            ));
        }
        let mut header = [0; 12];
        files::read_exact_at(&file, &mut header, 0).map_err(read_error)?;
        let field =
            |at: usize| i32::from_le_bytes(header[4 * at..][..4].try_into().expect("four bytes"));
        if field(0) != MAGIC {
            let reason = format!("its magic number is {}; allowed: {MAGIC}", field(0));
            return Err(fail(
                reason,
                "give shards made by `longwall prepare` or llm.c's scripts for GPT-2",
            ));
        }
        let width = match field(1) {
            1 => Width::U16,
            2 => Width::U32,
            version => {
                let reason =
                    format!("its version is {version}; allowed: 1 (u16 tokens), 2 (u32 tokens)");
                return Err(fail(reason, "make it again with `longwall prepare`"));
            }
        };
        let tokens = u64::try_from(field(2)).unwrap_or(0);
        let expected = HEADER_BYTES + tokens * width.bytes();
        if tokens == 0 || length != expected {
            let reason = format!(
                "its header says {} tokens of {} bytes, {expected} bytes in all, and the file has {length}",
                field(2),
                width.bytes()
            );
            return Err(fail(reason, "the file was cut short or damaged; copy or make it again"));
        }
        Ok(Shard { path: path.to_path_buf(), file, length, width, tokens })
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length in bytes, when it was opened.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// The CRC-32C of a range of the file's bytes.
    pub(super) fn crc32c(&self, range: Range<u64>) -> Result<u32, DataError> {
        let crc = files::crc32c_of(&self.file, range);
        crc.map_err(|source| DataError::read(&self.path, source))
    }

    /// The bytes of tokens `start..start + count`.
    fn bytes(&self, start: u64, count: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; (count * self.width.bytes()) as usize];
        let offset = HEADER_BYTES + start * self.width.bytes();
        let read = files::read_exact_at(&self.file, &mut bytes, offset);
        read.map(|()| bytes).map_err(|source| DataError::read(&self.path, source))
    }

    /// Fills `out` with the tokens from `start` on.
    pub(crate) fn read(&self, start: u64, out: &mut [i32]) -> Result<(), DataError> {
        let bytes = self.bytes(start, out.len() as u64)?;
        match self.width {
            Width::U16 => {
                for (token, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *token = i32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
                }
            }
            Width::U32 => {
                for (token, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *token = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as i32;
                }
            }
        }
        Ok(())
    }

    /// Checks that the tokenizer has every token of the shard.
    pub(crate) fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<(), DataError> {
        match self.first_out_of_range(tokenizer.vocab_size())? {
            None => Ok(()),
            Some(found) => Err(found.error(tokenizer.name(), tokenizer.vocab_size())),
        }
    }

    /// The first token at or above `vocab_size`.
    pub(super) fn first_out_of_range(
        &self,
        vocab_size: usize,
    ) -> Result<Option<OutOfRange>, DataError> {
        if self.width == Width::U16 && vocab_size >= 1 << 16 {
            return Ok(None);
        }
        const PART: u64 = 1 << 20;
        let parts: Vec<u64> = (0..self.tokens.div_ceil(PART)).collect();
        let first_in = |part: &u64| {
            let start = part * PART;
            let mut tokens = vec![0; PART.min(self.tokens - start) as usize];
            self.read(start, &mut tokens)?;
            // As u32, so that a token above i32::MAX is found too.
            let out_of_range = |&token: &i32| token as u32 as usize >= vocab_size;
            Ok(tokens.iter().position(out_of_range).map(|at| OutOfRange {
                path: self.path.clone(),
                token: tokens[at] as u32,
                position: start + at as u64,
            }))
        };
        parts.par_iter().find_map_first(|part| first_in(part).transpose()).transpose()
    }

    /// Adds to `sha` what identifies this shard: its length, both ends, and a sample of the tokens
    /// between. Hashing everything would mean reading the whole corpus at every start.
    fn sample(&self, sha: &mut Sha256) -> Result<(), DataError> {
        const ENDS: u64 = 32 * 1024;
        const SAMPLES: u64 = 64;
        const SAMPLE: u64 = 1024;
        sha.update(self.width.bytes().to_le_bytes());
        sha.update(self.tokens.to_le_bytes());
        let ends = ENDS.min(self.tokens);
        sha.update(self.bytes(0, ends)?);
        sha.update(self.bytes(self.tokens - ends, ends)?);
        for sample in 0..SAMPLES {
            let start = (u128::from(self.tokens) * u128::from(sample) / u128::from(SAMPLES)) as u64;
            sha.update(self.bytes(start, SAMPLE.min(self.tokens - start))?);
        }
        Ok(())
    }
}

/// A token of a shard that no vocabulary of the size asked for has.
#[derive(Debug)]
pub(crate) struct OutOfRange {
    pub(crate) path: PathBuf,
    pub(crate) token: u32,
    /// In tokens from the start of the shard.
    pub(crate) position: u64,
}

impl OutOfRange {
    pub(crate) fn error(self, tokenizer: &str, vocab_size: usize) -> DataError {
        let OutOfRange { path, token, position } = self;
        DataError::TokenOutOfRange {
            path,
            token,
            position,
            tokenizer: tokenizer.into(),
            vocab_size,
        }
    }
}

/// Consecutive shards as one stream of tokens.
#[derive(Debug)]
pub(crate) struct TokenStream {
    shards: Vec<Shard>,
    /// Index in the stream of each shard's first token, followed by the stream's length.
    starts: Vec<u64>,
}

impl TokenStream {
    pub(crate) fn new(shards: Vec<Shard>) -> Self {
        let mut starts = vec![0];
        for shard in &shards {
            starts.push(starts[starts.len() - 1] + shard.tokens());
        }
        TokenStream { shards, starts }
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.starts[self.shards.len()]
    }

    /// Fills `out` with the tokens from `start` on, across shards if necessary.
    ///
    /// # Panics
    /// When the stream ends before `out` is full.
    pub(crate) fn read(&self, start: u64, out: &mut [i32]) -> Result<(), DataError> {
        let end = start + out.len() as u64;
        assert!(end <= self.tokens(), "tokens {start}..{end} of {}", self.tokens());
        let (mut start, mut out) = (start, out);
        let mut at = self.starts.partition_point(|&first| first <= start) - 1;
        while !out.is_empty() {
            let here = (self.starts[at + 1] - start).min(out.len() as u64);
            let (part, rest) = out.split_at_mut(here as usize);
            self.shards[at].read(start - self.starts[at], part)?;
            (start, out, at) = (start + here, rest, at + 1);
        }
        Ok(())
    }

    /// The token at `position` of the stream, which is out of range, with its place in its shard.
    pub(crate) fn out_of_range(&self, position: u64, token: u32) -> OutOfRange {
        let at = self.starts.partition_point(|&first| first <= position) - 1;
        let path = self.shards[at].path.clone();
        OutOfRange { path, token, position: position - self.starts[at] }
    }

    /// The shards' paths.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(Shard::path)
    }

    /// SHA-256, in hex, of a sample of the stream; see [`Shard::sample`].
    pub(crate) fn fingerprint(&self) -> Result<String, DataError> {
        let mut sha = Sha256::new();
        self.shards.iter().try_for_each(|shard| shard.sample(&mut sha))?;
        Ok(crate::tokenizer::hex(&sha.finalize()))
    }
}
