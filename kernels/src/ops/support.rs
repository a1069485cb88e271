//! What the operations' tests share beside the three-way test.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use burn_flex::FlexTensor;

use crate::backend::primitive;

pub(super) type Ad = Autodiff<Flex>;

/// A tensor of distinct values in −1.5..1.5.
pub(super) fn wave<const D: usize>(shape: [usize; D], phase: f32) -> Tensor<Ad, D> {
    let len: usize = shape.iter().product();
    let data: Vec<f32> = (0..len).map(|i| 1.5 * (i as f32 * 0.731 + phase).sin()).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

/// The elements in row-major order.
pub(super) fn values<const D: usize>(tensor: Tensor<Ad, D>) -> Vec<f32> {
    tensor.into_data().to_vec().expect("an f32 tensor")
}

/// The layout's strides.
pub(super) fn strides<const D: usize>(tensor: &Tensor<Ad, D>) -> Vec<isize> {
    let flex: FlexTensor = primitive(tensor.clone().inner());
    flex.layout().strides().to_vec()
}

/// The output and the gradient of `x` under a fixed upstream gradient.
pub(super) fn output_and_gradient<const D: usize, const E: usize>(
    x: Tensor<Ad, D>,
    f: &impl Fn(Tensor<Ad, D>) -> Tensor<Ad, E>,
) -> [Vec<f32>; 2] {
    let x = x.detach().require_grad();
    let y = f(x.clone());
    let grads = (y.clone() * wave(y.dims(), 0.3)).sum().backward();
    let dx = x.grad(&grads).expect("x requires a gradient");
    [values(y), values(Tensor::from_inner(dx))]
}

/// Holds the output and gradient for a strided view to those for a contiguous copy of it.
pub(super) fn assert_views_agree<const D: usize, const E: usize>(
    view: Tensor<Ad, D>,
    f: impl Fn(Tensor<Ad, D>) -> Tensor<Ad, E>,
) {
    let copy = Tensor::from_data(view.to_data(), &Default::default());
    assert_ne!(strides(&view), strides(&copy), "the view is contiguous");
    let (got, want) = (output_and_gradient(view, &f), output_and_gradient(copy, &f));
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} for {want}");
    }
}

/// Requires that a NaN among the elements of `x` shows in the output and in the gradient.
pub(super) fn assert_nan_shows<const D: usize, const E: usize>(
    shape: [usize; D],
    f: impl Fn(Tensor<Ad, D>) -> Tensor<Ad, E>,
) {
    let mut data = values(wave(shape, 0.0));
    let middle = data.len() / 2;
    data[middle] = f32::NAN;
    let x = Tensor::from_data(TensorData::new(data, shape), &Default::default());
    for result in output_and_gradient(x, &f) {
        assert!(result.iter().any(|x| x.is_nan()), "the NaN is lost");
    }
}

/// Requires the same bits from one thread and from three.
pub(super) fn assert_threads_agree(f: impl Fn() -> Vec<f32> + Sync) {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let result = pool.expect("a thread pool").install(&f);
        result.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert!(run(1) == run(3), "results depend on the number of threads");
}

/// The same on a GPU.
pub(super) mod gpu {
    use burn::tensor::Int;

    use super::*;

    pub(in crate::ops) type Gpu = Autodiff<crate::Cuda>;

    /// A tensor of distinct values in −1.5..1.5.
    pub(in crate::ops) fn wave<const D: usize>(shape: [usize; D], phase: f32) -> Tensor<Gpu, D> {
        floats(super::values(super::wave(shape, phase)), shape)
    }

    pub(in crate::ops) fn floats<const D: usize>(
        data: Vec<f32>,
        shape: [usize; D],
    ) -> Tensor<Gpu, D> {
        Tensor::from_data(TensorData::new(data, shape), &Default::default())
    }

    pub(in crate::ops) fn ints<const D: usize>(
        data: Vec<i32>,
        shape: [usize; D],
    ) -> Tensor<Gpu, D, Int> {
        Tensor::from_data(TensorData::new(data, shape), &Default::default())
    }

    /// The elements in row-major order.
    pub(in crate::ops) fn values<const D: usize>(tensor: Tensor<Gpu, D>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    /// The layout's strides.
    pub(in crate::ops) fn strides<const D: usize>(tensor: &Tensor<Gpu, D>) -> Vec<usize> {
        primitive(tensor.clone().inner()).meta.strides().to_vec()
    }

    /// The output and the gradient of `x` under a fixed upstream gradient.
    pub(in crate::ops) fn output_and_gradient<const D: usize, const E: usize>(
        x: Tensor<Gpu, D>,
        f: &impl Fn(Tensor<Gpu, D>) -> Tensor<Gpu, E>,
    ) -> [Vec<f32>; 2] {
        let x = x.detach().require_grad();
        let y = f(x.clone());
        let grads = (y.clone() * wave(y.dims(), 0.3)).sum().backward();
        let dx = x.grad(&grads).expect("x requires a gradient");
        [values(y), values(Tensor::from_inner(dx))]
    }

    /// Holds the output and gradient for a strided view to those for a contiguous copy of it.
    pub(in crate::ops) fn assert_views_agree<const D: usize, const E: usize>(
        view: Tensor<Gpu, D>,
        f: impl Fn(Tensor<Gpu, D>) -> Tensor<Gpu, E>,
    ) {
        let copy = Tensor::from_data(view.to_data(), &Default::default());
        assert_ne!(strides(&view), strides(&copy), "the view is contiguous");
        let (got, want) = (output_and_gradient(view, &f), output_and_gradient(copy, &f));
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} for {want}");
        }
    }

    /// Requires that a NaN among the elements of `x` shows in the output and in the gradient.
    pub(in crate::ops) fn assert_nan_shows<const D: usize, const E: usize>(
        shape: [usize; D],
        f: impl Fn(Tensor<Gpu, D>) -> Tensor<Gpu, E>,
    ) {
        let mut data = super::values(super::wave(shape, 0.0));
        let middle = data.len() / 2;
        data[middle] = f32::NAN;
        for result in output_and_gradient(floats(data, shape), &f) {
            assert!(result.iter().any(|x| x.is_nan()), "the NaN is lost");
        }
    }
}
