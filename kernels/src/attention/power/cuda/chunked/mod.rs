//! The chunked form on CUDA, for p = 2 (Gelada et al., 2025, appendix F), in time and memory linear in the length.
//!
//! A query of chunk c reads the keys of chunks c and c − 1 by the attention form on the flash core, whose documents
//! are cut to start there, and older keys through the state after chunk c − 2:
//!
//! - S = Σ_j w_j φ(k_j) v_jᵀ, where w_j is the decay to the chunk's end. φ has a channel for each product of two
//!   channels that are in one pair of tiles; it is made on the fly, a slab of 64 channels at a time ([`slab`]).
//! - M = Σ_j w_j k_j k_jᵀ, for the sum of weights φ(q)ᵀ Σ_j w_j φ(k_j) = qᵀ M q.
//!
//! 1. [`factors`]: the decays, and the first near key of each query.
//! 2. The flash core: o and the log-sum-exp over the near keys.
//! 3. [`scan`]: the states, each warpgroup a slab over all chunks, with sums in f32 registers; states are written in
//!    bf16.
//! 4. [`read`]: o and the log-sum-exp over all keys.
//!
//! Backward, the flash core with the log-sum-exp over all keys gives what near keys contribute. With f the decay of a
//! query's state over its sum of weights and δ = doᵀo, the gradients of states are sums over later queries of
//! φ(q) (f do)ᵀ and −δ f q qᵀ, by the same scan from the last chunk to the first. From S and M and their gradients,
//! [`contract`] makes those of queries and keys, and [`read`] that of values. The states are recomputed: kept, they
//! would take 18 times the memory of k for 64 channels in chunks of 128 tokens.
//!
//! Every sum has one owner and a fixed order: equal inputs give equal bits.

// Device code has no `div_ceil` or `is_multiple_of`, and what is decided at compile time has an `if` of its own.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

mod contract;
mod factors;
mod read;
mod scan;
mod slab;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::contract::ContractArraysLaunch;
use self::factors::{DecaySizesLaunch, DecaySources, DecaysLaunch};
use self::read::{ReadArraysLaunch, ReadConfig, ReadSizesLaunch};
use self::scan::{ScanConfig, ScanInputsLaunch, ScanSizesLaunch};
pub use self::slab::{SLAB, StateLayout, next_tiles, tiles_of};
use super::group;
use crate::attention::flash::{Gradients, Heads, row_dots};
use crate::cuda::{
    CudaTensor, buffer, contiguous, empty, multiprocessors, narrow, reshaped, zeros,
};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, elements, integers, nothing};
use crate::tile::CHUNK;

/// Whether the kernels have the chunked form with this power, these channels of a head and these tokens of a chunk.
pub fn serves(p: u32, head_dim: usize, chunk: usize) -> bool {
    p == 2 && [32, 64, 128].contains(&head_dim) && chunk.is_multiple_of(read::ROWS)
}

/// Elements of a state of a kv head.
pub fn state_elements(head_dim: usize) -> usize {
    StateLayout { head_dim }.rows() * head_dim
}

/// Bytes per token that the forward pass keeps beside what the attention form does: a factor of each query head, and a
/// decay of each kv head.
pub fn saved_bytes(heads: usize, kv_heads: usize) -> f64 {
    4.0 * (heads + kv_heads) as f64
}

/// What the forward pass leaves for the backward pass.
pub struct Saved {
    /// The factors of what queries read from S in o, `[batch, heads, tokens]`; 0 for queries that read no state.
    pub factors: CudaTensor,
    /// See [`factors::Decays`], `[batch, kv_heads, tokens]`.
    pub until_end: CudaTensor,
    /// See [`factors::Decays`], `[batch, kv_heads, chunks]`.
    pub totals: CudaTensor,
}

/// The states of chunks, or their gradients, `[batch · kv_heads, chunks − 2, layout.rows(), head_dim]` in bf16.
pub struct States(Heads);

impl States {
    /// Their number.
    pub fn count(&self) -> usize {
        self.0.dims[1]
    }

