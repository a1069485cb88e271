//! Blocks of 64 tokens on CUDA: their transforms, the queries and keys moved to their ends, and attention inside
//! them, forward and backward (`docs/path.md`, "Tiles and blocks").
//!
//! A thread block owns a block of one kv head of one sequence, with the queries of all heads of its group. Its matrices
//! are in shared memory, those that are not in bf16 as the sum of two, so that products keep about 16 bits. Every sum
//! has one owner and a fixed order: equal inputs give equal bits.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

mod backward;
mod forward;
mod inverses;
mod layout;
mod memory;
mod product;
#[cfg(test)]
mod tests;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::backward::{BlockGradientsLaunch, UpstreamLaunch};
use self::forward::{MovedOutputsLaunch, OwnOutputsLaunch};
pub use self::layout::BLOCK;
use self::layout::BlockConfig;
use self::memory::{BlockInputsLaunch, BlockShapeLaunch, VisibilityLaunch};
use crate::attention::decay::DecaySums;
use crate::attention::flash::{Heads, as_u32, strides};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::tile::CHUNK;
use crate::tile::product::THREADS;

/// Elements of a pair.
const PAIR: usize = 2;

/// The most channels of a head that shared memory holds.
const MAX_HEAD_DIM: usize = 128;

/// Channels of a head are a multiple of this.
const GRANULE: usize = 16;

/// The inputs of the blocks' kernels.
///
/// - q: `[batch, heads, seq_len, head_dim]` in bf16, without the scale
/// - k, v: `[batch, kv_heads, seq_len, head_dim]` in bf16
/// - w: the same in f32, of norm at most 1
/// - β: `[batch, kv_heads, seq_len]` in f32, from 0 to 2
pub struct Blocks {
    q: Heads,
    k: Heads,
    v: Heads,
    w: Heads,
    beta: CudaTensor,
    scale: f32,
    window: Option<usize>,
    documents: Option<CudaTensor>,
    decay: Option<DecaySums>,
}

/// What the blocks bring to the levels above them. N is seq_len rounded up to whole blocks; rows past the last token
/// are 0.
#[derive(Clone, Debug)]
pub struct MovedBlocks {
    /// The queries times the scale, moved to the starts of their blocks, `[batch, N, heads, head_dim]` in f32.
    pub q: CudaTensor,
    /// The keys moved to the ends of their blocks, `[batch, N, kv_heads, head_dim]` in f32.
    pub k: CudaTensor,
    /// R = I − P = Yᵀ W of each block, as the sum of two matrices in bf16, `[batch, N/64, kv_heads, 2, head_dim,
    /// head_dim]`.
    pub r: CudaTensor,
    /// G = (I + diag(β) A)⁻¹ of each block, as the sum of two matrices in bf16, `[blocks, 2, 64, 64]`.
    pub inverses: CudaTensor,
}

/// Attention over the keys of the query's own block.
#[derive(Clone, Debug)]
pub struct OwnAttention {
    /// `[batch, seq_len, heads, head_dim]` in f32.
    pub o: CudaTensor,
    /// The log-sum-exps of the scores, base 2 and relative to the decay up to the block, `[batch, heads, seq_len]` in
    /// f32.
    pub lse: CudaTensor,
}

/// The gradients that [`Blocks::backward`] starts from: dO in bf16; those of moved vectors and of R as sums of two in
/// bf16; the others in f32.
pub struct BlockUpstream<'a> {
    /// dO, `[batch, heads, seq_len, head_dim]`.
    pub d_o: &'a CudaTensor,
    /// The log-sum-exps over the keys of all blocks, as in [`OwnAttention`].
    pub lse: &'a CudaTensor,
    /// δ = o · dO, `[batch, heads, seq_len]`.
    pub delta: &'a CudaTensor,
    /// Of the moved queries, `[2, batch, N, heads, head_dim]`.
    pub d_q: &'a CudaTensor,
    /// Of the moved keys, `[2, batch, N, kv_heads, head_dim]`.
    pub d_k: &'a CudaTensor,
    /// Of v by the other blocks' queries, `[batch, N, kv_heads, head_dim]`: contiguous, and overwritten.
    pub d_v: &'a CudaTensor,
    /// Of R, `[batch, N/64, kv_heads, 2, head_dim, head_dim]`.
    pub d_r: &'a CudaTensor,
    /// With a decay, Σ_j dS_ij and Σ_i dS_ij so far, `[batch, heads, seq_len]`, which are added to: contiguous.
    pub ds: Option<[&'a CudaTensor; 2]>,
}

