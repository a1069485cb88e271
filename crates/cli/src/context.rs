//! Shared by commands: the device option, and opening a run's model.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use longwall_config::shell_quoted;
use longwall_data::{DataError, Tokenizer};
use longwall_kernels::backend::OpBackend;
use longwall_model::{LanguageModel, weights};
use longwall_train::checkpoint::{
    Checkpoint, CheckpointSelector, TokenizerIdentity, WeightsSelector,
};
use longwall_train::config::{DeviceChoice, Difference, RunConfig};
use longwall_train::device::{self, Compute};
use longwall_train::distributed::Environment;
use longwall_train::run_folder::load_tokenizer;

/// The device on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DeviceArg {
    /// CUDA if a driver and a GPU respond, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// CUDA; an error on a machine without it
    Cuda,
}

impl From<DeviceArg> for DeviceChoice {
    fn from(arg: DeviceArg) -> Self {
        match arg {
            DeviceArg::Auto => DeviceChoice::Auto,
            DeviceArg::Cpu => DeviceChoice::Cpu,
            DeviceArg::Cuda => DeviceChoice::Cuda,
        }
    }
}

/// The checkpoint on the command line.
#[derive(Clone, Debug)]
pub enum CheckpointArg {
    /// One of the run's.
    Of(CheckpointSelector),
    /// The one in a folder.
    At(PathBuf),
}

impl FromStr for CheckpointArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = Path::new(text);
        match text.parse() {
            Ok(selector) => Ok(Self::Of(selector)),
            Err(_) if path.components().count() > 1 || path.is_dir() => Ok(Self::At(path.into())),
            Err(error) => Err(format!("{error}, or the folder of a checkpoint")),
        }
    }
}

/// A run's checkpoint, and the device to load it on.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The run's folder
    #[arg(long, global = true, value_name = "RUN")]
    pub run: Option<PathBuf>,

    /// The checkpoint: with --run `latest`, `best` or a step [default: latest]; without it a checkpoint's folder,
    /// wherever it lies, such as runs/NAME/checkpoints/step-1000
    #[arg(long, global = true, value_name = "CHECKPOINT")]
    pub checkpoint: Option<CheckpointArg>,

    /// Which weights: `model`, or `ema`, the moving average that runs with train.ema keep
    #[arg(long, global = true, default_value_t, value_name = "WHICH")]
    pub weights: WeightsSelector,

    /// Run the model with another setting of `[model]` that leaves its weights as they are, for example
    /// `--set model.attention.scaling='{ kind = "ntk", factor = 4 }'`
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub sets: Vec<String>,

    /// The device; by default the one the run was trained with
    #[arg(long, global = true)]
    pub device: Option<DeviceArg>,
}

/// A checkpoint with its tokenizer, before its weights are loaded.
pub struct OpenRun {
    /// The run's folder; of a checkpoint that lies in no run, its own.
    pub dir: PathBuf,
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The configuration of the checkpoint's model, with changes that keep the weights.
    pub config: RunConfig,
    /// Which weights are loaded.
    pub weights: WeightsSelector,
    /// How the model differs from the checkpoint's, as `key=value`.
    pub changes: Vec<String>,
    /// The tokenizer it was trained with.
    pub tokenizer: Tokenizer,
    /// The device and precision that the model runs in.
    pub compute: Compute,
}

impl RunArgs {
    /// Opens the checkpoint, its tokenizer and the device.
    pub fn open(&self) -> Result<OpenRun> {
        self.open_on(None)
    }

    /// As [`RunArgs::open`], with the device of a rank.
    pub fn open_on(&self, rank: Option<&Environment>) -> Result<OpenRun> {
        let (checkpoint, dir) = self.checkpoint()?;
        let mut run = open_checkpoint(checkpoint, dir, self.device.map(Into::into), rank)?;
        run.config = run.checkpoint.config_with(&self.sets, run.tokenizer.vocab_size())?;
        let trained = run.checkpoint.trained_config();
        run.changes = trained.differences(&run.config).iter().map(change).collect();
        let run = run.with_weights(self.weights)?;
        if !run.changes.is_empty() {
            tracing::info!("the model differs from the checkpoint's: {}", run.changes.join(", "));
        }
        Ok(run)
    }

    /// The device that is asked for, or that the run was trained with.
    pub fn device_choice(&self) -> Result<DeviceChoice> {
        let trained = self.checkpoint()?.0.config.run.device;
        Ok(self.device.map_or(trained, Into::into))
    }

