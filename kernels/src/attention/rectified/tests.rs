//! The kernels on CUDA against the reference in f32 on the CPU, without the norms that follow in the variants:
//! after a norm, the gradients of thresholds nearly cancel. The reference is compared with autodiff in
//! `rowwise::tests`, and with oracles in the variants' suites.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Int, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Rectified, l2_normalise};
use crate::Cuda;
use crate::attention::ExecPath;
use crate::attention::conformance::in_bf16::Roundings;
use crate::attention::rowwise::{Rowwise, rowwise};
use crate::backend::{OpBackend, with_reference};
use crate::device::DeviceKind;

/// Of the weights or their slopes, the result, and the upstream gradient, with two to spare as in the
/// variants' suites.
const ROUNDINGS: u32 = 5;

/// One call: unit vectors q and k, values, thresholds, documents, the upstream gradient.
#[derive(Clone)]
struct RectifiedCase {
    op: Rowwise<Rectified>,
    /// `[batch, heads, queries, head_dim]`
    q: TensorData,
    /// `[batch, kv_heads, keys, head_dim]`
    k: TensorData,
    v: TensorData,
    upstream: TensorData,
    /// `[batch or 1, queries]`
    offsets: Option<TensorData>,
    /// `[batch, keys]`
    documents: Option<TensorData>,
}

const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

fn draw(shape: &[usize], range: std::ops::Range<f32>, seed: u64) -> TensorData {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || bf16::from_f32(rng.random_range(range.clone())).to_f32();
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| one()).collect();
    TensorData::new(data, shape.to_vec())
}

/// Random unit vectors, rounded to bf16.
fn units(shape: [usize; 4], seed: u64) -> TensorData {
    let x = Tensor::<Flex, 4>::from_data(draw(&shape, -1.0..1.0, seed), &Default::default());
    let units = l2_normalise(x).into_data();
    let rounded = units.iter::<f32>().map(|x| bf16::from_f32(x).to_f32());
    TensorData::new(rounded.collect::<Vec<f32>>(), shape)
}

impl RectifiedCase {
    /// Thresholds are drawn from `range`; scores are about ±1/√head_dim.
    fn new(power: u32, [queries, keys, head_dim]: [usize; 3], range: std::ops::Range<f32>) -> Self {
        let (of_queries, of_keys) =
            ([BATCH, HEADS, queries, head_dim], [BATCH, KV_HEADS, keys, head_dim]);
        RectifiedCase {
            op: Rowwise { weights: Rectified { power }, scale: 1.0, window: None },
            q: units(of_queries, 1),
            k: units(of_keys, 2),
            v: draw(&of_keys, -1.7..1.7, 3),
            upstream: draw(&of_queries, -1.0..1.0, 4),
            offsets: Some(draw(&[1, queries], range, 5)),
            documents: None,
        }
    }

    /// Two documents in the second row, a window, and thresholds for each row.
    fn packed(self, window: usize) -> Self {
        let [keys, queries] = [self.k.shape[2], self.q.shape[2]];
        let starts = (0..BATCH * keys).map(|t| if t < keys + keys / 3 { 0 } else { keys / 3 });
        let starts: Vec<i32> = starts.map(|start| start as i32).collect();
        RectifiedCase {
            op: Rowwise { window: Some(window), ..self.op },
            documents: Some(TensorData::new(starts, [BATCH, keys])),
            offsets: Some(draw(&[BATCH, queries], -0.1..0.1, 6)),
            ..self
        }
    }

    fn attend<B: OpBackend>(
        &self,
        [q, k, v]: [Tensor<B, 4>; 3],
        offsets: Option<Tensor<B, 2>>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let device = q.device();
        let documents = self.documents.clone();
        let documents = documents.map(|starts| Tensor::<B, 2, Int>::from_data(starts, &device));
        rowwise(&self.op, q, k, v, offsets, documents, path)
    }

    /// The output, then the gradients of q, k, v and the offsets.
    fn results<B: OpBackend>(&self, dtype: DType, path: ExecPath) -> Vec<Vec<f64>> {
        let device = Default::default();
        let leaf = |x: &TensorData| {
            Tensor::<Autodiff<B>, 4>::from_data(x.clone(), &device).cast(dtype).require_grad()
        };
        let [q, k, v] = [&self.q, &self.k, &self.v].map(leaf);
        let offsets = self.offsets.clone();
        let offsets = offsets.map(|x| Tensor::<Autodiff<B>, 2>::from_data(x, &device));
        let offsets = offsets.map(Tensor::require_grad);
        let o = self.attend([q.clone(), k.clone(), v.clone()], offsets.clone(), path);
        let upstream = Tensor::from_data(self.upstream.clone(), &device);
        let grads = (o.clone().cast(DType::F32) * upstream).sum().backward();
        let mut all = vec![values(o.inner())];
        all.extend([q, k, v].map(|x| values(x.grad(&grads).expect("a gradient"))));
        all.extend(offsets.map(|x| values(x.grad(&grads).expect("a gradient"))));
        all
    }