    /// The last one, `[batch · kv_heads, layout.rows(), head_dim]`.
    pub fn last(&self) -> CudaTensor {
        let [rows, count, channels, head_dim] = self.0.dims;
        let last = narrow(&self.0.tensor, 1, count - 1..count);
        reshaped(&last, &[rows, channels, head_dim])
    }
}

/// One call.
pub struct Chunked {
    chunk: usize,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    layout: StateLayout,
}

impl Chunked {
    /// A call for q and k in chunks of `chunk` tokens.
    ///
    /// # Panics
    /// Unless [`serves`], and for two chunks or fewer, which have no state to read.
    pub fn new(q: &CudaTensor, k: &CudaTensor, chunk: usize) -> Self {
        let [batch, heads, tokens, head_dim]: [usize; 4] = q.meta.shape().dims();
        assert!(serves(2, head_dim, chunk), "{head_dim} channels in chunks of {chunk} tokens");
        assert!(tokens > 2 * chunk, "{tokens} tokens in chunks of {chunk}");
        let kv_heads = heads / group(q, k);
        Chunked { chunk, batch, heads, kv_heads, tokens, layout: StateLayout { head_dim } }
    }

    fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk)
    }

    /// The chunks whose states are read.
    fn read_chunks(&self) -> usize {
        self.chunks() - 2
    }

    /// The documents' starts, `[batch, tokens]`, moved to the first near key of each query.
    pub fn near_starts(&self, like: &CudaTensor, documents: Option<&CudaTensor>) -> CudaTensor {
        let shape = [self.batch, self.tokens];
        let starts = documents.map(|x| integers(x, &shape, "document starts"));
        let near = empty(like, &shape, DType::I32);
        let count = elements(&near);
        // SAFETY: a thread reads and writes one element.
        unsafe {
            factors::near_starts::launch_unchecked::<CudaRuntime>(
                &like.client,
                blocks(count, THREADS),
                dim(THREADS),
                starts.as_ref().map_or_else(|| nothing(like), |x| buffer(x, 1)),
                buffer(&near, 1),
                as_u32(self.tokens),
                as_u32(self.chunk),
                as_u32(count),
                documents.is_some(),
            );
        }
        near
    }

    /// The [`factors::Decays`]: reads, until_end and totals. `log_decay` is `[batch, kv_heads, tokens]`, if there is a
    /// gate.
    fn decays(
        &self,
        like: &CudaTensor,
        log_decay: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
    ) -> [CudaTensor; 3] {
        let of = |last| empty(like, &[self.batch, self.kv_heads, last], DType::F32);
        let (reads, until_end, totals) = (of(self.tokens), of(self.tokens), of(self.chunks()));
        let log_decay = log_decay.map(contiguous);
        let starts = documents.map(|x| integers(x, &[self.batch, self.tokens], "document starts"));
        let sources = DecaySources { gated: log_decay.is_some(), documents: starts.is_some() };
        let count = elements(&totals);
        // SAFETY: a warp stays within its chunk and the one before.
        unsafe {
            factors::decays_of_chunks::launch_unchecked::<CudaRuntime>(
                &like.client,
                blocks(count, factors::CHUNKS_PER_BLOCK),
                dim(factors::THREADS),
                log_decay.as_ref().map_or_else(|| nothing(like), |x| buffer(x, 1)),
                starts.as_ref().map_or_else(|| nothing(like), |x| buffer(x, 1)),
                DecaysLaunch::new(buffer(&reads, 1), buffer(&until_end, 1), buffer(&totals, 1)),
                DecaySizesLaunch::new(
                    as_u32(self.kv_heads),
                    as_u32(self.tokens),
                    as_u32(self.chunk),
                    as_u32(count),
                ),
                sources,
            );
        }
        [reads, until_end, totals]
    }

    /// The rows of `x`, `[batch, heads, tokens, head_dim]`, times their factors, `[batch, heads, tokens]`.
    fn weigh(&self, x: &Heads, by: &CudaTensor) -> Heads {
        let weighted = empty(&x.tensor, &x.dims, DType::BF16);
        let count = elements(&weighted) / CHUNK;
        // SAFETY: a thread reads and writes one chunk.
        unsafe {
            factors::weigh::launch_unchecked::<CudaRuntime>(
                &weighted.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(&x.tensor, CHUNK),
                buffer(by, 1),
                buffer(&weighted, CHUNK),
                x.row_strides(),
                as_u32(x.dims[1]),
                as_u32(self.tokens),
                as_u32(count),
                as_u32(self.layout.head_dim / CHUNK),
            );
        }
        Heads::in_place(&weighted)
    }

    /// The states from k, v and their decays, or backwards the states' gradients from q, do and the factors of both.
    fn scan(
        &self,
        [x, values]: [&Heads; 2],
        [value_factors, factors]: [&CudaTensor; 2],
        totals: &CudaTensor,
        backwards: bool,
    ) -> States {
        let (like, layout) = (&x.tensor, self.layout);
        let rows = self.batch * self.kv_heads;
        let shape = [rows, self.read_chunks(), layout.rows(), layout.head_dim];
        let states = empty(like, &shape, DType::BF16);
        let config = ScanConfig::new(layout, backwards, rows, multiprocessors(&like.client));
        let (values, weighted) = (self.weigh(values, value_factors), self.weigh(x, factors));
        // SAFETY: blocks stay within the states of their rows; tokens past the last are loaded as zeros.
        unsafe {
            scan::scan::launch_unchecked::<CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(rows * config.blocks()), 1, 1),
                dim(config.threads()),
                ScanInputsLaunch::new(
                    x.tensor_map(SLAB),
                    values.tensor_map(SLAB),
                    weighted.tensor_map(SLAB),
                    buffer(totals, 1),
                ),
                buffer(&states, CHUNK),
                ScanSizesLaunch::new(
                    as_u32(self.kv_heads),
                    as_u32(x.dims[1] / self.kv_heads),
                    as_u32(self.chunks()),
                    as_u32(self.chunk),
                ),
                config,
            );
        }
        States(Heads::in_place(&states))
    }

    fn states(&self, kv: [&Heads; 2], until_end: &CudaTensor, totals: &CudaTensor) -> States {
        self.scan(kv, [until_end, until_end], totals, false)
    }

    fn read_config(&self, of_queries: bool) -> ReadConfig {
        ReadConfig { layout: self.layout, of_queries }
    }

    /// The grid of readers that are queries, or keys.
    fn readers(&self, of_queries: bool) -> CubeCount {
        let (heads, tokens) = match of_queries {
            true => (self.heads, self.tokens - 2 * self.chunk),
            false => (self.kv_heads, self.read_chunks() * self.chunk),
        };
        let tiles = tokens.div_ceil(read::ROWS);
        CubeCount::Static(as_u32(tiles), as_u32(self.batch * heads), 1)
    }

    fn read_sizes(&self, of_queries: bool) -> ReadSizesLaunch<CudaRuntime> {
        let heads = if of_queries { self.heads } else { self.kv_heads };
        ReadSizesLaunch::new(
            as_u32(heads),
            as_u32(heads / self.kv_heads),
            as_u32(self.tokens),
            as_u32(self.chunk),
        )
    }

    fn map_states(&self, states: &States) -> TensorMapArg<CudaRuntime, Tiled> {
        states.0.tensor_map(self.layout.per_load() * SLAB)
    }

    /// See [`read::read_states`]; for queries with their log-sum-exp and factors.
    fn read(
        &self,
        x: &Heads,
        states: &States,
        decays: &CudaTensor,
        results: &CudaTensor,
        of_queries: Option<[&CudaTensor; 2]>,
    ) {
        let results = Heads::in_place(results);
        let [lse, factors] = of_queries.unwrap_or([decays; 2]);
        let of_queries = of_queries.is_some();
        // SAFETY: blocks stay within their tokens.
        unsafe {
            read::read_states::launch_unchecked::<CudaRuntime>(
                &x.tensor.client,
                self.readers(of_queries),
                dim(read::THREADS),
                ReadArraysLaunch::new(
                    x.tensor_map(read::ROWS),
                    self.map_states(states),
                    buffer(decays, 1),
                    results.pairs(),
                    buffer(lse, 1),
                    buffer(factors, 1),
                ),
                self.read_sizes(of_queries),
                self.read_config(of_queries),
            );
        }
    }

    /// See [`contract::contract`].
    fn contract(
        &self,
        [x, values]: [&Heads; 2],
        states: &States,
        [by, moments]: [&CudaTensor; 2],
        gradients: &CudaTensor,
        of_queries: bool,
    ) {
        fn launch<O: Numeric + CubeElement>(
            call: &Chunked,
            [x, values]: [&Heads; 2],
            states: &States,
            [by, moments]: [&CudaTensor; 2],
            gradients: &Heads,
            of_queries: bool,
        ) {
            // SAFETY: blocks stay within their tokens.
            unsafe {
                contract::contract::launch_unchecked::<O, CudaRuntime>(
                    &x.tensor.client,
                    call.readers(of_queries),
                    dim(read::THREADS),
                    ContractArraysLaunch::new(
                        x.tensor_map(read::ROWS),
                        call.map_states(states),
                        values.pairs(),
                        buffer(by, 1),
                        buffer(moments, 1),
                        gradients.pairs(),
                    ),
                    call.read_sizes(of_queries),
                    call.read_config(of_queries),
                );
            }
        }
        let launch = match gradients.dtype {
            DType::F32 => launch::<f32>,
            _ => launch::<bf16>,
        };
        let gradients = Heads::in_place(gradients);
        launch(self, [x, values], states, [by, moments], &gradients, of_queries);
    }

    /// Makes o and its log-sum-exp over the near keys those over all keys. Returns what the backward pass needs, and the
    /// states.
    pub fn add_far(
        &self,
        [q, k, v]: [&CudaTensor; 3],
        log_decay: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
        [o, lse]: [&CudaTensor; 2],
    ) -> (Saved, States) {
        let [reads, until_end, totals] = self.decays(q, log_decay, documents);
        let factors = zeros(q, &[self.batch, self.heads, self.tokens], DType::F32);
        let [q, k, v] = [q, k, v].map(Heads::new);
        let states = self.states([&k, &v], &until_end, &totals);
        self.read(&q, &states, &reads, o, Some([lse, &factors]));
        (Saved { factors, until_end, totals }, states)
    }

    /// Adds what far keys contribute to the gradients of q, k and v.
    pub fn add_far_gradients(
        &self,
        [q, k, v]: [&CudaTensor; 3],
        Saved { factors, until_end, totals }: &Saved,
        o: &CudaTensor,
        grad: &CudaTensor,
        gradients: &Gradients,
    ) {
        let [q, k, v, grad] = [q, k, v, grad].map(Heads::new);
        let delta = row_dots(&Heads::new(o), &grad);
        let of_sums = self.gradients_of_sums(&delta, factors);
        let of_queries = [factors, &of_sums];
        let states = self.states([&k, &v], until_end, totals);
        self.contract([&q, &grad], &states, of_queries, &gradients.dq, true);
        drop(states);
        let d_states = self.scan([&q, &grad], of_queries, totals, true);
        self.contract([&k, &v], &d_states, [until_end, until_end], &gradients.dk, false);
        self.read(&k, &d_states, until_end, &gradients.dv, None);
    }

    /// See [`factors::gradients_of_sums`].
    fn gradients_of_sums(&self, delta: &CudaTensor, factors: &CudaTensor) -> CudaTensor {
        let results = empty(factors, &[self.batch, self.heads, self.tokens], DType::F32);
        let count = elements(factors);
        // SAFETY: a thread reads and writes one element of each.
        unsafe {
            factors::gradients_of_sums::launch_unchecked::<CudaRuntime>(
                &factors.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(delta, 1),
                buffer(factors, 1),
                buffer(&results, 1),
                as_u32(count),
            );
        }
        results
    }
}
