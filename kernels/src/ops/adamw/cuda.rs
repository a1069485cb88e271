//! AdamW on CUDA.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;

use super::{AdamwStep, kernel};
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::elementwise::{vector_ranges, writable};
use crate::ops::cuda::{THREADS, dim, dims, nothing, supported};

/// One AdamW step: the new parameter, m and v, in place if their buffers are not shared, and the new
/// parameter as `copy`.
///
/// # Panics
/// When the shapes differ, or a tensor is not f32; only the gradient may be bf16.
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
    for part in vector_ranges(&p) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: all buffers hold all elements, and those written are not shared.
        unsafe {
            kernel::adamw::launch_unchecked::<CudaRuntime>(
                &p.client,
                part.blocks(),
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

fn numbers(step: &AdamwStep) -> kernel::NumbersLaunch<CudaRuntime> {
    let AdamwStep { lr, beta1, beta2, eps, weight_decay, grad_scale, .. } = *step;
    let [c1, c2] = step.corrections();
    kernel::NumbersLaunch::new(
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
