//! Kernels that handle each token of each head by itself, around the cores of linear-time kinds: vectors in bf16, and
//! in `head_steps` single numbers in f32, a thread for each token.
//!
//! Tensors of vectors are `[batch, heads, seq_len, channels]` at strides, in chunks of 8 channels. A token of a head
//! belongs to a group of neighbouring threads of one warp, one for each chunk. Sums over tokens have an owner and a
//! fixed order: a block adds up every `CUBE_COUNT_X`-th step of its head's tokens, and writes its part.

pub mod channel_decay;
pub mod gated_norm;
pub mod gated_skip;
pub mod head_steps;
pub mod kernel;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::kernel::TokenSizesLaunch;
use crate::backend::OpBackend;
use crate::cuda::{CudaTensor, contiguous, empty, reshaped};
use crate::device::DeviceKind;
use crate::ops::cuda::block::RowSplit;
use crate::ops::cuda::{THREADS, as_u32, dims, elements, over};
use crate::tile::CHUNK;

/// Most blocks per head whose sums are added up in the end.
pub const MOST_PARTS: usize = 64;

/// Most channels: a chunk for each thread of a warp.
const MOST_CHANNELS: usize = 32 * CHUNK;

/// Whether kernels serve heads of this many channels on a backend's device.
pub fn serves_on<B: OpBackend>(dtype: DType, channels: usize) -> bool {
    B::device_kind() == DeviceKind::Cuda && serves(dtype, channels)
}

fn serves(dtype: DType, channels: usize) -> bool {
    dtype == DType::BF16 && channels.is_multiple_of(CHUNK) && channels <= MOST_CHANNELS
}

/// `[batch, heads, seq_len, channels]`, the shape of a kernel's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Channels of a head.
    pub channels: usize,
}

impl Tokens {
    /// Those of `x`.
    ///
    /// # Panics
    /// When it has not four dimensions.
    pub fn of(x: &CudaTensor) -> Self {
        let [batch, heads, seq_len, channels] = x.meta.shape().dims();
        Tokens { batch, heads, seq_len, channels }
    }

    /// Whether kernels serve these sizes of tensors like `x`.
    pub fn served(&self, x: &CudaTensor) -> bool {
        elements(x) > 0 && serves(x.dtype, self.channels)
    }

    /// As an array.
    pub fn shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq_len, self.channels]
    }

    /// How a block's threads share tokens.
    pub fn split(&self) -> RowSplit {
        let chunks = self.channels / CHUNK;
        let threads = chunks.next_power_of_two();
        RowSplit { threads, held: 1, groups: THREADS / threads, even: threads == chunks }
    }

    /// Sizes as a kernel's argument.
    pub fn launch(&self) -> TokenSizesLaunch<CudaRuntime> {
        let sizes = [self.batch * self.seq_len, self.seq_len, self.channels / CHUNK].map(as_u32);
        TokenSizesLaunch::new(sizes[0], sizes[1], sizes[2])
    }

    /// Blocks that handle all tokens of a head, each group one, or at most `most` that take turns.
    pub fn blocks(&self, most: usize) -> usize {
        (self.batch * self.seq_len).div_ceil(self.split().groups).min(most)
    }

    /// As many [`blocks`](Self::blocks) for each head.
    pub fn grid(&self, most: usize) -> CubeCount {
        CubeCount::Static(as_u32(self.blocks(most)), as_u32(self.heads), 1)
    }

    /// An uninitialised tensor in bf16 whose memory is in the order of `[batch, seq_len, heads, channels]`.
    pub fn empty_by_token(&self, like: &CudaTensor) -> CudaTensor {
        self.empty_by_token_of(like, DType::BF16)
    }

    /// The same in another type.
    pub fn empty_by_token_of(&self, like: &CudaTensor, dtype: DType) -> CudaTensor {
        let shape = [self.batch, self.seq_len, self.heads * self.channels];
        by_head(&empty(like, &shape, dtype), self.heads)
    }
}

/// `x`, or a contiguous copy if channels are not neighbours or their chunks not aligned.
///
/// # Panics
/// When it starts off 16 bytes; views that burn makes do not.
pub fn in_chunks(x: &CudaTensor) -> CudaTensor {
    let (strides, shape) = (x.meta.strides(), dims(x));
    let last = shape.len() - 1;
    let aligned = |dim: usize| shape[dim] == 1 || strides[dim].is_multiple_of(CHUNK);
    if strides[last] == 1 && (0..last).all(aligned) { x.clone() } else { contiguous(x) }
}

/// `[batch, seq_len, heads · channels]` as `[batch, heads, seq_len, channels]`, a view.
pub fn by_head(x: &CudaTensor, heads: usize) -> CudaTensor {
    let x = in_chunks(x);
    let ([batch, seq_len, features], strides) = (x.meta.shape().dims(), x.meta.strides());
    let channels = features / heads;
    over(&x, 0, &[batch, heads, seq_len, channels], &[strides[0], channels, strides[1], 1])
}

/// The inverse of [`by_head`].
pub fn by_token(mut x: CudaTensor) -> CudaTensor {
    let [batch, heads, seq_len, channels] = x.meta.shape().dims();
    x.meta.swap(1, 2);
    reshaped(&x, &[batch, seq_len, heads * channels])
}
