//! Text to encode: the [`Corpus`] trait, and the types that its implementations share.

pub(crate) mod discover;
mod document;
mod reader;

use std::fmt::Debug;
use std::path::PathBuf;

use crate::DataError;

pub use document::{Decoded, DecodedText, Document, Payload};
pub use reader::{FileDocuments, Position, ReadBytes, Sink, Stop};
pub(crate) use reader::{MOST_DOCUMENT_BYTES, open, read, read_document, read_error, too_large};

/// Text in documents: [`prepare`](crate::prepare()) encodes it into shards, and
/// [`train_bpe`](crate::train_bpe) trains a tokenizer on it.
pub trait Corpus: Debug + Send + Sync {
    /// The corpus in words, for manifests.
    fn describe(&self) -> String;

    /// The settings that, besides the input files, determine the documents. They are part of the cache
    /// key of prepared shards: with other settings, the text is prepared again.
    fn settings(&self) -> String;

    /// Whether cached text stays valid even if the input files change. If not, their paths, sizes and
    /// modification times are part of the key.
    fn is_frozen_in_cache(&self) -> bool {
        false
    }

    /// Whether the inputs are a single document: then the end of its text is held out for validation.
    fn is_one_document(&self, _inputs: &Inputs) -> bool {
        false
    }

    /// Finds the input files.
    ///
    /// # Errors
    /// When a file or folder is missing, or nothing can be read.
    fn find(&self) -> Result<Inputs, DataError>;

    /// Passes the documents to `sink`, in an order that depends only on `inputs`. Those before
    /// [`Sink::start`] may be skipped.
    ///
    /// # Errors
    /// [`Stop::Failed`] for input that cannot be read, and [`Stop::Closed`] from the sink.
    fn read(&self, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop>;
}

/// The input files of a corpus, in the order in which they are read.
#[derive(Debug)]
pub struct Inputs {
    /// The files.
    pub files: Vec<InputFile>,
    /// Bytes to read (compressed, for compressed files); for progress.
    pub total_bytes: u64,
}

impl Inputs {
    /// Files that are read to their end.
    pub fn new(files: Vec<InputFile>) -> Self {
        let total_bytes = files.iter().map(|file| file.bytes).sum();
        Inputs { files, total_bytes }
    }
}

/// One input file.
#[derive(Clone, Debug)]
pub struct InputFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its format, from its name.
    pub format: Format,
    /// Its compression, from its name.
    pub compression: Compression,
    /// Its size on the disk.
    pub bytes: u64,
    /// Modification time, in nanoseconds since 1970.
    pub modified: u128,
    /// Whether the user named this file itself: then it must be text.
    pub named: bool,
}

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain text.
    Plain,
    /// One JSON object per line.
    JsonLines,
    /// A Parquet table.
    Parquet,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// The name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Compression::None => "plain",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        }
    }
}
