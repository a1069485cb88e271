//! Damaged input: valid seeds with flipped bits, cuts, splices and random bytes. Every reader must give
//! a value or an error, without a panic and in bounded memory.
//!
//! `longwall_fuzzing` describes the variables that set the number of cases and keep their files.

#[path = "fuzz/seeds.rs"]
mod seeds;

use std::path::Path;
use std::sync::Arc;

use longwall_config::Problems;
use longwall_data::sources::{shards, text};
use longwall_data::{
    DataConfig, DataError, Loader, MANIFEST_FILE, NoProgress, PrepareOptions, Rows, Split,
    Tokenizer, TokenizerConfig, prepare, verify_shards,
};
use longwall_fuzzing::{Folder, checked, fuzz, has_hint, mutated};
use proptest::sample::select;

fn bytes() -> Tokenizer {
    Tokenizer::load(&TokenizerConfig::Bytes).unwrap()
}

/// Opens both splits of a folder of shards, and reads rows.
fn load(folder: &Path) -> Result<(), DataError> {
    let source = shards::Config { train: vec![folder.into()], validation: vec![folder.into()] };
    let config = DataConfig {
        seq_len: 16,
        rows: Rows::Packed,
        document_mask: true,
        validation_fraction: 0.1,
        validation_tokens: 256,
        cache_dir: folder.join("cache"),
        sources: vec![source.into()],
    };
    for split in [Split::Train, Split::Validation] {
        let loader = Loader::open(&config, &bytes(), 1, split, &NoProgress)?;
        loader.try_batch(0, 16)?;
    }
    Ok(())
}

/// Prepares one file; the text that it gives is at most `most` bytes long.
fn prepare_file(name: &str, content: &[u8], separator: Option<&str>, most: usize) {
    let folder = Folder::new();
    let path = folder.put(name, content);
    let corpus =
        text::Config { separator: separator.map(Into::into), ..text::Config::new(vec![path]) };
    let mut options = PrepareOptions::new(Arc::new(corpus), folder.path().join("out"), "x");
    options.threads = Some(1);
    if let Some(report) = checked(prepare(&options, &bytes(), &NoProgress)) {
        assert!(report.manifest.bytes <= most as u64, "{} bytes", report.manifest.bytes);
        load(&options.out).err().iter().for_each(has_hint);
    } else {
        assert!(!options.out.join(MANIFEST_FILE).exists());
    }
}

#[test]
fn shard_files() {
    let seeds = seeds::shard_files();
    fuzz("shard_files", mutated(seeds, &[]), 64 << 20, |content| {
        let folder = Folder::new();
        folder.put("x_train_000001.bin", &content);
        folder.put("x_val_000000.bin", &content);
        checked(load(folder.path()));
    });
}

#[test]
fn prepared_shards() {
    let prepared = seeds::prepared();
    let name = "x_train_000001.bin";
    let good = prepared[name].clone();
    fuzz("prepared_shards", mutated(vec![good.clone()], &[]), 64 << 20, |content| {
        let folder = Folder::new();
        prepared.iter().for_each(|(name, content)| drop(folder.put(name, content)));
        folder.put(name, &content);
        // Every block of a small shard is sampled.
        let same = content == good;
        assert_eq!(checked(load(folder.path())).is_some(), same);
        assert_eq!(verify_shards(folder.path(), &NoProgress).unwrap().is_sound(), same);
    });
}

#[test]
fn manifests() {
    let prepared = seeds::prepared();
    let words = ["\"blocks\"", "\"sha256\"", "\"../\"", "4194304", "\"crc32c\""];
    let seed = prepared[MANIFEST_FILE].clone();
    fuzz("manifests", mutated(vec![seed], &words), 64 << 20, |content| {
        let folder = Folder::new();
        prepared.iter().for_each(|(name, content)| drop(folder.put(name, content)));
        folder.put(MANIFEST_FILE, &content);
        checked(load(folder.path()));
        if let Some(report) = checked(verify_shards(folder.path(), &NoProgress)) {
            assert!(!report.to_string().is_empty());
            checked(report.into_result());
        }
    });
}

