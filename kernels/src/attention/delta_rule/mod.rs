//! The gated delta rule, shared by kinds whose state forgets by a decay and replaces what a key held.
//!
//! Per kv head, with keys k_t of unit length, β_t in [0, 2] and the decay α_t in (0, 1], one number or one per
//! channel of k:
//!
//! - S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ, from S = 0
//! - y_t = S_tᵀ q_t for each query of the group
//!
//! Both lines are computed as gated linear attention of corrected values w. With r_t = (Diag(α_t) S_{t−1})ᵀ k_t,
//! which is what the decayed state holds for the key,
//!
//! - w_t = β_t (v_t − r_t)
//! - S_t = Diag(α_t) S_{t−1} + k_t w_tᵀ
//!
//! so that [`GatedLinear`] of q, k, w gives y, and its state is S. [`CorrectedValues`] computes w.
//!
//! # Corrected values in chunks
//! Let P_t = Σ_{s≤t} ln α_s from a chunk's start, S the state before the chunk, and
//! A_ts = Σ_n k_t k_s e^{P_t − P_s} for s < t, else 0. Then r = (K ⊙ e^P) S + A w, and the rows of w solve
//!
//! (I + diag(β) A) w = diag(β) (V − (K ⊙ e^P) S)
//!
//! With X = (I + diag(β) A)⁻¹, the UT transform, w = X diag(β) V − X diag(β) (K ⊙ e^P) S, of which all but the last
//! product is computed for many chunks at once (Yang et al., "Parallelizing linear transformers with the delta
//! rule over sequence length", 2024, §3.2; with decay, Yang et al., "Gated delta networks", 2025, §3.3). X is
//! built from blocks of twice the size at each level, and the factors of A's blocks are decays to the boundary
//! between their halves, as in `linear`: each is the exponential of a sum of log decays, at most 1, and no
//! sums are subtracted, so that any decay is accurate to rounding.
//!
//! CUDA computes w and y together ([`chunked`]; `docs/chunked.md`).
//!
//! # The gradient
//! Let g be the gradient of w, and h = (I + diag(β) A)⁻ᵀ g, where A now spans the sequence. Then h = g − r', where
//! r'_s = Σ_{t>s} A_ts β_t h_t: the same system in reversed time. So the CPU kernel solves both with one function. The
//! gradients are β_t h_t of v_t, h_t · (v_t − r_t) of β_t, and those of k and the decays are the gradients of gated
//! linear attention with keys as queries, only earlier keys, values w and the upstream gradient −β h.

mod cpu;
mod reference;
#[cfg(test)]
pub mod tests;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

use super::blocks::{repeat_groups, repeat_heads};
use super::chunked::diagonal::Corrections;
use super::chunked::{self, Decays, Grads, NewTokens, Update};
use super::linear::GatedLinear;
use super::linear::reference::{LinearInputs, RowInputs};
use super::recurrent::step::Token;
use super::recurrent::{State, by_head, run_rows, unit};
use super::saved::Channels;
use super::{AttentionShape, ExecPath};
use crate::backend::{Forward, Op, OpBackend, StateOp, primitive, tensor};
use crate::cpu::contiguous;
use crate::cuda::CudaTensor;
use crate::device::DeviceKind;

/// Added to the sum of squares of a query or a key (flash-linear-attention's `l2norm`).
const KEY_EPS: f32 = 1e-6;

/// The delta rule of a layer, in chunks.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRule {
    /// Tokens per chunk, a power of two.
    pub chunk: usize,
    /// How many decays a token has.
    pub decays: Decays,
}

/// The inputs of the delta rule.
#[derive(Clone, Debug)]
pub struct DeltaInputs<B: OpBackend> {
    /// Unit queries times the softmax scale, `[batch, heads, seq_len, head_dim]`.
    q: Tensor<B, 4>,
    /// Unit keys, `[batch, kv_heads, seq_len, head_dim]`.
    k: Tensor<B, 4>,
    /// `[batch, kv_heads, seq_len, value_dim]`
    v: Tensor<B, 4>,
    /// `[batch, kv_heads, seq_len, 1]`
    beta: Tensor<B, 4>,
    /// `[batch, kv_heads, seq_len, 1 or head_dim]`
    log_decay: Tensor<B, 4>,
}