/// The gradients that [`Blocks::backward`] returns.
#[derive(Clone, Debug)]
pub struct BlockGrads {
    /// Of q, `[batch, heads, seq_len, head_dim]` in bf16, in the memory order batch, seq_len, heads.
    pub q: CudaTensor,
    /// Of k, likewise.
    pub k: CudaTensor,
    /// Of v, likewise.
    pub v: CudaTensor,
    /// Of w, `[batch, kv_heads, seq_len, head_dim]` in f32.
    pub w: CudaTensor,
    /// Of β, `[batch, kv_heads, seq_len]` in f32.
    pub beta: CudaTensor,
}

impl Blocks {
    /// Whether the kernels serve heads of q, k and v of this type and of this many channels.
    pub fn serve(dtype: DType, head_dim: usize) -> bool {
        let sizes =
            head_dim.is_multiple_of(GRANULE) && (GRANULE..=MAX_HEAD_DIM).contains(&head_dim);
        dtype == DType::BF16 && sizes
    }

    /// The most tokens of a call, in whole blocks: kernels count pairs of q and of R, and chunks of G, in 32 bits.
    pub fn most_tokens([heads, kv_heads]: [usize; 2], head_dim: usize) -> usize {
        let of_block = (head_dim * head_dim / BLOCK).max(2 * BLOCK / CHUNK);
        let per_token = (heads * head_dim / PAIR).max(kv_heads * of_block);
        u32::MAX as usize / per_token
    }

    /// Without a window, documents or a decay. Makes copies of tensors whose rows are not aligned.
    ///
    /// # Panics
    /// Where shapes disagree, or [`Blocks::serve`] is false.
    pub fn new([q, k, v, w]: [&CudaTensor; 4], beta: &CudaTensor, scale: f32) -> Self {
        let [q, k, v, w] = [q, k, v, w].map(Heads::new);
        let [batch, heads, tokens, head_dim] = q.dims;
        let kv_heads = k.dims[1];
        assert!(heads.is_multiple_of(kv_heads), "{heads} heads, {kv_heads} kv heads");
        for (name, x) in [("q", &q), ("k", &k), ("v", &v)] {
            let dtype = x.tensor.dtype;
            assert!(Self::serve(dtype, head_dim), "{name}: {head_dim} channels of {dtype:?}");
        }
        for (name, x) in [("k", &k), ("v", &v), ("w", &w)] {
            assert_eq!(x.dims, [batch, kv_heads, tokens, head_dim], "the shape of {name}");
        }
        let of_beta: [usize; 3] = beta.meta.shape().dims();
        assert_eq!(of_beta, [batch, kv_heads, tokens], "the shape of beta");
        assert_eq!([w.tensor.dtype, beta.dtype], [DType::F32; 2], "the types of w and beta");
        let (all, most) = (batch * tokens, Self::most_tokens([heads, kv_heads], head_dim));
        assert!(batch * tokens.next_multiple_of(BLOCK) <= most, "{all} tokens, at most {most}");
        let beta = beta.clone();
        Blocks { q, k, v, w, beta, scale, window: None, documents: None, decay: None }
    }

    /// With a window w, a query sees its own key and the w − 1 before it.
    pub fn window(self, window: Option<usize>) -> Self {
        Blocks { window, ..self }
    }

    /// With the start of each token's document, `[batch, seq_len]`, 32-bit integers.
    pub fn documents(self, documents: Option<&CudaTensor>) -> Self {
        Blocks { documents: documents.map(contiguous), ..self }
    }

    /// With the prefix sums of a log decay, `[batch, heads, seq_len]`.
    pub fn decay(self, decay: Option<&DecaySums>) -> Self {
        Blocks { decay: decay.cloned(), ..self }
    }

