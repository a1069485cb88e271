//! Kernels of [`Weights`] on queries and keys that are already prepared (rotated, normalised), against the
//! reference in f32 on the same values: without the roundings before scores, which some weights amplify.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Int, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::in_bf16::Roundings;
use crate::Cuda;
use crate::attention::ExecPath;
use crate::attention::rectified::l2_normalise;
use crate::attention::rowwise::{Rowwise, Weights, rowwise};
use crate::backend::{OpBackend, with_reference};
use crate::device::DeviceKind;

const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// One call: q, k, v, documents, the upstream gradient.
#[derive(Clone)]
pub struct PreparedCase<W> {
    op: Rowwise<W>,
    /// `[batch, heads, queries, head_dim]`
    q: TensorData,
    /// `[batch, kv_heads, keys, head_dim]`
    k: TensorData,
    v: TensorData,
    upstream: TensorData,
    /// `[batch, keys]`
    documents: Option<TensorData>,
    kinks: bool,
}

fn rounded(data: impl Iterator<Item = f32>, shape: &[usize]) -> TensorData {
    let data: Vec<f32> = data.map(|x| bf16::from_f32(x).to_f32()).collect();
    TensorData::new(data, shape.to_vec())
}

fn draw(shape: &[usize], size: f32, seed: u64) -> TensorData {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rounded((0..shape.iter().product()).map(|_| rng.random_range(-size..size)), shape)
}

fn units(shape: [usize; 4], seed: u64) -> TensorData {
    let x = Tensor::<Flex, 4>::from_data(draw(&shape, 1.0, seed), &Default::default());
    rounded(l2_normalise(x).into_data().iter::<f32>(), &shape)
}

fn values<B: OpBackend>(x: Tensor<B, 4>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

impl<W: Weights> PreparedCase<W> {
    /// Random unit vectors k, and q of the length that `length` gives for the position: scores are up to that
    /// size, and mostly within 2/√head_dim of it.
    pub fn new(
        weights: W,
        [queries, keys, head_dim]: [usize; 3],
        length: impl Fn(usize) -> f32,
    ) -> Self {
        let of_queries = [BATCH, HEADS, queries, head_dim];
        let of_keys = [BATCH, KV_HEADS, keys, head_dim];
        let position = |at: usize| keys - queries + at / head_dim % queries;
        let q = units(of_queries, 1);
        let q = q.iter::<f32>().enumerate().map(|(at, x)| x * length(position(at)));
        PreparedCase {
            op: Rowwise { weights, scale: 1.0, window: None },
            q: rounded(q, &of_queries),
            k: units(of_keys, 2),
            v: draw(&of_keys, 1.7, 3),
            upstream: draw(&of_queries, 1.0, 4),
            documents: None,
            kinks: false,
        }
    }

    /// With weights whose slope jumps, see [`Conformance::has_kinks`](super::Conformance::has_kinks).
    pub fn kinks(self, kinks: bool) -> Self {
        PreparedCase { kinks, ..self }
    }

    /// With a window.
    pub fn window(self, window: usize) -> Self {
        PreparedCase { op: Rowwise { window: Some(window), ..self.op }, ..self }
    }

    /// With two documents in the second row.
    pub fn packed(self) -> Self {
        let keys = self.k.shape[2];
        let starts = (0..BATCH * keys).map(|t| if t < keys + keys / 3 { 0 } else { keys / 3 });
        let starts: Vec<i32> = starts.map(|start| start as i32).collect();
        PreparedCase { documents: Some(TensorData::new(starts, [BATCH, keys])), ..self }
    }

    /// With keys that are all equal.
    pub fn equal_keys(self) -> Self {
        let shape = self.k.shape.to_vec();
        let key: Vec<f32> = self.k.iter::<f32>().take(shape[3]).collect();
        let count = shape.iter().product();
        let k = TensorData::new(key.into_iter().cycle().take(count).collect(), shape);
        PreparedCase { k, ..self }
    }

    /// With keys times a factor by position.
    pub fn scaled_keys(self, factor: impl Fn(usize) -> f32) -> Self {
        let shape = self.k.shape.to_vec();
        let position = |at: usize| at / shape[3] % shape[2];
        let k = self.k.iter::<f32>().enumerate().map(|(at, x)| x * factor(position(at)));
        PreparedCase { k: rounded(k, &shape), ..self }
    }

    fn attend<B: OpBackend>(&self, [q, k, v]: [Tensor<B, 4>; 3], path: ExecPath) -> Tensor<B, 4> {
        let device = q.device();
        let documents = self.documents.clone();
        let documents = documents.map(|starts| Tensor::<B, 2, Int>::from_data(starts, &device));
        rowwise(&self.op, q, k, v, None, documents, path)
    }

    /// The output, then the gradients of q, k and v.
    fn results<B: OpBackend>(&self, dtype: DType, path: ExecPath) -> [Vec<f64>; 4] {
        let device = Default::default();
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| {
            Tensor::<Autodiff<B>, 4>::from_data(x.clone(), &device).cast(dtype).require_grad()
        });
        let o = self.attend([q.clone(), k.clone(), v.clone()], path);
        let upstream = Tensor::from_data(self.upstream.clone(), &device);
        let grads = (o.clone().cast(DType::F32) * upstream).sum().backward();
        let [dq, dk, dv] = [q, k, v].map(|x| values(x.grad(&grads).expect("a gradient")));
        [values(o.inner()), dq, dk, dv]
    }

    /// The output and the gradients of the kernels.
    pub fn on_cuda(&self) -> [Vec<f64>; 4] {
        self.results::<Cuda>(DType::BF16, ExecPath::Kernel(DeviceKind::Cuda))
    }

    fn wanted(&self) -> [Vec<f64>; 4] {
        with_reference(|| self.results::<Flex>(DType::F32, ExecPath::Reference))
    }

    fn compare(&self, what: &str, got: &[f64], want: &[f64], count: u32, kinks: bool) {
        let what = format!("{:?}, q {:?}, k {:?}, {what}", self.op, self.q.shape, self.k.shape);
        let vector = self.q.shape[3];
        Roundings { count, least: 0.0, vector, kinks }.check(&what, got, want);
    }

    /// Compares output and gradients, which may have the error of so many roundings; equal bits in two runs.
    pub fn check(&self, roundings: u32) {
        let (got, want) = (self.on_cuda(), self.wanted());
        let names = ["the output", "dq", "dk", "dv"];
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            self.compare(names[at], got, want, roundings, self.kinks && at > 0);
        }
        assert_eq!(got, self.on_cuda(), "two runs differ");
    }

    /// Compares the output without gradients, which for one query is that of the decoding kernels.
    pub fn check_output(&self, roundings: u32) {
        let device = Default::default();
        let inputs = [&self.q, &self.k, &self.v]
            .map(|x| Tensor::<Cuda, 4>::from_data(x.clone(), &device).cast(DType::BF16));
        let o = self.attend(inputs, ExecPath::Kernel(DeviceKind::Cuda));
        self.compare("the output alone", &values(o), &self.wanted()[0], roundings, false);
    }
}
