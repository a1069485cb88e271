//! The operation of linear attention: on the CPU, on CUDA's chunked core, or by operations of tensors.

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

use super::cpu;
use super::reference::LinearInputs;
use crate::attention::chunked::{self, Decays, Grads, NewTokens, Update};
use crate::attention::recurrent::run_rows;
use crate::attention::saved::Channels;
use crate::attention::{AttentionShape, ExecPath};
use crate::backend::{Forward, Op, OpBackend, StateOp, primitive, tensor};
use crate::cpu::contiguous;
use crate::cuda::CudaTensor;
use crate::device::DeviceKind;

/// The operation before the norm: inputs q `[batch, heads, seq_len, head_dim]`, already scaled, k `[batch, kv_heads,
/// seq_len, head_dim]`, v `[batch, kv_heads, seq_len, value_dim]`, log decays `[batch, kv_heads, seq_len, 1 or
/// head_dim]`; the output is `[batch, heads, seq_len, value_dim]`.
#[derive(Clone, Debug)]
pub struct GatedLinear {
    /// Tokens per chunk, a power of two.
    pub chunk: usize,
}

impl GatedLinear {
    /// y over whole rows, which go on from `state`, if there is one, and leave theirs in it:
    /// `[batch, kv_heads · head_dim · value_dim]`; β `[batch, kv_heads, seq_len, 1]` weighs values.
    pub fn attend<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        beta: Option<Tensor<B, 4>>,
        state: Option<&mut Tensor<B, 2>>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let sizes = inputs.state_shape();
        let LinearInputs { q, k, v, log_decay } = inputs;
        let [q, k, v, log_decay] = [primitive(q), primitive(k), primitive(v), primitive(log_decay)];
        match beta {
            None => run_rows::<B, _, 4>(path, self, [q, k, v, log_decay], state, sizes),
            Some(beta) => {
                let inputs = [q, k, v, primitive(beta), log_decay];
                run_rows::<B, _, 5>(path, self, inputs, state, sizes)
            }
        }
    }

    /// y of the tokens after those in the state `start`, and the state after them; β `[batch, kv_heads, seq_len, 1]`
    /// weighs values. States are `[batch · kv_heads, head_dim, value_dim]`.
    pub fn extend<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        beta: Option<Tensor<B, 4>>,
        start: Option<Tensor<B, 3>>,
        path: ExecPath,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let LinearInputs { q, k, v, log_decay } = inputs;
        if path == ExecPath::Kernel(DeviceKind::Cuda) {
            let tokens = NewTokens { q, k, v, log_decay, beta };
            return tokens.extend(Update::Additive, DType::BF16, start);
        }
        let v = match beta {
            Some(beta) => v * beta,
            None => v,
        };
        self.forward(LinearInputs { q, k, v, log_decay }, start)
    }

    /// FLOPs per token, forward: scores and weighted values inside a chunk, and updating and querying S.
    pub fn flops_per_token(&self, shape: &AttentionShape, value_dim: usize, seq_len: usize) -> f64 {
        let (d, values) = (shape.head_dim as f64, value_dim as f64);
        let (heads, kv_heads) = (shape.heads as f64, shape.kv_heads as f64);
        let near = (seq_len.min(self.chunk) as f64 + 1.0) / 2.0;
        let far = seq_len.saturating_sub(self.chunk) as f64 / seq_len as f64;
        2.0 * (d + values) * heads * near + far * 2.0 * d * values * (heads + kv_heads)
    }

    /// Bytes per token that a kernel saves beside its inputs and its output.
    pub fn saved_by_kernel(
        &self,
        decays: Decays,
        channels: &Channels,
        shape: &AttentionShape,
        device: DeviceKind,
    ) -> f64 {
        let value_dim = channels.v as usize / shape.kv_heads;
        match device {
            DeviceKind::Cpu => 0.0,
            DeviceKind::Cuda => chunked::saved_bytes(Update::Additive, decays, shape, value_dim),
        }
    }

    /// Bytes per token that automatic differentiation keeps of the reference beside its inputs and its output:
    /// the decay's factors of q and k, the scores of a chunk, and a state per chunk.
    pub fn saved_by_reference(
        &self,
        channels: &Channels,
        shape: &AttentionShape,
        seq_len: usize,
    ) -> f64 {
        let chunk = self.chunk.min(seq_len) as f64;
        let state = channels.v * shape.group() as f64 * shape.head_dim as f64 / chunk;
        let factors = 4.0 * (channels.q + channels.k);
        channels.scores(3.0, chunk) + 4.0 * (factors + 2.0 * state)
    }
}

