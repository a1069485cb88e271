//! Elementary functions without branches or library calls, so that loops over them vectorise.
//!
//! Errors are a few units in the last place of f32; NaN propagates.

/// a · b + c: one instruction where the target has it, never a library call.
#[inline(always)]
pub fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// eˣ. Inputs under −87.3 give subnormal numbers, under −104 zero, over 88.7 infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: n * LN2_HI is exact for |n| < 2^9.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Comparisons written so that a NaN falls through to the polynomial.
    let c = if x > 88.8 { 88.8 } else { x };
    let c = if c < -104.0 { -104.0 } else { c };
    let n = (c * LOG2_E).round_ties_even();
    let r = mul_add(n, -LN2_LO, mul_add(n, -LN2_HI, c));
    let p = 1.0 / 5040.0;
    let p = mul_add(p, r, 1.0 / 720.0);
    let p = mul_add(p, r, 1.0 / 120.0);
    let p = mul_add(p, r, 1.0 / 24.0);
    let p = mul_add(p, r, 1.0 / 6.0);
    let p = mul_add(p, r, 0.5);
    let p = mul_add(p, r, 1.0);
    let p = mul_add(p, r, 1.0);
    // 2^n in two factors: n reaches 128 on one side and the subnormals on the other.
    // SAFETY: |n| <= 151, or n is NaN, and then any value does: the NaN is in p.
    let n = unsafe { (if n.is_nan() { 0.0 } else { n }).to_int_unchecked::<i32>() };
    let half = n >> 1;
    let scale = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    p * scale(half) * scale(n - half)
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    // Up to 0.625 by the polynomial of Cephes' `tanhf`, where 1 − 2 / (e^2|x| + 1) would cancel.
    let s = x * x;
    let p = mul_add(s, -5.704_988_7e-3, 2.063_909e-2);
    let p = mul_add(p, s, -5.373_971_6e-2);
    let p = mul_add(p, s, 1.333_144_2e-1);
    let p = mul_add(p, s, -3.333_328e-1);
    let small = mul_add(x * s, p, x);
    let size = x.abs();
    let large = (1.0 - 2.0 / (exp(2.0 * size) + 1.0)).copysign(x);
    if size < 0.625 { small } else { large }
}

/// ln(1 + x) for x in 0..=1.
#[inline(always)]
pub fn ln_1p_unit(x: f32) -> f32 {
    // 2 artanh(z) with z = x / (2 + x) at most 1/3: the first term left out is under 2e-9.
    let z = x / (2.0 + x);
    let s = z * z;
    let p = 1.0 / 15.0;
    let p = mul_add(p, s, 1.0 / 13.0);
    let p = mul_add(p, s, 1.0 / 11.0);
    let p = mul_add(p, s, 1.0 / 9.0);
    let p = mul_add(p, s, 1.0 / 7.0);
    let p = mul_add(p, s, 1.0 / 5.0);
    let p = mul_add(p, s, 1.0 / 3.0);
    2.0 * (z + z * s * p)
}

const LANES: usize = 16;

/// Σ f(x) over a slice in a fixed order that vectorises.
#[inline(always)]
fn reduce<const K: usize>(
    slices: [&[f32]; K],
    init: f32,
    f: impl Fn(f32, [f32; K]) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let len = slices[0].len();
    assert!(slices.iter().all(|s| s.len() == len));
    let mut lanes = [init; LANES];
    let parts = slices.map(|slice| slice.as_chunks::<LANES>());
    for chunk in 0..len / LANES {
        let chunks: [&[f32; LANES]; K] = std::array::from_fn(|k| &parts[k].0[chunk]);
        for lane in 0..LANES {
            lanes[lane] = f(lanes[lane], std::array::from_fn(|k| chunks[k][lane]));
        }
    }
    let mut total = init;
    for at in 0..len % LANES {
        total = f(total, std::array::from_fn(|k| parts[k].1[at]));
    }
    lanes.iter().fold(total, |a, &b| join(a, b))
}

/// Σ x.
pub fn sum(x: &[f32]) -> f32 {
    reduce([x], 0.0, |a, [x]| a + x, |a, b| a + b)
}

/// Σ x·y.
///
/// # Panics
/// When the lengths differ.
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    reduce([x, y], 0.0, |a, [x, y]| a + x * y, |a, b| a + b)
}

/// Σ (x − shift)².
pub fn square_deviation(x: &[f32], shift: f32) -> f32 {
    let square = |a: f32, [x]: [f32; 1]| a + (x - shift) * (x - shift);
    reduce([x], 0.0, square, |a, b| a + b)
}

/// Σ (x − shift)·y.
///
/// # Panics
/// When the lengths differ.
pub fn dot_shifted(x: &[f32], shift: f32, y: &[f32]) -> f32 {
    reduce([x, y], 0.0, |a, [x, y]| a + (x - shift) * y, |a, b| a + b)
}

/// `y ← y + x`.
///
/// # Panics
/// When the lengths differ.
pub fn add_to(y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len());
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

/// The largest element, −∞ for an empty slice; ignores NaN (the sum that follows propagates it).
pub fn max(x: &[f32]) -> f32 {
    reduce([x], f32::NEG_INFINITY, |a, [x]| if x > a { x } else { a }, f32::max)
}

/// `x ← exp(x − shift)`; returns the sum of the results.
pub fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    for x in x.iter_mut() {
        *x = exp(*x - shift);
    }
    sum(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relative(got: f32, want: f64) -> f64 {
        ((f64::from(got) - want) / want).abs()
    }

    #[test]
    fn exp_is_within_three_units_in_the_last_place() {
        for i in 0..200_000 {
            let x = -87.0 + i as f32 * (175.5 / 200_000.0);
            assert!(
                relative(exp(x), f64::from(x).exp()) < 3.0 * f64::from(f32::EPSILON),
                "x = {x}"
            );
        }
    }

    #[test]
    fn exp_handles_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(-90.0) > 0.0);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_sigmoid_follow_the_standard_library() {
        for i in -2000..2000 {
            let x = i as f32 * 0.01;
            let want = f64::from(x).tanh();
            assert!(relative(tanh(x), want) < 3e-7 || x == 0.0 && tanh(x) == 0.0, "x = {x}");
            let want = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!(relative(sigmoid(x), want) < 1e-6, "x = {x}");
        }
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn ln_1p_unit_follows_the_standard_library() {
        for i in 1..=2000 {
            let x = i as f32 / 2000.0;
            assert!(relative(ln_1p_unit(x), f64::from(x).ln_1p()) < 3e-7, "x = {x}");
        }
        assert_eq!(ln_1p_unit(0.0), 0.0);
        assert!(ln_1p_unit(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_agree_with_plain_loops_at_odd_lengths() {
        for len in [0, 1, 15, 16, 17, 100] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 37) % 11) as f32 - 5.0).collect();
            assert_eq!(sum(&x), x.iter().sum::<f32>());
            assert_eq!(dot(&x, &x), x.iter().map(|x| x * x).sum::<f32>());
            let deviation = x.iter().map(|x| (x - 2.0) * (x - 2.0)).sum::<f32>();
            assert_eq!(square_deviation(&x, 2.0), deviation);
            let shifted = x.iter().map(|x| (x - 2.0) * x).sum::<f32>();
            assert_eq!(dot_shifted(&x, 2.0, &x), shifted);
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
