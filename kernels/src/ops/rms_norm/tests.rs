use super::*;
use crate::ops::support::{assert_nan_shows, assert_threads_agree, assert_views_agree};
use crate::ops::support::{output_and_gradient, strides, wave};
use crate::testing::{Case, Tensor64, check};

const EPS: f32 = 1e-6;

/// RMS norm by its definition.
fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let [x, weight] = inputs else { panic!() };
    let width = weight.data.len();
    let rows = x.data.chunks_exact(width).flat_map(|row| {
        let square = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let root = (square + f64::from(EPS)).sqrt();
        (0..width).map(|i| row[i] / root * weight.data[i]).collect::<Vec<_>>()
    });
    Tensor64::new(&x.shape, rows.collect())
}

#[test]
fn agrees_with_the_oracle_and_its_gradients() {
    let shapes: [&[usize]; 5] = [&[7], &[1, 1, 9], &[3, 5, 33], &[2, 3, 65, 32], &[101, 257]];
    for shape in shapes {
        let width = [shape[shape.len() - 1]];
        check(Case::new(RmsNorm { eps: EPS }, &[shape, &width]), oracle);
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
    let norm = |x| rms_norm(x, wave([8], 1.0), EPS);
    let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
    assert_views_agree(view(), norm);
    assert_eq!(strides(&norm(view())), strides(&view()));
    // Queries from a joint projection, and memory with padded rows.
    assert_views_agree(wave([2, 5, 3, 24], 0.0).narrow(3, 8, 8).swap_dims(1, 2), norm);
    assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), norm);
}

#[test]
fn a_nan_shows() {
    assert_nan_shows(wave([3, 9], 0.0), |x| rms_norm(x, wave([9], 1.0), EPS));
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    assert_threads_agree(|| {
        // The gradient of the weight is the sum over tasks.
        let norm = |w| rms_norm(wave([3, 200, 64], 0.0), w, EPS);
        output_and_gradient(wave([64], 1.0), &norm).concat()
    });
}

mod cuda {
    use super::*;
    use crate::ops::support::gpu::wave;
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradients() {
        let shapes: [&[usize]; 9] = [
            &[7],
            &[1, 1, 9],
            &[3, 5, 33],
            &[2, 3, 65, 32],
            &[101, 257],
            &[2, 4, 300, 128],
            &[66_000, 4],
            &[4, 2049],
            &[3, 4096],
        ];
        for shape in shapes {
            let width = [shape[shape.len() - 1]];
            let case = || Case::new(RmsNorm { eps: EPS }, &[shape, &width]);
            check_on::<crate::Cuda, _, 2>(case(), oracle);
            check_on::<crate::Cuda, _, 2>(case().bf16(&[0]).parameters(&[1]), oracle);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_keeps_its_order() {
        let norm = |x: Tensor<_, 4>| rms_norm(x.clone(), wave([x.dims()[3]], 1.0), EPS);
        let view = || wave([2, 5, 3, 8], 0.0).swap_dims(1, 2);
        assert_views_agree(view(), norm);
        assert_eq!(strides(&norm(view())), strides(&view()));
        // Queries from a joint projection, and memory with padded rows.
        let joint = || wave([2, 5, 3, 384], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
        assert_views_agree(joint(), norm);
        assert_views_agree(wave([2, 3, 8, 5], 0.0).swap_dims(2, 3), norm);
        // Rows in another memory order than their contiguous copy.
        assert_views_agree(wave([2, 8, 5, 3], 0.0).swap_dims(1, 3), norm);
        let unaligned = wave([2, 5, 3, 385], 0.0).narrow(3, 128, 128).swap_dims(1, 2);
        assert_views_agree(unaligned, norm);
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_nan_shows() {
        assert_nan_shows(wave([3, 9], 0.0), |x| rms_norm(x, wave([9], 1.0), EPS));
    }
}
