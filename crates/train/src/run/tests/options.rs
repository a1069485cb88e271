//! Runs with other optimisers, groups, averaged weights and norms by layer.

use super::*;
use crate::metrics::StepRecord;
use crate::optimiser::LayerNorm;

const GROUPS: &str = "train.groups=[{ match = \"*.mlp.*\", lr = 0.5, weight_decay = 0.0 }, \
     { match = \"embedding\", optimiser = { kind = \"lion\", weight_decay = 1.0 }, lr = 0.5 }]";

fn step_losses(run_dir: &Path) -> Vec<f32> {
    let loss = |record| if let Record::Step(step) = record { step.loss } else { None };
    losses(run_dir).into_iter().filter_map(loss).collect()
}

#[test]
fn runs_of_every_optimiser_and_of_groups_learn_and_resume_to_the_bit() {
    let sandbox = Sandbox::new();
    for (name, set) in [
        ("lion", "train.optimiser={ kind = \"lion\", cautious_decay = true }"),
        ("muon", "train.optimiser={ kind = \"muon\", per_head = true }"),
        ("normuon", "train.optimiser={ kind = \"normuon\", coefficients = \"polar-express\" }"),
        ("groups", GROUPS),
    ] {
        let more = [set, "train.ema=0.9", "train.norms.every=2"];
        let of = |part: &str| {
            sandbox.config(&[&more[..], &[&format!("run.name={name}-{part}")]].concat())
        };
        let unbroken = run(&of("unbroken"), RunStart::New).unwrap().run_dir;
        let found = step_losses(&unbroken);
        assert!(found[11] < found[0] - 0.3, "{name}: {found:?}");
        let stopped = run_until(&of("broken"), RunStart::New, 7).unwrap().run_dir;
        let broken = run(&of("broken"), RunStart::Resume(stopped)).unwrap().run_dir;
        assert_eq!(losses(&broken), losses(&unbroken), "{name}");
        assert_eq!(weights(&broken), weights(&unbroken), "{name}");
        assert_eq!(average(&broken), average(&unbroken), "{name}");
    }
}

#[test]
fn a_resume_cannot_change_which_state_the_optimiser_has() {
    let sandbox = Sandbox::new();
    let config = sandbox.config(&[GROUPS]);
    let dir = run_until(&config, RunStart::New, 5).unwrap().run_dir;
    for set in [
        "train.groups.1.optimiser.kind=adamw",
        "train.groups.1.match=\"*.q.*\"",
        "train.optimiser={ kind = \"muon\" }",
    ] {
        let changed = sandbox.config(&[GROUPS, set]);
        let error = run(&changed, RunStart::Resume(dir.clone())).unwrap_err().to_string();
        assert!(error.contains("was made with another configuration"), "{set}: {error}");
    }
    let free = sandbox.config(&[GROUPS, "train.groups.0.lr=2.0"]);
    assert!(run(&free, RunStart::Resume(dir)).is_ok());
}

/// Validation leaves the z-loss out: with the same weights, it is the same with and without one.
#[test]
fn metrics_have_the_z_loss_beside_the_cross_entropy_and_a_run_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let of = |name: &str, more: &[&str]| {
        let name = format!("run.name={name}");
        sandbox.config(&[&["model.logit_softcap=20", name.as_str()], more].concat())
    };
    let steps = |dir: &Path| -> Vec<StepRecord> {
        let step = |record| if let Record::Step(step) = record { Some(step) } else { None };
        losses(dir).into_iter().filter_map(step).collect()
    };
    let plain = run(&of("plain", &[]), RunStart::New).unwrap().run_dir;
    assert!(steps(&plain).iter().all(|step| step.z_loss.is_none()));
    assert!(!fs::read_to_string(plain.join("metrics.jsonl")).unwrap().contains("z_loss"));

    let on = ["train.z_loss=0.1"];
    let unbroken = run(&of("unbroken", &on), RunStart::New).unwrap().run_dir;
    let (with, without) = (steps(&unbroken), steps(&plain));
    assert_eq!(with[0].loss, without[0].loss, "no step is taken yet");
    assert_ne!(with[0].grad_norm, without[0].grad_norm);
    let z_losses: Vec<f32> = with.iter().map(|step| step.z_loss.unwrap()).collect();
    assert!(z_losses[0] > 1.0 && z_losses[11] < z_losses[0], "{z_losses:?}");

    let stopped = run_until(&of("broken", &on), RunStart::New, 7).unwrap().run_dir;
    let broken = run(&of("broken", &on), RunStart::Resume(stopped)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
    assert_eq!(weights(&broken), weights(&unbroken));

    // With so small a learning rate, the weights stay as they are.
    let still = ["train.lr=1e-30"];
    let last = |name: &str, more: &[&str]| {
        let dir = run(&of(name, &[&still[..], more].concat()), RunStart::New).unwrap().run_dir;
        validations(&dir).last().unwrap().validation_loss
    };
    assert_eq!(last("still", &[]), last("still-z", &on));
}

