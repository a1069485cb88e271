//! Everything that can go wrong with data. Each message gives the place, the value, what is allowed
//! and what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::config::Rows;
use crate::shard::MANIFEST_FILE;

/// An error of this crate. The second line of every message is a hint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder named by the user does not exist.
    #[error("{what} {} does not exist\n  hint: {hint}", path.display())]
    Missing {
        /// What was looked for: "text file", "shard", "tokenizer file".
        what: &'static str,
        /// Where it was looked for.
        path: PathBuf,
        /// What the user can do.
        hint: String,
    },
    /// Reading a file failed.
    #[error("cannot read {}: {source}\n  hint: check that the file is there, whole, and readable by you", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Writing a file or creating a folder failed.
    #[error("cannot write {}: {source}\n  hint: choose a folder you may write to, with enough space on its disk", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The folder for the shards of text sources cannot be used.
    #[error("cannot use {} in data.cache_dir: {source}\n  hint: set data.cache_dir to a folder you may write to, with enough space on its disk", path.display())]
    CacheDir {
        /// The file or folder in it.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A pattern with `*`, `?` or `[` is malformed.
    #[error(
        "{pattern:?} is not a file pattern: {reason}\n  hint: allowed are *, **, ? and [abc]; write [[] for a literal bracket"
    )]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A path or pattern matches no readable file.
    #[error("no {what} found in {place}\n  hint: {hint}")]
    NothingFound {
        /// What was looked for.
        what: &'static str,
        /// Where.
        place: String,
        /// What the user can do.
        hint: String,
    },
    /// A compressed file cannot be decompressed.
    #[error("cannot decompress {} as {codec}: {source}\n  hint: the file is damaged, cut short, or not {codec}; fetch it again, or correct its extension", path.display())]
    Decompress {
        /// The file.
        path: PathBuf,
        /// "gzip" or "zstd".
        codec: &'static str,
        /// The decoder's reason.
        source: io::Error,
    },
    /// A line of a JSONL file is malformed.
    #[error("{}:{line}: {reason}\n  hint: {hint}", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// What is wrong.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// A Parquet file cannot be read.
    #[error("cannot read {} as Parquet: {reason}\n  hint: the file is damaged, cut short, or not Parquet; fetch it again, or correct its extension", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The decoder's reason.
        reason: String,
    },
    /// A Parquet file lacks the text column, or the column holds something else.
    #[error("{} has no text column {column:?}: {found}\n  hint: set text_field (--text-field) to the column that holds the text", path.display())]
    ParquetColumn {
        /// The file.
        path: PathBuf,
        /// The column asked for.
        column: String,
        /// The columns there are, or the column's type.
        found: String,
    },
    /// A file named by the user holds binary data, not text.
    #[error("{} is not text: it holds a NUL byte\n  hint: give text, JSONL (.jsonl) or Parquet (.parquet), plain or compressed (.gz, .zst)", path.display())]
    Binary {
        /// The file.
        path: PathBuf,
    },
    /// A document is too large to encode in memory.
    #[error("{} holds a document of {size} bytes; allowed: at most {most}\n  hint: {hint}", path.display())]
    DocumentTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes of the document, as far as they were read.
        size: String,
        /// The most bytes of a document.
        most: u64,
        /// What the user can do.
        hint: String,
    },
    /// The input has no tokens.
    #[error("the corpus is empty: files read: {inputs}, documents with text: 0\n  hint: {hint}")]
    EmptyCorpus {
        /// Input files read.
        inputs: u64,
        /// What the user can do.
        hint: String,
    },
    /// A split has too few tokens for one row.
    #[error(
        "source {source_name} has {tokens} tokens for {split}, and a row needs seq_len + 1 = {needed}\n  hint: {hint}"
    )]
    TooShort {
        /// The source.
        source_name: String,
        /// "training" or "validation".
        split: &'static str,
        /// Tokens in the split.
        tokens: u64,
        /// Tokens one row needs.
        needed: u64,
        /// What the user can do.
        hint: String,
    },
    /// Shards that do not say where documents end, where a row is to be a document.
    #[error(
        "source {source_name} has no end of text among its {tokens} tokens, and data.rows is \"{rows}\"\n  hint: set rows = \"packed\", or make the shards again with an end of text after every document"
    )]
    NoDocuments {
        /// The source.
        source_name: String,
        /// Tokens in the split.
        tokens: u64,
        /// What a row should hold.
        rows: Rows,
    },
    /// A text is shorter than a row for each stream.
    #[error(
        "source {source_name} has {rows} rows of {seq_len} tokens, and a batch has {streams}; with data.rows = \"streams\" each reads a part of its own\n  hint: give more text, lower train.batch_tokens or data.seq_len, or set data.rows = \"packed\""
    )]
    FewerRowsThanStreams {
        /// The source.
        source_name: String,
        /// Rows of an epoch.
        rows: u64,
        /// Tokens in a row.
        seq_len: usize,
        /// Rows of a batch.
        streams: usize,
    },
    /// No source has validation data.
    #[error(
        "no source has validation data: {sources}\n  hint: raise data.validation_fraction, give more documents (data.sources.separator splits long text files), or give a shards source `validation` files"
    )]
    NoValidation {
        /// The sources and the tokens each holds for validation.
        sources: String,
    },
    /// A tokenizer file cannot be used.
    #[error("cannot use the tokenizer {}: {reason}\n  hint: {hint}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// The built-in vocabulary could not be set up; a defect of the build.
    #[error(
        "cannot set up the built-in {name} tokenizer: {reason}\n  hint: this build is defective; build Longwall again"
    )]
    BuiltIn {
        /// The tokenizer.
        name: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer trainer failed.
    #[error("cannot train a tokenizer: {reason}\n  hint: {hint}")]
    TrainTokenizer {
        /// What is wrong.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// A shard file is not a valid shard.
    #[error("{} is not a usable token shard: {reason}\n  hint: {hint}", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// What is wrong: magic, version, length.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// A part of a shard is not what its manifest says.
    #[error("{} is damaged: its bytes {start} to {end} have the CRC-32C {found:08x}, and {} says {expected:08x}\n  hint: copy the file again from an undamaged copy, or delete {} and prepare the text again; `longwall verify {}` checks every byte", path.display(), manifest.display(), folder(path), folder(path))]
    DamagedBlock {
        /// The shard.
        path: PathBuf,
        /// The manifest.
        manifest: PathBuf,
        /// The block's first byte.
        start: u64,
        /// The block's last byte.
        end: u64,
        /// The manifest's checksum.
        expected: u32,
        /// The file's checksum.
        found: u32,
    },
    /// A folder to verify has no manifest.
    #[error("{} has no {MANIFEST_FILE}, so its shards cannot be verified\n  hint: name a folder made by `longwall prepare`, or one in data.cache_dir", path.display())]
    NoManifest {
        /// The folder.
        path: PathBuf,
    },
    /// Shards were verified and are not what their manifest says.
    #[error("{} of {count} shards in {} cannot be used: {first}\n  hint: copy them again from undamaged copies, or delete {} and prepare the text again", bad, path.display(), path.display())]
    Unverified {
        /// The folder.
        path: PathBuf,
        /// Shards that are damaged, missing or not listed.
        bad: usize,
        /// Shards in the report.
        count: usize,
        /// The first one, and what is wrong with it.
        first: String,
    },
    /// The user interrupted the verification.
    #[error("interrupted before all shards in {} were verified\n  hint: run the same command again; it starts over", path.display())]
    VerificationInterrupted {
        /// The folder.
        path: PathBuf,
    },
    /// A shard holds a token the tokenizer does not have.
    #[error("{} holds token {token} at position {position}; the tokenizer {tokenizer} has tokens 0 to {}\n  hint: set [tokenizer] to the one the shard was made with, or prepare the text again with this one", path.display(), vocab_size - 1)]
    TokenOutOfRange {
        /// The shard.
        path: PathBuf,
        /// The token.
        token: u32,
        /// Its position, in tokens from the start of the shard.
        position: u64,
        /// The tokenizer's name.
        tokenizer: String,
        /// The tokenizer's vocabulary size.
        vocab_size: usize,
    },
    /// Shards were made with another tokenizer.
    #[error("the shards in {} were made with the tokenizer {theirs} (fingerprint {their_fingerprint}); this run uses {ours} (fingerprint {our_fingerprint})\n  hint: set [tokenizer] to {theirs}, or prepare the text again with {ours}", path.display())]
    OtherTokenizer {
        /// The folder with the manifest.
        path: PathBuf,
        /// The tokenizer in the manifest.
        theirs: String,
        /// Its fingerprint, shortened.
        their_fingerprint: String,
        /// The tokenizer in use.
        ours: String,
        /// Its fingerprint, shortened.
        our_fingerprint: String,
    },
    /// A manifest or a journal cannot be read.
    #[error("cannot read {}: {reason}\n  hint: {hint}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// The output folder holds something else.
    #[error("{} {reason}\n  hint: {hint}", path.display())]
    OutputInUse {
        /// The folder.
        path: PathBuf,
        /// What it holds.
        reason: String,
        /// What the user can do.
        hint: String,
    },
    /// An option has a value that cannot work.
    #[error("{key} is {value}; allowed: {allowed}\n  hint: {hint}")]
    Option {
        /// The option.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
        /// What the user can do.
        hint: String,
    },
    /// A synthetic prompt does not fit the requested length.
    #[error(
        "a {task} example takes at least {needed} tokens with the tokenizer {tokenizer}; {key} is {budget}\n  hint: raise {key} to {needed} or more, or use a tokenizer with longer tokens"
    )]
    PromptTooLong {
        /// The task.
        task: &'static str,
        /// The requested length.
        budget: usize,
        /// Which setting it came from.
        key: &'static str,
        /// The smallest length that fits.
        needed: usize,
        /// The tokenizer's name.
        tokenizer: String,
    },
    /// A tokenizer has no token for a symbol of a synthetic task.
    #[error(
        "the tokenizer {tokenizer} has no token for `{symbol}` alone; flip-flop sequences need one for each of w, r, i, 0 and 1\n  hint: use another tokenizer, for example kind = \"bytes\", or remove the source"
    )]
    NoSymbol {
        /// The symbol.
        symbol: char,
        /// The tokenizer's name.
        tokenizer: String,
    },
    /// A tokenizer has fewer tokens than a task of abstract symbols needs.
    #[error(
        "{task} needs {needed} tokens besides the end of text; the tokenizer {tokenizer} has {available}\n  hint: ask for fewer symbols, or use a tokenizer with more tokens, for example kind = \"gpt2\""
    )]
    TooFewTokens {
        /// The task.
        task: &'static str,
        /// How many symbols it has.
        needed: usize,
        /// How many the tokenizer has tokens for.
        available: usize,
        /// The tokenizer's name.
        tokenizer: String,
    },
    /// A resumed run finds other data than before.
    #[error(
        "the data changed since the checkpoint: {change}\n  hint: restore the data and the [data] table as they were, or start a new run"
    )]
    DataChanged {
        /// What changed, from what to what.
        change: String,
    },
    /// The user interrupted the work; it can be resumed.
    #[error("interrupted after {documents} documents\n  hint: run the same command again to continue from {}", path.display())]
    Interrupted {
        /// Documents written so far.
        documents: u64,
        /// The output folder.
        path: PathBuf,
    },
}

/// The folder of a file, as messages show it.
fn folder(path: &Path) -> String {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.display().to_string(),
        _ => ".".into(),
    }
}

impl DataError {
    /// An error while reading `path`; a missing file gets its own message.
    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::NotFound {
            return DataError::Missing {
                what: "file",
                path: path.to_path_buf(),
                hint: "check the spelling; relative paths start at the folder the command runs in"
                    .into(),
            };
        }
        DataError::Read { path: path.to_path_buf(), source }
    }

    /// Names `data.cache_dir` in an error of a file in that folder.
    pub(crate) fn in_cache(self, cache: &Path) -> Self {
        match self {
            DataError::Read { path, source } | DataError::Write { path, source }
                if path.starts_with(cache) =>
            {
                DataError::CacheDir { path, source }
            }
            other => other,
        }
    }

    /// An error while writing `path`.
    pub(crate) fn write(path: &Path, source: io::Error) -> Self {
        DataError::Write { path: path.to_path_buf(), source }
    }
}
