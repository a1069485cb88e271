//! The cache of keys and values, of the same tokens for all heads or of each head's own.

use burn::tensor::Tensor;

use crate::Cuda;
use crate::attention::flash::CacheBuffer;
use crate::attention::flash::ragged::{RaggedKv, sums_of_even};
use crate::cuda::CudaTensor;

/// k_j · 2^(E_{J−1} − p_j), J the tile of j, of each gate head, and the values of each kv head.
#[derive(Clone, Debug)]
pub enum RescaledKv {
    /// All heads hold the same tokens: keys and values, `[batch, heads, tokens, head_dim]`.
    Even([CacheBuffer; 2]),
    /// After eviction, each kv head of each sequence holds its newest ones.
    Ragged(Box<RaggedKv>),
}

impl RescaledKv {
    /// Tokens since the first one that a head holds.
    pub fn len(&self) -> usize {
        match self {
            RescaledKv::Even([keys, _]) => keys.rows(),
            RescaledKv::Ragged(kv) => kv.end(),
        }
    }

    /// Adds an uninitialised token, which the caller writes.
    pub fn add(&mut self) {
        match self {
            RescaledKv::Even(kv) => kv.iter_mut().for_each(|x| x.add(1)),
            RescaledKv::Ragged(kv) => kv.add(),
        }
    }

    /// Elements of the buffers.
    pub fn elements(&self) -> usize {
        match self {
            RescaledKv::Even(kv) => kv.iter().map(CacheBuffer::elements).sum(),
            RescaledKv::Ragged(kv) => kv.elements(),
        }
    }

    /// The buffers of keys and values, `[…, rows, head_dim]`.
    pub fn buffers(&self) -> [&CudaTensor; 2] {
        match self {
            RescaledKv::Even(kv) => kv.each_ref().map(CacheBuffer::buffer),
            RescaledKv::Ragged(kv) => kv.buffers(),
        }
    }

    /// Of ragged heads, the rows of their position 0.
    pub fn bases(&self) -> Option<&CudaTensor> {
        match self {
            RescaledKv::Even(_) => None,
            RescaledKv::Ragged(kv) => Some(kv.bases()),
        }
    }

    /// Of ragged heads, the first position of each kv head, `[batch · kv_heads]`.
    pub fn firsts(&self) -> Option<&[usize]> {
        match self {
            RescaledKv::Even(_) => None,
            RescaledKv::Ragged(kv) => Some(kv.firsts()),
        }
    }

    /// Drops the tokens of each kv head before position `until`, `[batch · kv_heads]`; returns the sums of their
    /// values, `[batch · kv_heads, head_dim]`.
    pub fn evict(&mut self, query_heads: usize, until: &[usize]) -> Tensor<Cuda, 2> {
        match self {
            RescaledKv::Even([keys, values]) => {
                let sums = sums_of_even(values, until);
                let kv = RaggedKv::new(query_heads, [keys, values], until);
                *self = RescaledKv::Ragged(Box::new(kv));
                sums
            }
            RescaledKv::Ragged(kv) => {
                let sums = kv.sums(until);
                kv.keep(until);
                sums
            }
        }
    }
}
