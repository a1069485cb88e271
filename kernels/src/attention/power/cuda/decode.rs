//! Decoding in the attention form: keys, values and the decay's prefix sums in growing buffers.

use burn::tensor::DType;

use super::{PowerAttention, by_query_head, group};
use crate::attention::decay::{DecaySums, SPAN};
use crate::attention::flash::{CacheBuffer, expired};
use crate::cuda::{CudaTensor, reshaped};

/// Keys, values and the decay's prefix sums of the tokens so far.
#[derive(Clone, Debug)]
pub struct PowerKvCache {
    keys: CacheBuffer,
    values: CacheBuffer,
    /// With a gate.
    decay: Option<DecayBuffers>,
}

/// The prefix sums of each query head's decay.
#[derive(Clone, Debug)]
struct DecayBuffers {
    /// Σ ℓ within spans, `[batch, heads, tokens, 1]`.
    within: CacheBuffer,
    /// Σ ℓ before spans, `[batch, heads, spans + 1, 2]`.
    before: CacheBuffer,
}

impl DecayBuffers {
    /// Makes room for tokens after the `held` ones, and appends their sums.
    fn add(&mut self, log_decay: &CudaTensor, held: usize, tokens: usize) {
        self.within.add(tokens);
        self.before.add((held + tokens).div_ceil(SPAN) + 1 - self.before.rows());
        self.sums().add(log_decay, held);
    }

    /// Views of the sums held.
    fn sums(&self) -> DecaySums {
        DecaySums { within: self.within.held(), before: self.before.held() }
    }
}

impl PowerKvCache {
    /// An empty cache for queries like `q` and keys like `k`, with room for `capacity` tokens.
    pub fn new(q: &CudaTensor, k: &CudaTensor, gate: bool, capacity: usize) -> Self {
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let heads = q.meta.shape()[1];
        let tokens = || CacheBuffer::new(k, [batch, kv_heads, head_dim], k.dtype, capacity);
        let decay = gate.then(|| DecayBuffers {
            within: CacheBuffer::new(k, [batch, heads, 1], DType::F32, capacity),
            before: CacheBuffer::new(k, [batch, heads, 2], DType::F32, capacity.div_ceil(SPAN) + 1),
        });
        PowerKvCache { keys: tokens(), values: tokens(), decay }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        let decay = self.decay.iter().flat_map(|decay| [&decay.within, &decay.before]);
        [&self.keys, &self.values].into_iter().chain(decay).map(CacheBuffer::elements).sum()
    }

    /// Appends tokens and returns their outputs, `[batch, heads, tokens, head_dim]`.
    ///
    /// - `log_decay`: ℓ, `[batch, kv_heads, tokens]` in f32
    pub fn extend(
        &mut self,
        op: &PowerAttention,
        [q, k, v]: [&CudaTensor; 3],
        log_decay: Option<&CudaTensor>,
    ) -> CudaTensor {
        let tokens = k.meta.shape()[2];
        let old = expired(op.window, self.keys.rows(), tokens);
        self.keys.drop_first(old);
        self.values.drop_first(old);
        let held = self.keys.rows();
        self.keys.append(k.clone());
        self.values.append(v.clone());
        if let (Some(decay), Some(log_decay)) = (&mut self.decay, log_decay) {
            decay.within.drop_first(old);
            decay.before.drop_first(old / SPAN);
            decay.add(&by_query_head(log_decay, group(q, k)), held, tokens);
        }
        let sums = self.decay.as_ref().map(DecayBuffers::sums);
        let [o, _] = op.run([q, &self.keys.held(), &self.values.held()], sums, None, false);
        o
    }

    /// Keys and values, `[batch, kv_heads, tokens, head_dim]`.
    pub fn keys_and_values(&self) -> [CudaTensor; 2] {
        [self.keys.held(), self.values.held()]
    }

    /// With a gate, Σ ℓ from the start of its span of [`SPAN`] tokens up to and including each token, of each
    /// query head: `[batch, heads, tokens]`.
    pub fn decay_within_spans(&self) -> Option<CudaTensor> {
        let within = self.decay.as_ref()?.within.held();
        let [batch, heads, tokens, _]: [usize; 4] = within.meta.shape().dims();
        Some(reshaped(&within, &[batch, heads, tokens]))
    }
}
