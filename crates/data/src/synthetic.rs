//! Generated tasks: prompts for evaluation, and rows for training.

pub mod fflm;
pub mod passkey;
pub(crate) mod rows;