    fn on_cuda(&self) -> Vec<Vec<f64>> {
        self.results::<Cuda>(DType::BF16, ExecPath::Kernel(DeviceKind::Cuda))
    }

    fn wanted(&self) -> Vec<Vec<f64>> {
        with_reference(|| self.results::<Flex>(DType::F32, ExecPath::Reference))
    }

    /// Compares output and gradients.
    fn check(&self) {
        let (got, want) = (self.on_cuda(), self.wanted());
        assert_eq!(got.len(), want.len());
        let head_dim = self.q.shape[3];
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let what = format!(
                "{:?}, q {:?}, k {:?}, result {at} (output, then gradients)",
                self.op, self.q.shape, self.k.shape
            );
            let vector = if at == 4 { 1 } else { head_dim };
            let budget = Roundings { count: ROUNDINGS, least: 0.0, vector, kinks: false };
            budget.check(&what, got, want);
        }
        assert_eq!(got, self.on_cuda(), "two runs differ");
    }
}

fn values<B: OpBackend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
#[ignore = "needs a GPU"]
fn outputs_and_gradients_of_thresholds_agree_with_the_reference() {
    for power in [1, 2, 3, 4, 16] {
        RectifiedCase::new(power, [200, 200, 64], -0.1..0.1).check();
    }
    // Other tiles, separate kernels of dq and of dk and dv, fewer queries than keys.
    for sizes in [[140, 140, 128], [100, 100, 256], [70, 200, 64], [1, 90, 64]] {
        RectifiedCase::new(2, sizes, -0.1..0.1).check();
    }
    for power in [1, 2] {
        RectifiedCase::new(power, [200, 200, 64], -0.1..0.1).packed(90).check();
        let plain = RectifiedCase::new(power, [200, 200, 64], 0.0..0.1);
        RectifiedCase { offsets: None, ..plain }.check();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn thresholds_below_every_score_agree_with_the_reference() {
    for power in [1, 2, 4] {
        RectifiedCase::new(power, [200, 200, 64], -1.5..-1.2).check();
    }
}

/// Rows whose threshold is above every score give 0 exactly, and so do their gradients.
#[test]
#[ignore = "needs a GPU"]
fn rows_without_a_survivor_are_zero() {
    for (power, head_dim) in [(1, 64), (2, 64), (2, 256)] {
        let queries = 130;
        let mut case = RectifiedCase::new(power, [queries, queries, head_dim], -0.1..0.1);
        // Whole tiles, and single rows.
        let dead = |query: usize| query >= 64 || query.is_multiple_of(3);
        let offsets = (0..queries).map(|query| if dead(query) { 1.2f32 } else { 0.05 });
        case.offsets = Some(TensorData::new(offsets.collect::<Vec<_>>(), [1, queries]));
        case.check();
        let [o, dq, _, _, d_offsets] = &case.on_cuda()[..] else { panic!("5 results") };
        for x in [o, dq] {
            for (row, x) in x.chunks_exact(head_dim).enumerate() {
                let zero = x.iter().all(|&x| x == 0.0);
                assert!(zero || !dead(row % queries), "row {row}: {x:?}");
            }
        }
        let mut of_dead = d_offsets.iter().enumerate().filter(|(query, _)| dead(*query));
        assert!(of_dead.all(|(_, &x)| x == 0.0), "{d_offsets:?}");
    }
}

/// One query without gradients, which the decoding kernel serves, over short and over split caches.
#[test]
#[ignore = "needs a GPU"]
fn decoding_subtracts_the_thresholds() {
    for (power, keys, head_dim) in [(1, 90, 64), (2, 700, 64), (2, 3000, 128), (4, 300, 256)] {
        for window in [None, Some(70)] {
            let mut case = RectifiedCase::new(power, [1, keys, head_dim], 0.02..0.04);
            case.op.window = window;
            let device = Default::default();
            let tensor =
                |x: &TensorData| Tensor::<Cuda, 4>::from_data(x.clone(), &device).cast(DType::BF16);
            let inputs = [&case.q, &case.k, &case.v].map(tensor);
            let offsets = case.offsets.clone().map(|x| Tensor::<Cuda, 2>::from_data(x, &device));
            let o = case.attend(inputs, offsets, ExecPath::Kernel(DeviceKind::Cuda));
            let budget = Roundings { count: ROUNDINGS, least: 0.0, vector: head_dim, kinks: false };
            let what = format!("{:?}, {keys} keys of {head_dim} channels", case.op);
            budget.check(&what, &values(o), &case.wanted()[0]);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_nan_in_a_threshold_shows() {
    let mut case = RectifiedCase::new(2, [100, 100, 64], -0.1..0.1);
    let mut offsets = vec![0.0f32; 100];
    offsets[70] = f32::NAN;
    case.offsets = Some(TensorData::new(offsets, [1, 100]));
    let o = &case.on_cuda()[0];
    assert!(o[70 * 64..71 * 64].iter().all(|x| x.is_nan()));
    assert!(o[..70 * 64].iter().all(|x| x.is_finite()));
}
