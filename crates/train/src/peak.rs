//! The peak rate that model FLOPs utilisation is relative to.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::linear::linear;

/// Side of the square matrices.
const SIZE: usize = 1024;
/// How long to measure.
const BUDGET: Duration = Duration::from_millis(200);

/// The FLOP/s of the fastest of several products of two 1024 × 1024 matrices on the device, through
/// the operation that the model's linear layers use. Takes about 0.2 s.
///
/// A CPU cannot reach a published peak: its cores, its clock and other processes limit it. Relative to
/// this measured peak, utilisation shows how much of a training step is spent outside matrix products.
pub fn measure<B: OpBackend>(device: &B::Device) -> f64 {
    let x = Tensor::<B, 3>::ones([1, SIZE, SIZE], device);
    let weight = Tensor::<B, 2>::ones([SIZE, SIZE], device);
    let product = || {
        let started = Instant::now();
        let y = linear(x.clone(), weight.clone(), None);
        // Reading one element synchronises with the device.
        let _ = y.slice([0..1, 0..1, 0..1]).into_data();
        started.elapsed()
    };
    product();
    let begin = Instant::now();
    let mut best = product();
    while begin.elapsed() < BUDGET {
        best = best.min(product());
    }
    2.0 * (SIZE as f64).powi(3) / best.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_reaches_between_one_and_a_million_gigaflops() {
        let peak = measure::<longwall_kernels::Cpu>(&Default::default());
        assert!((1e9..1e15).contains(&peak), "{peak}");
    }
}
