//! Streams the documents of a corpus, in order, from any position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};

use super::document::Payload;
use super::{Compression, Document, Format, InputFile, Inputs, Reading, cargo, parquet};
use crate::DataError;

/// The next document to read: a file, and how many of its documents are done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) input: usize,
    pub(crate) document: u64,
}

/// Counts the bytes of input that were read, compressed where the files are.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadBytes(Arc<AtomicU64>);

impl ReadBytes {
    pub(crate) fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes counted since the last call.
    pub(crate) fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

/// Why reading stopped before the end.
pub(crate) enum Stop {
    /// The receiver wants no more.
    Closed,
    Failed(DataError),
}

impl From<DataError> for Stop {
    fn from(error: DataError) -> Self {
        Stop::Failed(error)
    }
}

/// Takes a document and the position behind it; false ends the reading.
pub(crate) type Emit<'a> = dyn FnMut(Document, Position) -> bool + 'a;

/// Hands the documents from `start` on to `emit`, in order.
pub(crate) fn read(
    inputs: &Inputs,
    start: Position,
    read_bytes: &ReadBytes,
    emit: &mut Emit,
) -> Result<(), DataError> {
    let result = match &inputs.reading {
        Reading::Cargo { folder, max_bytes } => {
            cargo::read(inputs, folder, *max_bytes, start, read_bytes, emit)
        }
        Reading::Files { text_field, separator } => {
            read_files(inputs, text_field, separator.as_deref(), start, read_bytes, emit)
        }
    };
    match result {
        Ok(()) | Err(Stop::Closed) => Ok(()),
        Err(Stop::Failed(error)) => Err(error),
    }
}

fn read_files(
    inputs: &Inputs,
    text_field: &str,
    separator: Option<&str>,
    start: Position,
    read_bytes: &ReadBytes,
    emit: &mut Emit,
) -> Result<(), Stop> {
    read_bytes.add(inputs.files[..start.input].iter().map(|file| file.bytes).sum());
    for (input, file) in inputs.files.iter().enumerate().skip(start.input) {
        let skip = if input == start.input { start.document } else { 0 };
        let mut out = Output { input, skip, done: 0, emit };
        match (file.format, separator) {
            (Format::Parquet, _) => parquet::read(file, text_field, read_bytes, &mut out)?,
            (Format::JsonLines, _) => read_lines(file, read_bytes, &mut out)?,
            (Format::Plain, Some(separator)) => {
                read_separated(file, separator, read_bytes, &mut out)?
            }
            (Format::Plain, None) if file.compression == Compression::None => {
                out.emit(0, Payload::File)?;
                read_bytes.add(file.bytes);
            }
            (Format::Plain, None) => {
                let mut text = Vec::new();
                open(file, read_bytes)?
                    .read_to_end(&mut text)
                    .map_err(|error| read_error(file, error))?;
                out.emit(0, Payload::Text(text))?;
            }
        }
    }
    Ok(())
}

/// Counts one file's documents and leaves out those that are done.
pub(crate) struct Output<'a, 'b> {
    input: usize,
    skip: u64,
    done: u64,
    emit: &'a mut Emit<'b>,
}

impl Output<'_, '_> {
    pub(crate) fn emit(&mut self, line: u64, payload: Payload) -> Result<(), Stop> {
        self.done += 1;
        if self.done <= self.skip {
            return Ok(());
        }
        let document = Document { input: self.input, line, payload, group: None };
        let next = Position { input: self.input, document: self.done };
        if (self.emit)(document, next) { Ok(()) } else { Err(Stop::Closed) }
    }
}

fn read_lines(file: &InputFile, read_bytes: &ReadBytes, out: &mut Output) -> Result<(), Stop> {
    let mut reader = open(file, read_bytes)?;
    for number in 1.. {
        let mut line = Vec::new();
        if reader.read_until(b'\n', &mut line).map_err(|error| read_error(file, error))? == 0 {
            break;
        }
        if !line.trim_ascii().is_empty() {
            out.emit(number, Payload::Json(line))?;
        }
    }
    Ok(())
}

/// Cuts a plain text file at every `separator`, which belongs to no document.
fn read_separated(
    file: &InputFile,
    separator: &str,
    read_bytes: &ReadBytes,
    out: &mut Output,
) -> Result<(), Stop> {
    let mut reader = open(file, read_bytes)?;
    let separator = separator.as_bytes();
    let last = separator[separator.len() - 1];
    let mut text = Vec::new();
    loop {
        let count = reader.read_until(last, &mut text).map_err(|error| read_error(file, error))?;
        let found = text.ends_with(separator);
        if count == 0 || found {
            text.truncate(text.len() - if found { separator.len() } else { 0 });
            out.emit(0, Payload::Text(std::mem::take(&mut text)))?;
        }
        if count == 0 {
            return Ok(());
        }
    }
}

/// Opens a file and decompresses it on the way.
fn open(file: &InputFile, read_bytes: &ReadBytes) -> Result<Box<dyn BufRead>, DataError> {
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

fn read_error(file: &InputFile, source: io::Error) -> DataError {
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
