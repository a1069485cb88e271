//! The Rust sources in cargo's registry folder.

use std::collections::HashSet;
use std::env;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use walkdir::WalkDir;

use super::document::Payload;
use super::reader::{Emit, Position, ReadBytes, Stop};
use super::{Document, InputFile, Inputs, discover};
use crate::DataError;

/// Larger files are tables and bindings more often than code.
const MOST_FILE_BYTES: u64 = 256 * 1024;

/// A longer line was not written by hand.
const MOST_LINE_BYTES: usize = 1000;

/// The `registry/src` folder.
pub(super) fn registry(path: Option<&Path>) -> Result<PathBuf, DataError> {
    let folder = match path {
        Some(path) => path.to_path_buf(),
        None => cargo_home().join("registry/src"),
    };
    if folder.is_dir() {
        return Ok(folder);
    }
    Err(DataError::Missing {
        what: "cargo's registry folder",
        path: folder,
        hint: "build Longwall once on this machine, set CARGO_HOME or the source's `path`, or use kind = \"text\"".into(),
    })
}

fn cargo_home() -> PathBuf {
    let home = || env::home_dir().unwrap_or_default().join(".cargo");
    env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from)
}

/// The candidates, in an order that depends on nothing but their paths below the index's folder
/// (`crate-1.0.0/src/lib.rs`): by the hash of the path.
pub(super) fn files(folder: &Path) -> Result<Vec<InputFile>, DataError> {
    let mut files = Vec::new();
    for entry in WalkDir::new(folder) {
        let entry = entry.map_err(|error| {
            let path = error.path().unwrap_or(folder).to_path_buf();
            DataError::read(&path, error.into())
        })?;
        let path = entry.path();
        if entry.file_type().is_file()
            && path.extension().is_some_and(|extension| extension == "rs")
        {
            // Without the index's folder, whose name depends on the registry's address.
            let below: PathBuf = relative(path, folder).iter().skip(1).collect();
            files.push((Sha256::digest(below.to_string_lossy().as_bytes()), entry.into_path()));
        }
    }
    if files.is_empty() {
        let place = folder.display().to_string();
        let hint =
            "set the source's `path` to cargo's registry/src folder, or use kind = \"text\"".into();
        return Err(DataError::NothingFound { what: "Rust source", place, hint });
    }
    files.sort_unstable();
    files.into_iter().map(|(_, path)| discover::input_file(path, false)).collect()
}

/// Emits the files that pass, until `max_bytes` are reached. A repeated content is left out, so
/// the files in front of `start` are read again, to know theirs.
pub(super) fn read(
    inputs: &Inputs,
    folder: &Path,
    max_bytes: u64,
    start: Position,
    read_bytes: &ReadBytes,
    emit: &mut Emit,
) -> Result<(), Stop> {
    let mut seen = HashSet::new();
    let mut bytes = 0;
    for (input, file) in inputs.files.iter().enumerate() {
        if file.bytes > MOST_FILE_BYTES {
            continue;
        }
        let text =
            std::fs::read(&file.path).map_err(|source| DataError::read(&file.path, source))?;
        let hash: [u8; 32] = Sha256::digest(&text).into();
        if !looks_written(&text) || !seen.insert(hash) {
            continue;
        }
        bytes += text.len() as u64;
        if bytes > max_bytes {
            return Ok(());
        }
        read_bytes.add(text.len() as u64);
        if input < start.input || (input == start.input && start.document > 0) {
            continue;
        }
        let document = Document {
            input,
            line: 0,
            payload: Payload::Text(text),
            group: Some(crate_name(relative(&file.path, folder))),
        };
        if !emit(document, Position { input, document: 1 }) {
            return Err(Stop::Closed);
        }
    }
    Ok(())
}

/// Whether a file is UTF-8 and neither says that it is generated nor has very long lines.
fn looks_written(text: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    let head = &text[..text.floor_char_boundary(1000)];
    let generated = head.contains("@generated") || head.contains("automatically generated");
    !generated && text.lines().all(|line| line.len() <= MOST_LINE_BYTES)
}

fn relative<'a>(path: &'a Path, folder: &Path) -> &'a Path {
    path.strip_prefix(folder).unwrap_or(path)
}

/// The crate a file belongs to, without the version: all versions of a crate share a split.
pub(super) fn crate_name(below_registry: &Path) -> String {
    let mut folders = below_registry.iter().map(|part| part.to_string_lossy());
    folders.find_map(|folder| without_version(&folder).map(String::from)).unwrap_or_default()
}

/// `serde` for `serde-1.0.200`; none for a folder without a version.
fn without_version(folder: &str) -> Option<&str> {
    let is_version = |text: &str| {
        let major = text.split_once('.').map_or("", |(major, _)| major);
        !major.is_empty() && major.bytes().all(|byte| byte.is_ascii_digit())
    };
    let mut dashes = folder.match_indices('-');
    dashes.find(|(at, _)| is_version(&folder[at + 1..])).map(|(at, _)| &folder[..at])
}