#[test]
fn tokenizer_files() {
    let words =
        ["\"<|endoftext|>\"", "\"id\"", "\"vocab\"", "\"merges\"", "4294967295", "16777215"];
    fuzz("tokenizer_files", mutated(seeds::tokenizer_files(), &words), 2 << 30, |content| {
        let folder = Folder::new();
        let path = folder.put("tokenizer.json", &content);
        let Some(tokenizer) = checked(Tokenizer::load(&TokenizerConfig::File { path })) else {
            return;
        };
        for text in ["", "the quick brown fox", " \n\n\t<|endoftext|> ## é中🙂\u{0}"] {
            if let Some(tokens) = checked(tokenizer.try_encode(text)) {
                tokenizer.decode(&tokens);
            }
        }
        tokenizer.decode(&[0, tokenizer.end_of_text(), u32::MAX]);
        assert_eq!(tokenizer.token_byte_lengths().len(), tokenizer.vocab_size());
        assert!((tokenizer.end_of_text() as usize) < tokenizer.vocab_size());
    });
}

#[test]
fn parquet_files() {
    // A page may say that it has 2 GiB; that much is reserved before it is decompressed.
    fuzz("parquet_files", mutated(seeds::parquet_files(), &[]), 5 << 30, |content| {
        prepare_file("a.parquet", &content, None, 1 << 30);
    });
}

/// Metadata is read by field numbers, whatever the fields' types say.
#[test]
fn parquet_lists_longer_than_their_footer() {
    // The schema or the pairs of keys and values, as a list or a truth value: 113 million elements.
    let files = [(2, 9), (2, 1), (5, 9), (5, 1)].map(|(field, kind)| {
        let footer = [field << 4 | kind, 0xfc, 0x8c, 0x80, 0x80, 0x36];
        [&b"PAR1"[..], &footer, &[footer.len() as u8, 0, 0, 0], b"PAR1"].concat()
    });
    fuzz("parquet_lists", select(files.to_vec()), 64 << 20, |content| {
        prepare_file("a.parquet", &content, None, 0);
    });
}

#[test]
fn json_lines() {
    let words = ["{\"text\":", "\\ud800", "\\u0000", "[[[[", "null", "\u{feff}", "1e999"];
    fuzz("json_lines", mutated(seeds::json_lines(), &words), 64 << 20, |content| {
        prepare_file("a.jsonl", &content, None, 4 * content.len());
    });
}

#[test]
fn plain_text() {
    let words = ["<|end|>", "<|end|", "\r\n", "\u{feff}", "\0"];
    fuzz("plain_text", mutated(seeds::plain_text(), &words), 64 << 20, |content| {
        // A byte that is not UTF-8 becomes three.
        prepare_file("a.txt", &content, None, 3 * content.len());
        prepare_file("a.txt", &content, Some("<|end|>"), 3 * content.len());
    });
}

#[test]
fn gzip_files() {
    fuzz("gzip_files", mutated(seeds::gzip_files(), &[]), 512 << 20, |content| {
        // Deflate shrinks by at most 1032.
        let most = 3 * 1032 * content.len();
        prepare_file("a.txt.gz", &content, None, most);
        prepare_file("a.jsonl.gz", &content, None, most);
    });
}

#[test]
fn zstd_files() {
    fuzz("zstd_files", mutated(seeds::zstd_files(), &[]), 4 << 30, |content| {
        prepare_file("a.txt.zst", &content, None, 1 << 30);
        prepare_file("a.jsonl.zst", &content, None, 1 << 30);
    });
}

#[test]
fn data_configurations() {
    let words = ["kind", "weight", "nan", "inf", "-1", "[[sources]]", "paths", "1e400", "\"9k\""];
    fuzz("data_configurations", mutated(seeds::configurations(), &words), 64 << 20, |content| {
        let Ok(text) = String::from_utf8(content) else { return };
        let Ok(config) = toml::from_str::<DataConfig>(&text) else { return };
        let mut problems = Problems::new();
        config.validate(&mut problems);
        let Err(problems) = problems.into_result() else {
            // A valid configuration survives writing and reading.
            let written = toml::to_string(&config).unwrap();
            assert_eq!(toml::from_str::<DataConfig>(&written).unwrap(), config);
            return;
        };
        assert!(problems.to_string().contains("hint: "));
    });
}
