//! The backward pass (Dao, "FlashAttention-2", 2023, algorithm 2), with the same bits in every run. For softmax,
//! it recomputes P = exp(S − lse) and dS = P ⊙ (dO·Vᵀ − δ), δ = rowsum(dO ⊙ O).
//!
//! [`dqkv`] computes dq, dk and dv with a block per key block, over all query heads of the kv head. If heads of k or
//! v have more than 128 channels, [`dq`] and [`dkv`] do it, with a block per query block and one per key block.

pub mod dkv;
pub mod dkv_in_order;
pub mod dq;
pub mod dq_sums;
pub mod dqkv;
mod of_keys;
mod query_tile;

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::heads::HeadQuads;
use super::hooks::GradientOf;
use crate::tile::{CHUNK, Chunk, RowStrides};

/// q and k, `[batch, heads or kv_heads, tokens, head_dim]`, v and dO,
/// `[batch, value heads or heads, tokens, value_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct BackwardInputs {
    /// Queries.
    pub q: TensorMap<bf16, Tiled>,
    /// Keys.
    pub k: TensorMap<bf16, Tiled>,
    /// Values.
    pub v: TensorMap<bf16, Tiled>,
    /// The gradient of o.
    pub grad: TensorMap<bf16, Tiled>,
}

/// The output for dq or dk.
pub type GradientOutput<A> = HeadQuads<GradientOf<A>>;

/// Lanes per row of [`row_dots()`].
pub const LANES_PER_ROW: usize = 8;

/// Σ_c x_ic y_ic of each row, `[batch, heads, rows]`; of o and dO this is δ.
///
/// Grid: blocks of rows, batch · heads.
#[cube(launch_unchecked)]
pub fn row_dots(
    x: &Array<Chunk>,
    y: &Array<Chunk>,
    sums: &mut Array<f32>,
    heads: u32,
    count: u32,
    x_strides: RowStrides,
    y_strides: RowStrides,
    #[comptime] chunks: usize,
) {
    let rows = CUBE_DIM as usize / LANES_PER_ROW;
    let row = CUBE_POS_X as usize * rows + UNIT_POS as usize / LANES_PER_ROW;
    let lane = UNIT_POS as usize % LANES_PER_ROW;
    let batch = CUBE_POS_Y as usize / heads as usize;
    let head = CUBE_POS_Y as usize % heads as usize;
    // Lanes past the last row repeat it, because all lanes take part in the shuffles.
    let from = min(row, count as usize - 1);
    let x_at = x_strides.base(batch, head) + from * x_strides.row as usize;
    let y_at = y_strides.base(batch, head) + from * y_strides.row as usize;
    let mut sum = 0f32;
    #[unroll]
    for i in 0..comptime!(chunks.div_ceil(LANES_PER_ROW)) {
        let chunk = i * LANES_PER_ROW + lane;
        if comptime!(chunks.is_multiple_of(LANES_PER_ROW)) || chunk < chunks {
            let x = Vector::<f32, Const<CHUNK>>::cast_from(x[x_at + chunk]);
            let y = Vector::<f32, Const<CHUNK>>::cast_from(y[y_at + chunk]);
            #[unroll]
            for e in 0..CHUNK {
                sum += x[e] * y[e];
            }
        }
    }
    sum += plane_shuffle_xor(sum, 1);
    sum += plane_shuffle_xor(sum, 2);
    sum += plane_shuffle_xor(sum, 4);
    if (lane == 0) & (row < count as usize) {
        sums[CUBE_POS_Y as usize * count as usize + row] = sum;
    }
}
