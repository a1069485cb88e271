//! The core for states each of whose channels decays at its own rate (`docs/chunked.md`, "A decay per channel").
//!
//! S_t = diag(α_t) S_{t−1} + what the token writes, and o_t = q_t S_t. See [`Update`] for what it writes.
//!
//! 1. `transform`: what each chunk does to the state, S' = (diag(decay) + G) S + Kᵀ V.
//! 2. `queries`: what its queries read, o = Q S + C V.
//! 3. `scan`: the state before each chunk.
//! 4. `output`.
//!
//! Backward, the scan from the last chunk to the first, the values' gradients, and two kernels that go back through 1
//! and 2: `matrices_back` to decayed vectors and scores, `vectors_back` from there to vectors and decays. Every sum has
//! one owner and a fixed order: equal inputs give equal bits.

mod backward;
mod levels;
mod matrices_back;
mod near;
mod output;
mod queries;
mod scan;
mod scores;
#[cfg(test)]
mod tests;
mod transform;
mod vectors_back;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::output::OutputArraysLaunch;
use self::queries::QueryArraysLaunch;
use self::scan::ScanArraysLaunch;
use self::transform::TransformArraysLaunch;
use super::{CHUNK_TOKENS, CallSizes, OutputElement, States, THREADS};
use crate::attention::AttentionShape;
use crate::attention::flash::{HeadChunks, HeadChunksLaunch, HeadNumbers, Heads};
use crate::cuda::{CudaTensor, buffer, contiguous, empty, multiprocessors};
use crate::ops::cuda::{as_u32, dim, dims, nothing};
use crate::tile::CHUNK;
use crate::tile::matrix::{Matrix, Product};

/// A tensor `[batch, heads, seq_len, channels]` in bf16 as an argument.
fn head_chunks(x: &CudaTensor) -> HeadChunksLaunch<CudaRuntime> {
    Heads::in_place(x).chunks()
}

/// What a token writes to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Update {
    /// k_tᵀ v_t.
    Additive,
    /// k_tᵀ β_t (v_t − k_t diag(α_t) S_{t−1}).
    Delta,
    /// k_tᵀ v_t − b_tᵀ z_t S_{t−1}, with a removal key z and a correction b.
    Replace,
}

/// The compile-time configuration of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiagonalConfig {
    /// Channels of a query and a key, a multiple of 16, at most 128.
    head_dim: usize,
    /// Channels of a value, a multiple of 16.
    value_dim: usize,
    /// Channels of a value that are in shared memory at a time: 16, 32 or 64, a divisor of `value_dim`.
    columns: usize,
    update: Update,
}

impl DiagonalConfig {
    const fn parts(&self) -> usize {
        self.value_dim / self.columns
    }

    /// Whether tokens correct the state.
    const fn corrects(&self) -> bool {
        !matches!(self.update, Update::Additive)
    }

    /// Kinds of vectors that are written: corrections, and keys beside them.
    const fn writers(&self) -> usize {
        if self.reads_before() { 2 } else { 1 }
    }

    /// Whether a removal key reads the state before its token's decay.
    const fn reads_before(&self) -> bool {
        matches!(self.update, Update::Replace)
    }

    /// The row of sums, from its token's on, up to which a removal key reads.
    const fn reads_after(&self) -> usize {
        if self.reads_before() { 0 } else { 1 }
    }

    /// Whether corrections have weights, β.
    const fn is_weighted(&self) -> bool {
        matches!(self.update, Update::Delta)
    }

    /// What corrections do.
    const fn corrects_by(&self) -> levels::Role {
        if self.is_weighted() { levels::Role::WritesWeighted } else { levels::Role::Writes }
    }

    /// How queries read.
    const fn queries_read(&self) -> Reading {
        Reading { after: 1, own: true }
    }

    /// How removal keys read.
    const fn removal_reads(&self) -> Reading {
        Reading { after: self.reads_after(), own: false }
    }

