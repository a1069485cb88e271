//! Why a run cannot start or continue.

use std::path::{Path, PathBuf};

use longwall_config::shell_quoted;
use longwall_data::DataError;
use longwall_model::generate::GenerateError;
use longwall_model::weights::WeightsError;

use crate::checkpoint::CheckpointError;
use crate::distributed::CollectiveError;
use crate::evaluation::EvaluationError;
use crate::memory::Estimate;
use crate::metrics::MetricsError;
use crate::run_folder::RunFolderError;

/// Why a run cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Tokenizer or data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run's folder.
    #[error(transparent)]
    Folder(#[from] RunFolderError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Metrics or samples.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// Weights or the optimiser's state.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The prompts of `train.sample`.
    #[error("train.sample: {0}")]
    Sample(#[from] GenerateError),
    /// An evaluation of the configuration that could never run, or whose old results cannot be removed.
    #[error("{0}")]
    Unevaluable(#[source] EvaluationError),
    /// An evaluation in the loop failed.
    #[error(
        "train.evaluate.{at} after step {step}: {source}\n  hint: a resumed run evaluates this step again; to train on without evaluations, resume with --set train.evaluate=[]"
    )]
    Evaluation {
        /// Its place in `train.evaluate`.
        at: usize,
        /// Finished steps.
        step: u64,
        /// Why.
        source: EvaluationError,
    },
    /// TensorBoard's event file.
    #[error("cannot write TensorBoard events in {}: {source}\n  hint: check the permissions and the room on the disk, or set run.tensorboard = false", path.display())]
    TensorBoard {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The ranks of a run cannot work together.
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
    /// The rows of a step do not divide by the number of ranks.
    #[error(
        "a step of {batch_tokens} tokens has {rows} rows of {seq_len}, which do not divide by {}\n  hint: use as many {} as divide {rows}, or a train.batch_tokens that is a multiple of {}",
        if *shared > 1 { format!("{} groups of {shared} GPUs", ranks / shared) } else { format!("{ranks} GPUs") },
        if *shared > 1 { "groups" } else { "GPUs" },
        (*ranks / *shared) as u64 * *seq_len as u64
    )]
    RowsOfRanks {
        /// Rows of the step.
        rows: usize,
        /// Tokens of the step.
        batch_tokens: u64,
        /// Tokens of a row.
        seq_len: usize,
        /// How many ranks there are.
        ranks: usize,
        /// How many of them share a row.
        shared: usize,
    },
    /// The ranks do not divide into groups that share rows.
    #[error(
        "train.context_parallel is {context_parallel}, and the run has {ranks} {}\n  hint: use --gpus {context_parallel} or a multiple of it, or --set train.context_parallel=1", if *ranks == 1 { "GPU" } else { "GPUs" }
    )]
    RanksOfRows {
        /// Ranks that share each row.
        context_parallel: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// Too many steps were skipped in a row.
    #[error(
        "{in_a_row} steps in a row were skipped, the last one, step {step}, because {reason}\n  hint: resume with a lower learning rate (--set train.lr=…), or look at the data around that step"
    )]
    TooManySkips {
        /// The last step.
        step: u64,
        /// How many were skipped.
        in_a_row: u64,
        /// Why the last one was.
        reason: String,
    },
    /// The run needs more memory than there is.
    #[error(
        "training needs at least {:.1} GB of memory ({parameters} parameters with gradients and optimiser state, and micro-batches of {micro_batch} rows), and {:.1} GB are available\n  hint: choose a smaller model (model.layers, model.width), or a smaller train.micro_batch", *needed as f64 / 1e9, *available as f64 / 1e9
    )]
    Memory {
        /// Parameters of the model.
        parameters: usize,
        /// Rows of a micro-batch.
        micro_batch: usize,
        /// Bytes needed at least.
        needed: u128,
        /// Bytes available.
        available: u64,
    },
    /// Even micro-batches of one row do not fit on the GPU, by an estimate.
    #[error(
        "training is estimated to need {estimate} with micro-batches of one row; {:.1} GB of GPU memory are available\n  hint: set train.recompute = true if it is not set, choose a smaller model (model.layers, model.width), a smaller data.seq_len or an attention kind with a kernel, share rows between GPUs (train.context_parallel; validation then computes whole rows on one GPU, unless train.validate.every = \"never\"), or set train.micro_batch = 1 to try it all the same", *available as f64 / 1e9
    )]
    NoMicroBatchFits {
        /// What is needed.
        estimate: Estimate,
        /// Bytes available.
        available: u64,
    },
    /// A resumed run has already trained for longer than `train.tokens`.
    #[error(
        "train.tokens is {tokens}, but the run has trained on {done} tokens already ({step} steps); allowed: {done} or more\n  hint: raise train.tokens to train further, or start a new run"
    )]
    AlreadyLonger {
        /// Tokens asked for.
        tokens: u64,
        /// Tokens trained on.
        done: u64,
        /// Finished steps.
        step: u64,
    },
    /// The run that a new one would start from is the one in its folder.
    #[error(
        "--from is the run in {}, the folder of the new run, which would replace it\n  hint: choose another run.name; to go on with the run, use --resume", run_dir.display()
    )]
    FromItself {
        /// The folder.
        run_dir: PathBuf,
    },
    /// The weights that a run started from have changed.
    #[error(
        "the run has no checkpoint yet and starts from {}, whose weights are not those that it started from\n  hint: restore them, or start a new run with --from", path.display()
    )]
    OtherSource {
        /// The checkpoint's folder.
        path: PathBuf,
    },
    /// The run failed after it had written checkpoints.
    #[error("{error}\n  {}", last_checkpoint(checkpoint, run_dir))]
    AfterCheckpoint {
        /// What happened.
        #[source]
        error: Box<TrainError>,
        /// The last good checkpoint.
        checkpoint: PathBuf,
        /// The run's folder.
        run_dir: PathBuf,
    },
}

/// Names the last checkpoint of the run in `run_dir`.
pub(crate) fn last_checkpoint(checkpoint: &Path, run_dir: &Path) -> String {
    format!(
        "the last good checkpoint is {}; continue from it with: longwall train --resume {}",
        checkpoint.display(),
        shell_quoted(run_dir)
    )
}

impl TrainError {
    /// Whether the run ends only because another rank does.
    pub fn is_of_another_rank(&self) -> bool {
        match self {
            TrainError::Ranks(error) => error.is_of_another_rank(),
            TrainError::AfterCheckpoint { error, .. } => error.is_of_another_rank(),
            _ => false,
        }
    }
}
