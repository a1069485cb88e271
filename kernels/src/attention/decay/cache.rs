//! The prefix sums of a decoding cache.

use burn::tensor::DType;

use super::{DecaySums, SPAN};
use crate::attention::flash::CacheBuffer;
use crate::cuda::CudaTensor;

/// The prefix sums of the tokens so far, in buffers that grow by doubling.
#[derive(Clone, Debug)]
pub struct DecaySumsCache {
    /// Σ ℓ within spans, `[batch, heads, tokens, 1]`.
    within: CacheBuffer,
    /// Σ ℓ before spans, `[batch, heads, spans + 1, 2]`.
    before: CacheBuffer,
}

impl DecaySumsCache {
    /// No sums yet, on the device of `like`, with room for `capacity` tokens.
    pub fn new(like: &CudaTensor, [batch, heads]: [usize; 2], capacity: usize) -> Self {
        let buffer =
            |channels, rows| CacheBuffer::new(like, [batch, heads, channels], DType::F32, rows);
        DecaySumsCache {
            within: buffer(1, capacity),
            before: buffer(2, capacity.div_ceil(SPAN) + 1),
        }
    }

    /// Elements of the buffers.
    pub fn elements(&self) -> usize {
        self.within.elements() + self.before.elements()
    }

    /// Adds uninitialised sums of `tokens` more tokens, which the caller writes to [`DecaySumsCache::buffers`].
    pub fn add(&mut self, tokens: usize) {
        self.within.add(tokens);
        self.before.add(self.within.rows().div_ceil(SPAN) + 1 - self.before.rows());
    }

    /// Appends the sums of tokens with ℓ `[batch, heads, tokens]`.
    pub fn append(&mut self, log_decay: &CudaTensor) {
        let held = self.within.rows();
        self.add(log_decay.meta.shape()[2]);
        self.buffers().add(log_decay, held);
    }

    /// Drops those of the oldest tokens.
    ///
    /// # Panics
    /// Unless `tokens` are whole spans.
    pub fn drop_first(&mut self, tokens: usize) {
        assert!(tokens.is_multiple_of(SPAN), "{tokens} tokens are no whole spans");
        self.within.drop_first(tokens);
        self.before.drop_first(tokens / SPAN);
    }

    /// The whole buffers.
    pub fn buffers(&self) -> DecaySums {
        DecaySums { within: self.within.buffer().clone(), before: self.before.buffer().clone() }
    }

    /// Views of the sums held.
    pub fn held(&self) -> DecaySums {
        DecaySums { within: self.within.held(), before: self.before.held() }
    }
}
