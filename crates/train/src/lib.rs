//! Longwall's trainer: the run configuration, the loop, the optimiser, schedules, checkpoints,
//! metrics, and sweeps.
//!
//! [`config::RunConfig`] is one TOML file; [`run::train`] does what it says;
//! [`checkpoint::Checkpoint`] opens what came out; [`sweep`] does many runs.

pub mod bench;
pub mod checkpoint;
pub mod config;
pub mod console;
pub mod device;
mod error;
pub mod gradients;
pub mod guard;
pub mod meters;
pub mod metrics;
pub mod optimiser;
pub mod pass;
pub mod peak;
pub mod run;
pub mod run_folder;
pub mod sampling;
pub mod schedule;
pub mod signals;
pub mod sweep;
pub mod tensorboard;
#[cfg(test)]
mod testing;
pub mod validation;

pub use error::TrainError;