impl<B: OpBackend> DeltaInputs<B> {
    /// Prepares the inputs of a layer: q and k get unit length, q the scale 1/√head_dim.
    ///
    /// - `q`: `[batch, query_heads, seq_len, head_dim]`, `k`: `[batch, key_heads, seq_len, head_dim]`
    /// - `v`: `[batch, kv_heads, seq_len, value_dim]`
    /// - `beta`: `[batch, seq_len, kv_heads]`
    /// - `log_decay`: `[batch, kv_heads, seq_len, 1 or head_dim]`, which clears the state at a document's first token
    pub fn new(
        shape: &AttentionShape,
        [q, k, v]: [Tensor<B, 4>; 3],
        beta: Tensor<B, 3>,
        log_decay: Tensor<B, 4>,
    ) -> Self {
        let [q, k] = [unit(q, shape.scale(), KEY_EPS), unit(k, 1.0, KEY_EPS)];
        let serves = shape.kv_heads / k.dims()[1];
        DeltaInputs {
            q: repeat_groups(q, shape.group(), serves),
            k: repeat_heads(k, serves),
            v,
            beta: by_head(beta, shape.kv_heads),
            log_decay,
        }
    }
}

impl DeltaRule {
    fn linear(&self) -> GatedLinear {
        GatedLinear { chunk: self.chunk }
    }

    /// y over whole rows, `[batch, heads, seq_len, value_dim]`, which go on from `state`, if there is one, and leave
    /// theirs in it: `[batch, kv_heads · head_dim · value_dim]`.
    pub fn attend<B: OpBackend>(
        &self,
        inputs: DeltaInputs<B>,
        state: Option<&mut Tensor<B, 2>>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let DeltaInputs { q, k, v, beta, log_decay } = inputs;
        let [batch, kv_heads, _, d] = k.dims();
        let sizes = [batch * kv_heads, d, v.dims()[3]];
        let inputs = [q, k, v, beta, log_decay].map(primitive);
        let op = DeltaAttention { chunk: self.chunk };
        run_rows::<B, _, 5>(path, &op, inputs, state, sizes)
    }

    /// y of the tokens after those in `state`, and advances the state past them.
    pub fn extend<B: OpBackend>(
        &self,
        inputs: DeltaInputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let DeltaInputs { q, k, v, beta, log_decay } = inputs;
        let (y, end) = match state.s.take() {
            start if path == ExecPath::Kernel(DeviceKind::Cuda) => {
                NewTokens { q, k, v, log_decay, beta: Some(beta) }.extend(
                    Update::Delta,
                    DType::BF16,
                    start,
                )
            }
            Some(start) if q.dims()[2] == 1 => {
                let corrections = Corrections::Weights(beta);
                Token { q, k, v, log_decay, corrections }.advance(start)
            }
            start => {
                let op = DeltaAttention { chunk: self.chunk };
                op.by_operations(LinearInputs { q, k, v, log_decay }, beta, start)
            }
        };
        state.s = Some(end);
        y
    }

    /// FLOPs per token, forward: those of [`GatedLinear`], and for w the same with one query per kv head.
    pub fn flops_per_token(&self, shape: &AttentionShape, value_dim: usize, seq_len: usize) -> f64 {
        let keys = AttentionShape { heads: shape.kv_heads, ..*shape };
        let of = |shape| self.linear().flops_per_token(shape, value_dim, seq_len);
        of(shape) + of(&keys)
    }

