//! The CPU kernel against recurrences in f64, over several levels of halves.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::numerics::{Sample, check_row};
use super::{dot, householder, uniform, values};
use crate::attention::ExecPath;
use crate::attention::path::op::{Path, PathInputs, path_attention};
use crate::attention::path::reference::Tokens;
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::testing::assert_budget;

const KERNEL: ExecPath = ExecPath::Kernel(DeviceKind::Cpu);

/// Two query heads on one key head, a window and the starts of documents.
pub(super) struct Case {
    pub what: &'static str,
    pub sample: Sample,
    pub window: Option<usize>,
    pub documents: &'static [usize],
}

impl Case {
    /// Without a window, in one document.
    pub fn new(what: &'static str, sample: Sample) -> Self {
        let gates: [&dyn Fn(usize) -> f32; 2] = [&|t| -0.01 * (t % 7) as f32, &|_| -1e-3];
        let mut sample = sample.gates(&gates);
        sample.q[1].reverse();
        Case { what, sample, window: None, documents: &[0] }
    }

    /// The start of each token's document.
    fn starts(&self) -> Vec<usize> {
        let start = |t| self.documents.iter().copied().filter(|&s| s <= t).max();
        (0..self.sample.len()).map(|t| start(t).expect("a document starts at 0")).collect()
    }

    /// The gradients of q, k, v, w, β and ℓ for this upstream gradient, with q, k and v of type `dtype`.
    pub fn gradients<B: OpBackend>(&self, upstream: &[f32], dtype: FloatDType) -> Vec<Vec<f64>> {
        let device = Default::default();
        let PathInputs { q, k, v, w, beta, log_decay } = self.sample.inputs(&device);
        let [q, k, v] = [q, k, v].map(|x| x.cast(dtype).require_grad());
        let [w, beta] = [w, beta].map(Tensor::require_grad);
        let log_decay = log_decay.map(Tensor::require_grad);
        let inputs: PathInputs<Autodiff<B>> = PathInputs { q, k, v, w, beta, log_decay };
        let starts: Vec<_> = self.starts().into_iter().map(|s| s as i64).collect();
        let data = TensorData::new(starts, [1, self.sample.len()]);
        let documents = Tensor::<Autodiff<B>, 2, Int>::from_data(data, &device);
        let op = Path { window: self.window, ..self.sample.op() };
        let path = ExecPath::Kernel(B::device_kind());
        let out = path_attention(&op, inputs.clone(), Some(documents), path);
        let data = TensorData::new(upstream.to_vec(), out.shape());
        let upstream = Tensor::<Autodiff<B>, 4>::from_data(data, &device).cast(dtype);
        let grads = (out * upstream).sum().backward();
        let PathInputs { q, k, v, w, beta, log_decay } = inputs;
        let of = |x: Tensor<Autodiff<B>, 4>| values(x.grad(&grads).expect("a gradient"));
        let decay = log_decay.expect("a gate").grad(&grads).expect("a gradient");
        [q, k, v, w, beta].map(of).into_iter().chain([values(decay)]).collect()
    }

