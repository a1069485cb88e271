//! The `[data]` table: what is read, how it is cut into rows, what is held out.

use std::path::PathBuf;

use longwall_config::{Problems, count};
use serde::{Deserialize, Serialize};

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
    /// Whether attention stays within a document: the loader then gives every position the start
    /// of its document, and no loss to a document's first token, which has no context. Default
    /// true.
    #[serde(default = "yes")]
    pub document_mask: bool,
    /// Share of the documents held out for validation, by the hash of their text (by the hash of
    /// the crate's name for `cargo-sources`). Only for sources of text. 0 to below 1, default
    /// 0.01.
    #[serde(default = "default_validation_fraction")]
    pub validation_fraction: f64,
    /// Tokens that one validation pass reads, at most. Takes suffixes: `"256k"`. Default 262,144.
    #[serde(default = "default_validation_tokens", deserialize_with = "longwall_config::count")]
    pub validation_tokens: u64,
    /// Folder for the token shards of text sources, keyed by source and tokenizer. Default
    /// `data/cache`.
    #[serde(default = "default_cache_dir")]
    pub cache_dir: PathBuf,
    /// What is read; rows are drawn from the sources by their weights.
    #[serde(default)]
    pub sources: Vec<SourceConfig>,
}

/// One `[[data.sources]]` table. Weights need not add up to 1; every kind's default is 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum SourceConfig {
    /// Text, JSONL or Parquet, plain or compressed (`.gz`, `.zst`). Encoded once, into
    /// `cache_dir`.
    Text {
        /// Share of the rows, relative to the other sources' weights.
        #[serde(default = "default_weight")]
        weight: f64,
        /// Files, folders (searched recursively) and patterns (`*`, `**`, `?`, `[abc]`).
        paths: Vec<PathBuf>,
        /// Field (JSONL) or column (Parquet) that holds the text. Default `text`.
        #[serde(default = "default_text_field")]
        text_field: String,
        /// What separates the documents of a plain text file, for example `<|endoftext|>`. By
        /// default each file is one document.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        separator: Option<String>,
    },
    /// The Rust sources in cargo's registry folder, which every machine that has built Longwall
    /// has.
    CargoSources {
        /// Share of the rows, relative to the other sources' weights.
        #[serde(default = "default_weight")]
        weight: f64,
        /// Bytes of source to read, at most. Default 64M.
        #[serde(default = "default_cargo_bytes", deserialize_with = "count")]
        max_bytes: u64,
        /// The `registry/src` folder; by default that of `CARGO_HOME`, or `~/.cargo`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<PathBuf>,
    },
    /// Token shards in llm.c's format, made by `longwall prepare` or elsewhere.
    Shards {
        /// Share of the rows, relative to the other sources' weights.
        #[serde(default = "default_weight")]
        weight: f64,
        /// Files, folders and patterns. Of a folder, the files without `_val_` in their names.
        train: Vec<PathBuf>,
        /// Files, folders and patterns. Of a folder, the files with `_val_` in their names.
        #[serde(default)]
        validation: Vec<PathBuf>,
    },
    /// Generated passkey examples ([`synthetic::passkey`](crate::synthetic::passkey)).
    Passkey {
        /// Share of the rows, relative to the other sources' weights.
        #[serde(default = "default_weight")]
        weight: f64,
        /// Least length of an example in tokens; by default the least there can be.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        min_len: Option<usize>,
        /// Greatest length of an example in tokens; by default `seq_len`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_len: Option<usize>,
        /// Whether only the answer's tokens count for the loss. Default true.
        #[serde(default = "yes")]
        answer_only: bool,
    },
    /// Generated flip-flop sequences ([`synthetic::fflm`](crate::synthetic::fflm)).
    Fflm {
        /// Share of the rows, relative to the other sources' weights.
        #[serde(default = "default_weight")]
        weight: f64,
        /// Instructions in a sequence, two tokens each; 2 to `seq_len` / 2. Default 256.
        #[serde(default = "default_instructions")]
        instructions: usize,
        /// Probability that an instruction writes, 0 to 1. Default 0.1.
        #[serde(default = "default_read_or_write")]
        p_write: f64,
        /// Probability that it reads, 0 to 1. Default 0.1.
        #[serde(default = "default_read_or_write")]
        p_read: f64,
        /// Probability that it is ignored, 0 to 1; the three add up to 1. Default 0.8.
        #[serde(default = "default_ignore")]
        p_ignore: f64,
        /// Whether only the bits that are read, which alone can be known, count for the loss.
        /// Default true.
        #[serde(default = "yes")]
        reads_only: bool,
    },
}

impl SourceConfig {
    /// The source's weight.
    pub fn weight(&self) -> f64 {
        match self {
            SourceConfig::Text { weight, .. }
            | SourceConfig::CargoSources { weight, .. }
            | SourceConfig::Shards { weight, .. }
            | SourceConfig::Passkey { weight, .. }
            | SourceConfig::Fflm { weight, .. } => *weight,
        }
    }

