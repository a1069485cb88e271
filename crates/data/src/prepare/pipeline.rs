//! Read, encode, write: three stages on their own threads, the middle one parallel. Batches stay in
//! order, and so does the output.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use rayon::prelude::*;

use super::PrepareOptions;
use super::holdout::{is_validation, tail_start};
use super::journal::{Journal, SplitProgress, State};
use crate::corpus::{Decoded, DecodedText, Document, Inputs, Position, ReadBytes, read};
use crate::shard::{SplitWriter, Width};
use crate::{DataError, Progress, Tokenizer};

/// The most documents in a batch; `batch_bytes` also limits it.
const BATCH_DOCUMENTS: usize = 8192;

/// Batches that may wait between two stages.
const WAITING: usize = 2;

struct DocumentBatch<T> {
    items: Vec<T>,
    /// The position after the batch.
    next: Position,
}

/// A document on its way into a shard.
struct Encoded {
    tokens: Vec<u32>,
    bytes: u64,
    validation: bool,
    replaced: bool,
}

/// A document, or its two parts.
type EncodedParts = [Option<Decoded<Encoded>>; 2];
type ReadBatch = Result<DocumentBatch<Document>, DataError>;
type EncodedBatch = Result<DocumentBatch<Decoded<Encoded>>, DataError>;

/// Encodes the documents from `state` to the end of the inputs and returns the final state.
pub(super) fn run(
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
    state: State,
    journal: &Journal,
    progress: &dyn Progress,
) -> Result<State, DataError> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|error| DataError::Option {
            key: "threads",
            value: options.threads.map_or("one per core".into(), |threads| threads.to_string()),
            allowed: format!("what the system can start ({error})"),
            hint: "choose fewer threads".into(),
        })?;
    let read_bytes = ReadBytes::default();
    let mut writer = Writer::open(options, tokenizer, state)?;
    std::thread::scope(|scope| {
        // The channels close with this closure's scope: when the writer stops, so do the other stages.
        let (to_encode, documents) = sync_channel::<ReadBatch>(WAITING);
        let (to_write, encoded) = sync_channel::<EncodedBatch>(WAITING);
        let start = writer.state.position;
        let counter = &read_bytes;
        scope.spawn(move || read_batches(options, inputs, start, counter, &to_encode));
        scope.spawn(move || {
            pool.install(|| encode_batches(options, tokenizer, inputs, documents, &to_write))
        });
        writer.write_all(encoded, options, journal, progress, &read_bytes)
    })?;
    writer.finish()
}

fn read_batches(
    options: &PrepareOptions,
    inputs: &Inputs,
    start: Position,
    read_bytes: &ReadBytes,
    out: &SyncSender<ReadBatch>,
) {
    let mut batch = DocumentBatch { items: Vec::new(), next: start };
    let mut bytes = 0;
    let result = read(&*options.corpus, inputs, start, read_bytes, &mut |document, next| {
        bytes += document.weight(inputs);
        batch.items.push(document);
        batch.next = next;
        if bytes < options.batch_bytes && batch.items.len() < BATCH_DOCUMENTS {
            return true;
        }
        bytes = 0;
        let full = std::mem::replace(&mut batch, DocumentBatch { items: Vec::new(), next });
        out.send(Ok(full)).is_ok()
    });
    // A closed channel means that the writer has stopped; it reports why.
    let _ = out.send(result.map(|()| batch));
}

fn encode_batches(
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
    documents: Receiver<ReadBatch>,
    out: &SyncSender<EncodedBatch>,
) {
    let encode = |document| encode(document, options, tokenizer, inputs);
    for batch in documents {
        let encoded = batch.and_then(|DocumentBatch { items, next }| {
            // Not `collect` into a Result: that returns any of the errors, this returns the first.
            let results: Vec<_> = items.into_par_iter().map(encode).collect();
            let parts = results.into_iter().collect::<Result<Vec<EncodedParts>, _>>()?;
            let items = parts.into_iter().flatten().flatten().collect();
            Ok(DocumentBatch { items, next })
        });
        if out.send(encoded).is_err() {
            return;
        }
    }
}

