//! Generated tasks, for evaluation prompts and for training rows.

pub mod fflm;
pub mod held_out;
pub mod mqar;
pub mod mqrar;
pub(crate) mod packing;
pub mod passkey;
pub mod phonebook;
pub mod symbols;
pub mod word_problem;
