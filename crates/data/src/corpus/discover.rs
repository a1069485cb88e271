//! Expands files, folders and patterns into a list of files in a fixed order.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use walkdir::WalkDir;

use super::{Compression, Format, InputFile};
use crate::DataError;

const SPELLING: &str = "check the spelling; relative paths start at the folder the command runs in";

/// A file found from a path that the user gave.
pub(crate) struct FoundFile {
    pub(crate) path: PathBuf,
    /// Whether the user gave this path itself, not a folder or pattern that contains it.
    pub(crate) named: bool,
}

/// Expands files, folders (searched recursively) and patterns, in the order given; the files of a
/// folder or pattern are sorted by path. Hidden files are skipped, and every file comes only once.
pub(crate) fn expand(paths: &[PathBuf], what: &'static str) -> Result<Vec<FoundFile>, DataError> {
    let mut found = Vec::new();
    for path in paths {
        let before = found.len();
        if path.is_dir() {
            walk(path, &mut found)?;
        } else if path.exists() {
            found.push(FoundFile { path: path.clone(), named: true });
        } else if is_pattern(path) {
            matches(path, &mut found)?;
        } else {
            return Err(DataError::Missing { what, path: path.clone(), hint: SPELLING.into() });
        }
        if found.len() == before {
            let place = path.display().to_string();
            return Err(DataError::NothingFound { what, place, hint: SPELLING.into() });
        }
    }
    let mut seen = HashSet::new();
    found
        .retain(|file| seen.insert(file.path.canonicalize().unwrap_or_else(|_| file.path.clone())));
    Ok(found)
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

fn matches(pattern: &Path, found: &mut Vec<FoundFile>) -> Result<(), DataError> {
    let pattern = pattern.to_string_lossy();
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
    let paths = glob::glob_with(&pattern, options).map_err(|error| DataError::Pattern {
        pattern: pattern.to_string(),
        reason: error.msg.into(),
    })?;
    for path in paths {
        let path = path.map_err(|error| {
            let place = error.path().to_path_buf();
            DataError::read(&place, error.into())
        })?;
        if path.is_file() {
            found.push(FoundFile { path, named: false });
        }
    }
    Ok(())
}

fn walk(folder: &Path, found: &mut Vec<FoundFile>) -> Result<(), DataError> {
    let visible = |name: &std::ffi::OsStr| !name.as_encoded_bytes().starts_with(b".");
    let entries = WalkDir::new(folder).follow_links(true).sort_by_file_name();
    for entry in
        entries.into_iter().filter_entry(|entry| entry.depth() == 0 || visible(entry.file_name()))
    {
        let entry = entry.map_err(|error| {
            let path = error.path().unwrap_or(folder).to_path_buf();
            DataError::read(&path, error.into())
        })?;
        if entry.file_type().is_file() {
            found.push(FoundFile { path: entry.into_path(), named: false });
        }
    }
    Ok(())
}

/// The text files that `paths` match.
pub(crate) fn text_files(paths: &[PathBuf]) -> Result<Vec<InputFile>, DataError> {
    let found = expand(paths, "text file")?;
    found.into_iter().map(|file| input_file(file.path, file.named)).collect()
}

/// Describes a file: its format from its name, its size and modification time from the disk.
pub(crate) fn input_file(path: PathBuf, named: bool) -> Result<InputFile, DataError> {
    let metadata = std::fs::metadata(&path).map_err(|source| DataError::read(&path, source))?;
    let age = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let (format, compression) = format_of(&path);
    if format == Format::Parquet && compression != Compression::None {
        return Err(DataError::Parquet {
            reason: "Parquet files are compressed inside; decompress it first".into(),
            path,
        });
    }
    let modified = age.map_or(0, |age| age.as_nanos());
    Ok(InputFile { format, compression, bytes: metadata.len(), modified, named, path })
}

/// The format and compression, from a file's name.
fn format_of(path: &Path) -> (Format, Compression) {
    let extension = |path: &Path| {
        path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default()
    };
    let compression = match extension(path).as_str() {
        "gz" | "gzip" => Compression::Gzip,
        "zst" | "zstd" => Compression::Zstd,
        _ => Compression::None,
    };
    let inner =
        if compression == Compression::None { path.to_path_buf() } else { path.with_extension("") };
    let format = match extension(&inner).as_str() {
        "jsonl" | "ndjson" | "json" => Format::JsonLines,
        "parquet" => Format::Parquet,
        _ => Format::Plain,
    };
    (format, compression)
}
