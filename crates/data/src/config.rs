//! The `[data]` table: what to read, how to cut it into rows, and what to hold out.

use std::path::PathBuf;

use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use crate::SourceConfig;
use crate::mixture::BLOCK_ROWS;

/// The `[data]` table.
///
/// ```toml
/// [data]
/// seq_len = 1024
///
/// [[data.sources]]
/// kind = "text"
/// weight = 0.9
/// paths = ["corpus/", "more/*.jsonl.gz"]
///
/// [[data.sources]]
/// kind = "passkey"
/// weight = 0.1
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Tokens in a row, at least 2.
    pub seq_len: usize,
    /// What a row of a source of text holds. Default `packed`.
    #[serde(default, skip_serializing_if = "Rows::is_packed")]
    pub rows: Rows,
    /// Whether attention stays within a document: the loader then gives every position the start of
    /// its document, and a document's first token, which has no context, no loss. Default true.
    #[serde(default = "yes")]
    pub document_mask: bool,
    /// Share of the documents held out for validation, by the hash of their text (by the hash of
    /// the crate's name for `cargo-sources`); of a single text file, its end. Only for sources of
    /// text. 0 to below 1, default 0.01.
    #[serde(default = "default_validation_fraction")]
    pub validation_fraction: f64,
    /// Most tokens that one validation pass reads. Takes suffixes: `"256k"`. Default 262,144.
    #[serde(default = "default_validation_tokens", deserialize_with = "longwall_config::count")]
    pub validation_tokens: u64,
    /// Folder for the token shards of text sources, keyed by source and tokenizer. Default
    /// `data/cache`.
    #[serde(default = "default_cache_dir")]
    pub cache_dir: PathBuf,
    /// The sources; rows are drawn from them by their weights.
    #[serde(default)]
    pub sources: Vec<SourceConfig>,
}

/// What a row holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rows {
    /// Text: a window of the stream of all documents. Generated examples: as many whole ones as fit.
    #[default]
    Packed,
    /// One document, or one generated example, from its first token on. A longer one is cut to `seq_len`; after
    /// a shorter one the row is padded, without loss. Shorter rows hold the first tokens of more documents.
    Documents,
    /// As `Documents`, but shorter rows are consecutive parts of the documents' rows.
    CutDocuments,
    /// A window of the stream of all documents that follows the one in the same row of the batch before: each row of a
    /// batch goes on through its part of the text. In validation as `Packed`.
    Streams,
}

impl Rows {
    /// Whether it is the default.
    pub fn is_packed(&self) -> bool {
        *self == Rows::Packed
    }

    /// Whether a row begins with its document.
    pub fn are_documents(self) -> bool {
        matches!(self, Rows::Documents | Rows::CutDocuments)
    }

    /// The rows of `loaded` tokens, the length that the loader is open with, that a batch of `tokens` in rows of
    /// `seq_len` takes. Rows are cut into shorter ones; with [`Rows::Documents`], shorter rows hold less.
    pub fn taken(self, tokens: u64, seq_len: usize, loaded: usize) -> u64 {
        match self {
            Rows::Packed | Rows::CutDocuments | Rows::Streams => tokens / loaded as u64,
            Rows::Documents => tokens / seq_len as u64,
        }
    }
}

impl std::fmt::Display for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Rows::Packed => "packed",
            Rows::Documents => "documents",
            Rows::CutDocuments => "cut-documents",
            Rows::Streams => "streams",
        })
    }
}

fn yes() -> bool {
    true
}

fn default_validation_fraction() -> f64 {
    0.01
}

fn default_validation_tokens() -> u64 {
    262_144
}

fn default_cache_dir() -> PathBuf {
    "data/cache".into()
}

impl DataConfig {
    /// Records invalid values of the table. [`Loader::open`](crate::Loader::open) checks what depends on
    /// files.
    pub fn validate(&self, problems: &mut Problems) {
        problems.check(
            (2..=1 << 24).contains(&self.seq_len),
            "data.seq_len",
            self.seq_len,
            "2 to 16777216 tokens",
            "a common choice for a small model is 1024",
        );
        problems.check(
            (0.0..1.0).contains(&self.validation_fraction),
            "data.validation_fraction",
            self.validation_fraction,
            "0 to below 1",
            "0.01 holds out one document in a hundred; 0 holds out none",
        );
        problems.check(
            (self.seq_len as u64..=1 << 40).contains(&self.validation_tokens),
            "data.validation_tokens",
            self.validation_tokens,
            format!("seq_len = {} to 2^40", self.seq_len),
            "raise it to a few hundred rows, or lower data.seq_len",
        );
        problems.check(
            !self.sources.is_empty(),
            "data.sources",
            "empty",
            "at least one [[data.sources]] table",
            "add one, for example with kind = \"cargo-sources\", which needs no download",
        );
        let weights: f64 = self.sources.iter().map(|source| source.weight()).sum();
        problems.check(
            weights.is_finite() || self.sources.iter().any(|source| !source.weight().is_finite()),
            "data.sources",
            format!("weights whose sum is {weights}"),
            "weights with a finite sum",
            "set them lower: only their ratios matter",
        );
        if self.rows == Rows::Streams {
            problems.check(
                self.sources.len() <= 1,
                "data.sources",
                format!("{} tables with data.rows = \"streams\"", self.sources.len()),
                "one source, whose text each row of a batch reads a part of",
                "join them to one source, or set data.rows = \"packed\"",
            );
            if let Some(source) = self.sources.iter().find(|source| source.is_generated()) {
                problems.check(
                    false,
                    "data.rows",
                    format!("\"streams\" with a source of kind \"{}\"", source.kind()),
                    "a source of text: generated rows do not continue one another",
                    "set data.rows = \"packed\"",
                );
            }
        }
        for (at, source) in self.sources.iter().enumerate() {
            self.validate_source(&format!("data.sources[{at}]"), source, weights, problems);
        }
    }

