//! Training on ranks that are threads.

mod opened;
mod over_tcp;
mod processes;
mod shared_rows;
mod waits;

use std::path::Path;
use std::sync::Mutex;

use longwall_model::Precision;
use longwall_model::weights::read_tensors;

use super::loopback::{self, Loopback};
use super::*;
use crate::checkpoint::{Checkpoint, CheckpointSelector};
use crate::config::RunConfig;
use crate::console::{Console, SilentConsole};
use crate::error::TrainError;
use crate::evaluation::{Evaluated, EvaluationError, Evaluator, NoEvaluations};
use crate::metrics::{self, Record};
use crate::run::tests::{After, Sandbox, losses, options, weights};
use crate::run::{Outcome, RunStart, train_as_rank};
use crate::signals::StopFlag;
use crate::testing::TestBackend;

/// Runs `rank` on each of `size` ranks, and returns what it returns, in their order.
fn on_ranks<R: Send>(size: usize, rank: impl Fn(Loopback) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let start = |loopback| scope.spawn(move || rank(loopback));
        let threads: Vec<_> = loopback::ranks(size).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// A run of `size` ranks; a stop is asked for on rank `asked.0` during step `asked.1`.
fn run_until(
    size: usize,
    config: &RunConfig,
    start: RunStart,
    precision: Precision,
    asked: Option<(usize, u64)>,
) -> Vec<Result<Outcome, TrainError>> {
    on_ranks(size, |loopback| {
        let rank = Collective::<TestBackend>::world(&loopback).rank;
        let stop = StopFlag::new();
        let options = options(precision, start.clone(), stop.clone());
        let step = asked.filter(|(who, _)| *who == rank).map_or(0, |(_, step)| step);
        let mut console: Box<dyn Console> = match step {
            0 => Box::new(SilentConsole),
            step => Box::new(After { step, action: move || stop.raise() }),
        };
        let device = Default::default();
        let console = console.as_mut();
        train_as_rank::<TestBackend>(
            config,
            &device,
            &options,
            &loopback,
            console,
            &mut NoEvaluations,
        )
    })
}

fn run(size: usize, config: &RunConfig, start: RunStart) -> Outcome {
    let mut outcomes = run_until(size, config, start, Precision::F32, None);
    outcomes.swap_remove(0).unwrap()
}

/// Loss and gradient norm of each step.
fn steps(run_dir: &Path) -> Vec<[f32; 2]> {
    let records = metrics::read(&run_dir.join("metrics.jsonl")).unwrap();
    let step = |record| match record {
        Record::Step(step) => Some([step.loss.unwrap(), step.grad_norm.unwrap()]),
        _ => None,
    };
    records.into_iter().filter_map(step).collect()
}

fn assert_near(found: &[[f32; 2]], expected: &[[f32; 2]], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(error <= tolerance * expected, "{what}, step {step}: {found} for {expected}");
        }
    }
}

/// Twelve steps of six rows, in micro-batches of one.
const SIX_ROWS: [&str; 3] = ["train.tokens=2304", "train.batch_tokens=192", "train.micro_batch=1"];

fn config(sandbox: &Sandbox, name: &str, sets: &[&str]) -> RunConfig {
    let name = format!("run.name={name}");
    sandbox.config(&[&SIX_ROWS[..], &[&name], sets].concat())
}

#[test]
fn parts_cover_the_rows_once() {
    let parts: Vec<_> = (0..3).map(|rank| World { rank, size: 3 }.part(12)).collect();
    assert_eq!(parts, [0..4, 4..8, 8..12]);
    assert_eq!(World::ALONE.part(5), 0..5);
}

#[test]
fn ranks_in_groups_take_the_rows_of_their_group() {
    let worlds = (0..6).map(|rank| World { rank, size: 6 });
    let of = |world: World| (world.groups(2).part(12), world.group(2));
    let found: Vec<_> = worlds.map(of).collect();
    assert_eq!(found[..3], [(0..4, 0..2), (0..4, 0..2), (4..8, 2..4)]);
    assert_eq!(found[5], (8..12, 4..6));
    assert_eq!(World::ALONE.groups(1), World::ALONE);
}

