//! The softmax core that several variants share:
//!
//! S_ij = cap(scale · q_iᵀk_j) + Σ_{s=j+1..i} ℓ_s, o_i = Σ_j softmax_j(S_ij) v_j,
//!
//! over the keys j ≤ i inside the window and the document of i. ℓ is a decay per step (a learned
//! gate, or ALiBi's slope), cap(x) = c·tanh(x/c).

mod cpu;
#[allow(clippy::manual_is_multiple_of)] // Device code, where cubecl has no `is_multiple_of`.
pub(super) mod cuda;
mod prune;
mod reference;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

pub use self::prune::share_left_out;
use super::{AttentionShape, DocumentStarts};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The core's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Softmax {
    /// Factor on q·k, usually 1/√head_dim.
    pub scale: f32,
    /// With c, scores are c·tanh(score/c).
    pub softcap: Option<f32>,
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
    /// ALiBi's slope of each query head, empty for none.
    pub slopes: Vec<f32>,
    /// Leave out keys that a decay ℓ has made so small that all of a row together weigh no more than
    /// [`PRUNED`] of it; without softcap.
    pub prune: bool,
}

/// The share of a row's weight that pruning may leave out.
pub const PRUNED: f32 = 1.0 / (1 << 24) as f32;

impl Softmax {
    /// Of a layer, without further options.
    pub fn of(shape: &AttentionShape) -> Self {
        let (scale, window) = (shape.scale(), shape.window);
        Softmax { scale, softcap: None, window, slopes: vec![], prune: false }
    }
}

/// The core.
///
/// - `q`: `[batch, heads, queries, head_dim]`
/// - `k`, `v`: `[batch, kv_heads, keys, head_dim]`, `kv_heads` divides `heads`, `keys ≥ queries`:
///   query i stands at position keys − queries + i
/// - `log_decay`: ℓ ≤ 0, natural logarithm, `[batch, heads, keys]`
/// - `documents`: `[batch, keys]`
///
/// Returns `[batch, heads, queries, head_dim]`.
///
/// # Panics
/// When the shapes do not fit.
pub fn softmax<B: OpBackend>(
    op: &Softmax,
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    log_decay: Option<Tensor<B, 3>>,
    documents: DocumentStarts<B>,
) -> Tensor<B, 4> {
    let [[batch, heads, queries, head_dim], [_, kv_heads, keys, _]] = [q.dims(), k.dims()];
    assert_eq!(k.dims(), v.dims(), "shapes of k and v");
    assert_eq!(k.dims(), [batch, kv_heads, keys, head_dim], "shape of k for q {:?}", q.dims());
    assert!(heads % kv_heads == 0, "{kv_heads} kv_heads must divide {heads} heads");
    assert!(keys >= queries, "{queries} queries but only {keys} keys");
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let (q, k, v) = (primitive(q), primitive(k), primitive(v));
    tensor(match log_decay {
        None => B::run(op, [q, k, v], ints),
        Some(log_decay) => B::run(op, [q, k, v, primitive(log_decay)], ints),
    })
}

/// Whether the CUDA kernels serve q, k and v of type `dtype` with `batch_heads` = batch · heads.
/// Elsewhere the reference runs, in f32.
pub fn cuda_serves(dtype: DType, batch_heads: usize, head_dim: usize) -> bool {
    // A grid has up to 65,535 blocks along y.
    dtype == DType::BF16 && head_dim.is_multiple_of(8) && head_dim <= 256 && batch_heads <= 65_535
}

/// q, k and v for work that has its own form on CUDA, where the kernels there serve them.
pub fn cuda_inputs<B: OpBackend>(inputs: [&Tensor<B, 4>; 3]) -> Option<[CudaTensor; 3]> {
    let [batch, heads, _, head_dim] = inputs[0].dims();
    let served = inputs.iter().all(|x| cuda_serves(x.dtype(), batch * heads, head_dim));
    let into_cuda = |x: &Tensor<B, 4>| B::into_cuda(primitive(x.clone()));
    let [q, k, v] = inputs.map(|x| into_cuda(x).filter(|_| served));
    Some([q?, k?, v?])
}

/// ALiBi's slopes: 2^(−8(h+1)/heads) for a power of two; else those of the next lower power of
/// two, then every other one of the next higher (Press et al., 2022, and their released code).
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let powers = |n: usize| (1..=n).map(move |h| 2f64.powf(-8.0 * h as f64 / n as f64) as f32);
    let low = 1 << heads.ilog2();
    powers(low).chain(powers(2 * low).step_by(2)).take(heads).collect()
}

impl Op<3> for Softmax {
    fn reference<B: OpBackend>(
        &self,
        [q, k, v]: [FloatTensor<B>; 3],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        reference::attend::<B>(self, [q, k, v], None, ints.first())
    }

