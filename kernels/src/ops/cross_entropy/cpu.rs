//! The output projection with the cross-entropy loss on the CPU, a chunk of logits at a time.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::LinearCrossEntropy;
use crate::backend::Forward;
use crate::cpu::gemm::{Mat, matmul_into};
use crate::cpu::{buffer, contiguous, dims, from_vec, math, slice};
use crate::ops::embedding::token_ids;

/// [`Loss::terms`](super::Loss), and the needed gradients of x and W of their sum.
pub fn weighted(
    op: LinearCrossEntropy,
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: &FlexTensor,
    weights: &FlexTensor,
    needs: [bool; 2],
) -> Forward<FlexTensor> {
    let (x, weight, weights) = (contiguous(x), contiguous(weight), contiguous(weights));
    let shape = dims(targets);
    let targets = token_targets(&x, &weight, targets);
    let width = dims(&weight)[1];
    let row_weights = slice(&weights);
    assert_eq!(dims(&weights), shape, "shapes of the cross-entropy's weights and targets");
    // A NaN weight is not 0, so it is counted and propagates.
    let counted: Vec<usize> = (0..targets.len()).filter(|&row| row_weights[row] != 0.0).collect();
    let picked: Vec<f32>;
    let rows = if counted.len() == targets.len() {
        slice(&x)
    } else {
        picked = counted.iter().flat_map(|&row| row_of(slice(&x), row, width)).copied().collect();
        &picked
    };
    let pass = LossAndGrads::run(
        op,
        rows,
        slice(&weight),
        width,
        &counted.iter().map(|&row| targets[row]).collect::<Vec<_>>(),
        &counted.iter().map(|&row| row_weights[row]).collect::<Vec<_>>(),
        needs,
    );
    let sum = |term: usize| {
        let rows = pass.terms.iter().zip(&counted);
        rows.map(|(terms, &row)| f64::from(terms[term] * row_weights[row])).sum::<f64>() as f32
    };
    let terms = if op.z_loss == 0.0 { vec![sum(0)] } else { vec![sum(0), sum(1)] };
    let dx = pass.dx.map(|dx| from_vec(spread(dx, &counted, targets.len(), width), &dims(&x)));
    let dw = pass.dw.map(|dw| from_vec(dw, &dims(&weight)));
    let count = terms.len();
    Forward { output: from_vec(terms, &[count]), saved: dx.into_iter().chain(dw).collect() }
}

/// The gradients of x and W that [`weighted`] saved, times the upstream gradient of its terms.
///
/// # Panics
/// When the terms' upstream gradients differ.
pub fn backward(
    saved: Vec<FlexTensor>,
    grad: &FlexTensor,
    needs: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    let grad = contiguous(grad);
    let (factor, grads) = (slice(&grad)[0], slice(&grad));
    assert!(
        grads.iter().all(|other| other.to_bits() == factor.to_bits()),
        "upstream gradients of the loss's terms are {grads:?}; only their sum has a gradient"
    );
    let mut saved = saved.into_iter().map(|grad| scaled(grad, factor));
    needs.map(|wanted| wanted.then(|| saved.next().expect("a gradient per need")))
}

/// The cross-entropy of every token.
pub fn per_token(
    op: LinearCrossEntropy,
    x: &FlexTensor,
    weight: &FlexTensor,
    targets: &FlexTensor,
) -> FlexTensor {
    let (x, weight) = (contiguous(x), contiguous(weight));
    let shape = dims(targets);
    let targets = token_targets(&x, &weight, targets);
    let width = dims(&weight)[1];
    let pass = LossAndGrads::run(op, slice(&x), slice(&weight), width, &targets, &[], [false; 2]);
    from_vec(pass.terms.iter().map(|&[loss, _]| loss).collect(), &shape)
}

/// The targets as indices, with every size checked.
fn token_targets(x: &FlexTensor, weight: &FlexTensor, targets: &FlexTensor) -> Vec<usize> {
    let (x, weight) = (dims(x), dims(weight));
    let (width, rows) = x.split_last().expect("x has dimensions");
    assert_eq!(*width, weight[1], "width of x {x:?} and weight {weight:?}");
    assert_eq!(rows, dims(targets), "rows of x {x:?} and shape of the targets");
    token_ids(targets, weight[0], "target")
}

fn row_of(matrix: &[f32], row: usize, width: usize) -> &[f32] {
    &matrix[row * width..][..width]
}

/// Scatters the rows of `dx` to `places` among `rows` rows, zeros elsewhere.
fn spread(dx: Vec<f32>, places: &[usize], rows: usize, width: usize) -> Vec<f32> {
    if places.len() == rows {
        return dx;
    }
    let mut whole = buffer(rows * width);
    for (row, &place) in dx.chunks_exact(width).zip(places) {
        whole[place * width..][..width].copy_from_slice(row);
    }
    whole
}

