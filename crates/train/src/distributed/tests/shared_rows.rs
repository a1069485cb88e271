//! Ranks that share rows.

use longwall_data::Batch;
use longwall_model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::over_tcp::OverTcp;
use super::processes::{Ended, Job, on_processes};
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

/// What is compared.
#[derive(Clone, Serialize, Deserialize)]
pub struct Case {
    /// The models, and where a document starts in their batch.
    models: Vec<(ModelConfig, usize)>,
}

/// Loss and gradients of `batch`, or of this rank's part if `peers` share its rows.
fn pass(
    config: &ModelConfig,
    batch: &Batch,
    peers: Option<&Arc<dyn Peers>>,
    recompute: bool,
) -> (f32, Vec<Option<Vec<f32>>>) {
    let (weights, stop, device) = (weight_sum(batch), StopFlag::new(), Default::default());
    let plan = AccumulationPlan { micro_batch: 1, recompute, z_loss: 0.1, measure_noise: false };
    let model = model_of(config);
    let pass = forward_backward::<TestBackend>(
        &model, batch, None, peers, weights, plan, &stop, None, &device,
    );
    let pass = pass.expect("no stop was asked for");
    let gradients = pass.gradients.tensors.iter();
    let gradients = gradients.map(|x| x.clone().map(loopback::elements::<TestBackend>));
    (pass.scalars().loss, gradients.collect())
}

/// On each rank: asserts that losses and gradients of `case`, summed over the ranks that share its rows, are those of
/// one rank alone.
pub fn compare(case: &Case, ranks: &OverTcp) {
    let size = Collective::<TestBackend>::world(ranks).size;
    let peers = Collective::<TestBackend>::peers(ranks, size);
    for (at, (config, start)) in case.models.iter().enumerate() {
        let recompute = at % 2 == 0;
        let (loss, want) = pass(config, &batch(*start), None, recompute);
        let (part, gradients) = pass(config, &batch(*start), Some(&peers), recompute);
        Collective::<TestBackend>::check_peers(ranks).unwrap();
        let sum = |terms: &[f32]| -> Vec<f32> {
            let terms: Vec<f64> = terms.iter().map(|&x| f64::from(x)).collect();
            let sums = sum_over_ranks::<TestBackend>(ranks, &terms).unwrap();
            sums.into_iter().map(|x| x as f32).collect()
        };
        let what = format!("{size} ranks, recompute {recompute}, {config:?}");
        let shared_loss = sum(&[part])[0];
        assert!((loss - shared_loss).abs() < 1e-4 * loss, "{loss} and {shared_loss}: {what}");
        let all = want.iter().flatten().map(|x| norm(x).powi(2)).sum::<f64>().sqrt();
        assert!(all > 0.01, "gradients of {what}");
        for (at, (want, got)) in want.iter().zip(&gradients).enumerate() {
            assert_eq!(want.is_some(), got.is_some(), "gradient {at}: {what}");
            let (Some(want), Some(got)) = (want, got) else { continue };
            let difference: Vec<f32> = want.iter().zip(sum(got)).map(|(x, y)| x - y).collect();
            let (error, most) = (norm(&difference), 1e-3 * norm(want) + 1e-5 * all);
            assert!(error <= most, "gradient {at}: {error:.1e} > {most:.1e}, {what}");
        }
    }
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Whether `size` ranks can share rows of the model.
fn divides(config: &ModelConfig, size: usize) -> bool {
    (0..config.layers).all(|layer| {
        let shape = config.attention_shape(layer);
        config.attention_of(layer).head_parts(&shape, size).is_some()
    })
}

/// The models of all layers that `size` ranks can share rows of.
fn models(size: usize) -> Vec<(ModelConfig, usize)> {
    let all = models_of_all_layers().into_iter().filter(|config| divides(config, size));
    all.map(|config| (config, 5)).collect()
}

#[test]
fn ranks_that_share_rows_have_the_gradients_of_one_alone() {
    let models = models(2);
    assert!(models.len() > 60, "{} models are left", models.len());
    on_processes(2, &Job::Gradients(Case { models }));
}

/// With parts of four tokens and four heads.
#[test]
fn four_ranks_share_rows() {
    let models: Vec<_> = models(4).into_iter().step_by(3).collect();
    assert!(models.len() > 20, "{} models are left", models.len());
    on_processes(4, &Job::Gradients(Case { models }));
}

/// Convolutions of four taps and token shifts, which read the part before: not past a document's start.
#[test]
fn a_document_may_start_anywhere_in_shared_rows() {
    let table = "arch = \"rwkv7\"\nshort_conv = true\nlayers = 2\nwidth = 32\nheads = 4\n\
                 attention = { kind = \"fox\" }";
    let config: ModelConfig = toml::from_str(table).unwrap();
    let models = (0..16).map(|start| (config.clone(), start)).collect();
    on_processes(2, &Job::Gradients(Case { models }));
}

/// Six steps of six rows of 64 tokens.
const SHARED: [&str; 5] = [
    "data.seq_len=64",
    "train.context_parallel=2",
    "train.tokens=2304",
    "train.batch_tokens=384",
    "train.micro_batch=1",
];

fn shared(sandbox: &Sandbox, name: &str, sets: &[&str]) -> RunConfig {
    config(sandbox, name, &[&SHARED[..], sets].concat())
}

/// A run on `size` processes, from the start or resumed; see [`Job::Train`].
fn train(
    size: usize,
    config: &RunConfig,
    resumed: bool,
    bf16: bool,
    [stop, leave]: [Option<(usize, u64)>; 2],
) -> Vec<Ended> {
    let resume = resumed.then(|| config.run_dir());
    let config = config.to_toml();
    on_processes(size, &Job::Train { config, resume, bf16, stop, leave })
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
            assert_eq!(train(size, &config, false, false, [None; 2]), vec![Ok(6); size]);
            config.run_dir()
        });
        assert_eq!(losses(&one), losses(&other), "{size} ranks");
        assert_eq!(weights(&one), weights(&other), "{size} ranks");
        assert_near(&steps(&one), &steps(&unbroken), 1e-3, &format!("{size} ranks"));
        assert_near_files(&one, &unbroken);
    }
    let (whole, parts) = (shared(&sandbox, "broken", &alone), shared(&sandbox, "broken", &sets));
    let stop = Some((1, 1));
    assert_eq!(train(2, &parts, false, false, [stop, None]), [Ok(2), Ok(2)]);
    assert_eq!(train(1, &whole, true, false, [Some((0, 4)), None]), [Ok(4)]);
    assert_eq!(train(4, &parts, true, false, [None; 2]), vec![Ok(6); 4]);
    let broken = parts.run_dir();
    assert_near(&steps(&broken), &steps(&unbroken), 1e-3, "broken");
    assert_near_files(&broken, &unbroken);
}

