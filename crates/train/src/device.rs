//! The device that a run computes on, and its precision there.

use longwall_kernels::cuda::blas::{Rounding, round_factors};
use longwall_kernels::device::{self, Device, KernelCache, NoCuda, OnDevice, keep_kernels};
use longwall_model::Precision;

use crate::config::DeviceChoice;
use crate::distributed::World;

/// Why a run cannot have the device that it asks for.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// CUDA was asked for, and there is none.
    #[error(
        "the device is \"cuda\", but {0}\n  hint: use --device cpu, set device = \"cpu\" or \"auto\" in [run], or install an NVIDIA driver"
    )]
    NoCuda(NoCuda),
    /// The CPU's threads do not start.
    #[error("cannot start {threads} threads: {source}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// Why they do not start.
        source: rayon::ThreadPoolBuildError,
    },
    /// A rank's GPU is not there.
    #[error(
        "rank {rank} needs GPU {gpu} of its machine, but {reason}\n  hint: several ranks train on NVIDIA GPUs, one each; start as many on a machine as it has GPUs, and let each see all of them: no --gpus-per-task in Slurm, no CUDA_VISIBLE_DEVICES of one GPU per process"
    )]
    NoGpuOfRank {
        /// The rank.
        rank: usize,
        /// The number of its GPU.
        gpu: usize,
        /// Why.
        reason: NoCuda,
    },
    /// Several ranks cannot share the CPU.
    #[error(
        "run.device is \"cpu\", but there are {ranks} ranks; allowed: \"auto\", \"cuda\"\n  hint: several ranks train on NVIDIA GPUs, one each; on the CPU, one process uses all cores"
    )]
    RanksOnCpu {
        /// How many ranks there are.
        ranks: usize,
    },
    /// The CPU lacks this precision.
    #[error(
        "run.precision is \"{0}\", but the device is the CPU; allowed there: \"f32\"\n  hint: leave precision out (bf16 on CUDA, f32 on the CPU), or train on a machine with an NVIDIA GPU"
    )]
    Precision(Precision),
}

/// Finds the device, logs which and why, and sets the number of CPU threads.
///
/// # Errors
/// When CUDA is asked for and there is none, or the threads do not start.
pub fn open(choice: DeviceChoice, threads: Option<usize>) -> Result<Device, DeviceError> {
    set_threads(threads)?;
    if choice == DeviceChoice::Cpu {
        tracing::info!("device: {}", Device::Cpu);
        return Ok(Device::Cpu); // Without touching the driver.
    }
    let device = match (choice, device::cuda()) {
        (_, Ok(cuda)) => cuda,
        (DeviceChoice::Auto | DeviceChoice::Cpu, Err(reason)) => {
            tracing::info!("device: {} ({reason})", Device::Cpu);
            return Ok(Device::Cpu);
        }
        (DeviceChoice::Cuda, Err(reason)) => return Err(DeviceError::NoCuda(reason)),
    };
    tracing::info!("device: {device}");
    keep(&device);
    Ok(device)
}

/// Opens GPU `gpu` of those that this process sees, for a rank, and sets the number of CPU threads.
///
/// # Errors
/// When there is no such GPU, the CPU is chosen, or the threads do not start.
pub fn open_for_rank(
    choice: DeviceChoice,
    threads: Option<usize>,
    World { rank, size }: World,
    gpu: usize,
) -> Result<Device, DeviceError> {
    set_threads(threads)?;
    if choice == DeviceChoice::Cpu {
        return Err(DeviceError::RanksOnCpu { ranks: size });
    }
    let device =
        device::cuda_at(gpu).map_err(|reason| DeviceError::NoGpuOfRank { rank, gpu, reason })?;
    tracing::info!("device: {size} GPUs, that of rank {rank} is {device}");
    keep(&device);
    Ok(device)
}

