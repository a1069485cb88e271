use longwall_data::Cursor;

use super::*;
use crate::guard::GuardState;
use crate::testing::config;

fn tokenizer(name: &str) -> TokenizerIdentity {
    TokenizerIdentity { name: name.into(), fingerprint: name.repeat(8), vocab_size: 257 }
}

fn state(step: u64) -> State {
    let config = config(&[]);
    let mut guard = GuardState::default();
    guard.skipped = 1;
    let cursor = Cursor {
        next_row: step * 8,
        seed: 3,
        seq_len: 512,
        rows: longwall_data::Rows::Packed,
        tokenizer: "bytes".into(),
        sources: Vec::new(),
    };
    State {
        step,
        tokens: step * config.train.batch_tokens,
        updates: step - 1,
        seed: config.run.seed,
        cursor,
        guard,
        loss: Some(2.5),
        best: Some(Best { step: 1, validation_loss: 0.1 + 0.2 }),
        validation: None,
        metrics_bytes: 10,
        samples_bytes: 0,
        seconds: 1.0 / 3.0,
        micro_batch: 4,
        micro_batches: vec![],
        noise: Default::default(),
        tokenizer: tokenizer("bytes"),
        model: config.model,
    }
}

fn write(run: &Path, step: u64) {
    let folder = CheckpointFolder::new(run);
    folder.write(step, |path| write_texts(path, &config(&[]), &state(step))).unwrap();
}

/// The message of `error`, with the run folder's temporary path replaced by `RUN`.
fn shown(run: &Path, error: CheckpointError) -> String {
    error.to_string().replace(&run.display().to_string(), "RUN")
}

#[test]
fn a_checkpoint_reads_back_as_written() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    let checkpoint = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap();
    assert_eq!(checkpoint.state, state(3));
    assert_eq!(checkpoint.config, config(&[]));
    assert_eq!(checkpoint.path, run.path().join("checkpoints/step-3"));
}

#[test]
fn latest_best_and_steps_are_found() {
    let run = tempfile::tempdir().unwrap();
    for step in [1, 2, 10] {
        write(run.path(), step);
    }
    let best = Best { step: 2, validation_loss: 1.0 };
    CheckpointFolder::new(run.path()).mark_best(best).unwrap();
    let open = |which: &str| Checkpoint::open(run.path(), which.parse().unwrap());
    assert_eq!(open("latest").unwrap().state.step, 10);
    assert_eq!(open("best").unwrap().state.step, 2);
    assert_eq!(open("1").unwrap().state.step, 1);
    assert_eq!(open("step-1").unwrap().state.step, 1);
    insta::assert_snapshot!(shown(run.path(), open("5").unwrap_err()), @r"
    RUN has no step-5 checkpoint; there: step 1, step 2, step 10
      hint: choose one of these
    ");
    insta::assert_snapshot!("newest".parse::<CheckpointSelector>().unwrap_err(), @"`newest` is no checkpoint; allowed: latest, best, or a step such as 1000");
}

#[test]
fn a_run_without_checkpoints_says_so() {
    let run = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN holds no run: there is no config.toml in it
      hint: give the folder of a run, for example runs/NAME
    ");
    fs::write(run.path().join("config.toml"), config(&[]).to_toml()).unwrap();
    let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    the run in RUN has no checkpoint yet
      hint: train it first: longwall train --resume RUN
    ");
}

#[test]
fn a_damaged_state_names_the_file() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    std::fs::write(run.path().join("checkpoints/step-3/state.json"), "{\"step\": 3").unwrap();
    let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN/checkpoints/step-3/state.json is damaged: it has 10 bytes, of 1327 written
      hint: restore it from a copy: no other checkpoint of the run is sound
    ");
}

