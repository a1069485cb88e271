//! Where rows come from: the `Source` trait, and the registry of its kinds.
//!
//! A kind is one file or folder, its `pub mod` line and one line in `registry!` below. Its `Config`
//! holds the keys of its `[[data.sources]]` table; the registry adds `kind` and `weight`, which all
//! tables have.

pub mod babilong;
pub mod cargo_sources;
#[cfg(test)]
mod conformance;
pub mod fflm;
mod labelled;
pub mod mqar;
pub mod mqrar;
pub mod mrcr;
pub mod multi_needle;
pub mod niah;
pub mod passkey;
pub mod phonebook;
mod prompts;
mod registry;
pub mod ruler;
pub mod shards;
#[cfg(test)]
pub(crate) mod testing;
pub mod text;
pub mod word_problem;

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use longwall_config::{Problems, side_by_side};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::corpus::Corpus;
use crate::mixture::derive_key;
use crate::prepare::{PrepareOptions, prepare_cached};
use crate::shard::{Shard, ShardEntry, TokenStream, check_blocks, check_listed};
use crate::synthetic::held_out::Part;
use crate::{DataConfig, DataError, Progress, Split, Tokenizer};

registry::registry! {
    /// Text, JSONL or Parquet, plain or compressed. Encoded once, into `cache_dir`.
    Text = "text" in text;
    /// The Rust sources in cargo's registry folder. Encoded once, into `cache_dir`.
    CargoSources = "cargo-sources" in cargo_sources;
    /// Token shards in llm.c's format.
    Shards = "shards" in shards;
    /// Generated passkey examples.
    Passkey = "passkey" in passkey;
    /// Generated flip-flop sequences.
    Fflm = "fflm" in fflm;
    /// Generated needles in a haystack.
    Niah = "niah" in niah;
    /// Generated prompts with several needles.
    MultiNeedle = "multi-needle" in multi_needle;
    /// Generated examples of RULER's tasks.
    Ruler = "ruler" in ruler;
    /// Generated stories hidden in text: BABILong.
    Babilong = "babilong" in babilong;
    /// Generated conversations: multi-round coreference.
    Mrcr = "mrcr" in mrcr;
    /// Generated phone books.
    Phonebook = "phonebook" in phonebook;
    /// Generated key–value pairs and queries: multi-query associative recall.
    Mqar = "mqar" in mqar;
    /// Generated words of permutations, and their products.
    WordProblem = "word-problem" in word_problem;
    /// Generated assignments to a few variables: N-back recall.
    Mqrar = "mqrar" in mqrar;
}

impl SourceConfig {
    /// Whether the source generates its rows instead of reading text.
    pub fn is_generated(&self) -> bool {
        self.source().is_generated()
    }
}

/// Implemented by the `Config` of every kind of source.
///
/// A source of text also implements [`Corpus`], and opens with [`OpenContext::encoded`].
pub(crate) trait Source {
    /// Whether the source generates its rows instead of reading text.
    fn is_generated(&self) -> bool {
        false
    }

    /// Records invalid values; `key` is the table's, for example `data.sources[0]`. [`open`](Self::open)
    /// checks what depends on files.
    fn validate(&self, key: &str, data: &DataConfig, problems: &mut Problems);