#[test]
fn ranks_without_a_name_are_told_apart() {
    assert_eq!(shown_ranks(&[4]), "rank 4");
    assert_eq!(shown_ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
}

#[test]
fn loopback_ranks_sum_share_and_gather() {
    use longwall_kernels::backend::{primitive, tensor};
    let results = on_ranks(3, |ranks| {
        let rank = Collective::<TestBackend>::world(&ranks).rank;
        let values = |x: f32| primitive(Tensor1::from_floats([x, 10.0 * x], &Default::default()));
        let read = |x| tensor::<TestBackend, 1>(x).into_data().to_vec::<f32>().unwrap();
        let own = rank as f32 + 1.0;
        let begun = [(values(own), 2), (values(own), 0)]
            .map(|sum| Collective::<TestBackend>::reduce(&ranks, vec![sum]).unwrap());
        let sums = Collective::<TestBackend>::finish_reduce(&ranks, Vec::from(begun));
        let shared = Collective::<TestBackend>::broadcast(&ranks, vec![(values(own), 1)]).unwrap();
        let all = Collective::<TestBackend>::all_gather(&ranks, vec![rank as u8]).unwrap();
        assert_eq!(all, [[0], [1], [2]]);
        let sums: Vec<_> = sums.into_iter().map(|sum| sum.map(read)).collect();
        (sums, read(shared.into_iter().next().unwrap()))
    });
    for (rank, (sums, shared)) in results.into_iter().enumerate() {
        assert_eq!(shared, [2.0, 20.0]);
        let sum = Some(vec![6.0, 60.0]);
        let expected = [sum.clone().filter(|_| rank == 2), sum.filter(|_| rank == 0)];
        assert_eq!(sums, expected, "rank {rank}");
    }
}

type Tensor1 = burn::tensor::Tensor<TestBackend, 1>;

#[test]
fn losses_do_not_depend_on_the_number_of_ranks_and_equal_worlds_give_equal_bits() {
    let sandbox = Sandbox::new();
    for optimiser in ["adamw", "muon"] {
        let dir = |size: usize, take: &str| {
            let name = format!("{optimiser}-{size}-{take}");
            let kind = format!("train.optimiser.kind={optimiser}");
            let sets = [kind.as_str(), "train.ema=0.9", "train.norms.every=6"];
            let config = config(&sandbox, &name, &sets);
            let outcome = run(size, &config, RunStart::New);
            assert!(outcome.is_finished());
            outcome.run_dir
        };
        let alone = dir(1, "a");
        for size in [2, 3] {
            let (one, other) = (dir(size, "a"), dir(size, "b"));
            assert_eq!(losses(&one), losses(&other), "{size} ranks");
            assert_eq!(weights(&one), weights(&other), "{size} ranks");
            assert_near(&steps(&one), &steps(&alone), 1e-3, optimiser);
            assert_near_validations(&one, &alone);
            assert_near_files(&one, &alone);
        }
    }
}

/// Validations, also of the average, and the norms of all layers.
fn assert_near_validations(one: &Path, other: &Path) {
    let numbers = |dir: &Path| -> Vec<f64> {
        let numbers = |record| match record {
            Record::Validation(v) => vec![v.validation_loss, v.ema_validation_loss.unwrap()],
            Record::Norms(norms) => {
                let of = |layer: &crate::optimiser::LayerNorm| {
                    [layer.grad_norm, layer.weight_norm, layer.update_ratio].map(Option::unwrap)
                };
                norms.layers.values().flat_map(of).collect()
            }
            _ => vec![],
        };
        losses(dir).into_iter().flat_map(numbers).collect()
    };
    let (one, other) = (numbers(one), numbers(other));
    assert_eq!(one.len(), other.len());
    assert!(one.len() > 20, "{one:?}");
    for (one, other) in one.iter().zip(&other) {
        assert!((one - other).abs() < 1e-2 * other.abs() + 1e-6, "{one} and {other}");
    }
}

/// The tensors of the last checkpoints.
fn assert_near_files(one: &Path, other: &Path) {
    let [one, other] = [one, other].map(|dir| {
        let checkpoint = Checkpoint::open(dir, CheckpointSelector::Latest).unwrap();
        let files =
            [checkpoint.weights(), checkpoint.optimizer(), checkpoint.ema().map(Option::unwrap)];
        files.map(|path| read_tensors(&path.unwrap()).unwrap())
    });
    for (one, other) in one.iter().zip(&other) {
        assert_eq!(one.len(), other.len());
        for (name, (shape, elements)) in one {
            let (other_shape, other) = &other[name];
            assert_eq!(shape, other_shape, "{name}");
            let size = other.iter().map(|x| x * x).sum::<f32>().sqrt();
            let error: f32 = elements.iter().zip(other).map(|(a, b)| (a - b).powi(2)).sum();
            assert!(error.sqrt() < 0.02 * size + 1e-6, "{name}: {} of {size}", error.sqrt());
        }
    }
}

/// As on a GPU: masters and state only on the owner, rounded parameters everywhere.
#[test]
fn a_rounded_model_trains_alike_on_ranks() {
    let sandbox = Sandbox::new();
    let dir = |size: usize| {
        let config = config(&sandbox, &format!("bf16-{size}"), &["train.ema=0.9"]);
        let outcomes = run_until(size, &config, RunStart::New, Precision::Bf16, None);
        outcomes.into_iter().next().unwrap().unwrap().run_dir
    };
    let (alone, two) = (dir(1), dir(2));
    let (alone, two) = (steps(&alone), steps(&two));
    for (one, other) in alone.iter().zip(&two) {
        assert!((one[0] - other[0]).abs() < 0.02 * one[0], "{one:?} and {other:?}");
    }
}

#[test]
fn the_noise_scale_is_that_of_all_ranks_micro_batches() {
    let sandbox = Sandbox::new();
    let noise = |size: usize| {
        let sets = ["train.noise_scale.every=4"];
        let config = config(&sandbox, &format!("noise-{size}"), &sets);
        let dir = run(size, &config, RunStart::New).run_dir;
        let trace = |record| match record {
            Record::Noise(noise) => Some([noise.noise_trace as f32, 1.0]),
            _ => None,
        };
        losses(&dir).into_iter().filter_map(trace).collect::<Vec<_>>()
    };
    let alone = noise(1);
    assert_eq!(alone.len(), 3);
    for size in [2, 6] {
        assert_near(&noise(size), &alone, 1e-2, &format!("{size} ranks"));
    }
}

#[test]
fn ranks_stop_at_one_step_and_others_go_on() {
    let sandbox = Sandbox::new();
    let sets = ["train.ema=0.9", "train.optimiser.kind=muon"];
    let unbroken = run(1, &config(&sandbox, "unbroken", &sets), RunStart::New).run_dir;
    let broken = config(&sandbox, "broken", &sets);
    let mut start = RunStart::New;
    // Asked for on any rank: all finish the next step.
    for (size, asked) in [(2, Some((1, 3))), (3, Some((2, 6))), (1, Some((0, 8))), (2, None)] {
        let outcomes = run_until(size, &broken, start, Precision::F32, asked);
        let outcomes: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
        assert!(outcomes.iter().all(|outcome| outcome.step == outcomes[0].step), "{outcomes:?}");
        let expected = asked.map_or(12, |(_, step)| if size > 1 { step + 1 } else { step });
        assert_eq!(outcomes[0].step, expected);
        start = RunStart::Resume(outcomes[0].run_dir.clone());
    }
    let RunStart::Resume(broken) = start else { unreachable!("it was run") };
    assert_near(&steps(&broken), &steps(&unbroken), 1e-3, "broken");
    assert_near_files(&broken, &unbroken);
}

#[test]
fn a_resume_on_as_many_ranks_equals_an_unbroken_run_to_the_bit() {
    let sandbox = Sandbox::new();
    let unbroken = run(2, &config(&sandbox, "unbroken", &[]), RunStart::New).run_dir;
    let broken = config(&sandbox, "broken", &[]);
    let stopped = run_until(2, &broken, RunStart::New, Precision::F32, Some((0, 5)));
    let dir = stopped.into_iter().next().unwrap().unwrap().run_dir;
    run(2, &broken, RunStart::Resume(dir.clone()));
    assert_eq!(losses(&dir), losses(&unbroken));
    assert_eq!(weights(&dir), weights(&unbroken));
}

/// Each rank goes on from its own rows' part of what a run on another number of ranks has left.
#[test]
fn streams_go_on_over_any_number_of_ranks() {
    let sandbox = Sandbox::new();
    let kind = "model.attention={ kind = \"gated_delta_net\" }";
    let sets = ["data.rows=\"streams\"", kind, "train.ema=0.9"];
    let unbroken = run(1, &config(&sandbox, "unbroken", &sets), RunStart::New).run_dir;
    let broken = config(&sandbox, "broken", &sets);
    let mut start = RunStart::New;
    for (size, stop) in [(2, Some((1, 3))), (3, Some((0, 6))), (1, Some((0, 8))), (3, None)] {
        let outcomes = run_until(size, &broken, start, Precision::F32, stop);
        let outcome = outcomes.into_iter().next().unwrap().unwrap();
        start = RunStart::Resume(outcome.run_dir);
    }
    let RunStart::Resume(broken) = start else { unreachable!("it was run") };
    assert_near(&steps(&broken), &steps(&unbroken), 1e-3, "broken");
    assert_near_files(&broken, &unbroken);
    let carried = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir, CheckpointSelector::Latest).unwrap();
        read_tensors(&checkpoint.carried().unwrap().unwrap()).unwrap().remove("blocks.0.carried")
    };
    let ((shape, one), (other_shape, other)) =
        (carried(&broken).unwrap(), carried(&unbroken).unwrap());
    assert_eq!((shape[0], &shape), (6, &other_shape));
    let largest = one.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    assert!(one.iter().zip(&other).all(|(a, b)| (a - b).abs() < 0.02 * largest));
}

