//! Shared by commands: the device option, and opening a run's model.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_model::{LanguageModel, weights};
use longwall_train::checkpoint::{
    Checkpoint, CheckpointSelector, TokenizerIdentity, WeightsSelector,
};
use longwall_train::config::{DeviceChoice, Difference, RunConfig};
use longwall_train::device::{self, Compute};
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

/// A run's checkpoint, and the device to load it on.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The run's folder
    #[arg(long, global = true, value_name = "RUN")]
    pub run: Option<PathBuf>,

    /// The checkpoint: `latest`, `best`, or a step
    #[arg(long, global = true, default_value_t)]
    pub checkpoint: CheckpointSelector,

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
    /// The run's folder.
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
        let Some(dir) = self.run.clone() else {
            bail!("no run was given\n  hint: add --run runs/NAME, the folder of a trained run");
        };
        let mut run = open_run(&dir, self.checkpoint, self.device.map(Into::into))?;
        run.config = run.checkpoint.config_with(&self.sets, run.tokenizer.vocab_size())?;
        let trained = run.checkpoint.trained_config();
        run.changes = trained.differences(&run.config).iter().map(change).collect();
        let run = run.with_weights(self.weights)?;
        if !run.changes.is_empty() {
            tracing::info!("the model differs from the checkpoint's: {}", run.changes.join(", "));
        }
        Ok(run)
    }
}

/// Opens a run's checkpoint, its tokenizer and the device.
pub fn open_run(
    dir: &Path,
    wanted: CheckpointSelector,
    device: Option<DeviceChoice>,
) -> Result<OpenRun> {
    let checkpoint = Checkpoint::open(dir, wanted)?;
    let config = &checkpoint.config;
    let tokenizer = load_tokenizer(dir, &config.tokenizer)?;
    checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    let device = device::open(device.unwrap_or(config.run.device), config.run.threads)?;
    let compute = Compute::for_trained(device, config.run.precision);
    let (config, weights, changes) = (checkpoint.trained_config(), WeightsSelector::Model, vec![]);
    Ok(OpenRun { dir: dir.to_owned(), checkpoint, config, weights, changes, tokenizer, compute })
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
