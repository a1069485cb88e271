//! Token shards in llm.c's format: a header of 256 int32, then the tokens, all little-endian.
//!
//! | int32 | value |
//! |---|---|
//! | 0 | magic 20240520 |
//! | 1 | version: 1 for u16 tokens, 2 for u32 tokens (vocabularies above 65,536) |
//! | 2 | number of tokens |
//! | 3… | 0 |
//!
//! Version 1 is llm.c's own; version 2 is Longwall's.

mod checksums;
mod manifest;
mod reader;
mod verify;
mod writer;

pub use checksums::BlockChecksums;
pub(crate) use manifest::{LengthHistogram, write_atomically, write_json};
pub use manifest::{
    LengthSummary, MANIFEST_FILE, Manifest, ShardEntry, Skipped, SplitSummary, TokenizerStamp,
};
pub(crate) use reader::{Shard, TokenStream};
pub use verify::{ShardState, VerifiedShard, VerifyReport, verify_shards};
pub(crate) use verify::{check_blocks, check_listed};
pub(crate) use writer::{SplitState, SplitWriter};

/// Bytes of the header.
pub(crate) const HEADER_BYTES: u64 = 1024;
const MAGIC: i32 = 20_240_520;

/// The most tokens that a shard's header can record.
pub(crate) const MOST_TOKENS: u64 = i32::MAX as u64;

/// Bytes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U16,
    U32,
}

impl Width {
    /// The narrowest width that holds every token of a vocabulary.
    pub(crate) fn of_vocab(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Width::U16 } else { Width::U32 }
    }

    pub(crate) fn bytes(self) -> u64 {
        match self {
            Width::U16 => 2,
            Width::U32 => 4,
        }
    }

    fn version(self) -> i32 {
        match self {
            Width::U16 => 1,
            Width::U32 => 2,
        }
    }
}

/// The header of a shard of `tokens` tokens.
fn header(width: Width, tokens: u64) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    let fields = [MAGIC, width.version(), tokens as i32];
    for (bytes, field) in header.chunks_exact_mut(4).zip(fields) {
        bytes.copy_from_slice(&field.to_le_bytes());
    }
    header
}

#[cfg(test)]
mod tests;
