//! Blocks of 64 tokens.

use super::levels::{Masks, Moved, MovedGradients, Saved};
use crate::cuda::CudaTensor;

/// The inputs of blocks.
pub struct BlockInputs<'a> {
    /// `[batch, heads, tokens, head_dim]`.
    pub q: &'a CudaTensor,
    /// `[batch, kv_heads, tokens, head_dim]`.
    pub k: &'a CudaTensor,
    /// As k.
    pub v: &'a CudaTensor,
    /// As k, f32.
    pub w: &'a CudaTensor,
    /// `[batch, kv_heads, tokens, 1]`, f32.
    pub beta: &'a CudaTensor,
    /// Factor on q·k.
    pub scale: f32,
}

/// The results of blocks.
pub struct BlockForward {
    /// Vectors of level 0.
    pub moved: Moved,
    /// `[batch, tokens, heads, head_dim]` in f32.
    pub o: CudaTensor,
    /// `[batch, heads, tokens]`.
    pub lse: CudaTensor,
}

/// What the backward pass reads.
pub struct BlockUpstream<'a> {
    /// Statistics.
    pub saved: Saved<'a>,
    /// Gradients of the moved vectors.
    pub moved: MovedGradients,
    /// dv so far.
    pub dv: CudaTensor,
    /// Sums of dS.
    pub sums: Option<&'a [CudaTensor; 2]>,
}

/// Forward.
pub fn forward(_inputs: &BlockInputs, _masks: &Masks) -> BlockForward {
    panic!()
}

/// Backward.
pub fn backward(_inputs: &BlockInputs, _masks: &Masks, _upstream: &BlockUpstream) -> [CudaTensor; 5] {
    panic!()
}
