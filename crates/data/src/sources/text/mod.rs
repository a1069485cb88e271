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
    Compression, Corpus, FileDocuments, Format, InputFile, Inputs, Payload, ReadBytes, Sink, Stop,
    discover, open, read_error,
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

    fn find(&self) -> Result<Inputs, DataError> {
        Ok(Inputs::new(discover::text_files(&self.paths)?))
    }

    fn read(&self, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop> {
        let (first, read_bytes) = (sink.start().input, sink.read_bytes());
        read_bytes.add(inputs.files[..first].iter().map(|file| file.bytes).sum());
        let field = Arc::from(self.text_field.as_str());
        for (input, file) in inputs.files.iter().enumerate().skip(first) {
            self.read_file(file, &field, read_bytes, &mut sink.file(input))?;
        }
        Ok(())
    }
}

impl Config {
    fn read_file(
        &self,
        file: &InputFile,
        field: &Arc<str>,
        read_bytes: &ReadBytes,
        out: &mut FileDocuments,
    ) -> Result<(), Stop> {
        match (file.format, &self.separator) {
            (Format::Parquet, _) => parquet::read(file, field, read_bytes, out),
            (Format::JsonLines, _) => read_lines(file, field, read_bytes, out),
            (Format::Plain, Some(separator)) => read_separated(file, separator, read_bytes, out),
            (Format::Plain, None) if file.compression == Compression::None => {
                out.emit(Payload::File)?;
                read_bytes.add(file.bytes);
                Ok(())
            }
            (Format::Plain, None) => {
                let mut text = Vec::new();
                let mut reader = open(file, read_bytes)?;
                reader.read_to_end(&mut text).map_err(|error| read_error(file, error))?;
                out.emit(Payload::Text(text))
            }
        }
    }
}

fn read_lines(
    file: &InputFile,
    field: &Arc<str>,
    read_bytes: &ReadBytes,
    out: &mut FileDocuments,
) -> Result<(), Stop> {
    let mut reader = open(file, read_bytes)?;
    for line in 1.. {
        let mut object = Vec::new();
        if reader.read_until(b'\n', &mut object).map_err(|error| read_error(file, error))? == 0 {
            break;
        }
        if !object.trim_ascii().is_empty() {
            out.emit(Payload::Json { object, field: field.clone(), line })?;
        }
    }
    Ok(())
}

/// Splits a plain text file at every `separator`, which belongs to no document.
fn read_separated(
    file: &InputFile,
    separator: &str,
    read_bytes: &ReadBytes,
    out: &mut FileDocuments,
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
            out.emit(Payload::Text(std::mem::take(&mut text)))?;
        }
        if count == 0 {
            return Ok(());
        }
    }
}
