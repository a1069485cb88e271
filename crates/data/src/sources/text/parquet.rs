//! The text column of a Parquet file, without the other columns.

use std::fs::File;

use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::DataError;
use crate::corpus::{FileDocuments, InputFile, Payload, ReadBytes, Stop};

/// Rows read at a time.
const ROWS: usize = 1024;

pub(super) fn read(
    file: &InputFile,
    column: &str,
    read_bytes: &ReadBytes,
    out: &mut FileDocuments,
) -> Result<(), Stop> {
    let fail = |error: ParquetError| DataError::Parquet {
        path: file.path.clone(),
        reason: error.to_string(),
    };
    let raw = File::open(&file.path).map_err(|source| DataError::read(&file.path, source))?;
    let reader = SerializedFileReader::new(raw).map_err(fail)?;
    let at = find_column(file, &reader, column)?;
    let groups = reader.num_row_groups();
    for group in 0..groups {
        let row_group = reader.get_row_group(group).map_err(fail)?;
        let ColumnReader::ByteArrayColumnReader(column) =
            row_group.get_column_reader(at).map_err(fail)?
        else {
            unreachable!("the column's type was checked")
        };
        read_column(column, out).map_err(|stop| match stop {
            ColumnStop::Parquet(error) => Stop::Failed(fail(error)),
            ColumnStop::Stop(stop) => stop,
        })?;
        let group = group as u64 + 1;
        let share = |groups_done: u64| file.bytes * groups_done / groups as u64;
        read_bytes.add(share(group) - share(group - 1));
    }
    Ok(())
}

enum ColumnStop {
    Parquet(ParquetError),
    Stop(Stop),
}

/// Emits every row; a missing value is an empty document, so that rows keep their numbers.
fn read_column(
    mut column: ColumnReaderImpl<ByteArrayType>,
    out: &mut FileDocuments,
) -> Result<(), ColumnStop> {
    let (mut values, mut levels): (Vec<ByteArray>, Vec<i16>) = (Vec::new(), Vec::new());
    loop {
        values.clear();
        levels.clear();
        let (rows, count, _) = column
            .read_records(ROWS, Some(&mut levels), None, &mut values)
            .map_err(ColumnStop::Parquet)?;
        if rows == 0 {
            return Ok(());
        }
        // A required column has no levels.
        let all_present = levels.is_empty() || count == rows;
        let mut values = values.drain(..);
        for row in 0..rows {
            let present = all_present || levels[row] > 0;
            let value = if present { values.next() } else { None };
            let text = value.map_or(Vec::new(), |value| value.data().to_vec());
            out.emit(Payload::Text(text)).map_err(ColumnStop::Stop)?;
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
