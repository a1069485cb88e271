//! Streams the documents of a corpus, in order, from any position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};

use super::{Compression, Corpus, Document, Format, InputFile, Inputs, Payload};
use crate::DataError;

/// The most bytes of one document, decompressed. Encoding one takes several times as much memory.
pub(crate) const MOST_DOCUMENT_BYTES: u64 = 1 << 30;

/// The error for a document of more than `most` bytes, in words if its size is not known.
pub(crate) fn too_large(file: &InputFile, size: Option<u64>, most: u64) -> DataError {
    let hint = match file.format {
        Format::Plain => {
            "split the file, or set separator (--separator) to the text that stands between its documents"
        }
        Format::JsonLines => "split the text of that line into several lines",
        Format::Parquet => "split the text of that row into several rows",
    };
    DataError::DocumentTooLarge {
        path: file.path.clone(),
        size: size.map_or_else(|| format!("more than {most}"), |size| size.to_string()),
        most,
        hint: hint.into(),
    }
}

/// Reads to the end, or fails if there are more than `most` bytes.
pub(crate) fn read_document(
    reader: impl Read,
    file: &InputFile,
    most: u64,
) -> Result<Vec<u8>, DataError> {
    let mut text = Vec::new();
    let count = reader
        .take(most.saturating_add(1))
        .read_to_end(&mut text)
        .map_err(|error| read_error(file, error))?;
    if count as u64 > most { Err(too_large(file, None, most)) } else { Ok(text) }
}

/// The next document to read: a file, and how many of its documents come before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// Index of the input file.
    pub input: usize,
    /// Documents of that file before this one.
    pub document: u64,
}

/// Counts the bytes of input read (compressed, for compressed files).
#[derive(Clone, Debug, Default)]
pub struct ReadBytes(Arc<AtomicU64>);

impl ReadBytes {
    /// Adds `bytes`.
    pub fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes added since the last call.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// Why reading stopped before the end.
#[derive(Debug)]
pub enum Stop {
    /// The receiver wants no more.
    Closed,
    /// The input cannot be read.
    Failed(DataError),
}

impl From<DataError> for Stop {
    fn from(error: DataError) -> Self {
        Stop::Failed(error)
    }
}

/// Receives the documents that a corpus reads.
pub struct Sink<'a> {
    start: Position,
    read_bytes: &'a ReadBytes,
    emit: &'a mut dyn FnMut(Document, Position) -> bool,
}

impl<'a> Sink<'a> {
    /// The first document to pass on.
    pub fn start(&self) -> Position {
        self.start
    }

    /// The count of bytes read.
    pub fn read_bytes(&self) -> &'a ReadBytes {
        self.read_bytes
    }

    /// Receives the documents of the file at index `input`, all of them and in order.
    pub fn file(&mut self, input: usize) -> FileDocuments<'_, 'a> {
        let skipped = match input.cmp(&self.start.input) {
            std::cmp::Ordering::Less => u64::MAX,
            std::cmp::Ordering::Equal => self.start.document,
            std::cmp::Ordering::Greater => 0,
        };
        FileDocuments { input, skipped, count: 0, sink: self }
    }
}

/// Receives the documents of one file, and skips those before [`Sink::start`].
pub struct FileDocuments<'s, 'a> {
    input: usize,
    skipped: u64,
    count: u64,
    sink: &'s mut Sink<'a>,
}

impl FileDocuments<'_, '_> {
    /// Receives the next document.
    ///
    /// # Errors
    /// [`Stop::Closed`] when the receiver wants no more.
    pub fn emit(&mut self, payload: Payload) -> Result<(), Stop> {
        self.emit_grouped(payload, None)
    }

    /// Receives the next document; all documents of one `group` are in the same split.
    ///
    /// # Errors
    /// As [`emit`](Self::emit).
    pub fn emit_grouped(&mut self, payload: Payload, group: Option<String>) -> Result<(), Stop> {
        self.count += 1;
        if self.count <= self.skipped {
            return Ok(());
        }
        let document = Document { input: self.input, payload, group };
        let next = Position { input: self.input, document: self.count };
        if (self.sink.emit)(document, next) { Ok(()) } else { Err(Stop::Closed) }
    }
}

/// Passes the documents of a corpus from `start` on to `emit`, in order, each with the position
/// after it, until `emit` returns false.
pub(crate) fn read(
    corpus: &dyn Corpus,
    inputs: &Inputs,
    start: Position,
    read_bytes: &ReadBytes,
    emit: &mut dyn FnMut(Document, Position) -> bool,
) -> Result<(), DataError> {
    match corpus.read(inputs, &mut Sink { start, read_bytes, emit }) {
        Ok(()) | Err(Stop::Closed) => Ok(()),
        Err(Stop::Failed(error)) => Err(error),
    }
}

/// Opens a file for reading; decompresses it and counts the bytes read.
pub(crate) fn open(
    file: &InputFile,
    read_bytes: &ReadBytes,
) -> Result<Box<dyn BufRead>, DataError> {
    const BUFFER: usize = 256 * 1024;
    let raw = File::open(&file.path).map_err(|source| DataError::read(&file.path, source))?;
    let raw = BufReader::with_capacity(BUFFER, Counted { raw, read_bytes: read_bytes.clone() });
    Ok(match file.compression {
        Compression::None => Box::new(raw),
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(raw))),
        Compression::Zstd => {
            let decoder =
                zstd::Decoder::with_buffer(raw).map_err(|error| read_error(file, error))?;
            Box::new(BufReader::with_capacity(BUFFER, decoder))
        }
    })
}

/// The error of reading from the reader that [`open`] returned.
pub(crate) fn read_error(file: &InputFile, source: io::Error) -> DataError {
    match file.compression {
        Compression::None => DataError::read(&file.path, source),
        codec => DataError::Decompress { path: file.path.clone(), codec: codec.name(), source },
    }
}

struct Counted {
    raw: File,
    read_bytes: ReadBytes,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.raw.read(buffer)?;
        self.read_bytes.add(count as u64);
        Ok(count)
    }
}