    /// The source's kind, as the configuration spells it.
    pub fn kind(&self) -> &'static str {
        match self {
            SourceConfig::Text { .. } => "text",
            SourceConfig::CargoSources { .. } => "cargo-sources",
            SourceConfig::Shards { .. } => "shards",
            SourceConfig::Passkey { .. } => "passkey",
            SourceConfig::Fflm { .. } => "fflm",
        }
    }

    /// Whether the source makes its rows itself: these are no text.
    pub fn is_generated(&self) -> bool {
        match self {
            SourceConfig::Passkey { .. } | SourceConfig::Fflm { .. } => true,
            SourceConfig::Text { .. }
            | SourceConfig::CargoSources { .. }
            | SourceConfig::Shards { .. } => false,
        }
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

fn default_weight() -> f64 {
    1.0
}

pub(crate) fn default_text_field() -> String {
    "text".into()
}

fn default_cargo_bytes() -> u64 {
    64_000_000
}

fn default_instructions() -> usize {
    256
}

fn default_read_or_write() -> f64 {
    0.1
}

fn default_ignore() -> f64 {
    0.8
}

impl DataConfig {
    /// Records everything in the table that cannot work. What depends on files is checked by
    /// [`Loader::open`](crate::Loader::open).
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
        match source {
            SourceConfig::Text { paths, separator, .. } => {
                check_paths(problems, key, "paths", paths);
                problems.check(
                    separator.as_deref() != Some(""),
                    format!("{key}.separator"),
                    "\"\"",
                    "a text that stands between documents",
                    "remove the key to make each file one document",
                );
            }
            SourceConfig::CargoSources { max_bytes, .. } => problems.check(
                *max_bytes > 0,
                format!("{key}.max_bytes"),
                max_bytes,
                "above 0",
                "64M is the default",
            ),
            SourceConfig::Shards { train, .. } => check_paths(problems, key, "train", train),
            SourceConfig::Passkey { min_len, max_len, .. } => {
                self.validate_passkey(key, *min_len, *max_len, problems)
            }
            SourceConfig::Fflm { instructions, p_write, p_read, p_ignore, .. } => {
                let chances = [("p_write", *p_write), ("p_read", *p_read), ("p_ignore", *p_ignore)];
                self.validate_fflm(key, *instructions, chances, problems)
            }
        }
    }

    fn validate_passkey(
        &self,
        key: &str,
        min_len: Option<usize>,
        max_len: Option<usize>,
        problems: &mut Problems,
    ) {
        let greatest = max_len.unwrap_or(self.seq_len);
        problems.check(
            greatest <= self.seq_len,
            format!("{key}.max_len"),
            greatest,
            format!("at most data.seq_len = {}", self.seq_len),
            "lower it, or raise data.seq_len",
        );
        if let Some(least) = min_len {
            problems.check(
                least <= greatest,
                format!("{key}.min_len"),
                least,
                format!("at most max_len = {greatest}"),
                "lower it, or raise max_len",
            );
        }
    }

    fn validate_fflm(
        &self,
        key: &str,
        instructions: usize,
        chances: [(&str, f64); 3],
        problems: &mut Problems,
    ) {
        problems.check(
            (2..=self.seq_len / 2).contains(&instructions),
            format!("{key}.instructions"),
            instructions,
            format!("2 to half of data.seq_len = {}", self.seq_len),
            "two tokens are an instruction: lower it, or raise data.seq_len",
        );
        for (name, chance) in chances {
            problems.check(
                (0.0..=1.0).contains(&chance),
                format!("{key}.{name}"),
                chance,
                "a probability, 0 to 1",
                "the usual ones are p_write = 0.1, p_read = 0.1, p_ignore = 0.8",
            );
        }
        let sum: f64 = chances.iter().map(|(_, chance)| chance).sum();
        problems.check(
            (sum - 1.0).abs() <= SUM_TOLERANCE,
            format!("{key}.p_write + p_read + p_ignore"),
            sum,
            "1",
            "set all three; the defaults are 0.1, 0.1 and 0.8",
        );
    }
}

/// How far from 1 probabilities may add up: they are written in decimals.
const SUM_TOLERANCE: f64 = 1e-9;

fn check_paths(problems: &mut Problems, key: &str, name: &str, paths: &[PathBuf]) {
    problems.check(
        !paths.is_empty(),
        format!("{key}.{name}"),
        "empty",
        "at least one file, folder or pattern",
        "add one, for example \"corpus/*.txt\"",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!((config.validation_fraction, config.validation_tokens), (0.01, 262_144));
        let source = SourceConfig::CargoSources { weight: 1.0, max_bytes: 64_000_000, path: None };
        assert_eq!(config.sources, [source]);
    }

    #[test]
    fn a_table_survives_writing_and_reading() {
        let text = r#"
            seq_len = 128
            validation_tokens = "64k"
            sources = [
                { kind = "text", paths = ["a", "b/*.gz"], separator = "\n\n\n" },
                { kind = "cargo-sources", weight = 0.5, max_bytes = "2M" },
                { kind = "shards", train = ["x.bin"], validation = ["y.bin"] },
                { kind = "passkey", max_len = 64, answer_only = false },
                { kind = "fflm", instructions = 9, p_write = 0.2, p_ignore = 0.7 },
            ]"#;
        let config: DataConfig = toml::from_str(text).unwrap();
        let written = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<DataConfig>(&written).unwrap(), config);
    }

    #[test]
    fn unknown_keys_are_refused_in_every_kind() {
        for source in [
            "kind = \"text\", paths = []",
            "kind = \"cargo-sources\"",
            "kind = \"shards\", train = []",
            "kind = \"passkey\"",
            "kind = \"fflm\"",
        ] {
            let text = format!("seq_len = 8\nsources = [{{ {source}, wieght = 2 }}]");
            let error = toml::from_str::<DataConfig>(&text).unwrap_err().to_string();
            assert!(error.contains("unknown field `wieght`"), "{error}");
        }
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
