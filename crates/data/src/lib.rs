//! Longwall's data: tokenizers, token shards, mixtures, generated tasks, and the loader that
//! hands them to training in a seeded order that can be resumed anywhere.

mod error;
mod progress;
pub mod synthetic;
mod tokenizer;

pub use error::DataError;
pub use progress::{NoProgress, Progress};
pub use tokenizer::{Tokenizer, TokenizerConfig};