    /// A product whose result has the size of a chunk's vectors.
    const fn vectors(&self) -> Product {
        Product::ab(NOWHERE, NOWHERE, [CHUNK_TOKENS, self.head_dim, 16])
    }

    /// Fragments of a warp's part of a chunk's vectors.
    const fn fragments(&self) -> usize {
        self.vectors().fragments()
    }
}

/// For products of which only the size matters.
const NOWHERE: Matrix = Matrix::new(0, 16);

/// What a kind of readers reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Reading {
    /// The row of sums, from its token's on, up to which a reader reads: 1, or 0 if it reads before the decay of its
    /// token.
    after: usize,
    /// Whether it reads what its own token writes.
    own: bool,
}

impl Reading {
    const fn is_before(&self) -> bool {
        self.after == 0
    }
}

/// The inputs of the kernels. Without a correction of its own, an update's correction is its key, and so is its
/// removal key.
#[derive(CubeType, CubeLaunch)]
pub struct DiagonalInputs {
    /// `[batch, heads, tokens, head_dim]`
    pub q: HeadChunks,
    /// z, `[batch, kv_heads, tokens, head_dim]`.
    pub removal: HeadChunks,
    /// b, likewise.
    pub correction: HeadChunks,
    /// k, likewise.
    pub key: HeadChunks,
    /// `[batch, kv_heads, tokens, head_dim]`
    pub log_decay: HeadNumbers,
    /// β, `[rows, tokens]`.
    pub beta: Array<f32>,
}

/// The inputs of a call. A row is one kv head of one sequence; its group of query heads reads its state.
#[derive(Clone, Debug)]
pub struct Diagonal {
    /// `[batch, heads, seq_len, head_dim]` in bf16, times the scale.
    pub q: CudaTensor,
    /// `[batch, kv_heads, seq_len, head_dim]` in bf16.
    pub k: CudaTensor,
    /// `[batch, kv_heads, seq_len, value_dim]` in bf16.
    pub v: CudaTensor,
    /// `[batch, kv_heads, seq_len, head_dim]` in f32, at most 0.
    pub log_decay: CudaTensor,
    /// What corrects the state.
    pub corrections: Corrections,
}

/// What an update takes beside keys and values.
#[derive(Clone, Debug)]
pub enum Corrections<T = CudaTensor> {
    /// Nothing.
    None,
    /// β, `[batch, kv_heads, seq_len, 1]` in f32, at least 0, for the delta rule.
    Weights(T),
    /// Removal keys z and corrections b, `[batch, kv_heads, seq_len, head_dim]` each; in bf16 where the core takes
    /// them.
    Vectors {
        /// z
        removal: T,
        /// b
        correction: T,
    },
}

impl<T> Corrections<T> {
    /// The update that takes them.
    pub fn update(&self) -> Update {
        match self {
            Corrections::None => Update::Additive,
            Corrections::Weights(_) => Update::Delta,
            Corrections::Vectors { .. } => Update::Replace,
        }
    }

    /// With each tensor replaced.
    pub fn map<U>(self, f: impl Fn(T) -> U) -> Corrections<U> {
        match self {
            Corrections::None => Corrections::None,
            Corrections::Weights(beta) => Corrections::Weights(f(beta)),
            Corrections::Vectors { removal, correction } => {
                Corrections::Vectors { removal: f(removal), correction: f(correction) }
            }
        }
    }
}

/// The gradients of a call's inputs: of their shapes and types, in the same places.
pub type Grads = Diagonal;

/// What the forward pass leaves for the backward pass: what each chunk does and what is read of it, whatever its values
/// are, and the states.
#[derive(Clone, Debug)]
pub struct Saved {
    /// K, `[batch, kv_heads, seq_len, head_dim]` in bf16.
    keys: CudaTensor,
    /// `[rows, chunks, head_dim]` in f32.
    decay: CudaTensor,
    /// Q, `[batch, heads, seq_len, head_dim]` in bf16.
    queries: CudaTensor,
    /// C, `[rows, group, chunks, 64, 64]` in bf16.
    scores: CudaTensor,
    /// The states before the chunks, `[rows, chunks, head_dim, value_dim]` in bf16.
    states: CudaTensor,
    corrected: Option<Corrected>,
}

