//! The kernels: device code, and what it is compiled for.

#![allow(
    clippy::collapsible_if,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    reason = "device code has no such methods, and its && does not stop early"
)]

pub mod block;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod norm;
pub mod prefix_sum;
pub mod rotary;
pub mod short_conv;
pub mod sums;
