//! The Rust sources in cargo's registry folder; every machine that has built Longwall has them.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use longwall_config::Problems;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use walkdir::WalkDir;

use super::{OpenContext, Source, SourceData};
use crate::corpus::{Corpus, InputFile, Inputs, Payload, Sink, Stop, discover};
use crate::{DataConfig, DataError};

/// Larger files are mostly tables and bindings.
const MOST_FILE_BYTES: u64 = 256 * 1024;

/// Files with longer lines are not written by hand.
const MOST_LINE_BYTES: usize = 1000;

/// The keys of `kind = "cargo-sources"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Most bytes of source to read. Default 64M.
    #[serde(default = "default_max_bytes", deserialize_with = "longwall_config::count")]
    pub max_bytes: u64,
    /// The `registry/src` folder; by default that of `CARGO_HOME`, or `~/.cargo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
}

fn default_max_bytes() -> u64 {
    64_000_000
}

impl Source for Config {
    fn validate(&self, key: &str, _data: &DataConfig, problems: &mut Problems) {
        problems.check(
            self.max_bytes > 0,
            format!("{key}.max_bytes"),
            self.max_bytes,
            "above 0",
            "64M is the default",
        );
    }

    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError> {
        context.encoded(Arc::new(self.clone()))
    }
}

impl Corpus for Config {
    fn describe(&self) -> String {
        let folder = self
            .path
            .as_ref()
            .map_or("cargo's registry folder".into(), |path| path.display().to_string());
        format!("at most {} bytes of Rust sources in {folder}", self.max_bytes)
    }

    fn settings(&self) -> String {
        format!("CargoSources {{ max_bytes: {}, path: {:?} }}", self.max_bytes, self.path)
    }

    /// Otherwise crates added to the registry would change the data of existing runs.
    fn is_frozen_in_cache(&self) -> bool {
        true
    }

    fn find(&self) -> Result<Inputs, DataError> {
        let inputs = Inputs::new(files(&self.folder()?)?);
        Ok(Inputs { total_bytes: inputs.total_bytes.min(self.max_bytes), ..inputs })
    }

    /// Emits the files that pass, up to `max_bytes`. Duplicates are skipped, so the files before the
    /// start are read as well, to know their contents.
    fn read(&self, inputs: &Inputs, sink: &mut Sink) -> Result<(), Stop> {
        let folder = self.folder()?;
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
            if bytes > self.max_bytes {
                return Ok(());
            }
            sink.read_bytes().add(text.len() as u64);
            let name = crate_name(relative(&file.path, &folder));
            sink.file(input).emit_grouped(Payload::Text(text), Some(name))?;
        }
        Ok(())
    }
}

impl Config {
    /// The `registry/src` folder.
    fn folder(&self) -> Result<PathBuf, DataError> {
        let folder = match &self.path {
            Some(path) => path.clone(),
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
}

fn cargo_home() -> PathBuf {
    let home = || env::home_dir().unwrap_or_default().join(".cargo");
    env::var_os("CARGO_HOME").map_or_else(home, PathBuf::from)
}

/// All `.rs` files, ordered by the hash of their path below the index's folder
/// (`crate-1.0.0/src/lib.rs`): the order is the same on every machine.
fn files(folder: &Path) -> Result<Vec<InputFile>, DataError> {
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
            // Without the folder of the index, whose name depends on the registry's address.
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

/// Whether a file is UTF-8, does not say that it is generated, and has no very long lines.
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
fn crate_name(below_registry: &Path) -> String {
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
