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
    VectorsLaunch,
};
use super::NORM_EPS;
use crate::attention::chunked;
use crate::attention::chunked::diagonal::{Corrections, Diagonal, Saved};
use crate::attention::per_token::{MOST_PARTS, Tokens, by_head, by_token, in_chunks};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, empty, reshaped};
use crate::ops::cuda::sums::columns;
use crate::ops::cuda::{
    THREADS, as_u32, dim, dims, elements, head_strides, integers, nothing, vector,
};
use crate::tile::CHUNK;

/// Tensors of inputs.
const INPUTS: usize = 11;

/// A call of the kernels.
struct Call {
    /// r and v, `[batch, heads or kv_heads, seq_len, head_dim]`, with neighbouring channels, as the next two.
    r: CudaTensor,
    v: CudaTensor,
    /// Of the same shape as v: k, and the logits of the decay and of the learning rate.
    keys: [CudaTensor; 3],
    /// Of the same shape as r.
    gate: CudaTensor,
    /// ξ, α, ρ, the norm's scale and bias.
    parameters: [CudaTensor; 5],
    /// The start of each token's document, `[batch, seq_len]`.
    starts: Option<CudaTensor>,
}

impl Call {
    fn new(inputs: &[CudaTensor], ints: &[CudaTensor]) -> Self {
        let [r, k, v, decay, rate, gate, parameters @ ..] = inputs else {
            panic!("{INPUTS} inputs")
        };
        let ([batch, heads, seq_len, d], kv_heads) = (r.meta.shape().dims(), dims(k)[1]);
        let (of_keys, logits) = ([batch, kv_heads, seq_len, d], [batch, seq_len, kv_heads * d]);
        let of_heads = [batch, seq_len, heads * d];
        let shapes: [&[usize]; 5] = [&of_keys, &of_keys, &logits, &logits, &of_heads];
        for (x, shape) in [k, v, decay, rate, gate].into_iter().zip(shapes) {
            assert_eq!(dims(x), shape, "the shape of an activation beside r of {:?}", dims(r));
            assert_eq!(x.dtype, r.dtype, "types of r and of the other activations");
        }
        let lengths = [kv_heads, kv_heads, heads, heads, heads];
        let names = ["removal_scale", "replacement", "bonus", "norm_scale", "norm_bias"];
        Call {
            r: in_chunks(r),
            v: in_chunks(v),
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

    fn of_heads(&self) -> Tokens {
        Tokens::of(&self.r)
    }

    fn of_keys(&self) -> Tokens {
        Tokens::of(&self.v)
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
        let tokens = self.of_keys();
        let log_decay = tokens.empty_by_token_of(&self.r, DType::F32);
        let [removal, correction, k] = [(); 3].map(|()| tokens.empty_by_token(&self.r));
        // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
        unsafe {
            kernel::prepare::launch_unchecked::<CudaRuntime>(
                &self.r.client,
                tokens.grid(usize::MAX),
                dim(THREADS),
                self.key_inputs(),
                self.starts(),
                vectors(&log_decay, &removal, &correction, &k),
                tokens.launch(),
                self.starts.is_some(),
                tokens.split(),
            );
        }
        Diagonal {
            q: self.r.clone(),
            k,
            v: self.v.clone(),
            log_decay,
            corrections: Corrections::Vectors { removal, correction },
        }
    }

    fn head_inputs(&self, o: &CudaTensor, key: &CudaTensor) -> HeadInputsLaunch<CudaRuntime> {
        let [_, _, rho, scale, bias] = &self.parameters;
        HeadInputsLaunch::new(
            buffer(o, CHUNK),
            head_strides(o, CHUNK),
            buffer(&self.r, CHUNK),
            head_strides(&self.r, CHUNK),
            buffer(key, CHUNK),
            head_strides(key, CHUNK),
            buffer(&self.v, CHUNK),
            head_strides(&self.v, CHUNK),
            buffer(&self.gate, CHUNK),
            head_strides(&self.gate, CHUNK),
            buffer(rho, CHUNK),
            buffer(scale, CHUNK),
            buffer(bias, CHUNK),
            as_u32(self.group()),
        )
    }

    /// The outputs, where `o` are the recurrence's and `key` its k̃.
    fn outputs(&self, o: &CudaTensor, key: &CudaTensor) -> CudaTensor {
        let tokens = self.of_heads();
        let y = tokens.empty_by_token(&self.r);
        // SAFETY: threads stay within the tokens of the tensors, whose strides they get.
        unsafe {
            kernel::finish::launch_unchecked::<CudaRuntime>(
                &o.client,
                tokens.grid(usize::MAX),
                dim(THREADS),
                self.head_inputs(o, key),
                buffer(&y, CHUNK),
                head_strides(&y, CHUNK),
                self.eps(),
                tokens.launch(),
                tokens.split(),
            );
        }
        y
    }

    /// The outputs, where `o` are the recurrence's, and what [`backward`] takes if `save`: `inputs`, o, and what the
    /// recurrence saved.
    fn finished(
        self,
        inputs: &[CudaTensor; INPUTS],
        recurrence: &Diagonal,
        o: CudaTensor,
        saved: Saved,
        save: bool,
    ) -> Forward<CudaTensor> {
        let output = self.outputs(&o, &recurrence.k);
        if !save {
            return Forward { output, saved: vec![] };
        }
        let mut inputs = inputs.clone();
        (inputs[0], inputs[2]) = (self.r, self.v);
        let saved = inputs.into_iter().chain([o]).chain(saved.into_tensors()).collect();
        Forward { output, saved }
    }

    /// Query heads per key head.
    fn group(&self) -> usize {
        self.of_heads().heads / self.of_keys().heads
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
    let strides = |x: &CudaTensor| x.meta.strides().to_vec();
    for x in [log_decay, removal, correction] {
        assert_eq!(strides(x), strides(key), "strides of the recurrence's vectors");
    }
    let [removal, correction, of_key] = [removal, correction, key].map(|x| buffer(x, CHUNK));
    let (log_decay, strides) = (buffer(log_decay, CHUNK), head_strides(key, CHUNK));
    VectorsLaunch::new(log_decay, removal, correction, of_key, strides)
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub fn forward(
    inputs: &[CudaTensor; INPUTS],
    ints: &[CudaTensor],
    save: bool,
) -> Option<Forward<CudaTensor>> {
    if !serves(inputs) {
        return None;
    }
    let call = Call::new(inputs, ints);
    let recurrence = call.recurrence();
    let (o, saved) = recurrence.forward(DType::BF16);
    Some(call.finished(inputs, &recurrence, o, saved, save))
}

/// As [`forward`], from the state `before` the first token, 0 if there is none; also the state after the last. States
/// are `[batch, kv_heads, head_dim, head_dim]` in f32.
pub fn forward_from(
    inputs: &[CudaTensor; INPUTS],
    ints: &[CudaTensor],
    before: Option<&CudaTensor>,
    save: bool,
) -> Option<(Forward<CudaTensor>, CudaTensor)> {
    if !serves(inputs) {
        return None;
    }
    let call = Call::new(inputs, ints);
    let Tokens { batch, heads, channels: d, .. } = call.of_keys();
    let recurrence = call.recurrence();
    let before = before.map(|state| reshaped(state, &[batch * heads, d, d]));
    let (o, saved, after) = recurrence.forward_from(DType::BF16, before.as_ref());
    let forward = call.finished(inputs, &recurrence, o, saved, save);
    Some((forward, reshaped(&after, &[batch, heads, d, d])))
}

fn serves(inputs: &[CudaTensor; INPUTS]) -> bool {
    let (r, v) = (&inputs[0], &inputs[2]);
    chunked::serves(r.dtype, Tokens::of(r).channels, dims(v)[3]) && elements(v) > 0
}

/// The gradients of the inputs, where `grad` is that of the output and `saved` what [`forward`] saved.
pub fn backward(
    saved: &[CudaTensor],
    ints: &[CudaTensor],
    grad: &CudaTensor,
) -> [CudaTensor; INPUTS] {
    let (inputs, saved) = saved.split_at(INPUTS);
    let (call, o, saved) = (Call::new(inputs, ints), &saved[0], &saved[1..]);
    let (of_heads, of_keys, like) = (call.of_heads(), call.of_keys(), &call.r);
    let [heads, keys] = [of_heads, of_keys].map(|of| of.heads * of.channels);
    let grad = in_chunks(grad);
    assert_eq!(dims(&grad), dims(like), "the shape of the gradient");
    assert_eq!(grad.dtype, DType::BF16, "the type of the gradient");
    let recurrence = call.recurrence();

    // 1. To the recurrence's o, and through the bonus to its key heads' inputs.
    let [d_o, d_r, d_key, d_v, d_gate] = [(); 5].map(|()| of_heads.empty_by_token(like));
    let blocks = of_heads.blocks(MOST_PARTS);
    let head_vectors = empty(like, &[blocks, 3 * heads], DType::F32);
    let head_grads = || {
        HeadGradsLaunch::new(
            buffer(&d_o, CHUNK),
            buffer(&d_r, CHUNK),
            buffer(&d_key, CHUNK),
            buffer(&d_v, CHUNK),
            buffer(&d_gate, CHUNK),
            head_strides(&d_gate, CHUNK),
            buffer(&head_vectors, CHUNK),
        )
    };
    // SAFETY: threads stay within the tokens of the tensors, whose strides they get, and blocks within their parts.
    unsafe {
        kernel::finish_back::launch_unchecked::<CudaRuntime>(
            &like.client,
            of_heads.grid(MOST_PARTS),
            dim(THREADS),
            call.head_inputs(o, &recurrence.k),
            buffer(&grad, CHUNK),
            head_strides(&grad, CHUNK),
            head_grads(),
            call.eps(),
            of_heads.launch(),
            of_heads.split(),
        );
    }

    // 2. Through the recurrence.
    let grads = recurrence.backward(&Saved::from_tensors(saved), &d_o);
    let Corrections::Vectors { removal, correction } = &grads.corrections else {
        unreachable!("the gradients are as the call")
    };

    // 3. To the inputs.
    let d_r = of_heads.empty_by_token(like);
    let [d_k, d_v, d_decay, d_rate] = [(); 4].map(|()| of_keys.empty_by_token(like));
    let key_vectors = empty(like, &[blocks, 2 * keys], DType::F32);
    // SAFETY: as above.
    unsafe {
        kernel::prepare_back::launch_unchecked::<CudaRuntime>(
            &like.client,
            of_keys.grid(MOST_PARTS),
            dim(THREADS),
            call.key_inputs(),
            call.starts(),
            RecurrenceGradsLaunch::new(
                vectors(&grads.log_decay, removal, correction, &grads.k),
                buffer(&grads.v, CHUNK),
                head_strides(&grads.v, CHUNK),
                buffer(&grads.q, CHUNK),
                head_strides(&grads.q, CHUNK),
            ),
            head_grads(),
            as_u32(call.group()),
            InputGradsLaunch::new(
                buffer(&d_r, CHUNK),
                head_strides(&d_r, CHUNK),
                buffer(&d_k, CHUNK),
                buffer(&d_v, CHUNK),
                buffer(&d_decay, CHUNK),
                buffer(&d_rate, CHUNK),
                head_strides(&d_k, CHUNK),
                buffer(&key_vectors, CHUNK),
            ),
            of_keys.launch(),
            call.starts.is_some(),
            of_keys.split(),
        );
    }
    let [d_decay, d_rate, d_gate] = [d_decay, d_rate, d_gate].map(by_token);
    let [d_xi, d_alpha] = [0, 1].map(|at| columns(&key_vectors, at * keys, &[keys], 1));
    let [d_rho, d_scale, d_bias] =
        [0, 1, 2].map(|at| columns(&head_vectors, at * heads, &[heads], 1));
    [d_r, d_k, d_v, d_decay, d_rate, d_gate, d_xi, d_alpha, d_rho, d_scale, d_bias]
}
