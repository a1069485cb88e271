//! Elementwise operations, and the division of elements among their kernels' threads.

mod kernel;

use std::cmp::Reverse;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::{
    CudaTensor, THREADS, WIDE, as_u32, blocks, buffer, contiguous, dim, dims, elements, over,
};
use crate::cuda::empty;

/// A range of a tensor's elements as vectors of `lanes`: those from `first` to `end`.
#[derive(Clone, Copy)]
pub struct VectorRange {
    /// Elements per vector.
    pub lanes: usize,
    first: usize,
    end: usize,
}

impl VectorRange {
    /// The whole vectors, then the remaining elements one by one.
    fn all(len: usize, lanes: usize) -> impl Iterator<Item = Self> {
        let whole = VectorRange { lanes, first: 0, end: len / lanes };
        let rest = VectorRange { lanes: 1, first: len - len % lanes, end: len };
        [whole, rest].into_iter().filter(|part| part.first < part.end)
    }

    /// The number of blocks of a kernel with one thread per vector.
    pub fn blocks(&self) -> cubecl::CubeCount {
        blocks(self.end - self.first, THREADS)
    }

    /// First vector and end as kernel arguments.
    pub fn range(&self) -> [u32; 2] {
        [self.first, self.end].map(as_u32)
    }
}

/// The spans of tensors like `x`, read 16 bytes at a time.
pub fn vector_ranges(x: &CudaTensor) -> impl Iterator<Item = VectorRange> {
    VectorRange::all(elements(x), WIDE / x.dtype.size())
}

/// The tensors in one dense memory order: unchanged if they agree on one, else contiguous copies.
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

/// Whether the elements are dense in memory, in any order of dimensions.
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

/// An uninitialised tensor with the shape and strides of `x`, a result of [`same_order`].
pub fn like(x: &CudaTensor) -> CudaTensor {
    over(&empty(x, &dims(x), x.dtype), 0, &dims(x), x.meta.strides())
}

/// A contiguous copy of `x` as `dtype`; both types are f32 or bf16.
pub fn convert(x: &CudaTensor, dtype: DType) -> CudaTensor {
    let x = contiguous(x);
    let y = empty(&x, &dims(&x), dtype);
    // As many elements per vector as fit 16 bytes of the wider type.
    for part in VectorRange::all(elements(&x), WIDE / x.dtype.size().max(dtype.size())) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: both buffers hold all elements.
        unsafe {
            kernel::convert::launch_unchecked::<CudaRuntime>(
                &x.client,
                part.blocks(),
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

/// `x` as `dtype`, contiguous; copied only if needed.
pub fn in_type(x: &CudaTensor, dtype: DType) -> CudaTensor {
    if x.dtype == dtype { contiguous(x) } else { convert(x, dtype) }
}

/// `x` in a contiguous buffer that may be written: `x` itself if its buffer is not shared.
pub fn writable(x: CudaTensor) -> CudaTensor {
    if x.is_contiguous() && x.can_mut() { x } else { convert(&x, x.dtype) }
}

/// `factor` · x, in place if x's buffer is not shared.
///
/// - `factor`: `[1]`, f32
pub fn scale(x: CudaTensor, factor: &CudaTensor) -> CudaTensor {
    let x = writable(x);
    for part in vector_ranges(&x) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: the buffer holds all elements, and is not shared.
        unsafe {
            kernel::scale::launch_unchecked(
                &x.client,
                part.blocks(),
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

/// out ← p, of the same type.
///
/// - `p`: `[rows, columns]`, contiguous
/// - `out`: the same, with any stride between rows, anywhere in a buffer
pub fn store(p: &CudaTensor, out: &CudaTensor) {
    let len = elements(p);
    // SAFETY: the kernel reads every element of `p` and writes it to its row and column of `out`.
    unsafe {
        kernel::store::launch_unchecked(
            &p.client,
            blocks(len, THREADS),
            dim(THREADS),
            buffer(p, 1),
            buffer(out, 1),
            as_u32(len),
            as_u32(dims(p)[1]),
            as_u32(out.meta.strides()[0]),
            p.dtype.into(),
        );
    }
}
