//! Longwall's data: tokenizers, token shards, mixtures, generated tasks, and the loader that feeds
//! them to training in a seeded order that can be resumed anywhere.
//!
//! `text, JSONL, Parquet → [prepare] → token shards → [Loader] → [Batch]`

mod config;
pub mod corpus;
mod error;
pub mod files;
mod loader;
mod mixture;
mod panics;
mod permutation;
mod positions;
mod prepare;
mod progress;
mod shard;
pub mod sources;
pub mod synthetic;
mod tokenizer;

pub use config::{DataConfig, Rows};
pub use corpus::Corpus;
pub use error::DataError;
pub use loader::{Batch, Cursor, CursorSource, Loader, SourceSummary, Split};
pub use positions::Binning;
pub use prepare::{PrepareOptions, PrepareReport, PrepareStart, prepare};
pub use progress::{NoProgress, Progress};
pub use shard::{
    BlockChecksums, LengthSummary, MANIFEST_FILE, Manifest, ShardEntry, ShardState, Skipped,
    SplitSummary, TokenizerStamp, VerifiedShard, VerifyReport, verify_shards,
};
pub use sources::SourceConfig;
pub use tokenizer::{Tokenizer, TokenizerConfig, TrainBpe, TrainBpeReport, train_bpe};
