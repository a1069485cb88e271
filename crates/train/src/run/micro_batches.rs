//! The micro-batches of a run's stages, and whether memory holds them.

use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;
use longwall_model::Precision;
use longwall_model::cost::Parameters;

use super::TrainOptions;
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::distributed::{Collective, World, gather_numbers};
use crate::error::TrainError;
use crate::memory::{self, Estimate};
use crate::timeline::{OpenStage, Stage};

/// Tokens of a micro-batch on the CPU, if the configuration does not set its size.
const CPU_MICRO_BATCH_TOKENS: usize = 1 << 13;

/// The stages with their micro-batches. A resumed run keeps its own, so that gradients are summed in the same order.
pub(super) fn open_stages<B: OpBackend>(
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
pub(super) fn stages_of_ranks<B: OpBackend>(
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

/// Refuses a run that needs more memory than there is, before its data are prepared.
pub(super) fn check_memory(
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
