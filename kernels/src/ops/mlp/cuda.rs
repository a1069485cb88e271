//! The MLP by matrix products, with GELU and the residual as epilogues.

use burn::tensor::DType;

use crate::backend::Forward;
use crate::cuda::blas::{Epilogue, product};
use crate::cuda::{CudaTensor, empty};
use crate::ops::activation::cuda::activation_backward;
use crate::ops::activation::kernel::Function;
use crate::ops::cuda::elementwise::in_type;
use crate::ops::linear::cuda::{as_rows, input_gradient, like_rows_of, outputs, weight_gradient};

/// Row lengths must be a multiple of this for cuBLASLt's GELU epilogue in bf16.
const WIDTH_MULTIPLE: usize = 8;

/// The MLP; saves x, U, D, x Uᵀ and its GELU. `None` if cuBLASLt has no such epilogue.
pub fn forward([x, up, down, residual]: &[CudaTensor; 4]) -> Option<Forward<CudaTensor>> {
    let [hidden, width] = up.meta.shape().dims();
    if x.dtype != DType::BF16
        || !hidden.is_multiple_of(WIDTH_MULTIPLE)
        || !width.is_multiple_of(WIDTH_MULTIPLE)
    {
        return None;
    }
    let rows = as_rows(x);
    let [up, down] = [up, down].map(|w| in_type(w, x.dtype));
    let before = empty(x, &[rows.meta.shape()[0], hidden], x.dtype);
    let gelu = Epilogue::Gelu(before.clone());
    let after = outputs(&rows, &up, x.dtype, gelu);
    let add = Epilogue::Add(as_rows(residual));
    let y = outputs(&after, &down, x.dtype, add);
    Some(Forward { output: like_rows_of(x, &y), saved: vec![rows, up, down, before, after] })
}

/// The gradients of x, U, D and r.
pub fn backward(
    saved: Vec<CudaTensor>,
    grad: CudaTensor,
    needs: [bool; 4],
    grad_accum: &mut [Option<CudaTensor>; 4],
) -> [Option<CudaTensor>; 4] {
    let [x, up, down, before, after] = saved.try_into().expect("five tensors were saved");
    let dy = as_rows(&grad);
    let d_down = needs[2].then(|| weight_gradient(&dy, &after, &mut grad_accum[2]));
    drop(after);
    // GELU's derivative is not an epilogue here: cuBLASLt runs it as a separate, slow kernel.
    let d_after = product(dy, down, grad.dtype, Epilogue::None);
    let d_before = activation_backward(Function::Gelu, &before, &d_after);
    drop((before, d_after));
    let dx =
        needs[0].then(|| like_rows_of(&grad, &input_gradient(&d_before, &up, &mut grad_accum[0])));
    let d_up = needs[1].then(|| weight_gradient(&d_before, &x, &mut grad_accum[1]));
    [dx, d_up, d_down, needs[3].then_some(grad)]
}
