//! The choice of a run's device, its properties, and the cache of its compiled kernels.

mod kernel_cache;
pub(crate) mod memory;

use std::fmt::{self, Display};

use burn::backend::Flex;
use burn::tensor::backend::BackendTypes;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::Runtime;
use serde::Serialize;

pub use kernel_cache::{KernelCache, keep_kernels};
pub use memory::Allocation;

use crate::Cuda;
use crate::backend::OpBackend;

/// The kinds of devices that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

impl Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        })
    }
}

/// A device that is available.
#[derive(Clone, Debug)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// One NVIDIA GPU.
    Cuda(CudaDevice),
}

impl Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => write!(f, "cpu, {} threads", rayon::current_num_threads()),
            Device::Cuda(device) => match name(device) {
                Some(name) => write!(f, "cuda:{}, {name}", device.index),
                None => write!(f, "cuda:{}", device.index),
            },
        }
    }
}

/// Why there is no CUDA device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCuda {
    /// The driver's library is not installed.
    #[error("no NVIDIA driver is installed (libcuda cannot be loaded)")]
    NoDriver,
    /// The driver does not start.
    #[error("the NVIDIA driver does not answer: {0}")]
    DriverFails(String),
    /// The driver sees no GPU.
    #[error("the NVIDIA driver sees no GPU")]
    NoGpu,
    /// The driver sees fewer GPUs.
    #[error("GPU {index} does not exist; the NVIDIA driver shows {count}, numbered from 0")]
    NoSuchGpu {
        /// The GPU asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The driver is too old for the events that order matrix products.
    #[error(
        "the NVIDIA driver supports CUDA {}.{} only; CUDA {}.{} or newer is needed",
        .0 / 1000, .0 % 1000 / 10, OLDEST_CUDA / 1000, OLDEST_CUDA % 1000 / 10
    )]
    OldDriver(i32),
    /// The GPU is older than the kernels require.
    #[error(
        "the GPU is a {name} of compute capability {major}.{minor}; the kernels need 9.0 (Hopper) or \
         newer"
    )]
    OldGpu {
        /// What the driver calls it.
        name: String,
        /// Its compute capability.
        major: i32,
        /// As `major`, after the point.
        minor: i32,
    },
    /// One of CUDA's own libraries is not installed.
    #[error("CUDA's library {0} cannot be loaded; install CUDA's runtime libraries")]
    NoLibrary(&'static str),
}

/// The first driver API with context-wide events, 12.5 as `cuDriverGetVersion` encodes it.
const OLDEST_CUDA: i32 = 12050;

/// The major compute capability of Hopper, the first with the tensor memory accelerator.
const OLDEST_GPU: i32 = 9;

fn fails(error: cudarc::driver::DriverError) -> NoCuda {
    match error.0 {
        cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE => NoCuda::NoGpu,
        other => NoCuda::DriverFails(format!("{other:?}")),
    }
}

/// The number of GPUs that the driver shows this process, at least 1.
///
/// # Errors
/// When there is none: the reason.
pub fn gpus() -> Result<usize, NoCuda> {
    // SAFETY: only asks the dynamic loader for the library; calls nothing in it.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(NoCuda::NoDriver);
    }
    cudarc::driver::result::init().map_err(fails)?;
    match cudarc::driver::result::device::get_count().map_err(fails)? {
        0 => Err(NoCuda::NoGpu),
        count => Ok(count as usize),
    }
}

/// The first CUDA device.
///
/// # Errors
/// When there is none: the reason.
pub fn cuda() -> Result<Device, NoCuda> {
    cuda_at(0)
}

/// GPU `index` of those that the driver shows this process, counted from 0.
///
/// # Errors
/// When there is none: the reason.
pub fn cuda_at(index: usize) -> Result<Device, NoCuda> {
    let count = gpus()?;
    if index >= count {
        return Err(NoCuda::NoSuchGpu { index, count });
    }
    let mut version = 0;
    // SAFETY: writes one number.
    let asked = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) };
    asked.result().map_err(fails)?;
    if version < OLDEST_CUDA {
        return Err(NoCuda::OldDriver(version));
    }
    let (name, [major, minor]) = describe(index as i32).map_err(fails)?;
    if major < OLDEST_GPU {
        return Err(NoCuda::OldGpu { name, major, minor });
    }
    // SAFETY: as above.
    let present = unsafe {
        [
            ("libnvrtc", cudarc::nvrtc::sys::is_culib_present()),
            ("libcublasLt", cudarc::cublaslt::sys::is_culib_present()),
        ]
    };
    match present.iter().find(|(_, present)| !present) {
        Some((name, _)) => Err(NoCuda::NoLibrary(name)),
        None => Ok(Device::Cuda(CudaDevice::new(index))),
    }
}

