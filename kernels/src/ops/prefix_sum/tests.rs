use super::*;
use crate::ops::support::{assert_nan_shows, assert_views_agree, wave};
use crate::testing::{Case, Tensor64, check};

/// Prefix sums by their definition.
fn oracle(inputs: &[Tensor64]) -> Tensor64 {
    let x = &inputs[0];
    let rows = x.data.chunks_exact(x.shape[x.shape.len() - 1]).flat_map(|row| {
        row.iter().scan(0.0, |sum, x| {
            *sum += x;
            Some(*sum)
        })
    });
    Tensor64::new(&x.shape, rows.collect())
}

#[test]
fn agrees_with_the_oracle_and_its_gradient() {
    for shape in [&[1][..], &[3, 7], &[2, 3, 65], &[2, 4099]] {
        check(Case::new(PrefixSum, &[shape]), oracle);
    }
}

#[test]
fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
    assert_views_agree(wave([5, 3, 7], 0.0).swap_dims(1, 2), prefix_sum);
    // Times x, because the gradient of a linear operation does not depend on x.
    assert_nan_shows(wave([3, 9], 0.0), |x| prefix_sum(x.clone()) * x);
}

mod cuda {
    use super::*;
    use crate::ops::support::gpu::{floats, wave};
    use crate::ops::support::values;
    use crate::testing::check_on;

    #[test]
    #[ignore = "needs a GPU"]
    fn agrees_with_the_oracle_and_its_gradient() {
        for shape in [&[1][..], &[3, 7], &[2, 3, 65], &[2, 4099], &[70_000, 3]] {
            check_on::<crate::Cuda, _, 1>(Case::new(PrefixSum, &[shape]), oracle);
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn long_rows_keep_their_accuracy() {
        let x: Vec<f32> = (0..65_536).map(|i| (i as f32 * 0.37).sin().powi(2) + 0.01).collect();
        let mut want = 0.0;
        for (i, (got, x)) in
            values(prefix_sum(floats(x.clone(), [65_536]))).iter().zip(&x).enumerate()
        {
            want += f64::from(*x);
            // The result's own rounding, and as much again inside a tile of 4,096.
            let allowed = 2.0 * f64::from(f32::EPSILON) * want;
            assert!((f64::from(*got) - want).abs() <= allowed, "{got} for {want} at {i}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_view_gives_what_its_copy_gives_and_a_nan_shows() {
        assert_views_agree(wave([5, 3, 7], 0.0).swap_dims(1, 2), prefix_sum);
        assert_nan_shows(wave([3, 9], 0.0), |x| prefix_sum(x.clone()) * x);
        let sums = values(prefix_sum(floats(vec![1.0, f32::NEG_INFINITY, 2.0], [3])));
        assert_eq!(sums, [1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
    }
}
