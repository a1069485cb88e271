//! The messages on a connection: their length, their kind, their bytes.

use std::io::{self, Read, Write};

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The first words of a rank.
    Hello = 1,
    /// Rank 0 has found all ranks.
    Welcome,
    /// Rank 0 refuses the rank, in words.
    Refused,
    /// A sign of life, with the last finished step.
    Beat,
    /// A message to gather.
    Gather,
    /// The messages of all ranks.
    Gathered,
    /// A rank is lost.
    Failed,
    /// The sender needs nothing any more.
    Bye,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        use Kind::*;
        let all = [Hello, Welcome, Refused, Beat, Gather, Gathered, Failed, Bye];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A message.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub payload: Vec<u8>,
}

/// The most bytes of a message: another program's bytes are not taken for a length.
const MOST: u32 = 1 << 26;

/// The most bytes that all ranks together gather in one message; longer ones go in parts.
pub(super) const PART: usize = 1 << 24;

/// Writes a message.
pub fn write(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length <= MOST);
    let length = length.ok_or_else(|| io::Error::other("a message of more than 64 MB"))?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.push(kind as u8);
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)
}

/// Reads a message; `None` at the end of the stream, or if another program sends it.
pub fn read(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut head = [0; 5];
    match from.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [a, b, c, d, kind] = head;
    let length = u32::from_le_bytes([a, b, c, d]);
    let Some(kind) = Kind::of(kind).filter(|_| length <= MOST) else { return Ok(None) };
    let mut payload = vec![0; length as usize];
    from.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, payload }))
}

/// Messages as one.
pub fn join(messages: &[Vec<u8>]) -> Vec<u8> {
    let one = |message: &Vec<u8>| {
        let length = (message.len() as u32).to_le_bytes();
        length.into_iter().chain(message.iter().copied()).collect::<Vec<u8>>()
    };
    messages.iter().flat_map(one).collect()
}

/// The messages that [`join`] joined.
pub fn split(mut joined: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut messages = vec![];
    while !joined.is_empty() {
        let (length, rest) = joined.split_first_chunk::<4>()?;
        let (message, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        messages.push(message.to_vec());
        joined = rest;
    }
    Some(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let mut bytes = vec![];
        for (kind, payload) in [(Kind::Hello, &b"hello"[..]), (Kind::Bye, b"")] {
            write(&mut bytes, kind, payload).unwrap();
        }
        let mut stream = &bytes[..];
        let first = read(&mut stream).unwrap().unwrap();
        assert_eq!((first.kind, &first.payload[..]), (Kind::Hello, &b"hello"[..]));
        assert_eq!(read(&mut stream).unwrap().unwrap().kind, Kind::Bye);
        assert_eq!(read(&mut stream).unwrap(), None);
        let mut other = &b"GET / HTTP/1.1\r\n"[..];
        assert_eq!(read(&mut other).unwrap(), None, "another program");
    }

    #[test]
    fn joined_messages_split_again() {
        let messages = vec![b"one".to_vec(), vec![], b"three".to_vec()];
        let joined = join(&messages);
        assert_eq!(split(&joined), Some(messages));
        assert_eq!(split(&joined[..5]), None);
    }
}
