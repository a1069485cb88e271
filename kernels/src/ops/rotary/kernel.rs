//! The rotary position embedding.

use cubecl::prelude::*;

/// Heads that a thread rotates by the angles it has read.
pub const HEADS: usize = 4;

/// How a tensor `[batch, heads, seq_len, head_dim]` lies in memory, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// From one sequence to the next.
    pub batch: u32,
    /// From one head to the next.
    pub head: u32,
    /// From one row to the next.
    pub row: u32,
}

/// Rotates channel i < n/2 and i + n/2 of each row by the row's angle i, and copies the channels
/// from n on. Each thread handles a vector of channels, and the one n/2 on, of [`HEADS`] heads.
///
/// - `angles`: `[positions, 2, half]`, cos and sin; row t's are those of position `first` + t
/// - `half`: n/2, in vectors
/// - `rest`: channels from n on, in vectors
/// - `direction`: 1, or −1 for the inverse
#[cube(launch_unchecked)]
pub fn rotate<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    angles: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<E, N>>,
    first: u32,
    batch: u32,
    heads: u32,
    seq_len: u32,
    half: u32,
    rest: u32,
    direction: f32,
    x_strides: Strides,
    y_strides: Strides,
    #[define(E)] _dtype: StorageType,
) {
    let half = half as usize;
    let share = half + rest as usize;
    let column = ABSOLUTE_POS % share;
    let rows = ABSOLUTE_POS / share;
    let row = rows % seq_len as usize;
    let groups = (heads as usize + HEADS - 1) / HEADS;
    let group = rows / seq_len as usize % groups;
    let sequence = rows / seq_len as usize / groups;
    if sequence < batch as usize {
        let mut cos = Vector::<f32, N>::cast_from(1f32);
        let mut sin = Vector::<f32, N>::cast_from(0f32);
        if column < half {
            let at = (first as usize + row) * 2 * half + column;
            cos = angles[at];
            sin = angles[at + half] * Vector::cast_from(direction);
        }
        let x_start = sequence * x_strides.batch as usize + row * x_strides.row as usize;
        let y_start = sequence * y_strides.batch as usize + row * y_strides.row as usize;
        #[unroll]
        for i in 0..HEADS {
            let head = group * HEADS + i;
            if head < heads as usize {
                let x_at = x_start + head * x_strides.head as usize + column;
                let y_at = y_start + head * y_strides.head as usize + column;
                if column < half {
                    let a = Vector::<f32, N>::cast_from(x[x_at]);
                    let b = Vector::<f32, N>::cast_from(x[x_at + half]);
                    y[y_at] = Vector::cast_from(a * cos - b * sin);
                    y[y_at + half] = Vector::cast_from(b * cos + a * sin);
                } else {
                    y[y_at + half] = x[x_at + half];
                }
            }
        }
    }
}