/// The averaged weights of the newest checkpoint.
fn average(run_dir: &Path) -> Vec<u8> {
    let checkpoint = Checkpoint::open(run_dir, CheckpointSelector::Latest).unwrap();
    fs::read(checkpoint.ema().unwrap().expect("an average")).unwrap()
}

/// From one checkpoint to the next, the average moves towards the weights by a fifth of the distance.
#[test]
fn the_average_is_that_of_the_weights_after_each_update() {
    let sandbox = Sandbox::new();
    for precision in [Precision::F32, Precision::Bf16] {
        let name = format!("run.name=ema-{precision}");
        let sets = ["train.ema=0.8", "train.checkpoint.every=1", "train.checkpoint.keep_last=99"];
        let config = sandbox.config(&[&sets[..], &[&name]].concat());
        let start = RunStart::New;
        let dir = run_in(precision, &config, start, StopFlag::new(), &mut SilentConsole);
        let dir = dir.unwrap().run_dir;
        let open = |step| Checkpoint::open(&dir, CheckpointSelector::Step(step)).unwrap();
        let tensors = |step| read_tensors(&open(step).weights().unwrap()).unwrap();
        let averages = |step| read_tensors(&open(step).ema().unwrap().unwrap()).unwrap();
        for step in 1..12 {
            let (before, after, weights) = (averages(step), averages(step + 1), tensors(step + 1));
            for (path, (_, after)) in &after {
                let pairs = before[path].1.iter().zip(&weights[path].1);
                for (after, (before, weight)) in after.iter().zip(pairs) {
                    let expected = 0.8 * before + 0.2 * weight;
                    assert!((after - expected).abs() <= 1e-6 * (1.0 + expected.abs()), "{path}");
                }
            }
        }
    }
}

#[test]
fn validations_report_the_averages_loss() {
    let sandbox = Sandbox::new();
    let dir = run(&sandbox.config(&["train.ema=0.9"]), RunStart::New).unwrap().run_dir;
    let found: Vec<(f64, f64)> =
        validations(&dir).map(|v| (v.validation_loss, v.ema_validation_loss.unwrap())).collect();
    assert_eq!(found.len(), 3);
    // The average lags behind, and falls too.
    assert!(found.iter().all(|(loss, average)| average > loss), "{found:?}");
    assert!(found[2].1 < found[0].1, "{found:?}");

    let without = run(&sandbox.config(&["run.name=without"]), RunStart::New).unwrap().run_dir;
    assert!(validations(&without).all(|v| v.ema_validation_loss.is_none()));
    let checkpoint = Checkpoint::open(&without, CheckpointSelector::Latest).unwrap();
    assert_eq!(checkpoint.ema().unwrap(), None);
}

#[test]
fn a_run_that_turns_the_average_on_later_starts_it_at_its_weights() {
    let sandbox = Sandbox::new();
    let dir = run_until(&sandbox.config(&[]), RunStart::New, 4).unwrap().run_dir;
    let resumed = sandbox.config(&["train.ema=0.5"]);
    let dir = run_until(&resumed, RunStart::Resume(dir), 5).unwrap().run_dir;
    let open = |step| Checkpoint::open(&dir, CheckpointSelector::Step(step)).unwrap();
    let embedding = |path: std::path::PathBuf| read_tensors(&path).unwrap()["embedding"].1.clone();
    let [old, new] = [4, 5].map(|step| embedding(open(step).weights().unwrap()));
    let average = embedding(open(5).ema().unwrap().unwrap());
    for ((old, new), average) in old.iter().zip(&new).zip(average) {
        assert!((0.5 * (old + new) - average).abs() < 1e-6);
    }
}

