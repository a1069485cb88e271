//! Linear layers in e4m3: both factors of a product are rounded with one scale per tensor.
//!
//! Tensor cores multiply e4m3 factors that are contiguous along the dimension that is summed over. The forward
//! pass needs x and W by rows; the gradients dy W and dyᵀ x need dy by rows and by columns, W and x by columns.
//! Both copies of a tensor are made at once, and the ones by columns are saved in place of the tensor.

mod kernel;

use burn::tensor::DType;
use cubecl::prelude::*;

use super::cuda::sum;
use super::few_rows;
use crate::cuda::blas::{Accumulation, E4M3_MULTIPLE, E4m3Matrix, Epilogue, product_of_e4m3};
use crate::cuda::{CudaTensor, WIDE, buffer, empty};
use crate::ops::cuda::{as_u32, blocks, dim, elements};
use crate::tile::CHUNK;

/// What is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Of {
    /// The matrix.
    Values,
    /// Its GELU.
    Gelu,
}

/// Bytes per word that the kernel writes.
const WORD: usize = 4;

/// Whether x Wᵀ and its gradients can be computed in e4m3. Products of few rows are not: they take as long as
/// W takes to read, and rounding it would be another pass.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`
pub fn serves(x: &CudaTensor, weight: &CudaTensor) -> bool {
    let [rows, _] = x.meta.shape().dims();
    let readable = |x: &CudaTensor| {
        let offset = x.handle.offset_start.unwrap_or(0);
        let sizes = x.meta.shape().iter().all(|n| *n > 0 && n.is_multiple_of(E4M3_MULTIPLE));
        sizes && x.dtype == DType::BF16 && x.is_contiguous() && offset.is_multiple_of(WIDE as u64)
    };
    rows > few_rows::MOST_ROWS && readable(x) && readable(weight)
}

/// x, or its GELU, in e4m3: by rows and by columns, as far as `wanted`.
///
/// The scale is the smallest power of two with which the largest magnitude is at most 448. If x has a NaN or
/// an infinity, all values are NaN.
///
/// - `x`: `[rows, columns]` in bf16, contiguous; both sizes are multiples of 16
///
/// Returns `[rows, columns]` and the transpose, `[columns, rows]`.
///
/// # Panics
/// When x is not such a matrix.
pub fn rounded(x: &CudaTensor, of: Of, wanted: [bool; 2]) -> [Option<E4m3Matrix>; 2] {
    let [rows, columns] = x.meta.shape().dims();
    assert!(
        x.dtype == DType::BF16 && x.is_contiguous(),
        "{:?} with strides {:?} to be rounded to e4m3",
        x.dtype,
        x.meta.strides()
    );
    assert!(
        rows.is_multiple_of(E4M3_MULTIPLE) && columns.is_multiple_of(E4M3_MULTIPLE),
        "{rows} x {columns} to be rounded to e4m3"
    );
    if !wanted.contains(&true) {
        return [None, None];
    }
    let chunks = elements(x) / CHUNK;
    let part_count = chunks.div_ceil(kernel::LARGEST_THREADS).min(kernel::MOST_PARTS);
    let parts = empty(x, &[part_count], DType::U32);
    let scale = empty(x, &[1], DType::F32);
    let [in_rows, in_columns] = wanted;
    let by_rows = in_rows.then(|| empty(x, &[rows, columns], DType::U8));
    let by_columns = in_columns.then(|| empty(x, &[columns, rows], DType::U8));
    as_u32(elements(x) / WORD); // Words are addressed by 32 bits.
    // SAFETY: the kernels read the whole chunks of x, write a maximum for each block of the first, and the words
    // that the results have, four bytes each; sizes are multiples of 16.
    unsafe {
        kernel::largest::launch_unchecked(
            &x.client,
            blocks(part_count, 1),
            dim(kernel::LARGEST_THREADS),
            buffer(x, CHUNK),
            buffer(&parts, 1),
            as_u32(chunks),
            of,
        );
        kernel::round_matrix::launch_unchecked(
            &x.client,
            CubeCount::Static(
                as_u32(columns.div_ceil(kernel::TILE_COLUMNS)),
                as_u32(rows.div_ceil(kernel::TILE_ROWS)),
                1,
            ),
            dim(kernel::THREADS),
            buffer(x, CHUNK),
            buffer(&parts, 1),
            by_rows.as_ref().map(|y| buffer(y, CHUNK)).into(),
            by_columns.as_ref().map(|y| buffer(y, WORD)).into(),
            buffer(&scale, 1),
            as_u32(part_count),
            as_u32(rows),
            as_u32(columns),
            of,
            in_rows,
            in_columns,
        );
    }
    [by_rows, by_columns].map(|y| Some(E4m3Matrix { values: y?, scale: scale.clone() }))
}

/// A factor of the forward pass, as [`rounded`]: by rows and, if `tracked`, by columns for the backward pass.
pub fn factor(x: &CudaTensor, of: Of, tracked: bool) -> (E4m3Matrix, Option<E4m3Matrix>) {
    let [by_rows, by_columns] = rounded(x, of, [true, tracked]);
    (by_rows.expect("wanted"), by_columns)
}

/// x Wᵀ in bf16 with the epilogue `then`.
///
/// - `x`: `[rows, k]`, `weight`: `[outputs, k]`
pub fn outputs(x: &E4m3Matrix, weight: &E4m3Matrix, then: Epilogue) -> CudaTensor {
    product_of_e4m3(x, weight, DType::BF16, then, Accumulation::Fast)
}

/// dy W in bf16, plus the gradient in `grad_accum`.
///
/// - `dy`: `[rows, outputs]`
/// - `weight_columns`: Wᵀ, `[k, outputs]`
pub fn input_gradient(
    dy: &E4m3Matrix,
    weight_columns: &E4m3Matrix,
    grad_accum: &mut Option<CudaTensor>,
) -> CudaTensor {
    let sum = sum(grad_accum, DType::BF16);
    product_of_e4m3(dy, weight_columns, DType::BF16, sum, Accumulation::Precise)
}

/// dyᵀ x in f32, plus the gradient in `grad_accum`.
///
/// - `dy_columns`: dyᵀ, `[outputs, rows]`
/// - `x_columns`: xᵀ, `[k, rows]`
pub fn weight_gradient(
    dy_columns: &E4m3Matrix,
    x_columns: &E4m3Matrix,
    grad_accum: &mut Option<CudaTensor>,
) -> CudaTensor {
    let sum = sum(grad_accum, DType::F32);
    product_of_e4m3(dy_columns, x_columns, DType::F32, sum, Accumulation::Precise)
}

/// The tensors of the matrices, to save for the backward pass.
pub fn to_saved<const K: usize>(matrices: [Option<E4m3Matrix>; K]) -> Vec<CudaTensor> {
    matrices.into_iter().flatten().flat_map(|matrix| [matrix.values, matrix.scale]).collect()
}

/// The matrices that [`to_saved`] was called with.
///
/// # Panics
/// When there are fewer or more.
pub fn from_saved<const K: usize>(saved: &[CudaTensor]) -> [E4m3Matrix; K] {
    assert_eq!(saved.len(), 2 * K, "values and scales of {K} matrices in e4m3");
    std::array::from_fn(|i| E4m3Matrix {
        values: saved[2 * i].clone(),
        scale: saved[2 * i + 1].clone(),
    })
}

#[cfg(test)]
mod tests;
