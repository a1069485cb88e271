//! The embedding table.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::kernel;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::{THREADS, blocks, dim, dims, elements, integers, lanes, number, supported};

/// Threads of a row, at most.
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
    number(elements(&weight));
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
            number(width / lanes),
            number(vocab),
            number(len),
            f32::NAN,
            weight.dtype.into(),
        );
    }
    Some(y)
}

/// For each token, the sum of `grad` over its positions, in order: `[vocab, width]` in f32.
///
/// - `tokens`: `[…]`; those outside the vocabulary are left out
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
    let chunks = positions.div_ceil(kernel::CHUNK);
    let parts = empty(&grad, &[chunks, 2, width], DType::F32);
    number(elements(&grad));
    number(elements(&dw));
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
            buffer(&sorted.places, 1),
            buffer(&parts, lanes),
            number(width / lanes),
            number(vocab),
            grad.dtype.into(),
        );
        kernel::table::launch_unchecked(
            &grad.client,
            blocks(vocab, 1),
            dim(threads),
            lanes,
            buffer(&grad, lanes),
            buffer(&sorted.starts, 1),
            buffer(&sorted.places, 1),
            buffer(&parts, lanes),
            buffer(&dw, lanes),
            number(width / lanes),
            grad.dtype.into(),
        );
    }
    dw
}

/// Positions sorted by token, in order within one.
struct Sorted {
    /// `[vocab + 1]`: where each token's positions start, and the end of the last's.
    starts: CudaTensor,
    /// `[positions]`
    places: CudaTensor,
}

impl Sorted {
    fn new(tokens: &CudaTensor, vocab: usize) -> Self {
        let positions = elements(tokens);
        let tiles = positions.div_ceil(kernel::TILE);
        let made = |len: usize| empty(tokens, &[len], DType::U32);
        let (ranks, places) = (made(positions), made(positions));
        let (counts, totals, starts) = (made(tiles * vocab), made(vocab), made(vocab + 1));
        let (client, n, v) = (&tokens.client, number(positions), number(vocab));
        let tokens = || buffer(tokens, 1);
        let all = |x: &CudaTensor| buffer(x, 1);
        // SAFETY: the arguments have the sizes that the kernels' documentation asks for.
        unsafe {
            kernel::clear::launch_unchecked::<CudaRuntime>(
                client,
                blocks(tiles * vocab, THREADS),
                dim(THREADS),
                all(&counts),
                number(tiles * vocab),
            );
            kernel::rank::launch_unchecked::<CudaRuntime>(
                client,
                blocks(tiles, 1),
                dim(kernel::TILE),
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
                number(tiles),
                v,
            );
            kernel::starts::launch_unchecked::<CudaRuntime>(
                client,
                blocks(1, 1),
                dim(kernel::SCAN),
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
                all(&places),
                n,
                v,
            );
        }
        Sorted { starts, places }
    }
}