    /// Bytes per token that a training step keeps of the operation on `path`.
    pub fn saved_bytes_per_token(
        &self,
        channels: &Channels,
        shape: &AttentionShape,
        seq_len: usize,
        path: ExecPath,
    ) -> f64 {
        // k as repeated for each kv head, r and w.
        let keys = (shape.kv_heads * shape.head_dim) as f64;
        let corrected = 4.0 * (keys + 2.0 * channels.v);
        match path {
            ExecPath::Kernel(DeviceKind::Cpu) => return channels.in_f32() + corrected,
            ExecPath::Kernel(DeviceKind::Cuda) => {
                let value_dim = channels.v as usize / shape.kv_heads;
                let saved = chunked::saved_bytes(Update::Delta, self.decays, shape, value_dim);
                // q, k for each kv head, v and the output, in bf16.
                let Channels { q, v, o, .. } = *channels;
                return 2.0 * (q + keys + v + o) + saved;
            }
            ExecPath::Reference => {}
        }
        // The same again for w, and the system of each chunk with its inverse at every level.
        let chunk = self.chunk.min(seq_len) as f64;
        let linear = self.linear().saved_by_reference(channels, shape, seq_len);
        let systems = 4.0 * 6.0 * shape.kv_heads as f64 * chunk;
        channels.in_f32() + corrected + 2.0 * linear + systems
    }

    /// Elements of the state.
    pub fn state_elements(shape: &AttentionShape, value_dim: usize) -> u64 {
        (shape.kv_heads * shape.head_dim * value_dim) as u64
    }
}

/// y: inputs q `[batch, heads, seq_len, head_dim]`, already scaled, k `[batch, kv_heads, seq_len, head_dim]`, v
/// `[batch, kv_heads, seq_len, value_dim]`, β `[batch, kv_heads, seq_len, 1]`, log decays `[batch, kv_heads, seq_len,
/// 1 or head_dim]`; the output is `[batch, heads, seq_len, value_dim]`.
#[derive(Clone, Debug)]
struct DeltaAttention {
    /// Tokens per chunk, a power of two.
    chunk: usize,
}

impl DeltaAttention {
    fn values(&self) -> CorrectedValues {
        CorrectedValues { chunk: self.chunk }
    }

    fn linear(&self) -> GatedLinear {
        GatedLinear { chunk: self.chunk }
    }

    fn by_operations<B: OpBackend>(
        &self,
        inputs: LinearInputs<B>,
        beta: Tensor<B, 4>,
        before: Option<Tensor<B, 3>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let ([batch, heads, seq_len, _], [_, kv_heads, _, values]) =
            (inputs.q.dims(), inputs.v.dims());
        let RowInputs { q, k, v, log_decay } = inputs.by_row();
        let beta = beta.reshape([batch * kv_heads, seq_len, 1]);
        let v = self.values().forward([k.clone(), v, beta, log_decay.clone()], before.clone());
        let (y, after) = self.linear().forward_rows(RowInputs { q, k, v, log_decay }, before);
        (y.reshape([batch, heads, seq_len, values]), after)
    }

    fn by_reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 5],
        before: Option<FloatTensor<B>>,
    ) -> (Tensor<B, 4>, Tensor<B, 3>) {
        let [q, k, v, beta, log_decay] = inputs.map(tensor::<B, 4>);
        self.by_operations(LinearInputs { q, k, v, log_decay }, beta, before.map(tensor))
    }

    /// y and the state after the last token, with what [`Op::cpu_backward`] takes: the inputs, r, w and, if it is not
    /// 0, the state `before` the first token.
    fn on_cpu(
        &self,
        inputs: &[FlexTensor; 5],
        before: Option<&FlexTensor>,
        needs: [bool; 5],
    ) -> (Forward<FlexTensor>, FlexTensor) {
        // The backward pass reads them too.
        let inputs = inputs.each_ref().map(contiguous);
        let [q, k, v, beta, log_decay] = inputs.clone();
        let of_values = [k.clone(), v, beta, log_decay.clone()];
        let (w, reads) = self.values().run(&of_values, before);
        let [output, after] = self.linear().run(&[q, k, w.clone(), log_decay], before);
        let saved = match needs.contains(&true) {
            true => inputs.into_iter().chain([reads, w]).chain(before.cloned()).collect(),
            false => vec![],
        };
        (Forward { output, saved }, after)
    }
}

