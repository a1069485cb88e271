//! What commands share: the device, and a run's model.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::cuda::blas::allow_tf32;
use longwall_kernels::device::{self, Device, KernelCache, keep_kernels};
use longwall_model::{LanguageModel, Precision, weights};
use longwall_train::checkpoint::{Checkpoint, CheckpointSelector, TokenizerIdentity};
use longwall_train::config::DeviceChoice;

/// The device on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DeviceArg {
    /// CUDA where a driver and a GPU answer, else the CPU
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

/// Finds the device, logs which and why, and sets the number of CPU threads.
pub fn open_device(choice: DeviceChoice, threads: Option<usize>) -> Result<Device> {
    set_threads(threads)?;
    if choice == DeviceChoice::Cpu {
        tracing::info!("device: {}", Device::Cpu);
        return Ok(Device::Cpu); // The driver is not even asked.
    }
    let device = match (choice, device::cuda()) {
        (_, Ok(cuda)) => cuda,
        (DeviceChoice::Auto | DeviceChoice::Cpu, Err(reason)) => {
            tracing::info!("device: {} ({reason})", Device::Cpu);
            return Ok(Device::Cpu);
        }
        (DeviceChoice::Cuda, Err(reason)) => bail!(
            "the device is \"cuda\", but {reason}\n  \
             hint: use --device cpu, set device = \"cpu\" or \"auto\" in [run], or install an NVIDIA \
             driver"
        ),
    };
    tracing::info!("device: {device}");
    match keep_kernels(&device) {
        KernelCache::Unneeded => {}
        KernelCache::New(path) => {
            let path = path.display();
            tracing::info!("CUDA kernels are compiled when first used, and kept in {path}");
        }
        KernelCache::Found(path) => tracing::info!(
            "compiled CUDA kernels are in {}; others are compiled when first used",
            path.display()
        ),
        KernelCache::Nowhere(reason) => tracing::warn!(
            "CUDA kernels are compiled anew in every run, because none can be kept: {reason}"
        ),
    }
    Ok(device)
}

/// The precision of a training run on `device`; logs it.
pub fn training_precision(choice: Option<Precision>, device: &Device) -> Result<Precision> {
    if let (None, Some(choice)) = (precision_on(device, choice), choice) {
        bail!(
            "run.precision is \"{choice}\", but the device is the CPU; allowed there: \"f32\"\n  \
             hint: leave precision out (bf16 on CUDA, f32 on the CPU), or train on a machine with \
             an NVIDIA GPU"
        );
    }
    Ok(trained_precision(choice, device))
}

/// The precision that a trained model runs in on `device`: that of its training, but f32 on the CPU
/// for every model; logs it.
fn trained_precision(choice: Option<Precision>, device: &Device) -> Precision {
    let precision = precision_on(device, choice).unwrap_or_default();
    tracing::info!("precision: {precision}");
    precision
}

/// The precision that was chosen, or the device's own, from now on used there; `None` where the
/// device is the CPU, which has f32 alone, and another was chosen.
pub fn precision_on(device: &Device, choice: Option<Precision>) -> Option<Precision> {
    let precision = match (device, choice) {
        (Device::Cpu, None | Some(Precision::F32)) => Precision::F32,
        (Device::Cpu, Some(_)) => return None,
        (Device::Cuda(_), choice) => choice.unwrap_or(Precision::Bf16),
    };
    allow_tf32(precision == Precision::Tf32);
    Some(precision)
}

/// Sets the number of CPU threads, the first time it is called; a process has one pool.
fn set_threads(threads: Option<usize>) -> Result<()> {
    static SET: std::sync::Once = std::sync::Once::new();
    let mut result = Ok(());
    SET.call_once(|| {
        if let Some(threads) = threads {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            result = pool.build_global().with_context(|| format!("cannot start {threads} threads"));
        }
    });
    result
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
    /// The tokenizer it was trained with.
    pub tokenizer: Tokenizer,
    /// Where the model goes.
    pub device: Device,
    /// What its weights are rounded to there.
    pub precision: Precision,
}

impl RunArgs {
    /// Opens the checkpoint, its tokenizer and the device.
    pub fn open(&self) -> Result<OpenRun> {
        let Some(dir) = self.run.clone() else {
            bail!("no run was given\n  hint: add --run runs/NAME, the folder of a trained run");
        };
        open_run(&dir, self.checkpoint, self.device.map(Into::into))
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
    let tokenizer = Tokenizer::load(&config.tokenizer)?;
    checkpoint.check_tokenizer(&TokenizerIdentity::of(&tokenizer))?;
    let device = open_device(device.unwrap_or(config.run.device), config.run.threads)?;
    let precision = trained_precision(config.run.precision, &device);
    Ok(OpenRun { dir: dir.to_owned(), checkpoint, tokenizer, device, precision })
}

impl OpenRun {
    /// The model with the checkpoint's weights, in the precision it runs in.
    pub fn load<B: OpBackend>(&self, device: &B::Device) -> Result<LanguageModel<B>> {
        let config = &self.checkpoint.config;
        let (vocab, seq_len) = (self.tokenizer.vocab_size(), config.data.seq_len);
        let model = LanguageModel::<B>::new(&config.model, vocab, seq_len, config.run.seed, device);
        Ok(self.precision.convert(weights::load(model, &self.checkpoint.weights())?))
    }
}
