//! Near keys, read one by one, and a sum over far ones on one scale (`docs/power.md`, "The operation").

use cubecl::prelude::*;

use crate::tile::{MASKED, exp2, log2};

/// A sum of far weights below this part of the largest that |q| and the keys' norms allow, Σ w |q|² |k|², is rounding
/// errors: those of M in bf16 have about half of it.
const RESOLUTION: f32 = 1.0 / 32_768.0;

/// The least sum of far weights that counts: what is divided by it stays finite.
const LEAST_WEIGHT: f32 = 1e-30;

/// The least sum of far weights that counts for a query, from |q|² and the trace of M.
#[cube]
pub fn least_weight(square: f32, trace: f32) -> f32 {
    max(square * trace * RESOLUTION, f32::cast_from(LEAST_WEIGHT))
}

/// The factors of the near keys' output and of what a query reads from the state, and the log-sum-exp of all keys.
///
/// - `near`: that of the near keys, or −[`MASKED`] if none has a weight
/// - `decay`: log₂ of the state's decay
/// - `weight`: the sum of the state's weights, which counts from `least` on
#[cube]
pub fn join(near: f32, decay: f32, weight: f32, least: f32) -> (f32, f32, f32) {
    let no_near = near >= f32::cast_from(-MASKED);
    let no_far = (weight < least) | (decay < f32::cast_from(MASKED / 2f32));
    let weight = select(no_far, 1f32, weight);
    let far = select(no_far, f32::cast_from(MASKED), decay + log2(weight));
    let most = max(select(no_near, f32::cast_from(MASKED), near), far);
    let of_near = select(no_near, 0f32, exp2(near - most));
    let of_far = select(no_far, 0f32, exp2(far - most));
    let total = of_near + of_far;
    let nothing = no_near & no_far;
    let inverse = select(nothing, 0f32, 1f32 / total);
    let lse = select(nothing, f32::cast_from(-MASKED), most + log2(total));
    (of_near * inverse, of_far * inverse / weight, lse)
}
