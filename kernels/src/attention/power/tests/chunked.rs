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

/// Of a case: shapes, sizes and decays.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    head_dim: usize,
    chunk: usize,
    /// The largest channel of q and k.
    size: f32,
    /// Logits of the gate, in turn; empty for none.
    logits: Vec<f32>,
    /// The tokens at which documents start.
    starts: Vec<usize>,
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
struct Numbers {
    heads: [Vec<f32>; 4],
    logits: Vec<f32>,
}

const NAMES: [&str; 5] = ["o", "dq", "dk", "dv", "the gate's gradient"];

impl Case {
    fn numbers(&self) -> Numbers {
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

    fn config(&self, form: Form) -> Config {
        let chunk = Some(self.chunk);
        Config { rope: false, gate: !self.logits.is_empty(), form, chunk, ..Config::default() }
    }

    fn shape(&self) -> AttentionShape {
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

    /// o, dq, dk, dv and, with a gate, the gradient of its logits.
    fn run<B: OpBackend>(&self, numbers: &Numbers, form: Form, dtype: FloatDType) -> Vec<Vec<f32>>
    {
        let device = Default::default();
        let heads = [self.heads, self.kv_heads, self.kv_heads, self.heads];
        let mut tensors = numbers.heads.iter().zip(heads).map(|(x, heads)| {
            let data =
                TensorData::new(x.clone(), [self.batch, heads, self.tokens, self.head_dim]);
            Tensor::<Autodiff<B>, 4>::from_data(data, &device).cast(dtype).require_grad()
        });
        let [q, k, v, dy] = std::array::from_fn(|_| tensors.next().unwrap());
        let config = self.config(form);
        let logits = config.gate.then(|| {
            let data = TensorData::new(
                numbers.logits.clone(),
                [self.batch, self.tokens, self.kv_heads],
            );
            Tensor::<Autodiff<B>, 3>::from_data(data, &device).cast(dtype).require_grad()
        });
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: logits.clone().into_iter().collect(),
            parameters: vec![],
        };
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
        let numbers = self.numbers();
        let want = self.run::<Cpu>(&numbers, Form::Attention, FloatDType::F32);
        let got = self.run::<Cuda>(&numbers, Form::Chunked, FloatDType::BF16);
        let again = self.run::<Cuda>(&numbers, Form::Chunked, FloatDType::BF16);
        for (((name, want), got), again) in NAMES.iter().zip(&want).zip(&got).zip(&again) {
            assert!(got.iter().all(|x| x.is_finite()), "{self:?}: {name} is not finite");
            let square = |x: f32| f64::from(x).powi(2);
            let off: f64 = want.iter().zip(got).map(|(want, got)| square(want - got)).sum();
            let all: f64 = want.iter().copied().map(square).sum();
            let error = if all == 0.0 { off.sqrt() } else { (off / all).sqrt() };
            println!("{self:?}: {name} is off by {error:.5}");
            if std::env::var("DEBUG_CHUNKS").is_ok() {
                let d = if name.starts_with("the") { self.kv_heads } else { self.head_dim };
                for (n, (w, g)) in want.chunks(64 * d).zip(got.chunks(64 * d)).enumerate() {
                    let off: f64 = w.iter().zip(g).map(|(w, g)| square(w - g)).sum();
                    let all: f64 = w.iter().copied().map(square).sum();
                    let dot: f64 = w.iter().zip(g).map(|(w, g)| f64::from(w * g)).sum();
                    println!("  {name} {n}: {:.4} slope {:.4}", (off / all).sqrt(), dot / all);
                }
                continue;
            }
            assert!(error <= allowed, "{self:?}: {name} is off by {error}");
            assert!(got == again, "{self:?}: {name} differs between two runs");
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

#[test]
#[ignore = "needs a GPU"]
fn a_small_case_for_the_emulator() {
    Case { heads: 1, kv_heads: 1, tokens: 400, ..Case::default() }.check(0.02);
}

#[test]
#[ignore = "needs a GPU"]
fn zz_profile() {
    for (head_dim, heads, batch) in [(64, 16, 1), (32, 4, 8), (128, 16, 1)] {
        let chunk = [128, 256, 512][head_dim / 64];
        let case = Case { batch, heads, kv_heads: heads, tokens: 65536, head_dim, chunk, ..Case::default() };
        use burn::tensor::Distribution;
        let device = Default::default();
        let r = || Tensor::<Autodiff<Cuda>, 4>::random([batch, heads, 65536, head_dim], Distribution::Normal(0.0, 1.0), &device).cast(FloatDType::BF16).require_grad();
        let [q, k, v, dy] = [r(), r(), r(), r()];
        let logits = Tensor::<Autodiff<Cuda>, 3>::random([batch, 65536, heads], Distribution::Normal(6.9, 1.0), &device).cast(FloatDType::BF16).require_grad();
        let inputs = Inputs { q, k, v, projections: vec![logits.clone()], parameters: vec![] };
        let o = dispatch::attend(&case.config(Form::Chunked), &case.shape(), inputs, None);
        let grads = (o.clone() * dy).sum().backward();
        let x: f32 = logits.grad(&grads).unwrap().cast(FloatDType::F32).sum().into_scalar();
        println!("DONE {x}");
    }
}
