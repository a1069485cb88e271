//! The state of decoding: keys, values and the decay's prefix sums in growing buffers, and the sums over tokens that
//! have left them.

use std::ops::Range;

use burn::tensor::Tensor;

use super::recurrent::FarSums;
use super::{PowerAttention, Whole, by_query_head, group, whole};
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

/// Tokens to append.
#[derive(Clone, Debug)]
pub struct PowerTokens {
    /// q `[batch, heads, tokens, head_dim]`, k and v `[batch, kv_heads, tokens, head_dim]`, in bf16.
    pub qkv: [CudaTensor; 3],
    /// With a gate: ℓ, `[batch, kv_heads, tokens]` in f32.
    pub log_decay: Option<CudaTensor>,
}

impl PowerTokens {
    fn len(&self) -> usize {
        self.qkv[0].meta.shape()[2]
    }

    fn narrow(&self, range: Range<usize>) -> Self {
        let cut = |x: &CudaTensor| narrow(x, 2, range.clone());
        PowerTokens {
            qkv: self.qkv.each_ref().map(cut),
            log_decay: self.log_decay.as_ref().map(cut),
        }
    }
}

impl PowerKvCache {
    /// An empty cache for tokens like these, with room for `capacity` of them.
    pub fn new(tokens: &PowerTokens, capacity: usize) -> Self {
        let [q, k, _] = &tokens.qkv;
        let [batch, kv_heads, _, head_dim]: [usize; 4] = k.meta.shape().dims();
        let heads = q.meta.shape()[1];
        let buffer = || CacheBuffer::new(k, [batch, kv_heads, head_dim], k.dtype, capacity);
        let gate = tokens.log_decay.is_some();
        let decay = gate.then(|| DecaySumsCache::new(k, [batch, heads], capacity));
        PowerKvCache { keys: buffer(), values: buffer(), decay, far: None }
    }

    /// Elements of all buffers.
    pub fn elements(&self) -> usize {
        let decay = self.decay.as_ref().map_or(0, DecaySumsCache::elements);
        let far = self.far.as_ref().map_or(0, FarSums::elements);
        self.keys.elements() + self.values.elements() + decay + far
    }

    /// Appends tokens and returns their outputs, `[batch, heads, tokens, head_dim]`. `op` is the attention form;
    /// `folding` says when tokens leave the cache for sums, and is `None` for never.
    ///
    /// # Panics
    /// When the kernels do not serve the tokens, or these chunks.
    pub fn extend(
        &mut self,
        op: &PowerAttention,
        folding: Option<Folding>,
        new: &PowerTokens,
    ) -> CudaTensor {
        let Some(folding) = folding else { return self.attend(op, new) };
        if self.position() == 0 && new.len() > folding.switch {
            return self.prefill(op, folding, new);
        }
        let mut outputs = vec![];
        let mut first = 0;
        while first < new.len() {
            let size = folding.piece(self.position(), new.len() - first);
            let piece = new.narrow(first..first + size);
            outputs.push(tensor::<Cuda, 4>(self.attend(op, &piece)));
            self.fold(folding);
            first += size;
        }
        match outputs.len() {
            1 => primitive(outputs.remove(0)),
            _ => primitive(Tensor::cat(outputs, 2)),
        }
    }

    /// Appends the first tokens, in the chunked form.
    fn prefill(&mut self, op: &PowerAttention, folding: Folding, new: &PowerTokens) -> CudaTensor {
        let chunked = PowerAttention { chunk: Some(folding.chunk), ..op.clone() };
        let (qkv, log_decay) = (new.qkv.each_ref(), new.log_decay.as_ref());
        let all = whole(&chunked, qkv, log_decay, None, false);
        let Whole { o, far, .. } = all.expect("tokens that the kernels serve");
        self.far = far.map(|(_, states)| FarSums::after(&states, folding.chunk));
        self.append(op, &new.narrow(self.position()..new.len()));
        self.fold(folding);
        o
    }

    /// The position of the next token, without a window.
    fn position(&self) -> usize {
        self.far.as_ref().map_or(0, FarSums::tokens) + self.keys.rows()
    }

    /// Appends tokens.
    fn append(&mut self, op: &PowerAttention, new: &PowerTokens) {
        let [q, k, v] = &new.qkv;
        self.drop_first(expired(op.window, self.keys.rows(), new.len()));
        self.keys.append(k.clone());
        self.values.append(v.clone());
        if let (Some(decay), Some(log_decay)) = (&mut self.decay, &new.log_decay) {
            decay.append(&by_query_head(log_decay, group(q, k)));
        }
    }

    /// Appends tokens and returns their outputs over the cache and the sums.
    fn attend(&mut self, op: &PowerAttention, new: &PowerTokens) -> CudaTensor {
        self.append(op, new);
        let [q, ..] = &new.qkv;
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
