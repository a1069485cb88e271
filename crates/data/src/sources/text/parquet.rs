//! The text column of a Parquet file, without the other columns.

mod pages;

use std::fs::File;

use parquet::basic::Type;
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::Reading;
use crate::DataError;
use crate::corpus::{FileDocuments, InputFile, Payload, Stop, too_large};
use crate::panics::{Panicked, without_panic};
use pages::CheckedPages;

/// Rows read at a time.
const ROWS: usize = 1024;

pub(super) fn read(reading: &Reading, column: &str, out: &mut FileDocuments) -> Result<(), Stop> {
    let file = reading.file;
    let raw = File::open(&file.path).map_err(|source| DataError::read(&file.path, source))?;
    let reader = decode(file, || SerializedFileReader::new(raw))?;
    let at = find_column(file, &reader, column)?;
    let groups = reader.num_row_groups();
    for group in 0..groups {
        let (rows, column) = decode(file, || {
            let row_group = reader.get_row_group(group)?;
            let descr = row_group.metadata().schema_descr().column(at);
            let pages = Box::new(CheckedPages(row_group.get_column_page_reader(at)?));
            Ok((row_group.metadata().num_rows(), ColumnReaderImpl::new(descr, pages)))
        })?;
        read_column(reading, rows, column, out)?;
        let group = group as u64 + 1;
        let share = |groups_done: u64| {
            (u128::from(file.bytes) * u128::from(groups_done) / groups as u128) as u64
        };
        reading.read_bytes.add(share(group) - share(group - 1));
    }
    Ok(())
}

/// Runs a part of the decoder, which may panic on damaged files.
fn decode<T>(
    file: &InputFile,
    part: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    let reason = match without_panic(part) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(Panicked) => "the decoder failed on its content".into(),
    };
    Err(DataError::Parquet { path: file.path.clone(), reason })
}

/// Emits every row; a missing value is an empty document, so that rows keep their numbers.
fn read_column(
    reading: &Reading,
    expected_rows: i64,
    mut column: ColumnReaderImpl<ByteArrayType>,
    out: &mut FileDocuments,
) -> Result<(), Stop> {
    let &Reading { file, most, .. } = reading;
    let (mut values, mut levels): (Vec<ByteArray>, Vec<i16>) = (Vec::new(), Vec::new());
    let mut left = expected_rows;
    loop {
        values.clear();
        levels.clear();
        let (rows, count, _) =
            decode(file, || column.read_records(ROWS, Some(&mut levels), None, &mut values))?;
        if rows == 0 {
            return Ok(());
        }
        left -= rows as i64;
        if left < 0 {
            let reason = format!("a row group of {expected_rows} rows holds more of them");
            return Err(DataError::Parquet { path: file.path.clone(), reason }.into());
        }
        // A required column has no levels.
        let all_present = levels.is_empty() || count == rows;
        let mut values = values.drain(..);
        for row in 0..rows {
            let present = all_present || levels.get(row).is_some_and(|&level| level > 0);
            let value = if present { values.next() } else { None };
            if let Some(bytes) =
                value.as_ref().map(|value| value.len() as u64).filter(|&bytes| bytes > most)
            {
                return Err(too_large(file, Some(bytes), most).into());
            }
            let text = value.map_or(Vec::new(), |value| value.data().to_vec());
            out.emit(Payload::Text(text))?;
        }
    }
}

fn find_column(
    file: &InputFile,
    reader: &SerializedFileReader<File>,
    column: &str,
) -> Result<usize, DataError> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let fail = |found: String| DataError::ParquetColumn {
        path: file.path.clone(),
        column: column.into(),
        found,
    };
    let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
    let at = names
        .iter()
        .position(|name| name == column)
        .ok_or_else(|| fail(format!("its columns are {}", names.join(", "))))?;
    let found = schema.column(at);
    if found.physical_type() != Type::BYTE_ARRAY || found.max_rep_level() > 0 {
        return Err(fail(format!(
            "that column holds {}, not one text per row",
            found.physical_type()
        )));
    }
    Ok(at)
}
