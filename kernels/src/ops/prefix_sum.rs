//! Prefix sums along the last dimension.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cpu::{buffer, contiguous, dims, from_vec, slice};
use crate::cuda::CudaTensor;
use crate::ops::cuda::prefix_sum as cuda;

/// y_i = Σ_{j ≤ i} x_j along the last dimension, with an error near that of rounding the result,
/// however many terms it has.
///
/// - `x`: `[…, n]`, f32
///
/// Returns the shape of `x`.
pub fn prefix_sum<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::run(&PrefixSum, [primitive(x)], vec![]))
}

/// The operation: input x.
#[derive(Clone, Debug)]
pub struct PrefixSum;

impl Op<1> for PrefixSum {
    fn reference<B: OpBackend>(
        &self,
        [x]: [FloatTensor<B>; 1],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let shape = x.shape();
        let len = shape[shape.num_dims() - 1];
        let rows = shape.num_elements() / len;
        let x = tensor::<B, 2>(B::float_reshape(x, [rows, len].into()));
        B::float_reshape(primitive(x.cumsum(1)), shape)
    }

    fn cpu_forward(
        &self,
        [x]: &[FlexTensor; 1],
        _ints: &[FlexTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<FlexTensor>> {
        Some(Forward { output: sums(x, |x, y| run(x.iter(), y.iter_mut())), saved: vec![] })
    }

    /// dx_i = Σ_{j ≥ i} dy_j.
    fn cpu_backward(
        &self,
        _saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        [Some(sums(&grad, |dy, dx| run(dy.iter().rev(), dx.iter_mut().rev())))]
    }

    fn cuda_forward(
        &self,
        [x]: &[CudaTensor; 1],
        _ints: &[CudaTensor],
        _needs: [bool; 1],
    ) -> Option<Forward<CudaTensor>> {
        Some(Forward { output: cuda::prefix_sum(x, false)?, saved: vec![] })
    }

    fn cuda_backward(
        &self,
        _saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 1],
    ) -> [Option<CudaTensor>; 1] {
        [cuda::prefix_sum(&grad, true)]
    }
}

/// `f` of each row of `x` and of the result.
fn sums(x: &FlexTensor, f: impl Fn(&[f32], &mut [f32]) + Sync) -> FlexTensor {
    let x = contiguous(x);
    let len = *dims(&x).last().expect("x has dimensions");
    let mut y = buffer(slice(&x).len());
    y.par_chunks_mut(len).zip(slice(&x).par_chunks(len)).for_each(|(y, x)| f(x, y));
    from_vec(y, &dims(&x))
}

/// Running sums, kept in f64.
fn run<'a>(x: impl Iterator<Item = &'a f32>, y: impl Iterator<Item = &'a mut f32>) {
    let mut sum = 0.0;
    for (x, y) in x.zip(y) {
        sum += f64::from(*x);
        *y = sum as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::support::{assert_nan_shows, assert_views_agree, wave};
    use crate::testing::{Case, Oracle, check};

    /// Prefix sums by their definition.
    fn oracle(inputs: &[Oracle]) -> Oracle {
        let x = &inputs[0];
        let rows = x.data.chunks_exact(x.shape[x.shape.len() - 1]).flat_map(|row| {
            row.iter().scan(0.0, |sum, x| {
                *sum += x;
                Some(*sum)
            })
        });
        Oracle::new(&x.shape, rows.collect())
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
        // Times x, since the gradient of a linear operation does not depend on it.
        assert_nan_shows([3, 9], |x| prefix_sum(x.clone()) * x);
    }

    mod cuda {
        use super::*;
        use crate::ops::support::gpu::{
            assert_nan_shows, assert_views_agree, floats, values, wave,
        };
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
            assert_nan_shows([3, 9], |x| prefix_sum(x.clone()) * x);
            let sums = values(prefix_sum(floats(vec![1.0, f32::NEG_INFINITY, 2.0], [3])));
            assert_eq!(sums, [1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
        }
    }
}
