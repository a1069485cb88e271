//! Rows as windows of a stream of tokens.

use std::path::Path;

use crate::mixture::derive_key;
use crate::permutation::Permutation;
use crate::shard::TokenStream;
use crate::{DataError, Tokenizer};

/// A stream of tokens that are checked against a vocabulary when they are read.
#[derive(Debug)]
pub(super) struct CheckedStream {
    stream: TokenStream,
    /// The tokenizer's name.
    tokenizer: String,
    vocab_size: usize,
}

impl CheckedStream {
    pub(super) fn new(stream: TokenStream, tokenizer: &Tokenizer) -> Self {
        let (vocab_size, tokenizer) = (tokenizer.vocab_size(), tokenizer.name().into());
        CheckedStream { stream, tokenizer, vocab_size }
    }

    pub(super) fn tokens(&self) -> u64 {
        self.stream.tokens()
    }

    pub(super) fn fingerprint(&self) -> Result<String, DataError> {
        self.stream.fingerprint()
    }

    /// The shards' paths.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.stream.paths()
    }

    /// Fills `tokens` from `start` on. Fails if they cannot be read, or if the vocabulary lacks one.
    pub(super) fn read(&self, start: u64, tokens: &mut [i32]) -> Result<(), DataError> {
        self.stream.read(start, tokens)?;
        // As u32, so that a token above i32::MAX is found too.
        let out_of_range = |&token: &i32| token as u32 as usize >= self.vocab_size;
        let Some(at) = tokens.iter().position(out_of_range) else { return Ok(()) };
        let found = self.stream.out_of_range(start + at as u64, tokens[at] as u32);
        Err(found.error(&self.tokenizer, self.vocab_size))
    }
}

/// A stream of tokens, cut into windows.
#[derive(Debug)]
pub(super) struct Windows {
    pub(super) stream: CheckedStream,
    pub(super) seq_len: u64,
    pub(super) order: Order,
    /// Windows in an epoch, at least 1.
    pub(super) count: u64,
}

#[derive(Debug)]
pub(super) enum Order {
    /// Permuted in each epoch; `key` is derived from seed and source.
    Shuffled { key: u64 },
    /// `rows` windows or documents, spread evenly over the stream.
    Spread { rows: u64 },
}

impl Order {
    /// Which of `count` windows or documents row `index` is.
    pub(super) fn at(&self, index: u64, count: u64) -> u64 {
        match *self {
            Order::Shuffled { key } => {
                let epoch = index / count;
                Permutation::new(count, derive_key("order", &[key, epoch])).at(index % count)
            }
            Order::Spread { rows } => {
                (u128::from(index) * u128::from(count) / u128::from(rows)) as u64
            }
        }
    }
}

impl Windows {
    /// The windows of a stream with at least `seq_len + 1` tokens.
    pub(super) fn new(
        stream: TokenStream,
        seq_len: usize,
        tokenizer: &Tokenizer,
        order: Order,
    ) -> Self {
        let (tokens, seq_len) = (stream.tokens(), seq_len as u64);
        assert!(tokens > seq_len, "{tokens} tokens for windows of {seq_len} + 1");
        let count = match order {
            // One fewer than would fit, so that the windows can shift by up to seq_len - 1.
            Order::Shuffled { .. } => (tokens / seq_len).saturating_sub(1).max(1),
            Order::Spread { .. } => (tokens - 1) / seq_len,
        };
        Windows { stream: CheckedStream::new(stream, tokenizer), seq_len, order, count }
    }

    /// Sets how many of the windows a validation pass reads.
    pub(super) fn spread(&mut self, rows: u64) {
        assert!(rows <= self.count, "{rows} rows of {}", self.count);
        self.order = Order::Spread { rows };
    }

    /// Fills the `seq_len + 1` tokens of the row that starts at `start`, its targets and their weights. Fails if the tokens
    /// cannot be read, or if the vocabulary lacks one.
    pub(super) fn fill(
        &self,
        start: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), DataError> {
        weights.fill(1.0);
        self.stream.read(start, tokens)?;
        targets.copy_from_slice(&tokens[1..]);
        Ok(())
    }

    /// Where in the stream a row starts. Each epoch of training shifts all windows.
    pub(super) fn start(&self, index: u64) -> u64 {
        let start = self.order.at(index, self.count) * self.seq_len;
        match self.order {
            Order::Shuffled { key } => start + self.offset(key, index / self.count),
            Order::Spread { .. } => start,
        }
    }

    /// By how much an epoch of training shifts all windows, below seq_len.
    pub(super) fn offset(&self, key: u64, epoch: u64) -> u64 {
        let room = self.stream.tokens() - 1 - self.count * self.seq_len;
        let offsets = room.min(self.seq_len - 1) + 1;
        derive_key("offset", &[key, epoch]) % offsets
    }
}
