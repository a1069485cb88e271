//! What the operations' tests share beside the three-way test, for any device.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData};

use crate::Cuda;
use crate::backend::primitive;

/// The CPU.
pub(super) type Ad = Autodiff<Flex>;

/// A device whose tensor layouts are tested.
pub(super) trait Device: Backend {
    /// The layout's strides.
    fn strides(x: &FloatTensor<Self>) -> Vec<isize>;
}

impl Device for Flex {
    fn strides(x: &FloatTensor<Self>) -> Vec<isize> {
        x.layout().strides().to_vec()
    }
}

impl Device for Cuda {
    fn strides(x: &FloatTensor<Self>) -> Vec<isize> {
        x.meta.strides().iter().map(|&stride| stride as isize).collect()
    }
}

/// A tensor of distinct values in −1.5..1.5.
fn wave_on<B: Device, const D: usize>(shape: [usize; D], phase: f32) -> Tensor<Autodiff<B>, D> {
    let len: usize = shape.iter().product();
    let data: Vec<f32> = (0..len).map(|i| 1.5 * (i as f32 * 0.731 + phase).sin()).collect();
    Tensor::from_data(TensorData::new(data, shape), &Default::default())
}

/// A tensor of distinct values in −1.5..1.5, on the CPU.
pub(super) fn wave<const D: usize>(shape: [usize; D], phase: f32) -> Tensor<Ad, D> {
    wave_on(shape, phase)
}

/// The elements in row-major order.
pub(super) fn values<B: Device, const D: usize>(tensor: Tensor<Autodiff<B>, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The layout's strides.
pub(super) fn strides<B: Device, const D: usize>(tensor: &Tensor<Autodiff<B>, D>) -> Vec<isize> {
    B::strides(&primitive(tensor.clone().inner()))
}

/// The output and the gradient of `x` under a fixed upstream gradient.
pub(super) fn output_and_gradient<B: Device, const D: usize, const E: usize>(
    x: Tensor<Autodiff<B>, D>,
    f: &impl Fn(Tensor<Autodiff<B>, D>) -> Tensor<Autodiff<B>, E>,
) -> [Vec<f32>; 2] {
    let x = x.detach().require_grad();
    let y = f(x.clone());
    let grads = (y.clone() * wave_on(y.dims(), 0.3)).sum().backward();
    let dx = x.grad(&grads).expect("x requires a gradient");
    [values(y), values(Tensor::from_inner(dx))]
}

/// Asserts that output and gradient for a strided view equal those for a contiguous copy of it.
pub(super) fn assert_views_agree<B: Device, const D: usize, const E: usize>(
    view: Tensor<Autodiff<B>, D>,
    f: impl Fn(Tensor<Autodiff<B>, D>) -> Tensor<Autodiff<B>, E>,
) {
    let copy = Tensor::from_data(view.to_data(), &Default::default());
    assert_ne!(strides(&view), strides(&copy), "the view is contiguous");
    let (got, want) = (output_and_gradient(view, &f), output_and_gradient(copy, &f));
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} for {want}");
    }
}

/// Asserts that a NaN in the middle of `x` propagates to the output and the gradient.
pub(super) fn assert_nan_shows<B: Device, const D: usize, const E: usize>(
    x: Tensor<Autodiff<B>, D>,
    f: impl Fn(Tensor<Autodiff<B>, D>) -> Tensor<Autodiff<B>, E>,
) {
    let shape = x.dims();
    let mut data = values(x);
    let middle = data.len() / 2;
    data[middle] = f32::NAN;
    let x = Tensor::from_data(TensorData::new(data, shape), &Default::default());
    for result in output_and_gradient(x, &f) {
        assert!(result.iter().any(|x| x.is_nan()), "the NaN is lost");
    }
}

/// Asserts equal bits with one thread and with three.
pub(super) fn assert_threads_agree(f: impl Fn() -> Vec<f32> + Sync) {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let result = pool.expect("a thread pool").install(&f);
        result.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert!(run(1) == run(3), "results depend on the number of threads");
}

/// Tensors on a GPU.
pub(super) mod gpu {
    use burn::tensor::Int;

    use super::*;

    pub(in crate::ops) type Gpu = Autodiff<Cuda>;

    /// As [`wave`](super::wave).
    pub(in crate::ops) fn wave<const D: usize>(shape: [usize; D], phase: f32) -> Tensor<Gpu, D> {
        wave_on(shape, phase)
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
}
