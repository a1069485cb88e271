//! The core for kinds whose past is a state, on CUDA's tensor cores: linear attention in chunks of 64 tokens, forward
//! and backward, in bf16 with states in f32 (`docs/chunked.md`).
//!
//! S_t = α_t S_{t−1} + β_t k_tᵀ e_t and o_t = q_t S_t, where e_t is the value v_t ([`Update::Additive`]), or what v_t
//! adds to what the decayed state holds for the key, v_t − α_t k_t S_{t−1} ([`Update::Delta`]). β may be left out. The
//! decay α is one number per token.
//!
//! 1. `sums`: the sums of log decays inside chunks.
//! 2. `transform`, for the delta rule: the system that ties a chunk's e to one another, inverted.
//! 3. `scan`: the state before each chunk, and e.
//! 4. `output`.
//!
//! Backward, `values_back` (for the delta rule before the scan), `scan_back` from the last chunk to the first, and
//! `gradients`. Every sum has one owner and a fixed order: equal inputs give equal bits.

// Device code has no `div_ceil` or `is_multiple_of`, and what is decided at compile time has an `if` of its own.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of, clippy::collapsible_if)]

pub mod diagonal;
mod gradients;
mod memory;
mod new_tokens;
mod output;
mod scan;
mod scan_back;
mod sizes;
mod sums;
#[cfg(test)]
mod tests;
mod transform;
mod values_back;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::diagonal::{Corrections, Diagonal};
use self::gradients::GradientArraysLaunch;
pub use self::memory::Update;
use self::memory::{ChunkConfig, ChunkInputsLaunch, EndStatesLaunch, HandOver, OutputElement};
pub use self::new_tokens::NewTokens;
use self::output::OutputArraysLaunch;
use self::scan::ScanArraysLaunch;
use self::scan_back::ScanBackArraysLaunch;
use self::sizes::CallSizes;
use self::values_back::ValueGradientArraysLaunch;
use super::AttentionShape;
use super::flash::Heads;
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty, multiprocessors};
use crate::ops::cuda::{as_u32, dim, dims, nothing};
use crate::tile::CHUNK;

/// Tokens of a chunk.
pub const CHUNK_TOKENS: usize = 64;

/// Threads of a block.
const THREADS: usize = crate::tile::product::THREADS;

/// The most channels of a query and a key.
const MAX_HEAD_DIM: usize = 128;

/// The most channels of a value.
const MAX_VALUE_DIM: usize = 4096;

/// Whether the core serves queries and keys of `head_dim` channels and values of `value_dim` channels, all of `dtype`.
pub fn serves(dtype: DType, head_dim: usize, value_dim: usize) -> bool {
    let fits =
        |channels: usize, most| channels.is_multiple_of(16) && (16..=most).contains(&channels);
    dtype == DType::BF16 && fits(head_dim, MAX_HEAD_DIM) && fits(value_dim, MAX_VALUE_DIM)
}

/// How many decays a token has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decays {
    /// One.
    PerToken,
    /// One for each channel of a key.
    PerChannel,
}

/// Bytes per token that the core saves of a layer beside its inputs.
pub fn saved_bytes(
    update: Update,
    decays: Decays,
    shape: &AttentionShape,
    value_dim: usize,
) -> f64 {
    let (d, chunk) = (shape.head_dim as f64, CHUNK_TOKENS as f64);
    let of_row = 4.0 + 2.0 * d * value_dim as f64 / chunk;
    match (decays, update) {
        (Decays::PerToken, Update::Additive) => shape.kv_heads as f64 * of_row,
        // With e and Y.
        (Decays::PerToken, Update::Delta) => {
            shape.kv_heads as f64 * (of_row + 2.0 * (value_dim as f64 + chunk))
        }
        (Decays::PerChannel, Update::Additive) => {
            diagonal::saved_bytes(diagonal::Update::Additive, shape, value_dim)
        }
        (Decays::PerChannel, Update::Delta) => {
            diagonal::saved_bytes(diagonal::Update::Delta, shape, value_dim)
        }
    }
}

