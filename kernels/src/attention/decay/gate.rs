//! The forget gate that a decay comes from: one logit per token and query head.

use burn::tensor::{FloatDType, Tensor};

use crate::attention::{AttentionShape, Init, ProjectionSpec};
use crate::backend::OpBackend;
use crate::ops::activation::log_sigmoid;

/// The projection to the gate's logits, with the initial bias `bias`.
pub fn forget_gate(shape: &AttentionShape, bias: f32) -> ProjectionSpec {
    ProjectionSpec::new("forget_gate", shape.heads).bias(Init::Constant(bias))
}

/// ℓ = ln σ(logit), `[batch, heads, seq_len]` in f32, from the gate's logits `[batch, seq_len, heads]`.
pub fn log_decay<B: OpBackend>(logits: Tensor<B, 3>) -> Tensor<B, 3> {
    log_sigmoid(logits.cast(FloatDType::F32)).swap_dims(1, 2)
}
