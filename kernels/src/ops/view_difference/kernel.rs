//! The kernels of the difference of two views. Tensors have the heads' channels of a token next to one
//! another: o is `[tokens, 2, width]` and the difference `[tokens, width]`, in vectors. Each thread handles one
//! of the difference's `count` vectors.

use cubecl::prelude::*;

use crate::ops::cuda::THREADS;
use crate::ops::cuda::block::{sum_row, sum_vector};

/// The index of a vector's counterpart in the first view.
#[cube]
fn in_first_view(at: usize, width: usize) -> usize {
    at + at / width * width
}

/// y = o⁽¹⁾ − λ o⁽²⁾.
#[cube(launch_unchecked)]
pub fn subtract_view<E: Float, N: Size>(
    o: &Array<Vector<E, N>>,
    lambda: &Array<f32>,
    y: &mut Array<Vector<E, N>>,
    count: u32,
    width: u32,
    #[define(E)] _dtype: StorageType,
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let width = width as usize;
        let from = in_first_view(at, width);
        let first = Vector::<f32, N>::cast_from(o[from]);
        let second = Vector::<f32, N>::cast_from(o[from + width]);
        y[at] = Vector::cast_from(first - second * Vector::cast_from(lambda[0]));
    }
}

/// d_o⁽¹⁾ = dy and d_o⁽²⁾ = −λ dy; each block's part of dλ = −Σ dy · o⁽²⁾.
///
/// - `parts`: `[blocks]`
#[cube(launch_unchecked)]
pub fn subtract_view_backward<E: Float, N: Size>(
    o: &Array<Vector<E, N>>,
    lambda: &Array<f32>,
    dy: &Array<Vector<E, N>>,
    d_o: &mut Array<Vector<E, N>>,
    parts: &mut Array<f32>,
    count: u32,
    width: u32,
    #[define(E)] _dtype: StorageType,
) {
    let mut scratch = SharedMemory::<f32>::new(comptime!(THREADS / 32));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = f32::cast_from(0f32);
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let width = width as usize;
        let from = in_first_view(at, width);
        let grad = Vector::<f32, N>::cast_from(dy[at]);
        let second = Vector::<f32, N>::cast_from(o[from + width]);
        d_o[from] = dy[at];
        d_o[from + width] = Vector::cast_from(grad * Vector::cast_from(-lambda[0]));
        sum[0] = sum_vector::<N>(grad * second);
    }
    sum_row(&mut sum, &mut scratch, 1usize, THREADS);
    if UNIT_POS == 0 {
        parts[CUBE_POS_X as usize] = -sum[0];
    }
}
