//! `longwall prepare PATHS… --out FOLDER`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{ArgGroup, ValueEnum};
use longwall_config::parse_count;
use longwall_data::sources::{cargo_sources, text};
use longwall_data::{Corpus, PrepareOptions, Tokenizer, TokenizerConfig, prepare};
use longwall_train::signals::StopFlag;

use crate::numbers::whole;
use crate::output::outln;
use crate::progress::DataProgress;

/// Text to read: the arguments that `prepare` and `tokenizer train` share.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("corpus").required(true).args(["paths", "cargo_sources"])))]
pub struct CorpusArgs {
    /// Text, JSONL or Parquet files, plain or compressed (.gz, .zst), folders, and patterns
    paths: Vec<PathBuf>,

    /// Read the Rust sources in cargo's registry folder instead
    #[arg(long)]
    cargo_sources: bool,

    /// Most bytes to read of the cargo sources
    #[arg(long, default_value = "64M", value_parser = parse_count, value_name = "BYTES")]
    cargo_bytes: u64,

    /// Field (JSONL) or column (Parquet) that holds the text
    #[arg(long, default_value = "text", value_name = "NAME")]
    text_field: String,

    /// The text between documents in a plain text file; by default a file is one document
    #[arg(long, value_name = "TEXT")]
    separator: Option<String>,
}

impl CorpusArgs {
    /// The corpus that the arguments name.
    pub fn corpus(self) -> Arc<dyn Corpus> {
        if self.cargo_sources {
            return Arc::new(cargo_sources::Config { max_bytes: self.cargo_bytes, path: None });
        }
        let CorpusArgs { paths, text_field, separator, .. } = self;
        Arc::new(text::Config { paths, text_field, separator })
    }
}

/// The kinds of tokenizer.
#[derive(Clone, Copy, ValueEnum)]
enum TokenizerKind {
    /// GPT-2's vocabulary, built in
    Gpt2,
    /// 256 bytes and end of text, built in
    Bytes,
    /// A tokenizer.json, named by --tokenizer-file
    File,
}

/// Arguments of `longwall prepare`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    corpus: CorpusArgs,

    /// Folder for the shards; created if it does not exist
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,

    /// First part of the shards' names
    #[arg(long, default_value = "text")]
    name: String,

    /// How text becomes tokens; `gpt2` unless --tokenizer-file is given
    #[arg(long)]
    tokenizer: Option<TokenizerKind>,

    /// The tokenizer.json of `--tokenizer file`
    #[arg(long, value_name = "FILE", required_if_eq("tokenizer", "file"))]
    tokenizer_file: Option<PathBuf>,

    /// Share of the documents held out for validation, by the hash of their text; of a single text
    /// file, its end
    #[arg(long, default_value_t = 0.01, value_name = "SHARE")]
    validation_fraction: f64,

    /// Tokens in a shard
    #[arg(long, default_value = "100M", value_parser = parse_count, value_name = "TOKENS")]
    shard_tokens: u64,

    /// Threads that encode; by default one per core
    #[arg(long, value_parser = whole::<usize>(1..=u64::MAX))]
    threads: Option<usize>,
}

/// Encodes a corpus and prints a report.
pub fn run(args: Args) -> Result<()> {
    let config = match (args.tokenizer, args.tokenizer_file) {
        (None | Some(TokenizerKind::File), Some(path)) => TokenizerConfig::File { path },
        (Some(TokenizerKind::Gpt2 | TokenizerKind::Bytes), Some(path)) => bail!(
            "--tokenizer-file is {}, but --tokenizer names a built-in one; allowed: one of them\n  \
             hint: leave out --tokenizer, or say --tokenizer file",
            path.display()
        ),
        (Some(TokenizerKind::Bytes), None) => TokenizerConfig::Bytes,
        (Some(TokenizerKind::File), None) => unreachable!("the parser asks for the file"),
        (None | Some(TokenizerKind::Gpt2), None) => TokenizerConfig::Gpt2,
    };
    let tokenizer = Tokenizer::load(&config)?;
    let mut options = PrepareOptions::new(args.corpus.corpus(), args.out, args.name);
    options.validation_fraction = args.validation_fraction;
    options.shard_tokens = args.shard_tokens;
    options.threads = args.threads;
    let progress = DataProgress::new(Some(StopFlag::install("stopping; finished work is kept")?));
    let report = prepare(&options, &tokenizer, &progress)?;
    outln!("{report}")
}