    /// Opens the split that the context names.
    ///
    /// # Errors
    /// When files are missing, malformed or made with another tokenizer, when the cache cannot be
    /// written, or when the tokenizer does not suit the task.
    fn open(&self, context: &OpenContext<'_>) -> Result<SourceData, DataError>;
}

/// The data of a source for one split.
#[derive(Debug)]
pub(crate) enum SourceData {
    /// Tokens, document after document; the loader cuts them into rows. May be empty.
    Stream(TokenStream),
    /// Rows that the source generates.
    Generated {
        /// Generates them.
        rows: Box<dyn RowGenerator>,
        /// The settings that the rows depend on, besides seed and tokenizer, in words: a run cannot
        /// be resumed if it changes.
        fingerprint: String,
    },
}

/// Generates rows of tokens with random access.
pub(crate) trait RowGenerator: Debug + Send + Sync {
    /// Fills row `index`: its `seq_len + 1` tokens, and what to predict after each but the last, with its
    /// weight. A function of the index and of [`OpenContext::generator_seed`].
    fn fill(&self, index: u64, tokens: &mut [i32], targets: &mut [i32], weights: &mut [f32]);
}

/// The arguments for opening a source.
pub(crate) struct OpenContext<'a> {
    /// The source's kind.
    pub(crate) kind: &'static str,
    /// The table `[data]`.
    pub(crate) data: &'a DataConfig,
    /// The tokenizer of the rows.
    pub(crate) tokenizer: &'a Tokenizer,
    /// The split to open.
    pub(crate) split: Split,
    /// The source's own seed, derived from the run's seed and the source's index in the list.
    pub(crate) seed: u64,
    /// Receives the progress of long work.
    pub(crate) progress: &'a dyn Progress,
}

impl OpenContext<'_> {
    /// The seed of generated rows: different for the two splits. Validation has the same rows for every
    /// run seed.
    pub(crate) fn generator_seed(&self) -> u64 {
        let purpose = format!("{} {}", self.kind, self.split.name());
        match self.split {
            Split::Train => derive_key(&purpose, &[self.seed]),
            Split::Validation => derive_key(&purpose, &[]),
        }
    }

    /// The examples of the split: those of the validation split are never trained on.
    pub(crate) fn part(&self) -> Part {
        match self.split {
            Split::Train => Part::Train,
            Split::Validation => Part::Test,
        }
    }

    /// The tokens of a corpus, encoded into `cache_dir` unless they are there already.
    pub(crate) fn encoded(&self, corpus: Arc<dyn Corpus>) -> Result<SourceData, DataError> {
        let mut options = PrepareOptions::new(corpus, PathBuf::new(), self.kind);
        options.validation_fraction = self.data.validation_fraction;
        let cache = &self.data.cache_dir;
        let (folder, manifest) = prepare_cached(options, cache, self.tokenizer, self.progress)
            .map_err(|error| error.in_cache(cache))?;
        let split = match self.split {
            Split::Train => &manifest.train,
            Split::Validation => &manifest.validation,
        };
        let open = |shard: &ShardEntry| {
            let path = folder.join(&shard.file);
            if path.exists() {
                return Shard::open(&path);
            }
            let hint = format!("delete {}, and it is prepared again", folder.display());
            Err(DataError::Missing { what: "prepared shard", path, hint })
        };
        let shards: Vec<Shard> = split.shards.iter().map(open).collect::<Result<_, _>>()?;
        check_blocks(check_listed(&folder, &manifest, &shards, self.tokenizer)?)?;
        Ok(SourceData::Stream(TokenStream::new(shards)))
    }
}

/// A source's table without `kind`: the kind's own keys, and the `weight` that all sources have.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Weighted<C> {
    /// Share of the rows, relative to the other sources' weights. Default 1.
    pub weight: f64,
    /// The kind's own keys.
    #[serde(flatten)]
    pub source: C,
}

impl<C> From<C> for Weighted<C> {
    fn from(source: C) -> Self {
        Weighted { weight: default_weight(), source }
    }
}

impl<'de, C: DeserializeOwned> Deserialize<'de> for Weighted<C> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Weight {
            #[serde(default = "default_weight")]
            weight: f64,
        }
        let (Weight { weight }, source) = side_by_side(deserializer)?;
        Ok(Weighted { weight, source })
    }
}

fn default_weight() -> f64 {
    1.0
}

/// Records an empty list of paths.
fn check_paths(problems: &mut Problems, key: &str, name: &str, paths: &[PathBuf]) {
    problems.check(
        !paths.is_empty(),
        format!("{key}.{name}"),
        "empty",
        "at least one file, folder or pattern",
        "add one, for example \"corpus/*.txt\"",
    );
}
