//! The output projection with the cross-entropy loss, a chunk of logits at a time.

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;

use super::LinearCrossEntropy;
use super::kernel::{LossArgsLaunch, LossConfig, rows as rows_kernel};
use crate::backend::Forward;
use crate::cuda::blas::{self, Epilogue};
use crate::cuda::{CudaTensor, WIDE, buffer, contiguous, empty};
use crate::ops::cuda::elementwise::{in_type, scale, store};
use crate::ops::cuda::sums::{add_up, total};
use crate::ops::cuda::{as_u32, blocks, dim, dims, integers, nothing, over, supported};
use crate::ops::linear::cuda::transposed;

/// Most logits per chunk, unless rows are very long: a sixteenth of those of a large batch. Each chunk adds
/// to the whole gradient of the weight, so fewer chunks are faster.
const LOGITS: usize = 1 << 28;
/// Rows of logits are padded to a multiple of this.
const VOCAB_MULTIPLE: usize = 64;
/// Threads per row.
const THREADS: usize = 512;
/// Most bytes of a row that shared memory keeps: two blocks fit a multiprocessor.
const STAGED: usize = 110 << 10;

/// Rows per chunk; depends only on the vocabulary, so that the order of sums over chunks is fixed.
pub fn chunk_rows(vocab: usize) -> usize {
    let most = (LOGITS / vocab).max(256);
    1 << most.ilog2()
}

/// Bytes that `weighted` takes on top of its inputs for `rows` tokens in `dtype`: a chunk's logits, the
/// gradients of x and of W, and the padded copy of W, if one is needed.
pub fn workspace_bytes(rows: usize, vocab: usize, width: usize, dtype: DType) -> f64 {
    let padded = vocab.next_multiple_of(VOCAB_MULTIPLE);
    let [tokens, chunk, vocab, padded, width] =
        [rows, chunk_rows(vocab).min(rows), vocab, padded, width].map(|n| n as f64);
    let copy = if padded > vocab { padded * width } else { 0.0 };
    dtype.size() as f64 * (chunk * padded + tokens * width + copy) + 4.0 * padded * width
}

/// The terms of the loss.
struct Terms {
    /// The cross-entropy of each row, `[rows]`, weighted if there are weights.
    losses: CudaTensor,
    /// The weighted z-loss of each row, `[rows]`, if it is on.
    z_losses: Option<CudaTensor>,
}

/// The results of one pass over the rows.
struct LossAndGrads {
    terms: Terms,
    /// The gradients of x and W, if needed.
    grads: [Option<CudaTensor>; 2],
}

/// [`Loss::terms`](super::Loss). Saves the gradients of their sum in x and weight that `needs` selects.
///
/// - `x`: `[…, width]`
/// - `weight`: `[vocab, width]`
/// - `targets`, `weights`: `[…]`
/// - `chunk`: rows per chunk
pub fn weighted(
    op: LinearCrossEntropy,
    x: &CudaTensor,
    weight: &CudaTensor,
    targets: &CudaTensor,
    weights: &CudaTensor,
    needs: [bool; 2],
    chunk: usize,
) -> Option<Forward<CudaTensor>> {
    if !supported(x) {
        return None;
    }
    assert_eq!(dims(weights), dims(targets), "shapes of the cross-entropy's weights and targets");
    let weights = in_type(weights, DType::F32);
    let LossAndGrads { terms, grads } = pass(op, x, weight, targets, Some(&weights), needs, chunk);
    let output = match &terms.z_losses {
        None => total(&terms.losses),
        Some(z_losses) => {
            let sums = empty(z_losses, &[2], DType::F32);
            add_up(&terms.losses, &over(&sums, 0, &[1], &[1]));
            add_up(z_losses, &over(&sums, 1, &[1], &[1]));
            sums
        }
    };
    Some(Forward { output, saved: grads.into_iter().flatten().collect() })
}

/// The cross-entropy of every row, in the shape of `targets`.
pub fn per_token(
    op: LinearCrossEntropy,
    x: &CudaTensor,
    weight: &CudaTensor,
    targets: &CudaTensor,
) -> Option<CudaTensor> {
    if !supported(x) {
        return None;
    }
    let chunk = chunk_rows(dims(weight)[0]);
    let losses = pass(op, x, weight, targets, None, [false; 2], chunk).terms.losses;
    let shape = dims(targets);
    Some(over(&losses, 0, &shape, &row_major(&shape)))
}

/// The gradients that [`weighted`] saved, times the gradient of its terms, which is the same for both.
pub fn backward(
    saved: Vec<CudaTensor>,
    grad: &CudaTensor,
    needs: [bool; 2],
) -> [Option<CudaTensor>; 2] {
    let factor = in_type(grad, DType::F32);
    let mut saved = saved.into_iter();
    let mut next = || saved.next().expect("a gradient per need");
    needs.map(|wanted| wanted.then(|| scale(next(), &factor)))
}

