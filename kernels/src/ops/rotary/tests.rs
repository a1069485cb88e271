use std::f64::consts::PI;

use super::*;
use crate::ops::support::{Ad, assert_nan_shows, assert_views_agree, strides, values, wave};
use crate::testing::{Case, Tensor64, check};

/// The frequencies of `dims / 2` pairs and the amplitude, after the functions of transformers 5.24
/// (`modeling_rope_utils.py`), for oracles.
pub fn scaled_frequencies(theta: f64, scaling: Scaling, dims: usize) -> (Vec<f64>, f64) {
    let d = dims as f64;
    let inverse = |theta: f64| (0..dims / 2).map(move |i| theta.powf(-2.0 * i as f64 / d));
    match scaling {
        Scaling::None {} => (inverse(theta).collect(), 1.0),
        Scaling::Linear { factor } => (inverse(theta).map(|w| w / factor).collect(), 1.0),
        Scaling::Ntk { factor } => (inverse(theta * factor.powf(d / (d - 2.0))).collect(), 1.0),
        Scaling::Yarn { factor, original_len, beta_fast, beta_slow, attention_factor } => {
            let correction_dim = |rotations: f64| {
                d * (original_len as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
            };
            let low = correction_dim(beta_fast).floor().max(0.0);
            let high = correction_dim(beta_slow).ceil().min(d - 1.0);
            assert!(low < high, "{low} to {high}");
            let frequencies = inverse(theta).enumerate().map(|(i, w)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                w / factor * ramp + w * (1.0 - ramp)
            });
            let amplitude = attention_factor.unwrap_or(0.1 * factor.ln() + 1.0);
            (frequencies.collect(), amplitude)
        }
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
            let original_len = original_len as f64;
            let of = |w: f64| {
                let wavelength = 2.0 * PI / w;
                if wavelength > original_len / low_freq_factor {
                    return w / factor;
                }
                if wavelength < original_len / high_freq_factor {
                    return w;
                }
                let smooth = (original_len / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * w / factor + smooth * w
            };
            (inverse(theta).map(of).collect(), 1.0)
        }
    }
}

/// Without scaling.
const PLAIN: Frequencies = scaled(10_000.0, Scaling::None {});

const fn scaled(theta: f64, scaling: Scaling) -> Frequencies {
    Frequencies { theta, scaling }
}

const LINEAR: Scaling = Scaling::Linear { factor: 4.0 };

const YARN: Scaling = Scaling::Yarn {
    factor: 4.0,
    original_len: 2048,
    beta_fast: 32.0,
    beta_slow: 1.0,
    attention_factor: None,
};

/// With every key of its own.
const OWN_YARN: Scaling = Scaling::Yarn {
    factor: 8.0,
    original_len: 64,
    beta_fast: 4.0,
    beta_slow: 0.5,
    attention_factor: Some(1.5),
};

const LLAMA3: Scaling = Scaling::Llama3 {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_len: 8192,
};

/// The values are those of `ROPE_INIT_FUNCTIONS` in transformers 5.24, printed with 8 digits.
#[test]
fn scaled_frequencies_are_those_of_transformers() {
    let yarn = [
        1.0,
        0.56234133,
        0.31622776,
        0.17782794,
        0.1,
        0.050209042,
        0.02484647,
        0.012066896,
        0.0057142857,
        0.0026108704,
        0.001129385,
        0.00044456986,
        0.00025000001,
        0.00014058533,
        7.9056947e-05,
        4.4456985e-05,
    ];
    let own_yarn = [
        1.0,
        0.56234133,
        0.26088792,
        0.11558817,
        0.047499999,
        0.016870238,
        0.0039528473,
        0.0022228493,
    ];
    let llama3 = [
        1.0,
        0.44036663,
        0.19392276,
        0.085397102,
        0.037606031,
        0.016560441,
        0.0072926651,
        0.0032114461,
        0.00052484602,
        7.7846555e-05,
        3.4281024e-05,
        1.5096218e-05,
        6.6478697e-06,
        2.9274997e-06,
        1.2891732e-06,
        5.6770881e-07,
    ];
    for (theta, scaling, want, amplitude) in [
        (10_000.0, LINEAR, &[0.25, 0.025, 0.0024999999, 0.00025000001][..], 1.0),
        (10_000.0, YARN, &yarn, 1.138629436111989),
        (100.0, OWN_YARN, &own_yarn, 1.5),
        (500_000.0, LLAMA3, &llama3, 1.0),
    ] {
        let frequencies = scaled(theta, scaling);
        assert_eq!(frequencies.amplitude(), amplitude, "{scaling:?}");
        let got = frequencies.of_pairs(2 * want.len());
        let oracle = scaled_frequencies(theta, scaling, 2 * want.len()).0;
        for (i, want) in want.iter().enumerate() {
            // transformers computes in f32.
            assert!((got[i] / want - 1.0).abs() < 2e-6, "{scaling:?}: {} is not {want}", got[i]);
            assert!((got[i] / oracle[i] - 1.0).abs() < 1e-12, "{scaling:?}: {}", got[i]);
        }
    }
}

