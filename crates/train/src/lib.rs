//! Longwall's trainer: the run configuration, the loop, the optimiser, schedules, checkpoints,
//! metrics, and sweeps.
//!
//! [`config::RunConfig`] is one TOML file; [`run::train`] trains its model;
//! [`checkpoint::Checkpoint`] opens the result; [`sweep`] does many runs.

pub mod bench;
pub mod carried;
pub mod checkpoint;
pub mod config;
pub mod console;
pub mod device;
pub mod distributed;
mod error;
pub mod evaluation;
pub mod grad_accumulation;
pub mod gradients;
pub mod guard;
pub mod import;
pub mod memory;
pub mod meters;
pub mod metrics;
pub mod noise_scale;
pub mod optimiser;
pub mod peak;
pub mod run;
pub mod run_folder;
pub mod sampling;
pub mod scalars;
pub mod schedule;
pub mod signals;
pub mod sweep;
pub mod tensorboard;
#[cfg(test)]
mod testing;
pub mod timeline;
pub mod validation;
pub mod verify;

pub use error::TrainError;
