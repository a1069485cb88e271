//! Text files to evaluate on: each file is one document.

use std::path::{Path, PathBuf};

use longwall_data::Tokenizer;
use walkdir::WalkDir;

use crate::EvalError;

/// One document, as tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Document {
    /// Its path.
    pub name: String,
    /// Its tokens, without end of text.
    pub tokens: Vec<u32>,
}

/// The files of `paths`: files themselves, and all files in and below folders except hidden ones,
/// sorted by path.
pub(crate) fn list_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, EvalError> {
    let mut files = Vec::new();
    for path in paths {
        let metadata = std::fs::metadata(path).map_err(EvalError::read(path))?;
        if metadata.is_file() {
            files.push(path.clone());
            continue;
        }
        let before = files.len();
        let visible = |entry: &walkdir::DirEntry| {
            entry.depth() == 0 || !entry.file_name().to_string_lossy().starts_with('.')
        };
        for entry in WalkDir::new(path).sort_by_file_name().into_iter().filter_entry(visible) {
            let entry = entry.map_err(|error| {
                let at = error.path().unwrap_or(path).to_path_buf();
                EvalError::read(&at)(error.into())
            })?;
            if entry.file_type().is_file() {
                files.push(entry.into_path());
            }
        }
        if files.len() == before {
            return Err(EvalError::Text {
                what: format!("the folder {} holds no file", path.display()),
                remedy: "give --text a folder of plain text files, or the files".to_string(),
            });
        }
    }
    Ok(files)
}

/// Names files for the report: the only one by its path, several by their number.
pub(crate) fn source_of(files: &[PathBuf]) -> String {
    match files {
        [file] => format!("the file {} of --text", file.display()),
        _ => format!("{} files of --text", files.len()),
    }
}

/// Reads a file of UTF-8 text.
pub(crate) fn read_text(path: &Path) -> Result<String, EvalError> {
    let bytes = std::fs::read(path).map_err(EvalError::read(path))?;
    String::from_utf8(bytes).map_err(|error| EvalError::Text {
        what: format!(
            "{} is not UTF-8 text: byte {} is no part of a character",
            path.display(),
            error.utf8_error().valid_up_to()
        ),
        remedy: "give plain text files, uncompressed, in UTF-8".to_string(),
    })
}

/// Reads and encodes one document.
pub(crate) fn read_document(path: &Path, tokenizer: &Tokenizer) -> Result<Document, EvalError> {
    let tokens = tokenizer.encode(&read_text(path)?);
    Ok(Document { name: path.display().to_string(), tokens })
}

/// The error of a suite that needs text but has none.
pub(crate) fn no_text(suite: &str) -> EvalError {
    EvalError::Text {
        what: format!(
            "{suite} needs held-out text, and this run has no validation split to take it from"
        ),
        remedy: "name text files or folders the model was not trained on: --text FILES".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn folders_are_walked_in_order_without_hidden_files() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("b/.git")).unwrap();
        for name in ["b/2.txt", "b/1.txt", "b/.hidden", "b/.git/config", "a.txt"] {
            fs::write(dir.path().join(name), name).unwrap();
        }
        let paths = [dir.path().join("b"), dir.path().join("a.txt")];
        let files = list_files(&paths).unwrap();
        let names: Vec<_> = files.iter().map(|f| f.strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(names, [Path::new("b/1.txt"), Path::new("b/2.txt"), Path::new("a.txt")]);
    }

    #[test]
    fn unusable_text_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = list_files(&[dir.path().to_path_buf()]).unwrap_err().to_string();
        assert!(error.contains("holds no file"), "{error}");
        let path = dir.path().join("latin1.txt");
        fs::write(&path, b"caf\xe9").unwrap();
        let error = read_text(&path).unwrap_err().to_string();
        assert!(error.contains("latin1.txt is not UTF-8 text: byte 3"), "{error}");
        let error = list_files(&[dir.path().join("none")]).unwrap_err().to_string();
        assert!(error.starts_with("cannot read"), "{error}");
    }
}
