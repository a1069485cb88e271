use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::{DataError, Tokenizer, TokenizerConfig};

fn write(folder: &Path, tokens: &[u32], width: Width, shard_tokens: u64) -> Vec<PathBuf> {
    let mut writer = SplitWriter::new(folder, "x_train".into(), 1, width, shard_tokens);
    writer.push(tokens).unwrap();
    writer.finish().unwrap().iter().map(|shard| folder.join(&shard.file)).collect()
}

fn read_all(paths: &[PathBuf]) -> Vec<i32> {
    let stream = TokenStream::new(paths.iter().map(|path| Shard::open(path).unwrap()).collect());
    let mut tokens = vec![0; stream.tokens() as usize];
    stream.read(0, &mut tokens).unwrap();
    tokens
}

#[test]
fn the_bytes_are_those_of_llm_c() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[15496, 11, 50_256], Width::U16, 100);
    assert_eq!(paths, [folder.path().join("x_train_000001.bin")]);
    let bytes = std::fs::read(&paths[0]).unwrap();
    // 20240520 = 0x0134d888, little-endian; version 1; 3 tokens.
    assert_eq!(bytes[..12], [0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 3, 0, 0, 0]);
    assert!(bytes[12..1024].iter().all(|&byte| byte == 0));
    assert_eq!(bytes[1024..], [0x88, 0x3c, 11, 0, 0x50, 0xc4]);
}

