//! The rotary position embedding.

use cubecl::prelude::*;

/// Heads per thread, which share the angles that it reads.
pub const HEADS_PER_THREAD: usize = 4;

/// The strides of `[batch, heads, seq_len, head_dim]`, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct HeadStrides {
    /// Between sequences.
    pub batch: u32,
    /// Between heads.
    pub head: u32,
    /// Between rows.
    pub row: u32,
}

/// Rotates channel i < n/2 and i + n/2 of each row by the row's angle i, and copies the channels
/// from n on. Each thread handles a vector of channels, and the one n/2 on, of [`HEADS_PER_THREAD`] heads.
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
    x_strides: HeadStrides,
    y_strides: HeadStrides,
    #[define(E)] _dtype: StorageType,
) {
    let half = half as usize;
    let share = half + rest as usize;
    let column = ABSOLUTE_POS % share;
    let rows = ABSOLUTE_POS / share;
    let row = rows % seq_len as usize;
    let groups = (heads as usize + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
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
        for i in 0..HEADS_PER_THREAD {
            let head = group * HEADS_PER_THREAD + i;
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
