//! Linear layers by cuBLASLt, in e4m3 with [`Rounding::E4m3`]; x Wᵀ for a few rows by a kernel of its own.

use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::ones_client;

use super::e4m3::{self, Of, factor, rounded};
use super::few_rows;
use crate::backend::Forward;
use crate::cuda::blas::{Epilogue, Rounding, matmul_f32, product};
use crate::cuda::{CudaTensor, reshaped};
use crate::ops::cuda::elementwise::in_type;

/// What is added to x Wᵀ.
pub enum LinearEpilogue<'a> {
    Nothing,
    /// A bias for each output.
    Bias(&'a CudaTensor),
    /// A tensor of the output's shape.
    Add(&'a CudaTensor),
}

/// A tensor `[…, columns]` as a matrix of rows.
pub fn as_rows(x: &CudaTensor) -> CudaTensor {
    let columns = *x.meta.shape().to_vec().last().expect("x has dimensions");
    reshaped(x, &[x.meta.shape().num_elements() / columns, columns])
}

/// The transpose of a matrix: a view.
pub fn transposed(mut x: CudaTensor) -> CudaTensor {
    x.meta.swap(0, 1);
    x
}

/// A matrix of rows as a tensor with the leading sizes of `like`.
pub fn like_rows_of(like: &CudaTensor, rows: &CudaTensor) -> CudaTensor {
    let mut shape = like.meta.shape().to_vec();
    *shape.last_mut().expect("a dimension") = rows.meta.shape()[1];
    reshaped(rows, &shape)
}

/// y = x Wᵀ with the epilogue `then`, in x's type; saves x and W or, in e4m3, xᵀ and Wᵀ with their scales if
/// `tracked`.
pub fn forward(
    x: &CudaTensor,
    weight: &CudaTensor,
    then: LinearEpilogue,
    rounding: Rounding,
    tracked: bool,
) -> Forward<CudaTensor> {
    let rows = as_rows(x);
    let weight = in_type(weight, x.dtype);
    let epilogue = match then {
        LinearEpilogue::Nothing => Epilogue::None,
        LinearEpilogue::Bias(bias) => Epilogue::Bias(bias.clone()),
        LinearEpilogue::Add(term) => Epilogue::Add(as_rows(term)),
    };
    if rounding == Rounding::E4m3 && e4m3::serves(&rows, &weight) {
        let (rows, x_columns) = factor(&rows, Of::Values, tracked);
        let (weight, weight_columns) = factor(&weight, Of::Values, tracked);
        let y = e4m3::outputs(&rows, &weight, epilogue);
        let saved = e4m3::to_saved([x_columns, weight_columns]);
        return Forward { output: like_rows_of(x, &y), saved };
    }
    let y = outputs(&rows, &weight, x.dtype, epilogue);
    Forward { output: like_rows_of(x, &y), saved: vec![like_rows_of(x, &rows), weight] }
}

/// x Wᵀ in f32 for x and W in bf16.
pub fn forward_f32(x: &CudaTensor, weight: &CudaTensor) -> CudaTensor {
    like_rows_of(x, &outputs(&as_rows(x), weight, DType::F32, Epilogue::None))
}

/// x Wᵀ in type `dtype` with the epilogue `then`.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`
pub fn outputs(x: &CudaTensor, weight: &CudaTensor, dtype: DType, then: Epilogue) -> CudaTensor {
    few_rows::product(x, weight, dtype, &then)
        .unwrap_or_else(|| product(x.clone(), transposed(weight.clone()), dtype, then))
}

/// dx = dy W in x's type; dW = dyᵀ x and db = Σ dy in f32. Takes the existing gradients of x and W from
/// `grad_accum` and adds to them.
pub fn backward(
    saved: &[CudaTensor],
    grad: &CudaTensor,
    needs: [bool; 3],
    grad_accum: [&mut Option<CudaTensor>; 2],
) -> [Option<CudaTensor>; 3] {
    let (dy, [x_accum, weight_accum]) = (as_rows(grad), grad_accum);
    let [dx, dw] = match saved {
        [x, weight] => [
            needs[0].then(|| input_gradient(&dy, weight, x_accum)),
            needs[1].then(|| weight_gradient(&dy, &as_rows(x), weight_accum)),
        ],
        _ => {
            let [x, weight] = e4m3::from_saved(saved);
            let [by_rows, by_columns] = rounded(&dy, Of::Values, [needs[0], needs[1]]);
            [
                by_rows.map(|dy| e4m3::input_gradient(&dy, &weight, x_accum)),
                by_columns.map(|dy| e4m3::weight_gradient(&dy, &x, weight_accum)),
            ]
        }
    };
    let db = needs[2].then(|| column_sums(&dy));
    [dx.map(|dx| like_rows_of(grad, &dx)), dw, db]
}

/// dy W in dy's type, plus the gradient in `grad_accum`.
pub fn input_gradient(
    dy: &CudaTensor,
    weight: &CudaTensor,
    grad_accum: &mut Option<CudaTensor>,
) -> CudaTensor {
    product(dy.clone(), weight.clone(), dy.dtype, sum(grad_accum, dy.dtype))
}

/// dyᵀ x in f32, plus the gradient in `grad_accum`.
pub fn weight_gradient(
    dy: &CudaTensor,
    x: &CudaTensor,
    grad_accum: &mut Option<CudaTensor>,
) -> CudaTensor {
    product(transposed(dy.clone()), x.clone(), DType::F32, sum(grad_accum, DType::F32))
}

/// Takes the sum that a gradient is added to, if it has the gradient's type.
pub(super) fn sum(grad_accum: &mut Option<CudaTensor>, dtype: DType) -> Epilogue {
    match grad_accum.take_if(|sum| sum.dtype == dtype) {
        // The product writes into the sum's buffer unless that is shared.
        Some(sum) => Epilogue::Add(as_rows(&sum)),
        None => Epilogue::None,
    }
}

/// The column sums of a matrix, in f32: a product with a row of ones.
fn column_sums(matrix: &CudaTensor) -> CudaTensor {
    let [rows, columns] = matrix.meta.shape().dims();
    let (client, device) = (matrix.client.clone(), matrix.device.clone());
    let ones = ones_client(client, device, Shape::new([1, rows]), matrix.dtype);
    reshaped(&matmul_f32(ones, matrix.clone()), &[columns])
}
