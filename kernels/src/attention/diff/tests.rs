//! This variant's cases for the conformance suite, and what is special to it.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Distribution, Tensor};

use super::{Config, lambda_init};
use crate::Cuda;
use crate::attention::blocks::repeat_views;
use crate::attention::conformance::in_bf16::{agrees_at, decodes_at};
use crate::attention::conformance::rowwise::{dot, rms_norm, rows, softmax, weighted};
use crate::attention::conformance::{Conformance, rotated};
use crate::attention::rotary::Rotary;
use crate::attention::softmax::{self, Softmax};
use crate::attention::{AttentionShape, ExecPath};
use crate::backend::OpBackend;
use crate::device::DeviceKind;
use crate::ops::view_difference::lambda::Lambda;
use crate::testing::{Case, Tensor64, check, check_on};

impl Conformance for Config {
    fn cases() -> Vec<Self> {
        let config = Config::default();
        vec![config.clone(), Config { value_factor: 1, rotary: Rotary::new(false) }]
    }

    /// The widest heads only with `value_factor = 1`, whose case comes first.
    fn kernel_cases() -> Vec<Self> {
        Self::cases().into_iter().rev().collect()
    }

    /// Beside those of attention: both views, their difference, and the gradient of the norm's input. In
    /// emulation, the least accurate gradients have the error of six roundings.
    fn roundings(&self) -> u32 {
        9
    }

    /// As for `rela`: the norm's gradient is orthogonal to its input, so that errors are relative to the size
    /// of all gradients.
    fn vanished(&self) -> f64 {
        1.0
    }

    /// All are multiples of λ's gradient, Σ dO ⊙ O of the second view, which is nearly parallel to the norm's
    /// input.
    fn cancelling(&self) -> &'static [&'static str] {
        &["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]
    }

    /// Because a norm follows, the weight of a single key has no effect.
    fn oracle(
        &self,
        shape: &AttentionShape,
        inputs: &[Tensor64],
        documents: &[Vec<usize>],
    ) -> Tensor64 {
        let [q, k, v, vectors @ .., norm] = inputs else { panic!("q, k, v and 5 parameters") };
        let [q, k] = [q, k].map(|x| match self.rotary.rope {
            true => rotated(x, self.rotary.theta, shape.head_dim),
            false => x.clone(),
        });
        let inner = |a: &Tensor64, b: &Tensor64| {
            a.data.iter().zip(&b.data).map(|(a, b)| a * b).sum::<f64>()
        };
        let init = 0.8 - 0.6 * (-0.3 * shape.layer as f64).exp();
        let lambda =
            inner(&vectors[0], &vectors[1]).exp() - inner(&vectors[2], &vectors[3]).exp() + init;
        let root = (shape.head_dim as f64).sqrt();
        let o = weighted(shape, v, documents, |b, h, i, keys| {
            let map = |view| {
                let score = |j| dot(shape, [&q, &k], [view, b, h, i, j]) / root;
                softmax(&keys.clone().map(score).collect::<Vec<_>>())
            };
            map(0).iter().zip(map(1)).map(|(first, second)| first - lambda * second).collect()
        });
        rows(&o, |row| rms_norm(row, norm, 1e-5).iter().map(|x| x * (1.0 - init)).collect())
    }
}

#[test]
fn lambda_starts_as_the_paper_has_it() {
    for (layer, want) in [(0, 0.2), (1, 0.35551), (11, 0.77787)] {
        assert!((lambda_init(layer) - want).abs() < 1e-5, "layer {layer}: {}", lambda_init(layer));
    }
}

/// λ without λ_init by its definition.
fn exp_difference(vectors: &[Tensor64]) -> Tensor64 {
    let [q1, k1, q2, k2] = vectors else { panic!("4 vectors") };
    let dot = |a: &Tensor64, b: &Tensor64| a.data.iter().zip(&b.data).map(|(a, b)| a * b).sum();
    let [first, second]: [f64; 2] = [dot(q1, k1), dot(q2, k2)];
    Tensor64::new(&[1], vec![first.exp() - second.exp()])
}

