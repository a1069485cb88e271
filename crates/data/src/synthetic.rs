//! Generated tasks, for evaluation prompts and for training rows.

pub mod babilong;
mod choices;
pub mod fflm;
mod fit;
pub mod haystack;
pub mod held_out;
pub mod mqar;
pub mod mqrar;
pub mod mrcr;
pub mod multi_needle;
pub mod niah;
pub(crate) mod packing;
pub mod passkey;
pub mod phonebook;
pub mod ruler;
pub mod symbols;
pub mod word_problem;
