//! Checks the footer of a Parquet file before it is decoded: the decoder reserves memory for as many
//! elements as a list says it has.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Bytes after the footer: its length, and the magic.
const TAIL: u64 = 8;

/// Deeper structures are no Parquet metadata.
const MOST_DEPTH: usize = 64;

/// Fails if a list or map in the footer says that it has more elements than the footer has bytes left:
/// each takes at least one. Everything else that is wrong with a footer is left to the decoder.
pub(super) fn check(mut file: &File) -> Result<(), String> {
    let mut footer = Vec::new();
    let read = read_footer(&mut file, &mut footer).and_then(|()| file.rewind());
    if read.is_err() {
        return Ok(());
    }
    match (Walk { rest: &footer }).structure(0) {
        Err(Odd::Count(count, left)) => {
            Err(format!("its footer has a list of {count} elements in the last {left} bytes"))
        }
        Ok(()) | Err(Odd::Other) => Ok(()),
    }
}

fn read_footer(file: &mut &File, footer: &mut Vec<u8>) -> std::io::Result<()> {
    let end = file.seek(SeekFrom::End(0))?.saturating_sub(TAIL);
    file.seek(SeekFrom::Start(end))?;
    let mut length = [0; 4];
    file.read_exact(&mut length)?;
    let length = u64::from(u32::from_le_bytes(length)).min(end);
    file.seek(SeekFrom::Start(end - length))?;
    file.take(length).read_to_end(footer)?;
    Ok(())
}

/// Why a walk ended early.
enum Odd {
    /// A list has this many elements, in this many bytes.
    Count(u64, usize),
    /// Something else that the decoder will report.
    Other,
}

/// Walks over a structure in Thrift's compact protocol without keeping anything.
struct Walk<'a> {
    rest: &'a [u8],
}

impl Walk<'_> {
    fn skip(&mut self, bytes: usize) -> Result<(), Odd> {
        self.rest = self.rest.get(bytes..).ok_or(Odd::Other)?;
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, Odd> {
        let &byte = self.rest.first().ok_or(Odd::Other)?;
        self.skip(1)?;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, Odd> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Odd::Other)
    }

    fn structure(&mut self, depth: usize) -> Result<(), Odd> {
        loop {
            let header = self.byte()?;
            let kind = header & 0x0f;
            if kind == 0 {
                return Ok(());
            }
            if header >> 4 == 0 {
                self.varint()?;
            }
            // A boolean field's value is its type.
            if kind > 2 {
                self.value(kind, depth + 1)?;
            }
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Result<(), Odd> {
        if depth > MOST_DEPTH {
            return Err(Odd::Other);
        }
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.varint().map(|_| ()),
            7 => self.skip(8),
            8 => {
                let bytes = self.varint()?;
                self.skip(usize::try_from(bytes).map_err(|_| Odd::Other)?)
            }
            9 | 10 => {
                let header = self.byte()?;
                let count = if header >> 4 == 15 { self.varint()? } else { u64::from(header >> 4) };
                self.elements(count, &[header & 0x0f], depth)
            }
            11 => {
                let count = self.varint()?;
                if count == 0 {
                    return Ok(());
                }
                let kinds = self.byte()?;
                self.elements(count, &[kinds >> 4, kinds & 0x0f], depth)
            }
            12 => self.structure(depth),
            13 => self.skip(16),
            _ => Err(Odd::Other),
        }
    }

    fn elements(&mut self, count: u64, kinds: &[u8], depth: usize) -> Result<(), Odd> {
        if count > self.rest.len() as u64 {
            return Err(Odd::Count(count, self.rest.len()));
        }
        for _ in 0..count {
            for &kind in kinds {
                self.value(kind, depth + 1)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a footer in the bytes before the tail.
    fn checked(footer: &[u8]) -> Result<(), String> {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(footer).unwrap();
        file.write_all(&(footer.len() as u32).to_le_bytes()).unwrap();
        file.write_all(b"PAR1").unwrap();
        check(&file)
    }

    #[test]
    fn a_list_longer_than_the_footer_is_refused() {
        // Field 2: a list of structures; its length is a varint.
        let list = |count: [u8; 5]| [&[0x29, 0xfc][..], &count[..], &[0, 0]].concat();
        assert_eq!(
            checked(&list([0xff, 0xff, 0xff, 0xff, 0x07])).unwrap_err(),
            "its footer has a list of 2147483647 elements in the last 2 bytes"
        );
        assert_eq!(checked(&list([0x81, 0x80, 0x80, 0x80, 0x00])), Ok(()));
        assert_eq!(checked(b""), Ok(()));
        assert_eq!(checked(&[0x1c; 500]), Ok(()));
    }
}
