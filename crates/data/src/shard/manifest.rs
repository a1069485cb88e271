//! The manifest that `prepare` writes beside the shards.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::checksums::BlockChecksums;
use crate::{DataError, Tokenizer, files};

/// The manifest's name in the folder of shards.
pub const MANIFEST_FILE: &str = "manifest.json";

const FORMAT: &str = "longwall-shards-1";

/// Describes a folder of shards. Written last: a folder with a manifest is complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The manifest's own format and version.
    pub format: String,
    /// SHA-256 of the options and the inputs: the same key gives the same shards.
    pub key: String,
    /// The tokenizer the shards were made with.
    pub tokenizer: TokenizerStamp,
    /// What was read, in words.
    pub corpus: String,
    /// Input files that were found.
    pub inputs: u64,
    /// Documents in both splits.
    pub documents: u64,
    /// Tokens in both splits, ends of text included.
    pub tokens: u64,
    /// Bytes of text in both splits.
    pub bytes: u64,
    /// How long documents are, in tokens without the end of text.
    pub lengths: LengthSummary,
    /// What was skipped or repaired.
    pub skipped: Skipped,
    /// The training split.
    pub train: SplitSummary,
    /// The validation split.
    pub validation: SplitSummary,
}

/// Which tokenizer shards were made with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerStamp {
    /// [`Tokenizer::name`].
    pub name: String,
    /// [`Tokenizer::fingerprint`].
    pub fingerprint: String,
    /// [`Tokenizer::vocab_size`].
    pub vocab_size: usize,
    /// [`Tokenizer::end_of_text`].
    pub end_of_text: u32,
}

impl TokenizerStamp {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        TokenizerStamp {
            name: tokenizer.name().into(),
            fingerprint: tokenizer.fingerprint(),
            vocab_size: tokenizer.vocab_size(),
            end_of_text: tokenizer.end_of_text(),
        }
    }
}

/// One split of a prepared corpus.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SplitSummary {
    /// Documents.
    pub documents: u64,
    /// Tokens, ends of text included.
    pub tokens: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name, in the manifest's folder.
    pub file: String,
    /// Tokens in it.
    pub tokens: u64,
    /// SHA-256 of the file, in hex.
    pub sha256: String,
    /// Checksums of its blocks. Manifests of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<BlockChecksums>,
}

/// What `prepare` skipped or repaired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Documents without text.
    pub empty: u64,
    /// Files of a folder that hold binary data.
    pub binary: u64,
    /// Documents with bytes that are not UTF-8, which became U+FFFD.
    pub invalid_utf8: u64,
}

/// The distribution of document lengths. Quantiles are within 1.6 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LengthSummary {
    /// Shortest.
    pub min: u64,
    /// Half are shorter.
    pub median: u64,
    /// Mean.
    pub mean: f64,
    /// 95 % are shorter.
    pub p95: u64,
    /// Longest.
    pub max: u64,
}

impl Display for LengthSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LengthSummary { min, median, mean, p95, max } = self;
        write!(f, "min {min}, median {median}, mean {mean:.1}, p95 {p95}, max {max}")
    }
}

impl Manifest {
    pub(crate) fn format() -> String {
        FORMAT.into()
    }

    /// Reads the manifest of `folder`, if it has one.
    pub(crate) fn read(folder: &Path) -> Result<Option<Self>, DataError> {
        let path = folder.join(MANIFEST_FILE);
        let content = match std::fs::read(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::read(&path, error)),
        };
        let fail = |reason: String| DataError::Metadata {
            path: path.clone(),
            reason,
            hint: "prepare the shards again, or remove the manifest to use them without it".into(),
        };
        let manifest: Manifest =
            serde_json::from_slice(&content).map_err(|error| fail(error.to_string()))?;
        if manifest.format != FORMAT {
            return Err(fail(format!(
                "its format is {:?}; this version reads {FORMAT:?}",
                manifest.format
            )));
        }
        manifest.check().map_err(fail)?;
        Ok(Some(manifest))
    }

    /// Checks what would mislead a reader: names outside the folder, and counts that disagree.
    fn check(&self) -> Result<(), String> {
        for shard in self.shards() {
            if Path::new(&shard.file).file_name().is_none_or(|name| name != shard.file.as_str()) {
                return Err(format!("it lists \"{}\", which is no file name", shard.file));
            }
        }
        for (split, name) in [(&self.train, "training"), (&self.validation, "validation")] {
            let sum =
                split.shards.iter().try_fold(0u64, |sum, shard| sum.checked_add(shard.tokens));
            if sum != Some(split.tokens) {
                return Err(format!(
                    "it says {} {name} tokens, and its shards have another number of them",
                    split.tokens
                ));
            }
        }
        Ok(())
    }

    /// The shards of both splits.
    pub(crate) fn shards(&self) -> impl Iterator<Item = &ShardEntry> {
        self.train.shards.iter().chain(&self.validation.shards)
    }

    /// The entry of the file, if it is one of this manifest's shards.
    pub(crate) fn entry(&self, path: &Path) -> Option<&ShardEntry> {
        let name = path.file_name()?;
        self.shards().find(|shard| name == shard.file.as_str())
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<(), DataError> {
        write_json(&folder.join(MANIFEST_FILE), self)
    }
}

/// Writes JSON to a temporary file in the same folder and renames it: readers see all of it or nothing.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), DataError> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| DataError::write(path, error.into()))?;
    text.push('\n');
    write_atomically(path, text.as_bytes())
}

/// Writes a file under a temporary name in the same folder and renames it.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> Result<(), DataError> {
    files::write_atomically(path, content).map_err(|source| DataError::write(path, source))
}

/// Counts lengths in buckets: exact below 64, then 32 buckets for every doubling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LengthHistogram {
    buckets: BTreeMap<u32, u64>,
    count: u64,
    sum: u64,
    min: u64,
    max: u64,
}

impl LengthHistogram {
    pub(crate) fn add(&mut self, length: u64) {
        *self.buckets.entry(bucket(length)).or_default() += 1;
        self.min = if self.count == 0 { length } else { self.min.min(length) };
        self.max = self.max.max(length);
        self.count += 1;
        self.sum += length;
    }

    pub(crate) fn summary(&self) -> LengthSummary {
        LengthSummary {
            min: self.min,
            median: self.quantile(0.5),
            mean: self.sum as f64 / self.count.max(1) as f64,
            p95: self.quantile(0.95),
            max: self.max,
        }
    }

    fn quantile(&self, share: f64) -> u64 {
        let rank = (share * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (&bucket, &count) in &self.buckets {
            seen += count;
            if seen >= rank {
                return middle(bucket).clamp(self.min, self.max);
            }
        }
        self.max
    }
}

fn bucket(length: u64) -> u32 {
    if length < 64 {
        return length as u32;
    }
    let doublings = length.ilog2();
    64 + (doublings - 6) * 32 + ((length >> (doublings - 5)) & 31) as u32
}

/// The middle of a bucket's lengths.
fn middle(bucket: u32) -> u64 {
    if bucket < 64 {
        return u64::from(bucket);
    }
    let (doublings, step) = (6 + (bucket - 64) / 32, u64::from((bucket - 64) % 32));
    let width = 1u64 << (doublings - 5);
    (32 + step) * width + width / 2
}
