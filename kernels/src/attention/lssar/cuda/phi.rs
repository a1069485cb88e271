//! Softplus to base 2: with scores in units of ln 2, log₂(1 + 2ˣ) = softplus(ln 2 · x) / ln 2. Shares of a row do
//! not depend on the units.

use std::f32::consts::LN_2;

use cubecl::prelude::*;

use crate::tile::{exp2, log2};

/// The coefficients of log₂(1 + s) / s in powers of s, to a relative error of 1.3 · 10⁻⁶ for s from 0 to 1 (minimax).
const SERIES: [f32; 7] = [
    1.442_693_2,
    -0.721_159_46,
    0.477_668_37,
    -0.339_089_04,
    0.215_284_53,
    -0.095_797_54,
    0.020_401_18,
];

/// Softplus to base 2 up to which its derivative is taken as linear: from 1 − 2⁻ᵠ, rounding would take more.
const LINEAR_UNTIL: f32 = 1.0 / 1024.0;

/// log₂(1 + s) / s for s from 0 to 1. On multiply-adds: logarithms would take as long as all else.
#[cube]
fn series(s: f32) -> f32 {
    let mut sum = f32::cast_from(comptime!(SERIES[6]));
    #[unroll]
    for i in 0..6usize {
        sum = fma(sum, s, comptime!(SERIES[5 - i]));
    }
    sum
}

/// φ = log₂(1 + 2ˣ), to a relative error of 1.5 · 10⁻⁶ also far below 0; requires
/// [`define_exp2`](crate::tile::define_exp2).
#[cube]
pub fn softplus(x: f32) -> f32 {
    let small = exp2(-f32::abs(x));
    fma(small, series(small), max(x, 0f32))
}

/// The derivative of φ, 2ˣ / (1 + 2ˣ) = 1 − 2⁻ᵠ, from φ.
#[cube]
pub fn slope_of(phi: f32) -> f32 {
    select(phi < LINEAR_UNTIL, phi * LN_2, 1f32 - exp2(-phi))
}

/// A sum of softplus, in parts: where Π (1 + 2^−|x|) is a product of few terms, it has one logarithm.
#[derive(CubeType)]
pub struct SoftplusSum {
    /// Σ max(x, 0)
    linear: f32,
    /// Π (1 + 2^−|x|) − 1, which keeps its relative accuracy where all x are far below 0.
    excess: f32,
}

#[cube]
impl SoftplusSum {
    /// Of no terms.
    pub fn empty() -> SoftplusSum {
        SoftplusSum { linear: f32::cast_from(0u32), excess: f32::cast_from(0u32) }
    }

    /// Adds φ(x); at most 64 times.
    pub fn add(&mut self, x: f32) {
        let small = exp2(-f32::abs(x));
        self.linear += max(x, 0f32);
        self.excess = fma(self.excess, small, self.excess + small);
    }

    /// Σ φ
    pub fn total(&self) -> f32 {
        let product = self.excess;
        let of_small = product * series(product);
        self.linear + select(product < 1f32, of_small, log2(1f32 + product))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series_on_host(s: f32) -> f32 {
        SERIES.iter().rev().fold(0.0, |sum, &c| sum.mul_add(s, c))
    }

    fn softplus_on_host(x: f32) -> f32 {
        let small = (-x.abs()).exp2();
        small.mul_add(series_on_host(small), x.max(0.0))
    }

    /// The formulas of this file in f32, for scores down to where 2ˣ leaves f32's range.
    #[test]
    fn formulas_agree_with_f64() {
        for i in -124_000..200_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp2().ln_1p() / std::f64::consts::LN_2;
            let phi = softplus_on_host(x);
            let error = (f64::from(phi) - exact).abs() / exact;
            assert!(error < 1.5e-6, "φ({x}) is {phi} where {exact} is right");

            let exact = 1.0 / (1.0 + f64::from(-x).exp2());
            let slope = if phi < LINEAR_UNTIL { phi * LN_2 } else { 1.0 - (-phi).exp2() };
            let error = (f64::from(slope) - exact).abs() / exact;
            assert!(error < 4e-4, "the slope at {x} is {slope} where {exact} is right");
        }
    }

    /// Sums of 64 terms that are all far below 0, all far above, or of any size.
    #[test]
    fn sums_of_products_agree_with_f64() {
        for (from, step) in
            [(-40.0, 0.01), (-8.0, 0.0), (-0.3, 0.01), (0.0, 0.0), (60.0, 0.1), (-40.0, 1.3)]
        {
            let (mut linear, mut excess, mut exact) = (0f32, 0f32, 0f64);
            for i in 0..64 {
                let x: f32 = from + step * i as f32;
                let small = (-x.abs()).exp2();
                linear += x.max(0.0);
                excess = excess.mul_add(small, excess + small);
                exact += f64::from(x).exp2().ln_1p() / std::f64::consts::LN_2;
            }
            let log =
                if excess < 1.0 { excess * series_on_host(excess) } else { (1.0 + excess).log2() };
            let error = (f64::from(linear + log) - exact).abs() / exact;
            assert!(error < 3e-6, "from {from} by {step}: {} where {exact} is right", linear + log);
        }
    }
}
