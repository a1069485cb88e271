//! RMS norm on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::RmsNorm;
use crate::backend::Forward;
use crate::cpu::rows::{RowOrder, with_whole_rows};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, rows_per_task, slice, sum_in_order};

/// Elements per parallel task.
const TASK: usize = 1 << 14;

/// The norm of each row, in the memory order of `x`; saves `x` and `weight`.
pub fn forward(op: &RmsNorm, x: &FlexTensor, weight: &FlexTensor) -> Forward<FlexTensor> {
    let (x, weight) = (with_whole_rows(x), contiguous(weight));
    let order = RowOrder::of(&x);
    let (xs, w, width) = (order.view(&x), slice(&weight), order.width());
    assert_eq!(dims(&weight), [width], "shape of RMS norm's weight and width of x");
    let mut y = buffer(order.rows() * width);
    let rows = rows_per_task(width, TASK);
    y.par_chunks_mut(rows * width).enumerate().for_each(|(task, y)| {
        for (i, y) in y.chunks_exact_mut(width).enumerate() {
            let x = xs.row(task * rows + i);
            // A division, because multiplying by the root's inverse would round once more.
            let root = square(op, x).sqrt();
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = x / root * w;
            }
        }
    });
    Forward { output: order.tensor(y), saved: vec![x, weight] }
}

/// The gradients of x and weight.
pub fn backward(
    op: &RmsNorm,
    saved: &[FlexTensor],
    grad: &FlexTensor,
    needs: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    let [x, weight] = saved else { unreachable!("RMS norm saves two tensors") };
    let grad = with_whole_rows(grad);
    let order = RowOrder::of(x);
    let (xs, dys, w) = (order.view(x), order.view(&grad), slice(weight));
    let width = order.width();
    let mut dx = buffer(order.rows() * width);
    let rows = rows_per_task(width, TASK);
    let parts: Vec<_> = dx
        .par_chunks_mut(rows * width)
        .enumerate()
        .map(|(task, dx)| {
            let mut dw = vec![0.0; width];
            for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
                let row = task * rows + i;
                backward_row(op, w, xs.row(row), dys.row(row), dx, &mut dw);
            }
            dw
        })
        .collect();
    [needs[0].then(|| order.tensor(dx)), needs[1].then(|| from_vec(sum_in_order(&parts), &[width]))]
}

/// mean(x²) + eps.
fn square(op: &RmsNorm, x: &[f32]) -> f32 {
    math::dot(x, x) / x.len() as f32 + op.eps
}

/// With x̂ = x / r the normalised row and g = dy · weight: dx = (g − x̂ · mean(g · x̂)) / r,
/// dweight += dy · x̂.
fn backward_row(op: &RmsNorm, w: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let width = w.len();
    let (x, dy, dx, dw) = (&x[..width], &dy[..width], &mut dx[..width], &mut dw[..width]);
    let square = square(op, x);
    let root = square.sqrt();
    for i in 0..width {
        dx[i] = dy[i] * w[i];
        dw[i] += dy[i] * (x[i] / root);
    }
    let slope = math::dot(x, dx) / (square * width as f32);
    for i in 0..width {
        dx[i] = (dx[i] - x[i] * slope) / root;
    }
}
