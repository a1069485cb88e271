//! What weights that are divided by their sum share. In decoding, the statistic of a split is its sum.

use cubecl::prelude::*;

use crate::tile::sum_of_four;

/// max(x, 0); a NaN stays a NaN.
#[cube]
pub fn positive_part(x: f32) -> f32 {
    select(x <= 0f32, 0f32, x)
}

/// 1 / `total`, or 0 where a row has no weight.
#[cube]
pub fn inverse(total: f32) -> f32 {
    select(total <= 0f32, 0f32, 1f32 / total)
}

/// The result of [`Weight::finish_split`](super::hooks::Weight::finish_split) for a lane's part of a row's sum.
#[cube]
pub fn finish_summed_split(sum: f32) -> (f32, f32) {
    let total = sum_of_four(sum);
    (inverse(total), total)
}
