//! Times training steps of a configuration's model on one batch of random tokens, without its data
//! and without a run folder.

use std::time::Instant;

use burn::module::Module;
use longwall_data::{Batch, Rows};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::{Allocation, DeviceKind};
use longwall_model::{LanguageModel, Precision};

use crate::carried::Carried;
use crate::config::RunConfig;
use crate::grad_accumulation::{AccumulationPlan, BatchScalars, forward_backward, weight_sum};
use crate::gradients::clip_factor;
use crate::memory::Estimate;
use crate::optimiser::{Optimiser, Update};
use crate::run::default_micro_batch;
use crate::sampling::mix;
use crate::signals::StopFlag;

/// What was timed.
#[derive(Clone, Debug, PartialEq)]
pub struct Bench {
    /// Parameters of the model.
    pub parameters: usize,
    /// FLOPs of a training step per token.
    pub flops_per_token: f64,
    /// Rows of a step, and rows of one of its micro-batches.
    pub rows: (usize, usize),
    /// The memory that training is estimated to need; `None` on the CPU.
    pub memory: Option<Estimate>,
    /// The steps, in their order.
    pub steps: Vec<BenchStep>,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BenchStep {
    /// The mean loss of the batch, in nats.
    pub loss: f32,
    /// From the start of the step until its loss and gradient norm were read back. The update that
    /// follows overlaps with the next step, and is timed with it.
    pub seconds: f64,
}

/// Trains the model of `config` for `steps` steps on one batch; `after` is called after each.
pub fn run<B: OpBackend>(
    config: &RunConfig,
    vocab_size: usize,
    precision: Precision,
    device: &B::Device,
    steps: u64,
    after: &mut dyn FnMut(&BenchStep),
) -> Bench {
    B::set_allocation(device, Allocation::Exact);
    let (train, seq_len, seed) = (&config.train, config.data.seq_len, config.run.seed);
    let model = LanguageModel::new(&config.model, vocab_size, seq_len, seed, device);
    let mut optimiser = Optimiser::<B>::new(&config.rules(), &model);
    let mut model = optimiser.round(model, precision);
    let (timeline, stage) = (config.timeline(), config.base_stage());
    let rows = stage.rows();
    let mut batch = random_batch(rows, seq_len, vocab_size, seed, config.data.document_mask);
    // Each step goes on from the one before.
    let streams = config.data.rows == Rows::Streams;
    batch.goes_on = streams.then(|| vec![true; rows]);
    let mut carried = streams.then(|| Carried::nothing(&model, rows, device));
    let weights = weight_sum(&batch);
    let plan = AccumulationPlan {
        // If nothing fits by the estimate, the benchmark tries the smallest.
        micro_batch: default_micro_batch::<B>(
            config,
            &stage,
            vocab_size,
            precision,
            1,
            B::available_memory(device),
        )
        .unwrap_or(1),
        recompute: train.recompute,
        z_loss: train.z_loss as f32,
        measure_noise: false,
    };
    let never = StopFlag::new();
    let schedule = train.lr_schedule(&timeline);
    let mut bench = Bench {
        parameters: model.num_params(),
        flops_per_token: config.flops_per_token(&stage, vocab_size),
        rows: (rows, plan.micro_batch),
        memory: (B::device_kind() == DeviceKind::Cuda)
            .then(|| Estimate::of(config, vocab_size, stage.open(plan.micro_batch), precision)),
        steps: Vec::new(),
    };
    for step in 0..steps {
        let started = Instant::now();
        let past = carried.as_ref();
        let pass =
            forward_backward(&model, &batch, past, None, weights, plan, &never, None, device)
                .expect("nobody asks to stop");
        carried.clone_from(&pass.carried);
        let BatchScalars { loss, grad_norm, .. } = pass.scalars();
        let lr = schedule.lr(step.min(timeline.total_steps() - 1));
        let grad_scale = clip_factor(train.clip.0, grad_norm);
        let update = Update { lr, number: step + 1, grad_scale };
        model = optimiser.step(model, pass.gradients, update);
        bench.steps.push(BenchStep { loss, seconds: started.elapsed().as_secs_f64() });
        after(&bench.steps[step as usize]);
    }
    B::set_allocation(device, Allocation::Pages);
    bench
}

/// Rows of uniformly random tokens; targets are the tokens shifted by one. With a document mask, each
/// row is one document.
fn random_batch(
    rows: usize,
    seq_len: usize,
    vocab_size: usize,
    seed: u64,
    document_mask: bool,
) -> Batch {
    let token = |at: usize| (mix(seed, at as u64) % vocab_size as u64) as i32;
    let tokens = |shift: usize| {
        let row = move |row: usize| (0..seq_len).map(move |at| (row * (seq_len + 1)) + at + shift);
        (0..rows).flat_map(row).map(token).collect::<Vec<i32>>()
    };
    Batch {
        rows,
        seq_len,
        inputs: tokens(0),
        targets: tokens(1),
        loss_weights: vec![1.0; rows * seq_len],
        document_starts: document_mask.then(|| vec![0; rows * seq_len]),
        goes_on: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestBackend, config};

    #[test]
    fn the_batch_is_learned_by_heart() {
        let config = config(&[
            "data.seq_len=16",
            "train.batch_tokens=32",
            "train.lr=1e-2",
            "train.schedule={ kind = \"constant\", warmup = 0 }",
        ]);
        let mut seen = 0;
        let device = Default::default();
        let bench =
            run::<TestBackend>(&config, 257, Precision::F32, &device, 12, &mut |_| seen += 1);
        assert_eq!((seen, bench.steps.len(), bench.rows), (12, 12, (2, 2)));
        let [first, last] = [0, 11].map(|at| bench.steps[at].loss);
        assert!((first - 257f32.ln()).abs() < 0.5, "{first}");
        assert!(last < first - 0.1, "{first} became {last}");
        assert!(bench.steps.iter().all(|step| step.seconds > 0.0));
    }

    #[test]
    fn rows_of_streams_go_on_from_step_to_step() {
        let config = config(&[
            "data.seq_len=16",
            "data.rows=\"streams\"",
            "model.attention={ kind = \"kda\" }",
            "train.batch_tokens=32",
            "train.lr=1e-30",
        ]);
        let device = Default::default();
        let bench = run::<TestBackend>(&config, 257, Precision::F32, &device, 2, &mut |_| {});
        assert_ne!(bench.steps[0].loss, bench.steps[1].loss, "only what is carried has changed");
    }

    #[test]
    fn targets_are_the_next_tokens() {
        let batch = random_batch(3, 5, 100, 1, true);
        for row in 0..3 {
            let row = row * 5..(row + 1) * 5;
            assert_eq!(batch.inputs[row.clone()][1..], batch.targets[row][..4]);
        }
        assert_eq!(batch, random_batch(3, 5, 100, 1, true));
        assert_ne!(batch.inputs, random_batch(3, 5, 100, 2, true).inputs);
    }
}