/// An operation's forward pass on the core, whose result has type `output`, bf16 or f32: `inputs` are q, k, v and log
/// decays, one per token or, without weights of an additive update, one per channel. `None` where the core does not
/// serve them. See [`Chunked`] for the shapes.
pub fn forward(
    update: Update,
    inputs: [&CudaTensor; 4],
    beta: Option<&CudaTensor>,
    output: DType,
    needs: bool,
) -> Option<Forward<CudaTensor>> {
    let [q, _, v, log_decay] = inputs;
    if !serves(q.dtype, dims(q)[3], dims(v)[3]) {
        return None;
    }
    // The backward pass reads it too.
    let beta = &beta.map(contiguous);
    let beta = beta.as_ref();
    let (output, saved) = match dims(log_decay)[3] {
        1 => {
            let (y, saved) = Chunked::new(update, inputs, beta).forward(output);
            (y, saved.into_tensors())
        }
        _ => {
            let (y, saved) = diagonal(inputs, beta, update)?.forward(output);
            (y, saved.into_tensors())
        }
    };
    Some(Forward { output, saved: saved_with(inputs, beta, saved, needs) })
}

/// As [`forward`], from the state `before` the first token; also the state after the last. States are
/// `[batch · kv_heads, head_dim, value_dim]` in f32.
pub fn forward_from(
    update: Update,
    inputs: [&CudaTensor; 4],
    beta: Option<&CudaTensor>,
    output: DType,
    before: &CudaTensor,
    needs: bool,
) -> Option<(Forward<CudaTensor>, CudaTensor)> {
    let [q, _, v, log_decay] = inputs;
    if !serves(q.dtype, dims(q)[3], dims(v)[3]) {
        return None;
    }
    // The backward pass reads it too.
    let beta = &beta.map(contiguous);
    let beta = beta.as_ref();
    let (output, saved, after) = match dims(log_decay)[3] {
        1 => {
            let call = Chunked::new(update, inputs, beta);
            let (y, saved, after) = call.forward_from(output, Some(before));
            (y, saved.into_tensors(), after)
        }
        _ => {
            let call = diagonal(inputs, beta, update)?;
            let (y, saved, after) = call.forward_from(output, Some(before));
            (y, saved.into_tensors(), after)
        }
    };
    Some((Forward { output, saved: saved_with(inputs, beta, saved, needs) }, after))
}

/// What an operation saves for [`backward`], if it has one: its inputs, and what the core saves.
fn saved_with(
    inputs: [&CudaTensor; 4],
    beta: Option<&CudaTensor>,
    saved: Vec<CudaTensor>,
    needs: bool,
) -> Vec<CudaTensor> {
    match needs {
        true => inputs.into_iter().chain(beta).cloned().chain(saved).collect(),
        false => vec![],
    }
}

/// The states of rows before their first tokens and after their last.
#[derive(Clone, Debug, Default)]
struct States {
    before: Option<CudaTensor>,
    after: Option<CudaTensor>,
}

impl States {
    /// From `before` to a new state after the last token.
    fn between(before: Option<&CudaTensor>, like: &CudaTensor, shape: [usize; 3]) -> Self {
        let checked = |x: &CudaTensor| {
            assert_eq!(dims(x), shape, "the shape of the state");
            assert_eq!(x.dtype, DType::F32, "the type of the state");
            contiguous(x)
        };
        let after = Some(empty(like, &shape, DType::F32));
        States { before: before.map(checked), after }
    }

    fn launch(&self, like: &CudaTensor) -> EndStatesLaunch<CudaRuntime> {
        let or_nothing =
            |x: &Option<CudaTensor>| x.as_ref().map_or_else(|| nothing(like), |x| buffer(x, 2));
        EndStatesLaunch::new(or_nothing(&self.before), or_nothing(&self.after))
    }

    fn hand_over(&self) -> HandOver {
        HandOver { before: self.before.is_some(), after: self.after.is_some() }
    }
}

/// The gradients, from what [`forward`] saved.
pub fn backward(update: Update, saved: &[CudaTensor], grad: &CudaTensor) -> Grads {
    let [q, k, v, log_decay, rest @ ..] = saved else {
        unreachable!("the forward pass saves its inputs")
    };
    let inputs = [q, k, v, log_decay];
    if dims(log_decay)[3] == 1 {
        let (beta, saved) = rest.split_at(rest.len() - Saved::tensors(update));
        let call = Chunked::new(update, inputs, beta.first());
        return call.backward(&Saved::from_tensors(saved), grad);
    }
    let (beta, saved) = rest.split_at(usize::from(update == Update::Delta));
    let call = diagonal(inputs, beta.first(), update).expect("the forward pass has run");
    let Diagonal { q, k, v, log_decay, corrections } =
        call.backward(&diagonal::Saved::from_tensors(saved), grad);
    let beta = match corrections {
        Corrections::Weights(beta) => Some(beta),
        _ => None,
    };
    Grads { q, k, v, beta, log_decay }
}

