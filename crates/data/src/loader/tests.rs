mod documents;
mod errors;
mod streams;

use std::collections::HashSet;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::windows::{Order, Windows};
use super::*;
use crate::SourceConfig;
use crate::shard::{Shard, TokenStream};
use crate::sources::testing::{END, config, documents, message, open, shard, tokenizer};
use crate::sources::{Weighted, fflm, passkey, shards, text};

fn shards(train: &Path) -> SourceConfig {
    shards::Config { train: vec![train.into()], validation: vec![] }.into()
}

fn windows(tokens: u64, seq_len: usize, order: Order) -> Windows {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x", &vec![1; tokens as usize]);
    let stream = TokenStream::new(vec![Shard::open(&path).unwrap()]);
    Windows::new(stream, seq_len, &tokenizer(), order)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_epoch_has_every_window_once(tokens in 20u64..600, seq_len in 2usize..19, key in any::<u64>(), epoch in 0u64..5) {
        let windows = windows(tokens, seq_len, Order::Shuffled { key });
        let mut starts: Vec<u64> =
            (0..windows.count).map(|index| windows.start(epoch * windows.count + index)).collect();
        starts.sort_unstable();
        let seq_len = seq_len as u64;
        prop_assert!(starts[0] < seq_len);
        prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == seq_len));
        prop_assert!(starts[starts.len() - 1] + seq_len < tokens);
        // Less than a row is left out at either end.
        prop_assert!(tokens - 1 - starts.len() as u64 * seq_len < 2 * seq_len);
    }

    #[test]
    fn validation_windows_are_distinct_and_in_order(tokens in 20u64..600, seq_len in 2usize..19) {
        let mut windows = windows(tokens, seq_len, Order::Spread { rows: 1 });
        let rows = (windows.count / 2).max(1);
        windows.spread(rows);
        let starts: Vec<u64> = (0..rows).map(|index| windows.start(index)).collect();
        prop_assert!(starts.windows(2).all(|pair| pair[0] < pair[1]));
        prop_assert!(starts[starts.len() - 1] + (seq_len as u64) < tokens);
    }

    #[test]
    fn no_token_sees_another_document(lengths in proptest::collection::vec(1usize..40, 8..60)) {
        let dir = tempfile::tempdir().unwrap();
        let tokens = documents(&lengths);
        prop_assume!(tokens.len() > 34);
        let path = shard(dir.path(), "x_train", &tokens);
        let loader = open(&config(&dir, 16, vec![shards(&path)]), 3, Split::Train).unwrap();
        let batch = loader.batch(0, 20);
        let starts = batch.document_starts.as_ref().unwrap();
        for at in 0..20 * 16 {
            let (row, t) = (at / 16, at % 16);
            let input = |t: usize| batch.inputs[row * 16 + t];
            let start = starts[at] as usize;
            prop_assert!(start <= t);
            // No document ends between the start and here, and the start is where one begins.
            prop_assert!((start..t).all(|seen| input(seen) != END as i32));
            prop_assert!(start == 0 || input(start - 1) == END as i32);
            let crosses = input(t) == END as i32;
            prop_assert_eq!(batch.loss_weights[at], if crosses { 0.0 } else { 1.0 });
        }
    }
}

#[test]
fn targets_follow_inputs_and_come_from_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let tokens: Vec<u32> = (0..200).collect();
    let path = shard(dir.path(), "x_train", &tokens);
    let loader = open(&config(&dir, 8, vec![shards(&path)]), 5, Split::Train).unwrap();
    let batch = loader.batch(0, 50);
    assert_eq!(batch.inputs.len(), 400);
    for (input, target) in batch.inputs.iter().zip(&batch.targets) {
        assert_eq!(input + 1, *target);
    }
    assert_eq!((loader.tokens(), loader.rows_per_epoch(), loader.seq_len()), (200, 24, 8));
}

#[test]
fn without_the_mask_every_target_counts() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &documents(&[5; 40]));
    let mut config = config(&dir, 16, vec![shards(&path)]);
    config.document_mask = false;
    let batch = open(&config, 0, Split::Train).unwrap().batch(0, 4);
    assert_eq!(batch.document_starts, None);
    assert!(batch.loss_weights.iter().all(|&weight| weight == 1.0));
}

