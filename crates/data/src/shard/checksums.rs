//! The checksums of a shard: SHA-256 of the file, and CRC-32C of each of its blocks.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Bytes of a block in the manifests that `prepare` writes.
pub(crate) const BLOCK_BYTES: u64 = 4 << 20;

/// The CRC-32C (Castagnoli) of every block of a file, so that a part of it can be checked without
/// reading the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockChecksums {
    /// Bytes of a block; the last one may be shorter.
    pub bytes: u64,
    /// The CRC-32C of each block, in order from the start of the file.
    pub crc32c: Vec<u32>,
}

impl BlockChecksums {
    /// Whether these are the blocks of a file of `length` bytes.
    pub(crate) fn fits(&self, length: u64) -> bool {
        self.bytes > 0 && length.div_ceil(self.bytes) == self.crc32c.len() as u64
    }

    /// The bytes of block `at` of a file of `length` bytes.
    pub(crate) fn range(&self, at: usize, length: u64) -> Range<u64> {
        let start = at as u64 * self.bytes;
        start..(start + self.bytes).min(length)
    }
}

/// What [`checksums`] finds in a file.
pub(crate) struct Checksums {
    /// The file's size.
    pub(crate) bytes: u64,
    /// SHA-256 of the file, in hex.
    pub(crate) sha256: String,
    /// The checksums of its blocks.
    pub(crate) blocks: BlockChecksums,
}

/// Reads a file once and computes its checksums, in blocks of `block_bytes`. Calls `advance` with the
/// bytes read; an error of it ends the reading.
pub(crate) fn checksums(
    path: &Path,
    block_bytes: u64,
    mut advance: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Checksums> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut sha = Sha256::new();
    let (mut crc32c, mut open, mut bytes) = (Vec::new(), None, 0u64);
    loop {
        let left = block_bytes - bytes % block_bytes;
        let most = left.min(buffer.len() as u64) as usize;
        let count = file.read(&mut buffer[..most])?;
        if count == 0 {
            break;
        }
        let read = &buffer[..count];
        sha.update(read);
        let crc = crc32c::crc32c_append(open.unwrap_or(0), read);
        bytes += count as u64;
        open = if bytes.is_multiple_of(block_bytes) {
            crc32c.push(crc);
            None
        } else {
            Some(crc)
        };
        advance(count as u64)?;
    }
    crc32c.extend(open);
    let sha256 = crate::tokenizer::hex(&sha.finalize());
    Ok(Checksums { bytes, sha256, blocks: BlockChecksums { bytes: block_bytes, crc32c } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_those_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let content: Vec<u8> = (0..2500u32).map(|n| (n * n) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        for block in [1, 7, 1000, 2500, 4096] {
            let found = checksums(&path, block, |_| Ok(())).unwrap();
            let expected: Vec<u32> = content.chunks(block as usize).map(crc32c::crc32c).collect();
            assert_eq!((found.bytes, &found.blocks.crc32c), (2500, &expected));
            assert!(found.blocks.fits(2500) && found.blocks.range(0, 2500).start == 0);
            assert_eq!(found.blocks.range(expected.len() - 1, 2500).end, 2500);
        }
        // The check value of CRC-32C.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }
}
