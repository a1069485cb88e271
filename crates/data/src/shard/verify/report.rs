//! The full check: every byte of every shard.

use std::collections::HashSet;
use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::expected_bytes;
use crate::shard::checksums::{BLOCK_BYTES, BlockChecksums, Checksums, checksums};
use crate::shard::manifest::{MANIFEST_FILE, Manifest, ShardEntry};
use crate::{DataError, Progress};

/// What [`verify_shards`] found about one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardState {
    /// Every byte is what the manifest says.
    Sound,
    /// The file differs from the manifest, or cannot be read.
    Damaged {
        /// How, in words.
        reason: String,
    },
    /// The manifest lists it, and it is not there.
    Missing,
    /// It is there, and the manifest does not list it.
    NotListed,
}

/// One file of a [`VerifyReport`]. Displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedShard {
    /// The file.
    pub path: PathBuf,
    /// What was found.
    pub state: ShardState,
}

impl Display for VerifiedShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.state {
            ShardState::Sound => write!(f, "ok"),
            ShardState::Damaged { reason } => write!(f, "damaged: {reason}"),
            ShardState::Missing => write!(f, "missing"),
            ShardState::NotListed => write!(f, "not listed in {MANIFEST_FILE}"),
        }
    }
}

/// The result of [`verify_shards`]. Displays as one line per file, and a summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// The folder.
    pub folder: PathBuf,
    /// The shards that the manifest lists, in its order, and then the files that it does not list.
    pub shards: Vec<VerifiedShard>,
    /// Bytes read.
    pub bytes: u64,
}

impl VerifyReport {
    /// Whether every shard is there and undamaged, and none is unlisted.
    pub fn is_sound(&self) -> bool {
        self.unsound().next().is_none()
    }

    /// The files that are damaged, missing or not listed.
    pub fn unsound(&self) -> impl Iterator<Item = &VerifiedShard> {
        self.shards.iter().filter(|shard| shard.state != ShardState::Sound)
    }

    /// The report as a result.
    ///
    /// # Errors
    /// [`DataError::Unverified`], which counts the files that are not sound and names the first.
    pub fn into_result(self) -> Result<VerifyReport, DataError> {
        let Some(first) = self.unsound().next().map(VerifiedShard::to_string) else {
            return Ok(self);
        };
        let (bad, count) = (self.unsound().count(), self.shards.len());
        Err(DataError::Unverified { path: self.folder, bad, count, first })
    }
}

impl Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for shard in &self.shards {
            writeln!(f, "{shard}")?;
        }
        let (bad, megabytes) = (self.unsound().count(), self.bytes as f64 / 1e6);
        let (count, folder) = (self.shards.len(), self.folder.display());
        write!(f, "{} of {count} shards in {folder} are ok ({megabytes:.1} MB read)", count - bad)
    }
}

/// Compares every byte of the shards in `folder` with its manifest: SHA-256, size, and that no shard is
/// missing or unlisted. Shards are read in parallel.
///
/// ```no_run
/// use std::path::Path;
/// use longwall_data::{NoProgress, verify_shards};
///
/// let report = verify_shards(Path::new("data/shards"), &NoProgress)?;
/// println!("{report}");
/// report.into_result()?;
/// # Ok::<(), longwall_data::DataError>(())
/// ```
///
/// # Errors
/// When the folder is missing or has no manifest ([`DataError::NoManifest`]), when the manifest is
/// malformed, or when `progress` reports that the user cancelled
/// ([`DataError::VerificationInterrupted`]). Damaged shards are no errors: they are in the report, and
/// [`VerifyReport::into_result`] makes an error of them.
pub fn verify_shards(folder: &Path, progress: &dyn Progress) -> Result<VerifyReport, DataError> {
    let unlisted_files = shard_files(folder)?;
    let manifest = Manifest::read(folder)?
        .ok_or_else(|| DataError::NoManifest { path: folder.to_path_buf() })?;
    let entries: Vec<&ShardEntry> = manifest.shards().collect();
    let size = |entry: &&ShardEntry| {
        std::fs::metadata(folder.join(&entry.file)).map_or(0, |metadata| metadata.len())
    };
    let total: u64 = entries.iter().map(size).sum();
    progress.start(&format!("verifying {}", folder.display()), Some(total));
    let vocab_size = manifest.tokenizer.vocab_size;
    let verify = |entry: &&ShardEntry| VerifiedShard {
        path: folder.join(&entry.file),
        state: state(folder, entry, vocab_size, progress),
    };
    let mut shards: Vec<VerifiedShard> = entries.par_iter().map(verify).collect();
    if progress.cancelled() {
        return Err(DataError::VerificationInterrupted { path: folder.to_path_buf() });
    }
    let listed: HashSet<PathBuf> = shards.iter().map(|shard| shard.path.clone()).collect();
    let unlisted = unlisted_files.into_iter().filter(|path| !listed.contains(path));
    shards.extend(unlisted.map(|path| VerifiedShard { path, state: ShardState::NotListed }));
    let report = VerifyReport { folder: folder.to_path_buf(), shards, bytes: total };
    let bad = report.unsound().count();
    let count = report.shards.len();
    progress.finish(&format!("{}: {} of {count} shards are ok", folder.display(), count - bad));
    Ok(report)
}

