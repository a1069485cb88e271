//! Evaluations whose samples several ranks take.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Barrier, Mutex};

use longwall_eval::suites::extrapolate::ExtrapolateOptions;
use longwall_eval::suites::passkey::PasskeyOptions;
use longwall_eval::{
    Discard, EvalError, HeldOut, Ranks, Report, RunContext, SamplingOptions, Silent, SuiteConfig,
    SuiteOptions, run_on_rank,
};

use crate::common::{FakeModel, Tokens, files, passkey};

/// 80 samples in 12 batches.
fn suite() -> SuiteConfig {
    SuiteConfig::Passkey(SuiteOptions {
        own: PasskeyOptions { lengths: vec![500, 600], trials: 40, ..Default::default() },
        sampling: SamplingOptions { batch: 7, ..Default::default() },
    })
}

fn model() -> FakeModel {
    FakeModel::bytes(|prompt| match passkey(prompt) % 2 {
        0 => format!(" {}", passkey(prompt)),
        _ => " 0".to_string(),
    })
}

/// Runs a suite on `size` threads, each with its model; returns their results.
fn evaluate_on(
    size: usize,
    dir: &Path,
    suites: impl Fn(usize) -> SuiteConfig + Sync,
    models: impl Fn(usize) -> FakeModel + Sync,
) -> Vec<Result<Option<Report>, EvalError>> {
    let given = Mutex::new(vec![vec![]; size]);
    let barrier = Barrier::new(size);
    let on_rank = |rank: usize| {
        let exchange = |message| {
            given.lock().unwrap()[rank] = message;
            barrier.wait();
            let all = given.lock().unwrap().clone();
            barrier.wait();
            Ok(all)
        };
        let mut model = models(rank);
        let (stop, text) = (model.stop.clone(), Tokens((0..5000).map(|at| at % 200).collect()));
        let context = RunContext {
            out_dir: dir.to_path_buf(),
            run: "wall".to_string(),
            checkpoint_step: Some(100),
            model_changes: vec![],
            git_hash: None,
            discard: Discard::Nothing,
            held_out: Some(&text as &dyn HeldOut),
            progress: &Silent,
            stop: Some(&*stop),
            ranks: Ranks { rank, size, exchange: &exchange },
        };
        run_on_rank(&suites(rank), &mut model, &context)
    };
    std::thread::scope(|scope| {
        let on_rank = &on_rank;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || on_rank(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn content(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: &String| std::fs::read(dir.join(name)).unwrap();
    files(dir).into_iter().map(|name| (name.clone(), read(&name))).collect()
}

#[test]
fn files_do_not_depend_on_the_number_of_ranks() {
    let windows = ExtrapolateOptions { lengths: Some(vec![100, 200]), ..Default::default() };
    let windows: SuiteConfig = windows.into();
    let lengths = || FakeModel {
        token_log_p: Box::new(|at, length, tokens| {
            -1.0 / (1 + at) as f32 - (tokens[at] % 7 + length as u32) as f32 / 3.0
        }),
        ..model()
    };
    for suite in [suite(), windows] {
        let contents: Vec<_> = [1, 2, 3, 13]
            .map(|size| {
                let dir = tempfile::tempdir().unwrap();
                let reports = evaluate_on(size, dir.path(), |_| suite.clone(), |_| lengths());
                for (rank, report) in reports.into_iter().enumerate() {
                    assert_eq!(report.unwrap().is_some(), rank == 0);
                }
                content(dir.path())
            })
            .into();
        for other in &contents[1..] {
            assert_eq!(other, &contents[0]);
        }
    }
}

#[test]
fn an_evaluation_stops_on_all_ranks_and_goes_on_with_others() {
    let whole = tempfile::tempdir().unwrap();
    evaluate_on(1, whole.path(), |_| suite(), |_| model()).pop().unwrap().unwrap();
    let broken = tempfile::tempdir().unwrap();
    // A rank is asked to stop in its first batch: that round is the last.
    for (size, asked, expected) in [(3, 1, 21), (2, 0, 35), (1, 0, 40), (2, 1, 54)] {
        let stops = |rank| (rank == asked).then_some(1);
        let models = |rank| FakeModel { stop_after: stops(rank), ..model() };
        for result in evaluate_on(size, broken.path(), |_| suite(), models) {
            match result.unwrap_err() {
                EvalError::Stopped { done, total, .. } => assert_eq!((done, total), (expected, 80)),
                other => panic!("{other}"),
            }
        }
        assert!(!broken.path().join("results.json").exists());
    }
    for result in evaluate_on(3, broken.path(), |_| suite(), |_| model()) {
        result.unwrap();
    }
    assert_eq!(content(broken.path()), content(whole.path()));
}

#[test]
fn a_rank_that_fails_is_named_and_the_samples_of_the_others_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let models = |rank| FakeModel { fail_at: (rank == 1).then_some(2), ..model() };
    let errors: Vec<String> = evaluate_on(3, dir.path(), |_| suite(), models)
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect();
    assert!(errors[1].starts_with("the model failed on 7 sequences"), "{errors:?}");
    for rank in [0, 2] {
        assert!(errors[rank].starts_with("rank 1 failed: the model failed on"), "{errors:?}");
    }
    // A round of three batches of 7, and the fourth and sixth batch, of 7 and 5.
    assert_eq!(crate::common::samples(dir.path()).len(), 21 + 7 + 5);
    for result in evaluate_on(2, dir.path(), |_| suite(), |_| model()) {
        result.unwrap();
    }
    assert_eq!(crate::common::samples(dir.path()).len(), 80);
}

#[test]
fn what_only_rank_0_finds_ends_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("samples.jsonl"), "{}\n").unwrap();
    let results = evaluate_on(2, dir.path(), |_| suite(), |_| model());
    let errors: Vec<String> = results.into_iter().map(|x| x.unwrap_err().to_string()).collect();
    assert!(errors[0].contains("without settings.json"), "{errors:?}");
    assert!(errors[1].starts_with("rank 0 failed: "), "{errors:?}");
}

#[test]
fn ranks_with_other_settings_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let suites = |rank| match rank {
        0 => suite(),
        _ => PasskeyOptions { lengths: vec![500], trials: 3, ..Default::default() }.into(),
    };
    for result in evaluate_on(2, dir.path(), suites, |_| model()) {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("rank 1 failed: it has other settings:"), "{error}");
        assert!(error.contains("options.trials is, on rank 0, 40, here 3"), "{error}");
    }
}

#[test]
fn a_rank_that_is_lost_ends_the_evaluation() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model();
    let exchange = |_| Err("rank 1 has ended".into());
    let stop = model.stop.clone();
    stop.store(false, Ordering::Relaxed);
    let context = RunContext {
        out_dir: dir.path().to_path_buf(),
        run: "wall".to_string(),
        checkpoint_step: None,
        model_changes: vec![],
        git_hash: None,
        discard: Discard::Nothing,
        held_out: None,
        progress: &Silent,
        stop: None,
        ranks: Ranks { rank: 0, size: 2, exchange: &exchange },
    };
    let error = run_on_rank(&suite(), &mut model, &context).unwrap_err();
    assert!(matches!(error, EvalError::Lost { .. }));
    assert_eq!(error.to_string(), "rank 1 has ended");
}
