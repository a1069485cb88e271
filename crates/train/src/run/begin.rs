//! Where a run begins: its folder, its newest checkpoint, and how far that has come.

use std::path::{Path, PathBuf};

use longwall_kernels::backend::OpBackend;

use super::setup::RunProgress;
use super::{RunStart, Source, TrainOptions};
use crate::checkpoint::{Checkpoint, CheckpointFolder, CheckpointSelector, State};
use crate::config::RunConfig;
use crate::distributed::{Collective, of_first};
use crate::error::TrainError;
use crate::metrics;
use crate::run_folder::RunFolder;

/// Where a run begins.
pub(super) struct Beginning {
    pub run_dir: PathBuf,
    /// The folder of a resumed run, on rank 0.
    pub resumed: Option<RunFolder>,
    pub checkpoint: Option<Checkpoint>,
    /// The weights that it starts from, if not from its checkpoint.
    pub source: Option<Source>,
}

/// Opens the folder of a resumed run, and its checkpoint; checks that a new run may have its folder.
pub(super) fn begin<B: OpBackend>(
    config: &RunConfig,
    options: &TrainOptions,
    collective: &dyn Collective<B>,
) -> Result<Beginning, TrainError> {
    let first = collective.world().is_first();
    let (run_dir, resumed, checkpoint) = match &options.start {
        RunStart::Resume(path) => {
            let folder = first.then(|| RunFolder::open(path)).transpose()?;
            let mut checkpoint = newest(path, collective)?;
            if let (Some(folder), Some(Checkpoint { state, .. })) = (&folder, &mut checkpoint) {
                // A line that is no record would stop the plot at the end.
                let metrics = folder.metrics();
                let bytes = metrics::bytes_until(&metrics, state.metrics_bytes, state.step)?;
                if bytes < state.metrics_bytes {
                    let (path, had) = (metrics.display(), state.metrics_bytes);
                    tracing::warn!(
                        "{path} has {bytes} bytes of the {had} that it had at the checkpoint: earlier lines are lost"
                    );
                    state.metrics_bytes = bytes;
                }
            }
            (path.clone(), folder, checkpoint)
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

/// The progress in a checkpoint's state; without one, none. Completes what a killed run left in `checkpoints`.
pub(super) fn saved_progress(
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
