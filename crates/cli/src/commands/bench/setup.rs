//! Options and preparations that the benchmarks of operations share.

use anyhow::{Result, bail};
use burn::tensor::DType;
use clap::ValueEnum;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::Device;
use longwall_model::Precision;

use super::timing::Clock;
use crate::context::{DeviceArg, open_device, precision_on};

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
        let Some(precision) = precision_on(&device, asked) else {
            bail!(
                "--precision is {}, but the device is the CPU; allowed there: f32\n  \
                 hint: leave --precision out, or use a machine with an NVIDIA GPU",
                asked.unwrap_or_default()
            )
        };
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

/// The most elements of a tensor: kernels count them in 32 bits.
const MOST_ELEMENTS: u128 = u32::MAX as u128;

/// What a benchmark holds at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Elements of the largest tensor that kernels take.
    elements: u128,
    /// Bytes of the largest tensor.
    largest: u128,
    /// Bytes of all tensors.
    total: u128,
}

impl Need {
    /// Tensors of so many elements each, which kernels take. They are drawn in f32, and stay so on
    /// the CPU.
    pub fn of(tensors: impl IntoIterator<Item = u128>) -> Self {
        tensors.into_iter().fold(Need::default(), |need, elements| {
            let need = Need { elements: need.elements.max(elements), ..need };
            need.and(4 * elements, 4 * elements)
        })
    }

    /// And `total` bytes more, of tensors of up to `largest` bytes.
    pub fn and(self, largest: u128, total: u128) -> Self {
        Need { largest: self.largest.max(largest), total: self.total + total, ..self }
    }

    /// And a gradient of each tensor.
    pub fn with_gradients(self) -> Self {
        Need { total: 2 * self.total, ..self }
    }
}

/// Bytes that a device can give, where they are known.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// To one tensor.
    tensor: Option<u64>,
    /// To all.
    memory: Option<u64>,
}

impl Limits {
    /// What `need`, that of a benchmark with these options, has too much of.
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
    /// Says what of it the device cannot hold, where a benchmark with these options needs so much.
    pub fn excess(&self, options: &str, need: &Need) -> Option<String> {
        let memory = if self.on_cuda() { None } else { available_memory() };
        Limits { tensor: self.device.largest_tensor(), memory }.excess(options, need)
    }

    /// The device can hold what a benchmark with these options needs.
    pub fn check(&self, options: &str, need: &Need, remedy: &str) -> Result<()> {
        match self.excess(options, need) {
            Some(excess) => bail!("{excess}\n  hint: {remedy}"),
            None => Ok(()),
        }
    }
}

/// Bytes that programs can still take of this machine's memory; `None` where the system does not say.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// A size on the command line, from 1 to `MOST`.
pub fn parse_size<const MOST: usize>(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|size| (1..=MOST).contains(size));
    size.ok_or_else(|| format!("`{text}`; allowed: a whole number from 1 to {MOST}"))
}

/// A shape on the command line: as many sizes, called `names`, with commas between them.
pub fn parse_shape<const N: usize>(
    text: &str,
    names: &str,
    example: [usize; N],
) -> Result<[usize; N], String> {
    let size = |text: &str| text.trim().parse().ok().filter(|size| (1..=u32::MAX).contains(size));
    let sizes: Option<Vec<_>> = text.split(',').map(|n| size(n).map(|n| n as usize)).collect();
    sizes.and_then(|sizes| sizes.try_into().ok()).ok_or_else(|| {
        format!(
            "`{text}` is no shape; allowed: {names}, whole numbers from 1 to {}, for example {}",
            u32::MAX,
            shape_text(&example)
        )
    })
}

/// A shape as on the command line.
pub fn shape_text(shape: &[usize]) -> String {
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The heads of k and v, where `asked` is what --kv-heads says.
pub fn kv_heads(asked: Option<usize>, heads: usize) -> Result<usize> {
    let kv_heads = asked.unwrap_or(heads);
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        bail!(
            "--kv-heads is {kv_heads}; allowed: a divisor of the {heads} heads\n  \
             hint: leave it out for {heads}"
        );
    }
    Ok(kv_heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_in_its_range() {
        assert_eq!(parse_size::<16>("16"), Ok(16));
        for bad in ["0", "-1", "17", "a", ""] {
            assert!(parse_size::<16>(bad).unwrap_err().contains("from 1 to 16"), "{bad}");
        }
    }

    #[test]
    fn a_shape_is_as_many_numbers() {
        let parse = |text: &str| parse_shape::<3>(text, "tokens, outputs and inputs", [4, 3, 2]);
        assert_eq!(parse("65536,3072, 768"), Ok([65_536, 3072, 768]));
        for bad in ["", "1,2", "1,2,3,4", "1,2,x", "0,2,3", "-1,2,3", "4294967296,1,1"] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains("is no shape; allowed: tokens, outputs and inputs"), "{error}");
            assert!(error.ends_with("for example 4,3,2"), "{error}");
        }
    }

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

    #[test]
    fn linux_tells_its_available_memory() {
        if cfg!(target_os = "linux") {
            assert!(available_memory().is_some_and(|bytes| bytes > 1 << 20));
        }
    }
}
