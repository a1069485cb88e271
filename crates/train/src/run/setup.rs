//! Opening a run: everything it needs, new or from its newest checkpoint.

use std::path::PathBuf;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use longwall_data::{Loader, Tokenizer};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;
use longwall_kernels::ops::all_to_all::Peers;
use longwall_model::LanguageModel;

use super::begin::{Beginning, begin, saved_progress};
use super::data::{open_carried, open_data, open_tokenizer};
use super::micro_batches::{check_memory, open_stages, stages_of_ranks};
use super::model::{OpenModel, open_model};
use super::opened::opened;
use super::recorder::{Recorder, RecorderStart};
use super::{RunStart, TrainOptions};
use crate::carried::Carried;
use crate::checkpoint::{Best, CheckpointFolder, CheckpointWriter, State, TokenizerIdentity};
use crate::config::RunConfig;
use crate::console::RunInfo;
use crate::distributed::{Collective, World, check_equal};
use crate::error::TrainError;
use crate::evaluation::Evaluator;
use crate::guard::{GuardState, StepGuard};
use crate::metrics::ValidationRecord;
use crate::noise_scale::NoiseAverages;
use crate::optimiser::Optimiser;
use crate::peak;
use crate::run_folder::RunFolder;
use crate::sampling::Sampler;
use crate::schedule::Schedule;
use crate::timeline::{OpenStage, Stage, Timeline};
use crate::validation::Validator;

/// An open run.
pub(super) struct Run<'a, B: OpBackend> {
    pub config: RunConfig,
    pub device: B::Device,
    pub device_name: String,
    pub collective: &'a dyn Collective<B>,
    /// The ranks that share this one's rows, if any do.
    pub peers: Option<Arc<dyn Peers>>,
    pub run_dir: PathBuf,
    /// Rank 0's.
    pub folder: Option<RunFolder>,
    pub checkpoints: CheckpointWriter,
    pub tokenizer: TokenizerIdentity,
    pub loader: Loader,
    /// If the run validates.
    pub validator: Option<Validator>,
    pub sampler: Option<Sampler>,
    pub model: LanguageModel<Autodiff<B>>,
    pub optimiser: Optimiser<B>,
    /// What this rank's rows of the last step hand over, with rows of streams.
    pub carried: Option<Carried<B>>,
    pub guard: StepGuard,
    pub schedule: Schedule,
    pub recorder: Recorder,
    pub progress: RunProgress,
    pub timeline: Timeline,
    /// The timeline's stages.
    pub stages: Vec<OpenStage>,
    first_step: u64,
    compiles: bool,
}

/// How far a run has come.
#[derive(Clone, Debug, Default)]
pub(super) struct RunProgress {
    /// Finished steps.
    pub step: u64,
    /// Optimiser updates.
    pub updates: u64,
    /// Loss of the last step, unless it was skipped.
    pub loss: Option<f32>,
    /// The best validation so far.
    pub best: Option<Best>,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
    /// Averages of what the gradient noise scale is computed from.
    pub noise: NoiseAverages,
    /// The step of the newest checkpoint.
    pub saved: Option<u64>,
}

/// Opens the run of `config`. A new run's folder is created last, so that a run that cannot start
/// leaves none behind. Among ranks, only rank 0 has the folder; the others open its checkpoint and, once it has prepared
/// them, its data.
pub(super) fn open<'a, B: OpBackend>(
    config: &RunConfig,
    device: &B::Device,
    options: &TrainOptions,
    collective: &'a dyn Collective<B>,
    evaluator: &mut dyn Evaluator<B>,
) -> Result<Run<'a, B>, TrainError> {
    let world = collective.world();
    let Beginning { run_dir, resumed, checkpoint, source } = begin(config, options, collective)?;
    let checkpoint = checkpoint.as_ref();
    let tokenizer = open_tokenizer(config, checkpoint, source.as_ref(), options)?;
    let timeline = config.timeline();
    let vocab_size = tokenizer.vocab_size();
    let stages = open_stages::<B>(config, vocab_size, checkpoint, options, world)?;
    let stages = stages_of_ranks(stages, collective)?;
    check_memory(config, vocab_size, &stages, B::device_kind(), options, world)?;
    if !world.is_first() {
        collective.barrier()?;
    }
    let data = open_data(config, tokenizer, checkpoint, &stages, options, world)?;
    if world.is_first() {
        collective.barrier()?;
    }
    let start = (checkpoint, source);
    let OpenModel { model, optimiser, origin } =
        open_model::<B>(config, &data.tokenizer, start, options.precision, world, device)?;
    let carried = open_carried(&data.loader, checkpoint, &stages, &model, world, device)?;
    let sampler = open_sampler(config, &data.tokenizer, model.max_len())?;
    if !config.train.evaluate.is_empty() || !config.eval.is_empty() {
        // As with the data, rank 0 writes what the others read.
        if !world.is_first() {
            collective.barrier()?;
        }
        evaluator.check(&data.tokenizer, &model.valid()).map_err(TrainError::Unevaluable)?;
        if world.is_first() {
            collective.barrier()?;
        }
    }
    // No rank can fail to start any more, unless they have opened different things.
    if !world.is_alone() {
        check_equal(collective, &opened(&data, checkpoint, origin.as_ref(), &model))?;
    }
    let folder = match resumed {
        None if world.is_first() => {
            let force = options.start == RunStart::Force;
            let folder = RunFolder::create(&run_dir, force)?;
            folder.record_origin(origin.as_ref())?;
            Some(folder)
        }
        resumed => resumed,
    };
    let checkpoints = CheckpointFolder::new(&run_dir);
    let state = checkpoint.map(|checkpoint| &checkpoint.state);
    let progress = saved_progress(folder.as_ref().map(|_| &checkpoints), config, state)?;
    if progress.step > timeline.total_steps() {
        return Err(TrainError::AlreadyLonger {
            tokens: config.train.tokens,
            done: timeline.tokens(progress.step),
            step: progress.step,
        });
    }
    if let Some(folder) = &folder {
        if progress.step < timeline.total_steps() {
            folder.start(config)?;
        }
        evaluator.discard_after(progress.step).map_err(TrainError::Unevaluable)?;
    }
    let recorder =
        open_recorder::<B>(config, vocab_size, state, folder.as_ref(), device, options, world)?;
    let guard = state.map_or_else(GuardState::default, |state| state.guard.clone());
    Ok(Run {
        config: config.clone(),
        device: device.clone(),
        device_name: options.device_name.clone(),
        collective,
        peers: (config.train.context_parallel > 1)
            .then(|| collective.peers(config.train.context_parallel)),
        run_dir,
        folder,
        checkpoints: CheckpointWriter::new(checkpoints),
        tokenizer: TokenizerIdentity::of(&data.tokenizer),
        loader: data.loader,
        validator: data.validator,
        sampler,
        model,
        optimiser,
        carried,
        guard: StepGuard::new(&config.train.skip, guard),
        schedule: config.train.lr_schedule(&timeline),
        recorder,
        first_step: progress.step,
        compiles: options.compiles,
        progress,
        timeline,
        stages,
    })
}

