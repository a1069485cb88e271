//! Runs whose batch size and length of rows change.

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
    let last = StageMicroBatch { batch_tokens: 256, seq_len: 32, micro_batch: 4 };
    assert_eq!(checkpoint.state.micro_batches.last(), Some(&last));
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
    assert!(error.contains("the steps up to 6 would have had other batches"), "{error}");
    let without = sandbox.config(&[]);
    assert!(run(&without, RunStart::Resume(dir.clone())).is_err());
    let later = sandbox.config(&[&stages("8, batch_tokens = 128")]);
    let dir = run(&later, RunStart::Resume(dir)).unwrap().run_dir;
    let batches: Vec<u64> = steps(&dir).into_iter().map(|step| step.1).collect();
    assert_eq!(batches[..9], [128, 128, 128, 128, 64, 64, 64, 64, 128]);
}
