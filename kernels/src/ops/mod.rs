//! The operations a language model is built of, beside attention.

pub mod activation;
pub mod adamw;
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
pub mod short_conv;
pub mod vjp_root;

#[cfg(test)]
mod support;
