//! Benchmarks: how fast attention, other operations, matrix products, decoding, generation and training
//! steps are on this machine, and how much memory they take.
//!
//! Each of [`kernels`], [`ops`], [`gemm`], [`decode`], [`generate`] and [`train`] has its options, a `run` and a
//! report, which [`Display`](std::fmt::Display)s as a table and serialises as JSON. Inputs are random
//! and never zero, and calls cycle through copies of them, so that no cache holds what a call reads.
//! Times are medians of samples, each of as many calls as last 20 ms; of [`generate`] a sample is a whole
//! generation, and [`train`] times steps. Rates are relative to a ceiling measured in the same run.

mod attention;
mod ceiling;
pub mod decode;
mod error;
pub mod gemm;
pub mod generate;
mod inputs;
pub mod kernels;
mod memory;
pub mod ops;
mod progress;
mod report;
mod setup;
mod timed_pass;
mod timing;
pub mod train;

pub use attention::{KindOptions, Path};
pub use ceiling::Ceiling;
pub use error::BenchError;
pub use progress::Progress;
pub use report::{Measured, Report};
pub use setup::{ModelOptions, Options};
pub use timed_pass::{TimedPass, Work};
pub use timing::Spread;
