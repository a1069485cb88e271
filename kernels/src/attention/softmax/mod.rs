//! The softmax attention that several variants share:
//!
//! S_ij = cap(scale · q_iᵀk_j) + Σ_{s=j+1..i} ℓ_s, o_i = Σ_j softmax_j(S_ij) v_j,
//!
//! over the keys j ≤ i inside the window and the document of i. ℓ is a decay per step (a learned
//! gate, or ALiBi's slope), cap(x) = c·tanh(x/c). With sinks, the denominator has a further term, a
//! learned logit of each head: o_i = Σ_j exp(S_ij) v_j / (Σ_j exp(S_ij) + exp(sink)).

pub(super) mod cpu;
mod cuda;
mod prune;
pub(super) mod reference;

use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

pub use self::prune::pruned_fraction;
use super::{AttentionShape, DocumentStarts, ExecPath, Init, ParameterSpec};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The operation's settings.
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
    /// Skip the keys whose decay ℓ has made their weights negligible: those skipped in a row together
    /// weigh at most [`PRUNED`] of it. Not with softcap.
    pub prune: bool,
}

/// The largest share of a row's weight that pruning may skip.
pub const PRUNED: f32 = 1.0 / (1 << 24) as f32;

impl Softmax {
    /// Of a layer, without optional options.
    pub fn of(shape: &AttentionShape) -> Self {
        let (scale, window) = (shape.scale(), shape.window);
        Softmax { scale, softcap: None, window, slopes: vec![], prune: false }
    }
}

/// The attention sinks of a layer as a parameter of the variant (gpt-oss, OpenAI, 2025).
pub fn sinks(shape: &AttentionShape) -> ParameterSpec {
    ParameterSpec { name: "sinks", elements: shape.heads, init: Init::Constant(0.0) }
}

/// Softmax attention without a learned decay.
///
/// - `q`: `[batch, heads, queries, head_dim]`
/// - `k`: `[batch, kv_heads, keys, head_dim]`, `kv_heads` divides `heads`, `keys ≥ queries`:
///   query i is at position keys − queries + i
/// - `v`: `[batch, kv_heads / views, keys, value_dim]`: q and k may have the heads of several views, one view
///   after the other, which all have v's values
/// - `sinks`: logits, f32 `[heads]`
/// - `documents`: `[batch, keys]`
///
/// Returns `[batch, heads, queries, value_dim]`.
///
/// # Panics
/// When the shapes do not match.
pub fn softmax<B: OpBackend>(
    op: &Softmax,
    qkv: [Tensor<B, 4>; 3],
    sinks: Option<Tensor<B, 1>>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    assert_shapes_of_views(&qkv);
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let [q, k, v] = qkv.map(primitive);
    tensor(match sinks {
        None => path.run::<B, _, 3>(op, [q, k, v], ints),
        Some(sinks) => path.run::<B, _, 4>(op, [q, k, v, primitive(sinks)], ints),
    })
}

/// Asserts that the shapes of q, k and v match, and that each head of k has values of its own.
pub(super) fn assert_shapes<B: OpBackend>(qkv: &[Tensor<B, 4>; 3]) {
    assert_eq!(qkv[1].dims(), qkv[2].dims(), "shapes of k and v");
    assert_shapes_of_views(qkv);
}

/// Asserts that the shapes of q, k and v match as [`softmax`] documents them.
fn assert_shapes_of_views<B: OpBackend>([q, k, v]: &[Tensor<B, 4>; 3]) {
    let [[batch, heads, queries, head_dim], [_, kv_heads, keys, _]] = [q.dims(), k.dims()];
    let [_, value_heads, _, value_dim] = v.dims();
    assert_eq!(v.dims(), [batch, value_heads, keys, value_dim], "shape of v for k {:?}", k.dims());
    assert!(kv_heads % value_heads == 0, "{value_heads} heads of v must divide {kv_heads} of k");
    assert_eq!(k.dims(), [batch, kv_heads, keys, head_dim], "shape of k for q {:?}", q.dims());
    assert!(heads % kv_heads == 0, "{kv_heads} kv_heads must divide {heads} heads");
    assert!(keys >= queries, "{queries} queries but only {keys} keys");
}

/// The gradients of a softmax's inputs.
pub(super) struct Gradients<T> {
    pub q: T,
    pub k: T,
    pub v: T,
    pub log_decay: Option<T>,
    pub sinks: Option<T>,
}

impl<T> Gradients<T> {
    /// The gradients in the order of the operation's inputs.
    pub fn in_order<const N: usize>(self) -> [Option<T>; N] {
        let Gradients { q, k, v, log_decay, sinks } = self;
        let mut all = [q, k, v].into_iter().chain(log_decay).chain(sinks);
        std::array::from_fn(|_| all.next())
    }
}

/// ALiBi's slopes: 2^(−8(h+1)/heads) for a power of two; else those of the next lower power of
/// two, then every other one of the next higher (Press et al., 2022, and their released code).
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let powers = |n: usize| (1..=n).map(move |h| 2f64.powf(-8.0 * h as f64 / n as f64) as f32);
    let low = 1 << heads.ilog2();
    powers(low).chain(powers(2 * low).step_by(2)).take(heads).collect()
}

/// q, k, v and, with 4 inputs, the sinks.
impl<const N: usize> Op<N> for Softmax {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("q, k and v");
        let qkv = [next(), next(), next()];
        reference::attend::<B>(self, qkv, None, inputs.next().map(tensor::<B, 1>), ints.first())
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let [q, k, v, ..] = inputs.each_ref()[..] else { unreachable!("N is 3 or 4") };
        let optional = (None, inputs.get(3));
        Some(cpu::forward(self, [q, k, v], optional, ints.first(), needs.contains(&true)))
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        cpu::backward(self, cpu::Saved::unpack(saved, false), ints.first(), grad).in_order()
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, ..] = inputs.each_ref()[..] else { unreachable!("N is 3 or 4") };
        let needs = needs.contains(&true);
        cuda::forward(self, [q, k, v], inputs.get(3), ints.first(), needs)
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        cuda::backward(self, saved, ints.first(), &grad).in_order()
    }
}
