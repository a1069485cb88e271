//! The state of decoding: keys, values and the decay's prefix sums in growing buffers, and the sums over tokens that
//! have left them.

use super::recurrent::FarSums;
use super::{PowerAttention, by_query_head, forward, group};
use crate::Cuda;
use crate::attention::decay::DecaySumsCache;
use crate::attention::flash::{CacheBuffer, expired};
use crate::attention::power::state::Folding;
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, narrow, reshaped};

/// Keys, values and the decay's prefix sums of the tokens so far, or of the newest ones beside the sums over the
/// others.
#[derive(Clone, Debug)]
pub struct PowerKvCache {
    keys: CacheBuffer,
    values: CacheBuffer,
    /// With a gate: of each query head.
    decay: Option<DecaySumsCache>,
    /// Once tokens have left the cache for the sums.
    far: Option<FarSums>,
}

/// New tokens.
struct NewTokens<'a> {
    /// q `[batch, heads, tokens, head_dim]`, k and v `[batch, kv_heads, tokens, head_dim]`.
    qkv: [&'a CudaTensor; 3],
    /// ℓ, `[batch, kv_heads, tokens]` in f32, with a gate.
    log_decay: Option<&'a CudaTensor>,
}

impl PowerKvCache {
    /// An empty cache for queries like `q` and keys like `k`, with room for `capacity` tokens.
    pub fn new(q: &CudaTensor, k: &CudaTensor, gate: bool, capacity: usize) -> Self {
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let heads = q.meta.shape()[1];
        let tokens = || CacheBuffer::new(k, [batch, kv_heads, head_dim], k.dtype, capacity);
        let decay = gate.then(|| DecaySumsCache::new(k, [batch, heads], capacity));
        PowerKvCache { keys: tokens(), values: tokens(), decay, far: None }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        let decay = self.decay.as_ref().map_or(0, DecaySumsCache::elements);
        let far = self.far.as_ref().map_or(0, FarSums::elements);
        self.keys.elements() + self.values.elements() + decay + far
    }

    /// Appends tokens and returns their outputs, `[batch, heads, tokens, head_dim]`.
    ///
    /// - q: `[batch, heads, tokens, head_dim]` in bf16
    /// - k, v: `[batch, kv_heads, tokens, head_dim]` in bf16
    /// - `log_decay`: ℓ, `[batch, kv_heads, tokens]` in f32
    /// - `folding`: when tokens leave the cache for sums, which the kernels serve; `None` for never
    pub fn extend(
        &mut self,
        op: &PowerAttention,
        folding: Option<Folding>,
        qkv: [&CudaTensor; 3],
        log_decay: Option<&CudaTensor>,
    ) -> CudaTensor {
        let Some(folding) = folding else { return self.attend(op, NewTokens { qkv, log_decay }) };
        let tokens = qkv[0].meta.shape()[2];
        if self.position() == 0 && tokens > folding.switch {
            let whole = PowerAttention { chunk: Some(folding.chunk), ..op.clone() };
            let result = forward(&whole, qkv, log_decay, None, false);
            self.append(op, &NewTokens { qkv, log_decay });
            self.fold(folding);
            return result.expect("inputs that the kernels serve").output;
        }
        let mut outputs = vec![];
        let mut first = 0;
        while first < tokens {
            let size = folding.piece(self.position(), tokens - first);
            let part = |x: &CudaTensor| narrow(x, 2, first..first + size);
            let (qkv, log_decay) = (qkv.map(part), log_decay.map(part));
            let piece = NewTokens { qkv: qkv.each_ref(), log_decay: log_decay.as_ref() };
            outputs.push(tensor::<Cuda, 4>(self.attend(op, piece)));
            self.fold(folding);
            first += size;
        }
        match outputs.len() {
            1 => primitive(outputs.remove(0)),
            _ => primitive(burn::tensor::Tensor::cat(outputs, 2)),
        }
    }

    /// The position of the next token, without a window.
    fn position(&self) -> usize {
        self.far.as_ref().map_or(0, FarSums::tokens) + self.keys.rows()
    }

    /// Appends tokens.
    fn append(&mut self, op: &PowerAttention, NewTokens { qkv, log_decay }: &NewTokens<'_>) {
        let [q, k, v] = *qkv;
        let old = expired(op.window, self.keys.rows(), k.meta.shape()[2]);
        self.drop_first(old);
        self.keys.append(k.clone());
        self.values.append(v.clone());
        if let (Some(decay), Some(log_decay)) = (&mut self.decay, log_decay) {
            decay.append(&by_query_head(log_decay, group(q, k)));
        }
    }

    /// Appends tokens and returns their outputs.
    fn attend(&mut self, op: &PowerAttention, new: NewTokens<'_>) -> CudaTensor {
        self.append(op, &new);
        let [q, ..] = new.qkv;
        let [keys, values] = self.keys_and_values();
        let sums = self.decay.as_ref().map(DecaySumsCache::held);
        let [o, lse] = op.run([q, &keys, &values], sums.clone(), None, false);
        if let Some(far) = &self.far {
            far.join(q, [&o, &lse], sums.as_ref(), self.keys.rows());
        }
        o
    }

    /// Moves the oldest chunks into the sums: see [`Folding::near`].
    fn fold(&mut self, folding: Folding) {
        let old = self.keys.rows() - folding.near(self.position());
        if old == 0 {
            return;
        }
        let [keys, values] = self.keys_and_values();
        let sums = self.decay.as_ref().map(DecaySumsCache::held);
        let far = self.far.get_or_insert_with(|| FarSums::new(&keys));
        far.add([&keys, &values], sums.as_ref(), old);
        self.drop_first(old);
    }

    /// Drops the oldest tokens.
    fn drop_first(&mut self, tokens: usize) {
        self.keys.drop_first(tokens);
        self.values.drop_first(tokens);
        if let Some(decay) = &mut self.decay {
            decay.drop_first(tokens);
        }
    }

    /// Keys and values, `[batch, kv_heads, tokens, head_dim]`.
    pub fn keys_and_values(&self) -> [CudaTensor; 2] {
        [self.keys.held(), self.values.held()]
    }

    /// With a gate, Σ ℓ from the start of its span of [`SPAN`](crate::attention::decay::SPAN) tokens up to and
    /// including each token, of each query head: `[batch, heads, tokens]`.
    pub fn decay_within_spans(&self) -> Option<CudaTensor> {
        let within = self.decay.as_ref()?.held().within;
        let [batch, heads, tokens, _]: [usize; 4] = within.meta.shape().dims();
        Some(reshaped(&within, &[batch, heads, tokens]))
    }
}
