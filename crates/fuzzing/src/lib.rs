//! Damaged input for tests: valid seeds with changed bytes, keys and values, and a runner that bounds the
//! memory of each case. Every reader must give a value or an error that says what to do.
//!
//! `LONGWALL_FUZZ_CASES` sets the cases of each target (200 by default), `LONGWALL_FUZZ_KEEP` a folder
//! that keeps the files of the last case, for the case that ends the process.

mod memory;
mod mutate;
mod safetensors;
mod text;

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tempfile::TempDir;

pub use mutate::mutated;
pub use safetensors::{header_of, mutated_safetensors};
pub use text::{JSON, TOML, TextFormat, mutated_text};

/// Runs `target` on many inputs; each may use `most` bytes of memory.
///
/// # Panics
/// When the target panics or uses more memory.
pub fn fuzz(
    name: &str,
    inputs: impl Strategy<Value = Vec<u8>>,
    most: usize,
    target: impl Fn(Vec<u8>),
) {
    // Memory is counted for the whole process.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let cases = match std::env::var("LONGWALL_FUZZ_CASES") {
        Ok(cases) => cases.parse().expect("LONGWALL_FUZZ_CASES is a number"),
        Err(_) => 200,
    };
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let result = TestRunner::new(config).run(&inputs, |content| {
        let peak = memory::peak_of(|| target(content));
        prop_assert!(peak <= most, "{} bytes of memory; allowed: {}", peak, most);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{name}: {error}");
    }
}

/// A folder for the files of a case.
pub struct Folder {
    path: PathBuf,
    _temporary: Option<TempDir>,
}

impl Folder {
    /// An empty folder, removed at the end unless `LONGWALL_FUZZ_KEEP` names one.
    ///
    /// # Panics
    /// When it cannot be made.
    #[expect(clippy::new_without_default, reason = "it accesses the disk")]
    pub fn new() -> Self {
        match std::env::var_os("LONGWALL_FUZZ_KEEP") {
            Some(kept) => {
                let path = PathBuf::from(kept).join(std::process::id().to_string());
                let _ = fs::remove_dir_all(&path);
                fs::create_dir_all(&path).unwrap();
                Folder { path, _temporary: None }
            }
            None => {
                let temporary = tempfile::tempdir().unwrap();
                Folder { path: temporary.path().into(), _temporary: Some(temporary) }
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file, whose folder is made if need be.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn put(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }
}

/// An error is fine if it says what to do.
///
/// # Panics
/// When it does not.
pub fn has_hint(error: &impl Display) {
    let message = error.to_string();
    assert!(message.contains("\n  hint: "), "{message}");
}

/// The value, or nothing for an error with a hint.
///
/// # Panics
/// When the error has none.
pub fn checked<T, E: Display>(result: Result<T, E>) -> Option<T> {
    result.inspect_err(has_hint).ok()
}
