//! The gradient of the log decay, from those of queries and keys.

use burn::tensor::{DType, Tensor, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use crate::Cuda;
use crate::attention::flash::{Heads, as_u32, grid};
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::prefix_sum::cuda::prefix_sum;
use crate::tile::{CHUNK, RowStrides};

/// Elements per vector.
const QUAD: usize = 4;

/// Lanes per row of [`round_and_dot`].
const LANES: usize = 16;

/// Rows per block of [`round_and_dot`].
const ROWS: usize = 16;

/// The gradient `grad` of `x` rounded to bf16, and Σ_c x_c grad_c of each row, `[batch, heads, rows]` in f32.
///
/// - `x`: `[batch, heads, rows, head_dim]` in bf16
/// - `grad`: the same in f32
pub fn rounded_with_dots(x: &CudaTensor, grad: &CudaTensor) -> [CudaTensor; 2] {
    let (x, grad) = (Heads::new(x), Heads::new(grad));
    let [batch, heads, rows, head_dim] = x.dims;
    let rounded = x.like();
    let dots = empty(&x.tensor, &[batch, heads, rows], DType::F32);
    // SAFETY: threads stay within the tensors' rows and channels.
    unsafe {
        round_and_dot::launch_unchecked::<CudaRuntime>(
            &x.tensor.client,
            grid(rows, ROWS, batch * heads),
            CubeDim::new_1d((ROWS * LANES) as u32),
            buffer(&x.tensor, QUAD),
            buffer(&grad.tensor, QUAD),
            buffer(&rounded.tensor, QUAD),
            buffer(&dots, 1),
            as_u32(heads),
            as_u32(rows),
            x.row_strides(),
            grad.row_strides(),
            rounded.row_strides(),
            head_dim / QUAD,
        );
    }
    [rounded.tensor, dots]
}

/// See [`rounded_with_dots`].
///
/// Grid: blocks of rows, batch · heads.
#[cube(launch_unchecked)]
fn round_and_dot(
    x: &Array<Vector<bf16, Const<QUAD>>>,
    grad: &Array<Vector<f32, Const<QUAD>>>,
    rounded: &mut Array<Vector<bf16, Const<QUAD>>>,
    dots: &mut Array<f32>,
    heads: u32,
    count: u32,
    x_strides: RowStrides,
    grad_strides: RowStrides,
    rounded_strides: RowStrides,
    #[comptime] quads: usize,
) {
    let row = CUBE_POS_X as usize * ROWS + UNIT_POS as usize / LANES;
    let lane = UNIT_POS as usize % LANES;
    let batch = CUBE_POS_Y as usize / heads as usize;
    let head = CUBE_POS_Y as usize % heads as usize;
    // Lanes past the last row repeat it, because all lanes take part in the shuffles.
    let from = min(row, count as usize - 1);
    let per_chunk = comptime!(CHUNK / QUAD);
    let x_at = (x_strides.base(batch, head) + from * x_strides.row as usize) * per_chunk;
    let grad_at = (grad_strides.base(batch, head) + from * grad_strides.row as usize) * per_chunk;
    let to = (rounded_strides.base(batch, head) + from * rounded_strides.row as usize) * per_chunk;
    let mut sum = 0f32;
    #[unroll]
    for i in 0..comptime!(quads.div_ceil(LANES)) {
        let quad = i * LANES + lane;
        if comptime!(quads.is_multiple_of(LANES)) || quad < quads {
            let own = Vector::<f32, Const<QUAD>>::cast_from(x[x_at + quad]);
            let gradient = grad[grad_at + quad];
            #[unroll]
            for e in 0..QUAD {
                sum += own[e] * gradient[e];
            }
            if row < count as usize {
                rounded[to + quad] = Vector::cast_from(gradient);
            }
        }
    }
    sum += plane_shuffle_xor(sum, 1);
    sum += plane_shuffle_xor(sum, 2);
    sum += plane_shuffle_xor(sum, 4);
    sum += plane_shuffle_xor(sum, 8);
    if (lane == 0) & (row < count as usize) {
        dots[CUBE_POS_Y as usize * count as usize + row] = sum;
    }
}

/// The gradient of ℓ, `[batch, kv_heads, tokens]`: ℓ_t enters the weights of all queries at t or later with keys
/// before t.
///
/// - `rows`: q_iᵀdq_i, `[batch, heads, tokens]`
/// - `columns`: k_jᵀdk_j, `[batch, kv_heads, tokens]`
pub fn of_log_decay(rows: CudaTensor, columns: CudaTensor, p: u32) -> CudaTensor {
    let [batch, heads, tokens]: [usize; 3] = rows.meta.shape().dims();
    let kv_heads = columns.meta.shape()[1];
    let rows = tensor::<Cuda, 3>(rows).reshape([batch, kv_heads, heads / kv_heads, tokens]);
    let rows: Tensor<Cuda, 3> = rows.sum_dim(2).reshape([batch, kv_heads, tokens]);
    let differences = (rows - tensor::<Cuda, 3>(columns)) / p as f32;
    prefix_sum(&primitive(differences), true).expect("f32 has prefix sums")
}
