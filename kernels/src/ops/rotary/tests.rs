use super::*;
use crate::ops::support::{Ad, assert_nan_shows, assert_views_agree, strides, values, wave};
use crate::testing::{Case, Tensor64, check};

/// The rotation by its definition, pair by pair.
fn oracle(op: &RotaryEmbedding, x: &Tensor64) -> Tensor64 {
    let half = op.rotary_dims / 2;
    Tensor64::from_fn(&x.shape, |at| {
        let [b, h, t, i] = at[..] else { panic!() };
        if i >= 2 * half {
            return x.at(at);
        }
        let pair = i % half;
        let omega = op.theta.powf(-2.0 * pair as f64 / op.rotary_dims as f64);
        let (sin, cos) = ((op.first_position + t) as f64 * omega).sin_cos();
        let [first, second] = [pair, pair + half].map(|i| x.at(&[b, h, t, i]));
        if i < half { first * cos - second * sin } else { second * cos + first * sin }
    })
}

#[test]
fn agrees_with_the_oracle_and_its_gradient() {
    for (shape, first_position, theta, rotary_dims) in [
        ([1, 1, 1, 2], 0, 10_000.0, 2),
        ([2, 3, 65, 32], 0, 10_000.0, 32),
        ([1, 2, 7, 33], 1000, 500_000.0, 14),
        ([1, 2, 1, 64], 123_456, 10_000.0, 64),
        ([1, 2, 3, 5], 7, 10_000.0, 0),
    ] {
        let op = RotaryEmbedding { first_position, theta, rotary_dims };
        check(Case::new(op.clone(), &[&shape]), |inputs| oracle(&op, &inputs[0]));
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
    let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
    assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 6));
    assert_eq!(strides(&rotary(view(), 3, 10_000.0, 6)), strides(&view()));
    // Queries from a joint projection, and memory with padded rows.
    let joint = wave([2, 5, 3, 24], 0.0).narrow(3, 8, 8).swap_dims(1, 2);
    assert_views_agree(joint, |x| rotary(x, 3, 10_000.0, 8));
    assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| rotary(x, 3, 10_000.0, 8));
}

#[test]
fn both_equal_each_alone() {
    let (q, k) = (wave([2, 6, 5, 8], 0.0), wave([2, 2, 5, 8], 1.0).require_grad());
    let [q_both, k_both] = rotary_both([q.clone(), k.clone()], 3, 10_000.0, 6);
    let [q_alone, k_alone] = [q, k.clone()].map(|x| rotary(x, 3, 10_000.0, 6));
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
    let whole = rotary(x.clone(), 0, 10_000.0, 16);
    for t in 0..9 {
        let row = rotary(x.clone().narrow(2, t, 1), t, 10_000.0, 16);
        assert_eq!(values(row), values(whole.clone().narrow(2, t, 1)), "row {t}");
    }
}

#[test]
fn kept_angles_belong_to_their_call() {
    let x = || wave([1, 1, 6, 8], 0.0);
    let run = |first, theta, dims| values(rotary(x(), first, theta, dims));
    let calls = [(0, 1e4, 8), (1, 1e4, 8), (0, 1e5, 8), (0, 1e4, 4), (2, 1e4, 8), (3, 1e4, 8)];
    let first: Vec<_> = calls.iter().map(|&(p, theta, dims)| run(p, theta, dims)).collect();
    for (i, &(p, theta, dims)) in calls.iter().enumerate().rev() {
        assert_eq!(run(p, theta, dims), first[i]);
        assert!((0..i).all(|j| first[j] != first[i]));
    }
}

#[test]
fn a_nan_shows() {
    assert_nan_shows(wave([1, 2, 3, 4], 0.0), |x| rotary(x.clone(), 1, 10_000.0, 4) * x);
}

#[test]
#[should_panic(expected = "rotary_dims is 7; it must be even and at most head_dim, 8")]
fn an_odd_number_of_channels_is_refused() {
    let _: Tensor<Ad, 4> = rotary(wave([1, 1, 2, 8], 0.0), 0, 10_000.0, 7);
}

mod cuda {
    use burn::tensor::DType;

    use super::*;
    use crate::ops::support::gpu::{Gpu, wave};
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradient() {
        for (shape, first_position, theta, rotary_dims) in [
            ([1, 1, 1, 2], 0, 10_000.0, 2),
            ([2, 3, 65, 32], 0, 10_000.0, 32),
            ([2, 5, 130, 64], 0, 10_000.0, 64),
            ([1, 9, 33, 128], 4090, 10_000.0, 32),
            ([1, 2, 7, 33], 1000, 500_000.0, 14),
            ([1, 2, 1, 64], 123_456, 10_000.0, 64),
            ([1, 2, 3, 5], 7, 10_000.0, 0),
        ] {
            let op = RotaryEmbedding { first_position, theta, rotary_dims };
            let case = || Case::new(op.clone(), &[&shape]);
            check_on::<crate::Cuda, _, 1>(case(), |inputs| oracle(&op, &inputs[0]));
            check_on::<crate::Cuda, _, 1>(case().bf16(&[0]), |inputs| oracle(&op, &inputs[0]));
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 6));
        assert_views_agree(view(), |x| rotary(x, 3, 10_000.0, 8));
        assert_eq!(strides(&rotary(view(), 3, 10_000.0, 8)), strides(&view()));
        // Queries from a joint projection, and memory with padded rows.
        let joint = wave([2, 5, 3, 384], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
        assert_views_agree(joint, |x| rotary(x, 3, 10_000.0, 128));
        assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), |x| rotary(x, 3, 10_000.0, 8));
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn both_equal_each_alone() {
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
                let both = rotary_both(qk(), 4095, 10_000.0, dims);
                for (got, x) in both.into_iter().zip(qk()) {
                    let want = rotary(x, 4095, 10_000.0, dims);
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
        let run = |(first, theta, dims): (usize, f64, usize)| {
            values(rotary(wave([1, 1, 6, 8], 0.0), first, theta, dims))
        };
        let calls =
            [(0, 1e4, 8), (1, 1e4, 8), (4093, 1e4, 8), (0, 1e5, 8), (0, 1e4, 4), (9000, 1e4, 8)];
        let first: Vec<_> = calls.iter().map(|&call| run(call)).collect();
        for (i, &call) in calls.iter().enumerate().rev() {
            assert_eq!(run(call), first[i]);
            assert!((0..i).all(|j| first[j] != first[i]));
        }
    }
}
