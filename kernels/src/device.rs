//! Which device a run uses, and why.

use std::fmt::{self, Display};

use burn::backend::Flex;
use burn::tensor::backend::BackendTypes;
use cubecl::cuda::CudaDevice;

use crate::Cuda;
use crate::backend::OpBackend;

/// A device that answers.
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
            Device::Cuda(device) => write!(f, "cuda:{}", device.index),
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
    /// The driver is older than what products are ordered with.
    #[error(
        "the NVIDIA driver supports CUDA {}.{} only; CUDA {}.{} or newer is needed",
        .0 / 1000, .0 % 1000 / 10, OLDEST_CUDA / 1000, OLDEST_CUDA % 1000 / 10
    )]
    OldDriver(i32),
    /// One of CUDA's own libraries is not installed.
    #[error("CUDA's library {0} cannot be loaded; install CUDA's runtime libraries")]
    NoLibrary(&'static str),
}

/// The driver API that has events of whole contexts, as `cuDriverGetVersion` writes 12.5.
const OLDEST_CUDA: i32 = 12050;

/// The first CUDA device.
///
/// # Errors
/// Says why there is none.
pub fn cuda() -> Result<Device, NoCuda> {
    // SAFETY: asks the dynamic loader for the library, and nothing of it is called.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(NoCuda::NoDriver);
    }
    let fails = |error: cudarc::driver::DriverError| match error.0 {
        cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE => NoCuda::NoGpu,
        other => NoCuda::DriverFails(format!("{other:?}")),
    };
    cudarc::driver::result::init().map_err(fails)?;
    if cudarc::driver::result::device::get_count().map_err(fails)? == 0 {
        return Err(NoCuda::NoGpu);
    }
    let mut version = 0;
    // SAFETY: writes one number.
    let asked = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) };
    asked.result().map_err(fails)?;
    if version < OLDEST_CUDA {
        return Err(NoCuda::OldDriver(version));
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
        None => Ok(Device::Cuda(CudaDevice::new(0))),
    }
}

/// Work that runs on whichever backend a device has.
pub trait OnDevice {
    /// What the work gives.
    type Output;

    /// Does the work.
    fn run<B: OpBackend>(self, device: B::Device) -> Self::Output;
}

impl Device {
    /// Does `work` on this device's backend.
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

    struct Sum;

    impl OnDevice for Sum {
        type Output = (f32, &'static str);

        fn run<B: OpBackend>(self, device: B::Device) -> Self::Output {
            let x = Tensor::<B, 1>::from_floats([1.0, 2.0, 3.0], &device);
            (x.sum().into_data().iter::<f32>().next().unwrap(), B::device_kind())
        }
    }

    #[test]
    fn work_runs_on_the_device_asked_for() {
        assert_eq!(Device::Cpu.run(Sum), (6.0, "cpu"));
        if let Ok(device) = cuda() {
            assert_eq!(device.run(Sum), (6.0, "cuda"));
        }
    }
}
