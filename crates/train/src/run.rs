//! The training loop, in the order in which data flows: loader, batch, forward and backward, clip,
//! optimiser, metrics, validation, samples, checkpoint, evaluations.

mod begin;
mod data;
mod events;
mod micro_batches;
mod model;
mod opened;
mod origin;
mod recorder;
mod setup;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use longwall_data::Progress;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::Allocation;
use longwall_model::Precision;

use crate::checkpoint::CheckpointFolder;
use crate::config::RunConfig;
use crate::console::{Console, Ending};
use crate::distributed::{Alone, Collective, any_of_ranks};
use crate::error::{TrainError, last_checkpoint};
use crate::evaluation::Evaluator;
use crate::grad_accumulation::{
    AccumulationPlan, BatchScalars, FinishedGradients, forward_backward, weight_sum,
};
use crate::gradients::clip_factor;
use crate::metrics::{self, ValidationRecord};
use crate::signals::StopFlag;
use crate::timeline::OpenStage;
pub(crate) use micro_batches::default_micro_batch;
pub use origin::Source;
use recorder::StepFacts;
pub use recorder::peak_resident_bytes;
use setup::Run;

/// How a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunStart {
    /// In a new folder.
    New,
    /// As [`RunStart::New`], but deletes an existing run first.
    Force,
    /// From the newest checkpoint in this run folder, or from the first step if it has none.
    Resume(PathBuf),
}

/// What the caller decides about a run, besides its configuration.
pub struct TrainOptions<'a> {
    /// How it starts.
    pub start: RunStart,
    /// The weights that a new run starts from. With `None` they are initial ones.
    pub from: Option<Source>,
    /// Whether every byte of prepared shards is compared with its checksum first.
    pub verify: bool,
    /// Makes the run write a checkpoint and end.
    pub stop: StopFlag,
    /// Shows the preparation of the data.
    pub progress: &'a dyn Progress,
    /// The device in words, for console and results.
    pub device_name: String,
    /// The type of the model's matrices and activations.
    pub precision: Precision,
    /// Whether the first step must compile the device's kernels.
    pub compiles: bool,
    /// Peak FLOP/s of the device. With `None` it is measured on the CPU, and there is no MFU elsewhere.
    pub peak_flops: Option<f64>,
    /// Bytes of memory that the run may take on the device, if known: a run that needs more is refused.
    pub available_memory: Option<u64>,
    /// Returns the bytes of device memory in use. With `None`, the console shows the peak resident size
    /// of the process.
    pub memory: Option<&'a dyn Fn() -> Option<u64>>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The run's folder.
    pub run_dir: PathBuf,
    /// Finished steps.
    pub step: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Skipped steps.
    pub skipped: u64,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
}

impl Outcome {
    /// Whether the run reached its last step; if not, it was stopped and can be resumed.
    pub fn is_finished(&self) -> bool {
        self.step >= self.total_steps
    }
}

/// Trains the model of `config` on `device`.
///
/// `config` must be valid ([`RunConfig::load`] ensures it); for [`RunStart::Resume`] it is the run's own,
/// with overrides ([`config_of`](crate::run_folder::config_of)). `evaluator` runs `train.evaluate`.
///
/// # Errors
/// See [`TrainError`]. If there is a checkpoint, the error names the last one.
pub fn train<B: OpBackend>(
    config: &RunConfig,
    device: &B::Device,
    options: &TrainOptions,
    console: &mut dyn Console,
    evaluator: &mut dyn Evaluator<B>,
) -> Result<Outcome, TrainError> {
    train_as_rank(config, device, options, &Alone, console, evaluator)
}

/// As [`train`], as one of the ranks that `collective` connects, each of which calls this with the same configuration
/// and start. Rank 0 alone writes the run's folder, validates, samples and evaluates.
///
/// # Errors
/// As [`train`]; also when another rank ends early or fails.
pub fn train_as_rank<B: OpBackend>(
    config: &RunConfig,
    device: &B::Device,
    options: &TrainOptions,
    collective: &dyn Collective<B>,
    console: &mut dyn Console,
    evaluator: &mut dyn Evaluator<B>,
) -> Result<Outcome, TrainError> {
    B::set_allocation(device, Allocation::Exact);
    let run = setup::open::<B>(config, device, options, collective, evaluator);
    let outcome = run.and_then(|run| {
        let run_dir = run.run_dir.clone();
        let _panics = collective.world().is_first().then(|| NameInPanic(&run_dir));
        let outcome = steps(run, options, console, evaluator);
        // The other ranks do not know which checkpoints rank 0 has finished.
        let name = |error| match collective.world().is_first() {
            true => name_last_checkpoint(error, &run_dir),
            false => error,
        };
        outcome.map_err(name)
    });
    let outcome = outcome.inspect_err(|error| collective.fail(&error.to_string()));
    B::set_allocation(device, Allocation::Pages);
    outcome
}

