//! The CUDA kernels with queries after cached keys, and with packed documents.

use burn::backend::Autodiff;
use burn::tensor::{Distribution, FloatDType, Int, Tensor, TensorData, bf16};

use super::super::op::forgetting;
use super::of_layer;
use crate::attention::{AttentionShape, ExecPath};
use crate::backend::OpBackend;
use crate::{Cpu, Cuda};

/// Random numbers that bf16 represents exactly.
fn numbers(dims: [usize; 4]) -> TensorData {
    let normal = Distribution::Normal(0.0, 1.0);
    let numbers = Tensor::<Cpu, 4>::random(dims, normal, &Default::default());
    let numbers = numbers.into_data().iter::<f32>().map(|x| bf16::from_f32(x).to_f32()).collect();
    TensorData::new::<f32, _>(numbers, dims)
}

/// o, dq, dk and dv from q, k, v and dO, with 4 query heads and 2 kv heads.
fn results<B: OpBackend>(
    inputs: &[TensorData; 4],
    documents: bool,
    dtype: FloatDType,
    device: &B::Device,
) -> [Vec<f32>; 4] {
    let [q, k, v, dy] = inputs
        .clone()
        .map(|data| Tensor::<Autodiff<B>, 4>::from_data(data, device).cast(dtype).require_grad());
    let [batch, heads, _, head_dim] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let log_decay = Tensor::full([batch, heads, keys], -0.02, device);
    let starts: Vec<i32> = (0..batch * keys).map(|i| (i % keys / 77 * 77) as i32).collect();
    let starts = TensorData::new(starts, [batch, keys]);
    let starts = documents.then(|| Tensor::<Autodiff<B>, 2, Int>::from_data(starts, device));
    let path = ExecPath::Kernel(B::device_kind());
    let op = of_layer(&AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim));
    let o = forgetting(&op, [q.clone(), k.clone(), v.clone()], log_decay, None, starts, path);
    let grads = (o.clone() * dy).sum().backward();
    let [dq, dk, dv] = [q, k, v].map(|x| x.grad(&grads).expect("a gradient"));
    [o.inner(), dq, dk, dv].map(|x| x.cast(FloatDType::F32).into_data().to_vec().unwrap())
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_serves_queries_after_a_cache_and_documents_in_wide_heads() {
    for ([before, queries], documents) in [([33, 70], false), ([64, 70], false), ([0, 200], true)] {
        let sizes = [before, queries];
        let (q, k) = ([2, 4, queries, 128], [2, 2, before + queries, 128]);
        let inputs = [q, k, k, q].map(numbers);
        let want = results::<Cpu>(&inputs, documents, FloatDType::F32, &Default::default());
        let got = results::<Cuda>(&inputs, documents, FloatDType::BF16, &Default::default());
        for (name, (want, got)) in ["o", "dq", "dk", "dv"].iter().zip(want.iter().zip(&got)) {
            let square = |x: f32| f64::from(x).powi(2);
            let off: f64 = want.iter().zip(got).map(|(want, got)| square(want - got)).sum();
            let all: f64 = want.iter().copied().map(square).sum();
            let error = (off / all).sqrt();
            assert!(error < 0.005, "{name} of {sizes:?}, {documents}: off by {error}");
        }
    }
}
