//! The sizes of a call.

use cubecl::cuda::CudaRuntime;

use super::CHUNK_TOKENS;
use super::memory::SizesLaunch;
use crate::cuda::CudaTensor;
use crate::ops::cuda::{as_u32, dims};

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallSizes {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// kv heads.
    pub kv_heads: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Channels of a query and a key.
    pub head_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
}

impl CallSizes {
    /// Of q `[batch, heads, seq_len, head_dim]` and v `[batch, kv_heads, seq_len, value_dim]`.
    ///
    /// # Panics
    /// Where they do not belong together, or [`serves`](super::serves) is false.
    pub fn new(q: &CudaTensor, v: &CudaTensor) -> Self {
        let [batch, heads, seq_len, head_dim] = q.meta.shape().dims();
        let [_, kv_heads, _, value_dim] = v.meta.shape().dims();
        assert_eq!(dims(v), [batch, kv_heads, seq_len, value_dim], "the shape of v");
        assert!(heads.is_multiple_of(kv_heads), "{heads} query heads of {kv_heads} kv heads");
        assert!(
            super::serves(q.dtype, head_dim, value_dim),
            "{head_dim} and {value_dim} of {:?}",
            q.dtype
        );
        CallSizes { batch, heads, kv_heads, seq_len, head_dim, value_dim }
    }

    /// Rows: kv heads of sequences.
    pub fn rows(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Query heads of a kv head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Chunks of a row.
    pub fn chunks(&self) -> usize {
        self.seq_len.div_ceil(CHUNK_TOKENS)
    }

    /// The most channels, a divisor of the values' and at most `most`.
    pub fn columns(&self, most: usize) -> usize {
        let mut columns = most;
        while !self.value_dim.is_multiple_of(columns) {
            columns /= 2;
        }
        columns
    }

    /// The shape of a tensor of kv heads.
    pub fn of_keys(&self, channels: usize) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq_len, channels]
    }

    /// The sizes as a kernel argument.
    pub fn launch(&self) -> SizesLaunch<CudaRuntime> {
        let [tokens, chunks, group, kv_heads] =
            [self.seq_len, self.chunks(), self.group(), self.kv_heads].map(as_u32);
        SizesLaunch::new(tokens, chunks, group, kv_heads)
    }
}
