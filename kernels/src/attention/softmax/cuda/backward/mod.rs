//! The backward pass, without atomics: one kernel makes dq, block of queries by block of queries,
//! another dk and dv, block of keys by block of keys, over all query heads of the kv head (Dao,
//! "FlashAttention-2", 2023, algorithm 2, split in two). Both recompute
//! P = exp(S − lse) and dS = P ⊙ (dO·Vᵀ − D), D = rowsum(dO ⊙ O).

pub mod keys;
pub mod queries;
mod query_tile;

use cubecl::prelude::*;

use crate::tile::{CHUNK, Rows};

/// Lanes that share a row of [`row_sums`].
pub const LANES_OF_A_ROW: usize = 8;

/// Σ_c x_ic y_ic of each row, `[batch, heads, rows]`; of o and dO this is D.
///
/// Grid: blocks of rows, batch · heads.
#[cube(launch_unchecked)]
pub fn row_sums<E: Numeric, V: Size>(
    x: &Array<Vector<E, V>>,
    y: &Array<Vector<E, V>>,
    sums: &mut Array<f32>,
    heads: u32,
    count: u32,
    x_rows: Rows,
    y_rows: Rows,
    #[comptime] chunks: usize,
) {
    let rows = CUBE_DIM as usize / LANES_OF_A_ROW;
    let row = CUBE_POS_X as usize * rows + UNIT_POS as usize / LANES_OF_A_ROW;
    let lane = UNIT_POS as usize % LANES_OF_A_ROW;
    let batch = CUBE_POS_Y as usize / heads as usize;
    let head = CUBE_POS_Y as usize % heads as usize;
    // Lanes past the last row repeat it: all lanes meet in the shuffles.
    let from = min(row, count as usize - 1);
    let x_at = x_rows.base(batch, head) + from * x_rows.row as usize;
    let y_at = y_rows.base(batch, head) + from * y_rows.row as usize;
    let mut sum = 0f32;
    #[unroll]
    for i in 0..comptime!(chunks.div_ceil(LANES_OF_A_ROW)) {
        let chunk = i * LANES_OF_A_ROW + lane;
        if comptime!(chunks.is_multiple_of(LANES_OF_A_ROW)) || chunk < chunks {
            let x = Vector::<f32, V>::cast_from(x[x_at + chunk]);
            let y = Vector::<f32, V>::cast_from(y[y_at + chunk]);
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
