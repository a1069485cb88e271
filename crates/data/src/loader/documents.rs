//! Rows that hold one document each.

use rayon::prelude::*;

use super::windows::{CheckedStream, Order};
use crate::shard::TokenStream;
use crate::{DataError, Tokenizer};

/// A stream of tokens, divided into its documents.
#[derive(Debug)]
pub(super) struct Documents {
    pub(super) stream: CheckedStream,
    end_of_text: i32,
    /// Where each document starts, and where it ends: after its end of text. Those with at least two tokens: one
    /// token has nothing to predict.
    places: Vec<(u64, u64)>,
    /// Whether the stream has an end of text.
    separated: bool,
    order: Order,
}

impl Documents {
    /// The documents of a stream. Reads all of it, to find them.
    pub(super) fn new(
        stream: TokenStream,
        tokenizer: &Tokenizer,
        order: Order,
    ) -> Result<Self, DataError> {
        let end_of_text = tokenizer.end_of_text() as i32;
        let ends = ends(&stream, end_of_text)?;
        let separated = !ends.is_empty();
        let mut places = Vec::with_capacity(ends.len());
        let mut start = 0;
        // Shards of other programs may end without an end of text.
        for end in ends.into_iter().chain([stream.tokens()]) {
            if end - start >= 2 {
                places.push((start, end));
            }
            start = end;
        }
        let stream = CheckedStream::new(stream, tokenizer);
        Ok(Documents { stream, end_of_text, places, separated, order })
    }

    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        self.places.len() as u64
    }

    /// Whether the stream has an end of text.
    pub(super) fn separated(&self) -> bool {
        self.separated
    }

    /// The tokens that carry a loss in rows of `seq_len`, over all documents.
    pub(super) fn targets(&self, seq_len: usize) -> u64 {
        self.places.iter().map(|(start, end)| (end - start - 1).min(seq_len as u64)).sum()
    }

    /// Sets how many of them a validation pass reads.
    pub(super) fn spread(&mut self, rows: u64) {
        assert!(rows <= self.count(), "{rows} rows of {}", self.count());
        self.order = Order::Spread { rows };
    }

    /// Fills a row of any length: its tokens, one more than it has targets, the targets and their weights.
    pub(super) fn fill(
        &self,
        index: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), DataError> {
        let (start, end) = self.places[self.order.at(index, self.count()) as usize];
        let length = (end - start).min(tokens.len() as u64) as usize;
        self.stream.read(start, &mut tokens[..length])?;
        weights.fill(1.0);
        pad(self.end_of_text, length, tokens, weights);
        targets.copy_from_slice(&tokens[1..]);
        Ok(())
    }
}

/// Leaves the first generated example of a row, which ends with the first end of text.
pub(super) fn keep_first(
    end_of_text: i32,
    tokens: &mut [i32],
    targets: &mut [i32],
    weights: &mut [f32],
) {
    let Some(end) = tokens.iter().position(|&token| token == end_of_text) else { return };
    pad(end_of_text, end + 1, tokens, weights);
    targets[end.min(weights.len())..].fill(end_of_text);
}

/// Pads a row after `length` tokens. The last of them predicts nothing.
fn pad(end_of_text: i32, length: usize, tokens: &mut [i32], weights: &mut [f32]) {
    tokens[length..].fill(end_of_text);
    weights[(length - 1).min(tokens.len() - 1)..].fill(0.0);
}

/// The places after every end of text.
fn ends(stream: &TokenStream, end_of_text: i32) -> Result<Vec<u64>, DataError> {
    const PART: u64 = 1 << 20;
    let starts: Vec<u64> = (0..stream.tokens()).step_by(PART as usize).collect();
    let ends_from = |&start: &u64| {
        let mut tokens = vec![0; PART.min(stream.tokens() - start) as usize];
        stream.read(start, &mut tokens)?;
        let at = (start + 1..).zip(tokens).filter(|(_, token)| *token == end_of_text);
        Ok(at.map(|(end, _)| end).collect())
    };
    let parts: Vec<Vec<u64>> =
        starts.par_iter().map(ends_from).collect::<Result<_, DataError>>()?;
    Ok(parts.concat())
}