#[test]
fn the_noise_scale_is_measured_without_a_change_of_the_run_and_resumes_to_the_bit() {
    let sandbox = Sandbox::new();
    let set = "train.noise_scale={ every = 2, decay = 0.5 }";
    let of = |name: &str, sets: &[&str]| {
        sandbox.config(&[sets, &[&format!("run.name={name}")]].concat())
    };
    let without = run(&of("without", &[]), RunStart::New).unwrap().run_dir;
    let unbroken = run(&of("unbroken", &[set]), RunStart::New).unwrap().run_dir;
    assert_eq!(step_losses(&unbroken), step_losses(&without));
    assert_eq!(weights(&unbroken), weights(&without));

    let measured: Vec<_> = losses(&unbroken)
        .into_iter()
        .filter_map(|record| if let Record::Noise(noise) = record { Some(noise) } else { None })
        .collect();
    assert_eq!(measured.iter().map(|noise| noise.step).collect::<Vec<_>>(), [2, 4, 6, 8, 10, 12]);
    assert!(measured.iter().any(|noise| noise.noise_scale.is_some()), "{measured:?}");
    // Two estimates whose sum is what was measured: |G|² + tr Σ / B = |g|². B are at most 128 tokens.
    for noise in &measured {
        let step = losses(&unbroken).into_iter().find_map(|record| match record {
            Record::Step(step) if step.step == noise.step => step.grad_norm,
            _ => None,
        });
        let square = f64::from(step.unwrap()).powi(2);
        let tokens = noise.noise_trace / (square - noise.gradient_square);
        assert!((64.0..=128.01).contains(&tokens), "{tokens}: {noise:?}");
    }

    let stopped = run_until(&of("broken", &[set]), RunStart::New, 7).unwrap().run_dir;
    let broken = run(&of("broken", &[set]), RunStart::Resume(stopped)).unwrap().run_dir;
    assert_eq!(losses(&broken), losses(&unbroken));
}

#[test]
fn norms_by_layer_agree_with_the_step_and_the_checkpoint() {
    let sandbox = Sandbox::new();
    let sets = ["train.norms.every=4", "train.checkpoint.keep_last=9", "run.tensorboard=true"];
    let dir = run(&sandbox.config(&sets), RunStart::New).unwrap().run_dir;
    let (mut measured, mut total) = (vec![], vec![]);
    for record in losses(&dir) {
        match record {
            Record::Norms(norms) => measured.push(norms),
            Record::Step(step) if step.step % 4 == 0 => total.push(step.grad_norm.unwrap()),
            _ => {}
        }
    }
    assert_eq!(measured.iter().map(|norms| norms.step).collect::<Vec<_>>(), [4, 8, 12]);
    for (norms, total) in measured.iter().zip(total) {
        let squares = norms.layers.values().map(|norm| norm.grad_norm.unwrap().powi(2));
        let whole = squares.sum::<f64>().sqrt();
        assert!((whole / f64::from(total) - 1.0).abs() < 1e-4, "{whole} and {total}");
    }
    let last = &measured[2].layers;
    let names: Vec<&str> = last.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "blocks.0.attention",
            "blocks.0.attention_norm",
            "blocks.0.mlp",
            "blocks.0.mlp_norm",
            "embedding",
            "norm"
        ]
    );
    let tensors = |step| {
        let checkpoint = Checkpoint::open(&dir, CheckpointSelector::Step(step)).unwrap();
        read_tensors(&checkpoint.weights().unwrap()).unwrap()["embedding"].1.clone()
    };
    let norm = |values: &[f32]| values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let LayerNorm { weight_norm, update_ratio, .. } = last["embedding"];
    let expected = norm(&tensors(12));
    assert!((weight_norm.unwrap() / expected - 1.0).abs() < 1e-5, "{weight_norm:?}");
    assert!((1e-5..1.0).contains(&update_ratio.unwrap()), "{update_ratio:?}");
}
