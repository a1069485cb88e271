//! Options and preparations that the benchmarks of operations share.

use anyhow::{Result, bail};
use burn::tensor::DType;
use clap::ValueEnum;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::cuda::blas::allow_tf32;
use longwall_kernels::device::Device;
use longwall_model::Precision;

use super::timing::Clock;
use crate::context::{DeviceArg, open_device};

/// Options of every benchmark of operations.
#[derive(clap::Args)]
pub struct CommonArgs {
    /// The device
    #[arg(long, default_value = "auto")]
    device: DeviceArg,

    /// What the inputs are rounded to; by default bf16 on CUDA, f32 on the CPU
    #[arg(long)]
    precision: Option<PrecisionArg>,

    /// Samples to take: calls that last 20 ms together, or one that takes longer
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    samples: u64,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A precision on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PrecisionArg {
    /// f32 throughout
    F32,
    /// f32, but linear layers round their factors to TF32
    Tf32,
    /// bf16 with f32 sums and statistics
    Bf16,
}

/// A device that is ready to be measured.
pub struct Setup {
    /// The device.
    pub device: Device,
    /// What the inputs are rounded to.
    pub precision: Precision,
    /// Samples of each measurement.
    pub samples: usize,
}

impl CommonArgs {
    /// Opens the device.
    pub fn open(&self) -> Result<Setup> {
        let device = open_device(self.device.into(), None)?;
        let asked = self.precision.map(|precision| match precision {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Tf32 => Precision::Tf32,
            PrecisionArg::Bf16 => Precision::Bf16,
        });
        let precision = match (&device, asked) {
            (Device::Cpu, None | Some(Precision::F32)) => Precision::F32,
            (Device::Cpu, Some(asked)) => bail!(
                "--precision is {asked}, but the device is the CPU; allowed there: f32\n  \
                 hint: leave --precision out, or use a machine with an NVIDIA GPU"
            ),
            (Device::Cuda(_), asked) => asked.unwrap_or(Precision::Bf16),
        };
        allow_tf32(precision == Precision::Tf32);
        Ok(Setup { device, precision, samples: self.samples as usize })
    }
}

impl Setup {
    /// Whether the device is a GPU.
    pub fn on_cuda(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }

    /// The type of activations and matrices.
    pub fn dtype(&self) -> DType {
        self.precision.parameter(2)
    }

    /// That takes this run's number of samples.
    pub fn clock<B: OpBackend>(&self, device: &B::Device) -> Clock<B> {
        Clock::new(self.samples, device)
    }

    /// `cuda` where the device is a GPU, else `cpu`.
    pub fn choose<T>(&self, cuda: T, cpu: T) -> T {
        if self.on_cuda() { cuda } else { cpu }
    }
}