    fn cpu_forward(
        &self,
        [q, k, v]: &[FlexTensor; 3],
        ints: &[FlexTensor],
        needs: [bool; 3],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::forward(self, [q, k, v], None, ints.first(), needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [dq, dk, dv, _] = cpu::backward(self, saved, ints.first(), grad);
        [dq, dk, dv]
    }

    fn cuda_forward(
        &self,
        [q, k, v]: &[CudaTensor; 3],
        ints: &[CudaTensor],
        needs: [bool; 3],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(self, [q, k, v], None, ints.first(), needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 3],
    ) -> [Option<CudaTensor>; 3] {
        let [dq, dk, dv, _] = cuda::backward(self, saved, ints.first(), grad);
        [dq, dk, dv]
    }
}

impl Op<4> for Softmax {
    fn reference<B: OpBackend>(
        &self,
        [q, k, v, log_decay]: [FloatTensor<B>; 4],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        reference::attend::<B>(self, [q, k, v], Some(tensor::<B, 3>(log_decay)), ints.first())
    }

    fn cpu_forward(
        &self,
        [q, k, v, log_decay]: &[FlexTensor; 4],
        ints: &[FlexTensor],
        needs: [bool; 4],
    ) -> Option<Forward<FlexTensor>> {
        Some(cpu::forward(self, [q, k, v], Some(log_decay), ints.first(), needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 4],
    ) -> [Option<FlexTensor>; 4] {
        cpu::backward(self, saved, ints.first(), grad)
    }

    fn cuda_forward(
        &self,
        [q, k, v, log_decay]: &[CudaTensor; 4],
        ints: &[CudaTensor],
        needs: [bool; 4],
    ) -> Option<Forward<CudaTensor>> {
        cuda::forward(self, [q, k, v], Some(log_decay), ints.first(), needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 4],
    ) -> [Option<CudaTensor>; 4] {
        cuda::backward(self, saved, ints.first(), grad)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::tensor::{Distribution, FloatDType, Int, TensorData, bf16};

    use super::*;
    use crate::{Cpu, Cuda};

    #[test]
    fn cuda_serves_bf16_heads_of_whole_chunks() {
        for (dtype, batch_heads, head_dim, served) in [
            (DType::BF16, 128, 64, true),
            (DType::BF16, 65_535, 256, true),
            (DType::BF16, 65_536, 64, false),
            (DType::BF16, 1, 264, false),
            (DType::BF16, 1, 100, false),
            (DType::F32, 1, 64, false),
        ] {
            let found = cuda_serves(dtype, batch_heads, head_dim);
            assert_eq!(found, served, "{dtype:?}, {batch_heads} heads of {head_dim} channels");
        }
    }

    /// Random numbers that bf16 holds.
    fn numbers(dims: [usize; 4]) -> TensorData {
        let normal = Distribution::Normal(0.0, 1.0);
        let numbers = Tensor::<Cpu, 4>::random(dims, normal, &Default::default());
        let numbers =
            numbers.into_data().iter::<f32>().map(|x| bf16::from_f32(x).to_f32()).collect();
        TensorData::new::<f32, _>(numbers, dims)
    }

    /// o, dq, dk and dv from q, k, v and dO, of 4 heads on 2.
    fn results<B: OpBackend>(
        inputs: &[TensorData; 4],
        documents: bool,
        dtype: FloatDType,
        device: &B::Device,
    ) -> [Vec<f32>; 4] {
        let [q, k, v, dy] = inputs.clone().map(|data| {
            Tensor::<Autodiff<B>, 4>::from_data(data, device).cast(dtype).require_grad()
        });
        let [batch, heads, _, head_dim] = q.dims();
        let [_, kv_heads, keys, _] = k.dims();
        let log_decay = Tensor::full([batch, heads, keys], -0.02, device);
        let starts: Vec<i32> = (0..batch * keys).map(|i| (i % keys / 77 * 77) as i32).collect();
        let starts = TensorData::new(starts, [batch, keys]);
        let starts = documents.then(|| Tensor::<Autodiff<B>, 2, Int>::from_data(starts, device));
        let op = Softmax::of(&AttentionShape::new(heads * head_dim, heads, kv_heads, head_dim));
        let o = softmax(&op, q.clone(), k.clone(), v.clone(), Some(log_decay), starts);
        let grads = (o.clone() * dy).sum().backward();
        let [dq, dk, dv] = [q, k, v].map(|x| x.grad(&grads).expect("a gradient"));
        [o.inner(), dq, dk, dv].map(|x| x.cast(FloatDType::F32).into_data().to_vec().unwrap())
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn cuda_serves_queries_after_a_cache_and_documents_in_wide_heads() {
        for ([before, queries], documents) in
            [([33, 70], false), ([64, 70], false), ([0, 200], true)]
        {
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
}
