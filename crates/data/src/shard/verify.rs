//! Comparing shards with their manifest: a sample of them whenever they are opened, and every byte on
//! request.

mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::manifest::{MANIFEST_FILE, Manifest, ShardEntry};
use super::reader::Shard;
use super::{HEADER_BYTES, Width};
use crate::{DataError, Tokenizer};

pub use report::{ShardState, VerifiedShard, VerifyReport, verify_shards};

/// Blocks of a shard that are compared when it is opened: the first, the last, and some between.
const SAMPLED_BLOCKS: usize = 18;

/// When this much time has passed, no further blocks are compared. A slow disk then gets a smaller
/// sample, and an info line says so.
const MOST_TIME: Duration = Duration::from_secs(10);

/// Blocks that are compared between two looks at the clock.
const BLOCKS_AT_ONCE: usize = 64;

/// A block of an opened shard, to be compared with the manifest beside it.
pub(crate) struct BlockCheck<'a> {
    shard: &'a Shard,
    entry: &'a ShardEntry,
    block: usize,
    /// All shards' blocks of a low rank are compared before those of a higher one.
    rank: usize,
}

/// Checks opened shards of `folder` against its manifest: that it lists them, and their sizes. Returns the
/// blocks to compare with [`check_blocks`]. Shards without checksums of blocks, from earlier
/// versions, have their tokens checked against the vocabulary instead.
pub(crate) fn check_listed<'a>(
    folder: &Path,
    manifest: &'a Manifest,
    shards: impl IntoIterator<Item = &'a Shard>,
    tokenizer: &Tokenizer,
) -> Result<Vec<BlockCheck<'a>>, DataError> {
    let mut blocks = Vec::new();
    for shard in shards {
        let Some(entry) = manifest.entry(shard.path()) else {
            return Err(unusable(
                shard.path(),
                format!("{} does not list it", folder.join(MANIFEST_FILE).display()),
                "move it to a folder of its own, or remove the manifest to use all files without it",
            ));
        };
        check_size(shard, entry, manifest.tokenizer.vocab_size)?;
        let length = shard.length();
        match &entry.blocks {
            None => check_tokens(shard, tokenizer)?,
            Some(sums) if !sums.fits(length) => {
                return Err(unusable(
                    shard.path(),
                    format!(
                        "{MANIFEST_FILE} has {} checksums for blocks of {} bytes, and the file has {length} bytes",
                        sums.crc32c.len(),
                        sums.bytes
                    ),
                    COPY_AGAIN,
                ));
            }
            Some(sums) => {
                let chosen = sample(sums.crc32c.len()).into_iter().enumerate();
                blocks.extend(chosen.map(|(rank, block)| BlockCheck { shard, entry, block, rank }));
            }
        }
    }
    Ok(blocks)
}

const COPY_AGAIN: &str =
    "copy the file and its manifest again from undamaged copies, or prepare the text again";

fn unusable(path: &Path, reason: String, hint: &str) -> DataError {
    DataError::Shard { path: path.to_path_buf(), reason, hint: hint.into() }
}

/// The size that a shard's file has, by its manifest; `None` if no shard can be so large.
fn expected_bytes(entry: &ShardEntry, vocab_size: usize) -> Option<u64> {
    let tokens = entry.tokens.checked_mul(Width::of_vocab(vocab_size).bytes())?;
    tokens.checked_add(HEADER_BYTES)
}

fn check_size(shard: &Shard, entry: &ShardEntry, vocab_size: usize) -> Result<(), DataError> {
    let length = shard.length();
    if shard.tokens() == entry.tokens && expected_bytes(entry, vocab_size) == Some(length) {
        return Ok(());
    }
    let width = Width::of_vocab(vocab_size).bytes();
    let reason = format!(
        "it has {} tokens in {length} bytes, and {MANIFEST_FILE} says {} tokens of {width} bytes",
        shard.tokens(),
        entry.tokens
    );
    Err(unusable(shard.path(), reason, COPY_AGAIN))
}

/// Checks the tokens of a shard that was made with this tokenizer.
fn check_tokens(shard: &Shard, tokenizer: &Tokenizer) -> Result<(), DataError> {
    let Some(found) = shard.first_out_of_range(tokenizer.vocab_size())? else { return Ok(()) };
    let reason = format!(
        "it holds token {} at position {}, and the tokenizer {} that it was made with has tokens 0 to {}",
        found.token,
        found.position,
        tokenizer.name(),
        tokenizer.vocab_size() - 1
    );
    Err(unusable(shard.path(), reason, COPY_AGAIN))
}

/// The blocks to compare of `count`: both ends first, then evenly spaced ones between. Always the
/// same ones.
fn sample(count: usize) -> Vec<usize> {
    if count <= SAMPLED_BLOCKS {
        return (0..count).collect();
    }
    let spaced = (1..SAMPLED_BLOCKS - 1).map(|n| n * (count - 1) / (SAMPLED_BLOCKS - 1));
    [0, count - 1].into_iter().chain(spaced).collect()
}

/// Compares blocks with their checksums in the manifests.
///
/// # Errors
/// [`DataError::DamagedBlock`] for the first block that differs.
pub(crate) fn check_blocks(mut blocks: Vec<BlockCheck>) -> Result<(), DataError> {
    // Stable: the shards keep their order.
    blocks.sort_by_key(|check| check.rank);
    let started = Instant::now();
    for (done, part) in blocks.chunks(BLOCKS_AT_ONCE).enumerate() {
        if started.elapsed() > MOST_TIME {
            tracing::info!(
                "compared {} of {} sampled blocks of the shards with their checksums in {} s; `longwall verify` checks every byte",
                done * BLOCKS_AT_ONCE,
                blocks.len(),
                MOST_TIME.as_secs()
            );
            break;
        }
        if let Some(error) = part.par_iter().find_map_first(damage) {
            return Err(error);
        }
    }
    Ok(())
}

fn damage(check: &BlockCheck) -> Option<DataError> {
    let sums = check.entry.blocks.as_ref()?;
    let range = sums.range(check.block, check.shard.length());
    let found = match check.shard.crc32c(range.clone()) {
        Ok(found) => found,
        Err(error) => return Some(error),
    };
    let expected = sums.crc32c[check.block];
    let path: PathBuf = check.shard.path().into();
    (found != expected).then(|| DataError::DamagedBlock {
        manifest: path.with_file_name(MANIFEST_FILE),
        path,
        start: range.start,
        end: range.end - 1,
        expected,
        found,
    })
}

#[cfg(test)]
mod tests;
