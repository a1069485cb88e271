//! Ranks that share rows.

use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensorOps;
use longwall_data::Batch;
use longwall_kernels::backend::{primitive, tensor};
use longwall_model::ModelConfig;

use super::*;
use crate::grad_accumulation::{AccumulationPlan, forward_backward, weight_sum};
use crate::testing::{model_of, models_of_all_layers};

/// Two rows of 16 tokens; in the first, a document starts at `start`. Every fifth token has no loss.
fn batch(start: usize) -> Batch {
    let token = |i: usize| (i * i % 23) as i32;
    let document = |i: usize| if (start..16).contains(&i) { start as i32 } else { 0 };
    Batch {
        rows: 2,
        seq_len: 16,
        inputs: (0..32).map(token).collect(),
        targets: (1..33).map(token).collect(),
        loss_weights: (0..32).map(|i| if i % 5 == 0 { 0.0 } else { 1.0 }).collect(),
        document_starts: (start > 0).then(|| (0..32).map(document).collect()),
        goes_on: None,
    }
}

/// Loss and gradients of `batch`, summed over `size` ranks that share its rows.
fn summed(
    config: &ModelConfig,
    batch: &Batch,
    size: usize,
    recompute: bool,
) -> (f32, Vec<Option<Vec<f32>>>) {
    let results = on_ranks(size, |ranks| {
        let peers = (size > 1).then(|| Collective::<TestBackend>::peers(&ranks, size));
        let (weights, stop, device) = (weight_sum(batch), StopFlag::new(), Default::default());
        let plan =
            AccumulationPlan { micro_batch: 1, recompute, z_loss: 0.1, measure_noise: false };
        let peers = peers.as_ref();
        let pass = forward_backward::<TestBackend>(
            &model_of(config),
            batch,
            None,
            peers,
            weights,
            plan,
            &stop,
            &device,
        );
        Collective::<TestBackend>::check_peers(&ranks).unwrap();
        let pass = pass.unwrap();
        let numbers = |x: &FloatTensor<TestBackend>| -> Vec<f32> {
            let flat = TestBackend::float_reshape(x.clone(), [x.shape().num_elements()].into());
            tensor::<TestBackend, 1>(flat).into_data().to_vec().unwrap()
        };
        let gradients = pass.gradients.tensors.iter().map(|x| x.as_ref().map(numbers));
        (pass.scalars().loss, gradients.collect::<Vec<_>>())
    });
    let add = |(loss, sums): (f32, Vec<Option<Vec<f32>>>), (term, terms): (f32, Vec<_>)| {
        let sum = |(sum, term): (Option<Vec<f32>>, Option<Vec<f32>>)| match (sum, term) {
            (Some(sum), Some(term)) => Some(sum.iter().zip(term).map(|(a, b)| a + b).collect()),
            (sum, term) => sum.or(term),
        };
        (loss + term, sums.into_iter().zip(terms).map(sum).collect())
    };
    results.into_iter().reduce(add).expect("there are ranks")
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn assert_as_alone(config: &ModelConfig, batch: &Batch, size: usize, recompute: bool) {
    let (loss, want) = summed(config, batch, 1, recompute);
    let (shared_loss, got) = summed(config, batch, size, recompute);
    let what = format!("{size} ranks, recompute {recompute}, {config:?}");
    assert!((loss - shared_loss).abs() < 1e-4 * loss, "{loss} and {shared_loss}: {what}");
    let all = want.iter().flatten().map(|x| norm(x).powi(2)).sum::<f64>().sqrt();
    assert!(all > 0.01, "gradients of {what}");
    for (at, (want, got)) in want.iter().zip(&got).enumerate() {
        let (Some(want), Some(got)) = (want, got) else {
            assert_eq!(want.is_some(), got.is_some(), "gradient {at}: {what}");
            continue;
        };
        let difference: Vec<f32> = want.iter().zip(got).map(|(x, y)| x - y).collect();
        let (error, most) = (norm(&difference), 1e-3 * norm(want) + 1e-5 * all);
        assert!(error <= most, "gradient {at}: {error:.1e} > {most:.1e}, {what}");
    }
}

/// Whether `size` ranks can share rows of the model.
fn divides(config: &ModelConfig, size: usize) -> bool {
    (0..config.layers).all(|layer| {
        let shape = config.attention_shape(layer);
        config.attention_of(layer).head_parts(&shape, size).is_some()
    })
}

#[test]
fn ranks_that_share_rows_have_the_gradients_of_one_alone() {
    let mut models = models_of_all_layers();
    models.retain(|config| divides(config, 2));
    assert!(models.len() > 60, "{} models are left", models.len());
    for (at, config) in models.iter().enumerate() {
        assert_as_alone(config, &batch(5), 2, at % 2 == 0);
    }
}

/// With parts of four tokens and four heads.
#[test]
fn four_ranks_share_rows() {
    let mut models = models_of_all_layers();
    models.retain(|config| divides(config, 4));
    for (at, config) in models.iter().enumerate().step_by(3) {
        assert_as_alone(config, &batch(7), 4, at % 2 == 0);
    }
}

/// Convolutions of four taps and token shifts, which read the part before: not past a document's start.
#[test]
fn a_document_may_start_anywhere_in_shared_rows() {
    let table = "arch = \"rwkv7\"\nshort_conv = true\nlayers = 2\nwidth = 16\nheads = 2\n\
                 attention = { kind = \"fox\" }";
    let config: ModelConfig = toml::from_str(table).unwrap();
    for start in 0..16 {
        assert_as_alone(&config, &batch(start), 2, false);
    }
}

const SHARED: [&str; 3] = ["data.seq_len=64", "train.context_parallel=2", "train.tokens=4608"];

/// Six steps of six rows of 64 tokens.
fn shared(sandbox: &Sandbox, name: &str, sets: &[&str]) -> RunConfig {
    let batch = ["train.batch_tokens=384", "train.micro_batch=1"];
    config(sandbox, name, &[&SHARED[..], &batch, sets].concat())
}

#[test]
fn runs_share_rows_in_groups_and_go_on_over_any_number_of_ranks() {
    let sandbox = Sandbox::new();
    let sets = ["train.ema=0.9", "train.checkpoint.every=4", "model.short_conv=true"];
    let alone = [&sets[..], &["train.context_parallel=1"]].concat();
    let unbroken = run(1, &shared(&sandbox, "alone", &alone), RunStart::New).run_dir;
    for size in [2, 4] {
        let [one, other] = ["a", "b"].map(|take| {
            let config = shared(&sandbox, &format!("{size}-{take}"), &sets);
            run(size, &config, RunStart::New).run_dir
        });
        assert_eq!(losses(&one), losses(&other), "{size} ranks");
        assert_eq!(weights(&one), weights(&other), "{size} ranks");
        assert_near(&steps(&one), &steps(&unbroken), 1e-3, &format!("{size} ranks"));
        assert_near_files(&one, &unbroken);
    }
    let mut start = RunStart::New;
    let (whole, parts) = (shared(&sandbox, "broken", &alone), shared(&sandbox, "broken", &sets));
    for (size, config, stop) in
        [(2, &parts, Some((1, 3))), (1, &whole, Some((0, 6))), (4, &parts, None)]
    {
        let outcomes = run_until(size, config, start, Precision::F32, stop);
        start = RunStart::Resume(outcomes.into_iter().next().unwrap().unwrap().run_dir);
    }
    let RunStart::Resume(broken) = start else { unreachable!("it was run") };
    assert_near(&steps(&broken), &steps(&unbroken), 1e-3, "broken");
    assert_near_files(&broken, &unbroken);
}

/// As on a GPU: the CPU exchanges in f32, whatever the model's type.
#[test]
fn a_rounded_model_shares_rows() {
    let sandbox = Sandbox::new();
    let of = |name: &str, size: usize, sets: &[&str]| {
        let config = shared(&sandbox, name, sets);
        let outcomes = run_until(size, &config, RunStart::New, Precision::Bf16, None);
        steps(&outcomes.into_iter().next().unwrap().unwrap().run_dir)
    };
    let alone = of("alone", 1, &["train.context_parallel=1"]);
    for (one, other) in of("two", 2, &[]).iter().zip(&alone) {
        assert!((one[0] - other[0]).abs() < 0.02 * one[0], "{one:?} and {other:?}");
    }
}

#[test]
fn a_rank_that_leaves_ends_those_that_share_its_rows() {
    let sandbox = Sandbox::new();
    let config = shared(&sandbox, "left", &["train.checkpoint.every=2"]);
    let errors: Vec<String> = on_ranks(2, |ranks| {
        let world = Collective::<TestBackend>::world(&ranks);
        let step = if world.rank == 1 { 5 } else { u64::MAX };
        let leave = || Collective::<TestBackend>::fail(&ranks, "of a test");
        let console = &mut After { step, action: leave };
        let options = options(Precision::F32, RunStart::New, StopFlag::new());
        let (device, none) = (Default::default(), &mut NoEvaluations);
        let outcome =
            train_as_rank::<TestBackend>(&config, &device, &options, &ranks, console, none);
        outcome.unwrap_err().to_string()
    });
    for error in &errors {
        assert!(error.starts_with("rank 1 (this process) failed: of a test"), "{errors:?}");
    }
    assert!(errors[0].contains("checkpoints/step-4; continue from it"), "{errors:?}");
}

/// The error is kept, and the tensor comes back as it was.
#[test]
fn an_exchange_with_a_rank_that_has_ended_fails() {
    let failed = on_ranks(2, |ranks| {
        let rank = Collective::<TestBackend>::world(&ranks).rank;
        let peers = Collective::<TestBackend>::peers(&ranks, 2);
        let x = || primitive(Tensor1::from_floats([10.0 * rank as f32, 1.0], &Default::default()));
        let read = |x| tensor::<TestBackend, 1>(x).into_data().to_vec::<f32>().unwrap();
        let got = read(peers.all_to_all_cpu(x()));
        assert_eq!(got, if rank == 0 { [0.0, 10.0] } else { [1.0, 1.0] });
        Collective::<TestBackend>::check_peers(&ranks).unwrap();
        if rank == 1 {
            return None;
        }
        assert_eq!(read(peers.all_to_all_cpu(x())), [0.0, 1.0]);
        Some(Collective::<TestBackend>::check_peers(&ranks).unwrap_err().to_string())
    });
    assert_eq!(failed, [Some("rank 1 (this process) has ended".to_owned()), None]);
}

#[test]
fn ranks_that_do_not_divide_into_groups_are_refused() {
    let sandbox = Sandbox::new();
    let error = |size: usize, sets: &[&str]| {
        let config = shared(&sandbox, "refused", sets);
        let results = run_until(size, &config, RunStart::New, Precision::F32, None);
        results.into_iter().next().unwrap().unwrap_err().to_string()
    };
    insta::assert_snapshot!(error(1, &[]), @"");
    insta::assert_snapshot!(error(3, &[]), @"");
    insta::assert_snapshot!(error(8, &["train.batch_tokens=384"]), @"");
}
