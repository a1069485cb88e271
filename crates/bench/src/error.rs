//! Why something cannot be measured.

use longwall_data::DataError;
use longwall_model::Precision;
use longwall_model::generate::GenerateError;
use longwall_train::TrainError;
use longwall_train::config::{ConfigError, KindError};
use longwall_train::device::DeviceError;

/// Why something cannot be measured. Messages name the options of `longwall bench`.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The configuration of training steps.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Rows that need several GPUs.
    #[error(transparent)]
    Ranks(Box<TrainError>),
    /// A sequence to generate.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// An attention kind, its keys, or sizes that it does not allow.
    #[error(transparent)]
    Kind(#[from] KindError),
    /// The CPU lacks this precision.
    #[error(
        "--precision is {0}, but the device is the CPU; allowed there: f32\n  hint: leave --precision out, or use a machine with an NVIDIA GPU"
    )]
    Precision(Precision),
    /// The number of kv_heads does not divide the number of heads.
    #[error(
        "--kv-heads is {kv_heads}; allowed: a divisor of the {heads} heads\n  hint: leave it out for {heads}"
    )]
    KvHeads {
        /// Heads of k and v.
        kv_heads: usize,
        /// Heads of q.
        heads: usize,
    },
    /// The width is not a multiple of the head size.
    #[error(
        "--width is {width}; allowed: multiples of {head_dim}, the channels of a head\n  hint: --width {}",
        width.next_multiple_of(*head_dim)
    )]
    Width {
        /// The width.
        width: usize,
        /// Channels of a head.
        head_dim: usize,
    },
    /// The device cannot hold the tensors.
    #[error("{excess}\n  hint: {remedy}")]
    TooLarge {
        /// The options, what they need, and what is allowed.
        excess: String,
        /// What to do.
        remedy: &'static str,
    },
}
