//! Runs whose rows go on from step to step.

use super::*;

const STREAMS: &str = "data.rows=\"streams\"";

/// Kinds and blocks that together carry states, last inputs of convolutions, and token shifts.
const MODELS: [&[&str]; 3] = [
    &["model.attention={ kind = \"gated_delta_net\" }"],
    &["model.attention={ kind = \"rwkv7\" }", "model.arch=\"rwkv7\"", "model.output_gate=true"],
    &["model.layers=2", "model.attention={ kind = \"linear\" }", "model.token_shift=true"],
];

#[test]
fn a_run_of_streams_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    for (at, model) in MODELS.into_iter().enumerate() {
        let of = |name: &str, more: &[&str]| {
            let name = format!("run.name={name}-{at}");
            let streams = [STREAMS, "train.sample.every=3", &name];
            sandbox.config(&[model, &streams[..], more].concat())
        };
        let unbroken = run(&of("unbroken", &[]), RunStart::New).unwrap().run_dir;
        let mut outcome = run_until(&of("broken", &[]), RunStart::New, 3).unwrap();
        for step in [4, 5, 6, 11] {
            let start = RunStart::Resume(outcome.run_dir.clone());
            outcome = run_until(&of("broken", &[]), start, step).unwrap();
        }
        let start = RunStart::Resume(outcome.run_dir.clone());
        let broken = run(&of("broken", &[]), start).unwrap().run_dir;
        assert_eq!(losses(&broken), losses(&unbroken), "{model:?}");
        assert_eq!(weights(&broken), weights(&unbroken), "{model:?}");

        // As with each block computed again.
        let again = run(&of("recomputed", &["train.recompute=true"]), RunStart::New).unwrap();
        assert_eq!(losses(&again.run_dir), losses(&unbroken), "{model:?}");

        // Validations and samples in between change nothing that rows hand over.
        let rarely = ["train.validate.every=12", "train.sample.every=\"never\""];
        let rarely = run(&of("rarely", &rarely), RunStart::New).unwrap();
        assert_eq!(weights(&rarely.run_dir), weights(&unbroken), "{model:?}");
    }
}

/// The files of `carried.safetensors` of the last checkpoint.
fn carried(run_dir: &Path) -> longwall_model::weights::TensorMap {
    let checkpoint = Checkpoint::open(run_dir, CheckpointSelector::Latest).unwrap();
    read_tensors(&checkpoint.carried().unwrap().expect("rows of streams hand something over"))
        .unwrap()
}

#[test]
fn what_rows_hand_over_does_not_depend_on_micro_batches() {
    let sandbox = Sandbox::new();
    let of = |rows: usize, start: RunStart, name: &str| {
        let sets = [
            STREAMS,
            "model.attention={ kind = \"gated_delta_net\" }",
            "train.lr=1e-30",
            &format!("train.micro_batch={rows}"),
            &format!("run.name={name}"),
        ];
        match name {
            "half" => run_until(&sandbox.config(&sets), start, 6),
            _ => run(&sandbox.config(&sets), start),
        }
    };
    let whole = of(4, RunStart::New, "whole").unwrap().run_dir;
    let half = of(1, RunStart::New, "half").unwrap().run_dir;
    let half = of(2, RunStart::Resume(half), "rest").unwrap().run_dir;
    let (whole, half) = (carried(&whole), carried(&half));
    let (shape, elements) = &whole["blocks.0.carried"];
    // Two heads of 8 × 16, and three inputs of convolutions of 16, 16 and 32 channels.
    assert_eq!(shape, &[4, 2 * 8 * 16 + 3 * (16 + 16 + 32)]);
    assert!(elements.iter().filter(|x| **x != 0.0).count() > elements.len() / 2);
    let other = &half["blocks.0.carried"].1;
    let largest = elements.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    for (one, other) in elements.iter().zip(other) {
        assert!((one - other).abs() <= 1e-5 * largest, "{one} and {other}");
    }
}

#[test]
fn more_streams_than_the_text_has_rows_are_refused() {
    let sandbox = Sandbox::new();
    let kind = "model.attention={ kind = \"mamba2\" }";
    let sets = [STREAMS, kind, "train.batch_tokens=32768", "train.tokens=32768"];
    let error = run(&sandbox.config(&sets), RunStart::New).unwrap_err().to_string();
    assert!(error.contains("and a batch has 1024; with data.rows = \"streams\""), "{error}");
    assert!(!sandbox.config(&sets).run_dir().exists());
}
