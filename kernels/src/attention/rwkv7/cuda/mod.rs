//! The time mix on CUDA in bf16: one kernel before the recurrence and one after it, and one for the gradients of each.
//! The core for decays per channel computes the recurrence (`docs/chunked.md`).
//!
//! The recurrence's vectors are not saved: the backward pass computes them again.

mod kernel;

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::kernel::{
    HeadGradsLaunch, HeadInputsLaunch, InputGradsLaunch, KeyInputsLaunch, RecurrenceGradsLaunch,
    TimeMixSizesLaunch, VectorsLaunch,
};
use super::NORM_EPS;
use crate::attention::chunked;
use crate::attention::chunked::diagonal::{Corrections, Diagonal, Saved};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty, reshaped};
use crate::ops::cuda::block::RowSplit;
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{
    THREADS, as_u32, dim, dims, elements, head_strides, integers, nothing, over, vector,
};
use crate::tile::CHUNK;

/// Tensors of inputs.
const INPUTS: usize = 11;

/// Most parts of a head's tokens whose sums are added up in the end.
const MOST_PARTS: usize = 64;

/// A call of the kernels.
struct Call {
    /// r and v, `[batch, heads or kv_heads, seq_len, head_dim]`, contiguous.
    r: CudaTensor,
    v: CudaTensor,
    /// Of the same shape as v, with neighbouring channels: k, and the logits of the decay and of the learning rate.
    keys: [CudaTensor; 3],
    /// Of the same shape as r, with neighbouring channels.
    gate: CudaTensor,
    /// ξ, α, ρ, the norm's scale and bias.
    parameters: [CudaTensor; 5],
    /// The start of each token's document, `[batch, seq_len]`.
    starts: Option<CudaTensor>,
}

/// `x`, or a contiguous copy if channels are not neighbours or their chunks not aligned.
fn in_chunks(x: &CudaTensor) -> CudaTensor {
    let (strides, last) = (x.meta.strides(), dims(x).len() - 1);
    let whole = strides[..last].iter().all(|stride| stride.is_multiple_of(CHUNK));
    if strides[last] == 1 && whole { x.clone() } else { contiguous(x) }
}

/// `[batch, seq_len, heads · channels]` as `[batch, heads, seq_len, channels]`, a view.
fn by_head(x: &CudaTensor, heads: usize) -> CudaTensor {
    let x = in_chunks(x);
    let ([batch, seq_len, features], strides) = (x.meta.shape().dims(), x.meta.strides());
    let channels = features / heads;
    over(&x, 0, &[batch, heads, seq_len, channels], &[strides[0], channels, strides[1], 1])
}

/// The inverse of [`by_head`].
fn by_token(mut x: CudaTensor) -> CudaTensor {
    let [batch, heads, seq_len, channels] = x.meta.shape().dims();
    x.meta.swap(1, 2);
    reshaped(&x, &[batch, seq_len, heads * channels])
}

/// An uninitialised `[batch, heads, seq_len, channels]` in bf16, whose memory is in the order of
/// `[batch, seq_len, heads, channels]`.
fn empty_by_token(like: &CudaTensor, shape: [usize; 4]) -> CudaTensor {
    let [batch, heads, seq_len, channels] = shape;
    by_head(&empty(like, &[batch, seq_len, heads * channels], DType::BF16), heads)
}

impl Call {
    fn new(inputs: &[CudaTensor], ints: &[CudaTensor]) -> Self {
        let [r, k, v, decay, rate, gate, parameters @ ..] = inputs else {
            panic!("{INPUTS} inputs")
        };
        let ([batch, heads, seq_len, d], kv_heads) = (r.meta.shape().dims(), dims(k)[1]);
        for x in [k, v, decay, rate, gate] {
            assert_eq!(x.dtype, r.dtype, "types of r and of the other activations");
        }
        let lengths = [kv_heads, kv_heads, heads, heads, heads];
        let names = ["removal_scale", "replacement", "bonus", "norm_scale", "norm_bias"];
        Call {
            r: contiguous(r),
            v: contiguous(v),
            keys: [in_chunks(k), by_head(decay, kv_heads), by_head(rate, kv_heads)],
            gate: by_head(gate, heads),
            parameters: std::array::from_fn(|i| vector(&parameters[i], lengths[i] * d, names[i])),
            starts: ints.first().map(|starts| integers(starts, &[batch, seq_len], "documents")),
        }
    }

    /// `[batch, heads, kv_heads, seq_len, head_dim]`
    fn sizes(&self) -> [usize; 5] {
        let [batch, heads, seq_len, d] = self.r.meta.shape().dims();
        [batch, heads, dims(&self.v)[1], seq_len, d]
    }

    fn launch_sizes(&self) -> TimeMixSizesLaunch<CudaRuntime> {
        let [batch, heads, kv_heads, seq_len, d] = self.sizes();
        let sizes = [batch * seq_len, seq_len, d / CHUNK, heads / kv_heads].map(as_u32);
        let [tokens, seq_len, chunks, group] = sizes;
        TimeMixSizesLaunch::new(tokens, seq_len, chunks, group)
    }

