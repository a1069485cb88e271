//! Layer norm on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::LayerNorm;
use crate::backend::Forward;
use crate::cpu::{buffer, contiguous, dims, from_vec, math, rows_per_task, slice, sum_in_order};

/// Elements per parallel task.
const TASK: usize = 1 << 14;

/// `[mean, var + eps]` of a row, in two passes.
fn statistics(op: &LayerNorm, x: &[f32]) -> [f32; 2] {
    let scale = 1.0 / x.len() as f32;
    let mean = math::sum(x) * scale;
    let variance = math::square_deviation(x, mean) * scale;
    [mean, variance + op.eps]
}

/// The norm of each row; saves `x` and `weight`.
pub fn forward(
    op: &LayerNorm,
    x: &FlexTensor,
    weight: &FlexTensor,
    bias: Option<&FlexTensor>,
) -> Forward<FlexTensor> {
    let (x, weight, bias) = (contiguous(x), contiguous(weight), bias.map(contiguous));
    let (xs, w) = (slice(&x), slice(&weight));
    let width = width(&x, &weight);
    let zeros = vec![0.0; width];
    let b = bias.as_ref().map_or(&zeros[..], slice);
    assert_eq!(b.len(), width, "width of layer norm's bias and of x");
    let mut y = buffer(xs.len());
    let task = width * rows_per_task(width, TASK);
    y.par_chunks_mut(task).zip(xs.par_chunks(task)).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            let [mean, variance] = statistics(op, x);
            // A division, because multiplying by the root's inverse would round once more.
            let root = variance.sqrt();
            for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
                *y = math::mul_add((x - mean) / root, *w, *b);
            }
        }
    });
    Forward { output: from_vec(y, &dims(&x)), saved: vec![x, weight] }
}

/// With x̂ the normalised row and g = dy · weight: dx = (g − mean(g) − x̂ · mean(g · x̂)) / σ,
/// dweight = Σ dy · x̂, dbias = Σ dy.
pub fn backward(
    op: &LayerNorm,
    saved: &[FlexTensor],
    grad: &FlexTensor,
    needs: [bool; 3],
) -> [Option<FlexTensor>; 3] {
    let [x, weight] = saved else { unreachable!("layer norm saves two tensors") };
    let grad = contiguous(grad);
    let (width, w) = (width(x, weight), slice(weight));
    let mut dx = buffer(slice(x).len());
    let task = width * rows_per_task(width, TASK);
    let parts: Vec<_> = dx
        .par_chunks_mut(task)
        .zip(slice(x).par_chunks(task))
        .zip(slice(&grad).par_chunks(task))
        .map(|((dx, x), dy)| {
            let (mut dw, mut db) = (vec![0.0; width], vec![0.0; width]);
            for ((dx, x), dy) in
                dx.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(dy.chunks_exact(width))
            {
                backward_row(op, w, x, dy, dx, &mut dw);
                math::add_to(&mut db, dy);
            }
            (dw, db)
        })
        .collect();
    let (dw, db): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let vector = |parts: &[Vec<f32>]| from_vec(sum_in_order(parts), &[width]);
    [
        needs[0].then(|| from_vec(dx, &dims(x))),
        needs[1].then(|| vector(&dw)),
        needs[2].then(|| vector(&db)),
    ]
}

fn backward_row(op: &LayerNorm, w: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let width = w.len();
    let (x, dy, dx, dw) = (&x[..width], &dy[..width], &mut dx[..width], &mut dw[..width]);
    let [mean, variance] = statistics(op, x);
    let root = variance.sqrt();
    for i in 0..width {
        dx[i] = dy[i] * w[i];
        dw[i] += dy[i] * ((x[i] - mean) / root);
    }
    let scale = 1.0 / width as f32;
    let shift = math::sum(dx) * scale;
    let slope = math::dot_shifted(x, mean, dx) / (variance * width as f32);
    for i in 0..width {
        dx[i] = (dx[i] - shift - (x[i] - mean) * slope) / root;
    }
}

/// The size of the last dimension of `x`, which is the weight's.
fn width(x: &FlexTensor, weight: &FlexTensor) -> usize {
    let width = dims(weight)[0];
    assert_eq!(dims(x).last(), Some(&width), "width of x and of layer norm's weight");
    width
}
