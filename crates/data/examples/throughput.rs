//! Measures `prepare` and the loader on this machine.
//!
//! ```text
//! cargo run --release -p longwall-data --example throughput -- [FILE OR FOLDER…]
//! ```
//!
//! Without paths, it reads up to 100 MB of the Rust sources in cargo's registry folder. Everything
//! is written to a temporary folder and removed.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use longwall_data::sources::{cargo_sources, passkey, shards, text};
use longwall_data::{
    Corpus, DataConfig, Loader, NoProgress, PrepareOptions, Rows, SourceConfig, Split, Tokenizer,
    TokenizerConfig, prepare,
};

const SEQ_LEN: usize = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let corpus: Arc<dyn Corpus> = if paths.is_empty() {
        Arc::new(cargo_sources::Config { max_bytes: 100_000_000, path: None })
    } else {
        Arc::new(text::Config::new(paths))
    };
    let folder = tempfile::tempdir()?;
    for kind in [TokenizerConfig::Bytes, TokenizerConfig::Gpt2] {
        let tokenizer = Tokenizer::load(&kind)?;
        let out = folder.path().join(tokenizer.name());
        let options = PrepareOptions::new(corpus.clone(), out.clone(), "measured");
        println!(
            "prepare, {}:\n{}\n",
            tokenizer.name(),
            prepare(&options, &tokenizer, &NoProgress)?
        );

        let shards = shards::Config { train: vec![out], validation: vec![] };
        let passkey = passkey::Config::default();
        for source in [SourceConfig::from(shards), SourceConfig::from(passkey)] {
            println!(
                "loader, {}, {}: {}",
                tokenizer.name(),
                source.kind(),
                measure(source, &tokenizer)?
            );
        }
        println!();
    }
    Ok(())
}

/// Draws batches of 512k tokens for two seconds.
fn measure(source: SourceConfig, tokenizer: &Tokenizer) -> Result<String, Box<dyn Error>> {
    let config = DataConfig {
        seq_len: SEQ_LEN,
        rows: Rows::Packed,
        document_mask: true,
        validation_fraction: 0.01,
        validation_tokens: 262_144,
        cache_dir: "unused".into(),
        sources: vec![source],
    };
    let started = Instant::now();
    let loader = Loader::open(&config, tokenizer, 1, Split::Train, &NoProgress)?;
    let opened = started.elapsed();
    let (mut row, started) = (0, Instant::now());
    while started.elapsed().as_secs_f64() < 2.0 {
        let batch = loader.batch(row, 512);
        row += batch.rows as u64;
    }
    let rate = (row * SEQ_LEN as u64) as f64 / started.elapsed().as_secs_f64();
    Ok(format!("{:.1} million tokens/s, opened in {:.3} s", rate / 1e6, opened.as_secs_f64()))
}
