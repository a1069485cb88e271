//! Runs whose batch size and length of rows change.

use longwall_model::config::Window;

use super::*;
use crate::checkpoint::StageMicroBatch;

/// Steps of 64 tokens in rows of 16, from step 5 on of 128 in rows of 32, from three fifths of the tokens on of 256.
const STAGES: &str = "train.stages=[{ from = 0, batch_tokens = 64, seq_len = 16 }, \
     { from = 5, batch_tokens = 128, seq_len = 32 }, { from = 0.6, batch_tokens = 256, micro_batch = 4 }]";

/// Tokens, tokens of the step and of a row, and the learning rate of each step.
fn steps(run_dir: &Path) -> Vec<(u64, u64, usize, f64)> {
    let step = |record| match record {
        Record::Step(step) => {
            let (batch, len) = (step.batch_tokens.unwrap_or(128), step.seq_len.unwrap_or(32));
            Some((step.tokens, batch, len, step.lr))
        }
        _ => None,
    };
    losses(run_dir).into_iter().filter_map(step).collect()
}

#[test]
fn a_run_with_stages_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let more = [STAGES, "train.validate.every=\"500 tokens\"", "train.skip.outlier_z=3"];
    let of = |name: &str| sandbox.config(&[&more[..], &[&format!("run.name={name}")]].concat());
    let unbroken = run(&of("unbroken"), RunStart::New).unwrap().run_dir;
    let mut outcome = run_until(&of("broken"), RunStart::New, 3).unwrap();
    for step in [5, 6, 9, 11] {
        outcome = run_until(&of("broken"), RunStart::Resume(outcome.run_dir), step).unwrap();
        assert_eq!(outcome.step, step);
    }
    let broken = run(&of("broken"), RunStart::Resume(outcome.run_dir)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));

    let expected = [(64, 5, 16), (128, 5, 32), (256, 3, 32)];
    let mut tokens = 0;
    let mut expected = expected
        .into_iter()
        .flat_map(|(batch, steps, len)| (0..steps).map(move |_| (batch, len)).collect::<Vec<_>>());
    for (now, batch, len, _) in steps(&broken) {
        tokens += batch;
        assert_eq!((now, Some((batch, len))), (tokens, expected.next()));
    }
    assert_eq!((tokens, expected.next()), (1728, None));
    // After the first steps at or past 500, 1,000 and 1,500 tokens, and after the last.
    let validated: Vec<u64> = validations(&broken).map(|record| record.tokens).collect();
    assert_eq!(validated, [576, 1216, 1728]);
    let rates: Vec<f64> = steps(&broken).into_iter().map(|step| step.3).collect();
    assert!(rates.windows(2).all(|pair| pair[0] >= pair[1]), "{rates:?}");

    // What was estimated.
    let flops = losses(&broken).into_iter().rev().find_map(|record| match record {
        Record::Step(step) => step.flops,
        _ => None,
    });
    assert_eq!(flops, Some(of("broken").train_flops(257)));

    let checkpoint = Checkpoint::open(&broken, CheckpointSelector::Latest).unwrap();
    assert_eq!((checkpoint.state.tokens, checkpoint.state.cursor.next_row), (1728, 54));
    let window = Some(Window::Unlimited);
    let last = StageMicroBatch { batch_tokens: 256, seq_len: 32, window, micro_batch: 4 };
    assert_eq!(checkpoint.state.micro_batches.last(), Some(&last));
}

#[test]
fn rows_of_documents_with_stages_resume_to_the_bit() {
    let sandbox = Sandbox::new();
    let of = |name: &str| {
        let name = format!("run.name={name}");
        sandbox.config(&[STAGES, "data.rows=\"documents\"", name.as_str()])
    };
    let unbroken = run(&of("unbroken"), RunStart::New).unwrap().run_dir;
    let outcome = run_until(&of("broken"), RunStart::New, 4).unwrap();
    let outcome = run_until(&of("broken"), RunStart::Resume(outcome.run_dir), 9).unwrap();
    let broken = run(&of("broken"), RunStart::Resume(outcome.run_dir)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));
    // A row of the loader is a document, whatever the stage's rows.
    let checkpoint = Checkpoint::open(&broken, CheckpointSelector::Latest).unwrap();
    let rows = 5 * 64 / 16 + 5 * 128 / 32 + 3 * 256 / 32;
    assert_eq!(checkpoint.state.cursor.next_row, rows);
}

