//! The embedding table on CUDA.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::kernel;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, dims, elements, integers, lanes, supported};

/// Most threads per row.
const ROW_THREADS: usize = 256;

/// Row tokens_i of `weight` for each token, NaN where a token is outside the vocabulary.
///
/// - `weight`: `[vocab, width]`
/// - `tokens`: `[…]`
///
/// Returns `[…, width]`.
pub fn gather(weight: &CudaTensor, tokens: &CudaTensor) -> Option<CudaTensor> {
    if !supported(weight) {
        return None;
    }
    let weight = contiguous(weight);
    let (vocab, width) = (dims(&weight)[0], dims(&weight)[1]);
    let shape = dims(tokens);
    let tokens = integers(tokens, &shape, "tokens");
    let y = empty(&weight, &[&shape[..], &[width]].concat(), weight.dtype);
    let lanes = lanes(width, weight.dtype);
    let len = elements(&y) / lanes;
    as_u32(elements(&weight));
    // SAFETY: the kernel reads rows inside the table only, and writes `len` vectors.
    unsafe {
        kernel::gather::launch_unchecked(
            &weight.client,
            blocks(len, THREADS),
            dim(THREADS),
            lanes,
            buffer(&weight, lanes),
            buffer(&tokens, 1),
            buffer(&y, lanes),
            as_u32(width / lanes),
            as_u32(vocab),
            as_u32(len),
            f32::NAN,
            weight.dtype.into(),
        );
    }
    Some(y)
}

/// For each token, the sum of `grad` over its positions, in order: `[vocab, width]` in f32.
///
/// - `tokens`: `[…]`; those outside the vocabulary are ignored
/// - `grad`: `[…, width]`
pub fn backward(vocab: usize, tokens: &CudaTensor, grad: &CudaTensor) -> CudaTensor {
    let grad = contiguous(grad);
    let shape = dims(tokens);
    let tokens = integers(tokens, &shape, "tokens");
    let (positions, width) = (elements(&tokens), dims(&grad)[shape.len()]);
    assert_eq!(elements(&grad), positions * width, "rows of the embedding's gradient");
    let sorted = Sorted::new(&tokens, vocab);
    let dw = empty(&grad, &[vocab, width], DType::F32);
    let lanes = lanes(width, grad.dtype);
    let threads = (width / lanes).next_multiple_of(32).min(ROW_THREADS);
    let chunks = positions.div_ceil(kernel::CHUNK_POSITIONS);
    let parts = empty(&grad, &[chunks, 2, width], DType::F32);
    as_u32(elements(&grad));
    as_u32(elements(&dw));
    // SAFETY: the arguments have the sizes that the kernels' documentation asks for.
    unsafe {
        kernel::chunks::launch_unchecked(
            &grad.client,
            blocks(chunks, 1),
            dim(threads),
            lanes,
            buffer(&grad, lanes),
            buffer(&tokens, 1),
            buffer(&sorted.starts, 1),
            buffer(&sorted.sorted_positions, 1),
            buffer(&parts, lanes),
            as_u32(width / lanes),
            as_u32(vocab),
            grad.dtype.into(),
        );
        kernel::table::launch_unchecked(
            &grad.client,
            blocks(vocab, 1),
            dim(threads),
            lanes,
            buffer(&grad, lanes),
            buffer(&sorted.starts, 1),
            buffer(&sorted.sorted_positions, 1),
            buffer(&parts, lanes),
            buffer(&dw, lanes),
            as_u32(width / lanes),
            grad.dtype.into(),
        );
    }
    dw
}

/// Positions sorted by token, in order within each token.
struct Sorted {
    /// `[vocab + 1]`: the start of each token's positions, and the end of the last token's.
    starts: CudaTensor,
    /// `[positions]`
    sorted_positions: CudaTensor,
}

impl Sorted {
    fn new(tokens: &CudaTensor, vocab: usize) -> Self {
        let positions = elements(tokens);
        let tiles = positions.div_ceil(kernel::TILE_POSITIONS);
        let made = |len: usize| empty(tokens, &[len], DType::U32);
        let (ranks, sorted_positions) = (made(positions), made(positions));
        let (counts, totals, starts) = (made(tiles * vocab), made(vocab), made(vocab + 1));
        let (client, n, v) = (&tokens.client, as_u32(positions), as_u32(vocab));
        let tokens = || buffer(tokens, 1);
        let all = |x: &CudaTensor| buffer(x, 1);
        // SAFETY: the arguments have the sizes that the kernels' documentation asks for.
        unsafe {
            kernel::clear::launch_unchecked::<CudaRuntime>(
                client,
                blocks(tiles * vocab, THREADS),
                dim(THREADS),
                all(&counts),
                as_u32(tiles * vocab),
            );
            kernel::rank::launch_unchecked::<CudaRuntime>(
                client,
                blocks(tiles, 1),
                dim(kernel::TILE_POSITIONS),
                tokens(),
                all(&ranks),
                all(&counts),
                n,
                v,
            );
            kernel::offsets::launch_unchecked::<CudaRuntime>(
                client,
                blocks(vocab, THREADS),
                dim(THREADS),
                all(&counts),
                all(&totals),
                as_u32(tiles),
                v,
            );
            kernel::starts::launch_unchecked::<CudaRuntime>(
                client,
                blocks(1, 1),
                dim(kernel::SCAN_THREADS),
                all(&totals),
                all(&starts),
                v,
            );
            kernel::place::launch_unchecked::<CudaRuntime>(
                client,
                blocks(positions, THREADS),
                dim(THREADS),
                tokens(),
                all(&ranks),
                all(&counts),
                all(&starts),
                all(&sorted_positions),
                n,
                v,
            );
        }
        Sorted { starts, sorted_positions }
    }
}
