//! Generated tasks, for evaluation prompts and for training rows.

pub mod fflm;
pub(crate) mod packing;
pub mod passkey;
