//! The flash hook of p-th powers.

use std::f32::consts::LN_2;

use cubecl::prelude::*;

use crate::attention::flash::hooks::Score;
use crate::attention::flash::problem::ProblemShape;
use crate::tile::{exp2, log2};

/// p·ln|s| of the products s = q·k; the scale must be 1.
pub struct PowerScore;

/// The launch argument of [`PowerScore`].
#[derive(CubeType, CubeLaunch)]
pub struct Exponent {
    /// p, 2 or 4.
    #[cube(comptime)]
    p: u32,
}

/// The largest exponent of 2 that [`PowerScore`] multiplies a product by: its result is finite.
const MOST_EXPONENT: f32 = 126.0;

#[cube]
impl Score for PowerScore {
    type Args = Exponent;
    type Head = ();

    const WEIGHS_PRODUCTS: bool = true;

    fn head(_args: &Exponent, _head: usize) {}

    /// p·ln 2, because scores are logarithms of base 2.
    fn scale(args: &Exponent, _problem: &ProblemShape) -> f32 {
        f32::cast_from(comptime!(args.p as f32 * LN_2))
    }

    /// −∞, and so no weight, for a product of 0.
    fn score(
        _args: &Exponent,
        _problem: &ProblemShape,
        _head: &(),
        product: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        log2(f32::abs(product))
    }

    fn slope(
        _args: &Exponent,
        _problem: &ProblemShape,
        _head: &(),
        _score: f32,
        _row: u32,
        _column: u32,
    ) -> f32 {
        f32::cast_from(1u32)
    }

    /// t^p and p·t^(p−1)·2^(shift/p) with t = product · 2^(shift/p). Without a bound, 2^(shift/p) could be
    /// infinite for a masked key.
    fn weigh(args: &Exponent, product: f32, shift: f32) -> (f32, f32) {
        let share = comptime!(1f32 / args.p as f32);
        let root = exp2(min(shift * share, MOST_EXPONENT));
        let t = product * root;
        let square = t * t;
        let mut weight = square;
        let mut slope = 2f32 * t * root;
        if comptime!(args.p == 4) {
            weight = square * square;
            slope = 4f32 * square * t * root;
        }
        (weight, slope)
    }
}
