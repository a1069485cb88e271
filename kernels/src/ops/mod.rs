//! The operations of a language model beside attention.
//!
//! An operation is a folder: its function, its equation and its reference in `mod.rs`, CPU kernels in
//! `cpu.rs`, device code in `kernel.rs` and its launch in `cuda.rs`. Shared CUDA code is in `cuda`.

#![allow(
    clippy::collapsible_if,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    reason = "device code has no such methods, and its && does not stop early"
)]

pub mod activation;
pub mod adamw;
pub mod all_to_all;
mod bias;
pub mod cross_entropy;
pub(crate) mod cuda;
pub mod embedding;
pub mod grad_norm;
pub mod layer_norm;
pub mod linear;
pub mod matmul;
pub mod mlp;
pub mod prefix_sum;
pub mod rms_norm;
pub mod rotary;
pub mod sample;
pub mod short_conv;
pub mod view_difference;
pub mod vjp_root;

#[cfg(test)]
mod support;
