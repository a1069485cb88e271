//! Rows of tokens for training and validation, with random access.
//!
//! The order is a function of the configuration, the seed and the row's index:
//! - [`Mixture`] says which source a row comes from, and which of the source's rows it is.
//! - A source of text is one stream of tokens, cut into windows of `seq_len + 1` tokens,
//!   `seq_len` apart. An epoch has every window once, in an order that a [`Permutation`] keyed by
//!   seed, source and epoch gives. Each epoch shifts all windows by its own offset below
//!   `seq_len`, so that no token is always first in a row.
//!   With `rows = "documents"` or `"cut-documents"` a row is one document from its start, and an epoch has every document
//!   once.
//!   With `rows = "streams"` the rows of a batch are as many streams, each of which goes on through a part of the text
//!   from batch to batch.
//! - A generated source makes its n-th row from the seed and n.
//!
//! So the loader keeps no state: a cursor is the index of the next row.

mod documents;
mod open;
mod streams;
mod windows;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::mixture::Mixture;
use crate::shard::MANIFEST_FILE;
use crate::sources::RowGenerator;
use crate::{DataConfig, DataError, Progress, Rows, Tokenizer};
use documents::{Documents, keep_first};
use streams::StreamRow;
use windows::{CheckedStream, Windows};

/// A part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Trained on: endless, in a random order.
    Train,
    /// Held out: finite, the same rows in the same order every time.
    Validation,
}

impl Split {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Split::Train => "training",
            Split::Validation => "validation",
        }
    }
}

/// Rows of tokens, row-major: `inputs`, `targets`, `loss_weights` and `document_starts` are
/// `[rows, seq_len]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Rows.
    pub rows: usize,
    /// Tokens in a row.
    pub seq_len: usize,
    /// The tokens the model sees.
    pub inputs: Vec<i32>,
    /// What to predict after each input: the token that follows it, or a label that a generated source
    /// gives in its place.
    pub targets: Vec<i32>,
    /// The weight of each target in the loss: 0 or 1.
    pub loss_weights: Vec<f32>,
    /// For each position, the index in its row of the first token of its document: attention must
    /// not go further back. `None` when `document_mask` is off.
    pub document_starts: Option<Vec<i32>>,
    /// With `rows = "streams"`, whether each row's first token goes on from the same row of the batch before: within one
    /// document, if `document_mask` is on.
    pub goes_on: Option<Vec<bool>>,
}

impl Batch {
    /// The same tokens in rows of `seq_len`: each row is cut into consecutive ones. A document that is cut goes on
    /// as one that starts with its row.
    ///
    /// # Panics
    /// When `seq_len` does not divide the length of the rows.
    pub fn cut(mut self, seq_len: usize) -> Self {
        let old = self.seq_len;
        assert!(seq_len > 0 && old.is_multiple_of(seq_len), "rows of {old} cut into {seq_len}");
        if let Some(starts) = &mut self.document_starts {
            for (at, start) in starts.iter_mut().enumerate() {
                let row = (at % old / seq_len * seq_len) as i32;
                *start = (*start - row).max(0);
            }
        }
        Batch { rows: self.rows * (old / seq_len), seq_len, ..self }
    }

    /// Some of its rows.
    ///
    /// # Panics
    /// When it has fewer.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let tokens = rows.start * self.seq_len..rows.end * self.seq_len;
        Batch {
            rows: rows.len(),
            seq_len: self.seq_len,
            inputs: self.inputs[tokens.clone()].to_vec(),
            targets: self.targets[tokens.clone()].to_vec(),
            loss_weights: self.loss_weights[tokens.clone()].to_vec(),
            document_starts: self.document_starts.as_ref().map(|all| all[tokens].to_vec()),
            goes_on: self.goes_on.as_ref().map(|all| all[rows].to_vec()),
        }
    }
}

/// An opened source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceSummary {
    /// Its key in the configuration and its kind: `data.sources[0] (text)`.
    pub name: String,
    /// Its kind.
    pub kind: &'static str,
    /// Tokens in this split; `None` when they are generated.
    pub tokens: Option<u64>,
    /// Rows in an epoch (for validation: in a pass); `None` when they are generated.
    pub rows: Option<u64>,
    /// Its share of the rows, 0 to 1.
    pub share: f64,
    /// A hash of a sample of its tokens, or of its settings.
    pub fingerprint: String,
}