    /// The same by taking each query through one transform after another, in f64.
    pub fn expected(&self, upstream: &[f32]) -> Vec<Vec<f64>> {
        let Tokens { q, k, v, w, beta, log_decay } = self.sample.tokens();
        let [q, k, v, w, beta] = [q, k, v, w, beta].map(values);
        let decay = values(log_decay.expect("a gate"));
        let (len, d, starts) = (self.sample.len(), self.sample.head_dim, self.starts());
        let row = |x: &[f64], t: usize| x[t * d..][..d].to_vec();
        let add = |dst: &mut [f64], t: usize, factor: f64, x: &[f64]| {
            dst[t * d..][..d].iter_mut().zip(x).for_each(|(dst, x)| *dst += factor * x);
        };
        let mut grads: Vec<_> =
            [&q, &k, &v, &w, &beta, &decay].map(|x| vec![0.0; x.len()]).into_iter().collect();
        for at in 0..2 * len {
            let (head, i) = (at / len, at % len);
            let first = starts[i].max(self.window.map_or(0, |w| (i + 1).saturating_sub(w)));
            // Entry n is the query before it meets the transform of token i − n.
            let (mut x, mut bias) = (row(&q, at), 0.0);
            let (mut met, mut scores) = (vec![], vec![]);
            for j in (first..=i).rev() {
                scores.push(dot(&x, &row(&k, j)) + bias);
                met.push(x.clone());
                householder(&mut x, &row(&w, j), beta[j]);
                bias += decay[head * len + j];
            }
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let weights: Vec<_> = scores.iter().map(|s| (s - max).exp() / total).collect();
            let grad: Vec<f64> = upstream[at * d..][..d].iter().map(|&x| f64::from(x)).collect();
            let of_weights: Vec<_> =
                (0..weights.len()).map(|n| dot(&grad, &row(&v, i - n))).collect();
            let mean = dot(&weights, &of_weights);
            // The gradient of the query after it met the transform of token j.
            let (mut g, mut later) = (vec![0.0; d], 0.0);
            for j in first..=i {
                let n = i - j;
                let ds = weights[n] * (of_weights[n] - mean);
                grads[5][head * len + j] += later;
                later += ds;
                let (wj, x) = (row(&w, j), &met[n]);
                let (wx, wg) = (dot(&wj, x), dot(&wj, &g));
                grads[4][j] -= wx * wg;
                add(&mut grads[3], j, -beta[j] * wx, &g);
                add(&mut grads[3], j, -beta[j] * wg, x);
                add(&mut grads[2], j, weights[n], &grad);
                add(&mut grads[1], j, ds, x);
                householder(&mut g, &wj, beta[j]);
                g.iter_mut().zip(row(&k, j)).for_each(|(g, k)| *g += ds * k);
            }
            add(&mut grads[0], at, f64::from(self.sample.op().scale), &g);
        }
        grads
    }

    fn check(&self) {
        let mut rng = ChaCha8Rng::seed_from_u64(8);
        let upstream = uniform(&mut rng, 2 * self.sample.len() * self.sample.head_dim);
        let got = self.gradients::<Flex>(&upstream, FloatDType::F32);
        let want = self.expected(&upstream);
        for (n, name) in ["q", "k", "v", "w", "beta", "log decay"].iter().enumerate() {
            let what = format!("{}, gradient of {name}", self.what);
            assert_budget(&what, &got[n], &got[n], &want[n]);
        }
    }
}

#[test]
fn gradients_agree_with_recurrences_across_levels() {
    for len in [129, 300, 577] {
        Case::new("random transforms", Sample::new(len, 8)).check();
    }
    Case::new("64 channels", Sample::new(260, 64)).check();
}

#[test]
fn gradients_of_extreme_transforms_agree_with_recurrences() {
    let sample = || Sample::new(400, 8);
    Case::new("reflections", sample().beta(|_| 2.0)).check();
    Case::new("projections", sample().beta(|_| 1.0)).check();
    Case::new("beta near 0", sample().beta(|_| 1e-6)).check();
    for beta in [0.5, 1.0, 2.0] {
        let sample = Sample::new(300, 8).one_direction().beta(|_| beta);
        Case::new("one direction", sample).check();
    }
}

#[test]
fn gradients_with_windows_and_documents_agree_with_recurrences() {
    for window in [None, Some(2), Some(70), Some(200)] {
        for documents in [&[0][..], &[0, 1, 100, 257, 399]] {
            let case = Case::new("masks", Sample::new(400, 8));
            Case { window, documents, ..case }.check();
        }
    }
}

#[test]
fn rows_of_many_levels_agree_with_their_recurrence() {
    let sample = |len| Sample::new(len, 8).gates(&[&|_| -1e-3]);
    for sample in [sample(4096), sample(4001).beta(|_| 2.0), sample(2048).one_direction()] {
        let inputs = sample.inputs::<Flex>(&Default::default());
        let out = path_attention(&sample.op(), inputs, None, KERNEL);
        let len = sample.len();
        for i in [0, 15, 16, 63, 64, 1023, 1024, 1500, len / 2, len - 1] {
            check_row("the kernel", &sample, &out, 0, i);
        }
    }
}
