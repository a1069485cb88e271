//! The launch of the choice of a token on CUDA.

use burn::tensor::DType;
use cubecl::prelude::*;

use super::Sampler;
use super::kernel::{self, Filter, THREADS};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{as_u32, dim, dims, nothing};

/// See [`sample`](super::sample).
pub fn sample(logits: &CudaTensor, sampler: &Sampler, uniforms: Option<&CudaTensor>) -> CudaTensor {
    let logits = contiguous(logits);
    let [batch, vocab] = dims(&logits).try_into().expect("a row of logits per sequence");
    assert_eq!(logits.dtype, DType::F32, "type of the logits");
    let tokens = empty(&logits, &[batch], DType::I32);
    let random = sampler.is_random();
    let uniforms = uniforms.map(contiguous);
    let filter = Filter {
        random,
        top_k: random && sampler.top_k.is_some_and(|k| k < vocab),
        top_p: random && sampler.top_p.is_some(),
    };
    // SAFETY: a block reads its row of the logits and its number, and writes its token.
    unsafe {
        kernel::sample::launch_unchecked(
            &logits.client,
            CubeCount::Static(as_u32(batch), 1, 1),
            dim(THREADS),
            buffer(&logits, 1),
            // Not read if the choice is not random.
            uniforms.as_ref().map_or_else(|| nothing(&logits), |numbers| buffer(numbers, 1)),
            buffer(&tokens, 1),
            as_u32(vocab),
            if random { 1.0 / sampler.temperature } else { 1.0 },
            as_u32(sampler.top_k.unwrap_or(vocab).clamp(1, vocab)),
            sampler.top_p.unwrap_or(1.0),
            filter,
        );
    }
    tokens
}