/// A position in the training order, and what the order depends on. Saved in checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// The next row to train on.
    pub next_row: u64,
    /// The run's seed.
    pub seed: u64,
    /// Tokens in a row.
    pub seq_len: usize,
    /// What a row holds. Packed in cursors of versions that had no other.
    #[serde(default, skip_serializing_if = "Rows::is_packed")]
    pub rows: Rows,
    /// The tokenizer's fingerprint.
    pub tokenizer: String,
    /// Fingerprint and weight of every source, in order.
    pub sources: Vec<CursorSource>,
}

/// One source in a [`Cursor`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CursorSource {
    /// [`SourceSummary::name`].
    pub name: String,
    /// The weight in the configuration.
    pub weight: f64,
    /// [`SourceSummary::fingerprint`].
    pub fingerprint: String,
}

/// Hands out rows. Threads can share one loader.
#[derive(Debug)]
pub struct Loader {
    seq_len: usize,
    rows: Rows,
    seed: u64,
    document_mask: bool,
    end_of_text: i32,
    tokenizer: Tokenizer,
    sources: Vec<SourceRows>,
    summaries: Vec<SourceSummary>,
    weights: Vec<f64>,
    plan: Plan,
}

/// The rows of one source.
#[derive(Debug)]
enum SourceRows {
    /// Cut from a stream of tokens.
    Windows(Windows),
    /// The documents of a stream of tokens.
    Documents(Documents),
    /// Generated by the source.
    Generated(Box<dyn RowGenerator>),
}

impl SourceRows {
    /// The stream of tokens, unless the rows are generated.
    fn stream(&self) -> Option<&CheckedStream> {
        match self {
            SourceRows::Windows(windows) => Some(&windows.stream),
            SourceRows::Documents(documents) => Some(&documents.stream),
            SourceRows::Generated(_) => None,
        }
    }

    /// Fills the row's `seq_len + 1` tokens, its targets and their weights.
    fn fill(
        &self,
        index: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), DataError> {
        match self {
            SourceRows::Windows(windows) => {
                windows.fill(windows.start(index), tokens, targets, weights)?;
            }
            SourceRows::Documents(documents) => documents.fill(index, tokens, targets, weights)?,
            SourceRows::Generated(rows) => rows.fill(index, tokens, targets, weights),
        }
        Ok(())
    }
}

/// How rows are assigned to sources.
#[derive(Debug)]
enum Plan {
    Train(Mixture),
    /// First row of each source, and the number of rows at the end.
    Validation(Vec<u64>),
}

impl Loader {
    /// Opens the sources of one split. Text is first encoded into `cache_dir`, unless it is there
    /// already; an interrupted preparation continues where it stopped.
    ///
    /// # Errors
    /// When a source is missing, malformed, too short for one row, or made with another
    /// tokenizer, or when the cache cannot be written.
    pub fn open(
        config: &DataConfig,
        tokenizer: &Tokenizer,
        seed: u64,
        split: Split,
        progress: &dyn Progress,
    ) -> Result<Loader, DataError> {
        open::open(config, tokenizer, seed, split, progress)
    }

