use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;

use super::*;
use crate::sources::testing::{config, put, tokenizer};
use crate::sources::{shards, text};
use crate::{DataConfig, Loader, NoProgress, PrepareOptions, Progress, Split, prepare};

/// A prepared folder with two training shards and one for validation; the first shard has three blocks
/// of 4 MiB.
fn prepared(dir: &TempDir) -> PathBuf {
    for n in 0..20u64 {
        let words = (0..60_000).map(|word| format!("{} ", (word * 7919 + n) % 100_003));
        put(dir.path(), &format!("corpus/{n}.txt"), words.collect::<String>());
    }
    let corpus = Arc::new(text::Config::new(vec![dir.path().join("corpus")]));
    let mut options = PrepareOptions::new(corpus, dir.path().join("shards"), "x");
    options.validation_fraction = 0.1;
    options.shard_tokens = 5_000_000;
    prepare(&options, &tokenizer(), &NoProgress).unwrap();
    options.out
}

fn load(dir: &TempDir, folder: &Path) -> Result<Loader, DataError> {
    let source = shards::Config { train: vec![folder.into()], validation: vec![folder.into()] };
    let config = DataConfig { validation_tokens: 1 << 20, ..config(dir, 16, vec![source.into()]) };
    Loader::open(&config, &tokenizer(), 0, Split::Validation, &NoProgress)?;
    Loader::open(&config, &tokenizer(), 0, Split::Train, &NoProgress)
}

fn load_message(dir: &TempDir, folder: &Path) -> String {
    without_folder(dir, &load(dir, folder).unwrap_err().to_string())
}

