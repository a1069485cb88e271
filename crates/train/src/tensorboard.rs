//! TensorBoard event files, written without TensorFlow.
//!
//! An event file is a sequence of TFRecords: length (u64 LE), masked CRC-32C of it, the bytes of an
//! `Event` protocol buffer, masked CRC-32C of these. Only the fields that scalars need are encoded.
//! Each part of a resumed run writes its own file, which begins with a session start: this makes
//! TensorBoard drop the scalars of earlier files from that step on. An export is one file, which the next
//! export replaces.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use longwall_data::files;

use crate::metrics::MetricsError;

/// The file of an export. TensorBoard knows an event file by the word `tfevents`.
const EXPORT_FILE: &str = "events.out.tfevents.export.longwall";

/// Writes `steps`, each a step with its scalars, as one event file in `folder`, in place of that of an earlier
/// export. Files of runs stay as they are.
///
/// # Errors
/// When folder or file cannot be written; nothing half-written is left.
pub fn export(
    folder: &Path,
    steps: impl IntoIterator<Item = (u64, Vec<(String, f64)>)>,
) -> Result<(), MetricsError> {
    let path = folder.join(EXPORT_FILE);
    let io = |source| MetricsError::Io { path: path.clone(), source };
    let mut writer = EventWriter::begin(Vec::new(), now(), 0).map_err(io)?;
    for (step, named) in steps {
        let scalars: Vec<_> = named.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        writer.scalars(step, &scalars).map_err(io)?;
    }
    fs::create_dir_all(folder).map_err(io)?;
    files::write_atomically(&path, &writer.out).map_err(io)
}

/// Writes scalars as the records of one event file.
#[derive(Debug)]
pub struct EventWriter<W = File> {
    out: W,
}

impl EventWriter {
    /// Creates an event file in `folder` for a run, or a part of one, that starts after `first_step`
    /// steps.
    ///
    /// # Errors
    /// When folder or file cannot be created.
    pub fn create(folder: &Path, first_step: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let seconds = now();
        let name = format!(
            "events.out.tfevents.{:010}.{:09}.longwall",
            seconds as u64,
            (seconds.fract() * 1e9) as u64
        );
        EventWriter::begin(File::create_new(folder.join(name))?, seconds, first_step)
    }
}

impl<W: Write> EventWriter<W> {
    /// Writes the version and the session start.
    fn begin(out: W, seconds: f64, first_step: u64) -> io::Result<Self> {
        let mut writer = EventWriter { out };
        let mut event = event_header(seconds, 0);
        put_bytes(&mut event, 3, b"brain.Event:2");
        writer.write_record(&event)?;
        // Event.session_log (7) = SessionLog { status (1) = START (1) }.
        let mut event = event_header(seconds, first_step);
        put_bytes(&mut event, 7, &[0x08, 1]);
        writer.write_record(&event)?;
        Ok(writer)
    }

    /// Appends the scalars of one step.
    ///
    /// # Errors
    /// When the write fails.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            // Summary.Value { tag (1), simple_value (2, f32) }.
            let mut entry = Vec::new();
            put_bytes(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | 5);
            entry.extend((*value as f32).to_le_bytes());
            put_bytes(&mut summary, 1, &entry);
        }
        let mut event = event_header(now(), step);
        put_bytes(&mut event, 5, &summary);
        self.write_record(&event)
    }

    fn write_record(&mut self, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        self.out.write_all(&record)
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// TFRecord's checksum: rotated and offset, because a record may itself hold checksums.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// `Event { wall_time (1, f64), step (2, varint) }`.
fn event_header(wall_time: f64, step: u64) -> Vec<u8> {
    let mut event = vec![1 << 3 | 1];
    event.extend(wall_time.to_le_bytes());
    event.push(2 << 3);
    put_varint(&mut event, step);
    event
}

/// A length-delimited field.
fn put_bytes(buffer: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    buffer.push(field << 3 | 2);
    put_varint(buffer, bytes.len() as u64);
    buffer.extend(bytes);
}

fn put_varint(buffer: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        buffer.push(value as u8 | 0x80);
        value >>= 7;
    }
    buffer.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a file into the data of its records, checking lengths and checksums.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            assert_eq!(crc(8), masked_crc(&bytes[..8]));
            let data = &bytes[12..12 + length];
            assert_eq!(crc(12 + length), masked_crc(data));
            records.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn the_checksum_is_tfrecords() {
        // The frame of a version record of 24 bytes, as in files that TensorFlow wrote.
        assert_eq!(masked_crc(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn a_file_holds_version_session_start_and_scalars() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path(), 300).unwrap();
        writer.scalars(301, &[("train/loss", 2.5), ("train/lr", 1e-3)]).unwrap();
        let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let records = records(&fs::read(path).unwrap());
        assert_eq!(records.len(), 3);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // Step 300 as a varint, then the session start.
        assert!(records[1].ends_with(&[0x10, 0xac, 0x02, 0x3a, 0x02, 0x08, 0x01]));
        let mut loss = vec![0x0a, 17, 0x0a, 10];
        loss.extend(b"train/loss");
        loss.push(0x15);
        loss.extend(2.5f32.to_le_bytes());
        assert!(records[2].windows(loss.len()).any(|window| window == loss));
    }

    #[test]
    fn an_export_replaces_the_one_before_and_leaves_a_runs_file() {
        let folder = tempfile::tempdir().unwrap();
        EventWriter::create(folder.path(), 0).unwrap();
        for loss in [2.5, 2.0, 1.5] {
            export(folder.path(), [(1, vec![("train/loss".to_owned(), loss)])]).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let records = records(&fs::read(folder.path().join(EXPORT_FILE)).unwrap());
        assert_eq!(records.len(), 3);
        assert!(records[2].ends_with(&1.5f32.to_le_bytes()));
    }

    #[test]
    fn a_failed_export_leaves_nothing_and_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join(EXPORT_FILE).join("in the way")).unwrap();
        let error = export(folder.path(), []).unwrap_err().to_string();
        assert!(error.contains(EXPORT_FILE), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn two_parts_of_a_run_write_two_files() {
        let folder = tempfile::tempdir().unwrap();
        EventWriter::create(folder.path(), 0).unwrap();
        EventWriter::create(folder.path(), 5).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