/// Vectors of one element, and shorter and longer than a block of threads.
fn lambdas() -> impl Iterator<Item = Case<Lambda, 4>> {
    [1, 64, 300].into_iter().map(|len| {
        let vector: &[usize] = &[len];
        let case = Case::new(Lambda { init: 0.0 }, &[vector; 4]);
        (0..4).fold(case, |case, input| case.uniform(input, -0.4..0.4))
    })
}

#[test]
fn lambda_agrees_with_the_oracle_and_its_gradients() {
    lambdas().for_each(|case| check(case, exp_difference));
}

#[test]
#[ignore = "needs a GPU"]
fn lambda_on_cuda_agrees_with_the_oracle_and_its_gradients() {
    lambdas().for_each(|case| check_on::<Cuda, _, 4>(case, exp_difference));
}

/// Values that two views share, and their copies: output, and the gradients of q, k and v.
fn shared_and_copied<B: OpBackend>(
    [kv_heads, head_dim, value_dim]: [usize; 3],
    dtype: DType,
    path: ExecPath,
) -> [Vec<Vec<f32>>; 2] {
    let device = Default::default();
    let random = |heads, channels| {
        let shape = [2, 70, heads, channels];
        let x = Tensor::<Autodiff<B>, 4>::random(shape, Distribution::Default, &device);
        (x - 0.5).cast(dtype).swap_dims(1, 2)
    };
    let (q, k) = (random(4 * kv_heads, head_dim), random(2 * kv_heads, head_dim));
    let (v, upstream) = (random(kv_heads, value_dim), random(4 * kv_heads, value_dim));
    let op = Softmax::of(&AttentionShape::new(64, 4 * kv_heads, 2 * kv_heads, head_dim));
    [false, true].map(|copies| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.clone().detach().require_grad());
        let values = repeat_views(v.clone(), if copies { 2 } else { 1 });
        let o = softmax::softmax(&op, [q.clone(), k.clone(), values], None, None, path);
        let grads = (o.clone() * upstream.clone()).sum().backward();
        let gradients = [q, k, v].map(|x| x.grad(&grads).expect("a gradient"));
        let elements = |x: Tensor<B, 4>| x.into_data().iter::<f32>().collect();
        [o.inner()].into_iter().chain(gradients).map(elements).collect()
    })
}

#[test]
fn shared_values_give_what_their_copies_give() {
    for sizes in [[1, 8, 8], [2, 8, 16], [3, 16, 8]] {
        let [shared, copied] = shared_and_copied::<Flex>(sizes, DType::F32, ExecPath::Reference);
        for (at, (shared, copied)) in shared.iter().zip(&copied).enumerate() {
            assert_eq!(shared.len(), copied.len());
            let close = shared.iter().zip(copied).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "result {at} (output, then gradients) of {sizes:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn values_shared_on_cuda_give_what_their_copies_give() {
    let path = ExecPath::Kernel(DeviceKind::Cuda);
    // One backward kernel, and two.
    for sizes in [[1, 64, 64], [2, 64, 128], [2, 128, 256], [1, 192, 192]] {
        let [shared, copied] = shared_and_copied::<Cuda>(sizes, DType::BF16, path);
        // Of v, sums of bf16 in another type and order.
        let [dv, dv_of_copies] = [&shared[3], &copied[3]];
        assert!(shared[..3] == copied[..3], "output or gradient of q or k of {sizes:?}");
        let largest = dv_of_copies.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let worst = dv.iter().zip(dv_of_copies).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= largest / 128.0, "gradient of v of {sizes:?}: {worst} of {largest}");
    }
}

/// Values of twice the channels, beside those of the suite: rounded up to whole panels, and too wide for one
/// backward kernel.
#[test]
#[ignore = "needs a GPU"]
fn wide_values_agree_with_the_oracle() {
    let config = Config::default();
    for sizes in [[2, 1, 16, 1, 33], [2, 2, 80, 1, 129], [4, 2, 128, 2, 140], [2, 2, 128, 1, 257]] {
        for window in [None, Some(65)] {
            agrees_at::<Config, Cuda>(&config, sizes, window);
        }
    }
    for sizes in [[40, 2, 80, 1, 70], [2, 2, 128, 3, 700], [4, 1, 128, 2, 130]] {
        decodes_at::<Config, Cuda>(&config, sizes);
    }
}
