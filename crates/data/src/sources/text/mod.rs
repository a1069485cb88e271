//! Text, JSONL and Parquet files, plain or compressed (`.gz`, `.zst`).

mod parquet;
#[cfg(test)]
mod tests;

use std::io::{BufRead, Read};
use std::path::PathBuf;
use std::sync::Arc;

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use super::{OpenContext, Source, SourceData, check_paths};
use crate::corpus::{
    Compression, Corpus, FileDocuments, Format, InputFile, Inputs, MOST_DOCUMENT_BYTES, Payload,
    ReadBytes, Sink, Stop, discover, open, read_document, read_error, too_large,
};
use crate::{DataConfig, DataError};

/// The keys of `kind = "text"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Files, folders (searched recursively) and patterns (`*`, `**`, `?`, `[abc]`).
    pub paths: Vec<PathBuf>,
    /// Field (JSONL) or column (Parquet) that holds the text. Default `text`.
    #[serde(default = "default_text_field")]
    pub text_field: String,
    /// The text between documents in a plain text file, for example `<|endoftext|>`. By default each
    /// file is one document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub separator: Option<String>,
}

fn default_text_field() -> String {
    "text".into()
}

impl Config {
    /// `paths` with the default text field, and one document per plain text file.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Config { paths, text_field: default_text_field(), separator: None }
    }
}

impl Source for Config {
    fn validate(&self, key: &str, _data: &DataConfig, problems: &mut Problems) {
        check_paths(problems, key, "paths", &self.paths);
        problems.check(
            self.separator.as_deref() != Some(""),
            format!("{key}.separator"),
            "\"\"",
            "a text that stands between documents",
            "remove the key to make each file one document",
        );
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        context.encoded(Arc::new(self.clone()))
    }
}

impl Corpus for Config {
    fn describe(&self) -> String {
        let paths: Vec<String> = self.paths.iter().map(|path| path.display().to_string()).collect();
        paths.join(", ")
    }

    /// Not the paths: the key already has those of the files they match.
    fn settings(&self) -> String {
        format!("files {:?} {:?}", self.text_field, self.separator)
    }

    fn is_one_document(&self, inputs: &Inputs) -> bool {
        let whole = |file: &InputFile| file.format == Format::Plain && self.separator.is_none();
        inputs.files.len() == 1 && inputs.files.iter().all(whole)
    }

    fn find(&self) -> Result<Inputs, DataError> {
        Ok(Inputs::new(discover::text_files(&self.paths)?))
    }

    fn read(&self, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop> {
        self.read_at_most(MOST_DOCUMENT_BYTES, inputs, sink)
    }
}

impl Config {
    /// Reads documents of at most `most` bytes.
    fn read_at_most(&self, most: u64, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop> {
        let (first, read_bytes) = (sink.start().input, sink.read_bytes());
        read_bytes.add(inputs.files[..first].iter().map(|file| file.bytes).sum());
        let field = Arc::from(self.text_field.as_str());
        for (input, file) in inputs.files.iter().enumerate().skip(first) {
            let reading = Reading { file, most, read_bytes };
            self.read_file(&reading, &field, &mut sink.file(input))?;
        }
        Ok(())
    }

    fn read_file(
        &self,
        reading: &Reading,
        field: &Arc<str>,
        out: &mut FileDocuments,
    ) -> Result<(), Stop> {
        let &Reading { file, most, read_bytes } = reading;
        match (file.format, &self.separator) {
            (Format::Parquet, _) => parquet::read(reading, field, out),
            (Format::JsonLines, _) => read_lines(reading, field, out),
            (Format::Plain, Some(separator)) => read_separated(reading, separator, out),
            (Format::Plain, None) if file.compression == Compression::None => {
                if file.bytes > most {
                    return Err(too_large(file, Some(file.bytes), most).into());
                }
                out.emit(Payload::File)?;
                read_bytes.add(file.bytes);
                Ok(())
            }
            (Format::Plain, None) => {
                let text = read_document(open(file, read_bytes)?, file, most)?;
                out.emit(Payload::Text(text))
            }
        }
    }
}

/// A file that is being read.
struct Reading<'a> {
    file: &'a InputFile,
    /// The most bytes of a document.
    most: u64,
    read_bytes: &'a ReadBytes,
}

fn read_lines(reading: &Reading, field: &Arc<str>, out: &mut FileDocuments) -> Result<(), Stop> {
    let &Reading { file, most, read_bytes } = reading;
    let mut reader = open(file, read_bytes)?;
    for line in 1.. {
        let mut object = Vec::new();
        let mut bounded = reader.by_ref().take(most + 1);
        if bounded.read_until(b'\n', &mut object).map_err(|error| read_error(file, error))? == 0 {
            break;
        }
        if object.len() as u64 > most {
            return Err(too_large(file, None, most).into());
        }
        if !object.trim_ascii().is_empty() {
            out.emit(Payload::Json { object, field: field.clone(), line })?;
        }
    }
    Ok(())
}

/// Splits a plain text file at every `separator`, which belongs to no document.
fn read_separated(reading: &Reading, separator: &str, out: &mut FileDocuments) -> Result<(), Stop> {
    let &Reading { file, most, read_bytes } = reading;
    let mut reader = open(file, read_bytes)?;
    let separator = separator.as_bytes();
    let last = separator[separator.len() - 1];
    let mut text = Vec::new();
    loop {
        // At least one byte: more than `most` are an error below.
        let mut bounded = reader.by_ref().take(most + 1 - text.len() as u64);
        let count = bounded.read_until(last, &mut text).map_err(|error| read_error(file, error))?;
        if text.len() as u64 > most {
            return Err(too_large(file, None, most).into());
        }
        let found = text.ends_with(separator);
        if count == 0 || found {
            text.truncate(text.len() - if found { separator.len() } else { 0 });
            out.emit(Payload::Text(std::mem::take(&mut text)))?;
        }
        if count == 0 {
            return Ok(());
        }
    }
}
