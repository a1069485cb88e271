//! The choice of the next token from its logits.

mod cpu;
mod cuda;
mod kernel;

use burn::tensor::{Int, Tensor, TensorData};
use rayon::prelude::*;

use crate::backend::{OpBackend, primitive};

/// How a token is chosen from its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Divides the logits before the softmax; 0 always takes the most likely token, the first of equals.
    pub temperature: f32,
    /// Keep only the k most likely tokens, the first of equals.
    pub top_k: Option<usize>,
    /// Of the tokens kept so far, keep only the most likely ones whose total probability is at least this, in
    /// (0, 1] (Holtzman et al., "The curious case of neural text degeneration", 2020).
    pub top_p: Option<f32>,
}

impl Sampler {
    /// Whether the choice depends on a random number.
    pub fn is_random(&self) -> bool {
        self.temperature > 0.0
    }
}

/// Draws one token for each row from the softmax of its logits, as `sampler` says: with the tokens that are kept
/// in the order of the vocabulary, the first whose cumulative probability exceeds the row's `uniform`.
///
/// - `logits`: `[batch, vocab]` in f32, finite
/// - `uniforms`: `[batch]` in f32, one number in [0, 1) for each row; `None` if the choice is not random
///
/// Returns `[batch]`. Devices may differ where rounding decides.
///
/// # Panics
/// When the choice is random and there is not one number for each row.
pub fn sample<B: OpBackend>(
    logits: Tensor<B, 2>,
    sampler: &Sampler,
    uniforms: Option<Tensor<B, 1>>,
) -> Tensor<B, 1, Int> {
    let ([batch, vocab], device) = (logits.dims(), logits.device());
    let uniforms = uniforms.filter(|_| sampler.is_random());
    let numbers = uniforms.as_ref().map(|uniforms| uniforms.dims()[0]);
    assert!(numbers == sampler.is_random().then_some(batch), "{numbers:?} numbers of {batch} rows");
    if let Some(logits) = B::into_cuda(primitive(logits.clone())) {
        let uniforms = uniforms.and_then(|uniforms| B::into_cuda(primitive(uniforms)));
        let tokens = cuda::sample(&logits, sampler, uniforms.as_ref());
        return Tensor::from_primitive(B::int_from_cuda(tokens));
    }
    let numbers = |data: TensorData| data.convert::<f32>().into_vec::<f32>().expect("f32");
    let uniforms = uniforms.map_or(vec![0.0; batch], |uniforms| numbers(uniforms.into_data()));
    let logits = numbers(logits.into_data());
    let rows = logits.par_chunks_exact(vocab).zip(uniforms);
    let tokens = rows.map(|(logits, uniform)| cpu::draw(logits, sampler, uniform) as i32);
    Tensor::from_data(TensorData::new(tokens.collect::<Vec<_>>(), [batch]), &device)
}

#[cfg(test)]
mod tests;