/// A stream, a corpus of text and a generated task.
fn mixed(dir: &TempDir) -> DataConfig {
    let folder = dir.path().join("text");
    std::fs::create_dir_all(&folder).unwrap();
    for n in 0..60 {
        std::fs::write(folder.join(format!("{n}.txt")), format!("document {n} ").repeat(40))
            .unwrap();
    }
    let train = shard(dir.path(), "x_train", &documents(&[70; 100]));
    let validation = shard(dir.path(), "x_val", &documents(&[90; 70]));
    let shards = shards::Config { train: vec![train], validation: vec![validation] };
    let shards = SourceConfig::Shards(Weighted { weight: 5.0, source: shards });
    let text = text::Config::new(vec![folder]);
    let text = SourceConfig::Text(Weighted { weight: 2.0, source: text });
    config(dir, 512, vec![shards, text, passkey::Config::default().into()])
}

#[test]
fn rows_are_a_function_of_their_number() {
    let dir = tempfile::tempdir().unwrap();
    let config = mixed(&dir);
    let loader = open(&config, 9, Split::Train).unwrap();
    let whole = loader.batch(1000, 12);
    // Slices, as ranks read them, and a reopened loader, as after a restart.
    let again = open(&config, 9, Split::Train).unwrap();
    let cells = 4 * loader.seq_len();
    for slice in 0..3 {
        let part = again.batch(1000 + 4 * slice as u64, 4);
        let at = slice * cells..(slice + 1) * cells;
        assert_eq!(part.inputs, whole.inputs[at.clone()]);
        assert_eq!(part.targets, whole.targets[at.clone()]);
        assert_eq!(part.loss_weights, whole.loss_weights[at.clone()]);
        assert_eq!(part.document_starts.unwrap(), whole.document_starts.as_ref().unwrap()[at]);
    }
    assert_ne!(open(&config, 10, Split::Train).unwrap().batch(1000, 12), whole);
    assert_ne!(loader.batch(1012, 12), whole);
}

#[test]
fn shares_are_those_of_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    let loader = open(&mixed(&dir), 1, Split::Train).unwrap();
    let shares: Vec<f64> = loader.sources().iter().map(|source| source.share).collect();
    assert_eq!(shares, [0.625, 0.25, 0.125]);
    // The passkey instruction's first token is T, and every other row is all loss.
    let rows = loader.batch(0, 1000);
    let generated =
        rows.loss_weights.chunks(512).filter(|row| row.iter().sum::<f32>() < 32.0).count();
    assert_eq!(generated, 125);
}

#[test]
fn validation_is_the_same_for_every_seed_and_ends_in_padding() {
    let dir = tempfile::tempdir().unwrap();
    let config = mixed(&dir);
    let loader = open(&config, 1, Split::Validation).unwrap();
    let rows = loader.validation_rows().unwrap();
    assert!((6..=8).contains(&rows), "{rows}");
    assert_eq!(loader.batch(0, 8), open(&config, 2, Split::Validation).unwrap().batch(0, 8));
    let padding = loader.batch(rows, 3);
    assert!(padding.loss_weights.iter().all(|&weight| weight == 0.0));
    assert!(padding.inputs.iter().all(|&token| token == END as i32));
    assert_eq!(open(&config, 1, Split::Train).unwrap().validation_rows(), None);
}

#[test]
fn no_document_is_in_both_splits() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = mixed(&dir);
    config.sources.retain(|source| source.kind() == "text");
    config.seq_len = 32;
    config.validation_tokens = 1_000_000;
    let numbers = |split: Split, rows: u64| -> HashSet<u32> {
        let batch = open(&config, 1, split).unwrap().batch(0, rows as usize);
        let mut numbers = HashSet::new();
        for row in batch.inputs.chunks(32) {
            let text =
                tokenizer().decode(&row.iter().map(|&token| token as u32).collect::<Vec<_>>());
            // Only numbers between the word and a space: none that the row's ends have cut.
            let found = text.split("document ").skip(1).filter_map(|part| part.split_once(' '));
            numbers.extend(found.map(|(number, _)| number.parse::<u32>().unwrap()));
        }
        numbers
    };
    let validation = open(&config, 1, Split::Validation).unwrap().validation_rows().unwrap();
    let (train, validation) = (numbers(Split::Train, 2000), numbers(Split::Validation, validation));
    assert!(train.len() > 40 && !validation.is_empty());
    assert!(train.is_disjoint(&validation));
}

