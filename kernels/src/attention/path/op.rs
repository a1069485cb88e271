//! The operation with prepared inputs: directions of norm at most 1, β and log decays.

use burn::backend::Flex;
use burn::tensor::Tensor;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn_flex::FlexTensor;

use super::reference::{self, Tokens, Visible};
use super::{cpu, cuda};
use crate::attention::dispatch::on_cuda;
use crate::attention::{AttentionShape, DocumentStarts, ExecPath};
use crate::backend::{Forward, Op, OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// The operation's settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Path {
    /// Factor on q·k.
    pub scale: f32,
    /// With a window w, a query sees its own key and the w − 1 before it.
    pub window: Option<usize>,
}

impl Path {
    /// The settings of a layer.
    pub fn of(shape: &AttentionShape) -> Self {
        Path { scale: shape.scale(), window: shape.window }
    }
}

/// The operation's inputs.
#[derive(Clone, Debug)]
pub(super) struct PathInputs<B: OpBackend> {
    /// Queries, `[batch, heads, seq_len, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Keys, `[batch, kv_heads, seq_len, head_dim]`.
    pub k: Tensor<B, 4>,
    /// Values, like k.
    pub v: Tensor<B, 4>,
    /// Directions of norm at most 1, like k, in f32.
    pub w: Tensor<B, 4>,
    /// β in [0, 2], `[batch, kv_heads, seq_len, 1]`, in f32.
    pub beta: Tensor<B, 4>,
    /// ℓ ≤ 0, natural logarithm, `[batch, heads, seq_len]`, in f32.
    pub log_decay: Option<Tensor<B, 3>>,
}

impl<B: OpBackend> PathInputs<B> {
    /// The inputs in rows, one for each kv head of each sequence, with `scale` in the queries.
    pub fn rows(self, scale: f32) -> Tokens<B> {
        let PathInputs { q, k, v, w, beta, log_decay } = self;
        let [batch, heads, len, head_dim] = q.dims();
        let [_, kv_heads, _, value_dim] = v.dims();
        let (rows, group) = (batch * kv_heads, heads / kv_heads);
        Tokens {
            q: (q * scale).reshape([rows, group, len, head_dim]),
            k: k.reshape([rows, 1, len, head_dim]),
            v: v.reshape([rows, 1, len, value_dim]),
            w: w.reshape([rows, 1, len, head_dim]),
            beta: beta.reshape([rows, 1, len, 1]),
            log_decay: log_decay.map(|x| x.reshape([rows, group, len])),
        }
    }

    /// The inputs as tensors on CUDA.
    ///
    /// # Panics
    /// On other devices, and under autodiff.
    pub fn tokens(self) -> cuda::Tokens {
        cuda::Tokens {
            q: on_cuda(self.q),
            k: on_cuda(self.k),
            v: on_cuda(self.v),
            w: on_cuda(self.w),
            beta: on_cuda(self.beta),
            log_decay: self.log_decay.map(on_cuda),
        }
    }

    /// `count` sequences from `first` on.
    pub fn narrow(&self, first: usize, count: usize) -> Self {
        if count == self.q.dims()[0] {
            return self.clone();
        }
        let of = |x: &Tensor<B, 4>| x.clone().narrow(0, first, count);
        PathInputs {
            q: of(&self.q),
            k: of(&self.k),
            v: of(&self.v),
            w: of(&self.w),
            beta: of(&self.beta),
            log_decay: self.log_decay.as_ref().map(|x| x.clone().narrow(0, first, count)),
        }
    }

    /// From tensors in the operation's order.
    fn unpack<const N: usize>(inputs: [FloatTensor<B>; N]) -> Self {
        let mut inputs = inputs.into_iter();
        let mut next = || tensor::<B, 4>(inputs.next().expect("q, k, v, w and β"));
        let [q, k, v, w, beta] = [next(), next(), next(), next(), next()];
        PathInputs { q, k, v, w, beta, log_decay: inputs.next().map(tensor) }
    }
}

