//! Longwall's data: tokenizers, token shards, mixtures, generated tasks, and the loader that
//! hands them to training in a seeded order that can be resumed anywhere.
//!
//! `text, JSONL, Parquet → [prepare] → token shards → [Loader] → [Batch]`

mod config;
mod error;
pub mod files;
mod input;
mod loader;
mod mixture;
mod permutation;
mod prepare;
mod progress;
mod shard;
pub mod synthetic;
mod tokenizer;

pub use config::{DataConfig, SourceConfig};
pub use error::DataError;
pub use input::Corpus;
pub use loader::{Batch, Cursor, CursorSource, Loader, SourceSummary, Split};
pub use prepare::{PrepareOptions, PrepareReport, PrepareStart, prepare};
pub use progress::{NoProgress, Progress};
pub use shard::{
    LengthSummary, MANIFEST_FILE, Manifest, ShardEntry, Skipped, SplitSummary, TokenizerStamp,
};
pub use tokenizer::{Tokenizer, TokenizerConfig, TrainBpe, TrainBpeReport, train_bpe};