    fn config(&self) -> BlockConfig {
        BlockConfig {
            head_dim: self.q.dims[3],
            documents: self.documents.is_some(),
            window: self.window.is_some(),
            decay: self.decay.is_some(),
        }
    }

    /// Blocks of a sequence.
    fn blocks(&self) -> usize {
        self.q.dims[2].div_ceil(BLOCK)
    }

    /// The blocks of all kv heads of all sequences.
    fn number(&self) -> usize {
        self.q.dims[0] * self.k.dims[1] * self.blocks()
    }

    fn shape(&self) -> BlockShapeLaunch<CudaRuntime> {
        let [_, heads, tokens, _] = self.q.dims;
        BlockShapeLaunch::new(as_u32(heads), as_u32(self.k.dims[1]), as_u32(tokens), self.scale)
    }

    fn inputs(&self) -> BlockInputsLaunch<CudaRuntime> {
        let decay = self.decay.as_ref().map(DecaySums::launch);
        let documents = self.documents.as_ref().map(|x| buffer(x, 1));
        // A window that the sequence does not exceed may be larger than 32 bits.
        let window = self.window.map_or(0, |w| w.min(self.q.dims[2]));
        let visibility = VisibilityLaunch::new(documents.into(), as_u32(window), decay.into());
        BlockInputsLaunch::new(
            self.q.chunks(),
            self.k.chunks(),
            self.v.chunks(),
            self.w.quads(),
            buffer(&self.beta, 1),
            strides(&self.beta),
            visibility,
        )
    }

    /// The inverses G of all blocks.
    fn inverses(&self) -> CudaTensor {
        let like = &self.q.tensor;
        let inverses = empty(like, &[self.number(), 2, BLOCK, BLOCK], DType::BF16);
        // SAFETY: a thread block writes its own inverse.
        unsafe {
            inverses::inverses::launch_unchecked::<CudaRuntime>(
                &like.client,
                self.grid(),
                CubeDim::new_1d(THREADS as u32),
                self.inputs(),
                buffer(&inverses, CHUNK),
                self.shape(),
                self.config(),
            );
        }
        inverses
    }

    fn grid(&self) -> CubeCount {
        CubeCount::Static(as_u32(self.number()), 1, 1)
    }

    /// Moved queries and keys, transforms, and attention inside the blocks.
    pub fn forward(&self) -> (MovedBlocks, OwnAttention) {
        let [batch, heads, tokens, d] = self.q.dims;
        let like = &self.q.tensor;
        let own = OwnAttention {
            o: empty(like, &[batch, tokens, heads, d], DType::F32),
            lse: empty(like, &[batch, heads, tokens], DType::F32),
        };
        (self.run(Some(&own)), own)
    }

    /// As [`Blocks::forward`], without attention.
    pub fn moved(&self) -> MovedBlocks {
        self.run(None)
    }

    fn run(&self, own: Option<&OwnAttention>) -> MovedBlocks {
        let [batch, heads, _, d] = self.q.dims;
        let kv_heads = self.k.dims[1];
        let padded = self.blocks() * BLOCK;
        let like = &self.q.tensor;
        let of_heads = |heads| empty(like, &[batch, padded, heads, d], DType::F32);
        let results = MovedBlocks {
            q: of_heads(heads),
            k: of_heads(kv_heads),
            r: empty(like, &[batch, self.blocks(), kv_heads, 2, d, d], DType::BF16),
            inverses: self.inverses(),
        };
        let moved = MovedOutputsLaunch::new(
            buffer(&results.q, PAIR),
            buffer(&results.k, PAIR),
            buffer(&results.r, 4),
        );
        let own = own.map(|own| OwnOutputsLaunch::new(buffer(&own.o, PAIR), buffer(&own.lse, 1)));
        // SAFETY: a thread block stays within its block's tokens, and in padded tensors within its rows.
        unsafe {
            forward::forward::launch_unchecked::<CudaRuntime>(
                &like.client,
                self.grid(),
                CubeDim::new_1d(THREADS as u32),
                self.inputs(),
                buffer(&results.inverses, CHUNK),
                moved,
                own.into(),
                self.shape(),
                self.config(),
            );
        }
        results
    }

