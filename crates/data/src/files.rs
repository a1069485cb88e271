//! Atomic writes: no reader ever sees a partial file, and no crash leaves one. Reads at an offset.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The end of a temporary file's name.
const TEMPORARY: &str = ".tmp";

/// Writes `bytes` to a temporary file beside `path`, flushes it to disk, and renames it. Another process may write the same
/// path: its temporary file has another name, and one of them is whole at `path`.
///
/// # Errors
/// The system's error; the temporary file is then removed.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Numbers of processes repeat among machines and containers.
    let unique = RandomState::new().hash_one(std::process::id());
    let temporary = with_suffix(path, &format!(".{unique:016x}{TEMPORARY}"));
    let write = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder(path.parent().unwrap_or(Path::new(".")))
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Whether a file of this name may be one that [`write_atomically`] had not finished when its process was killed.
pub fn is_temporary(name: &OsStr) -> bool {
    name.as_encoded_bytes().ends_with(TEMPORARY.as_bytes())
}

/// `path` with `suffix` appended to its last component.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    // Without a slash at its end.
    let mut name = path.components().as_path().as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Flushes every file directly in `folder`, and the folder itself, to disk.
///
/// # Errors
/// The system's error.
pub fn sync_files_in(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            // Windows flushes only handles opened for writing.
            File::options().read(true).write(true).open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(folder)
}

/// Flushes the entries of `folder` to disk, if the system supports it.
///
/// # Errors
/// The system's error.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Fills `bytes` from `offset` of `file` on, without moving the file's own position.
///
/// # Errors
/// The system's error; the file's end counts as one.
#[cfg(unix)]
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Fills `bytes` from `offset` of `file` on.
///
/// # Errors
/// The system's error; the file's end counts as one.
#[cfg(windows)]
pub fn read_exact_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => (bytes, offset) = (&mut bytes[count..], offset + count as u64),
        }
    }
    Ok(())
}

/// The CRC-32C of the bytes `range` of `file`.
///
/// # Errors
/// As [`read_exact_at`].
pub fn crc32c_of(file: &File, range: Range<u64>) -> io::Result<u32> {
    const PART: u64 = 1 << 20;
    let mut buffer = vec![0; PART.min(range.end - range.start) as usize];
    range.clone().step_by(PART as usize).try_fold(0, |crc, start| {
        let part = &mut buffer[..PART.min(range.end - start) as usize];
        read_exact_at(file, part, start)?;
        Ok(crc32c::crc32c_append(crc, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("best.json");
        write_atomically(&path, b"one").unwrap();
        write_atomically(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn temporary_files_are_known_by_their_names() {
        let path = with_suffix(Path::new("runs/a/"), &format!(".17{TEMPORARY}"));
        assert_eq!(path, Path::new("runs/a.17.tmp"));
        assert!(is_temporary(path.file_name().unwrap()));
        assert!(!is_temporary(OsStr::new("config.toml")));
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), b"x").unwrap();
        write_atomically(&path, b"one").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
