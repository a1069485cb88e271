//! The CUDA kernels where the shared suites do not reach, and where they serve.

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::conformance::in_bf16;
use crate::attention::power::{Config, Form};
use crate::attention::{AttentionShape, ExecPath, Inputs, Kernel, dispatch};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::{Cpu, Cuda};

const HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const TOKENS: usize = 300;

/// q, k, v and dO, `[1, HEADS, TOKENS, HEAD_DIM]`, and gate logits `[1, TOKENS, HEADS]`, all in bf16.
#[derive(Clone)]
struct Case {
    heads: [Vec<f32>; 4],
    logits: Vec<f32>,
}

impl Case {
    /// Queries and keys of up to `size`; gate logits in turn from `logits`.
    fn new(size: f32, logits: &[f32]) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let heads = [size, size, 1.0, 1.0].map(|x| {
            let n = HEADS * TOKENS * HEAD_DIM;
            (0..n).map(|_| bf16::from_f32(rng.random_range(-x..x)).to_f32()).collect()
        });
        let logits = logits.iter().cycle().take(TOKENS * HEADS).copied().collect();
        Case { heads, logits }
    }

    /// o, dq, dk, dv and, with a gate, the gradient of the logits.
    fn run<B: OpBackend>(&self, config: &Config, dtype: FloatDType) -> Vec<Vec<f32>> {
        let device = Default::default();
        let heads = self.heads.each_ref().map(|x| {
            let data = TensorData::new(x.clone(), [1, HEADS, TOKENS, HEAD_DIM]);
            Tensor::<Autodiff<B>, 4>::from_data(data, &device).cast(dtype).require_grad()
        });
        let logits = TensorData::new(self.logits.clone(), [1, TOKENS, HEADS]);
        let logits =
            Tensor::<Autodiff<B>, 3>::from_data(logits, &device).cast(dtype).require_grad();
        let [q, k, v, dy] = heads;
        let inputs = Inputs {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            projections: config.gate.then(|| logits.clone()).into_iter().collect(),
            parameters: vec![],
        };
        let shape = AttentionShape::new(HEADS * HEAD_DIM, HEADS, HEADS, HEAD_DIM);
        let o = dispatch::attend(config, &shape, inputs, None);
        let grads = (o.clone() * dy).sum().backward();
        let of = |x: Tensor<B, 4>| x.cast(FloatDType::F32).into_data().to_vec().unwrap();
        let [dq, dk, dv] = [q, k, v].map(|x| of(x.grad(&grads).expect("a gradient")));
        let d_logits = logits.grad(&grads).map(|x| of(x.unsqueeze_dim(0)));
        [of(o.inner()), dq, dk, dv].into_iter().chain(d_logits).collect()
    }

    /// Compares the kernels with those of the CPU; the root mean square error may be `allowed` times the
    /// results' root mean square.
    fn check(&self, config: &Config, allowed: f64) {
        let want = self.run::<Cpu>(config, FloatDType::F32);
        let got = self.run::<Cuda>(config, FloatDType::BF16);
        for (name, (want, got)) in
            ["o", "dq", "dk", "dv", "the gate's gradient"].iter().zip(want.iter().zip(&got))
        {
            assert!(got.iter().all(|x| x.is_finite()), "{config:?}: {name} is not finite");
            let square = |x: f32| f64::from(x).powi(2);
            let off: f64 = want.iter().zip(got).map(|(want, got)| square(want - got)).sum();
            let all: f64 = want.iter().copied().map(square).sum();
            let error = (off / all).sqrt();
            assert!(error <= allowed, "{config:?}: {name} is off by {error}");
        }
    }
}

/// Without rotation, so that only results are rounded, and the weights in their products.
fn config(p: u32) -> Config {
    Config { p, rope: false, form: Form::Attention, ..Config::default() }
}

#[test]
#[ignore = "needs a GPU"]
fn scores_of_any_size_agree_with_the_cpu() {
    for p in [2, 4] {
        for size in [1e-6, 1e-2, 60.0, 1e4] {
            Case::new(size, &[5.0]).check(&config(p), 0.02);
        }
    }
}

/// Within a tile, decays reach e^−1,900, and e^1,900 from a masked key.
#[test]
#[ignore = "needs a GPU"]
fn strong_and_changing_gates_agree_with_the_cpu() {
    for p in [2, 4] {
        for logits in [&[-2.0][..], &[2.0, 8.0, 100.0, 6.0, -1.0]] {
            Case::new(1.7, logits).check(&config(p), 0.03);
        }
        // Decays of e^−100 leave nothing of other keys, even where the own key's score is 10⁻⁴ of theirs.
        let closed = Case::new(1.7, &[-100.0]);
        let results = closed.run::<Cuda>(&config(p), FloatDType::BF16);
        // Every query sees its own key alone.
        assert_eq!(results[0], closed.heads[2], "with p = {p}");
        assert!(results.iter().flatten().all(|x| x.is_finite()), "with p = {p}");
    }
}