/// The first step of a run with rows cut in two has the tokens of one without, in another arrangement.
#[test]
fn cut_rows_hold_the_same_tokens_with_less_context() {
    let sandbox = Sandbox::new();
    let first = |name: &str, set: &str| {
        let sets = [set, "train.lr=1e-30", &format!("run.name={name}")];
        let dir = run(&sandbox.config(&sets), RunStart::New).unwrap().run_dir;
        losses(&dir).into_iter().find_map(|record| match record {
            Record::Step(step) => Some((step.loss.unwrap(), step.flops.unwrap())),
            _ => None,
        })
    };
    let (whole, cost) = first("whole", "train.clip=1.0").unwrap();
    let set = "train.stages=[{ from = 0, seq_len = 16 }, { from = 11, seq_len = 32 }]";
    let (cut, cheaper) = first("cut", set).unwrap();
    assert!(whole != cut && (whole - cut).abs() < 0.02, "{whole} and {cut}");
    assert!(cheaper < cost, "{cheaper} and {cost}");
}

#[test]
fn a_resume_may_change_later_stages_but_not_earlier_ones() {
    let sandbox = Sandbox::new();
    let stages = |second: &str| {
        format!("train.stages=[{{ from = 4, batch_tokens = 64 }}, {{ from = {second} }}]")
    };
    let config = sandbox.config(&[&stages("9, batch_tokens = 256")]);
    let dir = run_until(&config, RunStart::New, 6).unwrap().run_dir;
    let earlier = sandbox.config(&[&stages("5, batch_tokens = 256")]);
    let error = run(&earlier, RunStart::Resume(dir.clone())).unwrap_err().to_string();
    assert!(
        error.contains("the steps up to 6 would have had other batches or another window"),
        "{error}"
    );
    let without = sandbox.config(&[]);
    assert!(run(&without, RunStart::Resume(dir.clone())).is_err());
    let later = sandbox.config(&[&stages("8, batch_tokens = 128")]);
    let dir = run(&later, RunStart::Resume(dir)).unwrap().run_dir;
    let batches: Vec<u64> = steps(&dir).into_iter().map(|step| step.1).collect();
    assert_eq!(batches[..9], [128, 128, 128, 128, 64, 64, 64, 64, 128]);
}

/// Four steps with one window, four with another, four without.
const WINDOWS: &str = "train.stages=[{ from = 0, window = 3 }, { from = 4, window = 9 }, { from = 8, window = \"none\" }]";

/// A model in which one of two layers has a window of its own.
const LAYERS: &str = "model={ layers = 2, width = 16, heads = 2, pattern = [\"local\", \"fox\"], \
     kinds = { local = { kind = \"rope\", window = 5 } } }";

/// The losses of the steps, and of the validations.
fn curves(run_dir: &Path) -> (Vec<f32>, Vec<f64>) {
    let loss = |record| if let Record::Step(step) = record { step.loss } else { None };
    let steps = losses(run_dir).into_iter().filter_map(loss).collect();
    (steps, validations(run_dir).map(|record| record.validation_loss).collect())
}

#[test]
fn a_run_with_windows_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let more = [WINDOWS, LAYERS, "train.validate.every=2", "train.sample.every=4", "train.ema=0.9"];
    let of = |name: &str| sandbox.config(&[&more[..], &[&format!("run.name={name}")]].concat());
    let unbroken = run(&of("unbroken"), RunStart::New).unwrap().run_dir;
    let mut outcome = run_until(&of("broken"), RunStart::New, 2).unwrap();
    // In the middle, and at the ends of stages.
    for step in [4, 5, 8, 9] {
        outcome = run_until(&of("broken"), RunStart::Resume(outcome.run_dir), step).unwrap();
        assert_eq!(outcome.step, step);
    }
    let broken = run(&of("broken"), RunStart::Resume(outcome.run_dir)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));
    let samples = |dir: &Path| fs::read_to_string(dir.join("samples.txt")).unwrap();
    assert_eq!(samples(&broken), samples(&unbroken));

    let of_step = |record| if let Record::Step(step) = record { Some(step) } else { None };
    let steps: Vec<_> = losses(&broken).into_iter().filter_map(of_step).collect();
    let windows: Vec<_> = steps.iter().map(|step| step.window).collect();
    assert_eq!(windows, [[Some(3); 4], [Some(9); 4], [None; 4]].concat());
    // What was estimated.
    assert_eq!(steps[11].flops, Some(of("broken").train_flops(257)));
    assert!(of("broken").train_flops(257) < sandbox.config(&[LAYERS]).train_flops(257));
}

