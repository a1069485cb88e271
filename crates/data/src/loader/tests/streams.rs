use super::*;

const STREAMS: usize = 3;

/// Documents of 5 to 9 tokens in `shards` files, in rows of 8.
fn loader(dir: &TempDir, seed: u64, split: Split, change: impl FnOnce(&mut DataConfig)) -> Loader {
    let lengths: Vec<usize> = (0..60).map(|n| 5 + n % 5).collect();
    let train = shard(dir.path(), "x_train", &documents(&lengths));
    let validation = shard(dir.path(), "x_val", &documents(&[90; 70]));
    let source = shards::Config { train: vec![train], validation: vec![validation] };
    let mut config = config(dir, 8, vec![source.into()]);
    config.rows = Rows::Streams;
    change(&mut config);
    open(&config, seed, split).unwrap()
}

fn batch(loader: &Loader, step: u64) -> Batch {
    loader.try_shorter(step * STREAMS as u64, STREAMS * 8, 8).unwrap()
}

fn row<T: Copy>(all: &[T], row: usize) -> Vec<T> {
    all[row * 8..(row + 1) * 8].to_vec()
}

/// Without separate documents, where each token is its own number.
#[test]
fn each_row_goes_on_from_the_same_row_of_the_batch_before() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &(0..250).collect::<Vec<u32>>());
    let mut config = config(&dir, 8, vec![shards(&path)]);
    (config.rows, config.document_mask) = (Rows::Streams, false);
    let mut firsts = HashSet::new();
    for seed in 0..4 {
        let loader = open(&config, seed, Split::Train).unwrap();
        // 30 windows, of which 10 are a stream's.
        assert_eq!((loader.rows_per_epoch(), loader.seq_len()), (30, 8));
        let mut breaks = 0;
        for epoch in 0u64..3 {
            let mut read = HashSet::new();
            for step in 0..10 {
                let (now, last) = (epoch * 10 + step, (epoch * 10 + step).saturating_sub(1));
                let (now, last) = (batch(&loader, now), batch(&loader, last));
                let goes_on = now.goes_on.unwrap();
                for stream in 0..STREAMS {
                    let (inputs, targets) = (row(&now.inputs, stream), row(&now.targets, stream));
                    assert!(
                        inputs.iter().zip(&targets).all(|(input, target)| input + 1 == *target)
                    );
                    let follows = row(&last.targets, stream)[7] == inputs[0];
                    assert_eq!(goes_on[stream], follows && step > 0, "epoch {epoch}, step {step}");
                    breaks += usize::from(step > 0 && !follows);
                    assert!(read.insert(inputs[0]), "an epoch reads no window twice");
                }
            }
            firsts.insert(batch(&loader, epoch * 10).inputs);
        }
        // Where the text ends inside of a part.
        assert!(breaks <= 3, "{breaks}");
    }
    assert!(firsts.len() > 8, "epochs and seeds begin at {} places", firsts.len());
}

#[test]
fn a_row_that_begins_with_its_document_goes_on_from_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let loader = loader(&dir, 3, Split::Train, |_| {});
    let mut begins = 0;
    for step in 1..13 {
        let (last, now) = (batch(&loader, step - 1), batch(&loader, step));
        let goes_on = now.goes_on.as_ref().unwrap();
        for stream in 0..STREAMS {
            // The token before a row is the last input of the one before.
            let ended = row(&last.inputs, stream)[7] == END as i32;
            assert!(!(ended && goes_on[stream]), "step {step}, stream {stream}");
            begins += usize::from(ended);
        }
        let starts = now.document_starts.as_ref().unwrap();
        assert!((0..STREAMS).all(|stream| row(starts, stream)[0] == 0));
    }
    assert!(begins > 0, "no row begins with its document");
}

#[test]
fn batches_are_a_function_of_their_number_and_ranks_have_their_rows() {
    let dir = tempfile::tempdir().unwrap();
    let (first, again) =
        (loader(&dir, 7, Split::Train, |_| {}), loader(&dir, 7, Split::Train, |_| {}));
    for step in [0, 5, 40, 1000] {
        let whole = batch(&first, step);
        assert_eq!(whole, batch(&again, step));
        let part = whole.part(1..3);
        assert_eq!(part.goes_on.as_deref(), Some(&whole.goes_on.as_ref().unwrap()[1..3]));
        assert_eq!(row(&part.inputs, 0), row(&whole.inputs, 1));
    }
    let cursor = first.cursor(15);
    assert_eq!(again.check_cursor(&cursor).unwrap(), 15);
    let packed = loader(&dir, 7, Split::Train, |config| config.rows = Rows::Packed);
    let error = packed.check_cursor(&cursor).unwrap_err();
    assert!(error.to_string().contains("data.rows was streams, and is packed"));
}

#[test]
fn validation_is_as_with_packed_rows() {
    let dir = tempfile::tempdir().unwrap();
    let streams = loader(&dir, 7, Split::Validation, |_| {});
    let packed = loader(&dir, 7, Split::Validation, |config| config.rows = Rows::Packed);
    assert_eq!(streams.batch(0, 5), packed.batch(0, 5));
    assert_eq!(streams.batch(0, 5).goes_on, None);
}

#[test]
fn more_streams_than_rows_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let loader = loader(&dir, 7, Split::Train, |_| {});
    let rows = loader.rows_per_epoch() as usize;
    loader.check_streams(rows).unwrap();
    insta::assert_snapshot!(loader.check_streams(rows + 1).unwrap_err(), @r#"
    source data.sources[0] (shards) has 51 rows of 8 tokens, and a batch has 52; with data.rows = "streams" each reads a part of its own
      hint: give more text, lower train.batch_tokens or data.seq_len, or set data.rows = "packed"
    "#);
}