/// PaTH attention over whole sequences; `documents` is `[batch, seq_len]`.
///
/// Returns `[batch, heads, seq_len, head_dim]`.
pub(super) fn path_attention<B: OpBackend>(
    op: &Path,
    PathInputs { q, k, v, w, beta, log_decay }: PathInputs<B>,
    documents: DocumentStarts<B>,
    path: ExecPath,
) -> Tensor<B, 4> {
    let ints = documents.into_iter().map(Tensor::into_primitive).collect();
    let [q, k, v, w, beta] = [q, k, v, w, beta].map(primitive);
    tensor(match log_decay {
        None => path.run::<B, _, 5>(op, [q, k, v, w, beta], ints),
        Some(decay) => path.run::<B, _, 6>(op, [q, k, v, w, beta, primitive(decay)], ints),
    })
}

/// The rows of a CPU kernel's inputs or gradients, in the operation's order.
fn pack(
    Tokens { q, k, v, w, beta, log_decay }: Tokens<Flex>,
) -> impl Iterator<Item = FlexTensor> + use<> {
    [q, k, v, w, beta].map(primitive).into_iter().chain(log_decay.map(primitive))
}

/// q, k, v, w, β and, with 6 inputs, the log decay.
impl<const N: usize> Op<N> for Path {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        let inputs = PathInputs::<B>::unpack(inputs);
        let (dims, kv_heads) = (inputs.q.dims(), inputs.k.dims()[1]);
        let documents = ints.first().cloned().map(Tensor::from_primitive);
        let visible = Visible { window: self.window, documents, kv_heads };
        let tokens = inputs.rows(self.scale);
        let (out, _) = reference::attend(&tokens, &visible, &[], 0);
        let out = out.reshape(dims);
        if tokens.len() > 1 && self.window != Some(1) {
            return primitive(out);
        }
        // No transform lies between a token and itself: give w and β a gradient of 0, rather than none.
        let none = (tokens.w.sum() + tokens.beta.sum()).reshape([1, 1, 1, 1]) * 0.0;
        primitive(out + none)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        let inputs = PathInputs::<Flex>::unpack(inputs.clone());
        let dims = inputs.q.dims();
        let rows: Vec<FlexTensor> = pack(inputs.rows(self.scale)).collect();
        let rows: [FlexTensor; N] = rows.try_into().expect("as many rows as inputs");
        let needs = needs.contains(&true);
        let Forward { output, saved } = cpu::forward(self, &rows, ints.first(), needs);
        let output = primitive(tensor::<Flex, 4>(output).reshape(dims));
        Some(Forward { output, saved })
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        let grad = tensor::<Flex, 4>(grad);
        let [batch, heads, len, head_dim] = grad.dims();
        let q = tensor::<Flex, 4>(saved[0].clone());
        let (rows, group) = (q.dims()[0], q.dims()[1]);
        let kv_heads = rows / batch;
        let grad = primitive(grad.reshape([rows, group, len, head_dim]));
        let mut gradients = cpu::backward(self, saved, ints.first(), &grad).into_iter();
        let mut next = |heads, channels| {
            let gradient = tensor::<Flex, 4>(gradients.next()?);
            Some(gradient.reshape([batch, heads, len, channels]))
        };
        let dq = next(heads, head_dim).map(|dq| primitive(dq * self.scale));
        let others = [head_dim, head_dim, head_dim, 1].map(|channels| next(kv_heads, channels));
        let decay = gradients.next().map(tensor::<Flex, 3>);
        let decay = decay.map(|x| primitive(x.reshape([batch, heads, len])));
        let mut all = std::iter::once(dq)
            .chain(others.map(|x| x.map(primitive)))
            .chain(std::iter::once(decay));
        std::array::from_fn(|_| all.next().flatten())
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, w, beta, decay @ ..] = &inputs[..] else { unreachable!("N is 5 or 6") };
        let needs = needs.contains(&true);
        cuda::forward(self, [q, k, v, w, beta], decay.first(), ints.first(), needs)
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let mut gradients = cuda::backward(self, &saved, ints.first(), &grad).into_iter();
        std::array::from_fn(|_| gradients.next())
    }
}