    fn split(&self) -> RowSplit {
        let chunks = self.sizes()[4] / CHUNK;
        let threads = chunks.next_power_of_two();
        RowSplit { threads, held: 1, groups: THREADS / threads, even: threads == chunks }
    }

    /// Blocks that handle all tokens of a head, each group one, or at most `most` that take turns.
    fn blocks(&self, most: usize) -> usize {
        let [batch, _, _, seq_len, _] = self.sizes();
        (batch * seq_len).div_ceil(self.split().groups).min(most)
    }

    /// As many [`blocks`](Self::blocks) for each of `heads` heads.
    fn grid(&self, heads: usize, most: usize) -> CubeCount {
        CubeCount::Static(as_u32(self.blocks(most)), as_u32(heads), 1)
    }

    fn key_inputs(&self) -> KeyInputsLaunch<CudaRuntime> {
        let [k, decay, rate] = &self.keys;
        KeyInputsLaunch::new(
            buffer(k, CHUNK),
            head_strides(k, CHUNK),
            buffer(decay, CHUNK),
            head_strides(decay, CHUNK),
            buffer(rate, CHUNK),
            head_strides(rate, CHUNK),
            buffer(&self.parameters[0], CHUNK),
            buffer(&self.parameters[1], CHUNK),
        )
    }

    fn starts(&self) -> ArrayArg<CudaRuntime> {
        self.starts.as_ref().map_or_else(|| nothing(&self.r), |starts| buffer(starts, 1))
    }

    /// The recurrence's vectors.
    fn recurrence(&self) -> Diagonal {
        let [batch, heads, kv_heads, seq_len, d] = self.sizes();
        let rows = batch * kv_heads;
        let of = |dtype| empty(&self.r, &[rows, seq_len, d], dtype);
        let (log_decay, removal) = (of(DType::F32), of(DType::BF16));
        let (correction, key) = (of(DType::BF16), of(DType::BF16));
        // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
        unsafe {
            kernel::prepare::launch_unchecked::<CudaRuntime>(
                &self.r.client,
                self.grid(kv_heads, usize::MAX),
                dim(THREADS),
                self.key_inputs(),
                self.starts(),
                vectors(&log_decay, &removal, &correction, &key),
                head_strides(&self.v, CHUNK),
                self.launch_sizes(),
                self.starts.is_some(),
                self.split(),
            );
        }
        Diagonal {
            q: reshaped(&self.r, &[rows, heads / kv_heads, seq_len, d]),
            k: key,
            v: reshaped(&self.v, &[rows, seq_len, d]),
            log_decay,
            corrections: Corrections::Vectors { removal, correction },
        }
    }

    fn head_inputs(&self, o: &CudaTensor, key: &CudaTensor) -> HeadInputsLaunch<CudaRuntime> {
        let [_, _, rho, scale, bias] = &self.parameters;
        HeadInputsLaunch::new(
            buffer(o, CHUNK),
            buffer(&self.r, CHUNK),
            head_strides(&self.r, CHUNK),
            buffer(key, CHUNK),
            buffer(&self.v, CHUNK),
            head_strides(&self.v, CHUNK),
            buffer(&self.gate, CHUNK),
            head_strides(&self.gate, CHUNK),
            buffer(rho, CHUNK),
            buffer(scale, CHUNK),
            buffer(bias, CHUNK),
        )
    }

    fn eps(&self) -> f32 {
        NORM_EPS * self.sizes()[4] as f32
    }
}