/// What there is for corrections, in bf16.
#[derive(Clone, Debug)]
struct Corrected {
    /// G, `[rows, chunks, head_dim, head_dim]`.
    change: CudaTensor,
    /// T, `[rows, chunks, 64, 64]`.
    transfer: CudaTensor,
    /// W, `[rows, chunks, 64, head_dim]`.
    reads: CudaTensor,
    /// Y, as T.
    inverse: CudaTensor,
    /// D, as C.
    of_corrections: CudaTensor,
}

impl Saved {
    /// The tensors, in a fixed order.
    pub fn into_tensors(self) -> Vec<CudaTensor> {
        let Saved { keys, decay, queries, scores, states, corrected } = self;
        let corrected = corrected
            .into_iter()
            .flat_map(|x| [x.change, x.transfer, x.reads, x.inverse, x.of_corrections]);
        [keys, decay, queries, scores, states].into_iter().chain(corrected).collect()
    }

    /// The inverse of [`Saved::into_tensors`].
    ///
    /// # Panics
    /// For another number of tensors.
    pub fn from_tensors(tensors: &[CudaTensor]) -> Self {
        let [keys, decay, queries, scores, states, corrected @ ..] = tensors else {
            panic!("{} tensors saved", tensors.len())
        };
        let corrected = match corrected {
            [] => None,
            [change, transfer, reads, inverse, of_corrections] => {
                let [change, transfer, reads, inverse, of_corrections] =
                    [change, transfer, reads, inverse, of_corrections].map(CudaTensor::clone);
                Some(Corrected { change, transfer, reads, inverse, of_corrections })
            }
            _ => panic!("{} tensors saved", tensors.len()),
        };
        let [keys, decay, queries, scores, states] =
            [keys, decay, queries, scores, states].map(CudaTensor::clone);
        Saved { keys, decay, queries, scores, states, corrected }
    }
}

/// Bytes per token that the core saves of a layer beside its inputs.
pub fn saved_bytes(update: Update, shape: &AttentionShape, value_dim: usize) -> f64 {
    let (d, chunk) = (shape.head_dim as f64, CHUNK_TOKENS as f64);
    let corrects = f64::from(u8::from(update != Update::Additive));
    // Of each query head Q, C and D; of each row K, the decay in f32, the states, and G, T, W and Y.
    let of_head = d + chunk * (1.0 + corrects);
    let of_row = d + 2.0 * d / chunk + d * value_dim as f64 / chunk;
    let of_row = of_row + corrects * (d * d / chunk + d + 2.0 * chunk);
    2.0 * (shape.heads as f64 * of_head + shape.kv_heads as f64 * of_row)
}

impl Diagonal {
    /// With weights that are contiguous, and other tensors whose chunks are whole and aligned.
    ///
    /// # Panics
    /// Where shapes disagree, or [`serves`](super::serves) is false.
    fn checked(&self) -> Self {
        let sizes = self.sizes();
        let CallSizes { head_dim: d, value_dim, .. } = sizes;
        let check = |name: &str, x: &CudaTensor, channels: usize, dtype: DType| {
            assert_eq!(dims(x), sizes.of_keys(channels), "the shape of {name}");
            assert_eq!(x.dtype, dtype, "the type of {name}");
            if channels == 1 { contiguous(x) } else { Heads::new(x).tensor }
        };
        let log_decay = check("the log decays", &self.log_decay, d, DType::F32);
        // Kernels count elements of decays in 32 bits, in the memory that a view spans.
        let spans = log_decay.meta.strides().iter().zip(sizes.of_keys(d));
        as_u32(spans.map(|(stride, dim)| stride * dim.saturating_sub(1)).sum::<usize>() + 1);
        // Kernels count pairs of elements in 32 bits.
        let chunks = sizes.rows() * sizes.chunks();
        let states = chunks * d * d.max(value_dim);
        let tokens = chunks * CHUNK_TOKENS * sizes.group();
        let most = states.max(tokens * d.max(value_dim).max(CHUNK_TOKENS)) / 2;
        assert!(u32::try_from(most).is_ok(), "{most} pairs of q, of the output or of states");
        Diagonal {
            q: Heads::new(&self.q).tensor,
            k: check("k", &self.k, d, DType::BF16),
            v: check("v", &self.v, value_dim, DType::BF16),
            log_decay,
            corrections: match &self.corrections {
                Corrections::None => Corrections::None,
                Corrections::Weights(beta) => {
                    Corrections::Weights(check("beta", beta, 1, DType::F32))
                }
                Corrections::Vectors { removal, correction } => Corrections::Vectors {
                    removal: check("the removal keys", removal, d, DType::BF16),
                    correction: check("the corrections", correction, d, DType::BF16),
                },
            },
        }
    }

