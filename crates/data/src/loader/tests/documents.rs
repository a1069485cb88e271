use super::*;

/// Documents of 3 to 40 tokens, each of its own token, in rows of 16.
fn loader(dir: &TempDir, seed: u64, split: Split) -> Loader {
    let train = shard(dir.path(), "x_train", &documents(&[3, 1, 40, 17, 16, 9]));
    let validation = shard(dir.path(), "x_val", &documents(&[5, 20]));
    let source = shards::Config { train: vec![train], validation: vec![validation] };
    let mut config = config(dir, 16, vec![source.into()]);
    config.rows = Rows::Documents;
    open(&config, seed, split).unwrap()
}

/// The row of a document of `length` tokens that repeats `token`, of `seq_len` tokens.
fn expected(token: i32, length: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>, Vec<f32>) {
    let at = |t: usize| if t + 1 < length { token } else { END as i32 };
    let weight = |t: usize| if t + 1 < length { 1.0 } else { 0.0 };
    let of = 0..seq_len;
    (
        of.clone().map(at).collect(),
        of.clone().map(|t| at(t + 1)).collect(),
        of.map(weight).collect(),
    )
}

fn check(batch: &Batch, lengths: &[usize]) -> Vec<i32> {
    let rows = batch.inputs.chunks(batch.seq_len).zip(batch.targets.chunks(batch.seq_len));
    let rows = rows.zip(batch.loss_weights.chunks(batch.seq_len));
    rows.map(|((inputs, targets), weights)| {
        let row = expected(inputs[0], lengths[inputs[0] as usize], batch.seq_len);
        assert_eq!((inputs.to_vec(), targets.to_vec(), weights.to_vec()), row);
        inputs[0]
    })
    .collect()
}

#[test]
fn a_row_is_one_document_from_its_start_and_an_epoch_has_each_once() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [3, 1, 40, 17, 16, 9];
    let loader = loader(&dir, 3, Split::Train);
    assert_eq!(loader.rows_per_epoch(), 5, "the document without a target is left out");
    let mut orders = HashSet::new();
    for epoch in 0..6 {
        let order = check(&loader.batch(5 * epoch, 5), &lengths);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 2, 3, 4, 5]);
        orders.insert(order);
    }
    assert!(orders.len() > 2, "{orders:?}");
    // A stage of shorter rows has the first tokens of as many more documents.
    let short = loader.try_shorter(7, 32, 8).unwrap();
    assert_eq!((short.rows, short.seq_len), (4, 8));
    assert_eq!(check(&short, &lengths), check(&loader.batch(7, 4), &lengths));
}

/// The same documents as the whole rows, each part without what precedes it.
#[test]
fn documents_can_be_cut_into_shorter_rows() {
    let dir = tempfile::tempdir().unwrap();
    let train = shard(dir.path(), "x_train", &documents(&[3, 1, 40, 17, 16, 9]));
    let source = shards::Config { train: vec![train], validation: vec![] };
    let mut config = config(&dir, 16, vec![source.into()]);
    config.rows = Rows::CutDocuments;
    let cut = open(&config, 3, Split::Train).unwrap();
    config.rows = Rows::Documents;
    let whole = open(&config, 3, Split::Train).unwrap().batch(2, 5);
    assert_eq!(cut.batch(2, 5), whole);
    let parts = cut.try_shorter(2, 5 * 16, 4).unwrap();
    assert_eq!((parts.rows, parts.seq_len), (20, 4));
    assert_eq!((&parts.inputs, &parts.targets), (&whole.inputs, &whole.targets));
    assert_eq!(parts.loss_weights, whole.loss_weights);
    assert_eq!(parts, whole.cut(4));
}

#[test]
fn a_run_goes_on_in_the_middle_of_an_epoch_and_validation_is_fixed() {
    let dir = tempfile::tempdir().unwrap();
    let whole = loader(&dir, 3, Split::Train).batch(0, 12);
    let cursor = loader(&dir, 3, Split::Train).cursor(7);
    let again = loader(&dir, 3, Split::Train);
    assert_eq!(again.batch(again.check_cursor(&cursor).unwrap(), 5), whole.part(7..12));
    let packed = Cursor { rows: Rows::Packed, ..cursor };
    let message = again.check_cursor(&packed).unwrap_err().to_string();
    assert!(message.contains("data.rows was packed, and is documents"), "{message}");
    let validation = loader(&dir, 3, Split::Validation);
    assert_eq!(validation.validation_rows(), Some(2));
    assert_eq!(check(&validation.batch(0, 2), &[5, 20]), [0, 1]);
}

#[test]
fn text_and_generated_examples_are_mixed_one_to_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = mixed(&dir);
    config.rows = Rows::Documents;
    let batch = open(&config, 1, Split::Train).unwrap().batch(0, 200);
    let mut firsts = HashSet::new();
    for (inputs, weights) in batch.inputs.chunks(512).zip(batch.loss_weights.chunks(512)) {
        let end = inputs.iter().position(|&token| token == END as i32).unwrap_or(511);
        assert!(inputs[end + 1..].iter().all(|&token| token == END as i32));
        assert!(weights[end + 1..].iter().all(|&weight| weight == 0.0));
        assert!(weights.contains(&1.0));
        firsts.insert(inputs[0] == i32::from(b'd'));
    }
    assert_eq!(firsts.len(), 2);
}

#[test]
fn shards_without_an_end_of_text_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "x_train", &[1; 100]);
    let mut config = config(&dir, 16, vec![shards(&path)]);
    config.rows = Rows::Documents;
    insta::assert_snapshot!(message(&dir, &config, Split::Train), @r#"
    source data.sources[0] (shards) has no end of text among its 100 tokens, and data.rows is "documents"
      hint: set rows = "packed", or make the shards again with an end of text after every document
    "#);
}

#[test]
fn short_rows_tell_which_examples_lose_targets() {
    let dir = tempfile::tempdir().unwrap();
    let of = |answer_only, max_len| passkey::Config { max_len, answer_only, ..Default::default() };
    let sources = [of(true, None), of(false, None), of(true, Some(320))];
    let mut config = config(&dir, 640, sources.map(SourceConfig::from).to_vec());
    config.rows = Rows::Documents;
    let loader = open(&config, 3, Split::Train).unwrap();
    let cut = loader.cut_examples(320);
    let names: Vec<&str> = cut.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["data.sources[0] (passkey)", "data.sources[1] (passkey)"]);
    // As many as the rows of a stage have, by the same examples.
    let weights = |seq_len| loader.try_shorter(0, 64 * 3 * seq_len, seq_len).unwrap().loss_weights;
    let [kept, all] = [weights(320), weights(640)].map(|all| all.iter().sum::<f32>());
    assert!(cut[0].1 < 0.9 && kept < all, "{cut:?}, {kept} of {all}");
    assert_eq!(loader.cut_examples(640), []);
    config.rows = Rows::Packed;
    assert_eq!(open(&config, 3, Split::Train).unwrap().cut_examples(320), []);
}