fn vectors(
    log_decay: &CudaTensor,
    removal: &CudaTensor,
    correction: &CudaTensor,
    key: &CudaTensor,
) -> VectorsLaunch<CudaRuntime> {
    let [removal, correction, key] = [removal, correction, key].map(|x| buffer(x, CHUNK));
    VectorsLaunch::new(buffer(log_decay, CHUNK), removal, correction, key)
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub fn forward(
    inputs: &[CudaTensor; INPUTS],
    ints: &[CudaTensor],
    save: bool,
) -> Option<Forward<CudaTensor>> {
    let ([_, heads, _, d], v) = (inputs[0].meta.shape().dims(), &inputs[2]);
    if !chunked::serves(inputs[0].dtype, d, dims(v)[3]) || elements(v) == 0 {
        return None;
    }
    let call = Call::new(inputs, ints);
    let recurrence = call.recurrence();
    let (o, saved) = recurrence.forward();
    let y = empty_by_token(&call.r, call.r.meta.shape().dims());
    // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
    unsafe {
        kernel::finish::launch_unchecked::<CudaRuntime>(
            &o.client,
            call.grid(heads, usize::MAX),
            dim(THREADS),
            call.head_inputs(&o, &recurrence.k),
            buffer(&y, CHUNK),
            head_strides(&y, CHUNK),
            call.eps(),
            call.launch_sizes(),
            call.split(),
        );
    }
    if !save {
        return Some(Forward { output: y, saved: vec![] });
    }
    let mut inputs = inputs.clone();
    (inputs[0], inputs[2]) = (call.r, call.v);
    let saved = inputs.into_iter().chain([o]).chain(saved.into_tensors()).collect();
    Some(Forward { output: y, saved })
}

/// The gradients of the inputs, where `grad` is that of the output and `saved` what [`forward`] saved.
pub fn backward(
    saved: &[CudaTensor],
    ints: &[CudaTensor],
    grad: &CudaTensor,
) -> [CudaTensor; INPUTS] {
    let (inputs, saved) = saved.split_at(INPUTS);
    let (call, o, saved) = (Call::new(inputs, ints), &saved[0], &saved[1..]);
    let [batch, heads, kv_heads, seq_len, d] = call.sizes();
    let like = &call.r;
    let grad = in_chunks(grad);
    assert_eq!(dims(&grad), dims(like), "the shape of the gradient");
    assert_eq!(grad.dtype, DType::BF16, "the type of the gradient");
    let recurrence = call.recurrence();

    // 1. To the recurrence's o, and through the bonus to its key heads' inputs.
    let of_heads = || empty(like, &dims(like), DType::BF16);
    let [d_o, d_r, d_key, d_v] = std::array::from_fn(|_| of_heads());
    let d_gate = empty_by_token(like, like.meta.shape().dims());
    let blocks = call.blocks(MOST_PARTS);
    let of_head_vectors = empty(like, &[blocks, 3 * heads * d], DType::F32);
    let head_grads = || {
        HeadGradsLaunch::new(
            buffer(&d_o, CHUNK),
            buffer(&d_r, CHUNK),
            buffer(&d_key, CHUNK),
            buffer(&d_v, CHUNK),
            buffer(&d_gate, CHUNK),
            head_strides(&d_gate, CHUNK),
            buffer(&of_head_vectors, CHUNK),
        )
    };
    // SAFETY: threads stay within the tokens of the tensors, whose strides they get, and blocks within their parts.
    unsafe {
        kernel::finish_back::launch_unchecked::<CudaRuntime>(
            &like.client,
            call.grid(heads, MOST_PARTS),
            dim(THREADS),
            call.head_inputs(o, &recurrence.k),
            buffer(&grad, CHUNK),
            head_strides(&grad, CHUNK),
            head_grads(),
            call.eps(),
            call.launch_sizes(),
            call.split(),
        );
    }

    // 2. Through the recurrence.
    let d_o = reshaped(&d_o, &dims(&recurrence.q));
    let grads = recurrence.backward(&Saved::from_tensors(saved), &d_o);
    let Corrections::Vectors { removal, correction } = &grads.corrections else {
        unreachable!("the gradients are as the call")
    };

    // 3. To the inputs.
    let of_keys = || empty_by_token(like, [batch, kv_heads, seq_len, d]);
    let d_r = empty_by_token(like, like.meta.shape().dims());
    let [d_k, d_v, d_decay, d_rate] = std::array::from_fn(|_| of_keys());
    let of_key_vectors = empty(like, &[blocks, 2 * kv_heads * d], DType::F32);
    // SAFETY: as above.
    unsafe {
        kernel::prepare_back::launch_unchecked::<CudaRuntime>(
            &like.client,
            call.grid(kv_heads, MOST_PARTS),
            dim(THREADS),
            call.key_inputs(),
            call.starts(),
            RecurrenceGradsLaunch::new(
                vectors(&grads.log_decay, removal, correction, &grads.k),
                buffer(&grads.v, CHUNK),
                buffer(&grads.q, CHUNK),
            ),
            head_grads(),
            head_strides(&call.v, CHUNK),
            head_strides(&call.r, CHUNK),
            InputGradsLaunch::new(
                buffer(&d_r, CHUNK),
                head_strides(&d_r, CHUNK),
                buffer(&d_k, CHUNK),
                buffer(&d_v, CHUNK),
                buffer(&d_decay, CHUNK),
                buffer(&d_rate, CHUNK),
                head_strides(&d_k, CHUNK),
                buffer(&of_key_vectors, CHUNK),
            ),
            call.launch_sizes(),
            call.starts.is_some(),
            call.split(),
        );
    }
    let of_keys = |which| columns(&of_key_vectors, which * kv_heads * d, &[kv_heads * d], 1);
    let of_heads = |which| columns(&of_head_vectors, which * heads * d, &[heads * d], 1);
    let [d_decay, d_rate, d_gate] = [d_decay, d_rate, d_gate].map(by_token);
    [
        d_r,
        d_k,
        d_v,
        d_decay,
        d_rate,
        d_gate,
        of_keys(0),
        of_keys(1),
        of_heads(0),
        of_heads(1),
        of_heads(2),
    ]
}
