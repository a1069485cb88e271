//! Atomic writes: a file is complete, or does not exist.

use std::fs;
use std::path::{Path, PathBuf};

use crate::EvalError;

/// Writes a file under a temporary name and renames it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), EvalError> {
    longwall_data::files::write_atomically(path, bytes).map_err(EvalError::write(path))
}

/// Lets `write` create a file under a temporary name with `path`'s extension, then renames it to
/// `path`. If `write` fails, the temporary file is removed.
pub(crate) fn with_temporary(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let temporary = temporary_name(path);
    let result = write(&temporary)
        .and_then(|()| fs::rename(&temporary, path).map_err(EvalError::write(path)));
    if result.is_err() {
        // The file may not exist, and the first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn temporary_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".tmp-{}-{name}", std::process::id()))
}

/// Creates a folder and its parents.
pub(crate) fn create_dir(dir: &Path) -> Result<(), EvalError> {
    fs::create_dir_all(dir).map_err(EvalError::write(dir))
}

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<(), EvalError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(EvalError::write(path)(error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.json");
        let result = with_temporary(&path, |temporary| {
            fs::write(temporary, "half").unwrap();
            Err(EvalError::Text { what: "no".into(), remedy: "yes".into() })
        });
        assert!(result.is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_unwritable_folder_is_named() {
        let error = write_atomically(Path::new("/proc/none/results.json"), b"x").unwrap_err();
        insta::assert_snapshot!(error, @r"
        cannot write /proc/none/results.json: No such file or directory (os error 2)
          hint: check that the folder may be written and that the disk has room
        ");
    }
}