#[test]
fn great_vocabularies_get_version_2() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!((Width::of_vocab(65_536), Width::of_vocab(65_537)), (Width::U16, Width::U32));
    let paths = write(folder.path(), &[70_000, 1], Width::U32, 100);
    let bytes = std::fs::read(&paths[0]).unwrap();
    assert_eq!(bytes[4..8], [2, 0, 0, 0]);
    assert_eq!(bytes[1024..], [0x70, 0x11, 1, 0, 1, 0, 0, 0]);
    assert_eq!(read_all(&paths), [70_000, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn tokens_survive_any_cut_into_shards(
        tokens in proptest::collection::vec(0u32..65_536, 1..200),
        shard_tokens in 1u64..64,
        cut in 0usize..200,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let paths = write(folder.path(), &tokens, Width::U16, shard_tokens);
        prop_assert_eq!(paths.len() as u64, (tokens.len() as u64).div_ceil(shard_tokens));
        let expected: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        prop_assert_eq!(&read_all(&paths), &expected);

        let stream = TokenStream::new(paths.iter().map(|path| Shard::open(path).unwrap()).collect());
        let from = cut % tokens.len();
        let mut part = vec![0; (tokens.len() - from).min(17)];
        stream.read(from as u64, &mut part).unwrap();
        prop_assert_eq!(&part[..], &expected[from..from + part.len()]);
    }
}

#[test]
fn a_resumed_writer_cuts_off_what_came_after_its_state() {
    let (whole, resumed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tokens: Vec<u32> = (0..250).collect();
    let expected = write(whole.path(), &tokens, Width::U16, 100);
    for cut in [30, 100, 130] {
        let mut writer = SplitWriter::new(resumed.path(), "x_train".into(), 1, Width::U16, 100);
        writer.push(&tokens[..cut]).unwrap();
        let state = writer.sync().unwrap();
        // Work that is lost: beyond the saved state, and beyond the end of its shard.
        writer.push(&tokens[cut..cut + 80]).unwrap();
        drop(writer);

        let mut writer = SplitWriter::new(resumed.path(), "x_train".into(), 1, Width::U16, 100);
        writer.resume(state).unwrap();
        writer.push(&tokens[cut..]).unwrap();
        writer.finish().unwrap();
        for path in &expected {
            let name = path.file_name().unwrap();
            assert_eq!(
                std::fs::read(path).unwrap(),
                std::fs::read(resumed.path().join(name)).unwrap(),
                "cut {cut}"
            );
        }
    }
}

#[test]
fn unusable_shards_are_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let good = std::fs::read(&write(folder.path(), &[1, 2, 3], Width::U16, 100)[0]).unwrap();
    let path = folder.path().join("bad.bin");
    let message = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let text = Shard::open(&path).unwrap_err().to_string();
        text.replace(&folder.path().display().to_string(), "DIR")
    };
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    insta::assert_snapshot!(message(&changed(0, 0)), @r"
    DIR/bad.bin is not a usable token shard: its magic number is 20240384; allowed: 20240520
      hint: give shards made by `longwall prepare` or llm.c's scripts for GPT-2
    ");
    insta::assert_snapshot!(message(&changed(4, 7)), @r"
    DIR/bad.bin is not a usable token shard: its version is 7; allowed: 1 (u16 tokens), 2 (u32 tokens)
      hint: make it again with `longwall prepare`
    ");
    insta::assert_snapshot!(message(&good[..good.len() - 2]), @r"
    DIR/bad.bin is not a usable token shard: its header says 3 tokens of 2 bytes, 1030 bytes in all, and the file has 1028
      hint: the file was cut short or damaged; copy or make it again
    ");
    insta::assert_snapshot!(message(&changed(8, 200)), @r"
    DIR/bad.bin is not a usable token shard: its header says 200 tokens of 2 bytes, 1424 bytes in all, and the file has 1030
      hint: the file was cut short or damaged; copy or make it again
    ");
    insta::assert_snapshot!(message(b"text"), @r"
    DIR/bad.bin is not a usable token shard: it has 4 bytes, and the header alone has 1024
      hint: the file was cut short, or is no shard; make it again with `longwall prepare`
    ");
}

#[test]
fn a_token_the_tokenizer_lacks_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut tokens = vec![7; 3_000_000];
    tokens[2_500_000] = 300;
    let path = write(folder.path(), &tokens, Width::U16, 10_000_000).remove(0);
    let shard = Shard::open(&path).unwrap();
    let gpt2 = Tokenizer::load(&TokenizerConfig::Gpt2).unwrap();
    shard.check_vocabulary(&gpt2).unwrap();
    let bytes = Tokenizer::load(&TokenizerConfig::Bytes).unwrap();
    let error = shard.check_vocabulary(&bytes).unwrap_err();
    assert!(matches!(error, DataError::TokenOutOfRange { position: 2_500_000, token: 300, .. }));
    let message = error.to_string().replace(&folder.path().display().to_string(), "DIR");
    insta::assert_snapshot!(message, @r"
    DIR/x_train_000001.bin holds token 300 at position 2500000; the tokenizer bytes has tokens 0 to 256
      hint: set [tokenizer] to the one the shard was made with, or prepare the text again with this one
    ");
}

#[test]
fn fingerprints_tell_streams_apart() {
    let folder = tempfile::tempdir().unwrap();
    let fingerprint = |tokens: &[u32]| {
        let paths = write(folder.path(), tokens, Width::U16, 1 << 20);
        TokenStream::new(paths.iter().map(|path| Shard::open(path).unwrap()).collect())
            .fingerprint()
            .unwrap()
    };
    let tokens: Vec<u32> = (0..10_000).collect();
    let mut changed = tokens.clone();
    changed[5000] += 1;
    assert_eq!(fingerprint(&tokens), fingerprint(&tokens));
    assert_ne!(fingerprint(&tokens), fingerprint(&changed));
    assert_ne!(fingerprint(&tokens), fingerprint(&tokens[1..]));
}

#[test]
fn quantiles_are_within_two_per_cent() {
    let mut histogram = LengthHistogram::default();
    (1..=100_000u64).for_each(|length| histogram.add(length));
    let summary = histogram.summary();
    assert_eq!((summary.min, summary.max, summary.mean), (1, 100_000, 50_000.5));
    assert!(summary.median.abs_diff(50_000) < 800, "{summary}");
    assert!(summary.p95.abs_diff(95_000) < 1520, "{summary}");
    let empty = LengthHistogram::default().summary();
    assert_eq!((empty.min, empty.median, empty.max), (0, 0, 0));
}
