//! The short convolution on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::Forward;
use crate::cpu::{
    buffer, contiguous, dims, from_vec, int_vec, math, rows_per_task, slice, sum_in_order,
};
use crate::ops::activation::cpu::{silu_slope, silu_value};

/// The convolution; saves `x` and `weight`.
pub fn forward(
    x: &FlexTensor,
    weight: &FlexTensor,
    ints: &[FlexTensor],
    silu: bool,
) -> Forward<FlexTensor> {
    let (x, weight) = (contiguous(x), contiguous(weight));
    let params = ConvParams::new(&x, &weight, ints);
    let mut y = buffer(slice(&x).len());
    let (channels, rows) = (params.channels, params.task_rows());
    y.par_chunks_mut(rows * channels).enumerate().for_each(|(task, y)| {
        for (i, y) in y.chunks_exact_mut(channels).enumerate() {
            params.convolve(task * rows + i, y);
            if silu {
                y.iter_mut().for_each(|y| *y = silu_value(*y));
            }
        }
    });
    Forward { output: from_vec(y, &dims(&x)), saved: vec![x, weight] }
}

/// The gradients of x and weight.
pub fn backward(
    saved: &[FlexTensor],
    ints: &[FlexTensor],
    grad: &FlexTensor,
    silu: bool,
    needs: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    let [x, weight] = saved else { unreachable!("the convolution saves two tensors") };
    let grad = contiguous(grad);
    let params = ConvParams::new(x, weight, ints);
    let mut dx = buffer(slice(x).len());
    let (channels, rows) = (params.channels, params.task_rows());
    let parts: Vec<_> = dx
        .par_chunks_mut(rows * channels)
        .enumerate()
        .map_init(Vec::new, |scratch, (task, dx)| {
            backward_task(&params, silu, slice(&grad), task * rows, dx, scratch)
        })
        .collect();
    let dw = || {
        // Tasks sum as `[taps, channels]`; the weight is `[channels, taps]`.
        let dw = from_vec(sum_in_order(&parts), &[params.taps, channels]);
        contiguous(&dw.transpose(0, 1))
    };
    [needs[0].then(|| from_vec(dx, &dims(x))), needs[1].then(dw)]
}

/// The gradient of the rows from `first` on, and their contribution to the weight's, `[taps, channels]`.
///
/// With dz the gradient of the convolution: dx_t = Σ_back w_back · dz_{t + back}, so the task
/// computes dz for the taps − 1 rows after its own too.
fn backward_task(
    params: &ConvParams,
    silu: bool,
    dy: &[f32],
    first: usize,
    dx: &mut [f32],
    scratch: &mut Vec<f32>,
) -> Vec<f32> {
    let channels = params.channels;
    let end = first + dx.len() / channels;
    let last = (end + params.taps - 1).min(params.reach.len());
    scratch.resize((last - first) * channels, 0.0);
    for (i, dz) in scratch.chunks_exact_mut(channels).enumerate() {
        let dy = &dy[(first + i) * channels..][..channels];
        if silu {
            params.convolve(first + i, dz);
            dz.iter_mut().zip(dy).for_each(|(z, dy)| *z = dy * silu_slope(*z));
        } else {
            dz.copy_from_slice(dy);
        }
    }
    let dz = |row: usize| &scratch[(row - first) * channels..][..channels];
    let mut dw = vec![0.0; params.taps * channels];
    for (row, dx) in (first..end).zip(dx.chunks_exact_mut(channels)) {
        let later = (row..last.min(row + params.taps)).take_while(|&t| t - row < params.reach[t]);
        weighted_sum(dx, later.clone().count(), |back| (params.tap(back), dz(row + back)));
        for back in 0..params.reach[row] {
            let dw = &mut dw[back * channels..][..channels];
            for ((dw, x), dz) in dw.iter_mut().zip(params.row(row - back)).zip(dz(row)) {
                *dw = math::mul_add(*x, *dz, *dw);
            }
        }
    }
    // So far ordered by distance from the current row; the last tap is the one at distance 0.
    dw.chunks_exact(channels).rev().flatten().copied().collect()
}

/// y ← Σ_i a_i · b_i, elementwise, over the `terms` pairs of rows returned by `pair`.
fn weighted_sum<'a>(y: &mut [f32], terms: usize, pair: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
    // A block's sums stay in registers.
    const BLOCK: usize = 32;
    let whole = y.len() - y.len() % BLOCK;
    let (blocks, rest) = y.split_at_mut(whole);
    for (block, y) in blocks.chunks_exact_mut(BLOCK).enumerate() {
        let mut sums = [0.0; BLOCK];
        for term in 0..terms {
            let (a, b) = pair(term);
            let [a, b] = [a, b].map(|row| &row[block * BLOCK..][..BLOCK]);
            for i in 0..BLOCK {
                sums[i] = math::mul_add(a[i], b[i], sums[i]);
            }
        }
        y.copy_from_slice(&sums);
    }
    for (i, y) in rest.iter_mut().enumerate() {
        let product =
            |sum: f32, (a, b): (&[f32], &[f32])| math::mul_add(a[whole + i], b[whole + i], sum);
        *y = (0..terms).map(&pair).fold(0.0, product);
    }
}

/// The sizes and inputs of one call; rows are those of `[batch · seq_len, channels]`.
struct ConvParams<'a> {
    x: &'a [f32],
    /// `[taps, channels]`, by distance from the current row.
    weight: Vec<f32>,
    /// The number of rows that each row reads: itself and those before it in its document, up to taps.
    reach: Vec<usize>,
    channels: usize,
    taps: usize,
}

impl<'a> ConvParams<'a> {
    fn new(x: &'a FlexTensor, weight: &FlexTensor, ints: &[FlexTensor]) -> Self {
        let [batch, seq_len, channels] = dims(x)[..] else {
            panic!("the convolution's x is {:?}, not [batch, seq_len, channels]", dims(x))
        };
        let taps = dims(weight)[1];
        assert_eq!(dims(weight)[0], channels, "channels of the convolution's weight and of x");
        let documents = ints.first().map(|starts| {
            assert_eq!(dims(starts), [batch, seq_len], "shape of document_starts");
            int_vec(starts)
        });
        let start = |row: usize| documents.as_ref().map_or(0, |starts| starts[row].max(0) as usize);
        let reach = |row: usize| taps.min((row % seq_len + 1).saturating_sub(start(row)));
        let w = slice(weight);
        let by_distance = |i: usize| w[i % channels * taps + (taps - 1 - i / channels)];
        ConvParams {
            x: slice(x),
            weight: (0..taps * channels).map(by_distance).collect(),
            reach: (0..batch * seq_len).map(reach).collect(),
            channels,
            taps,
        }
    }

    /// Rows per parallel task: enough that the overlap with the next task costs little.
    fn task_rows(&self) -> usize {
        rows_per_task(self.channels, 1 << 14).max(8 * self.taps)
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.x[row * self.channels..][..self.channels]
    }

    fn tap(&self, back: usize) -> &[f32] {
        &self.weight[back * self.channels..][..self.channels]
    }

    /// z ← Σ_back w_back · x_{row − back}.
    fn convolve(&self, row: usize, z: &mut [f32]) {
        weighted_sum(z, self.reach[row], |back| (self.tap(back), self.row(row - back)));
    }
}
