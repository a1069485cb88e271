use super::*;
use crate::ops::support::{Ad, assert_nan_shows, assert_threads_agree, assert_views_agree};
use crate::ops::support::{output_and_gradient, values, wave};
use crate::testing::{Case, Tensor64, check};

/// The convolution by its definition.
fn oracle(op: &ShortConv, starts: Option<&[i32]>, inputs: &[Tensor64]) -> Tensor64 {
    let [x, weight] = inputs else { panic!() };
    let (seq_len, taps) = (x.shape[1], weight.shape[1]);
    Tensor64::from_fn(&x.shape, |at| {
        let [b, t, c] = at[..] else { panic!() };
        let start = starts.map_or(0, |starts| starts[b * seq_len + t] as usize);
        let z: f64 = (0..taps)
            .filter(|j| t + j + 1 >= taps + start)
            .map(|j| weight.at(&[c, j]) * x.at(&[b, t + j + 1 - taps, c]))
            .sum();
        if op.silu { z / (1.0 + (-z).exp()) } else { z }
    })
}

/// Starts of documents of 1, 2, 3, … rows, restarting in each row of the batch.
fn starts(batch: usize, seq_len: usize) -> Vec<i32> {
    let (mut row, mut length) = (vec![], 1);
    while row.len() < seq_len {
        row.extend(vec![row.len() as i32; length]);
        length += 1;
    }
    row[..seq_len].repeat(batch)
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    for silu in [false, true] {
        for ([batch, seq_len, channels], taps) in
            [([1, 1, 1], 4), ([2, 2, 3], 4), ([2, 65, 33], 4), ([1, 70, 513], 3), ([3, 9, 5], 1)]
        {
            let op = ShortConv { silu };
            let x = [batch, seq_len, channels];
            let case = || Case::new(op.clone(), &[&x, &[channels, taps]]);
            check(case(), |inputs| oracle(&op, None, inputs));
            let starts = starts(batch, seq_len);
            check(case().ints(&[batch, seq_len], starts.clone()), |inputs| {
                oracle(&op, Some(&starts), inputs)
            });
        }
    }
}

#[test]
fn a_window_of_the_last_rows_gives_the_new_row() {
    let (x, weight) = (wave([2, 9, 5], 0.0), wave([5, 4], 1.0));
    let whole = short_conv(x.clone(), weight.clone(), true, None);
    for t in 3..9 {
        let window = x.clone().narrow(1, t - 3, 4);
        let row = short_conv(window, weight.clone(), true, None).narrow(1, 3, 1);
        assert_eq!(values(row), values(whole.clone().narrow(1, t, 1)), "row {t}");
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
    let conv = |x: Tensor<Ad, 3>| {
        let channels = x.dims()[2];
        short_conv(x, wave([4, channels], 1.0).transpose(), true, None)
    };
    assert_views_agree(wave([9, 2, 5], 0.0).swap_dims(0, 1), conv);
    assert_views_agree(wave([2, 5, 9], 0.0).swap_dims(1, 2), conv);
    assert_nan_shows(wave([2, 9, 5], 0.0), conv);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    assert_threads_agree(|| {
        let conv = |w| short_conv(wave([3, 300, 70], 0.0), w, true, None);
        output_and_gradient(wave([70, 4], 1.0), &conv).concat()
    });
}

mod cuda {
    use super::*;
    use crate::ops::support::gpu::{Gpu, wave};
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        for silu in [false, true] {
            for ([batch, seq_len, channels], taps) in [
                ([1, 1, 1], 4),
                ([2, 2, 3], 4),
                ([2, 65, 33], 4),
                ([1, 70, 513], 3),
                ([3, 9, 5], 1),
                ([2, 200, 24], 4),
                ([1, 129, 16], 9),
            ] {
                let op = ShortConv { silu };
                let x = [batch, seq_len, channels];
                let documents = starts(batch, seq_len);
                // In f32; x alone in bf16; both.
                for rounded in [&[][..], &[0], &[0, 1]] {
                    let case = || Case::new(op.clone(), &[&x, &[channels, taps]]);
                    let case = || case().bf16(rounded).parameters(&[1]);
                    check_on::<crate::Cuda, _, 2>(case(), |inputs| oracle(&op, None, inputs));
                    let case = case().ints(&[batch, seq_len], documents.clone());
                    check_on::<crate::Cuda, _, 2>(case, |inputs| {
                        oracle(&op, Some(&documents), inputs)
                    });
                }
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
        let conv = |x: Tensor<Gpu, 3>| {
            let channels = x.dims()[2];
            short_conv(x, wave([4, channels], 1.0).transpose(), true, None)
        };
        assert_views_agree(wave([9, 2, 5], 0.0).swap_dims(0, 1), conv);
        assert_views_agree(wave([2, 5, 9], 0.0).swap_dims(1, 2), conv);
        assert_nan_shows(wave([2, 9, 5], 0.0), conv);
    }
}