/// `factor` · `grad`, in place.
fn scaled(mut grad: FlexTensor, factor: f32) -> FlexTensor {
    if factor != 1.0 {
        let scale = |part: &mut [f32]| part.iter_mut().for_each(|x| *x *= factor);
        grad.storage_mut::<f32>().par_chunks_mut(1 << 14).for_each(scale);
    }
    grad
}

/// Rows of logits per chunk: about 32 MiB, so that they stay in cache at small vocabularies, but enough
/// rows for fast matrix products at large ones.
///
/// Depends only on the vocabulary, so that the order of sums over chunks is fixed.
pub fn chunk_rows(vocab: usize) -> usize {
    ((1 << 23) / vocab).next_multiple_of(64).clamp(256, 1024)
}

/// The results of one pass over the rows.
struct LossAndGrads {
    /// The unweighted cross-entropy and z-loss of each row.
    terms: Vec<[f32; 2]>,
    /// Σ weights · d (cross-entropy + z-loss) / dx, where wanted.
    dx: Option<Vec<f32>>,
    /// Σ weights · d (cross-entropy + z-loss) / dW, where wanted.
    dw: Option<Vec<f32>>,
}

impl LossAndGrads {
    /// The terms of the rows of `x`, and the needed gradients of x and W under `row_weights`, which may be
    /// empty if no gradient is needed.
    fn run(
        op: LinearCrossEntropy,
        x: &[f32],
        weight: &[f32],
        width: usize,
        targets: &[usize],
        row_weights: &[f32],
        [want_dx, want_dw]: [bool; 2],
    ) -> Self {
        let (rows, vocab) = (targets.len(), weight.len() / width);
        let w = Mat::new(weight, vocab, width, width);
        let chunk = chunk_rows(vocab).min(rows);
        let mut logits = buffer(chunk * vocab);
        let mut terms = vec![[0.0; 2]; rows];
        let mut dx = want_dx.then(|| buffer(rows * width));
        let mut dw = want_dw.then(|| buffer(vocab * width));
        for first in (0..rows).step_by(chunk.max(1)) {
            let rows = chunk.min(rows - first);
            let part = first..first + rows;
            let x = Mat::new(&x[first * width..], rows, width, width);
            let logits = &mut logits[..rows * vocab];
            matmul_into(logits, x, w.t(), 0.0);
            let row_weights = (want_dx || want_dw).then(|| &row_weights[part.clone()]);
            softmax_rows(op, logits, vocab, &targets[part.clone()], row_weights, &mut terms[part]);
            let d_logits = Mat::new(logits, rows, vocab, vocab);
            if let Some(dx) = &mut dx {
                matmul_into(&mut dx[first * width..][..rows * width], d_logits, w, 0.0);
            }
            if let Some(dw) = &mut dw {
                let beta = if first == 0 { 0.0 } else { 1.0 };
                matmul_into(dw, d_logits.t(), x, beta);
            }
        }
        LossAndGrads { terms, dx, dw }
    }
}

/// The cross-entropy and the z-loss of every row of logits. With weights, the logits are overwritten by their
/// gradient, weight · ((1 + 2 z_loss · ln Σ exp(z)) · softmax(z) − onehot(target)), times the slope of the softcap.
fn softmax_rows(
    op: LinearCrossEntropy,
    logits: &mut [f32],
    vocab: usize,
    targets: &[usize],
    row_weights: Option<&[f32]>,
    terms: &mut [[f32; 2]],
) {
    logits.par_chunks_mut(vocab).zip(terms.par_iter_mut().enumerate()).for_each_init(
        Vec::new,
        |slopes, (z, (row, terms))| {
            let target = targets[row];
            if let Some(cap) = op.softcap {
                slopes.resize(vocab, 0.0);
                cap_row(z, cap, slopes);
            }
            let shift = math::max(z);
            let picked = z[target] - shift;
            let sum = math::exp_shifted(z, shift);
            let log_sum = shift + sum.ln();
            *terms = [sum.ln() - picked, op.z_loss * log_sum * log_sum];
            if let Some(weights) = row_weights {
                let factor = weights[row] * (1.0 + 2.0 * op.z_loss * log_sum) / sum;
                z.iter_mut().for_each(|z| *z *= factor);
                z[target] -= weights[row];
                if op.softcap.is_some() {
                    z.iter_mut().zip(slopes).for_each(|(z, slope)| *z *= *slope);
                }
            }
        },
    );
}

/// z ← c·tanh(z / c); `slopes` receives the derivative, 1 − tanh²(z / c).
fn cap_row(z: &mut [f32], cap: f32, slopes: &mut [f32]) {
    for (z, slope) in z.iter_mut().zip(slopes) {
        let tanh = math::tanh(*z / cap);
        *z = cap * tanh;
        *slope = 1.0 - tanh * tanh;
    }
}