#[test]
fn text_is_encoded_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = mixed(&dir);
    open(&config, 1, Split::Train).unwrap();
    let folders = || {
        let entries = std::fs::read_dir(&config.cache_dir).unwrap();
        entries
            .map(|entry| entry.unwrap())
            .map(|e| (e.file_name(), e.metadata().unwrap().modified().unwrap()))
            .collect::<Vec<_>>()
    };
    let before = folders();
    open(&config, 2, Split::Validation).unwrap();
    assert_eq!((before.len(), folders()), (1, before));
    std::fs::write(dir.path().join("text/new.txt"), "another document").unwrap();
    open(&config, 1, Split::Train).unwrap();
    assert_eq!(folders().len(), 2, "other text needs other shards");
}

#[test]
fn flip_flop_sources_are_mixed_in_and_keep_documents_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = mixed(&dir);
    let source = fflm::Config { instructions: 100, reads_only: false, ..Default::default() };
    config.sources.push(SourceConfig::Fflm(Weighted { weight: 2.0, source }));
    let loader = open(&config, 1, Split::Train).unwrap();
    assert_eq!(loader.sources()[3].share, 0.2);
    let batch = loader.batch(0, 100);
    let starts = batch.document_starts.unwrap();
    let write = i32::from(b'w');
    let rows: Vec<usize> = (0..100)
        .filter(|row| batch.inputs[row * 512..row * 512 + 512].contains(&write))
        .filter(|row| batch.inputs[row * 512 + 201] == write)
        .collect();
    assert!(rows.len() > 10, "{rows:?}");
    for row in rows {
        let at = row * 512;
        // The second sequence starts after the first one's end of text, and its w has no loss.
        assert_eq!((starts[at + 200], starts[at + 201], starts[at + 300]), (0, 201, 201));
        let weights = &batch.loss_weights[at..at + 512];
        assert_eq!((weights[199], weights[200], weights[201]), (1.0, 0.0, 1.0));
    }
}

#[test]
fn one_text_file_is_enough_for_both_splits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("book.txt");
    std::fs::write(&path, "a line of a book\n".repeat(1000)).unwrap();
    let config = config(&dir, 16, vec![text::Config::new(vec![path]).into()]);
    let train = open(&config, 0, Split::Train).unwrap();
    let validation = open(&config, 0, Split::Validation).unwrap();
    assert!(validation.tokens() * 8 < train.tokens() && validation.tokens() > 1500);
    assert_eq!(validation.validation_rows(), Some(8));
}

#[test]
fn rows_are_cut_into_shorter_ones_of_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &documents(&[5, 9, 3, 20, 7, 31, 11, 2, 40, 13]));
    let loader = open(&config(&dir, 16, vec![shards(&path)]), 3, Split::Train).unwrap();
    let whole = loader.batch(0, 4);
    let cut = whole.clone().cut(8);
    assert_eq!((cut.rows, cut.seq_len), (8, 8));
    assert_eq!((&cut.inputs, &cut.targets), (&whole.inputs, &whole.targets));
    assert_eq!(cut.loss_weights, whole.loss_weights);
    // A document starts after an end of text, or with its row.
    for (inputs, starts) in cut.inputs.chunks(8).zip(cut.document_starts.unwrap().chunks(8)) {
        let mut start = 0;
        for at in 0..8 {
            assert_eq!(starts[at], start);
            if inputs[at] == END as i32 {
                start = at as i32 + 1;
            }
        }
    }
    assert_eq!(whole.clone().cut(16), whole);
}
