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
      hint: choose one of these, or train the run first
    ");
    insta::assert_snapshot!("newest".parse::<CheckpointSelector>().unwrap_err(), @"`newest` is no checkpoint; allowed: latest, best, or a step such as 1000");
}

#[test]
fn a_run_without_checkpoints_says_so() {
    let run = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN has no latest checkpoint; there: none
      hint: choose one of these, or train the run first
    ");
}

#[test]
fn a_damaged_state_names_the_file() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), 3);
    std::fs::write(run.path().join("checkpoints/step-3/state.json"), "{\"step\": 3").unwrap();
    let error = Checkpoint::open(run.path(), CheckpointSelector::Latest).unwrap_err();
    insta::assert_snapshot!(shown(run.path(), error), @r"
    RUN/checkpoints/step-3/state.json is damaged: EOF while parsing an object at line 1 column 10
      hint: remove that checkpoint's folder; the one before it is used then
    ");
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
