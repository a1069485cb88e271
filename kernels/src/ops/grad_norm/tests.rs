use super::*;
use crate::backend::{primitive, tensor};
use burn::backend::Flex;
use burn::tensor::Tensor;

#[test]
fn sums_squares_like_f64() {
    for n in [1, 17, 100_003] {
        let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let want: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let x = vec![primitive(Tensor::<Flex, 1>::from_floats(&x[..], &Default::default()))];
        for got in [SquareSums.cpu(x.clone()), SquareSums.reference::<Flex>(x)] {
            assert_eq!(got.len(), 1);
            let got = f64::from(slice(&got[0])[0]);
            assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}");
        }
    }
}

mod cuda {
    use burn::tensor::backend::AutodiffBackend;

    use super::*;
    use crate::ops::support::gpu::{Gpu, floats};
    use crate::ops::support::values;

    /// The one sum over all tensors.
    fn sum_over(tensors: Vec<FloatTensor<Gpu>>) -> f32 {
        let sums = square_sums::<crate::Cuda>(tensors.into_iter().map(Gpu::inner).collect());
        let [sum] = sums.try_into().expect("one sum");
        values(Tensor::<Gpu, 1>::from_inner(tensor(sum)))[0]
    }

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin()).collect()
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn sums_squares_like_f64() {
        let mut total = 0.0;
        let mut all = vec![];
        for n in [1, 3, 17, 4_099, 100_003, 5_000_001] {
            let x = floats(wave(n), [n]);
            let want: f64 = wave(n).iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let got = f64::from(sum_over(vec![primitive(x.clone())]));
            assert!((got - want).abs() <= 1e-6 * want, "{got} for {want}, {n} elements");
            total += want;
            all.push(primitive(x));
        }
        let got = || sum_over(all.clone());
        assert!((f64::from(got()) - total).abs() <= 1e-6 * total, "{} for {total}", got());
        assert_eq!(got().to_bits(), got().to_bits());
    }
}