/// In a trained context in which every pair turns more often than `beta_fast`, or less often than `beta_slow`.
#[test]
fn yarn_scales_all_pairs_or_none_beyond_its_bounds() {
    let yarn = |original_len| Scaling::Yarn {
        factor: 4.0,
        original_len,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    let plain = Frequencies::new(100.0).of_pairs(16);
    let divided: Vec<f64> = plain.iter().map(|w| w / 4.0).collect();
    let of = |len| scaled(100.0, yarn(len)).of_pairs(16);
    assert_eq!(of(1 << 40), plain);
    assert_eq!(of(1), divided);
}

/// The rotation by its definition, pair by pair.
fn oracle(op: &RotaryEmbedding, x: &Tensor64) -> Tensor64 {
    let half = op.rotary_dims / 2;
    let Frequencies { theta, scaling } = op.frequencies;
    let (omega, amplitude) = scaled_frequencies(theta, scaling, op.rotary_dims);
    Tensor64::from_fn(&x.shape, |at| {
        let [b, h, t, i] = at[..] else { panic!() };
        if i >= 2 * half {
            return x.at(at);
        }
        let pair = i % half;
        let (sin, cos) = ((op.first_position + t) as f64 * omega[pair]).sin_cos();
        let [first, second] = [pair, pair + half].map(|i| amplitude * x.at(&[b, h, t, i]));
        if i < half { first * cos - second * sin } else { second * cos + first * sin }
    })
}

#[test]
fn agrees_with_the_oracle_and_its_gradient() {
    for (shape, first_position, frequencies, rotary_dims) in [
        ([1, 1, 1, 2], 0, PLAIN, 2),
        ([2, 3, 65, 32], 0, PLAIN, 32),
        ([1, 2, 7, 33], 1000, Frequencies::new(500_000.0), 14),
        ([1, 2, 1, 64], 123_456, PLAIN, 64),
        ([1, 2, 3, 5], 7, PLAIN, 0),
        ([2, 3, 65, 20], 5, scaled(100.0, OWN_YARN), 16),
        ([1, 2, 9, 32], 4000, scaled(10_000.0, YARN), 32),
        ([1, 2, 9, 32], 4000, scaled(10_000.0, LINEAR), 32),
        ([1, 2, 9, 32], 4000, scaled(10_000.0, Scaling::Ntk { factor: 4.0 }), 32),
        ([1, 2, 9, 32], 4000, scaled(500_000.0, LLAMA3), 32),
    ] {
        let op = RotaryEmbedding { first_position, frequencies, rotary_dims };
        check(Case::new(op.clone(), &[&shape]), |inputs| oracle(&op, &inputs[0]));
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
    let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
    assert_views_agree(view(), |x| rotary(x, 3, PLAIN, 6));
    assert_eq!(strides(&rotary(view(), 3, PLAIN, 6)), strides(&view()));
    // Queries from a joint projection, and memory with padded rows.
    let joint = wave([2, 5, 3, 24], 0.0).narrow(3, 8, 8).swap_dims(1, 2);
    assert_views_agree(joint, |x| rotary(x, 3, PLAIN, 8));
    assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| rotary(x, 3, PLAIN, 8));
}

#[test]
fn both_equal_each_alone() {
    let yarn = scaled(100.0, OWN_YARN);
    let (q, k) = (wave([2, 6, 5, 8], 0.0), wave([2, 2, 5, 8], 1.0).require_grad());
    let [q_both, k_both] = rotary_both([q.clone(), k.clone()], 3, yarn, 6);
    let [q_alone, k_alone] = [q, k.clone()].map(|x| rotary(x, 3, yarn, 6));
    assert_eq!(values(q_both), values(q_alone));
    let gradient = |y: Tensor<Ad, 4>| {
        let dk = k.grad(&(y * wave([2, 2, 5, 8], 0.3)).sum().backward());
        values(Tensor::<Ad, 4>::from_inner(dk.expect("k requires a gradient")))
    };
    assert_eq!(values(k_both.clone()), values(k_alone.clone()));
    assert_eq!(gradient(k_both), gradient(k_alone));
}

#[test]
fn rows_one_at_a_time_equal_all_at_once() {
    let x = wave([1, 2, 9, 16], 0.0);
    let whole = rotary(x.clone(), 0, PLAIN, 16);
    for t in 0..9 {
        let row = rotary(x.clone().narrow(2, t, 1), t, PLAIN, 16);
        assert_eq!(values(row), values(whole.clone().narrow(2, t, 1)), "row {t}");
    }
}

#[test]
fn kept_angles_belong_to_their_call() {
    let x = || wave([1, 1, 6, 8], 0.0);
    let run = |(first, frequencies, dims)| values(rotary(x(), first, frequencies, dims));
    let other = Frequencies::new(1e5);
    let calls = [(0, PLAIN, 8), (1, PLAIN, 8), (0, other, 8), (0, PLAIN, 4), (2, PLAIN, 8)];
    let scaled = [LINEAR, YARN].map(|scaling| (0, Frequencies { scaling, ..PLAIN }, 8));
    let calls = [&calls[..], &scaled].concat();
    let first: Vec<_> = calls.iter().map(|&call| run(call)).collect();
    for (i, &call) in calls.iter().enumerate().rev() {
        assert_eq!(run(call), first[i]);
        assert!((0..i).all(|j| first[j] != first[i]));
    }
}

#[test]
fn a_nan_shows() {
    assert_nan_shows(wave([1, 2, 3, 4], 0.0), |x| rotary(x.clone(), 1, PLAIN, 4) * x);
}

#[test]
#[should_panic(expected = "rotary_dims is 7; it must be even and at most head_dim, 8")]
fn an_odd_number_of_channels_is_refused() {
    let _: Tensor<Ad, 4> = rotary(wave([1, 1, 2, 8], 0.0), 0, PLAIN, 7);
}

mod cuda {
    use burn::tensor::DType;

    use super::*;
    use crate::ops::support::gpu::{Gpu, wave};
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradient() {
        for (shape, first_position, frequencies, rotary_dims) in [
            ([1, 1, 1, 2], 0, PLAIN, 2),
            ([2, 3, 65, 32], 0, PLAIN, 32),
            ([2, 5, 130, 64], 0, PLAIN, 64),
            ([1, 9, 33, 128], 4090, PLAIN, 32),
            ([1, 2, 7, 33], 1000, Frequencies::new(500_000.0), 14),
            ([1, 2, 1, 64], 123_456, PLAIN, 64),
            ([1, 2, 3, 5], 7, PLAIN, 0),
            ([2, 3, 65, 32], 5, scaled(100.0, OWN_YARN), 16),
            ([1, 2, 9, 32], 4090, scaled(500_000.0, LLAMA3), 32),
        ] {
            let op = RotaryEmbedding { first_position, frequencies, rotary_dims };
            let case = || Case::new(op.clone(), &[&shape]);
            check_on::<crate::Cuda, _, 1>(case(), |inputs| oracle(&op, &inputs[0]));
            check_on::<crate::Cuda, _, 1>(case().bf16(&[0]), |inputs| oracle(&op, &inputs[0]));
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), |x| rotary(x, 3, PLAIN, 6));
        assert_views_agree(view(), |x| rotary(x, 3, PLAIN, 8));
        assert_eq!(strides(&rotary(view(), 3, PLAIN, 8)), strides(&view()));
        // Queries from a joint projection, and memory with padded rows.
        let joint = wave([2, 5, 3, 384], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
        assert_views_agree(joint, |x| rotary(x, 3, PLAIN, 128));
        assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| rotary(x, 3, PLAIN, 8));
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn both_equal_each_alone() {
        let yarn = scaled(100.0, OWN_YARN);
        let numbers = |x: Tensor<crate::Cuda, 4>| values(Tensor::<Gpu, 4>::from_inner(x));
        for (batch, heads, kv_heads, seq_len, head_dim, dims) in [
            (1, 12, 12, 1, 64, 64),
            (3, 6, 2, 1, 128, 32),
            (16, 5, 1, 17, 40, 40),
            (2, 4, 4, 64, 6, 6),
        ] {
            for dtype in [DType::BF16, DType::F32] {
                let heads_of = |heads, phase| {
                    let x = wave([batch + 1, seq_len, heads, head_dim], phase).inner().cast(dtype);
                    x.narrow(0, 1, batch).swap_dims(1, 2)
                };
                let qk = || [heads_of(heads, 0.0), heads_of(kv_heads, 1.0)];
                let both = rotary_both(qk(), 4095, yarn, dims);
                for (got, x) in both.into_iter().zip(qk()) {
                    let want = rotary(x, 4095, yarn, dims);
                    let got_strides = primitive(got.clone()).meta.strides().to_vec();
                    assert_eq!(got_strides, primitive(want.clone()).meta.strides().to_vec());
                    assert_eq!(numbers(got), numbers(want), "{heads} heads of {head_dim}");
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn kept_angles_belong_to_their_call() {
        let run = |(first, frequencies, dims)| {
            values(rotary(wave([1, 1, 6, 8], 0.0), first, frequencies, dims))
        };
        let other = Frequencies::new(1e5);
        let calls = [(0, PLAIN, 8), (1, PLAIN, 8), (4093, PLAIN, 8), (0, other, 8), (0, PLAIN, 4)];
        let scaled = [LINEAR, YARN].map(|scaling| (9000, Frequencies { scaling, ..PLAIN }, 8));
        let calls = [&calls[..], &scaled].concat();
        let first: Vec<_> = calls.iter().map(|&call| run(call)).collect();
        for (i, &call) in calls.iter().enumerate().rev() {
            assert_eq!(run(call), first[i]);
            assert!((0..i).all(|j| first[j] != first[i]));
        }
    }
}
