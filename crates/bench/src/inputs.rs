//! Random inputs, and enough copies of them that none is still in a cache when it is used again.

use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Distribution, FloatDType};
use longwall_kernels::backend::OpBackend;
use longwall_kernels::device::DeviceKind;

/// Bytes of all copies together: over twice the L2 cache of an H200 (50 MB), or twice the L3 of a
/// typical server CPU (32 MB).
const FLUSH: [u64; 2] = [128 << 20, 64 << 20];

/// Most copies; smaller inputs stay in cache.
const MOST_COPIES: u64 = 1024;

/// Normal random numbers with this standard deviation.
pub fn random<B: OpBackend>(
    shape: &[usize],
    deviation: f64,
    dtype: DType,
    device: &B::Device,
) -> FloatTensor<B> {
    distributed::<B>(shape, Distribution::Normal(0.0, deviation), dtype, device)
}

/// Random numbers of a distribution.
pub fn distributed<B: OpBackend>(
    shape: &[usize],
    distribution: Distribution,
    dtype: DType,
    device: &B::Device,
) -> FloatTensor<B> {
    let x = B::float_random(shape.to_vec().into(), distribution, device, FloatDType::F32);
    if dtype == DType::F32 { x } else { B::float_cast(x, dtype.into()) }
}

/// A copy in other memory.
pub fn copy<B: OpBackend>(x: &FloatTensor<B>) -> FloatTensor<B> {
    // `x` is still referenced, so the product is not in place.
    B::float_mul_scalar(x.clone(), 1.0f32.into())
}

/// How many copies of inputs of `bytes` bytes the calls cycle through.
pub fn copies<B: OpBackend>(bytes: u64) -> usize {
    copies_on(B::device_kind(), bytes)
}

/// As [`copies`], on a device of this kind.
pub fn copies_on(device: DeviceKind, bytes: u64) -> usize {
    let flush = FLUSH[usize::from(device == DeviceKind::Cpu)];
    flush.div_ceil(bytes.max(1)).clamp(1, MOST_COPIES) as usize
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Shape, TensorMetadata};
    use longwall_kernels::Cpu;
    use longwall_kernels::backend::tensor;

    use super::*;

    #[test]
    fn copies_are_enough_to_flush_the_cache() {
        for bytes in [1u64 << 20, 5_000_000, (64 << 20) - 1] {
            assert!(bytes * copies::<Cpu>(bytes) as u64 >= 64 << 20);
        }
        assert_eq!((copies::<Cpu>(64 << 20), copies::<Cpu>(1 << 40)), (1, 1));
        assert_eq!(copies::<Cpu>(0) as u64, MOST_COPIES);
    }

    #[test]
    fn a_copy_has_the_numbers_and_its_own_memory() {
        let x = random::<Cpu>(&[3, 50], 2.0, DType::F32, &Default::default());
        let y = copy::<Cpu>(&x);
        assert_eq!(y.shape(), Shape::new([3, 50]));
        let values =
            |x: FloatTensor<Cpu>| tensor::<Cpu, 2>(x).into_data().to_vec::<f32>().expect("f32");
        assert_ne!(x.bytes().as_ptr(), y.bytes().as_ptr());
        let (x, y) = (values(x), values(y));
        assert!(x == y && x.iter().all(|x| *x != 0.0), "{x:?}");
        let deviation = (x.iter().map(|x| x * x).sum::<f32>() / 150.0).sqrt();
        assert!((1.5..2.5).contains(&deviation), "{deviation}");
    }
}
