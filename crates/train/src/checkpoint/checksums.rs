//! `checksums.json`: size and CRC-32C of every other file of a checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread;

use longwall_data::files;
use serde::{Deserialize, Serialize};

use super::CheckpointError;

const CHECKSUMS_FILE: &str = "checksums.json";

/// The least bytes that a thread of its own is started for.
const BLOCK: u64 = 8 << 20;

/// The checksums of a checkpoint's files, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksums(BTreeMap<String, Checksum>);

/// The checksum of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Checksum {
    bytes: u64,
    crc32c: u32,
}

impl Checksum {
    /// The checksum of the file `path`, read by several threads. They are not those of the global pool, whose
    /// number the run's configuration sets: a checkpoint is read before that.
    fn of(path: &Path) -> io::Result<Self> {
        let file = &File::open(path)?;
        let bytes = file.metadata()?.len();
        let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
        let part = bytes.div_ceil(threads).max(BLOCK);
        let parts = thread::scope(|scope| {
            let starts = (0..bytes).step_by(part as usize);
            let crc_of = move |from: u64| {
                let end = bytes.min(from.saturating_add(part));
                files::crc32c_of(file, from..end).map(|crc| (crc, end - from))
            };
            let start = |from| scope.spawn(move || crc_of(from));
            let running: Vec<_> = starts.map(start).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panic");
            running.into_iter().map(join).collect::<io::Result<Vec<(u32, u64)>>>()
        })?;
        let whole = |crc, (next, len): (u32, u64)| crc32c::crc32c_combine(crc, next, len as usize);
        Ok(Checksum { bytes, crc32c: parts.into_iter().fold(0, whole) })
    }
}

impl Checksums {
    /// Writes the checksums of all files in `folder` into it.
    ///
    /// # Errors
    /// The system's error.
    pub fn write(folder: &Path) -> io::Result<()> {
        let mut checksums = Checksums::default();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            checksums.0.insert(name, Checksum::of(&entry.path())?);
        }
        fs::write(folder.join(CHECKSUMS_FILE), serde_json::to_vec_pretty(&checksums)?)
    }

    /// The checksums of the checkpoint in `folder`; `None` for one of a version that wrote none.
    ///
    /// # Errors
    /// When the file cannot be read, or is damaged.
    pub fn read(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = folder.join(CHECKSUMS_FILE);
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| CheckpointError::damaged(&path, error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(CheckpointError::Read { path, source }),
        }
    }

    /// Checks the file `name` of the checkpoint in `folder`.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when the file is missing, or is not the one that was written.
    pub fn check(&self, folder: &Path, name: &str) -> Result<(), CheckpointError> {
        let path = folder.join(name);
        let damaged = |reason: String| Err(CheckpointError::damaged(&path, reason));
        let Some(&written) = self.0.get(name) else {
            return damaged(format!("{CHECKSUMS_FILE} beside it does not list it"));
        };
        let found = match Checksum::of(&path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return damaged("it is missing".into());
            }
            Err(source) => return Err(CheckpointError::Read { path, source }),
        };
        if found.bytes != written.bytes {
            return damaged(format!("it has {} bytes, of {} written", found.bytes, written.bytes));
        }
        if found.crc32c != written.crc32c {
            return damaged(format!(
                "its CRC-32C is {:08x}, and was {:08x} when it was written",
                found.crc32c, written.crc32c
            ));
        }
        Ok(())
    }

    /// The checksum of the file `name`, if it is listed.
    pub fn crc32c(&self, name: &str) -> Option<u32> {
        self.0.get(name).map(|checksum| checksum.crc32c)
    }

    /// The names of the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn blocks_add_up_to_the_crc_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for len in [0, 1, BLOCK as usize - 1, BLOCK as usize, 2 * BLOCK as usize + 77] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * i / 7) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            let expected = Checksum { bytes: len as u64, crc32c: crc32c::crc32c(&bytes) };
            assert_eq!(Checksum::of(&path).unwrap(), expected, "{len} bytes");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_flipped_bit_is_found(len in 1usize..5000, at in any::<prop::sample::Index>()) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("weights.safetensors");
            let mut bytes: Vec<u8> = (0..len).map(|i| (i * 31) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            Checksums::write(folder.path()).unwrap();
            let checksums = Checksums::read(folder.path()).unwrap().unwrap();
            prop_assert_eq!(checksums.names().collect::<Vec<_>>(), ["weights.safetensors"]);
            checksums.check(folder.path(), "weights.safetensors").unwrap();
            let bit = at.index(8 * len);
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).unwrap();
            let error = checksums.check(folder.path(), "weights.safetensors").unwrap_err();
            prop_assert!(error.to_string().contains("CRC-32C"), "{}", error);
        }
    }

    #[test]
    fn missing_cut_and_unlisted_files_are_damage() {
        let folder = tempfile::tempdir().unwrap();
        let write = |bytes: &[u8]| fs::write(folder.path().join("state.json"), bytes).unwrap();
        write(b"{\"step\": 3}");
        Checksums::write(folder.path()).unwrap();
        let checksums = Checksums::read(folder.path()).unwrap().unwrap();
        let reason = |name: &str| checksums.check(folder.path(), name).unwrap_err().to_string();
        write(b"{\"step\"");
        assert!(reason("state.json").contains("it has 7 bytes, of 11 written"));
        fs::remove_file(folder.path().join("state.json")).unwrap();
        assert!(reason("state.json").contains("it is missing"));
        assert!(reason("other.json").contains("does not list it"));
    }
}