/// Up to the end of its first stage, a run equals one with that stage's window throughout, validations included; then
/// it does not. A layer with a window of its own keeps it.
#[test]
fn a_stage_trains_and_validates_with_its_window() {
    let sandbox = Sandbox::new();
    let of = |name: &str, set: &str| {
        let sets = [set, LAYERS, "train.validate.every=2", &format!("run.name={name}")];
        curves(&run(&sandbox.config(&sets), RunStart::New).unwrap().run_dir)
    };
    let (staged, validated) = of("staged", WINDOWS);
    let plain = LAYERS.replace("layers = 2,", "layers = 2, window = 3,");
    let throughout = sandbox.config(&[&plain, "train.validate.every=2", "run.name=throughout"]);
    let (narrow, narrow_validated) = curves(&run(&throughout, RunStart::New).unwrap().run_dir);
    assert_eq!((&staged[..4], &validated[..2]), (&narrow[..4], &narrow_validated[..2]));
    assert!(staged[4] != narrow[4] && validated[2] != narrow_validated[2]);
    let same = "train.stages=[{ from = 0, window = 3 }, { from = 5, micro_batch = 2 }]";
    assert_eq!(of("same", same), (narrow, narrow_validated));
    let (whole, _) = of("whole", "train.clip=1.0");
    assert_ne!(whole[0], staged[0]);
}

#[test]
fn a_checkpoint_has_the_window_of_its_last_step() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[WINDOWS, "model.window=7", "train.checkpoint.keep_last=9"]);
    let dir = run(&config, RunStart::New).unwrap().run_dir;
    for (step, window) in [(4, Some(3)), (8, Some(9)), (12, None)] {
        let checkpoint = Checkpoint::open(&dir, CheckpointSelector::Step(step)).unwrap();
        let of_model = [checkpoint.trained_config().model, checkpoint.state.model.clone()];
        assert_eq!(of_model.map(|model| model.window), [window; 2]);
        let with = |set: &str| {
            let config = checkpoint.config_with(&[set.to_owned()], 257).unwrap();
            config.model.window
        };
        assert_eq!(with("model.attention.theta=500"), window);
        assert_eq!(with("model.window=5"), Some(5));
        assert_eq!(with("model.window=none"), None);
        let refused = checkpoint.config_with(&["train.lr=1".to_owned()], 257);
        assert!(refused.unwrap_err().to_string().starts_with("--set changes train.lr;"));
    }
}

#[test]
fn a_resume_may_not_change_the_window_of_earlier_steps() {
    let sandbox = Sandbox::new();
    let dir = run_until(&sandbox.config(&[WINDOWS]), RunStart::New, 6).unwrap().run_dir;
    let with = |first: &str, last: &str| {
        let stages = WINDOWS.replace("window = 3", first).replace("\"none\"", last);
        run(&sandbox.config(&[&stages]), RunStart::Resume(dir.clone()))
    };
    let error = with("window = 4", "\"none\"").unwrap_err().to_string();
    assert!(error.contains("the steps up to 6 would have had other batches or another"), "{error}");
    assert_eq!(with("window = 3", "12").unwrap().step, 12);
    let checkpoint = Checkpoint::open(&dir, CheckpointSelector::Latest).unwrap();
    assert_eq!(checkpoint.trained_config().model.window, Some(12));
}

/// Stages that differ in their windows alone keep their micro-batches apart.
#[test]
fn a_resume_finds_the_micro_batch_of_each_window() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[WINDOWS]);
    let dir = run_until(&config, RunStart::New, 2).unwrap().run_dir;
    let mut state = Checkpoint::open(&dir, CheckpointSelector::Latest).unwrap().state;
    for (at, kept) in state.micro_batches.iter_mut().enumerate() {
        kept.micro_batch = [1, 2, 4][at];
    }
    let stages = config.timeline().stages().to_vec();
    let found = |state: &crate::checkpoint::State| -> Vec<_> {
        stages.iter().map(|stage| state.micro_batch_of(stage)).collect()
    };
    assert_eq!(found(&state), [Some(1), Some(2), Some(4)]);
    // As earlier versions wrote them.
    state.micro_batches.iter_mut().for_each(|kept| kept.window = None);
    assert_eq!(found(&state), [Some(1); 3]);
}
