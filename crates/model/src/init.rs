//! Initial weights. Each random parameter has its own random stream, named by the parameter's path,
//! so that adding a layer or an option changes no other parameter.
//!
//! Changing a path here changes what a seed produces. Paths are therefore independent of the names of
//! weights in files: a weight renamed there keeps its path here, and so its initial values.

use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use longwall_kernels::attention::{self, AttentionShape};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, OpenClosed01};

use crate::config::ModelConfig;

/// Makes the initial parameters of one part of a model.
pub(crate) struct WeightInit<'a, B: Backend> {
    seed: u64,
    path: String,
    /// Standard deviation of weights.
    std: f32,
    /// Standard deviation of projections into the residual stream.
    residual_std: f32,
    /// Whether weights get their shapes only, see [`WeightInit::blank`].
    blank: bool,
    pub device: &'a B::Device,
}

impl<'a, B: Backend> WeightInit<'a, B> {
    /// For the model of `config`. By default the two projections of each block into the residual stream are
    /// scaled by 1/√(2·layers) (Radford et al., 2019; nanoGPT).
    pub fn new(seed: u64, config: &ModelConfig, device: &'a B::Device) -> Self {
        let std = config.init_std as f32;
        let residual_std = match config.scale_residual_init {
            true => std / (2.0 * config.layers as f32).sqrt(),
            false => std,
        };
        WeightInit { seed, path: String::new(), std, residual_std, blank: false, device }
    }

    /// Weights of the right shapes that take no memory: each is one zero, repeated.
    pub fn blank(config: &ModelConfig, device: &'a B::Device) -> Self {
        WeightInit { blank: true, ..Self::new(0, config, device) }
    }

    /// The same for the part `name` of this part.
    pub fn part(&self, name: impl std::fmt::Display) -> Self {
        WeightInit { path: format!("{}.{name}", self.path), ..*self }
    }

    /// A weight matrix `[outputs, inputs]`, normal with the model's standard deviation.
    pub fn weight(&self, shape: [usize; 2]) -> Param<Tensor<B, 2>> {
        self.normal(shape, self.std)
    }

    /// A weight matrix that projects into the residual stream.
    pub fn residual_weight(&self, shape: [usize; 2]) -> Param<Tensor<B, 2>> {
        self.normal(shape, self.residual_std)
    }

    /// A vector that repeats one value.
    pub fn constant(&self, len: usize, value: f32) -> Param<Tensor<B, 1>> {
        self.vector(len, || vec![value; len])
    }

    /// A vector of `len` given values.
    pub fn vector(&self, len: usize, values: impl FnOnce() -> Vec<f32>) -> Param<Tensor<B, 1>> {
        if self.blank {
            return self.zeros([len]);
        }
        Param::from_tensor(Tensor::from_data(TensorData::new(values(), [len]), self.device))
    }

    /// A vector of `len` elements with the initial values that an attention variant asks for.
    ///
    /// # Panics
    /// When the variant does not list `len` values.
    pub fn variant_vector(&self, len: usize, init: &attention::Init) -> Param<Tensor<B, 1>> {
        match init {
            attention::Init::Constant(value) => self.constant(len, *value),
            attention::Init::Values(values) => {
                assert_eq!(values.len(), len, "initial values of {}", self.path);
                self.vector(len, || values.clone())
            }
            attention::Init::Normal(std) => self.vector(len, || self.sample(len, *std)),
            drawn => self.vector(len, || self.uniform(len).map(|u| drawn.quantile(u)).collect()),
        }
    }

    /// A matrix, normal with the given standard deviation.
    pub fn normal(&self, shape: [usize; 2], std: f32) -> Param<Tensor<B, 2>> {
        if self.blank {
            return self.zeros(shape);
        }
        let values = self.sample(shape[0] * shape[1], std);
        Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), self.device))
    }

    /// One zero, repeated.
    fn zeros<const D: usize>(&self, shape: [usize; D]) -> Param<Tensor<B, D>> {
        Param::from_tensor(Tensor::<B, D>::zeros([1; D], self.device).expand(shape))
    }

    fn sample(&self, len: usize, std: f32) -> Vec<f32> {
        let normal = Normal::new(0.0, std).expect("a standard deviation of 0 or above");
        normal.sample_iter(self.rng()).take(len).collect()
    }

    /// `len` numbers, uniform in (0, 1].
    fn uniform(&self, len: usize) -> impl Iterator<Item = f32> {
        OpenClosed01.sample_iter(self.rng()).take(len)
    }

    /// The random stream of this path.
    fn rng(&self) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(fnv1a(&self.path));
        rng
    }
}

/// Initial μ of a token shift: 1 − (c / width)^e for each channel c of `width`. The exponent e is a
/// function of r = 1 − layer / layers, which falls from 1 towards 0 with depth (Peng et al., 2025,
/// released models).
pub(crate) fn token_shift(shape: &AttentionShape, exponent: impl Fn(f64) -> f64) -> Vec<f32> {
    let r = 1.0 - shape.layer as f64 / shape.layers as f64;
    let mu = |c| 1.0 - (c as f64 / shape.width as f64).powf(exponent(r));
    (0..shape.width).map(|c| mu(c) as f32).collect()
}

/// The FNV-1a hash, 64 bits: stable across platforms and versions.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