fn without_folder(dir: &TempDir, text: &str) -> String {
    text.replace(&dir.path().display().to_string(), "DIR")
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// Rewrites the manifest without the checksums of blocks, as earlier versions wrote it.
fn without_blocks(folder: &Path) {
    let path = folder.join(MANIFEST_FILE);
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for split in ["train", "validation"] {
        for shard in json[split]["shards"].as_array_mut().unwrap() {
            assert!(shard.as_object_mut().unwrap().remove("blocks").is_some());
        }
    }
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
fn undamaged_shards_pass_both_checks() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let loader = load(&dir, &folder).unwrap();
    assert_eq!(loader.prepared_folders(), std::slice::from_ref(&folder));
    let report = verify_shards(&folder, &NoProgress).unwrap();
    assert!(report.is_sound(), "{report}");
    assert_eq!(report.shards.len(), 3);
    let sizes = report.shards.iter().map(|shard| std::fs::metadata(&shard.path).unwrap().len());
    assert_eq!(report.bytes, sizes.sum::<u64>());
    report.into_result().unwrap();

    without_blocks(&folder);
    load(&dir, &folder).unwrap();
    assert!(verify_shards(&folder, &NoProgress).unwrap().is_sound());
}

#[test]
fn one_flipped_bit_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let path = folder.join("x_train_000001.bin");
    change(&path, |bytes| bytes[5_000_000] ^= 1);
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    DIR/shards/x_train_000001.bin is damaged: its bytes 4194304 to 8388607 have the CRC-32C 889d99e4, and DIR/shards/manifest.json says 19678ba5
      hint: copy the file again from an undamaged copy, or delete DIR/shards and prepare the text again; `longwall verify DIR/shards` checks every byte
    ");
    let report = verify_shards(&folder, &NoProgress).unwrap();
    assert!(!report.is_sound());
    insta::assert_snapshot!(without_folder(&dir, &report.to_string()), @r"
    DIR/shards/x_train_000001.bin: damaged: its SHA-256 is aed9f29914a9b86f…; expected 877babcf70c28461…; 1 of 3 blocks differ, the first one in bytes 4194304 to 8388607
    DIR/shards/x_train_000002.bin: ok
    DIR/shards/x_val_000000.bin: ok
    2 of 3 shards in DIR/shards are ok (14.1 MB read)
    ");
    let error = report.into_result().unwrap_err().to_string();
    insta::assert_snapshot!(without_folder(&dir, &error), @r"
    1 of 3 shards in DIR/shards cannot be used: DIR/shards/x_train_000001.bin: damaged: its SHA-256 is aed9f29914a9b86f…; expected 877babcf70c28461…; 1 of 3 blocks differ, the first one in bytes 4194304 to 8388607
      hint: copy them again from undamaged copies, or delete DIR/shards and prepare the text again
    ");

    // Without checksums of blocks, only the full check finds it.
    without_blocks(&folder);
    load(&dir, &folder).unwrap();
    let report = verify_shards(&folder, &NoProgress).unwrap();
    insta::assert_snapshot!(without_folder(&dir, &report.to_string()), @r"
    DIR/shards/x_train_000001.bin: damaged: its SHA-256 is aed9f29914a9b86f…; expected 877babcf70c28461…
    DIR/shards/x_train_000002.bin: ok
    DIR/shards/x_val_000000.bin: ok
    2 of 3 shards in DIR/shards are ok (14.1 MB read)
    ");
}

#[test]
fn a_truncated_shard_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let path = folder.join("x_train_000001.bin");
    // Cut, and with a header that agrees.
    change(&path, |bytes| {
        bytes.truncate(1024 + 2 * 1000);
        bytes[8..12].copy_from_slice(&1000i32.to_le_bytes());
    });
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    DIR/shards/x_train_000001.bin is not a usable token shard: it has 1000 tokens in 3024 bytes, and manifest.json says 5000000 tokens of 2 bytes
      hint: copy the file and its manifest again from undamaged copies, or prepare the text again
    ");
    let report = verify_shards(&folder, &NoProgress).unwrap();
    let damaged: Vec<String> =
        report.unsound().map(|shard| without_folder(&dir, &shard.to_string())).collect();
    insta::assert_snapshot!(damaged.join("\n"), @r"DIR/shards/x_train_000001.bin: damaged: it has 3024 bytes; expected 10001024");
    change(&path, |bytes| bytes.truncate(0));
    assert_eq!(verify_shards(&folder, &NoProgress).unwrap().unsound().count(), 1);
}

#[test]
fn missing_and_unlisted_shards_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let (first, second) = (folder.join("x_train_000001.bin"), folder.join("x_train_000009.bin"));
    std::fs::rename(&first, &second).unwrap();
    let report = verify_shards(&folder, &NoProgress).unwrap();
    insta::assert_snapshot!(without_folder(&dir, &report.to_string()), @r"
    DIR/shards/x_train_000001.bin: missing
    DIR/shards/x_train_000002.bin: ok
    DIR/shards/x_val_000000.bin: ok
    DIR/shards/x_train_000009.bin: not listed in manifest.json
    2 of 4 shards in DIR/shards are ok (4.1 MB read)
    ");
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    shard DIR/shards/x_train_000001.bin does not exist
      hint: manifest.json lists it: copy it again, or prepare the text again; to train without it, name the other shards themselves
    ");
    std::fs::copy(&second, &first).unwrap();
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    DIR/shards/x_train_000009.bin is not a usable token shard: DIR/shards/manifest.json does not list it
      hint: move it to a folder of its own, or remove the manifest to use all files without it
    ");
    std::fs::remove_file(&second).unwrap();
    load(&dir, &folder).unwrap();
    std::fs::remove_file(&first).unwrap();
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    shard DIR/shards/x_train_000001.bin does not exist
      hint: manifest.json lists it: copy it again, or prepare the text again; to train without it, name the other shards themselves
    ");
}

#[test]
fn a_token_out_of_range_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    // With checksums the block is found; without them, the token.
    let path = folder.join("x_train_000001.bin");
    change(&path, |bytes| bytes[1024 + 2 * 7..1024 + 2 * 7 + 2].copy_from_slice(&[44, 1]));
    assert!(matches!(load(&dir, &folder).unwrap_err(), DataError::DamagedBlock { .. }));
    without_blocks(&folder);
    insta::assert_snapshot!(load_message(&dir, &folder), @r"
    DIR/shards/x_train_000001.bin is not a usable token shard: it holds token 300 at position 7, and the tokenizer bytes that it was made with has tokens 0 to 256
      hint: copy the file and its manifest again from undamaged copies, or prepare the text again
    ");
}

#[test]
fn a_folder_without_a_manifest_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let message = |folder: &Path| {
        without_folder(&dir, &verify_shards(folder, &NoProgress).unwrap_err().to_string())
    };
    insta::assert_snapshot!(message(dir.path()), @r"
    DIR has no manifest.json, so its shards cannot be verified
      hint: name a folder made by `longwall prepare`, or one in data.cache_dir
    ");
    insta::assert_snapshot!(message(&dir.path().join("none")), @r"
    folder DIR/none does not exist
      hint: check the spelling; relative paths start at the folder the command runs in
    ");
}

#[test]
fn a_misleading_manifest_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let path = folder.join(MANIFEST_FILE);
    let good = std::fs::read_to_string(&path).unwrap();
    let message = |from: &str, to: &str| {
        assert!(good.contains(from));
        std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
        load_message(&dir, &folder)
    };
    insta::assert_snapshot!(message("x_train_000001.bin", "../x_train_000001.bin"), @r#"
    cannot read DIR/shards/manifest.json: it lists "../x_train_000001.bin", which is no file name
      hint: prepare the shards again, or remove the manifest to use them without it
    "#);
    insta::assert_snapshot!(message("\"tokens\": 5000000", "\"tokens\": 5000001"), @r"
    cannot read DIR/shards/manifest.json: it says 6360021 training tokens, and its shards have another number of them
      hint: prepare the shards again, or remove the manifest to use them without it
    ");
    insta::assert_snapshot!(message("\"bytes\": 4194304", "\"bytes\": 4194303000"), @r"
    DIR/shards/x_train_000001.bin is not a usable token shard: manifest.json has 3 checksums for blocks of 4194303000 bytes, and the file has 10001024 bytes
      hint: copy the file and its manifest again from undamaged copies, or prepare the text again
    ");
}

/// Cancels after the first megabytes.
struct Cancel(AtomicUsize);

impl Progress for Cancel {
    fn cancelled(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) > 1
    }
}

#[test]
fn verification_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let folder = prepared(&dir);
    let error = verify_shards(&folder, &Cancel(AtomicUsize::new(0))).unwrap_err();
    insta::assert_snapshot!(without_folder(&dir, &error.to_string()), @r"
    interrupted before all shards in DIR/shards were verified
      hint: run the same command again; it starts over
    ");
}

#[test]
fn the_sample_has_both_ends_and_no_block_twice() {
    for count in [0, 1, 2, 17, 18, 19, 50, 1000] {
        let mut blocks = sample(count);
        if count > SAMPLED_BLOCKS {
            assert_eq!(blocks[..2], [0, count - 1]);
        }
        blocks.sort_unstable();
        assert!(blocks.windows(2).all(|pair| pair[0] < pair[1]), "{blocks:?}");
        assert_eq!(blocks.len(), count.min(SAMPLED_BLOCKS));
        assert!(blocks.iter().all(|&block| block < count));
    }
}