/// Queries whose scores are all 0: keys of 0 up to token 150, and queries of 0 from 200 to 260.
#[test]
#[ignore = "needs a GPU"]
fn queries_without_a_score_get_nothing_and_pass_no_gradient() {
    for (p, gate) in [(2, true), (2, false), (4, true)] {
        let mut case = Case::new(1.7, &[6.9]);
        for (at, x) in case.heads[1].iter_mut().enumerate() {
            if at / HEAD_DIM % TOKENS < 150 {
                *x = 0.0;
            }
        }
        for (at, x) in case.heads[0].iter_mut().enumerate() {
            if (200..260).contains(&(at / HEAD_DIM % TOKENS)) {
                *x = 0.0;
            }
        }
        let nothing = |t: usize| t < 150 || (200..260).contains(&t);
        let results = case.run::<Cuda>(&Config { gate, ..config(p) }, FloatDType::BF16);
        assert!(results.iter().flatten().all(|x| x.is_finite()));
        let rows = results[0].chunks(HEAD_DIM).zip(results[1].chunks(HEAD_DIM));
        for (row, (o, dq)) in rows.enumerate() {
            let zero = |x: &[f32]| x.iter().all(|&x| x == 0.0);
            assert_eq!(zero(o), nothing(row % TOKENS), "p = {p}, row {row}: {o:?}");
            assert!(zero(dq) || !nothing(row % TOKENS), "p = {p}, row {row}: {dq:?}");
        }
    }
}

/// Inside a piece and between single tokens. Without kernels, the cache turns into the reference's state.
#[test]
#[ignore = "needs a GPU"]
fn decoding_goes_on_in_the_chunked_form() {
    for gate in [true, false] {
        let config = Config { gate, switch_len: Some(90), chunk: Some(16), ..Config::default() };
        in_bf16::decodes_at::<Config, Cuda>(&config, [4, 2, 64, 2, 120]);
        in_bf16::decodes_at::<Config, Cuda>(&config, [4, 2, 64, 2, 93]);
        let config = Config { switch_len: Some(270), chunk: Some(128), ..config };
        in_bf16::decodes_at::<Config, Cuda>(&config, [4, 2, 64, 2, 300]);
        in_bf16::decodes_at::<Config, Cuda>(&config, [4, 2, 64, 2, 273]);
    }
}

#[test]
fn the_kernels_serve_the_attention_form_and_large_chunks_of_squares() {
    let shape = AttentionShape::new(128, 2, 2, 64);
    let windowed = AttentionShape { window: Some(100), ..shape };
    let narrow = AttentionShape::new(96, 2, 2, 48);
    let kernel = ExecPath::Kernel(DeviceKind::Cuda);
    let auto = Config { switch_len: Some(1000), ..Config::default() };
    let form = |form| Config { form, ..Config::default() };
    for (config, shape, seq_len, want) in [
        (auto.clone(), shape, Some(1000), kernel),
        (auto.clone(), shape, Some(1001), kernel),
        (auto.clone(), narrow, Some(1000), kernel),
        (auto.clone(), narrow, Some(1001), ExecPath::Reference),
        (Config { p: 4, ..auto.clone() }, shape, Some(1001), ExecPath::Reference),
        (Config { chunk: Some(192), ..auto.clone() }, shape, Some(1001), ExecPath::Reference),
        (auto.clone(), shape, None, kernel),
        (auto, windowed, Some(100_000), kernel),
        (form(Form::Attention), shape, Some(100_000), kernel),
        (form(Form::Chunked), shape, Some(10), kernel),
        (form(Form::Chunked), shape, None, kernel),
        (form(Form::Chunked), narrow, None, ExecPath::Reference),
        (Config { chunk: Some(192), ..form(Form::Chunked) }, shape, None, ExecPath::Reference),
        (Config { p: 4, ..form(Form::Chunked) }, shape, None, ExecPath::Reference),
    ] {
        let found = ExecPath::of(&config, Kernel::CUDA_BF16, &shape, 1, seq_len);
        assert_eq!(found, want, "{config:?}, {seq_len:?}");
        let on_cpu = ExecPath::of(&config, Kernel::CPU_F32, &shape, 1, seq_len);
        assert_eq!(on_cpu, ExecPath::Kernel(DeviceKind::Cpu), "{config:?}, {seq_len:?}");
        let in_f32 = Kernel { device: DeviceKind::Cuda, dtype: DType::F32 };
        let found = ExecPath::of(&config, in_f32, &shape, 1, seq_len);
        assert_eq!(found, ExecPath::Reference, "{config:?}, {seq_len:?}");
    }
}
