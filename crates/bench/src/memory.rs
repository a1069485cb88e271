//! How much memory a benchmark needs, and how much the device has.

use crate::error::BenchError;
use crate::setup::Setup;

/// The most elements of a tensor: kernels count them in 32 bits.
const MOST_ELEMENTS: u128 = u32::MAX as u128;

/// What a benchmark needs at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Elements of the largest tensor passed to kernels.
    elements: u128,
    /// Bytes of the largest tensor.
    largest: u128,
    /// Bytes of all tensors.
    total: u128,
}

impl Need {
    /// Tensors with these numbers of elements, passed to kernels. They are drawn in f32, and stay f32
    /// on the CPU.
    pub fn of(tensors: impl IntoIterator<Item = u128>) -> Self {
        tensors.into_iter().fold(Need::default(), |need, elements| {
            let need = Need { elements: need.elements.max(elements), ..need };
            need.and(4 * elements, 4 * elements)
        })
    }

    /// Adds `total` bytes, in tensors of up to `largest` bytes.
    pub fn and(self, largest: u128, total: u128) -> Self {
        Need { largest: self.largest.max(largest), total: self.total + total, ..self }
    }

    /// Adds a gradient of each tensor.
    pub fn with_gradients(self) -> Self {
        Need { total: 2 * self.total, ..self }
    }
}

/// Bytes that a device has, if known.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// For one tensor.
    tensor: Option<u64>,
    /// In total.
    memory: Option<u64>,
}

impl Limits {
    /// Says which limit `need` exceeds, for a benchmark with these options.
    fn excess(self, options: &str, need: &Need) -> Option<String> {
        let gb = |bytes: u128| bytes as f64 / 1e9;
        let over = |need: u128, most: Option<u64>| {
            most.map(u128::from).filter(|most| need > *most).map(|most| [need, most].map(gb))
        };
        if need.elements > MOST_ELEMENTS {
            let elements = need.elements;
            return Some(format!(
                "{options} makes a tensor of {elements} elements; allowed: up to {MOST_ELEMENTS}"
            ));
        }
        if let Some([need, most]) = over(need.largest, self.tensor) {
            return Some(format!(
                "{options} needs a tensor of {need:.1} GB; allowed on this device: up to {most:.1} GB"
            ));
        }
        let [need, most] = over(need.total, self.memory)?;
        Some(format!(
            "{options} needs {need:.1} GB of memory; allowed on this machine: up to {most:.1} GB, \
             which are available"
        ))
    }
}

impl Setup {
    /// Says what the device cannot hold, if a benchmark with these options needs too much.
    pub fn excess(&self, options: &str, need: &Need) -> Option<String> {
        let device = &self.compute.device;
        let memory = if self.on_cuda() { None } else { device.available_memory() };
        Limits { tensor: device.largest_tensor(), memory }.excess(options, need)
    }

    /// Checks that the device can hold what a benchmark with these options needs.
    pub fn check(
        &self,
        options: &str,
        need: &Need,
        remedy: &'static str,
    ) -> Result<(), BenchError> {
        match self.excess(options, need) {
            Some(excess) => Err(BenchError::TooLarge { excess, remedy }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_add_up() {
        let need = Need::of([3, 5, 2]);
        assert_eq!(need, Need { elements: 5, largest: 20, total: 40 });
        assert_eq!(need.with_gradients(), Need { total: 80, ..need });
        assert_eq!(need.and(7, 100), Need { total: 140, ..need });
        assert_eq!(need.and(30, 30), Need { elements: 5, largest: 30, total: 70 });
    }

    #[test]
    fn what_is_too_large_is_told() {
        let limits = Limits { tensor: Some(8_000_000_000), memory: Some(20_000_000_000) };
        let excess = |need: Need| limits.excess("--batch 3", &need);
        assert_eq!(excess(Need::of([2_000_000_000, 2_000_000_000])), None);
        let told = [
            (
                Need::of([1 << 32]),
                "makes a tensor of 4294967296 elements; allowed: up to 4294967295",
            ),
            (
                Need::of([u128::from(u32::MAX)]),
                "needs a tensor of 17.2 GB; allowed on this device: up to 8.0 GB",
            ),
            (
                Need::of([2_000_000_000; 3]),
                "needs 24.0 GB of memory; allowed on this machine: up to 20.0 GB, which are available",
            ),
        ];
        for (need, told) in told {
            assert_eq!(excess(need), Some(format!("--batch 3 {told}")));
        }
        let unknown = Limits { tensor: None, memory: None };
        assert_eq!(unknown.excess("--batch 3", &Need::default().and(1 << 90, 1 << 100)), None);
    }
}
