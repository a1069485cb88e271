//! Memory and peak FLOP/s of the device that a model trains on.

use std::cell::Cell;

use longwall_kernels::device::Device;
use longwall_model::Precision;

/// A device's memory use and peak rate.
pub struct Meters {
    device: Device,
    peak_memory: Cell<u64>,
}

impl Meters {
    /// The meters of `device`; nothing is measured yet.
    pub fn new(device: &Device) -> Self {
        Meters { device: device.clone(), peak_memory: Cell::new(0) }
    }

    /// Whether the device has its own memory.
    pub fn has_memory(&self) -> bool {
        matches!(self.device, Device::Cuda(_))
    }

    /// Bytes that a run may still take; `None` if the device does not report it.
    pub fn available_memory(&self) -> Option<u64> {
        self.device.available_memory()
    }

    /// The most bytes reserved at any call of this function so far; `None` on the CPU.
    pub fn peak_memory(&self) -> Option<u64> {
        let now = self.device.memory()?.reserved;
        self.peak_memory.set(self.peak_memory.get().max(now));
        Some(self.peak_memory.get())
    }

    /// Peak FLOP/s, if known: for bf16 on a GPU, from its data sheet. For fp8 it is bf16's too: attention and the
    /// output layer run in bf16, and rates of both precisions stay comparable.
    pub fn peak_flops(&self, precision: Precision) -> Option<f64> {
        match precision {
            Precision::Bf16 | Precision::Fp8 => self.device.peak_bf16_flops(),
            Precision::F32 | Precision::Tf32 => None,
        }
    }
}