/// The operation's inputs in order, with the weights of values apart: β `[batch, kv_heads, seq_len, 1]` after v, if
/// there are five.
fn split<T>(inputs: &[T]) -> ([&T; 4], Option<&T>) {
    match inputs {
        [q, k, v, log_decay] => ([q, k, v, log_decay], None),
        [q, k, v, beta, log_decay] => ([q, k, v, log_decay], Some(beta)),
        _ => panic!("{} inputs of 4 or 5", inputs.len()),
    }
}

/// The inverse of [`split`].
fn joined<T, const N: usize>([q, k, v, log_decay]: [T; 4], beta: Option<T>) -> [Option<T>; N] {
    let mut all = [q, k, v].into_iter().chain(beta).chain([log_decay]);
    std::array::from_fn(|_| all.next())
}

impl GatedLinear {
    /// The inputs for the CPU, with values times their weights.
    fn of_weighted(inputs: &[FlexTensor]) -> [FlexTensor; 4] {
        let ([q, k, v, log_decay], beta) = split(inputs);
        let v = beta.map_or_else(|| v.clone(), |beta| cpu::weighted(v, beta));
        [q.clone(), k.clone(), v, log_decay.clone()]
    }

    fn by_operations<B: OpBackend>(
        &self,
        inputs: &[FloatTensor<B>],
        before: Option<FloatTensor<B>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let ([q, k, v, log_decay], beta) = split(inputs);
        let [k, v, log_decay] = [k, v, log_decay].map(|x| tensor::<B, 4>(x.clone()));
        let v = match beta {
            Some(beta) => v * tensor::<B, 4>(beta.clone()),
            None => v,
        };
        let inputs = LinearInputs { q: tensor(q.clone()), k, v, log_decay };
        self.forward(inputs, before.map(tensor))
    }
}

/// With five inputs, values have weights: the state takes β_t k_t v_tᵀ.
impl<const N: usize> Op<N> for GatedLinear {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.by_operations::<B>(&inputs, None).0)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        needs: [bool; N],
    ) -> Option<Forward<FlexTensor>> {
        // The backward pass reads them too.
        let inputs = inputs.each_ref().map(contiguous);
        let [output, _] = self.run(&Self::of_weighted(&inputs), None);
        let saved = if needs.contains(&true) { inputs.to_vec() } else { vec![] };
        Some(Forward { output, saved })
    }

    /// From the inputs and, if it is not 0, the state before the first token.
    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; N],
    ) -> [Option<FlexTensor>; N] {
        let (inputs, before) = saved.split_at(N);
        let [q, k, weighted, log_decay] =
            self.gradients(&Self::of_weighted(inputs), before.first(), &grad, true);
        match split(inputs) {
            ([_, _, v, _], Some(beta)) => {
                let [v, beta] = cpu::gradients_of_weights(v, beta, &weighted);
                joined([q, k, v, log_decay], Some(beta))
            }
            _ => joined([q, k, weighted, log_decay], None),
        }
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        needs: [bool; N],
    ) -> Option<Forward<CudaTensor>> {
        let (inputs, beta) = split(inputs);
        chunked::forward(Update::Additive, inputs, beta, DType::BF16, needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; N],
    ) -> [Option<CudaTensor>; N] {
        let Grads { q, k, v, beta, log_decay } = chunked::backward(Update::Additive, &saved, &grad);
        joined([q, k, v, log_decay], beta)
    }
}

/// States are `[batch · kv_heads, head_dim, value_dim]`.
impl<const N: usize> StateOp<N> for GatedLinear {
    fn reference_from<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; N],
        _ints: &[IntTensor<B>],
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        let (y, after) = self.by_operations::<B>(&inputs, Some(before));
        [primitive(y), primitive(after)]
    }

    fn cpu_forward_from(
        &self,
        inputs: &[FlexTensor; N],
        _ints: &[FlexTensor],
        before: &FlexTensor,
        needs: [bool; N],
    ) -> Option<(Forward<FlexTensor>, FlexTensor)> {
        let inputs = inputs.each_ref().map(contiguous);
        let [output, after] = self.run(&Self::of_weighted(&inputs), Some(before));
        let saved = match needs.contains(&true) {
            true => inputs.iter().chain([before]).cloned().collect(),
            false => vec![],
        };
        Some((Forward { output, saved }, after))
    }

    fn cuda_forward_from(
        &self,
        inputs: &[CudaTensor; N],
        _ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; N],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        let (inputs, beta) = split(inputs);
        let needs = needs.contains(&true);
        chunked::forward_from(Update::Additive, inputs, beta, DType::BF16, before, needs)
    }
}
