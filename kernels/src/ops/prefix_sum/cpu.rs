//! Prefix sums on the CPU.

use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::cpu::{buffer, contiguous, dims, from_vec, slice};

/// y_i = Σ_{j ≤ i} x_j of each row; backwards, Σ_{j ≥ i}.
pub fn prefix_sum(x: &FlexTensor, backwards: bool) -> FlexTensor {
    match backwards {
        false => sums(x, |x, y| run(x.iter(), y.iter_mut())),
        true => sums(x, |x, y| run(x.iter().rev(), y.iter_mut().rev())),
    }
}

/// Applies `f` to each row of `x` and of the result.
fn sums(x: &FlexTensor, f: impl Fn(&[f32], &mut [f32]) + Sync) -> FlexTensor {
    let x = contiguous(x);
    let len = *dims(&x).last().expect("x has dimensions");
    let mut y = buffer(slice(&x).len());
    y.par_chunks_mut(len).zip(slice(&x).par_chunks(len)).for_each(|(y, x)| f(x, y));
    from_vec(y, &dims(&x))
}

/// Running sums, accumulated in f64.
fn run<'a>(x: impl Iterator<Item = &'a f32>, y: impl Iterator<Item = &'a mut f32>) {
    let mut sum = 0.0;
    for (x, y) in x.zip(y) {
        sum += f64::from(*x);
        *y = sum as f32;
    }
}
