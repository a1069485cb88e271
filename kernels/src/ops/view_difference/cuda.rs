//! The difference of two views on CUDA.

use burn::tensor::DType;

use super::kernel::{subtract_view, subtract_view_backward};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::sums::total;
use crate::ops::cuda::{THREADS, as_u32, blocks, dim, dims, elements, lanes, supported, vector};

/// `[batch, heads, tokens, channels]` as a contiguous `[batch, tokens, heads, channels]`, and back.
fn tokens_first(x: &CudaTensor) -> CudaTensor {
    contiguous(&heads_first(x.clone()))
}

/// A view with the second and third dimension swapped.
fn heads_first(mut x: CudaTensor) -> CudaTensor {
    x.meta.swap(1, 2);
    x
}

/// The vectors of the difference, those of a token, and the elements of a vector.
fn sizes(o: &CudaTensor) -> [usize; 3] {
    let [_, _, heads, channels] = o.meta.shape().dims();
    let width = heads / 2 * channels;
    let lanes = lanes(width, o.dtype);
    [elements(o) / 2 / lanes, width / lanes, lanes]
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward). Saves o and lambda.
pub fn forward(o: &CudaTensor, lambda: &CudaTensor) -> Option<Forward<CudaTensor>> {
    if !supported(o) || elements(o) == 0 || lambda.dtype != DType::F32 {
        return None;
    }
    let lambda = vector(lambda, 1, "lambda");
    let o = tokens_first(o);
    let [count, width, lanes] = sizes(&o);
    let [batch, tokens, heads, channels] = o.meta.shape().dims();
    let y = empty(&o, &[batch, tokens, heads / 2, channels], o.dtype);
    // SAFETY: a thread writes one vector of y, and reads its counterparts in both views.
    unsafe {
        subtract_view::launch_unchecked(
            &o.client,
            blocks(count, THREADS),
            dim(THREADS),
            lanes,
            buffer(&o, lanes),
            buffer(&lambda, 1),
            buffer(&y, lanes),
            as_u32(count),
            as_u32(width),
            o.dtype.into(),
        );
    }
    Some(Forward { output: heads_first(y), saved: vec![o, lambda] })
}

/// The gradients of o and lambda; `o` is the one that [`forward`] saved.
pub fn backward(o: &CudaTensor, lambda: &CudaTensor, dy: &CudaTensor) -> [CudaTensor; 2] {
    assert_eq!(dy.dtype, o.dtype, "types of o and of the gradient");
    let dy = tokens_first(dy);
    let [count, width, lanes] = sizes(o);
    let d_o = empty(o, &dims(o), o.dtype);
    let parts = empty(o, &[count.div_ceil(THREADS)], DType::F32);
    // SAFETY: a thread writes two vectors of d_o, and a block one part.
    unsafe {
        subtract_view_backward::launch_unchecked(
            &o.client,
            blocks(count, THREADS),
            dim(THREADS),
            lanes,
            buffer(o, lanes),
            buffer(lambda, 1),
            buffer(&dy, lanes),
            buffer(&d_o, lanes),
            buffer(&parts, 1),
            as_u32(count),
            as_u32(width),
            o.dtype.into(),
        );
    }
    [heads_first(d_o), total(&parts)]
}
