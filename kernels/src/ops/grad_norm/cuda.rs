//! Sums of squares on CUDA.

use burn::tensor::DType;

use super::kernel;
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty};
use crate::ops::cuda::sums::total;
use crate::ops::cuda::{as_u32, blocks, dim, elements, supported};

/// Most partial sums per tensor.
const PARTS: usize = 1024;

/// Σ x² over all tensors together, shape `[1]`, in f32.
///
/// # Panics
/// When there are none, or one is neither f32 nor bf16.
pub fn squares(tensors: &[CudaTensor]) -> CudaTensor {
    let tensors: Vec<_> = tensors.iter().map(contiguous).collect();
    let shares: Vec<[Share; 2]> = tensors.iter().map(Share::of).collect();
    let slots = shares.iter().flatten().map(|share| share.blocks).sum();
    let parts = empty(&tensors[0], &[slots], DType::F32);
    let mut slot = 0;
    for (x, shares) in tensors.iter().zip(&shares) {
        for share in shares.iter().filter(|share| share.blocks > 0) {
            // SAFETY: the kernel reads the share's vectors and writes one slot for each block.
            unsafe {
                kernel::squares::launch_unchecked(
                    &x.client,
                    blocks(share.blocks, 1),
                    dim(kernel::THREADS),
                    share.lanes,
                    buffer(x, share.lanes),
                    buffer(&parts, 1),
                    as_u32(share.first),
                    as_u32(share.vectors),
                    as_u32(slot),
                    x.dtype.into(),
                );
            }
            slot += share.blocks;
        }
    }
    total(&parts)
}

/// A range of a tensor's vectors, and the number of blocks that sum it.
struct Share {
    lanes: usize,
    first: usize,
    vectors: usize,
    blocks: usize,
}

impl Share {
    /// The whole vectors, then the remaining elements one by one.
    fn of(x: &CudaTensor) -> [Self; 2] {
        assert!(supported(x), "square sums of {:?} are not supported; cast to f32", x.dtype);
        let (len, lanes) = (elements(x), WIDE / x.dtype.size());
        let share = |lanes, first, vectors: usize| {
            // At least four vectors per thread, if there are as many.
            let blocks = vectors.div_ceil(4 * kernel::THREADS).min(PARTS);
            Share { lanes, first, vectors, blocks }
        };
        [share(lanes, 0, len / lanes), share(1, len - len % lanes, len % lanes)]
    }
}
