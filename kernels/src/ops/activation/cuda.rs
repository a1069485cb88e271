//! Activations on CUDA.

use super::kernel::{self, Function};
use crate::cuda::{CudaTensor, buffer};
use crate::ops::cuda::elementwise::{like, same_order, vector_ranges};
use crate::ops::cuda::{THREADS, dim, supported};

/// y = f(x), and `x` to save for the backward pass; `None` if the type has no kernel.
pub fn activation(function: Function, x: &CudaTensor) -> Option<[CudaTensor; 2]> {
    if !supported(x) {
        return None;
    }
    let [x] = same_order([x]);
    let y = like(&x);
    for part in vector_ranges(&x) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: both buffers hold all elements.
        unsafe {
            kernel::activation::launch_unchecked(
                &x.client,
                part.blocks(),
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
    for part in vector_ranges(&x) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernel::activation_backward::launch_unchecked(
                &x.client,
                part.blocks(),
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

/// f(gate) · up, and both inputs to save for the backward pass; `None` if the type has no kernel.
pub fn gated(function: Function, gate: &CudaTensor, up: &CudaTensor) -> Option<[CudaTensor; 3]> {
    if !supported(gate) {
        return None;
    }
    let [gate, up] = same_order([gate, up]);
    let y = like(&gate);
    for part in vector_ranges(&gate) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernel::gated::launch_unchecked(
                &gate.client,
                part.blocks(),
                dim(THREADS),
                lanes,
                buffer(&gate, lanes),
                buffer(&up, lanes),
                buffer(&y, lanes),
                first,
                end,
                function,
                gate.dtype.into(),
            );
        }
    }
    Some([y, gate, up])
}

/// The gradients of gate and up.
pub fn gated_backward(
    function: Function,
    gate: &CudaTensor,
    up: &CudaTensor,
    dy: &CudaTensor,
) -> [CudaTensor; 2] {
    let [gate, up, dy] = same_order([gate, up, dy]);
    let (d_gate, d_up) = (like(&gate), like(&gate));
    for part in vector_ranges(&gate) {
        let ([first, end], lanes) = (part.range(), part.lanes);
        // SAFETY: all buffers hold all elements.
        unsafe {
            kernel::gated_backward::launch_unchecked(
                &gate.client,
                part.blocks(),
                dim(THREADS),
                lanes,
                buffer(&gate, lanes),
                buffer(&up, lanes),
                buffer(&dy, lanes),
                buffer(&d_gate, lanes),
                buffer(&d_up, lanes),
                first,
                end,
                function,
                gate.dtype.into(),
            );
        }
    }
    [d_gate, d_up]
}
