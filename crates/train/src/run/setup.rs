//! Opening a run: everything it needs, new or from its newest checkpoint.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module};
use longwall_data::{Loader, Rows, Split, Tokenizer, verify_shards};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;
use longwall_kernels::ops::all_to_all::Peers;
use longwall_model::cost::Parameters;
use longwall_model::{LanguageModel, Precision};

use super::model::{OpenModel, open_model};
use super::opened::opened;
use super::recorder::{Recorder, RecorderStart};
use super::{RunStart, Source, TrainOptions};
use crate::carried::Carried;
use crate::checkpoint::{
    Best, Checkpoint, CheckpointFolder, CheckpointSelector, CheckpointWriter, State,
    TokenizerIdentity,
};
use crate::config::RunConfig;
use crate::console::RunInfo;
use crate::distributed::{Collective, World, check_equal, gather_numbers, of_first};
use crate::error::TrainError;
use crate::evaluation::Evaluator;
use crate::guard::{GuardState, StepGuard};
use crate::memory::{self, Estimate};
use crate::metrics::ValidationRecord;
use crate::noise_scale::NoiseAverages;
use crate::optimiser::Optimiser;
use crate::peak;
use crate::run_folder::{RunFolder, load_tokenizer};
use crate::sampling::Sampler;
use crate::schedule::Schedule;
use crate::timeline::{OpenStage, Stage, Timeline};
use crate::validation::Validator;

