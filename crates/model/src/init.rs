//! Initial weights: each parameter has a random stream of its own, named by its path, so that
//! adding a layer or an option changes no other parameter.

use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use longwall_kernels::attention;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

/// Standard deviation of weights, as in GPT-2.
const STD: f32 = 0.02;

/// Makes the initial parameters of one part of a model.
pub(crate) struct Init<'a, B: Backend> {
    seed: u64,
    path: String,
    /// Standard deviation of projections into the residual stream.
    residual_std: f32,
    pub device: &'a B::Device,
}

impl<'a, B: Backend> Init<'a, B> {
    /// For a model of `layers` blocks, whose two residual projections each are scaled by
    /// 1/√(2·layers) (Radford et al., 2019; nanoGPT).
    pub fn new(seed: u64, layers: usize, device: &'a B::Device) -> Self {
        let residual_std = STD / (2.0 * layers as f32).sqrt();
        Init { seed, path: String::new(), residual_std, device }
    }

    /// The same for a part of this part.
    pub fn part(&self, name: impl std::fmt::Display) -> Self {
        let path = format!("{}.{name}", self.path);
        Init { seed: self.seed, path, residual_std: self.residual_std, device: self.device }
    }

    /// A weight matrix, normal with standard deviation 0.02.
    pub fn weight(&self, shape: [usize; 2]) -> Param<Tensor<B, 2>> {
        self.normal(shape, STD)
    }

    /// A weight matrix that projects into the residual stream.
    pub fn residual_weight(&self, shape: [usize; 2]) -> Param<Tensor<B, 2>> {
        self.normal(shape, self.residual_std)
    }

    /// A vector of one value.
    pub fn constant(&self, len: usize, value: f32) -> Param<Tensor<B, 1>> {
        self.vector(vec![value; len])
    }

    /// A vector of given values.
    pub fn vector(&self, values: Vec<f32>) -> Param<Tensor<B, 1>> {
        let shape = [values.len()];
        Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), self.device))
    }

    /// A vector of `len` elements with a variant's own initial values.
    ///
    /// # Panics
    /// When these are not as many.
    pub fn start(&self, len: usize, init: &attention::Init) -> Param<Tensor<B, 1>> {
        match init {
            attention::Init::Constant(value) => self.constant(len, *value),
            attention::Init::Values(values) => {
                assert_eq!(values.len(), len, "initial values of {}", self.path);
                self.vector(values.clone())
            }
            attention::Init::Normal(std) => self.vector(self.sample(len, *std)),
        }
    }

    /// A matrix, normal with the given standard deviation.
    pub fn normal(&self, shape: [usize; 2], std: f32) -> Param<Tensor<B, 2>> {
        let values = self.sample(shape[0] * shape[1], std);
        Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), self.device))
    }

    fn sample(&self, len: usize, std: f32) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(fnv1a(&self.path));
        let normal = Normal::new(0.0, std).expect("a standard deviation of 0 or above");
        normal.sample_iter(rng).take(len).collect()
    }
}

/// The FNV-1a hash, 64 bits: stable across platforms and versions.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