/// The driver's name for a GPU, and its compute capability.
fn describe(index: i32) -> Result<(String, [i32; 2]), cudarc::driver::DriverError> {
    use cudarc::driver::result::device;
    use cudarc::driver::sys::CUdevice_attribute as Attribute;
    let gpu = device::get(index)?;
    // SAFETY: the device comes from the driver.
    let capability = unsafe {
        [
            device::get_attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            device::get_attribute(gpu, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ]
    };
    Ok((device::get_name(gpu)?, capability))
}

/// Work that runs on the backend of any device.
pub trait OnDevice {
    /// The result of the work.
    type Output;

    /// Does the work.
    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output;
}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// In tensors that are alive.
    pub in_use: u64,
    /// Allocated from the driver: in use, and cached for later tensors.
    pub reserved: u64,
}

/// Peak dense bf16 FLOP/s of GPUs by a part of their names, from their data sheets. The first is the
/// driver's name for the H100's SXM board; its other boards are slower.
const PEAKS: [(&str, f64); 2] = [("H100 80GB HBM3", 989e12), ("H200", 989e12)];

/// The peak bf16 FLOP/s of the GPU called `name`, if known.
fn peak_of(name: &str) -> Option<f64> {
    // The H200's NVL board is also slower.
    let entry = PEAKS.iter().find(|(part, _)| name.contains(part) && !name.contains("NVL"));
    entry.map(|(_, peak)| *peak)
}

/// The driver's name for a GPU.
fn name(device: &CudaDevice) -> Option<String> {
    Some(describe(device.index as i32).ok()?.0)
}

impl Device {
    /// The device's kind.
    pub fn kind(&self) -> DeviceKind {
        match self {
            Device::Cpu => DeviceKind::Cpu,
            Device::Cuda(_) => DeviceKind::Cuda,
        }
    }

    /// Peak dense bf16 FLOP/s, for a GPU whose peak is known.
    pub fn peak_bf16_flops(&self) -> Option<f64> {
        match self {
            Device::Cpu => None,
            Device::Cuda(device) => peak_of(&name(device)?),
        }
    }

    /// GPU memory used by this thread's tensors; `None` on the CPU.
    pub fn memory(&self) -> Option<Memory> {
        let Device::Cuda(device) = self else { return None };
        let usage = CudaRuntime::client(device).memory_usage().ok()?;
        Some(Memory { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }

    /// As [`OpBackend::available_memory`].
    pub fn available_memory(&self) -> Option<u64> {
        match self {
            Device::Cpu => memory::of_machine(),
            Device::Cuda(device) => memory::of_gpu(device),
        }
    }

    /// Bytes of the largest tensor that a GPU can hold; `None` on the CPU.
    pub fn largest_tensor(&self) -> Option<u64> {
        let Device::Cuda(device) = self else { return None };
        Some(CudaRuntime::client(device).properties().memory.max_page_size)
    }

    /// Runs `work` on this device's backend.
    pub fn run<W: OnDevice>(self, work: W) -> W::Output {
        match self {
            Device::Cpu => work.run::<Flex>(<Flex as BackendTypes>::Device::default()),
            Device::Cuda(device) => work.run::<Cuda>(device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Tensor;

    #[test]
    fn peaks_are_those_of_the_board() {
        assert_eq!(peak_of("NVIDIA H100 80GB HBM3"), Some(989e12));
        assert_eq!(peak_of("NVIDIA H200"), Some(989e12));
        assert_eq!(peak_of("NVIDIA H100 PCIe"), None);
        assert_eq!(peak_of("NVIDIA H100 NVL"), None);
        assert_eq!(peak_of("NVIDIA H200 NVL"), None);
        assert_eq!(peak_of("NVIDIA GeForce RTX 4090"), None);
    }

    struct Sum;

    impl OnDevice for Sum {
        type Output = (f32, DeviceKind);

        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let x = Tensor::<B, 1>::from_floats([1.0, 2.0, 3.0], &device);
            (x.sum().into_data().iter::<f32>().next().unwrap(), B::device_kind())
        }
    }

    #[test]
    fn work_runs_on_the_device_asked_for() {
        assert_eq!(Device::Cpu.run(Sum), (6.0, DeviceKind::Cpu));
        if let Ok(device) = cuda() {
            assert_eq!(device.run(Sum), (6.0, DeviceKind::Cuda));
        }
    }
}