#[test]
fn rows_that_do_not_divide_are_refused_with_a_remedy() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "four", &[]);
    let results = run_until(4, &config, RunStart::New, Precision::F32, None);
    let errors: Vec<String> = results.into_iter().map(|x| x.unwrap_err().to_string()).collect();
    insta::assert_snapshot!(errors[0], @r"
    a step of 192 tokens has 6 rows of 32, which do not divide by 4 GPUs
      hint: use as many GPUs as divide 6, or a train.batch_tokens that is a multiple of 128
    ");
    assert!(errors.iter().all(|error| error.contains("6 rows of 32")), "{errors:?}");
    assert!(!config.run_dir().exists());
}

/// Fails in its n-th reduction.
struct Failing {
    inner: Loopback,
    left: Mutex<usize>,
}

impl Collective<TestBackend> for Failing {
    fn world(&self) -> World {
        Collective::<TestBackend>::world(&self.inner)
    }

    fn reduce(
        &self,
        tensors: Vec<Owned<TestBackend>>,
    ) -> Result<Sums<TestBackend>, CollectiveError> {
        let mut left = self.left.lock().unwrap();
        *left -= 1;
        if *left == 0 {
            let reason = "of a test".to_owned();
            return Err(NcclError::Call { call: "ncclReduce", reason }.into());
        }
        Collective::<TestBackend>::reduce(&self.inner, tensors)
    }

