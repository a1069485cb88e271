//! Expands files, folders and patterns into a list of files in a fixed order.

use std::collections::HashSet;
use std::ffi::OsStr;
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

/// What was left out while paths were expanded.
#[derive(Default)]
struct LeftOut {
    /// Hidden files and folders, the first few.
    hidden: Vec<PathBuf>,
    hidden_count: usize,
    /// Links to files that do not exist, or that lead back to a folder above them.
    links: Vec<PathBuf>,
}

impl LeftOut {
    fn hidden(&mut self, path: &Path) {
        self.hidden_count += 1;
        if self.hidden.len() < 3 {
            self.hidden.push(path.to_path_buf());
        }
    }

    /// What to do when nothing was found.
    fn hint(&self) -> String {
        if self.hidden_count == 0 {
            return SPELLING.into();
        }
        let names: Vec<String> =
            self.hidden.iter().map(|path| path.display().to_string()).collect();
        let more = if self.hidden_count > names.len() { ", …" } else { "" };
        format!(
            "hidden files and folders are left out, here {} ({}{more}); name one itself to read it",
            self.hidden_count,
            names.join(", ")
        )
    }
}

/// Expands files, folders (searched recursively) and patterns, in the order given; the files of a
/// folder or pattern are sorted by path. Hidden files and dangling links are skipped, the links with a
/// warning, and every file comes only once.
pub(crate) fn expand(paths: &[PathBuf], what: &'static str) -> Result<Vec<FoundFile>, DataError> {
    let (mut found, mut links) = (Vec::new(), Vec::new());
    for path in paths {
        let before = found.len();
        let mut left_out = LeftOut::default();
        if path.is_dir() {
            walk(path, &mut found, &mut left_out)?;
        } else if path.exists() {
            found.push(FoundFile { path: path.clone(), named: true });
        } else if is_pattern(path) {
            matches(path, &mut found, &mut left_out)?;
        } else {
            return Err(DataError::Missing { what, path: path.clone(), hint: SPELLING.into() });
        }
        if found.len() == before {
            let (place, hint) = (path.display().to_string(), left_out.hint());
            return Err(DataError::NothingFound { what, place, hint });
        }
        links.append(&mut left_out.links);
    }
    if let Some(first) = links.first() {
        tracing::warn!(
            "left out links that lead to no file: {}, the first of them {}",
            links.len(),
            first.display()
        );
    }
    let mut seen = HashSet::new();
    found
        .retain(|file| seen.insert(file.path.canonicalize().unwrap_or_else(|_| file.path.clone())));
    Ok(found)
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

fn matches(
    pattern: &Path,
    found: &mut Vec<FoundFile>,
    left_out: &mut LeftOut,
) -> Result<(), DataError> {
    let before = found.len();
    for path in glob_paths(pattern, true)? {
        if path.is_file() {
            found.push(FoundFile { path, named: false });
        } else if is_dangling(&path) {
            left_out.links.push(path);
        }
    }
    if found.len() == before {
        // All of these are hidden: otherwise they would have been found.
        let hidden = glob_paths(pattern, false)?.into_iter().filter(|path| path.is_file());
        hidden.for_each(|path| left_out.hidden(&path));
    }
    Ok(())
}

/// What a pattern matches; with `literal_dot`, wildcards match no name that begins with a dot.
fn glob_paths(pattern: &Path, literal_dot: bool) -> Result<Vec<PathBuf>, DataError> {
    let pattern = pattern.to_string_lossy();
    let options =
        glob::MatchOptions { require_literal_leading_dot: literal_dot, ..Default::default() };
    let paths = glob::glob_with(&pattern, options).map_err(|error| DataError::Pattern {
        pattern: pattern.to_string(),
        reason: error.msg.into(),
    })?;
    let readable = |path: glob::GlobResult| {
        path.map_err(|error| {
            let place = error.path().to_path_buf();
            DataError::read(&place, error.into())
        })
    };
    paths.map(readable).collect()
}

fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && !path.exists()
}

fn walk(
    folder: &Path,
    found: &mut Vec<FoundFile>,
    left_out: &mut LeftOut,
) -> Result<(), DataError> {
    let mut entries = WalkDir::new(folder).follow_links(true).sort_by_file_name().into_iter();
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let path = error.path().unwrap_or(folder).to_path_buf();
                let hidden = path.file_name().is_some_and(is_hidden);
                if is_dangling(&path) || error.loop_ancestor().is_some() {
                    if !hidden {
                        left_out.links.push(path);
                    }
                    continue;
                }
                return Err(DataError::read(&path, error.into()));
            }
        };
        if entry.depth() > 0 && is_hidden(entry.file_name()) {
            left_out.hidden(entry.path());
            if entry.file_type().is_dir() {
                entries.skip_current_dir();
            }
        } else if entry.file_type().is_file() {
            found.push(FoundFile { path: entry.into_path(), named: false });
        }
    }
    Ok(())
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
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