    /// Rows `first_row..first_row + rows`. Ranks that share a batch read slices of it. With `rows = "streams"` they are one
    /// row of each of as many streams: all batches of a run must have the same number of rows.
    ///
    /// With `document_mask`, the target after an end of text has no loss: it is the first token of the
    /// next document, which nothing in this one predicts.
    ///
    /// Validation rows from [`validation_rows`](Self::validation_rows) on are padding without loss,
    /// so that the last batch of a pass can be as large as the others.
    ///
    /// # Panics
    /// When [`try_batch`](Self::try_batch) fails.
    pub fn batch(&self, first_row: u64, rows: usize) -> Batch {
        match self.try_batch(first_row, rows) {
            Ok(batch) => batch,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`batch`](Self::batch), with an error for a damaged shard.
    ///
    /// # Errors
    /// [`DataError::TokenOutOfRange`] when a row holds a token that the tokenizer lacks: the shard is
    /// damaged in a block that was not sampled when it was opened, or was changed since.
    /// [`DataError::Read`] when the disk fails, or the shard was cut short since it was opened.
    pub fn try_batch(&self, first_row: u64, rows: usize) -> Result<Batch, DataError> {
        self.rows_of(first_row, rows, self.seq_len)
    }

    /// A batch of `tokens` in rows of `seq_len`, from the loader's row `first_row` on. It takes
    /// [`Rows::taken`] rows of the loader, which are cut into shorter ones; in `rows = "documents"` a shorter row has the
    /// first tokens of a document or of a generated example.
    ///
    /// # Errors
    /// As [`try_batch`](Self::try_batch).
    ///
    /// # Panics
    /// When `seq_len` does not divide the length of the loader's rows.
    pub fn try_shorter(
        &self,
        first_row: u64,
        tokens: usize,
        seq_len: usize,
    ) -> Result<Batch, DataError> {
        assert!(
            seq_len > 0 && self.seq_len.is_multiple_of(seq_len),
            "rows of {} shortened to {seq_len}",
            self.seq_len
        );
        let rows = self.rows.taken(tokens as u64, seq_len, self.seq_len) as usize;
        match self.rows {
            Rows::Packed | Rows::CutDocuments | Rows::Streams => {
                Ok(self.try_batch(first_row, rows)?.cut(seq_len))
            }
            Rows::Documents => self.rows_of(first_row, rows, seq_len),
        }
    }

    /// The first `seq_len` tokens of each of `rows` rows.
    fn rows_of(&self, first_row: u64, rows: usize, seq_len: usize) -> Result<Batch, DataError> {
        let (count, streams) = (rows * seq_len, self.streams(rows));
        let goes_on = streams.map(|streams| {
            let rows = (first_row..first_row + rows as u64).into_par_iter();
            rows.map(|row| self.goes_on(StreamRow { row, streams })).collect()
        });
        let mut batch = Batch {
            rows,
            seq_len,
            inputs: vec![0; count],
            targets: vec![0; count],
            loss_weights: vec![0.0; count],
            document_starts: self.document_mask.then(|| vec![0; count]),
            goes_on: goes_on.transpose()?,
        };
        let starts = match &mut batch.document_starts {
            Some(starts) => starts.par_chunks_mut(seq_len).map(Some).collect(),
            None => Vec::from_iter((0..rows).map(|_| None)),
        };
        batch
            .inputs
            .par_chunks_mut(seq_len)
            .zip(batch.targets.par_chunks_mut(seq_len))
            .zip(batch.loss_weights.par_chunks_mut(seq_len))
            .zip(starts)
            .enumerate()
            .try_for_each_init(
                || vec![0; seq_len + 1],
                |tokens, (row, (((inputs, targets), weights), starts))| {
                    self.fill(first_row + row as u64, streams, tokens, targets, weights)?;
                    inputs.copy_from_slice(&tokens[..seq_len]);
                    if let Some(starts) = starts {
                        separate_documents(self.end_of_text, inputs, weights, starts);
                    }
                    Ok(())
                },
            )?;
        Ok(batch)
    }

    /// The streams that a batch of `rows` rows has, if its rows are streams.
    fn streams(&self, rows: usize) -> Option<u64> {
        let trains = matches!(self.plan, Plan::Train(_));
        (self.rows == Rows::Streams && trains).then_some(rows as u64)
    }

    /// The text that the streams read.
    ///
    /// # Panics
    /// When the rows are generated, or no streams: a valid configuration has one source of text.
    fn stream_windows(&self) -> &Windows {
        match &self.sources[..] {
            [SourceRows::Windows(windows)] => windows,
            sources => panic!("streams of {sources:?}"),
        }
    }

    fn goes_on(&self, row: StreamRow) -> Result<bool, DataError> {
        self.stream_windows().goes_on(row, self.document_mask.then_some(self.end_of_text))
    }

    /// Rejects batches of `rows` rows that are streams, if the text has fewer rows.
    ///
    /// # Errors
    /// [`DataError::FewerRowsThanStreams`].
    pub fn check_streams(&self, rows: usize) -> Result<(), DataError> {
        let windows = |streams| self.stream_windows().steps(streams);
        match self.streams(rows).map(windows) {
            Some(0) => Err(DataError::FewerRowsThanStreams {
                source_name: self.summaries[0].name.clone(),
                rows: self.stream_windows().count,
                seq_len: self.seq_len,
                streams: rows,
            }),
            _ => Ok(()),
        }
    }

    /// Fills one row's tokens, its targets and their weights; `streams` are those of its batch, if it is of one.
    fn fill(
        &self,
        row: u64,
        streams: Option<u64>,
        tokens: &mut [i32],
        targets: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), DataError> {
        if let Some(streams) = streams {
            let windows = self.stream_windows();
            let place = windows.place(StreamRow { row, streams });
            return windows.fill(place.start, tokens, targets, weights);
        }
        let (source, index) = match &self.plan {
            Plan::Train(mixture) => mixture.locate(row),
            Plan::Validation(starts) if row >= starts[self.sources.len()] => {
                tokens.fill(self.end_of_text);
                targets.fill(self.end_of_text);
                weights.fill(0.0);
                return Ok(());
            }
            Plan::Validation(starts) => {
                let source = starts.partition_point(|&start| start <= row) - 1;
                (source, row - starts[source])
            }
        };
        match (self.rows, &self.sources[source]) {
            (Rows::Documents | Rows::CutDocuments, SourceRows::Generated(rows)) => {
                self.first_example(&**rows, index, tokens, targets, weights);
                Ok(())
            }
            (_, rows) => rows.fill(index, tokens, targets, weights),
        }
    }

    /// Fills a row with one generated example, or its first tokens. The source draws the example for a row of
    /// `data.seq_len`, which it may need.
    fn first_example(
        &self,
        rows: &dyn RowGenerator,
        index: u64,
        tokens: &mut [i32],
        targets: &mut [i32],
        weights: &mut [f32],
    ) {
        let (mut all, mut all_targets) = (vec![0; self.seq_len + 1], vec![0; self.seq_len]);
        let mut all_weights = vec![0.0; self.seq_len];
        rows.fill(index, &mut all, &mut all_targets, &mut all_weights);
        keep_first(self.end_of_text, &mut all, &mut all_targets, &mut all_weights);
        tokens.copy_from_slice(&all[..tokens.len()]);
        targets.copy_from_slice(&all_targets[..targets.len()]);
        weights.copy_from_slice(&all_weights[..weights.len()]);
    }

    /// The sources whose generated examples lose targets in rows of `seq_len`, which are shorter than the loader's, and
    /// the share of targets that is left: of some examples. Only in `rows = "documents"` they lose any.
    ///
    /// # Panics
    /// When the loader's rows are shorter.
    pub fn cut_examples(&self, seq_len: usize) -> Vec<(&str, f64)> {
        const EXAMPLES: u64 = 64;
        if self.rows != Rows::Documents {
            return vec![];
        }
        let (mut tokens, mut targets) = (vec![0; self.seq_len + 1], vec![0; self.seq_len]);
        let mut weights = vec![0.0; self.seq_len];
        let mut left = |rows: &dyn RowGenerator| {
            let (mut kept, mut all) = (0.0, 0.0);
            for index in 0..EXAMPLES {
                self.first_example(rows, index, &mut tokens, &mut targets, &mut weights);
                kept += weights[..seq_len].iter().sum::<f32>();
                all += weights.iter().sum::<f32>();
            }
            f64::from(kept / all)
        };
        let sources = self.sources.iter().zip(&self.summaries);
        let left = sources.filter_map(|(rows, summary)| match rows {
            SourceRows::Generated(rows) => Some((summary.name.as_str(), left(&**rows))),
            SourceRows::Windows(_) | SourceRows::Documents(_) => None,
        });
        left.filter(|(_, share)| *share < 1.0).collect()
    }

    /// Tokens in the sources, not counting generated ones.
    pub fn tokens(&self) -> u64 {
        self.summaries.iter().filter_map(|source| source.tokens).sum()
    }

    /// Rows of all text sources together: one pass over all text takes about this many rows. Generated
    /// sources have no epochs and count as 0.
    pub fn rows_per_epoch(&self) -> u64 {
        self.summaries.iter().filter_map(|source| source.rows).sum()
    }

    /// Rows in a validation pass: as many as `validation_tokens` allows and the sources have. `None` for
    /// training, which is endless.
    pub fn validation_rows(&self) -> Option<u64> {
        match &self.plan {
            Plan::Train(_) => None,
            Plan::Validation(starts) => starts.last().copied(),
        }
    }

    /// What a row holds.
    pub fn rows(&self) -> Rows {
        self.rows
    }

    /// Tokens in a row.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The sources that this split has, in the configuration's order.
    pub fn sources(&self) -> &[SourceSummary] {
        &self.summaries
    }

    /// The folders of this split's shards that have a manifest, for [`verify_shards`](crate::verify_shards).
    pub fn prepared_folders(&self) -> Vec<PathBuf> {
        let streams = self.sources.iter().filter_map(SourceRows::stream);
        let paths = streams.flat_map(CheckedStream::paths);
        let folders: BTreeSet<&Path> = paths.filter_map(Path::parent).collect();
        let prepared = folders.into_iter().filter(|folder| folder.join(MANIFEST_FILE).exists());
        prepared.map(Path::to_path_buf).collect()
    }

    /// The cursor of a run whose next row is `next_row`.
    pub fn cursor(&self, next_row: u64) -> Cursor {
        let sources =
            self.summaries.iter().zip(&self.weights).map(|(source, &weight)| CursorSource {
                name: source.name.clone(),
                weight,
                fingerprint: source.fingerprint.clone(),
            });
        Cursor {
            next_row,
            seed: self.seed,
            seq_len: self.seq_len,
            rows: self.rows,
            tokenizer: self.tokenizer.fingerprint(),
            sources: sources.collect(),
        }
    }

    /// The cursor's next row, provided that this loader has the order that the cursor was made in.
    ///
    /// # Errors
    /// When tokens, sources, weights, `seq_len`, `rows`, seed or tokenizer differ; the message names the
    /// first difference.
    pub fn check_cursor(&self, cursor: &Cursor) -> Result<u64, DataError> {
        let now = self.cursor(cursor.next_row);
        let changed = |what: &str, then: &dyn std::fmt::Display, now: &dyn std::fmt::Display| {
            Err(DataError::DataChanged { change: format!("{what} was {then}, and is {now}") })
        };
        if now.seq_len != cursor.seq_len {
            return changed("data.seq_len", &cursor.seq_len, &now.seq_len);
        }
        if now.rows != cursor.rows {
            return changed("data.rows", &cursor.rows, &now.rows);
        }
        if now.seed != cursor.seed {
            return changed("the seed", &cursor.seed, &now.seed);
        }
        if now.tokenizer != cursor.tokenizer {
            return changed("the tokenizer's fingerprint", &cursor.tokenizer, &now.tokenizer);
        }
        if now.sources.len() != cursor.sources.len() {
            return changed("the number of sources", &cursor.sources.len(), &now.sources.len());
        }
        for (then, now) in cursor.sources.iter().zip(&now.sources) {
            if then.name != now.name {
                return changed("a source", &then.name, &now.name);
            }
            if then.weight != now.weight {
                return changed(&format!("the weight of {}", then.name), &then.weight, &now.weight);
            }
            if then.fingerprint != now.fingerprint {
                let short = |text: &str| text.chars().take(16).collect::<String>();
                let what = format!("the fingerprint of {}", then.name);
                return changed(&what, &short(&then.fingerprint), &short(&now.fingerprint));
            }
        }
        Ok(cursor.next_row)
    }
}

/// Writes the start of every position's document into `starts`, and removes the loss of the target
/// after each end of text.
fn separate_documents(end_of_text: i32, inputs: &[i32], weights: &mut [f32], starts: &mut [i32]) {
    let mut start = 0;
    for (at, &token) in inputs.iter().enumerate() {
        starts[at] = start;
        if token == end_of_text {
            weights[at] = 0.0;
            start = at as i32 + 1;
        }
    }
}

#[cfg(test)]
mod tests;
