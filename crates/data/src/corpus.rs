//! Text to be encoded: the [`Corpus`] trait, and what its implementations share.

pub(crate) mod discover;
mod document;
mod reader;

use std::fmt::Debug;
use std::path::PathBuf;

use crate::DataError;

pub use document::{DecodedText, Document, Outcome, Payload};
pub use reader::{FileDocuments, Position, ReadBytes, Sink, Stop};
pub(crate) use reader::{open, read, read_error};

/// Text in documents: what [`prepare`](crate::prepare()) encodes into shards, and
/// [`train_bpe`](crate::train_bpe) learns from.
pub trait Corpus: Debug + Send + Sync {
    /// The corpus in words, for manifests.
    fn describe(&self) -> String;

    /// What decides the documents beside the input files. It is part of the key that prepared
    /// shards are found by: with other settings, the text is prepared again.
    fn settings(&self) -> String;

    /// Whether text in the cache stays valid whatever happens to the input files. If not, their
    /// paths, sizes and times of change are part of the key.
    fn is_frozen_in_cache(&self) -> bool {
        false
    }

    /// Finds the input files.
    ///
    /// # Errors
    /// When a file or folder is missing, or nothing can be read.
    fn find(&self) -> Result<Inputs, DataError>;

    /// Hands the documents to `sink`, in an order that depends on `inputs` alone. Those in front of
    /// [`Sink::start`] may be left out.
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
    /// Bytes that will be read, compressed where the files are; for progress.
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
    /// What it holds, by its name.
    pub format: Format,
    /// How it is compressed, by its name.
    pub compression: Compression,
    /// Its size on the disk.
    pub bytes: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified: u128,
    /// Whether the user named this very file: then it must be text.
    pub named: bool,
}

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain text.
    Plain,
    /// One JSON object a line.
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