/// The sampler, if the loop samples.
fn open_sampler(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    max_len: Option<usize>,
) -> Result<Option<Sampler>, TrainError> {
    let sample = &config.train.sample;
    match sample.every.is_on() {
        true => Ok(Some(Sampler::new(sample, tokenizer, max_len, config.run.seed)?)),
        false => Ok(None),
    }
}

/// Opens the run's files, truncated to their lengths at the checkpoint.
fn open_recorder<B: OpBackend>(
    config: &RunConfig,
    vocab_size: usize,
    state: Option<&State>,
    folder: Option<&RunFolder>,
    device: &B::Device,
    options: &TrainOptions,
    world: World,
) -> Result<Recorder, TrainError> {
    let measure =
        || (B::device_kind() == DeviceKind::Cpu).then(|| peak::of_this_machine::<B>(device));
    let peak_of_one = options.peak_flops.or_else(measure);
    let timeline = config.timeline();
    let start = RecorderStart {
        step: state.map_or(0, |state| state.step),
        metrics_bytes: state.map_or(0, |state| state.metrics_bytes),
        samples_bytes: state.map_or(0, |state| state.samples_bytes),
        seconds: state.map_or(0.0, |state| state.seconds),
        flops_per_token: {
            let of = |stage: &Stage| config.flops_per_token(stage, vocab_size);
            timeline.stages().iter().map(of).collect()
        },
        timeline,
        tensorboard: config.run.tensorboard,
        peak_flops: peak_of_one.map(|peak| peak * world.size as f64),
    };
    Recorder::open(folder, start)
}

impl<B: OpBackend> Run<'_, B> {
    /// The ranks.
    pub fn world(&self) -> World {
        self.collective.world()
    }

    /// What the console shows at the beginning.
    pub fn info(&self) -> RunInfo {
        RunInfo {
            run_dir: self.run_dir.clone(),
            device: self.device_name.clone(),
            parameters: self.model.num_params() as u64,
            data_tokens: self.loader.tokens(),
            total_steps: self.timeline.total_steps(),
            first_step: self.first_step,
            stages: self.stages.clone(),
            peak_flops: self.recorder.peak_flops(),
            compiles: self.compiles,
            optimiser: self.optimiser.assignment(),
            lr: self.config.train.lr,
        }
    }

    /// The stage of the next step.
    pub fn stage(&self) -> OpenStage {
        self.stages[self.timeline.index(self.progress.step)]
    }

    /// Whether the next step may compile kernels: the first step of this process, or of a stage, whose tensors have
    /// other shapes.
    pub fn compiles_next(&self) -> bool {
        [self.first_step, self.stage().stage.first_step].contains(&self.progress.step)
    }

    /// Tokens of the finished steps.
    pub fn tokens(&self) -> u64 {
        self.timeline.tokens(self.progress.step)
    }

    /// The loader's first row that is not trained on yet.
    pub fn next_row(&self) -> u64 {
        let (rows, loaded) = (self.loader.rows(), self.loader.seq_len());
        let tokens = self.timeline.tokens_by_stage(self.progress.step);
        let stages = self.timeline.stages().iter().zip(tokens);
        stages.map(|(stage, tokens)| rows.taken(tokens, stage.seq_len, loaded)).sum()
    }
}
