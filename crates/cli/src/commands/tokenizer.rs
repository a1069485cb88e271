//! `longwall tokenizer train PATHS… --out FILE`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use longwall_config::parse_count;
use longwall_data::{TrainBpe, train_bpe};

use super::prepare::CorpusArgs;
use crate::numbers::whole;
use crate::output::outln;
use crate::progress::DataProgress;

/// Subcommands of `longwall tokenizer`.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Train a byte-level BPE on text and write a Hugging Face tokenizer.json
    Train(TrainArgs),
}

/// Arguments of `longwall tokenizer train`.
#[derive(clap::Args)]
pub struct TrainArgs {
    #[command(flatten)]
    corpus: CorpusArgs,

    /// The tokenizer.json to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,

    /// Tokens in the vocabulary, at least 257
    #[arg(long, default_value = "4096", value_parser = parse_count, value_name = "TOKENS")]
    vocab_size: u64,

    /// How often a pair must occur to be merged
    #[arg(long, default_value_t = 2, value_parser = whole::<u64>(1..=u64::MAX), value_name = "COUNT")]
    min_frequency: u64,

    /// Most bytes of text to read; by default all
    #[arg(long, value_parser = parse_count, value_name = "BYTES")]
    max_bytes: Option<u64>,

    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

/// Trains a tokenizer and prints a report.
pub fn run(Command::Train(args): Command) -> Result<()> {
    if args.out.exists() && !args.force {
        bail!(
            "{} exists already\n  hint: choose another --out, or replace it with --force",
            args.out.display()
        );
    }
    let options = TrainBpe {
        corpus: args.corpus.corpus(),
        out: args.out,
        vocab_size: args.vocab_size as usize,
        min_frequency: args.min_frequency,
        max_bytes: args.max_bytes,
    };
    let report = train_bpe(&options, &DataProgress::new(None))?;
    outln!(
        "{}: {} tokens, from {} documents ({:.1} MB) in {:.1} s",
        report.out.display(),
        report.vocab_size,
        report.documents,
        report.bytes as f64 / 1e6,
        report.seconds
    )?;
    outln!("use it: [tokenizer] kind = \"file\", path = \"{}\"", report.out.display())
}
