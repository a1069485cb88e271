//! Damaged configurations and checkpoints.

mod checkpoints;
mod configurations;