    fn validate_source(
        &self,
        key: &str,
        source: &SourceConfig,
        weights: f64,
        problems: &mut Problems,
    ) {
        let weight = source.weight();
        let usable = weight.is_finite() && weight > 0.0;
        problems.check(
            usable,
            format!("{key}.weight"),
            weight,
            "a number above 0",
            "remove the source to leave it out",
        );
        problems.check(
            !usable || !weights.is_finite() || weight / weights >= 1.0 / BLOCK_ROWS as f64,
            format!("{key}.weight"),
            weight,
            format!("at least 1/{BLOCK_ROWS} of all weights together"),
            "raise it, or remove the source",
        );
        source.source().validate(key, self, problems);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::cargo_sources;

    fn problems(text: &str) -> String {
        let config: DataConfig = toml::from_str(text).unwrap();
        let mut problems = Problems::new();
        config.validate(&mut problems);
        problems.into_result().map_or_else(|problems| problems.to_string(), |()| "none".into())
    }

    #[test]
    fn a_short_table_has_the_documented_defaults() {
        let config: DataConfig =
            toml::from_str("seq_len = 64\n[[sources]]\nkind = \"cargo-sources\"").unwrap();
        assert!(config.document_mask);
        assert_eq!(config.rows, Rows::Packed);
        assert_eq!((config.validation_fraction, config.validation_tokens), (0.01, 262_144));
        let source = cargo_sources::Config { max_bytes: 64_000_000, path: None };
        assert_eq!(config.sources, [source.into()]);
        assert_eq!(config.sources[0].weight(), 1.0);
    }

    #[test]
    fn weights_with_an_infinite_sum_are_refused() {
        let source = r#"{ kind = "passkey", weight = 1e308 }"#;
        let text = format!("seq_len = 64\nsources = [{source}, {source}]");
        insta::assert_snapshot!(problems(&text), @r"
        the configuration has 1 problem:
        data.sources is weights whose sum is inf; allowed: weights with a finite sum
          hint: set them lower: only their ratios matter
        ");
    }

    #[test]
    fn streams_are_of_one_text() {
        let text = r#"
            seq_len = 64
            rows = "streams"
            sources = [{ kind = "cargo-sources" }, { kind = "passkey" }]"#;
        insta::assert_snapshot!(problems(text), @r#"
        the configuration has 2 problems:
        data.sources is 2 tables with data.rows = "streams"; allowed: one source, whose text each row of a batch reads a part of
          hint: join them to one source, or set data.rows = "packed"
        data.rows is "streams" with a source of kind "passkey"; allowed: a source of text: generated rows do not continue one another
          hint: set data.rows = "packed"
        "#);
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(toml::from_str::<DataConfig>("seq_len = 8\nsequence = 9").is_err());
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let text = r#"
            seq_len = 1
            validation_fraction = 1.0
            validation_tokens = 0
            sources = [
                { kind = "text", paths = [], weight = 1e6, separator = "" },
                { kind = "cargo-sources", max_bytes = 0 },
                { kind = "shards", train = [], weight = -1.0 },
                { kind = "passkey", min_len = 9, max_len = 4, weight = 1e6 },
                { kind = "fflm", instructions = 1, p_write = -0.5, weight = 1e6 },
            ]"#;
        insta::assert_snapshot!(problems(text), @r#"
        the configuration has 14 problems:
        data.seq_len is 1; allowed: 2 to 16777216 tokens
          hint: a common choice for a small model is 1024
        data.validation_fraction is 1; allowed: 0 to below 1
          hint: 0.01 holds out one document in a hundred; 0 holds out none
        data.validation_tokens is 0; allowed: seq_len = 1 to 2^40
          hint: raise it to a few hundred rows, or lower data.seq_len
        data.sources[0].paths is empty; allowed: at least one file, folder or pattern
          hint: add one, for example "corpus/*.txt"
        data.sources[0].separator is ""; allowed: a text that stands between documents
          hint: remove the key to make each file one document
        data.sources[1].weight is 1; allowed: at least 1/1000 of all weights together
          hint: raise it, or remove the source
        data.sources[1].max_bytes is 0; allowed: above 0
          hint: 64M is the default
        data.sources[2].weight is -1; allowed: a number above 0
          hint: remove the source to leave it out
        data.sources[2].train is empty; allowed: at least one file, folder or pattern
          hint: add one, for example "corpus/*.txt"
        data.sources[3].max_len is 4; allowed: at most data.seq_len = 1
          hint: lower it, or raise data.seq_len
        data.sources[3].min_len is 9; allowed: at most max_len = 4
          hint: lower it, or raise max_len
        data.sources[4].instructions is 1; allowed: 2 to half of data.seq_len = 1
          hint: two tokens are an instruction: lower it, or raise data.seq_len
        data.sources[4].p_write is -0.5; allowed: a probability, 0 to 1
          hint: the usual ones are p_write = 0.1, p_read = 0.1, p_ignore = 0.8
        data.sources[4].p_write + p_read + p_ignore is 0.4; allowed: 1
          hint: set all three; the defaults are 0.1, 0.1 and 0.8
        "#);
        insta::assert_snapshot!(problems("seq_len = 1024"), @r#"
        the configuration has 1 problem:
        data.sources is empty; allowed: at least one [[data.sources]] table
          hint: add one, for example with kind = "cargo-sources", which needs no download
        "#);
    }
}