/// Encodes a document; one that is the whole corpus becomes two, of which the second is held out.
fn encode(
    document: Document,
    options: &PrepareOptions,
    tokenizer: &Tokenizer,
    inputs: &Inputs,
) -> Result<EncodedParts, DataError> {
    let group = document.group.clone();
    let text = match document.text(inputs)? {
        Decoded::Document(text) => text,
        Decoded::Empty => return Ok([Some(Decoded::Empty), None]),
        Decoded::Binary => return Ok([Some(Decoded::Binary), None]),
    };
    let encode = |part: &str, validation: bool, replaced: bool| {
        let mut tokens = tokenizer.try_encode(part)?;
        tokens.push(tokenizer.end_of_text());
        let bytes = part.len() as u64;
        Ok(Some(Decoded::Document(Encoded { tokens, bytes, validation, replaced })))
    };
    let DecodedText { text, replaced } = text;
    let fraction = options.validation_fraction;
    if options.holds_out_tail(inputs)
        && let Some(at) = tail_start(&text, fraction)
    {
        return Ok([encode(&text[..at], false, replaced)?, encode(&text[at..], true, false)?]);
    }
    let deciding = group.as_deref().unwrap_or(&text);
    Ok([encode(&text, is_validation(deciding, fraction), replaced)?, None])
}

/// The last stage: counts, writes, saves the state.
struct Writer {
    state: State,
    train: SplitWriter,
    validation: SplitWriter,
}

impl Writer {
    fn open(
        options: &PrepareOptions,
        tokenizer: &Tokenizer,
        state: State,
    ) -> Result<Self, DataError> {
        let width = Width::of_vocab(tokenizer.vocab_size());
        let split = |suffix: &str, first| {
            let stem = format!("{}_{suffix}", options.name);
            SplitWriter::new(&options.out, stem, first, width, options.shard_tokens)
        };
        let (mut train, mut validation) = (split("train", 1), split("val", 0));
        train.resume(state.train.shards.clone())?;
        validation.resume(state.validation.shards.clone())?;
        Ok(Writer { state, train, validation })
    }

    fn write_all(
        &mut self,
        batches: Receiver<EncodedBatch>,
        options: &PrepareOptions,
        journal: &Journal,
        progress: &dyn Progress,
        read_bytes: &ReadBytes,
    ) -> Result<(), DataError> {
        let mut saved = Instant::now();
        for batch in batches {
            let batch = batch?;
            for outcome in batch.items {
                self.add(outcome)?;
            }
            self.state.position = batch.next;
            progress.advance(read_bytes.take());
            let cancelled = progress.cancelled();
            if cancelled || saved.elapsed() >= options.save_every {
                self.state.train.shards = self.train.sync()?;
                self.state.validation.shards = self.validation.sync()?;
                journal.save(&self.state)?;
                saved = Instant::now();
            }
            if cancelled {
                let documents = self.state.documents();
                return Err(DataError::Interrupted { documents, path: options.out.clone() });
            }
        }
        Ok(())
    }

    fn add(&mut self, outcome: Decoded<Encoded>) -> Result<(), DataError> {
        let document = match outcome {
            Decoded::Document(document) => document,
            Decoded::Empty => {
                self.state.skipped.empty += 1;
                return Ok(());
            }
            Decoded::Binary => {
                self.state.skipped.binary += 1;
                return Ok(());
            }
        };
        let tokens = document.tokens.len() as u64;
        self.state.lengths.add(tokens - 1);
        self.state.skipped.invalid_utf8 += u64::from(document.replaced);
        let (split, writer): (&mut SplitProgress, _) = if document.validation {
            (&mut self.state.validation, &mut self.validation)
        } else {
            (&mut self.state.train, &mut self.train)
        };
        split.documents += 1;
        split.tokens += tokens;
        split.bytes += document.bytes;
        writer.push(&document.tokens)
    }

    fn finish(mut self) -> Result<State, DataError> {
        self.state.train.shards.shards = self.train.finish()?;
        self.state.validation.shards.shards = self.validation.finish()?;
        Ok(self.state)
    }
}
