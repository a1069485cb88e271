use super::*;
use crate::ops::support::{assert_nan_shows, assert_threads_agree, assert_views_agree};
use crate::ops::support::{output_and_gradient, wave};
use crate::testing::{Case, Tensor64, check};

const EPS: f32 = 1e-5;

/// Layer norm by its definition.
fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let (x, weight) = (&inputs[0], &inputs[1]);
    let width = weight.data.len();
    let rows = x.data.chunks_exact(width).flat_map(|row| {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let root = (variance + f64::from(EPS)).sqrt();
        let bias = |i: usize| inputs.get(2).map_or(0.0, |bias| bias.data[i]);
        (0..width).map(|i| (row[i] - mean) / root * weight.data[i] + bias(i)).collect::<Vec<_>>()
    });
    Tensor64::new(&x.shape, rows.collect())
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    let op = LayerNorm { eps: EPS };
    for (shape, range) in [
        (&[1, 1, 7][..], -1.7..1.7),
        (&[3, 5, 33], -1.7..1.7),
        (&[2, 65, 192], 4.0..7.0),
        (&[101, 257], -1.7..1.7),
    ] {
        let width = [shape[shape.len() - 1]];
        let two = Case::<_, 2>::new(op.clone(), &[shape, &width]);
        check(two.uniform(0, range.clone()), oracle);
        let three = Case::<_, 3>::new(op.clone(), &[shape, &width, &width]);
        check(three.uniform(0, range), oracle);
    }
}

#[test]
fn a_view_gives_what_its_copy_gives() {
    let norm = |x| layer_norm(x, wave([7], 1.0), Some(wave([7], 2.0)), EPS);
    assert_views_agree(wave([2, 5, 3, 7], 0.0).swap_dims(1, 2), norm);
    assert_views_agree(wave([2, 5, 7, 3], 0.0).swap_dims(2, 3), norm);
}

#[test]
fn a_nan_shows() {
    assert_nan_shows(wave([3, 9], 0.0), |x| layer_norm(x, wave([9], 1.0), None, EPS));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    assert_threads_agree(|| {
        // The gradient of the weight is the sum over tasks.
        let norm = |w| layer_norm(wave([3, 200, 64], 0.0), w, None, EPS);
        output_and_gradient(wave([64], 1.0), &norm).concat()
    });
}

mod cuda {
    use super::*;
    use crate::ops::linear::{linear, linear_add};
    use crate::ops::support::gpu::wave;
    use crate::ops::support::{strides, values};
    use crate::testing::check_on;

    /// The residual's gradient exists when the norm's gradient is added to it.
    #[test]
    #[ignore = "needs a GPU"]
    fn the_gradient_of_a_residual_block_is_the_sum_over_its_two_paths() {
        // More rows than blocks, and a last block with fewer rows than thread groups.
        for shape in [[3, 5, 32], [1, 1001, 64], [2, 700, 768]] {
            let width = shape[2];
            let weight = || wave([width, width], 0.1) * 0.05;
            let norm = |x| layer_norm(x, wave([width], 1.0), None, EPS);
            let plain = |x| linear(norm(x), weight(), None);
            let block = |x: Tensor<_, 3>| linear_add(norm(x.clone()), weight(), x);
            let [_, dx] = output_and_gradient(wave(shape, 0.0), &plain);
            let [_, sum] = output_and_gradient(wave(shape, 0.0), &block);
            let upstream = values(wave(shape, 0.3));
            for ((dx, upstream), sum) in dx.iter().zip(upstream).zip(&sum) {
                assert!((dx + upstream - sum).abs() <= 1e-5, "{dx} + {upstream}, {sum}");
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        let op = LayerNorm { eps: EPS };
        // Part of a warp, a warp and a block per row; even and uneven widths; more than 2^16 rows.
        for (shape, range) in [
            (&[1, 1, 7][..], -1.7..1.7),
            (&[3, 5, 33], -1.7..1.7),
            (&[2, 65, 192], 4.0..7.0),
            (&[101, 257], -1.7..1.7),
            (&[600, 768], -1.7..1.7),
            (&[70_001, 8], -1.7..1.7),
            (&[5, 1032], -1.7..1.7),
            (&[3, 2049], -1.7..1.7),
            (&[3, 8192], -1.7..1.7),
        ] {
            let width = [shape[shape.len() - 1]];
            let two = || Case::<_, 2>::new(op.clone(), &[shape, &width]).uniform(0, range.clone());
            check_on::<crate::Cuda, _, 2>(two(), oracle);
            check_on::<crate::Cuda, _, 2>(two().bf16(&[0]).parameters(&[1]), oracle);
            let three = || Case::<_, 3>::new(op.clone(), &[shape, &width, &width]);
            let three = || three().uniform(0, range.clone());
            check_on::<crate::Cuda, _, 3>(three(), oracle);
            check_on::<crate::Cuda, _, 3>(three().bf16(&[0]).parameters(&[1, 2]), oracle);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let norm = |x| layer_norm(x, wave([8], 1.0), Some(wave([8], 2.0)), EPS);
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), norm);
        assert_eq!(strides(&norm(view())), strides(&view()));
        assert_views_agree(wave([2, 5, 8, 3], 0.0).swap_dims(2, 3), norm);
        // Rows in another memory order than their contiguous copy.
        assert_views_agree(wave([2, 8, 5, 3], 0.0).swap_dims(1, 3), norm);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_nan_shows() {
        assert_nan_shows(wave([3, 9], 0.0), |x| layer_norm(x, wave([9], 1.0), None, EPS));
        assert_nan_shows(wave([3, 2048], 0.0), |x| layer_norm(x, wave([2048], 1.0), None, EPS));
    }
}