/// As on a GPU: the CPU exchanges in f32, whatever the model's type.
#[test]
fn a_rounded_model_shares_rows() {
    let sandbox = Sandbox::new();
    let of = |name: &str, size: usize, sets: &[&str]| {
        let config = shared(&sandbox, name, sets);
        assert_eq!(train(size, &config, false, true, [None; 2]), vec![Ok(6); size]);
        steps(&config.run_dir())
    };
    let alone = of("alone", 1, &["train.context_parallel=1"]);
    let two = of("two", 2, &[]);
    assert_near(&two[..1], &alone[..1], 0.01, "the first step");
    for (one, other) in two.iter().zip(&alone) {
        assert!((one[0] - other[0]).abs() < 0.02 * one[0], "{one:?} and {other:?}");
    }
}

/// The others find it in their next exchange, and the last checkpoint is whole.
#[test]
fn a_rank_that_leaves_ends_those_that_share_its_rows() {
    let sandbox = Sandbox::new();
    let config = shared(&sandbox, "left", &["train.checkpoint.every=2"]);
    let ended = train(2, &config, false, false, [None, Some((1, 5))]);
    let error = ended[0].as_ref().unwrap_err();
    assert!(error.starts_with("rank 1 (") && error.contains("has ended"), "{ended:?}");
    assert!(error.contains("checkpoints/step-4; continue from it"), "{ended:?}");
    assert_eq!(train(2, &config, true, false, [None; 2]), [Ok(6), Ok(6)]);
}

#[test]
fn ranks_that_do_not_divide_into_groups_are_refused() {
    let sandbox = Sandbox::new();
    let error = |size: usize| {
        let config = shared(&sandbox, "refused", &[]);
        let results = run_until(size, &config, RunStart::New, Precision::F32, None);
        results.into_iter().next().unwrap().unwrap_err().to_string()
    };
    insta::assert_snapshot!(error(1), @r"
    train.context_parallel is 2, and the run has 1 GPU
      hint: use --gpus 2 or a multiple of it, or --set train.context_parallel=1
    ");
    insta::assert_snapshot!(error(3), @r"
    train.context_parallel is 2, and the run has 3 GPUs
      hint: use --gpus 2 or a multiple of it, or --set train.context_parallel=1
    ");
    insta::assert_snapshot!(error(8), @r"
    a step of 384 tokens has 6 rows of 64, which do not divide by 4 groups of 2 GPUs
      hint: use as many groups as divide 6, or a train.batch_tokens that is a multiple of 256
    ");
}
