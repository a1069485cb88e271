//! Files with a JSON object a line, as benchmarks are published in; `.gz` files are decompressed.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde::de::DeserializeOwned;

use crate::EvalError;

/// A line of a file of JSON lines.
pub(crate) struct JsonLine<'a> {
    path: &'a Path,
    /// From 1.
    number: usize,
    text: &'a str,
    /// What the file should hold, for errors.
    expected: &'a str,
}

impl JsonLine<'_> {
    /// Parses the line.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, EvalError> {
        serde_json::from_str(self.text).map_err(|error| self.error(error.to_string()))
    }

    /// An error about the line.
    pub(crate) fn error(&self, reason: impl AsRef<str>) -> EvalError {
        EvalError::Text {
            what: format!("{}:{}: {}", self.path.display(), self.number, reason.as_ref()),
            remedy: format!("the file should hold {}", self.expected),
        }
    }
}

/// Calls `each` with every line that is not blank. `expected` says what the file should hold.
pub(crate) fn for_each_line(
    path: &Path,
    expected: &str,
    mut each: impl FnMut(&JsonLine<'_>) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let file = File::open(path).map_err(EvalError::read(path))?;
    let plain: Box<dyn Read> = match path.extension().is_some_and(|extension| extension == "gz") {
        true => Box::new(MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    for (at, text) in BufReader::new(plain).lines().enumerate() {
        let text = text.map_err(EvalError::read(path))?;
        if !text.trim().is_empty() {
            each(&JsonLine { path, number: at + 1, text: &text, expected })?;
        }
    }
    Ok(())
}

/// A file's name without the extensions of JSON lines; none for other files.
pub(crate) fn stem(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".gz").unwrap_or(name);
    name.strip_suffix(".jsonl")
}

/// The entries of a folder, by name, without hidden ones.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, EvalError> {
    let read = || std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let paths: std::io::Result<Vec<PathBuf>> = read();
    let mut paths = paths.map_err(EvalError::read(folder))?;
    paths.retain(|path| !path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.')));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::Value;

    use super::*;

    #[test]
    fn plain_and_compressed_files_give_the_same_lines() {
        let dir = tempfile::tempdir().unwrap();
        let text = "{\"a\":1}\n\n{\"a\":2}\n";
        let (plain, packed) = (dir.path().join("x.jsonl"), dir.path().join("x.jsonl.gz"));
        std::fs::write(&plain, text).unwrap();
        let mut encoder = GzEncoder::new(File::create(&packed).unwrap(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap();
        for path in [plain, packed] {
            let mut lines = Vec::new();
            for_each_line(&path, "numbers", |line| {
                lines.push((line.number, line.parse::<Value>()?["a"].as_u64().unwrap()));
                Ok(())
            })
            .unwrap();
            assert_eq!(lines, [(1, 1), (3, 2)]);
            assert_eq!(stem(&path), Some("x"));
        }
        assert_eq!(stem(Path::new("x.json")), None);
        assert_eq!(entries(dir.path()).unwrap().len(), 2);
    }

    #[test]
    fn a_damaged_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        std::fs::write(&path, "{}\n{\"a\":\n").unwrap();
        let read = |line: &JsonLine<'_>| line.parse::<Value>().map(|_| ());
        let error = for_each_line(&path, "an object a line", read).unwrap_err().to_string();
        assert!(error.contains("x.jsonl:2: EOF while parsing"), "{error}");
        assert!(error.ends_with("hint: the file should hold an object a line"), "{error}");
        let error = for_each_line(&dir.path().join("none"), "", read).unwrap_err().to_string();
        assert!(error.starts_with("cannot read"), "{error}");
    }
}
