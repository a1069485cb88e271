//! The device's peak rates, measured at the start of each run.

use burn::tensor::Tensor;
use longwall_kernels::backend::{OpBackend, tensor};
use longwall_kernels::ops::activation::relu_squared;
use longwall_kernels::ops::linear::linear;
use longwall_train::peak;
use rayon::prelude::*;
use serde::Serialize;

use crate::inputs::random;
use crate::setup::Setup;
use crate::timing::{Clock, Spread};

/// Side of the square matrices whose product is timed on CUDA.
const MATRIX: usize = 8192;

/// Elements that are read and written: 1 GB of bf16 each way on CUDA (2 GB of f32), 128 MB of f32 on
/// the CPU.
const CUDA_ELEMENTS: usize = 1 << 29;
const CPU_ELEMENTS: usize = 1 << 25;

/// The measured peak rates; a command measures only those that it compares with.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ceiling {
    /// Of a square matrix product in the run's precision, through the operation of linear layers.
    pub flops_per_second: Option<f64>,
    /// Bytes read and written by an elementwise operation.
    pub bytes_per_second: Option<f64>,
}

impl Ceiling {
    /// The ceiling of matrix products.
    pub(crate) fn of_flops<B: OpBackend>(setup: &Setup, device: &B::Device) -> Self {
        Ceiling { flops_per_second: Some(flops::<B>(setup, device)), bytes_per_second: None }
    }

    /// The ceiling of memory.
    pub(crate) fn of_bytes<B: OpBackend>(setup: &Setup, device: &B::Device) -> Self {
        Ceiling { flops_per_second: None, bytes_per_second: Some(bytes::<B>(setup, device)) }
    }

    /// Both ceilings.
    pub(crate) fn of_both<B: OpBackend>(setup: &Setup, device: &B::Device) -> Self {
        let flops_per_second = Some(flops::<B>(setup, device));
        Ceiling { flops_per_second, bytes_per_second: Some(bytes::<B>(setup, device)) }
    }
}

fn flops<B: OpBackend>(setup: &Setup, device: &B::Device) -> f64 {
    if !setup.on_cuda() {
        return peak::measure::<B>(device);
    }
    let [x, weight] = [0, 1].map(|_| random::<B>(&[MATRIX, MATRIX], 1.0, setup.dtype(), device));
    let x = tensor::<B, 2>(x).reshape([1, MATRIX, MATRIX]);
    let weight = tensor::<B, 2>(weight);
    let time = setup.clock::<B>(device).time(|_| {
        linear(x.clone(), weight.clone(), None);
    });
    2.0 * (MATRIX as f64).powi(3) / (time.min / 1e3)
}

/// The rate of an in-place update on the CPU; on a GPU, of the faster of burn's kernel and Longwall's.
fn bytes<B: OpBackend>(setup: &Setup, device: &B::Device) -> f64 {
    let clock: Clock<B> = setup.clock(device);
    let elements = setup.choose(CUDA_ELEMENTS, CPU_ELEMENTS);
    let per_second = |time: Spread| (2 * elements * setup.dtype().size()) as f64 / (time.min / 1e3);
    if !setup.on_cuda() {
        let mut x = vec![0.25f32; elements];
        return per_second(clock.time(|_| {
            let pieces = x.par_chunks_mut(1 << 16);
            pieces.for_each(|piece| piece.iter_mut().for_each(|x| *x = 1.0 - *x));
        }));
    }
    let x: Tensor<B, 1> = tensor(random::<B>(&[elements], 1.0, setup.dtype(), device));
    let stock = clock.time(|_| drop(x.clone() * 1.5));
    let own = clock.time(|_| drop(relu_squared(x.clone())));
    per_second(stock).max(per_second(own))
}
