//! The operations a language model is built of, beside attention.

pub mod adamw;
pub mod grad_norm;
pub mod linear;
