//! Atomic writes: a file is complete, or does not exist.

use std::fs;
use std::path::Path;

use crate::EvalError;

/// Writes a file under a temporary name and renames it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), EvalError> {
    longwall_data::files::write_atomically(path, bytes).map_err(EvalError::write(path))
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
    fn an_unwritable_folder_is_named() {
        let error = write_atomically(Path::new("/proc/none/results.json"), b"x").unwrap_err();
        insta::assert_snapshot!(error, @r"
        cannot write /proc/none/results.json: No such file or directory (os error 2)
          hint: check that the folder may be written and that the disk has room
        ");
    }
}
