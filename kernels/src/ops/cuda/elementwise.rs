//! Operations on every element by itself.

use std::cmp::Reverse;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::kernels::elementwise as kernels;
pub use super::kernels::elementwise::Function;
use super::{
    CudaTensor, THREADS, WIDE, blocks, buffer, contiguous, dim, dims, elements, nothing, number,
    over, supported,
};
use crate::cuda::empty;
use crate::ops::adamw::AdamwStep;

/// A part of the elements, `lanes` at a time: the vectors from `first` to `end`.
#[derive(Clone, Copy)]
struct Span {
    lanes: usize,
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

    fn blocks(&self) -> cubecl::CubeCount {
        blocks(self.end - self.first, THREADS)
    }

    fn range(&self) -> [u32; 2] {
        [self.first, self.end].map(number)
    }
}

/// The spans of tensors like `x`, read 16 bytes at a time.
fn spans(x: &CudaTensor) -> impl Iterator<Item = Span> {
    Span::all(elements(x), WIDE / x.dtype.size())
}

/// The tensors with one memory order, without gaps: as they are where they agree, else row-major.
///
/// # Panics
/// When their shapes or types differ.
fn same_order<const K: usize>(tensors: [&CudaTensor; K]) -> [CudaTensor; K] {
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
fn like(x: &CudaTensor) -> CudaTensor {
    over(&empty(x, &dims(x), x.dtype), 0, &dims(x), x.meta.strides())
}

/// y = f(x), and `x` as the backward pass needs it; `None` where the type has no kernel.
pub fn activation(function: Function, x: &CudaTensor) -> Option<[CudaTensor; 2]> {
    if !supported(x) {
        return None;
    }
    let [x] = same_order([x]);
    let y = like(&x);
    for span in spans(&x) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: both buffers hold all elements.
        unsafe {
            kernels::activation::launch_unchecked(
                &x.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&x, lanes),
                buffer(&y, lanes),
                first,
                end,
                function,
                x.dtype.into(),
            );
        }
    }
    Some([y, x])
}

/// dx = dy · f'(x).
pub fn activation_backward(function: Function, x: &CudaTensor, dy: &CudaTensor) -> CudaTensor {
    let [x, dy] = same_order([x, dy]);
    let dx = like(&x);
    for span in spans(&x) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernels::activation_backward::launch_unchecked(
                &x.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&x, lanes),
                buffer(&dy, lanes),
                buffer(&dx, lanes),
                first,
                end,
                function,
                x.dtype.into(),
            );
        }
    }
    dx
}

/// silu(gate) · up, and both inputs as the backward pass needs them; `None` where the type has no
/// kernel.
pub fn swiglu(gate: &CudaTensor, up: &CudaTensor) -> Option<[CudaTensor; 3]> {
    if !supported(gate) {
        return None;
    }
    let [gate, up] = same_order([gate, up]);
    let y = like(&gate);
    for span in spans(&gate) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernels::swiglu::launch_unchecked(
                &gate.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&gate, lanes),
                buffer(&up, lanes),
                buffer(&y, lanes),
                first,
                end,
                gate.dtype.into(),
            );
        }
    }
    Some([y, gate, up])
}

/// The gradients of gate and up.
pub fn swiglu_backward(gate: &CudaTensor, up: &CudaTensor, dy: &CudaTensor) -> [CudaTensor; 2] {
    let [gate, up, dy] = same_order([gate, up, dy]);
    let (d_gate, d_up) = (like(&gate), like(&gate));
    for span in spans(&gate) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernels::swiglu_backward::launch_unchecked(
                &gate.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&gate, lanes),
                buffer(&up, lanes),
                buffer(&dy, lanes),
                buffer(&d_gate, lanes),
                buffer(&d_up, lanes),
                first,
                end,
                gate.dtype.into(),
            );
        }
    }
    [d_gate, d_up]
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
            kernels::convert::launch_unchecked::<CudaRuntime>(
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
fn writable(x: CudaTensor) -> CudaTensor {
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
            kernels::scale::launch_unchecked(
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
        kernels::store::launch_unchecked(
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

/// One AdamW step: the new parameter, m and v, in place where nobody else owns them, and the new
/// parameter as `copy`.
///
/// # Panics
/// When the shapes differ, or a type is not f32 where the gradient alone may be bf16.
pub fn adamw(
    step: &AdamwStep,
    [p, g, m, v]: [CudaTensor; 4],
    copy: Option<DType>,
) -> ([CudaTensor; 3], Option<CudaTensor>) {
    let g = contiguous(&g);
    assert!(supported(&g), "AdamW for a gradient of {:?}", g.dtype);
    let [p, m, v] = [p, m, v].map(|x| {
        assert_eq!(x.dtype, DType::F32, "type of AdamW's parameter and moments");
        assert_eq!(dims(&x), dims(&g), "shapes of AdamW's tensors");
        writable(x)
    });
    let copy = copy.map(|dtype| empty(&p, &dims(&p), dtype));
    let copy_type = copy.as_ref().map_or(DType::BF16, |copy| copy.dtype);
    for span in spans(&p) {
        let ([first, end], lanes) = (span.range(), span.lanes);
        // SAFETY: all buffers hold all elements, and nobody else reads those written.
        unsafe {
            kernels::adamw::launch_unchecked::<CudaRuntime>(
                &p.client,
                span.blocks(),
                dim(THREADS),
                lanes,
                buffer(&p, lanes),
                buffer(&g, lanes),
                buffer(&m, lanes),
                buffer(&v, lanes),
                copy.as_ref().map_or_else(|| nothing(&g), |copy| buffer(copy, lanes)),
                first,
                end,
                numbers(step),
                copy.is_some(),
                [g.dtype.into(), copy_type.into()],
            );
        }
    }
    ([p, m, v], copy)
}

fn numbers(step: &AdamwStep) -> kernels::NumbersLaunch<CudaRuntime> {
    let AdamwStep { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *step;
    let [c1, c2] = step.corrections();
    kernels::NumbersLaunch::new(
        grad_scale,
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay,
        lr / c1,
        1.0 / c2,
    )
}