/// Keeps the kernels that `device` compiles, and logs where.
fn keep(device: &Device) {
    match keep_kernels(device) {
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
}

/// Sets the number of CPU threads, the first time it is called; a process has one pool.
fn set_threads(threads: Option<usize>) -> Result<(), DeviceError> {
    static SET: std::sync::Once = std::sync::Once::new();
    let mut result = Ok(());
    SET.call_once(|| {
        if let Some(threads) = threads {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let started = pool.build_global();
            result = started.map_err(|source| DeviceError::Threads { threads, source });
        }
    });
    result
}

/// A device, and the precision of the work there.
#[derive(Clone, Debug)]
pub struct Compute {
    /// The device.
    pub device: Device,
    /// The precision.
    pub precision: Precision,
}

impl Compute {
    /// With the chosen precision, or the device's default: bf16 on CUDA, f32 on the CPU. `None` if the
    /// device lacks the chosen one: the CPU has only f32.
    pub fn new(device: Device, choice: Option<Precision>) -> Option<Self> {
        let precision = match (&device, choice) {
            (Device::Cpu, None | Some(Precision::F32)) => Precision::F32,
            (Device::Cpu, Some(_)) => return None,
            (Device::Cuda(_), choice) => choice.unwrap_or(Precision::Bf16),
        };
        Some(Compute { device, precision })
    }

    /// For a training run; logs the precision.
    ///
    /// # Errors
    /// When the device lacks the precision chosen.
    pub fn for_training(device: Device, choice: Option<Precision>) -> Result<Self, DeviceError> {
        let compute = Compute::new(device, choice)
            .ok_or_else(|| DeviceError::Precision(choice.unwrap_or_default()))?;
        tracing::info!("precision: {}", compute.precision);
        Ok(compute)
    }

    /// For a trained model: the precision it was trained in, but bf16 after fp8, and always f32 on the CPU;
    /// logs the precision.
    pub fn for_trained(device: Device, trained: Option<Precision>) -> Self {
        let compute = Compute::new(device.clone(), trained.map(Precision::of_evaluation))
            .unwrap_or(Compute { device, precision: Precision::F32 });
        tracing::info!("precision: {}", compute.precision);
        compute
    }

    /// Does `work` on the device. With precision `tf32` or `fp8`, linear layers round the factors of their
    /// products while the work runs, and not before or after. Work that runs at the same time in several
    /// threads must have one precision: CUDA's matrix products have one setting per process.
    pub fn run<W: OnDevice>(&self, work: W) -> W::Output {
        round_factors(match self.precision {
            Precision::F32 | Precision::Bf16 => Rounding::None,
            Precision::Tf32 => Rounding::Tf32,
            Precision::Fp8 => Rounding::E4m3,
        });
        let output = self.device.clone().run(work);
        round_factors(Rounding::None);
        output
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_computes_in_f32_alone() {
        let precision = |choice| Compute::new(Device::Cpu, choice).map(|c| c.precision);
        assert_eq!(precision(None), Some(Precision::F32));
        assert_eq!(precision(Some(Precision::F32)), Some(Precision::F32));
        assert_eq!(precision(Some(Precision::Bf16)), None);
        assert_eq!(precision(Some(Precision::Tf32)), None);
        assert_eq!(precision(Some(Precision::Fp8)), None);
    }

    #[test]
    fn a_model_trained_in_bf16_or_fp8_runs_on_the_cpu_but_does_not_train_there() {
        for precision in [Precision::Bf16, Precision::Fp8] {
            let trained = Some(precision);
            assert_eq!(Compute::for_trained(Device::Cpu, trained).precision, Precision::F32);
            let error = Compute::for_training(Device::Cpu, trained).unwrap_err().to_string();
            let start = format!("run.precision is \"{precision}\", but the device is the CPU");
            assert!(error.starts_with(&start), "{error}");
        }
    }

    /// Opens no GPU.
    #[test]
    fn a_model_trained_in_fp8_is_evaluated_in_bf16_on_a_gpu() {
        let gpu = || Device::Cuda(Default::default());
        let precision = |trained| Compute::for_trained(gpu(), Some(trained)).precision;
        assert_eq!(precision(Precision::Fp8), Precision::Bf16);
        assert_eq!(precision(Precision::Tf32), Precision::Tf32);
        let training = Compute::for_training(gpu(), Some(Precision::Fp8)).unwrap();
        assert_eq!(training.precision, Precision::Fp8);
    }
}
