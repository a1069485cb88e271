//! The kernels of the chunked form against the attention form on the CPU.

use burn::backend::Autodiff;
use burn::tensor::{FloatDType, Int, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::power::{Config, Form};
use crate::attention::{AttentionShape, ExecPath, Inputs, Kernel, dispatch};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::{Cpu, Cuda};

/// A case's shapes, sizes and decays.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub tokens: usize,
    pub head_dim: usize,
    pub chunk: usize,
    /// The largest channel of q and k.
    pub size: f32,
    /// Logits of the gate, in turn; empty for none.
    pub logits: Vec<f32>,
    /// The tokens at which documents start.
    pub starts: Vec<usize>,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            batch: 1,
            heads: 2,
            kv_heads: 2,
            tokens: 640,
            head_dim: 64,
            chunk: 128,
            size: 1.5,
            logits: vec![5.0, 7.0, 4.0],
            starts: vec![],
        }
    }
}

/// Inputs of a case, in bf16: q, k, v and dO, and the gate's logits.
#[derive(Clone)]
pub(super) struct Numbers {
    pub heads: [Vec<f32>; 4],
    pub logits: Vec<f32>,
}

const NAMES: [&str; 5] = ["o", "dq", "dk", "dv", "the gate's gradient"];

impl Case {
    pub fn numbers(&self) -> Numbers {
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let mut random = |heads: usize, size: f32| {
            let count = self.batch * heads * self.tokens * self.head_dim;
            (0..count).map(|_| bf16::from_f32(rng.random_range(-size..size)).to_f32()).collect()
        };
        let heads = [
            random(self.heads, self.size),
            random(self.kv_heads, self.size),
            random(self.kv_heads, 1.0),
            random(self.heads, 1.0),
        ];
        let count = self.batch * self.tokens * self.kv_heads;
        let logits = self.logits.iter().cycle().copied().take(count).collect();
        Numbers { heads, logits }
    }

    pub fn config(&self, form: Form) -> Config {
        let chunk = Some(self.chunk);
        Config { rope: false, gate: !self.logits.is_empty(), form, chunk, ..Config::default() }
    }