fn steps<B: OpBackend>(
    mut run: Run<B>,
    options: &TrainOptions,
    console: &mut dyn Console,
    evaluator: &mut dyn Evaluator<B>,
) -> Result<Outcome, TrainError> {
    let (clip, world, collective) = (run.config.train.clip.0, run.world(), run.collective);
    // One of several ranks stops when all have heard of it, after a step.
    let asked = || options.stop.is_raised();
    let within_step = if world.is_alone() { options.stop.clone() } else { StopFlag::new() };
    // Rank 0 has made the run's folder. A stop that any rank was asked for during the start is one of all.
    if any_of_ranks(collective, asked())? {
        within_step.raise();
    }
    console.begin(&run.info());
    run.evaluate(console, evaluator)?; // Those that the run was stopped in.
    let mut stop = within_step.is_raised();
    let mut last_stage = run.stage();
    while run.progress.step < run.timeline.total_steps() && !stop {
        let started = Instant::now();
        let step = run.progress.step;
        collective.begin_step(step + 1, run.compiles_next());
        if run.stage() != last_stage {
            last_stage = run.stage();
            // Releases the memory of the last stage's activations.
            B::set_allocation(&run.device, Allocation::Exact);
        }

        // Rows and window of this step: a function only of the step. Shorter rows are parts of the loader's.
        let OpenStage { stage, micro_batch } = run.stage();
        run.model.set_windows(&run.config.model_of(&stage));
        let tokens = stage.batch_tokens as usize;
        let batch = run.loader.try_shorter(run.next_row(), tokens, stage.seq_len)?;
        let weights = weight_sum(&batch);
        let groups = world.groups(stage.context_parallel);
        let batch = if groups.is_alone() { batch } else { batch.part(groups.part(batch.rows)) };

        // Forward and backward, one micro-batch after another.
        let measure_noise = run.timeline.is_due(run.config.train.noise_scale.every, step + 1);
        let (recompute, z_loss) = (run.config.train.recompute, run.config.train.z_loss as f32);
        let plan = AccumulationPlan { micro_batch, recompute, z_loss, measure_noise };
        let (within, device) = (&within_step, &run.device);
        let (carried, peers) = (run.carried.as_ref(), run.peers.as_ref());
        // Gradients go to the ranks that own their parameters, those of the last blocks first.
        let mut reduction = run.optimiser.reduction(collective);
        let mut send = |gradients: &mut _, parameters| reduction.send(gradients, parameters);
        let send: Option<FinishedGradients<'_, B>> = Some(&mut send);
        let pass = forward_backward(
            &run.model, &batch, carried, peers, weights, plan, within, send, device,
        );
        let Some(mut pass) = pass else {
            // Asked to stop: a resume repeats this step from its beginning.
            break;
        };

        // Loss and norm are those of the whole batch.
        pass.gradients = reduction.finish(pass.gradients)?;
        let (scalars, any_asked) = pass.scalars_of_ranks(asked(), collective)?;
        let BatchScalars { loss, grad_norm, .. } = scalars;

        // Clip and update, unless the step is skipped.
        let carried = pass.carried.take();
        let lr = run.schedule.lr(step);
        let skip = run.guard.judge(loss, grad_norm, weights);
        if skip.is_none() {
            run.record_noise(&pass, grad_norm)?;
            run = run.update(pass.gradients, lr, clip_factor(clip, grad_norm))?;
        }
        run.carry(carried, skip);
        run.progress.step += 1;
        run.progress.loss = skip.is_none().then_some(loss);

        // Metrics.
        let seconds = started.elapsed().as_secs_f64();
        let facts = StepFacts { step: run.progress.step, scalars, lr, seconds, skip };
        run.recorder.step(&facts, memory(options), console)?;
        collective.end_step();
        run.check_skips(skip)?;

        // Validation, samples, checkpoint, evaluations, when they are due.
        run.after_step(console, evaluator)?;
        stop = if world.is_alone() { asked() } else { any_asked };
    }
    run.save_checkpoint(console)?;
    run.wait_for_checkpoint(console)?;
    if run.progress.step >= run.timeline.total_steps() && world.is_first() {
        run.finish()?;
    }
    // No rank ends before the run's files are written.
    collective.barrier()?;
    Ok(end(&run, console))
}

fn end<B: OpBackend>(run: &Run<B>, console: &mut dyn Console) -> Outcome {
    let outcome = Outcome {
        run_dir: run.run_dir.clone(),
        step: run.progress.step,
        total_steps: run.timeline.total_steps(),
        skipped: run.guard.state().skipped,
        validation: run.progress.validation.clone(),
    };
    console.end(&Ending {
        step: outcome.step,
        total_steps: outcome.total_steps,
        skipped: outcome.skipped,
        seconds: run.recorder.seconds(),
        validation: outcome.validation.clone(),
        run_dir: outcome.run_dir.clone(),
    });
    outcome
}

/// Memory in use: the device's if the caller knows it, else the peak of this process.
fn memory(options: &TrainOptions) -> Option<u64> {
    options.memory.map_or_else(recorder::peak_resident_bytes, |memory| memory())
}

/// Adds the last good checkpoint to `error`, if there is one.
fn name_last_checkpoint(error: TrainError, run_dir: &Path) -> TrainError {
    let folder = CheckpointFolder::new(run_dir);
    match folder.steps().ok().and_then(|steps| steps.last().copied()) {
        Some(step) => TrainError::AfterCheckpoint {
            error: Box::new(error),
            checkpoint: folder.step_dir(step),
            run_dir: run_dir.to_owned(),
        },
        None => error,
    }
}

/// Logs, when the run panics, what [`name_last_checkpoint`] adds to an error.
struct NameInPanic<'a>(&'a Path);

impl Drop for NameInPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            tracing::error!("{}", after_panic(self.0));
        }
    }
}

/// What is there after a panic.
fn after_panic(run_dir: &Path) -> String {
    let begin = match metrics::last_step(run_dir) {
        Some(step) => format!("the run ends after step {step}, because of the panic above"),
        None => "the run ends before its first step, because of the panic above".to_owned(),
    };
    let steps = CheckpointFolder::new(run_dir).steps().unwrap_or_default();
    let rest = match steps.last() {
        Some(&step) => last_checkpoint(&CheckpointFolder::new(run_dir).step_dir(step), run_dir),
        None => "there is no checkpoint yet".to_owned(),
    };
    format!("{begin}\n  {rest}")
}

#[cfg(test)]
pub(crate) mod tests;
