use super::*;
use crate::testing::config;

fn results() -> Finished {
    Finished {
        step: 10,
        tokens: 640,
        loss: Some(1.5),
        validation: None,
        skipped: 0,
        tokens_per_second: 5000.0,
        seconds: 2.0,
        parameters: 1000,
        device: "cpu".into(),
    }
}

#[test]
fn a_run_is_never_overwritten_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("runs/small");
    let run = RunFolder::create(&path, false).unwrap();
    run.start(&config(&[])).unwrap();
    fs::write(run.metrics(), "{}").unwrap();
    fs::write(path.join("config.toml.17.tmp"), "[mod").unwrap();
    fs::write(path.join("notes.md"), "mine").unwrap();
    fs::write(path.join("notes.tmp"), "mine").unwrap();
    drop(run);
    let error = RunFolder::create(&path, false).unwrap_err();
    assert!(matches!(&error, RunFolderError::Exists { .. }));
    assert!(error.to_string().contains("--resume"), "{error}");
    let run = RunFolder::create(&path, true).unwrap();
    assert!(!run.metrics().exists());
    for name in ["notes.md", "notes.tmp"] {
        assert!(path.join(name).exists(), "--force removed a file that is not the run's");
    }
    assert!(!path.join("config.toml.17.tmp").exists(), "a file that a killed process left");
}

#[test]
fn force_spares_folders_that_hold_no_run() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("thesis.tex"), "years of work").unwrap();
    let error = RunFolder::create(folder.path(), true).unwrap_err();
    assert!(matches!(error, RunFolderError::NotARun { .. }));
    assert!(folder.path().join("thesis.tex").exists());
}

#[test]
fn what_was_killed_before_the_run_began_can_start_again() {
    let folder = tempfile::tempdir().unwrap();
    drop(RunFolder::create(folder.path(), false).unwrap());
    fs::write(folder.path().join("config.toml.17.tmp"), "[mod").unwrap();
    let run = RunFolder::create(folder.path(), false).unwrap();
    let tokenizer = folder.path().join("bpe.json");
    let set = format!("tokenizer={{kind=\"file\", path={:?}}}", tokenizer.to_str().unwrap());
    let config = config(&[&set]);
    // Killed after the configuration was written.
    assert!(run.start(&config).is_err());
    drop(run);
    fs::write(&tokenizer, "{}").unwrap();
    RunFolder::open(folder.path()).unwrap().start(&config).unwrap();
    assert_eq!(fs::read(folder.path().join(TOKENIZER_FILE)).unwrap(), b"{}");
}

#[test]
fn one_process_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::create(folder.path(), false).unwrap();
    run.start(&config(&[])).unwrap();
    let error = RunFolder::open(folder.path()).unwrap_err();
    assert!(matches!(error, RunFolderError::Locked { .. }));
    drop(run);
    RunFolder::open(folder.path()).unwrap();
}

#[test]
fn the_mark_of_a_finished_run_goes_when_it_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::create(folder.path(), false).unwrap();
    run.start(&config(&[])).unwrap();
    assert_eq!(finished(folder.path()).unwrap(), None);
    run.finish(&results()).unwrap();
    assert_eq!(finished(folder.path()).unwrap(), Some(results()));
    run.start(&config(&["train.tokens=2M"])).unwrap();
    assert_eq!(finished(folder.path()).unwrap(), None);
    assert_eq!(config_of(folder.path(), &[]).unwrap(), config(&["train.tokens=2M"]));
}

#[test]
fn a_folder_without_a_run_cannot_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let error = RunFolder::open(folder.path()).unwrap_err();
    assert!(matches!(error, RunFolderError::NoRun { .. }));
}

#[cfg(unix)]
#[test]
fn an_unwritable_place_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let path = folder.path().join("file/run");
    assert!(RunFolder::check_new(&path, false).is_err());
    let error = RunFolder::create(&path, false).unwrap_err().to_string();
    assert!(error.contains("file/run") && error.contains("run.out_dir"), "{error}");
}