    pub fn shape(&self) -> AttentionShape {
        let (heads, kv_heads, head_dim) = (self.heads, self.kv_heads, self.head_dim);
        AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim)
    }

    /// The start of each token's document.
    fn documents<B: OpBackend>(&self) -> Option<Tensor<B, 2, Int>> {
        let start = |t: usize| self.starts.iter().filter(|&&start| start <= t).max();
        let row: Vec<i32> =
            (0..self.tokens).map(|t| start(t).map_or(0, |&start| start as i32)).collect();
        let data = TensorData::new(row.repeat(self.batch), [self.batch, self.tokens]);
        (!self.starts.is_empty()).then(|| Tensor::from_data(data, &Default::default()))
    }

    /// q, k and v, and the gate's logits.
    pub fn inputs<B: OpBackend>(&self, numbers: &Numbers, dtype: FloatDType) -> Inputs<B> {
        let device = Default::default();
        let heads = [self.heads, self.kv_heads, self.kv_heads];
        let mut tensors = numbers.heads.iter().zip(heads).map(|(x, heads)| {
            let data = TensorData::new(x.clone(), [self.batch, heads, self.tokens, self.head_dim]);
            Tensor::<B, 4>::from_data(data, &device).cast(dtype)
        });
        let [q, k, v] = std::array::from_fn(|_| tensors.next().unwrap());
        let logits = (!self.logits.is_empty()).then(|| {
            let data =
                TensorData::new(numbers.logits.clone(), [self.batch, self.tokens, self.kv_heads]);
            Tensor::<B, 3>::from_data(data, &device).cast(dtype)
        });
        Inputs { q, k, v, projections: logits.into_iter().collect(), parameters: vec![] }
    }

    /// o, dq, dk, dv and, with a gate, the gradient of its logits.
    pub fn run<B: OpBackend>(
        &self,
        numbers: &Numbers,
        form: Form,
        dtype: FloatDType,
    ) -> Vec<Vec<f32>> {
        let Inputs { q, k, v, projections, .. } = self.inputs::<Autodiff<B>>(numbers, dtype);
        let [q, k, v] = [q, k, v].map(Tensor::require_grad);
        let logits = projections.into_iter().next().map(Tensor::require_grad);
        let data = TensorData::new(
            numbers.heads[3].clone(),
            [self.batch, self.heads, self.tokens, self.head_dim],
        );
        let dy = Tensor::<Autodiff<B>, 4>::from_data(data, &Default::default()).cast(dtype);
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: logits.clone().into_iter().collect(),
            parameters: vec![],
        };
        let config = self.config(form);
        let o = dispatch::attend(&config, &self.shape(), inputs, self.documents());
        let grads = (o.clone() * dy).sum().backward();
        let of = |x: Tensor<B, 4>| x.cast(FloatDType::F32).into_data().to_vec().unwrap();
        let [dq, dk, dv] = [q, k, v].map(|x| of(x.grad(&grads).expect("a gradient")));
        let d_logits = logits.map(|x| of(x.grad(&grads).expect("a gradient").unsqueeze_dim(0)));
        [of(o.inner()), dq, dk, dv].into_iter().chain(d_logits).collect()
    }

    /// Compares the kernels with the CPU: the root mean square error of each result may be `allowed` times its own,
    /// and two runs must agree bit for bit.
    fn check(&self, allowed: f64) {
        let path = ExecPath::of(
            &self.config(Form::Chunked),
            Kernel::CUDA_BF16,
            &self.shape(),
            self.batch,
            Some(self.tokens),
        );
        assert_eq!(path, ExecPath::Kernel(DeviceKind::Cuda), "{self:?}");
        self.compare(&self.numbers(), allowed);
    }

    /// [`Case::check`] for given numbers; returns the kernels' results.
    fn compare(&self, numbers: &Numbers, allowed: f64) -> Vec<Vec<f32>> {
        let want = self.run::<Cpu>(numbers, Form::Attention, FloatDType::F32);
        let [got, again] =
            [(); 2].map(|()| self.run::<Cuda>(numbers, Form::Chunked, FloatDType::BF16));
        for ((name, got), again) in NAMES.iter().zip(&got).zip(&again) {
            assert!(got == again, "{self:?}: {name} differs between two runs");
        }
        self.assert_close(&want, &got, allowed);
        got
    }

    pub fn assert_close(&self, want: &[Vec<f32>], got: &[Vec<f32>], allowed: f64) {
        for ((name, want), got) in NAMES.iter().zip(want).zip(got) {
            assert!(got.iter().all(|x| x.is_finite()), "{self:?}: {name} is not finite");
            let square = |x: f32| f64::from(x).powi(2);
            let off: f64 = want.iter().zip(got).map(|(want, got)| square(want - got)).sum();
            let all: f64 = want.iter().copied().map(square).sum();
            let error = if all == 0.0 { off.sqrt() } else { (off / all).sqrt() };
            assert!(error <= allowed, "{self:?}: {name} is off by {error}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn chunks_of_any_gate_and_size_agree_with_the_attention_form() {
    for size in [1e-2, 1.5, 1e4] {
        Case { size, ..Case::default() }.check(0.02);
    }
    for logits in [vec![], vec![-2.0], vec![9.0], vec![2.0, 8.0, 100.0, 6.0, -1.0]] {
        Case { logits, ..Case::default() }.check(0.02);
    }
    // Decays of e^−100 end what the state holds.
    let logits: Vec<f32> = (0..97).map(|t| if t == 50 { -100.0 } else { 9.0 }).collect();
    Case { kv_heads: 1, logits, ..Case::default() }.check(0.03);
}

#[test]
#[ignore = "needs a GPU"]
fn chunks_of_any_shape_agree_with_the_attention_form() {
    let default = Case::default;
    for case in [
        Case { tokens: 700, ..default() },
        Case { batch: 2, ..default() },
        Case { heads: 4, ..default() },
        Case { starts: vec![0, 200, 650], ..default() },
        Case { starts: vec![128, 384], logits: vec![], ..default() },
        Case { chunk: 256, tokens: 1300, ..default() },
        Case { chunk: 1024, tokens: 3080, heads: 1, kv_heads: 1, ..default() },
        Case { head_dim: 32, ..default() },
        Case { head_dim: 128, ..default() },
        // One chunk with a single token.
        Case { tokens: 257, ..default() },
        // Several slabs of one row in a block.
        Case { heads: 16, kv_heads: 16, tokens: 400, ..default() },
        Case { heads: 8, kv_heads: 8, tokens: 400, head_dim: 128, ..default() },
        Case { heads: 40, kv_heads: 40, tokens: 400, head_dim: 32, ..default() },
        // No chunk that reads a state.
        Case { tokens: 256, ..default() },
        Case { batch: 2, heads: 4, tokens: 700, starts: vec![0, 200, 650], ..default() },
        Case {
            batch: 2,
            heads: 6,
            head_dim: 128,
            tokens: 900,
            starts: vec![0, 333],
            chunk: 256,
            ..default()
        },
    ] {
        case.check(0.02);
    }
}

/// Keys of 0 in the whole first chunk, which is all that the third chunk's queries read of the state, and queries of 0
/// in the fourth one.
#[test]
#[ignore = "needs a GPU"]
fn queries_without_a_far_score_read_the_near_keys_alone() {
    for logits in [vec![], vec![6.9]] {
        let case = Case { tokens: 512, logits, ..Case::default() };
        let mut numbers = case.numbers();
        let token = |at: usize| at / case.head_dim % case.tokens;
        for (at, x) in numbers.heads[1].iter_mut().enumerate() {
            if token(at) < 128 {
                *x = 0.0;
            }
        }
        for (at, x) in numbers.heads[0].iter_mut().enumerate() {
            if token(at) >= 448 {
                *x = 0.0;
            }
        }
        case.compare(&numbers, 0.02);
    }
}

/// The first chunk's queries and keys are in one part of a rotated space, all others in the other part: what the third
/// chunk's queries would read from the state is rounding errors, and more than the short near keys have.
#[test]
#[ignore = "needs a GPU"]
fn queries_orthogonal_to_far_keys_read_none_of_them() {
    let case = Case { tokens: 384, ..Case::default() };
    let mut numbers = case.numbers();
    for (heads, length) in numbers.heads[..2].iter_mut().zip([1.0, 1.0 / 128.0]) {
        for (at, vector) in heads.chunks_mut(case.head_dim).enumerate() {
            let first = at % case.tokens < case.chunk;
            let (channels, length) = if first { (0..23, 1.0) } else { (23..64, length) };
            // Rows of a Hadamard matrix are orthogonal.
            let rotated = (0..case.head_dim).map(|i| {
                let sign =
                    |c: usize| if (i & c).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                let sum: f32 = channels.clone().map(|c| sign(c) * vector[c]).sum();
                bf16::from_f32(sum / 8.0 * length).to_f32()
            });
            let rotated: Vec<f32> = rotated.collect();
            vector.copy_from_slice(&rotated);
        }
    }
    let want = case.run::<Cpu>(&numbers, Form::Attention, FloatDType::F32);
    let got = case.run::<Cuda>(&numbers, Form::Chunked, FloatDType::BF16);
    case.assert_close(&want[..1], &got[..1], 0.02);
    assert!(got.iter().flatten().all(|x| x.is_finite()));
}

/// Some queries are so short that no square of their scores is a normal number.
#[test]
#[ignore = "needs a GPU"]
fn queries_of_tiny_scores_keep_gradients_finite() {
    let case = Case { tokens: 512, ..Case::default() };
    let mut numbers = case.numbers();
    for (at, x) in numbers.heads[0].iter_mut().enumerate() {
        if at / case.head_dim % 7 == 3 {
            *x = bf16::from_f32(*x * 1e-22).to_f32();
        }
    }
    let results = case.run::<Cuda>(&numbers, Form::Chunked, FloatDType::BF16);
    for (name, x) in NAMES.iter().zip(&results) {
        assert!(x.iter().all(|x| x.is_finite()), "{name} is not finite");
    }
    let most = results[0].iter().fold(0f32, |most, x| most.max(x.abs()));
    assert!(most <= 1.0, "o reaches {most} although no value does");
}

/// Against the attention form's kernels, as long as the models that it was made for read.
#[test]
#[ignore = "needs a GPU"]
fn both_forms_agree_at_the_length_of_65_536_tokens() {
    for logits in [vec![], vec![6.9, 9.0, 12.0]] {
        let case =
            Case { tokens: 65_536, chunk: 256, heads: 2, kv_heads: 1, logits, ..Case::default() };
        let numbers = case.numbers();
        let [want, got] = [Form::Attention, Form::Chunked]
            .map(|form| case.run::<Cuda>(&numbers, form, FloatDType::BF16));
        case.assert_close(&want, &got, 0.02);
    }
}
