//! The CUDA kernels where the shared suites do not reach.

use burn::backend::Autodiff;
use burn::tensor::{FloatDType, Tensor, TensorData, bf16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::normalised;
use crate::attention::linear::{Config, Gate};
use crate::attention::{AttentionShape, Inputs, dispatch};
use crate::backend::OpBackend;
use crate::{Cpu, Cuda};

const HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const TOKENS: usize = 1000;

/// q `[1, HEADS, TOKENS, HEAD_DIM]`, k and v of one head, and dO, all in bf16.
fn problem(part: f32) -> [Vec<f32>; 4] {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    [(HEADS, 0.0), (1, 0.0), (1, part), (HEADS, 0.0)].map(|(heads, part)| {
        let mut number = || part + rng.random_range(-1.0..1.0);
        (0..heads * TOKENS * HEAD_DIM).map(|_| bf16::from_f32(number()).to_f32()).collect()
    })
}

/// o, dq, dk and dv.
fn run<B: OpBackend>(config: &Config, problem: &[Vec<f32>; 4], dtype: FloatDType) -> [Vec<f32>; 4] {
    let device = Default::default();
    let [q, k, v, d_o] = problem.each_ref().map(|x| {
        let heads = x.len() / TOKENS / HEAD_DIM;
        let data = TensorData::new(x.clone(), [1, heads, TOKENS, HEAD_DIM]);
        Tensor::<Autodiff<B>, 4>::from_data(data, &device).cast(dtype).require_grad()
    });
    let (projections, parameters) = (vec![], vec![]);
    let inputs = Inputs { q: q.clone(), k: k.clone(), v: v.clone(), projections, parameters };
    let shape = AttentionShape::new(HEADS * HEAD_DIM, HEADS, 1, HEAD_DIM);
    let o = dispatch::attend(config, &shape, inputs, None);
    let grads = (o.clone() * d_o).sum().backward();
    let of = |x: Tensor<B, 4>| x.cast(FloatDType::F32).into_data().to_vec().unwrap();
    let [d_q, d_k, d_v] = [q, k, v].map(|x| of(x.grad(&grads).expect("a gradient")));
    [of(o.inner()), d_q, d_k, d_v]
}

/// The gradient of a weight is what its value adds to the output less what all do: little where values are alike.
#[test]
#[ignore = "needs a GPU"]
fn values_with_a_common_part_leave_gradients_of_weights() {
    let config = Config { gate: Gate::None, ..normalised() };
    for part in [0.0, 2.0] {
        let problem = problem(part);
        let want = run::<Cpu>(&config, &problem, FloatDType::F32);
        let got = run::<Cuda>(&config, &problem, FloatDType::BF16);
        for (name, (want, got)) in ["o", "dq", "dk", "dv"].iter().zip(want.iter().zip(&got)) {
            let square = |x: f32| f64::from(x).powi(2);
            let off: f64 = want.iter().zip(got).map(|(want, got)| square(want - got)).sum();
            let size: f64 = want.iter().map(|&x| square(x)).sum();
            let error = (off / size).sqrt();
            assert!(error <= 0.01, "values around {part}: {name} is off by {error:.2e}");
        }
    }
}
