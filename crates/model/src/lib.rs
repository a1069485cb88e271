//! Language models: configuration, layers, weights on disk, generation, and what they cost.

pub mod activations;
pub mod config;
pub mod cost;
pub mod exchange;
pub mod generate;
mod init;
mod language_model;
pub mod layers;
pub mod precision;
pub mod prefixes;
pub mod start;
pub mod weights;

pub use config::{Arch, HeadBlocks, MlpKind, ModelConfig, NormKind, Positions};
pub use language_model::{LanguageModel, ModelState};
pub use precision::Precision;
