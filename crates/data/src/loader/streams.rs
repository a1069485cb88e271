//! Rows of streams: a batch has as many streams as rows, and each goes on through a part of the text.

use super::windows::{Order, Windows};
use crate::DataError;
use crate::mixture::derive_key;

/// A row of a batch of streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamRow {
    /// The row's number in the training order.
    pub row: u64,
    /// Streams of a batch.
    pub streams: u64,
}

/// Where a row is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamPlace {
    /// Its first token in the text.
    pub start: u64,
    /// Whether the row before it in its stream ends there.
    pub follows: bool,
}

impl Windows {
    /// Steps of an epoch of `streams` streams. Fewer windows than streams are left out of each.
    pub(super) fn steps(&self, streams: u64) -> u64 {
        self.count / streams
    }

    /// Where a row of a stream is read. The text is a ring of windows, cut into parts of equal length, one for each stream.
    /// Each epoch begins at another window, and shifts all windows.
    ///
    /// # Panics
    /// When there are more streams than windows, or rows are not those of training.
    pub(super) fn place(&self, StreamRow { row, streams }: StreamRow) -> StreamPlace {
        let Order::Shuffled { key } = self.order else { panic!("streams of {:?}", self.order) };
        let (step, stream, steps) = (row / streams, row % streams, self.steps(streams));
        assert!(steps > 0, "{streams} streams of {} windows", self.count);
        let (epoch, step) = (step / steps, step % steps);
        let first = derive_key("turn", &[key, epoch]) % self.count;
        let window = (first + stream * steps + step) % self.count;
        StreamPlace {
            start: window * self.seq_len + self.offset(key, epoch),
            follows: step > 0 && window > 0,
        }
    }

    /// Whether a row goes on from the one before in its stream: not after `end_of_text`, if that separates documents.
    pub(super) fn goes_on(
        &self,
        row: StreamRow,
        end_of_text: Option<i32>,
    ) -> Result<bool, DataError> {
        let StreamPlace { start, follows } = self.place(row);
        if !follows || end_of_text.is_none() {
            return Ok(follows);
        }
        let mut before = [0];
        self.stream.read(start - 1, &mut before)?;
        Ok(Some(before[0]) != end_of_text)
    }
}