/// Tokens of a micro-batch on the CPU, if the configuration does not set its size.
const CPU_MICRO_BATCH_TOKENS: usize = 1 << 13;

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
    if !config.train.evaluate.is_empty() {
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

/// Where a run begins.
struct Beginning {
    run_dir: PathBuf,
    /// The folder of a resumed run, on rank 0.
    resumed: Option<RunFolder>,
    checkpoint: Option<Checkpoint>,
    /// The weights that it starts from, if not from its checkpoint.
    source: Option<Source>,
}

/// Opens the folder of a resumed run, and its checkpoint; checks that a new run may have its folder.
fn begin<B: OpBackend>(
    config: &RunConfig,
    options: &TrainOptions,
    collective: &dyn Collective<B>,
) -> Result<Beginning, TrainError> {
    let first = collective.world().is_first();
    let (run_dir, resumed, checkpoint) = match &options.start {
        RunStart::Resume(path) => {
            let folder = first.then(|| RunFolder::open(path)).transpose()?;
            (path.clone(), folder, newest(path, collective)?)
        }
        RunStart::New | RunStart::Force => {
            if first {
                let force = options.start == RunStart::Force;
                RunFolder::check_new(&config.run_dir(), force)?;
            }
            (config.run_dir(), None, None)
        }
    };
    let source = match (&checkpoint, &options.start) {
        (Some(_), _) => None,
        (None, RunStart::Resume(path)) => Source::of(config, None, Some(path))?,
        (None, _) => Source::of(config, options.from.as_ref(), None)?,
    };
    Ok(Beginning { run_dir, resumed, checkpoint, source })
}

/// The data, and the tokenizer it was encoded with.
pub(super) struct Data {
    pub tokenizer: Tokenizer,
    pub loader: Loader,
    validator: Option<Validator>,
}

/// Opens the tokenizer, and checks that it and the configuration match the checkpoint.
fn open_tokenizer(
    config: &RunConfig,
    checkpoint: Option<&Checkpoint>,
    source: Option<&Source>,
    options: &TrainOptions,
) -> Result<Tokenizer, TrainError> {
    let tokenizer = match &options.start {
        RunStart::Resume(run_dir) => load_tokenizer(run_dir, &config.tokenizer)?,
        RunStart::New | RunStart::Force => Tokenizer::load(&config.tokenizer)?,
    };
    if let Some(checkpoint) = checkpoint {
        checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
        checkpoint.check_config(config)?;
    }
    if let Some(source) = source {
        source.checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    }
    Ok(tokenizer)
}

/// Refuses a run that needs more memory than there is, before its data are prepared.
fn check_memory(
    config: &RunConfig,
    vocab_size: usize,
    stages: &[OpenStage],
    device: DeviceKind,
    options: &TrainOptions,
    world: World,
) -> Result<(), TrainError> {
    let (precision, Some(available)) = (options.precision, options.available_memory) else {
        return Ok(());
    };
    // Ranks share a part of it: their micro-batches were chosen by the estimate.
    for open in stages.iter().filter(|_| world.is_alone()) {
        let needed =
            memory::least_for_training(config, vocab_size, open.shape(), precision, device);
        if needed > u128::from(available) {
            return Err(TrainError::Memory {
                parameters: Parameters::of(&config.model, vocab_size, config.data.seq_len).total(),
                micro_batch: open.micro_batch,
                needed,
                available,
            });
        }
    }
    if device == DeviceKind::Cuda {
        match estimated_memory(config, vocab_size, stages, precision, world, available) {
            Ok(estimate) => tracing::info!("{estimate}"),
            Err(shortage) => tracing::warn!("{shortage}"),
        }
    }
    Ok(())
}

/// The estimate of a GPU run in words; as an error if a micro-batch that was set, or that a checkpoint has, may not fit.
fn estimated_memory(
    config: &RunConfig,
    vocab_size: usize,
    stages: &[OpenStage],
    precision: Precision,
    world: World,
    available: u64,
) -> Result<String, String> {
    let ranks = world.size;
    let estimate = |open: &OpenStage| {
        let part = open.stage.of_rank(world).expect("the rows were divided over the ranks");
        let part = part.open(open.micro_batch);
        Estimate::of(config, vocab_size, part, precision).on_ranks(ranks, precision)
    };
    let estimates = stages.iter().map(|open| (open, estimate(open)));
    let largest = estimates.max_by_key(|(_, estimate)| estimate.total());
    let (OpenStage { stage, micro_batch }, estimate) = largest.expect("a run has a stage");
    let staged = config.timeline().is_staged();
    let rows = format!("{micro_batch} rows of {} tokens", stage.seq_len);
    if estimate.total() <= available {
        return Ok(format!("GPU memory, estimated: {estimate}, micro-batches of {rows}"));
    }
    let part = &stage.of_rank(world).expect("the rows were divided over the ranks");
    let fitting =
        memory::largest_micro_batch(config, part, vocab_size, precision, ranks, Some(available));
    let remedy = match fitting {
        Some(rows) if staged => format!("set micro_batch = {rows} for these rows' stage"),
        Some(rows) => format!("set train.micro_batch = {rows}"),
        None => "set train.recompute = true, share rows (train.context_parallel), set train.validate.every = \
                 \"never\" if they are shared, or choose a smaller model"
            .to_owned(),
    };
    Err(format!(
        "micro-batches of {rows} are estimated to need {estimate}, and {:.1} GB are \
         available\n  hint: if memory runs out, {remedy}",
        available as f64 / 1e9
    ))
}

/// Opens the loaders, and checks that they match the checkpoint.
fn open_data(
    config: &RunConfig,
    tokenizer: Tokenizer,
    checkpoint: Option<&Checkpoint>,
    stages: &[OpenStage],
    options: &TrainOptions,
    world: World,
) -> Result<Data, TrainError> {
    let (seed, progress) = (config.run.seed, options.progress);
    let open = |split| Loader::open(&config.data, &tokenizer, seed, split, progress);
    let loader = open(Split::Train)?;
    if options.verify && world.is_first() {
        for folder in loader.prepared_folders() {
            let report = verify_shards(&folder, progress)?.into_result()?;
            tracing::info!(
                "{} shards in {} are as they were written",
                report.shards.len(),
                folder.display()
            );
        }
    }
    if world.is_first() {
        warn_of_cut_examples(&loader, stages);
    }
    if let Some(checkpoint) = checkpoint {
        loader.check_cursor(&checkpoint.state.cursor)?;
    }
    let validator = match config.train.validate.every.is_on() {
        true => {
            let rows = validation_rows(stages, config.data.seq_len);
            Some(Validator::new(open(Split::Validation)?, &tokenizer, rows))
        }
        false => None,
    };
    Ok(Data { tokenizer, loader, validator })
}

/// What this rank's rows of the next step go on from, if they are rows of streams: those of a valid configuration are as
/// many in all stages.
fn open_carried<B: OpBackend>(
    loader: &Loader,
    checkpoint: Option<&Checkpoint>,
    stages: &[OpenStage],
    model: &LanguageModel<Autodiff<B>>,
    world: World,
    device: &B::Device,
) -> Result<Option<Carried<B>>, TrainError> {
    if loader.rows() != Rows::Streams {
        return Ok(None);
    }
    let rows = stages[0].stage.rows();
    loader.check_streams(rows)?;
    let path = checkpoint.map(Checkpoint::carried).transpose()?.flatten();
    Ok(Some(match path {
        Some(path) => Carried::load(&path, model, rows, world, device)?,
        None => Carried::nothing(model, world.part(rows).len(), device),
    }))
}

/// Warns of stages with rows that are shorter than generated examples: those lose their ends, where often all their
/// targets are.
fn warn_of_cut_examples(loader: &Loader, stages: &[OpenStage]) {
    let lengths: BTreeSet<usize> = stages.iter().map(|open| open.stage.seq_len).collect();
    for seq_len in lengths.into_iter().filter(|&seq_len| seq_len < loader.seq_len()) {
        for (name, share) in loader.cut_examples(seq_len) {
            tracing::warn!(
                "{name}: a stage has rows of {seq_len} tokens, which keep {:.1} % of the examples' targets; what is \
                 longer is cut\n  hint: make the examples shorter (max_len, or less of what they are made of), or \
                 begin with longer rows",
                100.0 * share
            );
        }
    }
}

/// Rows of `seq_len` tokens that are validated at a time: as many tokens as a rank has of the largest micro-batch.
fn validation_rows(stages: &[OpenStage], seq_len: usize) -> usize {
    let rows = stages.iter().map(|open| open.micro_batch * open.stage.tokens_of_rank() / seq_len);
    rows.max().unwrap_or_default().max(1)
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

/// Removes what a killed run left incomplete, and opens the newest checkpoint: rank 0's on all ranks.
fn newest<B: OpBackend>(
    run_dir: &Path,
    collective: &dyn Collective<B>,
) -> Result<Option<Checkpoint>, TrainError> {
    const NONE: u64 = u64::MAX;
    let first = collective.world().is_first();
    let newest = match first {
        true => {
            let checkpoints = CheckpointFolder::new(run_dir);
            checkpoints.remove_leftovers()?;
            checkpoints.steps()?.last().copied()
        }
        false => None,
    };
    let step = of_first(collective, newest.unwrap_or(NONE))?;
    if step == NONE {
        let run = run_dir.display();
        tracing::info!("{run} has no checkpoint yet: starting from the first step");
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(run_dir, CheckpointSelector::Step(step))?;
    checkpoint.check_resumable()?;
    tracing::info!("resuming from {}", checkpoint.path.display());
    Ok(Some(checkpoint))
}

/// The stages with their micro-batches. A resumed run keeps its own, so that gradients are summed in the same order.
fn open_stages<B: OpBackend>(
    config: &RunConfig,
    vocab_size: usize,
    checkpoint: Option<&Checkpoint>,
    options: &TrainOptions,
    world: World,
) -> Result<Vec<OpenStage>, TrainError> {
    let (precision, available) = (options.precision, options.available_memory);
    let open = |stage: &Stage| {
        let part = &stage.of_rank(world)?;
        let kept = checkpoint.filter(|_| stage.micro_batch.is_none());
        let kept = kept.and_then(|checkpoint| checkpoint.state.micro_batch_of(stage));
        // The measurement of the noise scale may have been turned on since.
        let kept = kept.filter(|rows| part.rows() / rows >= part.least_micro_batches);
        // Other ranks may have had another number of rows.
        let kept = kept.filter(|rows| world.is_alone() || part.rows().is_multiple_of(*rows));
        let ranks = world.size;
        let chosen =
            || default_micro_batch::<B>(config, part, vocab_size, precision, ranks, available);
        let micro_batch = kept.or_else(chosen).ok_or_else(|| TrainError::NoMicroBatchFits {
            estimate: Estimate::of(config, vocab_size, part.open(1), precision)
                .on_ranks(ranks, precision),
            available: available.unwrap_or_default(),
        })?;
        Ok(stage.open(micro_batch))
    };
    config.timeline().stages().iter().map(open).collect()
}

/// The stages with the smallest micro-batches that a rank has chosen: how much memory is left may differ.
fn stages_of_ranks<B: OpBackend>(
    mut stages: Vec<OpenStage>,
    collective: &dyn Collective<B>,
) -> Result<Vec<OpenStage>, TrainError> {
    let chosen = stages.iter().map(|open| open.micro_batch as u64);
    for theirs in gather_numbers(collective, chosen)? {
        for (open, theirs) in stages.iter_mut().zip(theirs) {
            open.micro_batch = open.micro_batch.min(theirs as usize);
        }
    }
    Ok(stages)
}

/// Rows of a micro-batch of a new run: those the configuration sets, else the largest divisor of a step's rows
/// within the device's budget of tokens and, on a GPU, within the `available` bytes by the estimate. `None` if
/// not even one row fits.
pub(crate) fn default_micro_batch<B: OpBackend>(
    config: &RunConfig,
    stage: &Stage,
    vocab_size: usize,
    precision: Precision,
    ranks: usize,
    available: Option<u64>,
) -> Option<usize> {
    match (stage.micro_batch, B::device_kind()) {
        (Some(rows), _) => Some(rows),
        (None, DeviceKind::Cpu) => Some(stage.micro_batch_rows(CPU_MICRO_BATCH_TOKENS)),
        (None, DeviceKind::Cuda) => {
            memory::largest_micro_batch(config, stage, vocab_size, precision, ranks, available)
        }
    }
}

/// The progress in a checkpoint's state; without one, none. Completes what a killed run left in `checkpoints`.
fn saved_progress(
    checkpoints: Option<&CheckpointFolder>,
    config: &RunConfig,
    state: Option<&State>,
) -> Result<RunProgress, TrainError> {
    let Some(state) = state else { return Ok(RunProgress::default()) };
    // A run may have been killed after it wrote its best checkpoint and before it marked it as best.
    if let Some(best) = state.best_here(config)
        && let Some(checkpoints) = checkpoints
        && checkpoints.best()? != Some(best)
    {
        checkpoints.mark_best(best)?;
    }
    Ok(RunProgress {
        step: state.step,
        updates: state.updates,
        loss: state.loss,
        best: state.best,
        noise: state.noise,
        // Not the one of an earlier part, if validation is off now.
        validation: state.validation.clone().filter(|_| config.train.validate.every.is_on()),
        saved: Some(state.step),
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::config;

    /// A micro-batch that fitted on eight GPUs, and is kept on two: each has more of the optimiser's state.
    #[test]
    fn a_micro_batch_that_no_longer_fits_on_fewer_gpus_is_named_with_one_that_does() {
        let config = config(&["model.layers=12", "model.width=768", "model.heads=12"]);
        let stage = Stage { batch_tokens: 64 * 1024, seq_len: 1024, ..config.base_stage() };
        let kept = [Stage { micro_batch: None, ..stage }.open(8)];
        let needed = |ranks: usize| {
            let estimate = Estimate::of(&config, 50_257, kept[0], Precision::Bf16);
            estimate.on_ranks(ranks, Precision::Bf16).total()
        };
        let available = (needed(8) + needed(2)) / 2;
        let estimated = |size: usize| {
            let world = World { rank: 0, size };
            estimated_memory(&config, 50_257, &kept, Precision::Bf16, world, available)
        };
        assert!(estimated(8).unwrap().ends_with("micro-batches of 8 rows of 1024 tokens"));
        let warning = estimated(2).unwrap_err();
        assert!(
            warning.starts_with("micro-batches of 8 rows of 1024 tokens are estimated to need")
        );
        let rows = warning.rsplit_once("set train.micro_batch = ").expect(&warning).1;
        assert!([1, 2, 4].contains(&rows.parse::<usize>().unwrap()), "{warning}");
    }
}