    fn finish_reduce(
        &self,
        begun: Vec<Sums<TestBackend>>,
    ) -> Vec<Option<FloatTensor<TestBackend>>> {
        Collective::<TestBackend>::finish_reduce(&self.inner, begun)
    }

    fn broadcast(
        &self,
        tensors: Vec<Owned<TestBackend>>,
    ) -> Result<Vec<FloatTensor<TestBackend>>, CollectiveError> {
        Collective::<TestBackend>::broadcast(&self.inner, tensors)
    }

    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Collective::<TestBackend>::all_gather(&self.inner, message)
    }

    fn fail(&self, reason: &str) {
        Collective::<TestBackend>::fail(&self.inner, reason);
    }
}

/// Rank 1 fails to sum gradients in step 5: those of the block during the backward pass, or the rest after it.
#[test]
fn a_rank_that_fails_ends_the_others_and_leaves_the_last_checkpoint() {
    for sums in [9, 10] {
        let sandbox = Sandbox::new();
        let config = config(&sandbox, "fails", &["train.checkpoint.every=4"]);
        let errors: Vec<String> = on_ranks(3, |inner| {
            let world = Collective::<TestBackend>::world(&inner);
            let left = Mutex::new(if world.rank == 1 { sums } else { usize::MAX });
            let ranks = Failing { inner, left };
            let options = options(Precision::F32, RunStart::New, StopFlag::new());
            let (device, console) = (Default::default(), &mut SilentConsole);
            let outcome =
                train_as_rank(&config, &device, &options, &ranks, console, &mut NoEvaluations);
            outcome.unwrap_err().to_string()
        });
        assert!(errors[1].starts_with("ncclReduce of NCCL failed: of a test"), "{errors:?}");
        for rank in [0, 2] {
            let told = "rank 1 (this process) failed: ncclReduce of NCCL failed: of a test";
            assert!(errors[rank].starts_with(told), "{errors:?}");
        }
        assert!(errors[0].contains("checkpoints/step-4; continue from it"), "{errors:?}");
        let dir = config.run_dir();
        assert_eq!(Checkpoint::open(&dir, CheckpointSelector::Latest).unwrap().state.step, 4);
        assert_eq!(run(2, &config, RunStart::Resume(dir)).step, 12);
    }
}