/// The `.bin` files of a folder, sorted.
fn shard_files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    if !folder.exists() {
        let hint = "check the spelling; relative paths start at the folder the command runs in";
        let path = folder.to_path_buf();
        return Err(DataError::Missing { what: "folder", path, hint: hint.into() });
    }
    let fail = |source| DataError::read(folder, source);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|extension| extension == "bin") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn state(
    folder: &Path,
    entry: &ShardEntry,
    vocab_size: usize,
    progress: &dyn Progress,
) -> ShardState {
    let path = folder.join(&entry.file);
    let length = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
    let blocks = entry.blocks.as_ref().filter(|blocks| blocks.fits(length));
    let block_bytes = blocks.map_or(BLOCK_BYTES, |blocks| blocks.bytes);
    let advance = |bytes| {
        progress.advance(bytes);
        if progress.cancelled() { Err(io::Error::other("cancelled")) } else { Ok(()) }
    };
    match checksums(&path, block_bytes, advance) {
        Ok(found) => match difference(&found, entry, vocab_size) {
            None => ShardState::Sound,
            Some(reason) => ShardState::Damaged { reason },
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => ShardState::Missing,
        Err(error) => ShardState::Damaged { reason: format!("cannot read it: {error}") },
    }
}

/// What differs, in words.
fn difference(found: &Checksums, entry: &ShardEntry, vocab_size: usize) -> Option<String> {
    match expected_bytes(entry, vocab_size) {
        Some(expected) if expected == found.bytes => {}
        expected => {
            let expected = expected.map_or("too many".into(), |bytes| bytes.to_string());
            return Some(format!("it has {} bytes; expected {expected}", found.bytes));
        }
    }
    let short = |hash: &str| hash.chars().take(16).collect::<String>();
    let sha256 = (found.sha256 != entry.sha256).then(|| {
        format!("its SHA-256 is {}…; expected {}…", short(&found.sha256), short(&entry.sha256))
    });
    let blocks = entry.blocks.as_ref().and_then(|expected| differing_blocks(found, expected));
    match (sha256, blocks) {
        (Some(sha256), Some(blocks)) => Some(format!("{sha256}; {blocks}")),
        (sha256, blocks) => sha256.or(blocks),
    }
}

/// Which blocks differ, in words.
fn differing_blocks(found: &Checksums, expected: &BlockChecksums) -> Option<String> {
    let count = expected.crc32c.len();
    if !expected.fits(found.bytes) {
        return Some(format!(
            "{MANIFEST_FILE} has {count} checksums of blocks, too many or too few"
        ));
    }
    let pairs = expected.crc32c.iter().zip(&found.blocks.crc32c).enumerate();
    let bad: Vec<usize> = pairs.filter(|(_, (a, b))| a != b).map(|(at, _)| at).collect();
    let range = expected.range(*bad.first()?, found.bytes);
    let (first, last) = (range.start, range.end - 1);
    Some(format!(
        "{} of {count} blocks differ, the first one in bytes {first} to {last}",
        bad.len()
    ))
}