    fn sizes(&self) -> CallSizes {
        CallSizes::new(&self.q, &self.v)
    }

    /// The configuration of kernels that hold at most `most` channels of values in shared memory.
    fn config(&self, most: usize) -> DiagonalConfig {
        let sizes @ CallSizes { head_dim, value_dim, .. } = self.sizes();
        let (columns, update) = (sizes.columns(most), self.corrections.update());
        DiagonalConfig { head_dim, value_dim, columns, update }
    }

    /// The configuration of scans: the widest parts that still give all multiprocessors a block.
    fn scan_config(&self) -> DiagonalConfig {
        let enough = |most: usize| {
            let parts = self.config(most).parts();
            self.sizes().rows() * parts >= multiprocessors(&self.q.client)
        };
        let most = [32].into_iter().find(|most| enough(*most)).unwrap_or(16);
        self.config(most)
    }

    fn inputs(&self) -> DiagonalInputsLaunch<CudaRuntime> {
        let (removal, correction, beta) = match &self.corrections {
            Corrections::None => (&self.k, &self.k, None),
            Corrections::Weights(beta) => (&self.k, &self.k, Some(beta)),
            Corrections::Vectors { removal, correction } => (removal, correction, None),
        };
        DiagonalInputsLaunch::new(
            head_chunks(&self.q),
            head_chunks(removal),
            head_chunks(correction),
            head_chunks(&self.k),
            Heads::in_place(&self.log_decay).numbers(),
            beta.map_or_else(|| nothing(&self.log_decay), |beta| buffer(beta, 1)),
        )
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
        let sizes = self.sizes();
        let shape = [sizes.rows(), sizes.head_dim, sizes.value_dim];
        let states = States::between(before, &self.q, shape);
        let (y, saved) = self.run(output, &states);
        (y, saved, states.after.expect("the state after the last token"))
    }

