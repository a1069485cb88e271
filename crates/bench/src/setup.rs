//! Shared by benchmarks: of whole models, their configuration; of operations, the device, the precision, and
//! some sizes.

use std::path::PathBuf;

use burn::tensor::DType;
use longwall_data::Tokenizer;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::Device;
use longwall_model::Precision;
use longwall_train::config::{DeviceChoice, RunConfig};
use longwall_train::device::{self, Compute};

use crate::error::BenchError;
use crate::timing::Clock;

/// The configuration whose model a benchmark runs; its data is not read.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// The file.
    pub config: PathBuf,
    /// Overrides of its keys, as `key=value`.
    pub sets: Vec<String>,
    /// The device, in place of `run.device`.
    pub device: Option<DeviceChoice>,
}

impl ModelOptions {
    /// Reads the configuration and opens its device; also returns the size of its tokenizer's vocabulary.
    pub(crate) fn open(&self) -> Result<(RunConfig, usize, Device), BenchError> {
        let mut config = RunConfig::load(&self.config, &self.sets)?;
        if let Some(device) = self.device {
            config.run.device = device;
        }
        let vocab_size = Tokenizer::load(&config.tokenizer)?.vocab_size();
        let device = device::open(config.run.device, config.run.threads)?;
        Ok((config, vocab_size, device))
    }
}

/// Options of every benchmark of operations.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The device.
    pub device: DeviceChoice,
    /// What the inputs are rounded to. Default: bf16 on CUDA, f32 on the CPU.
    pub precision: Option<Precision>,
    /// Samples of each measurement, at least 1.
    pub samples: usize,
}

/// A device that is ready to be measured.
pub(crate) struct Setup {
    /// The device, and what the inputs are rounded to.
    pub compute: Compute,
    /// Samples of each measurement.
    pub samples: usize,
}

impl Options {
    /// Opens the device.
    pub(crate) fn open(&self) -> Result<Setup, BenchError> {
        let device = device::open(self.device, None)?;
        let compute = Compute::new(device, self.precision)
            .ok_or_else(|| BenchError::Precision(self.precision.unwrap_or_default()))?;
        Ok(Setup { compute, samples: self.samples })
    }
}

impl Setup {
    /// Whether the device is a GPU.
    pub fn on_cuda(&self) -> bool {
        matches!(self.compute.device, Device::Cuda(_))
    }

    /// The type of activations and matrices.
    pub fn dtype(&self) -> DType {
        self.compute.precision.parameter(2)
    }

    /// A clock that takes this run's number of samples.
    pub fn clock<B: OpBackend>(&self, device: &B::Device) -> Clock<B> {
        Clock::new(self.samples, device)
    }

    /// `cuda` if the device is a GPU, else `cpu`.
    pub fn choose<T>(&self, cuda: T, cpu: T) -> T {
        if self.on_cuda() { cuda } else { cpu }
    }
}

/// A shape as written on the command line.
pub fn shape_text(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The heads of k and v, where `asked` is the value of --kv-heads.
pub fn kv_heads(asked: Option<usize>, heads: usize) -> Result<usize, BenchError> {
    let kv_heads = asked.unwrap_or(heads);
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(BenchError::KvHeads { kv_heads, heads });
    }
    Ok(kv_heads)
}
