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
//! [`contract`] makes those of queries and keys, and [`read`] that of values. The states are made again, which takes
//! less than keeping them: they have 18 times the size of k for 64 channels in chunks of 128 tokens.
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
use self::slab::{SLAB, StateLayout};
use super::group;
use crate::attention::flash::{Gradients, Heads, row_dots};
use crate::cuda::{CudaTensor, buffer, contiguous, empty, multiprocessors};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, elements, integers, nothing};
use crate::tile::CHUNK;

/// Whether the kernels have the chunked form with this power, these channels of a head and these tokens of a chunk.
pub fn serves(p: u32, head_dim: usize, chunk: usize) -> bool {
    p == 2 && [32, 64, 128].contains(&head_dim) && chunk.is_multiple_of(read::ROWS)
}

/// Bytes per token and kv head that the forward pass keeps beside what the attention form does.
pub const SAVED_BYTES: f64 = 8.0;

/// The decays of a call, see [`factors::Decays`].
#[derive(Clone)]
pub struct ChunkDecays {
    /// `[batch, kv_heads, tokens]`
    pub reads: CudaTensor,
    /// `[batch, kv_heads, tokens]`
    pub until_end: CudaTensor,
    /// `[batch, kv_heads, chunks]`
    pub totals: CudaTensor,
}

/// The states of chunks, or their gradients, `[batch · kv_heads, chunks − 2, layout.rows(), head_dim]` in bf16.
struct States(Heads);

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
    /// Unless [`serves`].
    pub fn new(q: &CudaTensor, k: &CudaTensor, chunk: usize) -> Self {
        let [batch, heads, tokens, head_dim]: [usize; 4] = q.meta.shape().dims();
        assert!(serves(2, head_dim, chunk), "{head_dim} channels in chunks of {chunk} tokens");
        let kv_heads = heads / group(q, k);
        Chunked { chunk, batch, heads, kv_heads, tokens, layout: StateLayout { head_dim } }
    }

    fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.chunk)
    }

    /// The chunks whose states are read.
    fn read_chunks(&self) -> usize {
        self.chunks().saturating_sub(2)
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The documents' starts, `[batch, tokens]`, moved to the first near key of each query.
    pub fn near_starts(&self, like: &CudaTensor, documents: Option<&CudaTensor>) -> CudaTensor {
        let shape = [self.batch, self.tokens];
        let starts = documents.map(|x| integers(x, &shape, "document starts"));
        let near = empty(like, &shape, DType::I32);
        let starts_or_near = starts.as_ref().unwrap_or(&near);
        let count = elements(&near);
        // SAFETY: a thread reads and writes one element.
        unsafe {
            factors::near_starts::launch_unchecked::<CudaRuntime>(
                &like.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(starts_or_near, 1),
                buffer(&near, 1),
                as_u32(self.tokens),
                as_u32(self.chunk),
                as_u32(count),
                documents.is_some(),
            );
        }
        near
    }

    /// The decays, with the log decays `[batch, kv_heads, tokens]`, if there is a gate.
    pub fn decays(
        &self,
        like: &CudaTensor,
        log_decay: Option<&CudaTensor>,
        documents: Option<&CudaTensor>,
    ) -> ChunkDecays {
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
        ChunkDecays { reads, until_end, totals }
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

    /// The states from k, v and their weights, or backwards their gradients from q, do and the two weights.
    fn scan(
        &self,
        [x, values]: [&Heads; 2],
        [weights, moments]: [&CudaTensor; 2],
        totals: &CudaTensor,
        backwards: bool,
    ) -> States {
        let (like, layout) = (&x.tensor, self.layout);
        let rows = self.batch * self.kv_heads;
        let shape = [rows, self.read_chunks(), layout.rows(), layout.head_dim];
        let states = empty(like, &shape, DType::BF16);
        let config = ScanConfig::new(layout, backwards, rows, multiprocessors(&like.client));
        let (values, weighted) = (self.weigh(values, weights), self.weigh(x, moments));
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

    fn states(&self, [k, v]: [&Heads; 2], decays: &ChunkDecays) -> States {
        let weights = &decays.until_end;
        self.scan([k, v], [weights, weights], &decays.totals, false)
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

    /// See [`read::read_states`]; of queries with `lse`.
    fn read(
        &self,
        x: &Heads,
        states: &States,
        by: &CudaTensor,
        results: &CudaTensor,
        lse: Option<&CudaTensor>,
    ) {
        let of_queries = lse.is_some();
        let results = Heads::in_place(results);
        // SAFETY: blocks stay within their tokens.
        unsafe {
            read::read_states::launch_unchecked::<CudaRuntime>(
                &x.tensor.client,
                self.readers(of_queries),
                dim(read::THREADS),
                ReadArraysLaunch::new(
                    x.tensor_map(read::ROWS),
                    self.map_states(states),
                    buffer(by, 1),
                    results.pairs(),
                    lse.map_or_else(|| nothing(by), |lse| buffer(lse, 1)),
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

    /// Makes o and its log-sum-exp over the near keys those over all keys.
    pub fn add_far(
        &self,
        [q, k, v]: [&CudaTensor; 3],
        decays: &ChunkDecays,
        [o, lse]: [&CudaTensor; 2],
    ) {
        if self.read_chunks() > 0 {
            let [q, k, v] = [q, k, v].map(Heads::new);
            let states = self.states([&k, &v], decays);
            self.read(&q, &states, &decays.reads, o, Some(lse));
        }
    }

    /// Adds what far keys contribute to the gradients of q, k and v.
    pub fn add_far_gradients(
        &self,
        [q, k, v]: [&CudaTensor; 3],
        decays: &ChunkDecays,
        [o, lse]: [&CudaTensor; 2],
        grad: &CudaTensor,
        gradients: &Gradients,
    ) {
        if self.read_chunks() == 0 {
            return;
        }
        let [q, k, v, grad] = [q, k, v, grad].map(Heads::new);
        let delta = row_dots(&Heads::new(o), &grad);
        let [weights, moments] = self.query_weights(&decays.reads, lse, &delta);
        let of_queries = [&weights, &moments];
        let states = self.states([&k, &v], decays);
        self.contract([&q, &grad], &states, of_queries, &gradients.dq, true);
        drop(states);
        let d_states = self.scan([&q, &grad], of_queries, &decays.totals, true);
        let of_keys = &decays.until_end;
        self.contract([&k, &v], &d_states, [of_keys, of_keys], &gradients.dk, false);
        self.read(&k, &d_states, of_keys, &gradients.dv, None);
    }

    /// See [`factors::query_weights`].
    fn query_weights(
        &self,
        reads: &CudaTensor,
        lse: &CudaTensor,
        delta: &CudaTensor,
    ) -> [CudaTensor; 2] {
        let shape = [self.batch, self.heads, self.tokens];
        let results = [(); 2].map(|()| empty(reads, &shape, DType::F32));
        let count = elements(lse);
        // SAFETY: a thread reads and writes one element of each.
        unsafe {
            factors::query_weights::launch_unchecked::<CudaRuntime>(
                &reads.client,
                blocks(count, THREADS),
                dim(THREADS),
                buffer(reads, 1),
                buffer(lse, 1),
                buffer(delta, 1),
                buffer(&results[0], 1),
                buffer(&results[1], 1),
                as_u32(self.tokens),
                as_u32(self.group()),
                as_u32(self.chunk),
                as_u32(count),
            );
        }
        results
    }
}
