//! Opening a run: everything it needs, fresh or from its newest checkpoint.

use burn::backend::Autodiff;
use burn::module::Module;
use longwall_data::{Loader, Split, Tokenizer};
use longwall_kernels::backend::OpBackend;
use longwall_model::cost::train_flops_per_token;
use longwall_model::{LanguageModel, weights};

use super::recorder::{Recorder, RecorderStart};
use super::{Start, TrainOptions};
use crate::checkpoint::{Best, Checkpoint, CheckpointFolder, TokenizerIdentity, Which};
use crate::config::RunConfig;
use crate::console::RunInfo;
use crate::error::TrainError;
use crate::guard::{GuardState, StepGuard};
use crate::metrics::ValidationRecord;
use crate::optimiser::Optimiser;
use crate::peak;
use crate::run_folder::RunFolder;
use crate::sampling::Sampler;
use crate::schedule::Schedule;
use crate::validation::Validator;

/// Tokens of a micro-batch when the configuration leaves its size open.
const CPU_MICRO_BATCH_TOKENS: usize = 1 << 13;
/// As [`CPU_MICRO_BATCH_TOKENS`], on a GPU.
const GPU_MICRO_BATCH_TOKENS: usize = 1 << 16;

/// An open run.
pub(super) struct Run<B: OpBackend> {
    pub config: RunConfig,
    pub device: B::Device,
    pub device_name: String,
    pub folder: RunFolder,
    pub checkpoints: CheckpointFolder,
    pub tokenizer: TokenizerIdentity,
    pub loader: Loader,
    pub validator: Option<Validator>,
    pub sampler: Option<Sampler>,
    pub model: LanguageModel<Autodiff<B>>,
    pub optimiser: Optimiser<B>,
    pub guard: StepGuard,
    pub schedule: Schedule,
    pub recorder: Recorder,
    pub place: Place,
    pub total_steps: u64,
    /// Rows of a step, and rows of one of its micro-batches.
    pub rows: usize,
    pub micro_batch: usize,
    first_step: u64,
}

/// Where the run stands.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    /// Finished steps.
    pub step: u64,
    /// Steps that the optimiser took.
    pub updates: u64,
    /// Loss of the last step, unless it was skipped.
    pub loss: Option<f32>,
    /// The best validation so far.
    pub best: Option<Best>,
    /// The last validation.
    pub validation: Option<ValidationRecord>,
    /// The step of the newest checkpoint.
    pub saved: Option<u64>,
}

/// Opens the run of `config`. A new run's folder is made last, so that a run that cannot start
/// leaves none behind.
pub(super) fn open<B: OpBackend>(
    config: &RunConfig,
    device: &B::Device,
    options: &TrainOptions,
) -> Result<Run<B>, TrainError> {
    // What is there already.
    let run_dir = match &options.start {
        Start::Resume(path) => path.clone(),
        Start::New | Start::Force => config.run_dir(),
    };
    let force = options.start == Start::Force;
    let checkpoints = CheckpointFolder::new(&run_dir);
    let (resumed_folder, checkpoint) = match &options.start {
        Start::New | Start::Force => {
            RunFolder::check_new(&run_dir, force)?;
            (None, None)
        }
        Start::Resume(_) => {
            let folder = RunFolder::open(&run_dir)?;
            (Some(folder), newest(&checkpoints, &run_dir)?)
        }
    };

    // Tokenizer and data.
    let tokenizer = Tokenizer::load(&config.tokenizer)?;
    let identity = TokenizerIdentity::of(&tokenizer);
    if let Some(checkpoint) = &checkpoint {
        checkpoint.check_tokenizer(&identity)?;
        checkpoint.check_config(config)?;
    }
    let (seed, seq_len) = (config.run.seed, config.data.seq_len);
    let open = |split| Loader::open(&config.data, &tokenizer, seed, split, options.progress);
    let loader = open(Split::Train)?;
    if let Some(checkpoint) = &checkpoint {
        loader.check_cursor(&checkpoint.state.cursor)?;
    }
    let micro_batch = micro_batch::<B>(config, checkpoint.as_ref());
    let validator = match config.train.validate.every.is_on() {
        true => Some(Validator::new(open(Split::Validation)?, &tokenizer, micro_batch)),
        false => None,
    };

    // Model and optimiser.
    let vocab_size = tokenizer.vocab_size();
    let mut model = LanguageModel::new(&config.model, vocab_size, seq_len, seed, device);
    if let Some(checkpoint) = &checkpoint {
        model = weights::load(model, &checkpoint.weights())?;
    }
    let mut optimiser = Optimiser::new(&config.train.optimiser, &model);
    if let Some(checkpoint) = &checkpoint {
        optimiser.load(&checkpoint.optimizer(), device)?;
    }
    let sample = &config.train.sample;
    let sampler = match sample.every.is_on() {
        true => Some(Sampler::new(sample, &tokenizer, model.max_len(), seed)?),
        false => None,
    };

    // The run folder, and the place in the run.
    let folder = match resumed_folder {
        Some(folder) => folder,
        None => RunFolder::create(&run_dir, force)?,
    };
    let state = checkpoint.map(|checkpoint| checkpoint.state);
    let place = place(&checkpoints, config, state.as_ref())?;
    let total_steps = config.train.total_steps();
    if place.step < total_steps {
        folder.start(config)?;
    }
    let peak_flops = options
        .peak_flops
        .or_else(|| (B::device_kind() == "cpu").then(|| peak::measure::<B>(device)));
    let recorder = Recorder::open(
        &folder,
        RecorderStart {
            step: place.step,
            metrics_bytes: state.as_ref().map_or(0, |state| state.metrics_bytes),
            samples_bytes: state.as_ref().map_or(0, |state| state.samples_bytes),
            seconds: state.as_ref().map_or(0.0, |state| state.seconds),
            total_steps,
            batch_tokens: config.train.batch_tokens,
            tensorboard: config.run.tensorboard,
            flops_per_token: train_flops_per_token(&config.model, vocab_size, seq_len),
            peak_flops,
        },
    )?;
    let guard_state = state.map_or_else(GuardState::default, |state| state.guard);
    Ok(Run {
        config: config.clone(),
        device: device.clone(),
        device_name: options.device_name.clone(),
        folder,
        checkpoints,
        tokenizer: identity,
        loader,
        validator,
        sampler,
        model,
        optimiser,
        guard: StepGuard::new(&config.train.skip, guard_state),
        schedule: config.train.lr_schedule(),
        recorder,
        first_step: place.step,
        place,
        total_steps,
        rows: config.train.batch_rows(seq_len),
        micro_batch,
    })
}

