//! The options of `prepare`, and its report.

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::corpus::Inputs;
use crate::shard::{MOST_TOKENS, Manifest};
use crate::{Corpus, DataError};

/// What [`prepare`](crate::prepare()) reads and writes.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// The text.
    pub corpus: Arc<dyn Corpus>,
    /// Folder for the shards; created if it does not exist. A folder holds one prepared corpus.
    pub out: PathBuf,
    /// First part of the shards' names.
    pub name: String,
    /// Share of the documents held out for validation, 0 to below 1. A document's hash decides (for
    /// `cargo-sources` its crate's), so its split does not depend on other documents. Of a corpus that
    /// is one document, its end.
    pub validation_fraction: f64,
    /// Tokens in a shard; the last one of a split is shorter.
    pub shard_tokens: u64,
    /// Threads that encode; by default one per core.
    pub threads: Option<usize>,
    /// Bytes of text encoded at a time; memory holds a few times as much.
    pub batch_bytes: u64,
    /// How often the state is saved, for resuming.
    pub save_every: Duration,
}

impl PrepareOptions {
    /// The defaults: 1 % for validation, shards of 100M tokens, one thread per core, state saved every
    /// 10 seconds.
    pub fn new(corpus: Arc<dyn Corpus>, out: PathBuf, name: impl Into<String>) -> Self {
        PrepareOptions {
            corpus,
            out,
            name: name.into(),
            validation_fraction: 0.01,
            shard_tokens: 100_000_000,
            threads: None,
            batch_bytes: 8 << 20,
            save_every: Duration::from_secs(10),
        }
    }

    /// Whether the end of the text is held out, because the corpus is a single document.
    pub(super) fn holds_out_tail(&self, inputs: &Inputs) -> bool {
        self.validation_fraction > 0.0 && self.corpus.is_one_document(inputs)
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        let fail = |key, value: String, allowed: &str, hint: &str| {
            Err(DataError::Option { key, value, allowed: allowed.into(), hint: hint.into() })
        };
        if !(0.0..1.0).contains(&self.validation_fraction) {
            let hint = "0.01 holds out one document in a hundred";
            return fail(
                "validation_fraction",
                self.validation_fraction.to_string(),
                "0 to below 1",
                hint,
            );
        }
        if !(1..=MOST_TOKENS).contains(&self.shard_tokens) {
            let allowed = format!("1 to {MOST_TOKENS} tokens");
            return fail(
                "shard_tokens",
                self.shard_tokens.to_string(),
                &allowed,
                "100M is the default",
            );
        }
        if self.name.is_empty() || self.name.starts_with('.') || self.name.contains(['/', '\\']) {
            let allowed = "a file name without a dot in front and without slashes";
            return fail(
                "name",
                format!("{:?}", self.name),
                allowed,
                "choose a short word, for example \"books\"",
            );
        }
        if self.threads == Some(0) {
            return fail(
                "threads",
                "0".into(),
                "1 or more",
                "leave it out for one thread per core",
            );
        }
        Ok(())
    }
}

/// Where a run started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrepareStart {
    /// From the beginning.
    Fresh,
    /// Where an interrupted run had stopped.
    Resumed,
    /// It did not start: the folder was complete.
    Complete,
}

/// The result of [`prepare`](crate::prepare()). Displays as the lines that the command prints.
#[derive(Clone, Debug)]
pub struct PrepareReport {
    /// The folder of shards.
    pub out: PathBuf,
    /// Documents, tokens, bytes, lengths and shards, for the whole corpus.
    pub manifest: Manifest,
    /// Where this run started.
    pub start: PrepareStart,
    /// Bytes of text that this run encoded.
    pub encoded_bytes: u64,
    /// Seconds that this run took.
    pub seconds: f64,
}

impl PrepareReport {
    /// Megabytes (10⁶) of text per second, in this run.
    pub fn mb_per_second(&self) -> f64 {
        self.encoded_bytes as f64 / 1e6 / self.seconds.max(1e-9)
    }
}

impl Display for PrepareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Manifest { documents, tokens, bytes, lengths, skipped, train, validation, .. } =
            &self.manifest;
        let megabytes = *bytes as f64 / 1e6;
        writeln!(
            f,
            "{documents} documents, {tokens} tokens, {megabytes:.1} MB of text from {} files",
            self.manifest.inputs
        )?;
        writeln!(f, "document length in tokens: {lengths}")?;
        let share = 100.0 * validation.tokens as f64 / (*tokens).max(1) as f64;
        writeln!(
            f,
            "training: {} documents, {} tokens; validation: {} documents, {} tokens ({share:.2} %)",
            train.documents, train.tokens, validation.documents, validation.tokens
        )?;
        if skipped.empty + skipped.binary + skipped.invalid_utf8 > 0 {
            writeln!(
                f,
                "left out: {} empty documents, {} binary files; {} documents with invalid UTF-8 read with U+FFFD in its place",
                skipped.empty, skipped.binary, skipped.invalid_utf8
            )?;
        }
        let shards = train.shards.len() + validation.shards.len();
        match self.start {
            PrepareStart::Complete => {
                write!(f, "{} was complete: {shards} shards", self.out.display())
            }
            _ => write!(
                f,
                "{shards} shards in {}, {:.1} s, {:.1} MB/s",
                self.out.display(),
                self.seconds,
                self.mb_per_second()
            ),
        }
    }
}