/// The call for a decay per channel; `None` for an additive update with weights.
fn diagonal(
    [q, k, v, log_decay]: [&CudaTensor; 4],
    beta: Option<&CudaTensor>,
    update: Update,
) -> Option<Diagonal> {
    let corrections = match (update, beta) {
        (Update::Additive, None) => Corrections::None,
        (Update::Additive, Some(_)) => return None,
        (Update::Delta, beta) => Corrections::Weights(beta?.clone()),
    };
    let [q, k, v, log_decay] = [q, k, v, log_decay].map(CudaTensor::clone);
    Some(Diagonal { q, k, v, log_decay, corrections })
}

/// One call. A row is one kv head of one sequence; its group of query heads reads its state.
#[derive(Clone, Debug)]
pub struct Chunked {
    /// `[batch, heads, seq_len, head_dim]` in bf16, times the scale.
    q: Heads,
    /// `[batch, kv_heads, seq_len, head_dim]` in bf16.
    k: Heads,
    /// `[batch, kv_heads, seq_len, value_dim]` in bf16.
    v: Heads,
    /// `[batch, kv_heads, seq_len, 1]` in f32, at most 0.
    log_decay: CudaTensor,
    /// `[batch, kv_heads, seq_len, 1]` in f32, at least 0.
    beta: Option<CudaTensor>,
    update: Update,
    sizes: CallSizes,
}

