//! Evaluations in the loop.

use longwall_data::Tokenizer;
use longwall_model::LanguageModel;

use super::*;
use crate::evaluation::{Evaluated, EvaluationError, Evaluator};
use crate::grad_accumulation::MicroBatch;

/// The tables of these tests: every third step, and two chosen ones.
const EVALUATE: &str =
    "train.evaluate=[{ suite = \"often\", every = 3 }, { suite = \"seldom\", steps = [4, 7] }]";

/// Keeps each evaluation's name and step, as an evaluator keeps folders; the model reads a sequence.
#[derive(Default)]
struct Notes {
    /// The results that exist.
    there: Vec<(usize, u64)>,
    /// Every evaluation that ran, repeated ones too.
    ran: Vec<(usize, u64)>,
    /// The loss of each.
    losses: Vec<f64>,
    /// Refuses to evaluate after this step.
    fails_at: Option<u64>,
}

impl Evaluator<TestBackend> for Notes {
    fn check(
        &mut self,
        _tokenizer: &Tokenizer,
        _model: &LanguageModel<TestBackend>,
    ) -> Result<(), EvaluationError> {
        match self.fails_at {
            Some(0) => Err("the text is missing".into()),
            _ => Ok(()),
        }
    }

    fn discard_after(&mut self, step: u64) -> Result<(), EvaluationError> {
        self.there.retain(|(_, of)| *of <= step);
        Ok(())
    }

    fn evaluate(
        &mut self,
        at: usize,
        step: u64,
        model: &LanguageModel<TestBackend>,
    ) -> Result<Option<Evaluated>, EvaluationError> {
        if self.fails_at == Some(step) {
            return Err("the disk is full".into());
        }
        if self.there.contains(&(at, step)) {
            return Ok(None);
        }
        let batch = longwall_data::Batch {
            rows: 1,
            seq_len: 8,
            inputs: (0..8).collect(),
            targets: (1..9).collect(),
            loss_weights: vec![1.0; 8],
            document_starts: None,
            goes_on: None,
        };
        let MicroBatch { inputs, targets, .. } =
            MicroBatch::<TestBackend>::new(&batch, 0..1, &Default::default());
        let losses = model.token_losses(inputs, targets, None).into_data();
        let loss = losses.iter::<f32>().map(f64::from).sum::<f64>() / 8.0;
        self.there.push((at, step));
        self.ran.push((at, step));
        self.losses.push(loss);
        let scores = vec![("loss".to_owned(), loss)];
        Ok(Some(Evaluated { name: "read".to_owned(), scores }))
    }
}

fn run_noted(
    config: &RunConfig,
    start: RunStart,
    stop_at: Option<u64>,
    notes: &mut Notes,
) -> Result<Outcome, TrainError> {
    let stop = StopFlag::new();
    let options = options(Precision::F32, start, stop.clone());
    let step = stop_at.unwrap_or(u64::MAX);
    let mut console = After { step, action: || stop.raise() };
    train::<TestBackend>(config, &Default::default(), &options, &mut console, notes)
}

#[test]
fn evaluations_run_when_they_are_due_and_change_nothing() {
    let sandbox = Sandbox::new();
    let plain = run(&sandbox.config(&["run.name=plain"]), RunStart::New).unwrap().run_dir;
    let mut notes = Notes::default();
    let config = sandbox.config(&["run.name=evaluated", EVALUATE, "train.tokens=1408"]);
    run_noted(&config, RunStart::New, None, &mut notes).unwrap();
    // The eleventh step is the last.
    assert_eq!(notes.ran, [(0, 3), (1, 4), (0, 6), (1, 7), (0, 9), (0, 11)]);

    let config = sandbox.config(&["run.name=evaluated", EVALUATE]);
    let evaluated = run_noted(&config, RunStart::Force, None, &mut Notes::default()).unwrap();
    assert_eq!(losses(&evaluated.run_dir), losses(&plain));
    assert_eq!(weights(&evaluated.run_dir), weights(&plain));
}

#[test]
fn an_evaluation_of_the_average_reads_the_averaged_weights() {
    let sandbox = Sandbox::new();
    let of = |name: &str, decay: &str| {
        let tables = "train.evaluate=[{ suite = \"a\", steps = [9] }, \
             { suite = \"a\", out = \"b\", steps = [9], weights = \"ema\" }]";
        let config = sandbox.config(&[tables, decay, &format!("run.name={name}")]);
        let mut notes = Notes::default();
        run_noted(&config, RunStart::New, None, &mut notes).unwrap();
        assert_eq!(notes.ran, [(0, 9), (1, 9)]);
        (notes.losses[0], notes.losses[1])
    };
    let (weights, average) = of("slow", "train.ema=0.99");
    assert!((weights - average).abs() > 1e-3, "{weights} and {average}");
    let (same, average) = of("fast", "train.ema=1e-9");
    assert_eq!(same, weights);
    assert!((same - average).abs() < 1e-6, "{same} and {average}");
}

#[test]
fn a_resumed_run_neither_loses_nor_repeats_an_evaluation() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[EVALUATE, "train.checkpoint.keep_last=9"]);
    let mut notes = Notes::default();
    let mut outcome = run_noted(&config, RunStart::New, Some(3), &mut notes).unwrap();
    for step in [4, 5, 7] {
        let start = RunStart::Resume(outcome.run_dir);
        outcome = run_noted(&config, start, Some(step), &mut notes).unwrap();
    }
    // As if killed before step 7 was evaluated, but after its checkpoint.
    notes.there.retain(|of| *of != (1, 7));
    notes.ran.retain(|of| *of != (1, 7));
    run_noted(&config, RunStart::Resume(outcome.run_dir.clone()), None, &mut notes).unwrap();
    let all = [(0, 3), (1, 4), (0, 6), (1, 7), (0, 9), (0, 12)];
    assert_eq!(notes.ran, all);

    // As if killed in step 10, with a checkpoint of step 8: what is trained again is evaluated again.
    for step in [10, 12] {
        fs::remove_dir_all(outcome.run_dir.join(format!("checkpoints/step-{step}"))).unwrap();
    }
    fs::remove_file(outcome.run_dir.join("finished.json")).unwrap();
    run_noted(&config, RunStart::Resume(outcome.run_dir), None, &mut notes).unwrap();
    assert_eq!(notes.there, all);
    assert_eq!(notes.ran[all.len()..], [(0, 9), (0, 12)]);
}

#[test]
fn an_evaluation_that_fails_ends_the_run_after_a_checkpoint() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[EVALUATE]);
    let mut notes = Notes { fails_at: Some(0), ..Notes::default() };
    let error = run_noted(&config, RunStart::New, None, &mut notes).unwrap_err().to_string();
    assert_eq!(error, "the text is missing");
    assert!(!config.run_dir().exists());

    notes.fails_at = Some(7);
    let error = run_noted(&config, RunStart::New, None, &mut notes).unwrap_err().to_string();
    assert!(
        error.starts_with("train.evaluate.1 after step 7: the disk is full\n  hint: "),
        "{error}"
    );
    assert!(error.contains("/step-7; continue from it"), "{error}");
    let start = RunStart::Resume(config.run_dir());
    let without = sandbox.config(&["train.evaluate=[]"]);
    assert!(run_noted(&without, start, None, &mut notes).unwrap().is_finished());
}