    /// As [`forward`](Self::forward), between states.
    fn run(&self, output: DType, end_states: &States) -> (CudaTensor, Saved) {
        let call = self.checked();
        let (sizes, like, all) = (call.sizes(), &call.q, CHUNK_TOKENS);
        let CallSizes { head_dim: d, value_dim, .. } = sizes;
        let (rows, group, chunks) = (sizes.rows(), sizes.group(), sizes.chunks());
        let of = |shape: &[usize]| empty(like, shape, DType::BF16);
        let corrects = call.corrections.update() != Update::Additive;
        let saved = Saved {
            keys: of(&sizes.of_keys(d)),
            decay: empty(like, &[rows, chunks, d], DType::F32),
            queries: of(&dims(like)),
            scores: of(&[rows, group, chunks, all, all]),
            states: of(&[rows, chunks, d, value_dim]),
            corrected: corrects.then(|| Corrected {
                change: of(&[rows, chunks, d, d]),
                transfer: of(&[rows, chunks, all, all]),
                reads: of(&[rows, chunks, all, d]),
                inverse: of(&[rows, chunks, all, all]),
                of_corrections: of(&[rows, group, chunks, all, all]),
            }),
        };
        let Saved { keys, decay, queries, scores, states, corrected } = &saved;
        let corrected = corrected.as_ref();
        let or_nothing = |x: Option<&CudaTensor>, lanes| buffer(x.unwrap_or(keys), lanes);
        let config = call.config(64);
        // SAFETY: the kernels stay within the rows' tokens and chunks.
        unsafe {
            transform::diagonal_transform::launch_unchecked::<CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(rows * chunks), 1, 1),
                dim(THREADS),
                call.inputs(),
                TransformArraysLaunch::new(
                    Heads::in_place(keys).pairs(),
                    buffer(decay, 1),
                    or_nothing(corrected.map(|x| &x.change), 2),
                    or_nothing(corrected.map(|x| &x.transfer), CHUNK),
                    or_nothing(corrected.map(|x| &x.reads), 2),
                    or_nothing(corrected.map(|x| &x.inverse), CHUNK),
                ),
                sizes.launch(),
                config,
            );
            queries::diagonal_queries::launch_unchecked::<CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(rows * group * chunks), 1, 1),
                dim(THREADS),
                call.inputs(),
                QueryArraysLaunch::new(
                    or_nothing(corrected.map(|x| &x.transfer), CHUNK),
                    or_nothing(corrected.map(|x| &x.reads), CHUNK),
                    Heads::in_place(queries).pairs(),
                    buffer(scores, 2),
                    or_nothing(corrected.map(|x| &x.of_corrections), 2),
                ),
                sizes.launch(),
                config,
            );
        }
        call.scan(&saved, &call.v, states, end_states, false);
        let o = match output {
            DType::F32 => call.outputs::<f32>(&saved),
            DType::BF16 => call.outputs::<bf16>(&saved),
            other => panic!("outputs in {other:?}, not in bf16 or f32"),
        };
        (o, saved)
    }

    /// The last step of the forward pass.
    fn outputs<O: OutputElement>(&self, saved: &Saved) -> CudaTensor {
        let (sizes, like) = (self.sizes(), &self.q);
        let o = Heads::in_place(like).like_with(O::dtype(), sizes.value_dim);
        let heads = sizes.rows() * sizes.group();
        // SAFETY: as in `run`.
        unsafe {
            output::diagonal_output::launch_unchecked::<O, CudaRuntime>(
                &like.client,
                CubeCount::Static(as_u32(heads * sizes.chunks()), 1, 1),
                dim(THREADS),
                OutputArraysLaunch::new(
                    head_chunks(&saved.queries),
                    buffer(&saved.scores, CHUNK),
                    head_chunks(&self.v),
                    buffer(&saved.states, CHUNK),
                    o.pairs(),
                ),
                sizes.launch(),
                self.config(64),
            );
        }
        o.tensor
    }

    /// Computes the states before the chunks; or, `back`, the gradients of those after them, where `values` is that of
    /// the output.
    fn scan(
        &self,
        saved: &Saved,
        values: &CudaTensor,
        states: &CudaTensor,
        end_states: &States,
        back: bool,
    ) {
        let (sizes, config) = (self.sizes(), self.scan_config());
        let vectors = if back { &saved.queries } else { &saved.keys };
        let change = saved.corrected.as_ref().map_or(vectors, |x| &x.change);
        // SAFETY: as in `forward`.
        unsafe {
            scan::diagonal_scan::launch_unchecked::<CudaRuntime>(
                &self.q.client,
                CubeCount::Static(as_u32(sizes.rows() * config.parts()), 1, 1),
                dim(THREADS),
                ScanArraysLaunch::new(
                    head_chunks(vectors),
                    head_chunks(values),
                    buffer(&saved.decay, 1),
                    buffer(change, CHUNK),
                    buffer(states, CHUNK),
                ),
                end_states.launch(&self.q),
                sizes.launch(),
                back,
                end_states.hand_over(),
                config,
            );
        }
    }
}