    /// The gradients of q, k, v, w and β; `inverses` are those of [`MovedBlocks`].
    ///
    /// # Panics
    /// Where shapes disagree, or `d_v` or `ds` are not contiguous, or `ds` is not there exactly with a decay.
    pub fn backward(&self, inverses: &CudaTensor, upstream: &BlockUpstream) -> BlockGrads {
        self.check(upstream);
        let [batch, _, tokens, d] = self.q.dims;
        let kv_heads = self.k.dims[1];
        let like = &self.q.tensor;
        let [q, k, v] = [&self.q, &self.k, &self.v].map(Heads::like);
        let w = Heads::in_place(&empty(like, &[batch, kv_heads, tokens, d], DType::F32));
        let beta = empty(like, &[batch, kv_heads, tokens], DType::F32);
        let d_o = Heads::new(upstream.d_o);
        let of_rows = |x: &CudaTensor| buffer(&contiguous(x), 1);
        let of_vectors = |x: &CudaTensor| buffer(&contiguous(x), CHUNK);
        let from = UpstreamLaunch::new(
            d_o.chunks(),
            of_rows(upstream.lse),
            of_rows(upstream.delta),
            of_vectors(upstream.d_q),
            of_vectors(upstream.d_k),
            buffer(upstream.d_v, PAIR),
            of_vectors(upstream.d_r),
        );
        let [rows, columns] = [0, 1].map(|i| upstream.ds.map(|ds| buffer(ds[i], 1)).into());
        let gradients = BlockGradientsLaunch::new(
            q.quads(),
            k.quads(),
            v.quads(),
            w.quads(),
            buffer(&beta, 1),
            rows,
            columns,
        );
        // SAFETY: as in `forward`.
        unsafe {
            backward::backward::launch_unchecked::<CudaRuntime>(
                &like.client,
                self.grid(),
                CubeDim::new_1d(THREADS as u32),
                self.inputs(),
                buffer(inverses, CHUNK),
                from,
                gradients,
                self.shape(),
                self.config(),
            );
        }
        BlockGrads { q: q.tensor, k: k.tensor, v: v.tensor, w: w.tensor, beta }
    }

    fn check(&self, upstream: &BlockUpstream) {
        let [batch, heads, tokens, d] = self.q.dims;
        let (kv_heads, blocks) = (self.k.dims[1], self.blocks());
        let padded = blocks * BLOCK;
        let of_queries = vec![batch, heads, tokens];
        let has = |name: &str, x: &CudaTensor, shape: &[usize], dtype: DType| {
            assert_eq!(x.meta.shape().to_vec(), shape, "the shape of {name}");
            assert_eq!(x.dtype, dtype, "the type of {name}");
        };
        let check = |name: &str, x: &CudaTensor, shape: &[usize]| has(name, x, shape, DType::F32);
        let sum_of_two =
            |name: &str, x: &CudaTensor, shape: &[usize]| has(name, x, shape, DType::BF16);
        check("lse", upstream.lse, &of_queries);
        check("delta", upstream.delta, &of_queries);
        sum_of_two("d_q", upstream.d_q, &[2, batch, padded, heads, d]);
        sum_of_two("d_k", upstream.d_k, &[2, batch, padded, kv_heads, d]);
        check("d_v", upstream.d_v, &[batch, padded, kv_heads, d]);
        assert!(upstream.d_v.is_contiguous(), "d_v at strides {:?}", upstream.d_v.meta.strides());
        sum_of_two("d_r", upstream.d_r, &[batch, blocks, kv_heads, 2, d, d]);
        assert_eq!(upstream.ds.is_some(), self.decay.is_some(), "sums of dS, and a decay");
        for x in upstream.ds.into_iter().flatten() {
            check("ds", x, &of_queries);
            assert!(x.is_contiguous(), "ds at strides {:?}", x.meta.strides());
        }
        has("d_o", upstream.d_o, &self.q.dims, DType::BF16);
    }
}
