//! Tokens that go on from a state, as decoding needs them.

use burn::tensor::{DType, Tensor};

use super::diagonal::Corrections;
use super::{Chunked, Update, diagonal};
use crate::attention::dispatch::on_cuda;
use crate::attention::recurrent::step::Token;
use crate::backend::{OpBackend, tensor};
use crate::ops::cuda::dims;

/// What tokens bring to the states: q `[batch, heads, tokens, head_dim]`, times the scale, k `[batch, kv_heads, tokens,
/// head_dim]` and v `[batch, kv_heads, tokens, value_dim]` in bf16, log decays `[batch, kv_heads, tokens, 1 or
/// head_dim]` and β, if any, `[batch, kv_heads, tokens, 1]` in f32.
#[derive(Clone, Debug)]
pub struct NewTokens<B: OpBackend> {
    /// q
    pub q: Tensor<B, 4>,
    /// k
    pub k: Tensor<B, 4>,
    /// v
    pub v: Tensor<B, 4>,
    /// The log decays.
    pub log_decay: Tensor<B, 4>,
    /// β
    pub beta: Option<Tensor<B, 4>>,
}

impl<B: OpBackend> NewTokens<B> {
    /// y `[batch, heads, tokens, value_dim]` in type `output`, bf16 or f32, without gradients, and the state after the
    /// last token; `before` is that before the first, 0 if there is none. States are `[batch · kv_heads, head_dim, value_dim]` in f32.
    ///
    /// # Panics
    /// On other devices than CUDA; where the core does not serve the inputs.
    pub fn extend(
        self,
        update: Update,
        output: DType,
        before: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        match before {
            Some(state) if self.q.dims()[2] == 1 => {
                let (y, after) = self.step(update, state);
                (y.cast(output), after)
            }
            before => self.in_chunks(update, output, before),
        }
    }

    /// In f32.
    fn step(self, update: Update, state: Tensor<B, 3>) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let NewTokens { q, k, v, log_decay, beta } = self;
        let [q, k, v] = [q, k, v].map(|x| x.cast(DType::F32));
        let (v, corrections) = match (update, beta) {
            (Update::Delta, beta) => (v, Corrections::Weights(beta.expect("β of the delta rule"))),
            (Update::Additive, Some(beta)) => (v * beta, Corrections::None),
            (Update::Additive, None) => (v, Corrections::None),
        };
        Token { q, k, v, log_decay, corrections }.advance(state)
    }

    fn in_chunks(
        self,
        update: Update,
        output: DType,
        before: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let NewTokens { q, k, v, log_decay, beta } = self;
        let (q, k, v) = (on_cuda(q), on_cuda(k), on_cuda(v));
        let (log_decay, beta) = (on_cuda(log_decay), beta.map(on_cuda));
        let (before, inputs) = (before.map(on_cuda), [&q, &k, &v, &log_decay]);
        let (y, after) = match dims(&log_decay)[3] {
            1 => {
                let call = Chunked::new(update, inputs, beta.as_ref());
                let (y, _, after) = call.forward_from(output, before.as_ref());
                (y, after)
            }
            _ => {
                let call = diagonal(inputs, beta.as_ref(), update);
                let call = call.expect("an update that the core serves");
                let (y, _, after) = call.forward_from(output, before.as_ref());
                (y, after)
            }
        };
        (tensor(B::from_cuda(y)), tensor(B::from_cuda(after)))
    }
}
