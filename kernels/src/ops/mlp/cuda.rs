//! The MLP by matrix products, with GELU and the residual as epilogues; in e4m3, where cuBLASLt has no epilogue of
//! GELU with a result in bf16, GELU is applied while its result is rounded.

use burn::tensor::DType;

use crate::backend::Forward;
use crate::cuda::blas::{Accumulation, E4m3Matrix, Epilogue, Rounding, product, product_of_e4m3};
use crate::cuda::{CudaTensor, empty};
use crate::ops::activation::cuda::activation_backward;
use crate::ops::activation::kernel::Function;
use crate::ops::cuda::elementwise::in_type;
use crate::ops::linear::cuda::{as_rows, input_gradient, like_rows_of, outputs, weight_gradient};
use crate::ops::linear::e4m3::{self, Of, factor, rounded};

/// Row lengths must be a multiple of this for cuBLASLt's epilogue of GELU in bf16.
const WIDTH_MULTIPLE: usize = 8;

/// The MLP. Saves x, U, D, x Uᵀ and its GELU; in e4m3 if `tracked` x Uᵀ, and of the others the transposes with
/// their scales. `None` if cuBLASLt has no epilogue of GELU.
pub fn forward(
    [x, up, down, residual]: &[CudaTensor; 4],
    rounding: Rounding,
    tracked: bool,
) -> Option<Forward<CudaTensor>> {
    let [hidden, width] = up.meta.shape().dims();
    if x.dtype != DType::BF16
        || !hidden.is_multiple_of(WIDTH_MULTIPLE)
        || !width.is_multiple_of(WIDTH_MULTIPLE)
    {
        return None;
    }
    let rows = as_rows(x);
    let [up, down] = [up, down].map(|w| in_type(w, x.dtype));
    let add = Epilogue::Add(as_rows(residual));
    if rounding == Rounding::E4m3 && e4m3::serves(&rows, &up) && e4m3::serves(&rows, &down) {
        let (rows, x_columns) = factor(&rows, Of::Values, tracked);
        let (up, up_columns) = factor(&up, Of::Values, tracked);
        let before = e4m3::outputs(&rows, &up, Epilogue::None);
        let (after, after_columns) = factor(&before, Of::Gelu, tracked);
        let (down, down_columns) = factor(&down, Of::Values, tracked);
        let y = e4m3::outputs(&after, &down, add);
        let mut saved = e4m3::to_saved([x_columns, up_columns, down_columns, after_columns]);
        saved.push(before);
        return Some(Forward { output: like_rows_of(x, &y), saved });
    }
    let before = empty(x, &[rows.meta.shape()[0], hidden], x.dtype);
    let gelu = Epilogue::Gelu(before.clone());
    let after = outputs(&rows, &up, x.dtype, gelu);
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
    let dy = as_rows(&grad);
    let [dx, d_up, d_down] = match <[CudaTensor; 5]>::try_from(saved) {
        Ok([x, up, down, before, after]) => {
            let d_down = needs[2].then(|| weight_gradient(&dy, &after, &mut grad_accum[2]));
            drop(after);
            // GELU's derivative is no epilogue here: cuBLASLt runs it as a kernel of its own, at a quarter of the
            // memory bandwidth.
            let d_after = product(dy, down, grad.dtype, Epilogue::None);
            let d_before = activation_backward(Function::Gelu, &before, &d_after);
            drop((before, d_after));
            let dx = needs[0].then(|| input_gradient(&d_before, &up, &mut grad_accum[0]));
            let d_up = needs[1].then(|| weight_gradient(&d_before, &x, &mut grad_accum[1]));
            [dx, d_up, d_down]
        }
        Err(saved) => backward_e4m3(saved, &dy, needs, grad_accum),
    };
    [dx.map(|dx| like_rows_of(&grad, &dx)), d_up, d_down, needs[3].then_some(grad)]
}

/// The gradients of x, U and D for what the forward pass saves in e4m3.
fn backward_e4m3(
    mut saved: Vec<CudaTensor>,
    dy: &CudaTensor,
    needs: [bool; 4],
    grad_accum: &mut [Option<CudaTensor>; 4],
) -> [Option<CudaTensor>; 3] {
    let before = saved.pop().expect("GELU's argument is saved last");
    let [x, up, down, after]: [E4m3Matrix; 4] = e4m3::from_saved(&saved);
    drop(saved);
    let [by_rows, by_columns] = rounded(dy, Of::Values, [true, needs[2]]);
    let by_rows = by_rows.expect("wanted");
    let d_down = by_columns.map(|dy| e4m3::weight_gradient(&dy, &after, &mut grad_accum[2]));
    drop(after);
    let d_after =
        product_of_e4m3(&by_rows, &down, DType::BF16, Epilogue::None, Accumulation::Precise);
    let d_before = activation_backward(Function::Gelu, &before, &d_after);
    drop((before, d_after, by_rows));
    let [by_rows, by_columns] = rounded(&d_before, Of::Values, [needs[0], needs[1]]);
    drop(d_before);
    let dx = by_rows.map(|dy| e4m3::input_gradient(&dy, &up, &mut grad_accum[0]));
    let d_up = by_columns.map(|dy| e4m3::weight_gradient(&dy, &x, &mut grad_accum[1]));
    [dx, d_up, d_down]
}
