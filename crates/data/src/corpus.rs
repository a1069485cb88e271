//! Where text comes from: files of several formats, cut into documents in an order that never
//! varies.

mod cargo;
pub(crate) mod discover;
mod document;
mod parquet;
mod reader;

use std::path::PathBuf;

use crate::config::default_text_field;
use crate::{DataError, SourceConfig};

pub(crate) use document::{Document, Outcome};
pub(crate) use reader::{Position, ReadBytes, read};

/// A corpus of text.
#[derive(Clone, Debug, PartialEq)]
pub enum Corpus {
    /// Text, JSONL and Parquet files; see [`SourceConfig::Text`].
    Files {
        /// Files, folders and patterns.
        paths: Vec<PathBuf>,
        /// Field or column that holds the text.
        text_field: String,
        /// What separates the documents of a plain text file.
        separator: Option<String>,
    },
    /// Rust sources in cargo's registry folder; see [`SourceConfig::CargoSources`].
    CargoSources {
        /// Bytes to read, at most.
        max_bytes: u64,
        /// The `registry/src` folder, if not that of `CARGO_HOME` or `~/.cargo`.
        path: Option<PathBuf>,
    },
}

impl Corpus {
    /// Files with the default text field, one document each if they are plain text.
    pub fn files(paths: Vec<PathBuf>) -> Self {
        Corpus::Files { paths, text_field: default_text_field(), separator: None }
    }

    /// The corpus of a source; `None` for kinds that hold no text.
    pub fn of_source(source: &SourceConfig) -> Option<Self> {
        match source {
            SourceConfig::Text { paths, text_field, separator, .. } => Some(Corpus::Files {
                paths: paths.clone(),
                text_field: text_field.clone(),
                separator: separator.clone(),
            }),
            SourceConfig::CargoSources { max_bytes, path, .. } => {
                Some(Corpus::CargoSources { max_bytes: *max_bytes, path: path.clone() })
            }
            SourceConfig::Shards { .. }
            | SourceConfig::Passkey { .. }
            | SourceConfig::Fflm { .. } => None,
        }
    }

    /// Finds the corpus's files.
    pub(crate) fn open(&self) -> Result<Inputs, DataError> {
        match self {
            Corpus::Files { paths, text_field, separator } => Ok(Inputs {
                files: discover::text_files(paths)?,
                reading: Reading::Files {
                    text_field: text_field.clone(),
                    separator: separator.clone(),
                },
            }),
            Corpus::CargoSources { max_bytes, path } => {
                let folder = cargo::registry(path.as_deref())?;
                let files = cargo::files(&folder)?;
                Ok(Inputs { files, reading: Reading::Cargo { folder, max_bytes: *max_bytes } })
            }
        }
    }

    /// The corpus in words, for manifests and messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Corpus::Files { paths, .. } => {
                let paths: Vec<String> =
                    paths.iter().map(|path| path.display().to_string()).collect();
                paths.join(", ")
            }
            Corpus::CargoSources { max_bytes, path } => {
                let folder = path
                    .as_ref()
                    .map_or("cargo's registry folder".into(), |path| path.display().to_string());
                format!("at most {max_bytes} bytes of Rust sources in {folder}")
            }
        }
    }
}

/// The files of a corpus, and how to read them.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) files: Vec<InputFile>,
    pub(crate) reading: Reading,
}

impl Inputs {
    /// Bytes of input, compressed where the files are.
    pub(crate) fn total_bytes(&self) -> u64 {
        let files = self.files.iter().map(|file| file.bytes).sum();
        match self.reading {
            Reading::Files { .. } => files,
            Reading::Cargo { max_bytes, .. } => max_bytes.min(files),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Reading {
    Files { text_field: String, separator: Option<String> },
    Cargo { folder: PathBuf, max_bytes: u64 },
}

/// One file.
#[derive(Clone, Debug)]
pub(crate) struct InputFile {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) compression: Compression,
    pub(crate) bytes: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub(crate) modified: u128,
    /// Whether the user named this very file: then it must be text.
    pub(crate) named: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Plain,
    JsonLines,
    Parquet,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Compression::None => "plain",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        }
    }
}

#[cfg(test)]
mod tests;
