use super::*;

#[test]
fn short_data_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &[1; 16]);
    let short = config(&dir, 16, vec![shards(&path)]);
    insta::assert_snapshot!(message(&dir, &short, Split::Train), @r"
    source data.sources[0] (shards) has 16 tokens for training, and a row needs seq_len + 1 = 17
      hint: give more text, lower data.seq_len, or lower data.validation_fraction
    ");
    insta::assert_snapshot!(message(&dir, &short, Split::Validation), @r"
    no source has validation data: data.sources[0] (shards) has 0 tokens for it
      hint: raise data.validation_fraction, give more documents (data.sources.separator splits long text files), or give a shards source `validation` files
    ");
}

#[test]
fn a_cursor_survives_a_restart_and_notices_changes() {
    let dir = tempfile::tempdir().unwrap();
    let config = mixed(&dir);
    let cursor = open(&config, 9, Split::Train).unwrap().cursor(123);
    let text = serde_json::to_string(&cursor).unwrap();
    let cursor: Cursor = serde_json::from_str(&text).unwrap();
    assert_eq!(open(&config, 9, Split::Train).unwrap().check_cursor(&cursor).unwrap(), 123);

    let changed = |change: &dyn Fn(&mut DataConfig), seed: u64| {
        let mut config = config.clone();
        change(&mut config);
        open(&config, seed, Split::Train).unwrap().check_cursor(&cursor).unwrap_err().to_string()
    };
    insta::assert_snapshot!(changed(&|config| config.seq_len = 448, 9), @r"
    the data changed since the checkpoint: data.seq_len was 512, and is 448
      hint: restore the data and the [data] table as they were, or start a new run
    ");
    insta::assert_snapshot!(changed(&|_| (), 10), @r"
    the data changed since the checkpoint: the seed was 9, and is 10
      hint: restore the data and the [data] table as they were, or start a new run
    ");
    insta::assert_snapshot!(changed(&|config| config.sources.truncate(2), 9), @r"
    the data changed since the checkpoint: the number of sources was 3, and is 2
      hint: restore the data and the [data] table as they were, or start a new run
    ");
    insta::assert_snapshot!(changed(&|config| config.sources.swap(0, 1), 9), @r"
    the data changed since the checkpoint: a source was data.sources[0] (shards), and is data.sources[0] (text)
      hint: restore the data and the [data] table as they were, or start a new run
    ");
    let reweigh = |config: &mut DataConfig| {
        let SourceConfig::Shards(table) = &mut config.sources[0] else { panic!() };
        table.weight = 4.0;
    };
    insta::assert_snapshot!(changed(&reweigh, 9), @r"
    the data changed since the checkpoint: the weight of data.sources[0] (shards) was 5, and is 4
      hint: restore the data and the [data] table as they were, or start a new run
    ");

    shard(dir.path(), "x_train", &documents(&[71; 100]));
    let message = changed(&|_| (), 9);
    assert!(message.starts_with(
        "the data changed since the checkpoint: the fingerprint of data.sources[0] (shards) was"
    ));
}

#[test]
fn a_shard_missing_from_the_cache_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = mixed(&dir);
    config.sources.retain(|source| source.kind() == "text");
    open(&config, 0, Split::Train).unwrap();
    let mut entries = std::fs::read_dir(&config.cache_dir).unwrap();
    let folder = entries.next().unwrap().unwrap().path();
    std::fs::remove_file(folder.join("text_train_000001.bin")).unwrap();
    let message = message(&dir, &config, Split::Train);
    let name = folder.file_name().unwrap().to_string_lossy();
    insta::assert_snapshot!(message.replace(&*name, "text-KEY"), @r"
    prepared shard DIR/cache/text-KEY/text_train_000001.bin does not exist
      hint: delete DIR/cache/text-KEY, and it is prepared again
    ");
}

#[test]
fn a_cache_that_is_no_folder_is_refused_by_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = mixed(&dir);
    config.sources.retain(|source| source.kind() == "text");
    config.cache_dir = dir.path().join("file");
    std::fs::write(&config.cache_dir, "in the way").unwrap();
    let message = message(&dir, &config, Split::Train);
    assert!(message.starts_with("cannot use DIR/file/text-"), "{message}");
    assert!(message.contains("in data.cache_dir: "), "{message}");
    assert!(message.contains("hint: set data.cache_dir to a folder you may write to"), "{message}");
}

#[cfg(unix)]
#[test]
fn a_token_that_a_shard_gets_after_it_was_opened_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &[1; 100]);
    let loader = open(&config(&dir, 16, vec![shards(&path)]), 0, Split::Train).unwrap();
    loader.try_batch(0, 100).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[44, 1], 1024 + 2 * 40).unwrap();
    let message = loader.try_batch(0, 100).unwrap_err().to_string();
    insta::assert_snapshot!(message.replace(&dir.path().display().to_string(), "DIR"), @r"
    DIR/x_train_000001.bin holds token 300 at position 40; the tokenizer bytes has tokens 0 to 256
      hint: set [tokenizer] to the one the shard was made with, or prepare the text again with this one
    ");
}

/// As when a disk fails, or another program rewrites the file.
#[test]
fn a_shard_cut_short_in_use_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &documents(&[71; 100]));
    let loader = open(&config(&dir, 16, vec![shards(&path)]), 0, Split::Train).unwrap();
    loader.try_batch(0, 64).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(2048).unwrap();
    let message = loader.try_batch(0, 64).unwrap_err().to_string();
    insta::assert_snapshot!(message.replace(&dir.path().display().to_string(), "DIR"), @r"
    cannot read DIR/x_train_000001.bin: failed to fill whole buffer
      hint: check that the file is there, whole, and readable by you
    ");
}