/// The newest checkpoint, once what a killed run left half-written is gone.
fn newest(
    checkpoints: &CheckpointFolder,
    run_dir: &std::path::Path,
) -> Result<Option<Checkpoint>, TrainError> {
    checkpoints.remove_leftovers()?;
    if checkpoints.steps()?.is_empty() {
        tracing::info!("{} has no checkpoint yet: starting from the first step", run_dir.display());
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(run_dir, Which::Latest)?;
    tracing::info!("resuming from {}", checkpoint.path.display());
    Ok(Some(checkpoint))
}

/// Rows of a micro-batch. A resumed run keeps its own, so that gradients add up in the same order.
fn micro_batch<B: OpBackend>(config: &RunConfig, checkpoint: Option<&Checkpoint>) -> usize {
    let budget = match B::device_kind() {
        "cpu" => CPU_MICRO_BATCH_TOKENS,
        _ => GPU_MICRO_BATCH_TOKENS,
    };
    match (config.train.micro_batch, checkpoint) {
        (None, Some(checkpoint)) => checkpoint.state.micro_batch,
        _ => config.train.micro_batch_rows(config.data.seq_len, budget),
    }
}

/// The place of a checkpoint's state, or the beginning.
fn place(
    checkpoints: &CheckpointFolder,
    config: &RunConfig,
    state: Option<&crate::checkpoint::State>,
) -> Result<Place, TrainError> {
    let Some(state) = state else { return Ok(Place::default()) };
    // A run killed between a checkpoint and its mark as the best one.
    if let Some(best) =
        state.best.filter(|best| config.train.checkpoint.best && best.step == state.step)
        && checkpoints.best()? != Some(best)
    {
        checkpoints.mark_best(best)?;
    }
    Ok(Place {
        step: state.step,
        updates: state.updates,
        loss: state.loss,
        best: state.best,
        validation: state.validation.clone(),
        saved: Some(state.step),
    })
}

impl<B: OpBackend> Run<B> {
    /// What the console shows at the beginning.
    pub fn info(&self) -> RunInfo {
        RunInfo {
            run_dir: self.folder.path().to_owned(),
            device: self.device_name.clone(),
            parameters: self.model.num_params() as u64,
            data_tokens: self.loader.tokens(),
            total_steps: self.total_steps,
            first_step: self.first_step,
            batch_tokens: self.config.train.batch_tokens,
            rows: (self.rows, self.micro_batch),
            peak_flops: self.recorder.peak_flops(),
        }
    }
}