    /// The checkpoint that the options name, and the folder of [`OpenRun::dir`].
    fn checkpoint(&self) -> Result<(Checkpoint, PathBuf)> {
        match (&self.run, &self.checkpoint) {
            (Some(dir), None) => {
                Ok((Checkpoint::open(dir, CheckpointSelector::Latest)?, dir.clone()))
            }
            (Some(dir), Some(CheckpointArg::Of(wanted))) => {
                Ok((Checkpoint::open(dir, *wanted)?, dir.clone()))
            }
            (Some(_), Some(CheckpointArg::At(path))) => bail!(
                "--checkpoint is the folder {}, beside --run; allowed beside --run: latest, best, or a step such as \
                 1000\n  hint: leave out --run",
                path.display()
            ),
            (None, Some(CheckpointArg::At(path))) => {
                let checkpoint = Checkpoint::at(path)?;
                let dir = checkpoint.run_dir().unwrap_or_else(|| checkpoint.path.clone());
                Ok((checkpoint, dir))
            }
            (None, Some(CheckpointArg::Of(wanted))) => bail!(
                "--checkpoint is {wanted}, and no run was given\n  hint: add --run runs/NAME, or give the checkpoint's \
                 folder: --checkpoint runs/NAME/checkpoints/step-1000"
            ),
            (None, None) => bail!(
                "no run was given\n  hint: add --run runs/NAME, the folder of a trained run, or --checkpoint DIR, that \
                 of a checkpoint"
            ),
        }
    }
}

/// Opens a run's checkpoint, its tokenizer and the device, that of a rank if there are several.
pub fn open_run(
    dir: &Path,
    wanted: CheckpointSelector,
    device: Option<DeviceChoice>,
    rank: Option<&Environment>,
) -> Result<OpenRun> {
    open_checkpoint(Checkpoint::open(dir, wanted)?, dir.to_owned(), device, rank)
}

/// Opens the tokenizer of a checkpoint, which `dir` may have a copy of, and the device.
fn open_checkpoint(
    checkpoint: Checkpoint,
    dir: PathBuf,
    device: Option<DeviceChoice>,
    rank: Option<&Environment>,
) -> Result<OpenRun> {
    let config = &checkpoint.config;
    let tokenizer = load_tokenizer(&dir, &config.tokenizer).map_err(|error| match error {
        DataError::Missing { path, .. } => anyhow!(
            "{} has no tokenizer: there is no tokenizer.json in {}, and {}, which it was trained with, is not there\n  \
             hint: copy tokenizer.json from the run's folder into {}",
            checkpoint.path.display(),
            dir.display(),
            path.display(),
            shell_quoted(&dir)
        ),
        error => error.into(),
    })?;
    checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    let (choice, threads) = (device.unwrap_or(config.run.device), config.run.threads);
    let device = match rank {
        Some(Environment { world, local_rank, .. }) if choice != DeviceChoice::Cpu => {
            device::open_for_rank(choice, threads, *world, *local_rank)?
        }
        _ => device::open(choice, threads)?,
    };
    let compute = Compute::for_trained(device, config.run.precision);
    let (config, weights, changes) = (checkpoint.trained_config(), WeightsSelector::Model, vec![]);
    Ok(OpenRun { dir, checkpoint, config, weights, changes, tokenizer, compute })
}

fn change(difference: &Difference) -> String {
    format!("{}={}", difference.key, difference.theirs)
}

/// How a model with these weights differs from the checkpoint's, as `key=value`.
pub fn change_of_weights(weights: WeightsSelector) -> Option<String> {
    (weights != WeightsSelector::default()).then(|| format!("weights={weights}"))
}

impl OpenRun {
    /// The run with the weights that `weights` names.
    pub fn with_weights(mut self, weights: WeightsSelector) -> Result<Self> {
        if weights != WeightsSelector::default() {
            // Reports a missing average before the data are read.
            self.checkpoint.selected(weights)?;
        }
        self.weights = weights;
        self.changes.extend(change_of_weights(weights));
        Ok(self)
    }

    /// The model with the checkpoint's weights, in the precision it runs in.
    pub fn load<B: OpBackend>(&self, device: &B::Device) -> Result<LanguageModel<B>> {
        let config = &self.config;
        let (vocab, seq_len) = (self.tokenizer.vocab_size(), config.data.seq_len);
        let model = LanguageModel::<B>::new(&config.model, vocab, seq_len, config.run.seed, device);
        Ok(self
            .compute
            .precision
            .convert(weights::load(model, &self.checkpoint.selected(self.weights)?)?))
    }
}
