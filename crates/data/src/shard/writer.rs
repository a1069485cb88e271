//! Writing shards: resumable, and under a temporary name until they are complete.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checksums::{BLOCK_BYTES, Checksums, checksums};
use super::manifest::ShardEntry;
use super::{HEADER_BYTES, Width, header};
use crate::DataError;

/// The progress of a split: enough to continue it after an interruption.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SplitState {
    /// Complete shards.
    pub(crate) shards: Vec<ShardEntry>,
    /// Tokens in the open shard.
    pub(crate) open_tokens: u64,
}

/// Writes the tokens of one split into shards of equal size; a document may begin in one shard
/// and end in the next.
pub(crate) struct SplitWriter {
    folder: PathBuf,
    /// `{name}_train` or `{name}_val`.
    stem: String,
    /// Number of the first shard: llm.c numbers training shards from 1, and validation is 0.
    first: usize,
    width: Width,
    shard_tokens: u64,
    state: SplitState,
    open: Option<BufWriter<File>>,
    encoded: Vec<u8>,
}

impl SplitWriter {
    pub(crate) fn new(
        folder: &Path,
        stem: String,
        first: usize,
        width: Width,
        shard_tokens: u64,
    ) -> Self {
        SplitWriter {
            folder: folder.to_path_buf(),
            stem,
            first,
            width,
            shard_tokens,
            state: SplitState::default(),
            open: None,
            encoded: Vec::new(),
        }
    }

    /// Continues from `state`: truncates what was written after it.
    pub(crate) fn resume(&mut self, state: SplitState) -> Result<(), DataError> {
        self.state = state;
        if self.state.open_tokens == 0 {
            return Ok(());
        }
        let (partial, whole) = self.paths();
        let fail = |source| DataError::write(&partial, source);
        // The shard may have been finished after its state was saved.
        if !partial.exists() && whole.exists() {
            std::fs::rename(&whole, &partial).map_err(fail)?;
        }
        let mut file = OpenOptions::new().write(true).open(&partial).map_err(fail)?;
        let length = HEADER_BYTES + self.state.open_tokens * self.width.bytes();
        let found = file.metadata().map_err(fail)?.len();
        if found < length {
            return Err(DataError::Shard {
                path: partial,
                reason: format!("it was interrupted at {length} bytes, and has {found}"),
                hint: format!("delete {} and prepare it again", self.folder.display()),
            });
        }
        file.set_len(length).and_then(|()| file.seek(SeekFrom::End(0))).map_err(fail)?;
        self.open = Some(BufWriter::with_capacity(1 << 20, file));
        Ok(())
    }

    /// Appends tokens.
    pub(crate) fn push(&mut self, mut tokens: &[u32]) -> Result<(), DataError> {
        while !tokens.is_empty() {
            let room = (self.shard_tokens - self.state.open_tokens) as usize;
            let (part, rest) = tokens.split_at(room.min(tokens.len()));
            self.write(part).map_err(|source| DataError::write(&self.paths().0, source))?;
            self.state.open_tokens += part.len() as u64;
            if self.state.open_tokens == self.shard_tokens {
                self.finish_shard()?;
            }
            tokens = rest;
        }
        Ok(())
    }

    fn write(&mut self, tokens: &[u32]) -> io::Result<()> {
        if self.open.is_none() {
            let mut file = BufWriter::with_capacity(1 << 20, File::create(self.paths().0)?);
            // Zeros, so that an unfinished file is no valid shard.
            file.write_all(&[0; HEADER_BYTES as usize])?;
            self.open = Some(file);
        }
        self.encoded.clear();
        match self.width {
            Width::U16 => {
                tokens.iter().for_each(|&token| self.encoded.extend((token as u16).to_le_bytes()))
            }
            Width::U32 => tokens.iter().for_each(|token| self.encoded.extend(token.to_le_bytes())),
        }
        match &mut self.open {
            Some(file) => file.write_all(&self.encoded),
            None => Ok(()),
        }
    }

    /// Flushes everything written so far to disk, and returns the split's progress.
    pub(crate) fn sync(&mut self) -> Result<SplitState, DataError> {
        if let Some(file) = &mut self.open {
            let synced = file.flush().and_then(|()| file.get_ref().sync_data());
            synced.map_err(|source| DataError::write(&self.paths().0, source))?;
        }
        Ok(self.state.clone())
    }

    /// Completes the open shard, if there is one, and returns all shards.
    pub(crate) fn finish(mut self) -> Result<Vec<ShardEntry>, DataError> {
        if self.state.open_tokens > 0 {
            self.finish_shard()?;
        }
        Ok(self.state.shards)
    }

    fn finish_shard(&mut self) -> Result<(), DataError> {
        let (partial, whole) = self.paths();
        let tokens = self.state.open_tokens;
        let close = |open: Option<BufWriter<File>>| -> io::Result<()> {
            let Some(file) = open else { return Ok(()) };
            let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header(self.width, tokens))?;
            file.sync_data()
        };
        close(self.open.take()).map_err(|source| DataError::write(&partial, source))?;
        let read = |source| DataError::read(&partial, source);
        let Checksums { sha256, blocks, .. } =
            checksums(&partial, BLOCK_BYTES, |_| Ok(())).map_err(read)?;
        std::fs::rename(&partial, &whole).map_err(|source| DataError::write(&whole, source))?;
        let file =
            whole.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.state.shards.push(ShardEntry { file, tokens, sha256, blocks: Some(blocks) });
        self.state.open_tokens = 0;
        Ok(())
    }

    /// The temporary and the final path of the open shard.
    fn paths(&self) -> (PathBuf, PathBuf) {
        let name = format!("{}_{:06}.bin", self.stem, self.first + self.state.shards.len());
        (self.folder.join(format!(".{name}.partial")), self.folder.join(name))
    }
}
