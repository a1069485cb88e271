//! The rotary position embedding.

use cubecl::prelude::*;

use crate::ops::cuda::block::HeadStrides;

/// Heads per thread, which share the angles that it reads.
pub const HEADS_PER_THREAD: usize = 4;

/// A tensor `[batch, heads, seq_len, head_dim]` to rotate, and where the result goes. With n = 2·`half` vectors of
/// channels that rotate, channels from n on are copied.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct RotatedHeads {
    /// Sequences.
    pub batch: u32,
    /// Heads.
    pub heads: u32,
    /// Rows of a head.
    pub seq_len: u32,
    /// n/2, in vectors.
    pub half: u32,
    /// Channels from n on, in vectors.
    pub rest: u32,
    /// The input's strides.
    pub x_strides: HeadStrides,
    /// The output's strides.
    pub y_strides: HeadStrides,
}

/// Rotates channel i < n/2 and i + n/2 of each row by the row's angle i, and copies the channels
/// from n on. Each thread handles a vector of channels, and the one n/2 on, of [`HEADS_PER_THREAD`] heads.
///
/// - `angles`: `[positions, 2, half]`, cos and sin, times the amplitude; row t's are those of position `first` + t
/// - `direction`: 1, or −1 for the transpose
#[cube(launch_unchecked)]
pub fn rotate<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    angles: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<E, N>>,
    first: u32,
    direction: f32,
    heads: RotatedHeads,
    #[define(E)] _dtype: StorageType,
) {
    rotate_own::<E, N>(x, angles, y, ABSOLUTE_POS, first, direction, &heads);
}

/// [`rotate`] of q and k, and a copy of v. The first `q_threads` threads handle q, the next `k_threads` k, and the
/// others v, whose `half` is 0.
#[cube(launch_unchecked)]
pub fn rotate_both<E: Float, N: Size>(
    q: &Array<Vector<E, N>>,
    k: &Array<Vector<E, N>>,
    v: &Array<Vector<E, N>>,
    angles: &Array<Vector<f32, N>>,
    q_out: &mut Array<Vector<E, N>>,
    k_out: &mut Array<Vector<E, N>>,
    v_out: &mut Array<Vector<E, N>>,
    first: u32,
    q_threads: u32,
    k_threads: u32,
    q_heads: RotatedHeads,
    k_heads: RotatedHeads,
    v_heads: RotatedHeads,
    #[define(E)] _dtype: StorageType,
) {
    let own = ABSOLUTE_POS;
    let (q_end, k_end) = (q_threads as usize, (q_threads + k_threads) as usize);
    if own < q_end {
        rotate_own::<E, N>(q, angles, q_out, own, first, 1f32, &q_heads);
    } else if own < k_end {
        rotate_own::<E, N>(k, angles, k_out, own - q_end, first, 1f32, &k_heads);
    } else {
        rotate_own::<E, N>(v, angles, v_out, own - k_end, first, 1f32, &v_heads);
    }
}

/// The part of thread `own` in [`rotate`].
#[cube]
fn rotate_own<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    angles: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<E, N>>,
    own: usize,
    first: u32,
    direction: f32,
    sizes: &RotatedHeads,
) {
    let (heads, half) = (sizes.heads as usize, sizes.half as usize);
    let seq_len = sizes.seq_len as usize;
    let share = half + sizes.rest as usize;
    let column = own % share;
    let rows = own / share;
    let row = rows % seq_len;
    let groups = (heads + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
    let group = rows / seq_len % groups;
    let sequence = rows / seq_len / groups;
    if sequence < sizes.batch as usize {
        let mut cos = Vector::<f32, N>::cast_from(1f32);
        let mut sin = Vector::<f32, N>::cast_from(0f32);
        if column < half {
            let at = (first as usize + row) * 2 * half + column;
            cos = angles[at];
            sin = angles[at + half] * Vector::cast_from(direction);
        }
        let (from, to) = (sizes.x_strides, sizes.y_strides);
        let x_start = sequence * from.batch as usize + row * from.row as usize;
        let y_start = sequence * to.batch as usize + row * to.row as usize;
        #[unroll]
        for i in 0..HEADS_PER_THREAD {
            let head = group * HEADS_PER_THREAD + i;
            if head < heads {
                let x_at = x_start + head * from.head as usize + column;
                let y_at = y_start + head * to.head as usize + column;
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