/// Flips one bit in the middle of a file.
fn flip_a_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_flipped_bit_in_any_file_is_found_and_a_sound_checkpoint_is_named() {
    for name in ["state.json", CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE] {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join(CONFIG_FILE), "").unwrap();
        let folder = CheckpointFolder::new(run.path());
        for step in [1, 2, 3] {
            let fill = |path: &Path| {
                fs::write(path.join(WEIGHTS_FILE), [7; 1000]).unwrap();
                fs::write(path.join(OPTIMIZER_FILE), [8; 2000]).unwrap();
                write_texts(path, &config(&[]), &state(step))
            };
            folder.write(step, fill).unwrap();
        }
        flip_a_bit(&folder.step_dir(3).join(name));
        flip_a_bit(&folder.step_dir(2).join(WEIGHTS_FILE));
        let read = |checkpoint: Checkpoint| checkpoint.weights().and(checkpoint.optimizer());
        let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).and_then(read);
        let error = shown(run.path(), error.unwrap_err());
        let expected = format!("RUN/checkpoints/step-3/{name} is damaged: its CRC-32C is ");
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.contains("hint: step 1 is sound: remove RUN/checkpoints/step-3"), "{error}");
        let damaged = |step| {
            let files = folder.verify(step).unwrap();
            files.into_iter().filter(|(_, error)| error.is_some()).map(|(path, _)| path).collect()
        };
        let found: Vec<PathBuf> = damaged(3);
        assert_eq!(found, [folder.step_dir(3).join(name)]);
        assert!(damaged(1).is_empty());
    }
}

#[test]
fn a_checkpoint_without_checksums_is_read_and_cannot_be_verified() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    let folder = CheckpointFolder::new(run.path());
    fs::remove_file(folder.step_dir(3).join("checksums.json")).unwrap();
    let checkpoint = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap();
    assert_eq!(checkpoint.state, state(3));
    assert!(matches!(folder.verify(3), Err(CheckpointError::NoChecksums { .. })));
}

#[test]
fn a_state_that_no_run_writes_is_damaged() {
    let (tokens, steps) = (state(3).tokens, u64::MAX);
    let with = |change: fn(&mut State)| {
        let mut state = state(3);
        change(&mut state);
        state
    };
    for (state, reason) in [
        (with(|state| state.micro_batch = 0), "micro_batch is 0; allowed: 1 to a step's 8 rows"),
        (with(|state| state.micro_batch = 9), "micro_batch is 9; allowed"),
        (with(|state| state.step = u64::MAX), &format!("{tokens} tokens after {steps} steps")),
        (with(|state| state.updates = 3), "of 3 steps 3 were taken and 1 skipped, 0 in a row"),
        (with(|state| state.guard.skipped = u64::MAX), "skipped, 0 in a row"),
        (with(|state| state.guard.in_a_row = 2), "1 skipped, 2 in a row"),
    ] {
        let run = tempfile::tempdir().unwrap();
        let folder = CheckpointFolder::new(run.path());
        folder.write(3, |path| write_texts(path, &config(&[]), &state)).unwrap();
        let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
        let error = shown(run.path(), error);
        assert!(error.contains("state.json is damaged: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn another_tokenizer_is_refused() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    let checkpoint = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap();
    checkpoint.check_tokenizer(&tokenizer("bytes")).unwrap();
    let error = checkpoint.check_tokenizer(&tokenizer("gpt2")).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN/checkpoints/step-3 was made with the tokenizer bytes of 257 tokens (bytesbytesby), but the configuration gives gpt2 of 257 tokens (gpt2gpt2gpt2)
      hint: use the tokenizer the run was trained with
    ");
}

#[test]
fn keys_that_define_the_run_cannot_change_on_resume() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    let checkpoint = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap();
    checkpoint.check_config(&config(&["train.lr=1e-4", "train.tokens=2M"])).unwrap();
    let changed = config(&["model.layers=3", "run.seed=4", "train.lr=1e-4"]);
    let error = checkpoint.check_config(&changed).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN/checkpoints/step-3 was made with another configuration:
      model.layers was 2, and is 3 now
      run.seed was 3, and is 4 now
      hint: resume without changing these keys, or start a new run under another run.name
    ");
}