/// What the forward pass leaves for the backward pass.
#[derive(Clone, Debug)]
pub struct Saved {
    /// P, `[rows, chunks, 64]` in f32.
    sums: CudaTensor,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]` in bf16.
    states: CudaTensor,
    /// Under the delta rule e, `[batch, kv_heads, seq_len, value_dim]`, and Y, `[rows, chunks, 64, 64]`, in bf16.
    corrected: Option<[CudaTensor; 2]>,
}

impl Saved {
    /// How many tensors there are.
    const fn tensors(update: Update) -> usize {
        match update {
            Update::Additive => 2,
            Update::Delta => 4,
        }
    }

    /// The tensors, in a fixed order.
    fn into_tensors(self) -> Vec<CudaTensor> {
        let corrected = self.corrected.into_iter().flatten();
        [self.sums, self.states].into_iter().chain(corrected).collect()
    }

    /// The inverse of [`Saved::into_tensors`].
    ///
    /// # Panics
    /// For another number of tensors.
    fn from_tensors(tensors: &[CudaTensor]) -> Self {
        let corrected = match tensors {
            [_, _] => None,
            [_, _, e, y] => Some([e.clone(), y.clone()]),
            _ => panic!("{} tensors saved", tensors.len()),
        };
        Saved { sums: tensors[0].clone(), states: tensors[1].clone(), corrected }
    }
}

/// The gradients of a call's inputs.
#[derive(Clone, Debug)]
pub struct Grads {
    /// As q, in bf16.
    pub q: CudaTensor,
    /// As k, in bf16.
    pub k: CudaTensor,
    /// As v, in bf16.
    pub v: CudaTensor,
    /// As β, in f32, if values are weighted.
    pub beta: Option<CudaTensor>,
    /// As the log decays, in f32.
    pub log_decay: CudaTensor,
}

impl Chunked {
    /// Copies decays and weights that are not contiguous, and other tensors whose chunks are not whole and aligned.
    ///
    /// # Panics
    /// Where shapes disagree, or [`serves`] is false.
    pub fn new(
        update: Update,
        [q, k, v, log_decay]: [&CudaTensor; 4],
        beta: Option<&CudaTensor>,
    ) -> Self {
        let sizes = CallSizes::new(q, v);
        let CallSizes { heads, seq_len, head_dim: d, value_dim, .. } = sizes;
        assert_eq!(dims(k), sizes.of_keys(d), "the shape of k");
        for (name, x) in [("k", k), ("v", v)] {
            assert_eq!(x.dtype, DType::BF16, "the type of {name}");
        }
        for (name, x) in [("the log decays", Some(log_decay)), ("beta", beta)] {
            let Some(x) = x else { continue };
            assert_eq!(dims(x), sizes.of_keys(1), "the shape of {name}");
            assert_eq!(x.dtype, DType::F32, "the type of {name}");
        }
        // Kernels count pairs of elements in 32 bits.
        let states = sizes.rows() * sizes.chunks() * d * value_dim;
        let most = states.max(sizes.batch * heads * seq_len * d.max(value_dim)) / 2;
        assert!(u32::try_from(most).is_ok(), "{most} pairs of q, of the output or of states");
        let [q, k, v] = [q, k, v].map(Heads::new);
        let (log_decay, beta) = (contiguous(log_decay), beta.map(contiguous));
        Chunked { q, k, v, log_decay, beta, update, sizes }
    }

    /// The configuration of kernels that hold at most `most` channels of values in shared memory.
    fn config(&self, most: usize) -> ChunkConfig {
        let sizes @ CallSizes { head_dim, value_dim, .. } = self.sizes;
        let (columns, weighted) = (sizes.columns(most), self.beta.is_some());
        ChunkConfig { head_dim, value_dim, columns, update: self.update, weighted }
    }

    /// The configuration of scans: narrow parts where wide ones would leave multiprocessors without a block.
    fn scan_config(&self) -> ChunkConfig {
        let wide = self.config(32);
        let blocks = self.sizes.rows() * wide.parts();
        if blocks < multiprocessors(&self.q.tensor.client) { self.config(16) } else { wide }
    }

    fn inputs(&self, sums: &CudaTensor) -> ChunkInputsLaunch<CudaRuntime> {
        let beta = self.beta.as_ref().map_or_else(|| nothing(sums), |beta| buffer(beta, 1));
        ChunkInputsLaunch::new(self.q.chunks(), self.k.chunks(), buffer(sums, 1), beta)
    }

    /// y `[batch, heads, seq_len, value_dim]` in type `output`, bf16 or f32, in the memory order `[batch, seq_len, heads,
    /// value_dim]`.
    ///
    /// # Panics
    /// For another type.
    pub fn forward(&self, output: DType) -> (CudaTensor, Saved) {
        self.run(output, &States::default())
    }

    /// As [`forward`](Self::forward), from the state `before` the first token, 0 if there is none; also the state after
    /// the last token. States are `[batch · kv_heads, head_dim, value_dim]` in f32.
    ///
    /// # Panics
    /// When the state has another shape or type.
    pub fn forward_from(
        &self,
        output: DType,
        before: Option<&CudaTensor>,
    ) -> (CudaTensor, Saved, CudaTensor) {
        let sizes = self.sizes;
        let shape = [sizes.rows(), sizes.head_dim, sizes.value_dim];
        let states = States::between(before, &self.q.tensor, shape);
        let (y, saved) = self.run(output, &states);
        (y, saved, states.after.expect("the state after the last token"))
    }

    /// As [`forward`](Self::forward), between states.
    fn run(&self, output: DType, states: &States) -> (CudaTensor, Saved) {
        let (sizes, like) = (self.sizes, &self.q.tensor);
        let CallSizes { head_dim: d, value_dim, .. } = sizes;
        let (rows, chunks) = (sizes.rows(), sizes.chunks());
        let saved = Saved {
            sums: empty(like, &[rows, chunks, CHUNK_TOKENS], DType::F32),
            states: empty(like, &[rows, chunks, d, value_dim], DType::BF16),
            corrected: (self.update == Update::Delta).then(|| {
                [sizes.of_keys(value_dim), [rows, chunks, CHUNK_TOKENS, CHUNK_TOKENS]]
                    .map(|shape| empty(like, &shape, DType::BF16))
            }),
        };
        let number = rows * chunks;
        let of = |blocks| CubeCount::Static(as_u32(blocks), 1, 1);
        // SAFETY: all kernels stay within the rows' tokens and chunks.
        unsafe {
            sums::chunk_sums::launch_unchecked::<CudaRuntime>(
                &like.client,
                of(number.div_ceil(sums::CHUNKS_PER_BLOCK)),
                dim(THREADS),
                buffer(&self.log_decay, 1),
                buffer(&saved.sums, 1),
                sizes.launch(),
                as_u32(number),
            );
            if let Some([_, y]) = &saved.corrected {
                transform::transform::launch_unchecked::<CudaRuntime>(
                    &like.client,
                    of(number),
                    dim(THREADS),
                    self.inputs(&saved.sums),
                    buffer(y, CHUNK),
                    sizes.launch(),
                    self.config(64),
                );
            }
            let (e, y) = self.corrected(&saved);
            let config = self.scan_config();
            scan::scan::launch_unchecked::<CudaRuntime>(
                &like.client,
                of(rows * config.parts()),
                dim(THREADS),
                self.inputs(&saved.sums),
                ScanArraysLaunch::new(
                    self.v.chunks(),
                    buffer(y, CHUNK),
                    buffer(&saved.states, CHUNK),
                    e.pairs(),
                ),
                states.launch(like),
                sizes.launch(),
                states.hand_over(),
                config,
            );
        }
        let o = match output {
            DType::F32 => self.outputs::<f32>(&saved),
            DType::BF16 => self.outputs::<bf16>(&saved),
            other => panic!("outputs in {other:?}, not in bf16 or f32"),
        };
        (o, saved)
    }

    /// The last step of the forward pass.
    fn outputs<O: OutputElement>(&self, saved: &Saved) -> CudaTensor {
        let (sizes, like) = (self.sizes, &self.q.tensor);
        let (e, _) = self.corrected(saved);
        let o = self.q.like_with(O::dtype(), sizes.value_dim);
        let heads = sizes.rows() * sizes.group();
        // SAFETY: as in `run`.
        unsafe {
            output::output::launch_unchecked::<O, CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(heads * sizes.chunks()), 1, 1),
                dim(THREADS),
                self.inputs(&saved.sums),
                OutputArraysLaunch::new(e.chunks(), buffer(&saved.states, CHUNK), o.pairs()),
                sizes.launch(),
                self.config(64),
            );
        }
        o.tensor
    }

    /// e and Y; without a correction e is v, and nothing reads Y.
    fn corrected<'a>(&'a self, saved: &'a Saved) -> (Heads, &'a CudaTensor) {
        match &saved.corrected {
            Some([e, y]) => (Heads::in_place(e), y),
            None => (self.v.clone(), &self.v.tensor),
        }
    }

    /// The gradients, where `grad` is that of y.
    ///
    /// # Panics
    /// When its shape is another.
    pub fn backward(&self, saved: &Saved, grad: &CudaTensor) -> Grads {
        let (sizes, like) = (self.sizes, &self.q.tensor);
        let CallSizes { batch, heads, seq_len, head_dim: d, value_dim, .. } = sizes;
        assert_eq!(dims(grad), [batch, heads, seq_len, value_dim], "the shape of the gradient");
        assert_eq!(grad.dtype, DType::BF16, "the type of the gradient");
        let (rows, chunks) = (sizes.rows(), sizes.chunks());
        let (d_o, number) = (Heads::new(grad), rows * chunks);
        let of = |blocks| CubeCount::Static(as_u32(blocks), 1, 1);
        let of_tokens = || empty(like, &sizes.of_keys(1), DType::F32);
        let [d_q, d_k, d_v] = [&self.q, &self.k, &self.v].map(Heads::like);
        let (d_log_decay, d_beta) = (of_tokens(), self.beta.is_some().then(of_tokens));
        let d_states = empty(like, &[rows, chunks, d, value_dim], DType::BF16);
        let (e, y) = self.corrected(saved);
        let is_delta = self.update == Update::Delta;
        let d_w = if is_delta { d_v.like() } else { d_v.clone() };
        let values = || {
            let config = self.config(64);
            // SAFETY: as in `forward`.
            unsafe {
                values_back::value_gradients::launch_unchecked::<CudaRuntime>(
                    &like.client,
                    of(number * config.parts()),
                    dim(THREADS),
                    self.inputs(&saved.sums),
                    ValueGradientArraysLaunch::new(
                        d_o.chunks(),
                        buffer(&d_states, CHUNK),
                        d_w.pairs(),
                    ),
                    sizes.launch(),
                    config,
                );
            }
        };
        if is_delta {
            values();
        }
        let config = self.scan_config();
        // SAFETY: as in `forward`.
        unsafe {
            scan_back::scan_back::launch_unchecked::<CudaRuntime>(
                &like.client,
                of(rows * config.parts()),
                dim(THREADS),
                self.inputs(&saved.sums),
                ScanBackArraysLaunch::new(
                    d_o.chunks(),
                    buffer(y, CHUNK),
                    d_w.chunks(),
                    buffer(&d_states, CHUNK),
                    d_v.pairs(),
                ),
                sizes.launch(),
                config,
            );
        }
        if !is_delta {
            values();
        }
        let of_beta = d_beta.as_ref().unwrap_or(&d_log_decay);
        // SAFETY: as in `forward`.
        unsafe {
            gradients::gradients::launch_unchecked::<CudaRuntime>(
                &like.client,
                of(number),
                dim(THREADS),
                self.inputs(&saved.sums),
                GradientArraysLaunch::new(
                    d_o.chunks(),
                    e.chunks(),
                    d_v.chunks(),
                    buffer(&saved.states, CHUNK),
                    buffer(&d_states, CHUNK),
                    buffer(&self.log_decay, 1),
                    d_q.pairs(),
                    d_k.pairs(),
                    buffer(&d_log_decay, 1),
                    buffer(of_beta, 1),
                ),
                sizes.launch(),
                self.config(64),
            );
        }
        let [q, k, v] = [d_q, d_k, d_v].map(|x| x.tensor);
        Grads { q, k, v, beta: d_beta, log_decay: d_log_decay }
    }
}