/// Rank 0 cannot write into the folder; the others must not wait for it.
#[test]
fn a_start_that_fails_on_rank_0_fails_on_all_ranks() {
    let sandbox = Sandbox::new();
    let config = config(&sandbox, "taken", &[]);
    std::fs::create_dir_all(config.run_dir()).unwrap();
    std::fs::write(config.run_dir().join("notes.txt"), "mine").unwrap();
    let errors: Vec<String> = run_until(2, &config, RunStart::New, Precision::F32, None)
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect();
    assert!(errors[0].contains("exists already"), "{errors:?}");
    assert!(errors[1].starts_with("rank 0 (this process) failed: the run folder"), "{errors:?}");
}

#[test]
fn validation_losses_are_equal_to_the_bit_on_any_number_of_ranks() {
    let sandbox = Sandbox::new();
    let validations = |size: usize| {
        // Steps too small to change a weight.
        let sets = ["train.lr=1e-30", "train.validate.every=4", "train.ema=0.9"];
        let config = config(&sandbox, &format!("validated-{size}"), &sets);
        let dir = run(size, &config, RunStart::New).run_dir;
        let scores = |record| match record {
            Record::Validation(v) => Some((
                v.validation_loss,
                v.ema_validation_loss,
                v.bits_per_byte,
                v.best_context_loss,
                v.loss_by_position,
            )),
            _ => None,
        };
        metrics::read(&dir.join("metrics.jsonl")).unwrap().into_iter().filter_map(scores).collect()
    };
    let alone: Vec<_> = validations(1);
    assert_eq!(alone.len(), 3);
    for size in [2, 3] {
        assert_eq!(validations(size), alone, "{size} ranks");
    }
}

/// An evaluation that all ranks take part in, and that fails on some.
struct Together<'a> {
    ranks: &'a Loopback,
    fails_on: Option<usize>,
    evaluated: Vec<(usize, u64)>,
}

impl Evaluator<TestBackend> for Together<'_> {
    fn check(
        &mut self,
        _: &longwall_data::Tokenizer,
        _: &longwall_model::LanguageModel<TestBackend>,
    ) -> Result<(), EvaluationError> {
        Ok(())
    }

    fn discard_after(&mut self, _: u64) -> Result<(), EvaluationError> {
        Ok(())
    }

    fn evaluate(
        &mut self,
        at: usize,
        step: u64,
        _: &longwall_model::LanguageModel<TestBackend>,
    ) -> Result<Option<Evaluated>, EvaluationError> {
        let rank = Collective::<TestBackend>::world(self.ranks).rank;
        let all = Collective::<TestBackend>::all_gather(self.ranks, vec![at as u8, step as u8])?;
        assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
        self.evaluated.push((at, step));
        match self.fails_on {
            Some(failing) if failing == rank => Err("of a test".into()),
            _ => Ok(None),
        }
    }
}

#[test]
fn all_ranks_evaluate_together_and_end_if_one_fails() {
    let sandbox = Sandbox::new();
    let evaluations = "train.evaluate=[{ suite = \"passkey\", every = 4 }, { suite = \"niah\", every = 6, weights = \"ema\" }]";
    for fails_on in [None, Some(0), Some(1)] {
        let name = format!("together-{fails_on:?}").replace(['(', ')'], "-");
        let config = config(&sandbox, &name, &["train.ema=0.9", evaluations]);
        let results = on_ranks(3, |ranks| {
            let mut together = Together { ranks: &ranks, fails_on, evaluated: vec![] };
            let options = options(Precision::F32, RunStart::New, StopFlag::new());
            let (device, console) = (Default::default(), &mut SilentConsole);
            let outcome = train_as_rank(&config, &device, &options, &ranks, console, &mut together);
            (outcome.map_err(|error| error.to_string()), together.evaluated)
        });
        for (rank, (outcome, evaluated)) in results.iter().enumerate() {
            let Some(failing) = fails_on else {
                assert!(outcome.is_ok(), "{outcome:?}");
                assert_eq!(*evaluated, [(0, 4), (1, 6), (0, 8), (0, 12), (1, 12)]);
                continue;
            };
            assert_eq!(*evaluated, [(0, 4)]);
            let error = outcome.as_ref().unwrap_err();
            let own = error.contains("of a test");
            assert_eq!(own, rank == failing, "rank {rank}: {error}");
        }
        let checkpoint = Checkpoint::open(&config.run_dir(), CheckpointSelector::Latest).unwrap();
        assert_eq!(checkpoint.state.step, if fails_on.is_some() { 4 } else { 12 });
    }
}