impl Op<5> for DeltaAttention {
    fn reference<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 5],
        _ints: &[IntTensor<B>],
    ) -> FloatTensor<B> {
        primitive(self.by_reference::<B>(inputs, None).0)
    }

    fn cpu_forward(
        &self,
        inputs: &[FlexTensor; 5],
        _ints: &[FlexTensor],
        needs: [bool; 5],
    ) -> Option<Forward<FlexTensor>> {
        Some(self.on_cpu(inputs, None, needs).0)
    }

    fn cpu_backward(
        &self,
        saved: Vec<FlexTensor>,
        _ints: &[FlexTensor],
        grad: FlexTensor,
        _needs: [bool; 5],
    ) -> [Option<FlexTensor>; 5] {
        let (saved, before) = saved.split_at(7);
        let [q, inputs @ .., w] = saved else { unreachable!("inputs, r and w are saved") };
        let [k, _, _, log_decay, _] = inputs else { unreachable!("four inputs and r") };
        let of_linear = [q.clone(), k.clone(), w.clone(), log_decay.clone()];
        let before = before.first();
        let [q, as_key, w, near] = self.linear().gradients(&of_linear, before, &grad, true);
        let [k, v, beta, log_decay] = self.values().gradients(inputs, before, &w);
        [q, cpu::sum(&as_key, &k), v, beta, cpu::sum(&near, &log_decay)].map(Some)
    }

    fn cuda_forward(
        &self,
        inputs: &[CudaTensor; 5],
        _ints: &[CudaTensor],
        needs: [bool; 5],
    ) -> Option<Forward<CudaTensor>> {
        let [q, k, v, beta, log_decay] = inputs;
        let inputs = [q, k, v, log_decay];
        chunked::forward(Update::Delta, inputs, Some(beta), DType::BF16, needs.contains(&true))
    }

    fn cuda_backward(
        &self,
        saved: Vec<CudaTensor>,
        _ints: &[CudaTensor],
        grad: CudaTensor,
        _needs: [bool; 5],
    ) -> [Option<CudaTensor>; 5] {
        let Grads { q, k, v, beta, log_decay } = chunked::backward(Update::Delta, &saved, &grad);
        [Some(q), Some(k), Some(v), beta, Some(log_decay)]
    }
}

/// States are `[batch · kv_heads, head_dim, value_dim]`.
impl StateOp<5> for DeltaAttention {
    fn reference_from<B: OpBackend>(
        &self,
        inputs: [FloatTensor<B>; 5],
        _ints: &[IntTensor<B>],
        before: FloatTensor<B>,
    ) -> [FloatTensor<B>; 2] {
        let (y, after) = self.by_reference::<B>(inputs, Some(before));
        [primitive(y), primitive(after)]
    }

    fn cpu_forward_from(
        &self,
        inputs: &[FlexTensor; 5],
        _ints: &[FlexTensor],
        before: &FlexTensor,
        needs: [bool; 5],
    ) -> Option<(Forward<FlexTensor>, FlexTensor)> {
        Some(self.on_cpu(inputs, Some(before), needs))
    }

    fn cuda_forward_from(
        &self,
        inputs: &[CudaTensor; 5],
        _ints: &[CudaTensor],
        before: &CudaTensor,
        needs: [bool; 5],
    ) -> Option<(Forward<CudaTensor>, CudaTensor)> {
        let [q, k, v, beta, log_decay] = inputs;
        let inputs = [q, k, v, log_decay];
        let needs = needs.contains(&true);
        chunked::forward_from(Update::Delta, inputs, Some(beta), DType::BF16, before, needs)
    }
}

/// w: inputs k `[batch, kv_heads, seq_len, head_dim]`, v `[batch, kv_heads, seq_len, value_dim]`, β `[batch, kv_heads,
/// seq_len, 1]`, log decays `[batch, kv_heads, seq_len, 1 or head_dim]`; the output has v's shape.
#[derive(Clone, Debug)]
struct CorrectedValues {
    /// Tokens per chunk, a power of two.
    chunk: usize,
}
