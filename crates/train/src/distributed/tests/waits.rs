//! Ranks wait for what rank 0 does alone, and this is not taken for a hang.

use std::fs;
use std::time::Duration;

use longwall_data::Tokenizer;
use longwall_model::LanguageModel;

use super::over_tcp::run_over_tcp;
use super::*;
use crate::checkpoint::CheckpointFolder;
use crate::console::{Ending, RunInfo, StepView};
use crate::evaluation::{Evaluated, EvaluationError, Evaluator};
use crate::metrics::ValidationRecord;

/// Makes it impossible to write the checkpoint of `step`.
fn block_checkpoint(config: &RunConfig, step: u64) {
    let blocked = CheckpointFolder::new(&config.run_dir()).step_dir(step).with_extension("tmp");
    fs::create_dir_all(blocked.parent().unwrap()).unwrap();
    fs::write(blocked, "in the way").unwrap();
}

#[test]
fn no_rank_has_finished_before_the_last_checkpoint_is_written() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "blocked", &[]);
    let errors: Vec<String> = on_ranks(2, |ranks| {
        let first = Collective::<TestBackend>::world(&ranks).is_first();
        let step = if first { 12 } else { u64::MAX };
        let console = &mut After { step, action: || block_checkpoint(&config, 12) };
        let options = options(Precision::F32, RunStart::New, StopFlag::new());
        let (device, none) = (Default::default(), &mut NoEvaluations);
        let outcome =
            train_as_rank::<TestBackend>(&config, &device, &options, &ranks, console, none);
        outcome.unwrap_err().to_string()
    });
    assert!(errors[0].contains("step-12"), "{errors:?}");
    let told = "rank 0 (this process) failed: ";
    assert!(errors[1].starts_with(told) && errors[1].contains("step-12"), "{errors:?}");
}

/// Fails, and then no checkpoint can be written.
struct Refuses<'a>(&'a RunConfig);

impl Evaluator<TestBackend> for Refuses<'_> {
    fn check(
        &mut self,
        _tokenizer: &Tokenizer,
        _model: &LanguageModel<TestBackend>,
    ) -> Result<(), EvaluationError> {
        Ok(())
    }

    fn discard_after(&mut self, _step: u64) -> Result<(), EvaluationError> {
        Ok(())
    }

    fn evaluate(
        &mut self,
        _at: usize,
        step: u64,
        _model: &LanguageModel<TestBackend>,
    ) -> Result<Option<Evaluated>, EvaluationError> {
        block_checkpoint(self.0, step);
        Err("the disk is full".into())
    }
}

#[test]
fn no_rank_ends_before_the_checkpoint_after_a_failed_evaluation_is_written() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "refused", &["train.evaluate=[{ suite = \"a\", steps = [6] }]"]);
    let errors: Vec<String> = on_ranks(2, |ranks| {
        let options = options(Precision::F32, RunStart::New, StopFlag::new());
        let (device, console) = (Default::default(), &mut SilentConsole);
        let evaluator = &mut Refuses(&config);
        train_as_rank(&config, &device, &options, &ranks, console, evaluator)
            .unwrap_err()
            .to_string()
    });
    assert!(errors.iter().all(|error| error.contains("step-6")), "{errors:?}");
}

/// Takes its time for each sample.
struct SlowSamples;

impl Console for SlowSamples {
    fn begin(&mut self, _info: &RunInfo) {}
    fn step(&mut self, _view: &StepView) {}
    fn validation(&mut self, _record: &ValidationRecord, _best: bool) {}
    fn sample(&mut self, _step: u64, _prompt: &str, _text: &str) {
        std::thread::sleep(Duration::from_secs(4));
    }
    fn note(&mut self, _text: &str) {}
    fn end(&mut self, _ending: &Ending) {}
}

#[test]
fn samples_that_take_longer_than_a_step_may_are_no_hang() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "samples", &["train.sample.every=7"]);
    let limits = StoreOptions { step: Duration::from_secs(2), ..StoreOptions::default() };
    for outcome in run_over_tcp(&config, limits, |_| Box::new(SlowSamples)) {
        assert_eq!(outcome.unwrap().step, 12);
    }
}

#[test]
fn first_steps_of_a_process_and_of_a_stage_may_compile_kernels() {
    let sandbox = Sandbox::new();
    let stages =
        "train.stages=[{ from = \"5 steps\", seq_len = 16 }, { from = \"9 steps\", window = 8 }]";
    let config = config(&sandbox, "stages", &[stages]);
    let begun = |start: RunStart, stop_at: u64| {
        let all = on_ranks(2, |ranks| {
            let stop = StopFlag::new();
            let options = options(Precision::F32, start.clone(), stop.clone());
            let console = &mut After { step: stop_at, action: || stop.raise() };
            let (device, none) = (Default::default(), &mut NoEvaluations);
            train_as_rank::<TestBackend>(&config, &device, &options, &ranks, console, none)
                .unwrap();
            std::mem::take(&mut *ranks.begun.lock().unwrap())
        });
        assert_eq!(all[0], all[1]);
        let compiling = |(step, compiles): &(u64, bool)| compiles.then_some(*step);
        let compiling: Vec<u64> = all[0].iter().filter_map(compiling).collect();
        (compiling, all[0].last().unwrap().0)
    };
    assert_eq!(begun(RunStart::New, 6), (vec![1, 6], 7));
    assert_eq!(begun(RunStart::Resume(config.run_dir()), u64::MAX), (vec![8, 10], 12));
}

#[test]
fn a_stop_during_the_start_of_any_rank_stops_all_before_the_first_step() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "early", &[]);
    let steps = on_ranks(3, |ranks| {
        let stop = StopFlag::new();
        if Collective::<TestBackend>::world(&ranks).rank == 1 {
            stop.raise();
        }
        let options = options(Precision::F32, RunStart::New, stop);
        let (device, console, none) = (Default::default(), &mut SilentConsole, &mut NoEvaluations);
        train_as_rank::<TestBackend>(&config, &device, &options, &ranks, console, none)
            .unwrap()
            .step
    });
    assert_eq!(steps, [0; 3]);
    assert_eq!(run(2, &config, RunStart::Resume(config.run_dir())).step, 12);
}