fn pass(
    op: LinearCrossEntropy,
    x: &CudaTensor,
    weight: &CudaTensor,
    targets: &CudaTensor,
    weights: Option<&CudaTensor>,
    needs: [bool; 2],
    chunk: usize,
) -> LossAndGrads {
    let (shape, [_, width]) = (dims(x), matrix(weight));
    let leading = &shape[..shape.len() - 1];
    assert_eq!(shape.last(), Some(&width), "width of x {shape:?} and of the weight");
    let targets = integers(targets, leading, "the cross-entropy's targets");
    let rows: usize = leading.iter().product();
    let x = over(&contiguous(x), 0, &[rows, width], &[width, 1]);
    let vocab = dims(weight)[0];
    let weight = padded(&in_type(weight, x.dtype));
    let per_row = || empty(&x, &[rows], DType::F32);
    let terms = Terms { losses: per_row(), z_losses: (op.z_loss != 0.0).then(per_row) };
    let dx = needs[0].then(|| empty(&x, &[rows, width], x.dtype));
    let mut dw = None;
    let linear = |a, b| blas::product(a, b, x.dtype, Epilogue::None);
    for first in (0..rows).step_by(chunk) {
        let part = chunk.min(rows - first);
        let rows_of = |x: &CudaTensor| over(x, first * width, &[part, width], &[width, 1]);
        let z = linear(rows_of(&x), transposed(weight.clone()));
        let stride = dims(&z)[1];
        let real = over(&z, 0, &[part, vocab], &[stride, 1]);
        softmax(op, &real, &targets, weights, &terms, first, needs != [false; 2]);
        if let Some(dx) = &dx {
            let part = linear(z.clone(), weight.clone());
            store(&part, &rows_of(dx));
        }
        if needs[1] {
            // In place from the second chunk on, because the sum's buffer is not shared.
            let sum = dw.take().map_or(Epilogue::None, Epilogue::Add);
            dw = Some(blas::product(transposed(z), rows_of(&x), DType::F32, sum));
        }
    }
    let dx = dx.map(|dx| over(&dx, 0, &shape, &row_major(&shape)));
    let dw = dw.map(|dw| over(&dw, 0, &[vocab, width], &[width, 1]));
    LossAndGrads { terms, grads: [dx, dw] }
}

/// W padded with zero rows to a multiple of [`VOCAB_MULTIPLE`]: matrix products with odd row lengths are
/// several times slower. The padding's logits and gradients are 0.
fn padded(weight: &CudaTensor) -> CudaTensor {
    let [vocab, width] = matrix(weight);
    let rows = vocab.next_multiple_of(VOCAB_MULTIPLE);
    if rows == vocab {
        return contiguous(weight);
    }
    let (client, device) = (weight.client.clone(), weight.device.clone());
    let shape = Shape::new([rows * width]);
    let zeros = zeros_client(client, device, shape, weight.dtype);
    store(weight, &over(&zeros, 0, &[vocab, width], &[width, 1]));
    over(&zeros, 0, &[rows, width], &[width, 1])
}

/// The terms of a chunk's rows; with `gradient`, also overwrites the logits by their gradients.
fn softmax(
    op: LinearCrossEntropy,
    z: &CudaTensor,
    targets: &CudaTensor,
    weights: Option<&CudaTensor>,
    Terms { losses, z_losses }: &Terms,
    first: usize,
    gradient: bool,
) {
    let [rows, vocab] = matrix(z);
    let lanes = WIDE / z.dtype.size();
    let vectors = vocab.div_ceil(lanes);
    let stride = z.meta.strides()[0] / lanes;
    as_u32(rows * stride);
    let staged = if gradient && vectors * WIDE <= STAGED { vectors } else { 0 };
    let even = vocab.is_multiple_of(lanes);
    let config = LossConfig {
        threads: THREADS,
        staged,
        even,
        weighted: weights.is_some(),
        gradient,
        softcap: op.softcap.is_some(),
        z_loss: z_losses.is_some(),
    };
    let args = LossArgsLaunch::new(op.softcap.unwrap_or(1.0), op.z_loss, f32::NAN);
    let rows_or_nothing =
        |x: Option<&CudaTensor>| x.map_or_else(|| nothing(losses), |x| buffer(x, 1));
    // SAFETY: `z` has `rows` rows of `stride` vectors; the others hold `first + rows` elements.
    unsafe {
        rows_kernel::launch_unchecked(
            &z.client,
            blocks(rows, 1),
            dim(THREADS),
            lanes,
            buffer(z, lanes),
            buffer(targets, 1),
            rows_or_nothing(weights),
            buffer(losses, 1),
            rows_or_nothing(z_losses.as_ref()),
            as_u32(first),
            as_u32(vocab),
            as_u32(stride),
            args,
            config,
            z.dtype.into(),
        );
    }
}

fn matrix(x: &CudaTensor) -> [usize; 2] {
    dims(x).try_into().unwrap_or_else(|shape| panic!("{shape:?} is no matrix"))
}

/// The strides of a contiguous tensor.
fn row_major(shape: &[usize]) -> Vec<usize> {
    (1..=shape.len()).map(|dim| shape[dim..].iter().product()).collect()
}
