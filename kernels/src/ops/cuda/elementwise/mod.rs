//! Operations on every element by itself, and how their kernels divide the elements.

mod kernel;

use std::cmp::Reverse;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::{
    CudaTensor, THREADS, WIDE, blocks, buffer, contiguous, dim, dims, elements, number, over,
};
use crate::cuda::empty;

/// A part of the elements, `lanes` at a time: the vectors from `first` to `end`.
#[derive(Clone, Copy)]
pub struct Span {
    /// Elements of a vector.
    pub lanes: usize,
    first: usize,
    end: usize,
}

impl Span {
    /// Whole vectors, then the elements left over.
    fn all(len: usize, lanes: usize) -> impl Iterator<Item = Self> {
        let whole = Span { lanes, first: 0, end: len / lanes };
        let rest = Span { lanes: 1, first: len - len % lanes, end: len };
        [whole, rest].into_iter().filter(|span| span.first < span.end)
    }

    /// The blocks of a kernel whose threads handle a vector each.
    pub fn blocks(&self) -> cubecl::CubeCount {
        blocks(self.end - self.first, THREADS)
    }

    /// First vector and end, as kernels take them.
    pub fn range(&self) -> [u32; 2] {
        [self.first, self.end].map(number)
    }
}

/// The spans of tensors like `x`, read 16 bytes at a time.
pub fn spans(x: &CudaTensor) -> impl Iterator<Item = Span> {
    Span::all(elements(x), WIDE / x.dtype.size())
}

/// The tensors with one memory order, without gaps: as they are where they agree, else row-major.
///
/// # Panics
/// When their shapes or types differ.
pub fn same_order<const K: usize>(tensors: [&CudaTensor; K]) -> [CudaTensor; K] {
    for x in tensors {
        assert_eq!(dims(x), dims(tensors[0]), "shapes of tensors read together");
        assert_eq!(x.dtype, tensors[0].dtype, "types of tensors read together");
    }
    let strides = tensors[0].meta.strides();
    let agree = |x: &&CudaTensor| x.meta.strides() == strides && dense(x);
    if tensors.iter().all(agree) { tensors.map(CudaTensor::clone) } else { tensors.map(contiguous) }
}

/// Whether the elements fill a stretch of memory, in whatever order of dimensions.
fn dense(x: &CudaTensor) -> bool {
    let mut steps: Vec<_> = x.meta.strides().iter().zip(x.meta.shape().iter()).collect();
    steps.retain(|&(_, &size)| size != 1);
    steps.sort_by_key(|&(&stride, _)| Reverse(stride));
    let mut filled = 1;
    steps.iter().rev().all(|&(&stride, &size)| {
        let fits = stride == filled;
        filled *= size;
        fits
    })
}

/// A tensor with the shape and strides of `x`, which [`same_order`] gave.
pub fn like(x: &CudaTensor) -> CudaTensor {
    over(&empty(x, &dims(x), x.dtype), 0, &dims(x), x.meta.strides())
}

/// A contiguous copy of `x` as `dtype`, each of f32 and bf16.
pub fn convert(x: &CudaTensor, dtype: DType) -> CudaTensor {
    let x = contiguous(x);
    let y = empty(&x, &dims(&x), dtype);
    // As many elements as fit 16 bytes of the wider type.
    for span in Span::all(elements(&x), WIDE / x.dtype.size().max(dtype.size())) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: both buffers hold all elements.
        unsafe {
            kernel::convert::launch_unchecked::<CudaRuntime>(
                &x.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&x, lanes),
                buffer(&y, lanes),
                first,
                end,
                [x.dtype.into(), dtype.into()],
            );
        }
    }
    y
}

/// `x` as `dtype`, contiguous; itself where it is both.
pub fn in_type(x: &CudaTensor, dtype: DType) -> CudaTensor {
    if x.dtype == dtype { contiguous(x) } else { convert(x, dtype) }
}

/// `x`, contiguous, as a buffer that may be written: itself where nobody else owns it.
pub fn writable(x: CudaTensor) -> CudaTensor {
    if x.is_contiguous() && x.can_mut() { x } else { convert(&x, x.dtype) }
}

/// `factor` · x, in place where nobody else owns `x`.
///
/// - `factor`: `[1]`, f32
pub fn scale(x: CudaTensor, factor: &CudaTensor) -> CudaTensor {
    let x = writable(x);
    for span in spans(&x) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: the buffer holds all elements, and nobody else reads it.
        unsafe {
            kernel::scale::launch_unchecked(
                &x.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&x, lanes),
                buffer(factor, 1),
                first,
                end,
                x.dtype.into(),
            );
        }
    }
    x
}

/// out ← p, of one type.
///
/// - `p`: `[rows, columns]`, contiguous
/// - `out`: the same, with any stride between rows, anywhere in a buffer
pub fn store(p: &CudaTensor, out: &CudaTensor) {
    let len = elements(p);
    // SAFETY: the kernel reads every element of `p` and writes its place in `out`.
    unsafe {
        kernel::store::launch_unchecked(
            &p.client,
            blocks(len, THREADS),
            dim(THREADS),
            buffer(p, 1),
            buffer(out, 1),
            number(len),
            number(dims(p)[1]),
            number(out.meta.strides()[0]),
            p.dtype.into(),
        );
    }
}
