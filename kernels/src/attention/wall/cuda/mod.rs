//! Wall attention on CUDA's tensor cores: softmax attention on q and k that are relative to their
//! tiles' ends (`softmax::cuda::gates`), with what is done once for each token before and after.

// Device code has no `div_ceil` or `is_multiple_of`.
#[allow(clippy::manual_is_multiple_of)]
pub(super) mod decode;
#[allow(clippy::manual_div_ceil)]
mod kernels;
#[allow(clippy::duplicate_underscore_argument)]
mod key_gate;
mod prune;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::kernels::{ClampLaunch, Options, Reach, SizesLaunch};
pub use self::key_gate::logits_of_token;
use super::Wall;
use crate::attention::softmax::cuda::{
    GATE_TILE, Gates, Heads, Pruned, StepsLaunch, backward_gated, forward_gated, padded, steps,
};
use crate::attention::softmax::{Softmax, cuda_serves};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::integers;

/// Channels that a unit handles.
const PAIR: usize = 2;

/// What all passes of one call share.
struct Call<'a> {
    op: &'a Wall,
    /// `[batch, heads, tokens, head_dim]` of q.
    dims: [usize; 4],
    kv_heads: usize,
    /// `[batch, kv_heads, tokens, gated]`, [`dense`].
    gate: CudaTensor,
    /// Tokens of the first one's tile that are before it.
    skip: usize,
    /// Whether keys become relative to the starts of their tiles, as decoding keeps them.
    from_starts: bool,
}

impl<'a> Call<'a> {
    /// Of whole sequences.
    fn new(op: &'a Wall, q: &CudaTensor, k: &CudaTensor, gate: &CudaTensor) -> Self {
        let dims: [usize; 4] = q.meta.shape().dims();
        let kv_heads = k.meta.shape()[1];
        let gate = if dense(gate) { gate.clone() } else { contiguous(gate) };
        let call = Call { op, dims, kv_heads, gate, skip: 0, from_starts: false };
        let elements = call.rows() * dims[2] * call.options().dim;
        assert!(u32::try_from(elements).is_ok(), "k of shape {:?}, 2^32 elements", k.meta.shape());
        call
    }

    fn softmax(&self) -> Softmax {
        Softmax::of(&self.op.shape)
    }

    fn options(&self) -> Options {
        let (real, gated) = (self.dims[3], self.gate.meta.shape()[3]);
        Options { dim: padded(real), real, gated, from_starts: self.from_starts }
    }

    fn tiles(&self) -> usize {
        (self.skip + self.dims[2]).div_ceil(GATE_TILE)
    }

    /// Rows of tokens with gates: batch · kv_heads.
    fn rows(&self) -> usize {
        self.dims[0] * self.kv_heads
    }

    fn sizes(&self) -> SizesLaunch<CudaRuntime> {
        SizesLaunch::new(
            self.kv_heads as u32,
            (self.dims[1] / self.kv_heads) as u32,
            self.dims[2] as u32,
            self.skip as u32,
            self.op.shape.scale(),
        )
    }

    fn clamp(&self) -> ClampLaunch<CudaRuntime> {
        let most = self.op.config.g_max;
        ClampLaunch::new(most, 1.0 / most)
    }

    /// Where the gate's rows lie.
    fn steps(&self) -> StepsLaunch<CudaRuntime> {
        steps(&self.gate)
    }

    fn by_tile(&self) -> CubeCount {
        CubeCount::Static(self.tiles() as u32, self.rows() as u32, 1)
    }

    fn by_row(&self) -> CubeCount {
        CubeCount::Static(self.rows() as u32, 1, 1)
    }

    fn pairs(&self) -> CubeDim {
        CubeDim::new_1d((self.options().dim / PAIR) as u32)
    }

    fn channels(&self) -> CubeDim {
        CubeDim::new_1d(self.options().dim as u32)
    }

    /// A tensor `[batch · kv_heads, rows, dim]`.
    fn table(&self, rows: usize, dtype: DType) -> CudaTensor {
        empty(&self.gate, &[self.rows(), rows, self.options().dim], dtype)
    }

    /// Σ g · log₂ e of the tiles.
    fn tile_sums(&self) -> CudaTensor {
        let sums = self.table(self.tiles(), DType::F32);
        let launch = match self.gate.dtype {
            DType::BF16 => kernels::tile_sums::launch_unchecked::<bf16, CudaRuntime>,
            _ => kernels::tile_sums::launch_unchecked::<f32, CudaRuntime>,
        };
        // SAFETY: a block handles a tile of one row, and stays within its tokens.
        unsafe {
            launch(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                PAIR,
                buffer(&self.gate, 1),
                buffer(&sums, PAIR),
                self.steps(),
                self.sizes(),
                self.clamp(),
                self.options(),
            );
        }
        sums
    }

    /// [`Call::tile_sums`]; E and the rests at the tiles' ends.
    fn ends(&self) -> [CudaTensor; 3] {
        let (tiles, sums) = (self.tiles(), self.tile_sums());
        let ends = self.table(tiles + 1, DType::I32);
        let rests = self.table(tiles + 1, DType::F32);
        // SAFETY: a block handles a row, and stays within its tiles.
        unsafe {
            kernels::tile_ends::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_row(),
                self.channels(),
                buffer(&sums, 1),
                buffer(&ends, 1),
                buffer(&rests, 1),
                tiles as u32,
            );
        }
        [sums, ends, rests]
    }

    /// Writes q and k relative to `ends`, with the rests there, to `queries` and `keys`.
    fn rescale(
        &self,
        [q, k]: [&Heads; 2],
        [ends, rests]: [&CudaTensor; 2],
        [queries, keys]: [&Heads; 2],
    ) {
        let launch = match self.gate.dtype {
            DType::BF16 => kernels::rescale::launch_unchecked::<bf16, bf16, CudaRuntime>,
            _ => kernels::rescale::launch_unchecked::<bf16, f32, CudaRuntime>,
        };
        // SAFETY: as in `Call::tile_sums`.
        unsafe {
            launch(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                PAIR,
                buffer(&q.tensor, PAIR),
                buffer(&k.tensor, PAIR),
                buffer(&self.gate, 1),
                buffer(ends, 1),
                buffer(rests, 1),
                buffer(&queries.tensor, PAIR),
                buffer(&keys.tensor, PAIR),
                q.rows(),
                k.rows(),
                queries.rows(),
                keys.rows(),
                self.steps(),
                self.sizes(),
                self.clamp(),
                self.options(),
            );
        }
    }

    /// Where each token's document begins; something else where nothing reads it.
    fn documents(&self, documents: Option<&CudaTensor>) -> ArrayArg<CudaRuntime> {
        let [batch, _, tokens, _] = self.dims;
        match documents {
            Some(x) => buffer(&integers(x, &[batch, tokens], "document starts"), 1),
            None => buffer(&self.gate, 1),
        }
    }

    fn gates(&self, ends: CudaTensor) -> Gates {
        Gates { ends, from_starts: self.from_starts, channels: self.options().gated }
    }
}

/// Whether the elements of `[batch, heads, tokens, channels]` fill a stretch of memory, token by token or
/// head by head.
fn dense(x: &CudaTensor) -> bool {
    let [_, heads, tokens, channels]: [usize; 4] = x.meta.shape().dims();
    let head = heads * tokens * channels;
    let by_head = [head, tokens * channels, channels, 1];
    let by_token = [head, channels, heads * channels, 1];
    let strides = x.meta.strides();
    strides[..] == by_head || strides[..] == by_token
}

/// A new tensor that lies as the [`dense`] `x` does.
fn like(x: &CudaTensor) -> CudaTensor {
    let mut like = empty(x, &x.meta.shape().to_vec(), x.dtype);
    like.meta = x.meta.clone();
    like
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward): saves q and k relative to the tiles'
/// ends, v, o, lse, the gate, what [`Call::ends`] gives, and what is pruned.
pub fn forward(
    op: &Wall,
    [q, k, v, gate]: [&CudaTensor; 4],
    documents: Option<&CudaTensor>,
) -> Option<Forward<CudaTensor>> {
    let [batch, heads, tokens, head_dim]: [usize; 4] = q.meta.shape().dims();
    let served = [q, k, v].iter().all(|x| cuda_serves(x.dtype, batch * heads, head_dim))
        && matches!(gate.dtype, DType::BF16 | DType::F32)
        && batch * tokens > 0;
    if !served {
        return None;
    }
    let call = Call::new(op, q, k, gate);
    let [sums, ends, rests] = call.ends();
    let pruned = op.prunes().then(|| call.remembered(&ends));
    let (q, k) = (Heads::new(q), Heads::new(k));
    let (queries, keys) = (q.like(), k.like());
    call.rescale([&q, &k], [&ends, &rests], [&queries, &keys]);
    let (queries, keys) = (queries.tensor, keys.tensor);
    let gates = call.gates(ends);
    let inputs = [&queries, &keys, v];
    let [o, lse] = forward_gated(&call.softmax(), inputs, &gates, pruned.as_ref(), documents);
    let lse = match &pruned {
        None => lse,
        Some(pruned) => call.add_forgotten(pruned, documents, v, &o, &lse),
    };
    let Call { gate, .. } = call;
    let mut saved = vec![queries, keys, v.clone(), o.clone(), lse, gate, sums, gates.ends, rests];
    saved.extend(pruned.map(|x| [x.starts, x.bounds, x.least]).into_iter().flatten());
    Some(Forward { output: o, saved })
}

/// The gradients of q, k, v and the gate from what [`forward`] saved.
pub fn backward(
    op: &Wall,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: CudaTensor,
) -> [Option<CudaTensor>; 4] {
    let mut saved = saved.into_iter();
    let mut next = || saved.next();
    let [queries, keys, v, o, lse, gate, sums, ends, rests] =
        [(); 9].map(|()| next().expect("the forward pass saves nine tensors"));
    let pruned = next().zip(next()).zip(next());
    let pruned = pruned.map(|((starts, bounds), least)| Pruned { starts, bounds, least });
    let call = Call::new(op, &queries, &keys, &gate);
    let gates = call.gates(ends);
    let [queries_grad, keys_grad, dv] = backward_gated(
        &call.softmax(),
        [&queries, &keys, &v],
        &gates,
        pruned.as_ref(),
        documents,
        [&o, &lse, &grad],
    );
    if let Some(pruned) = &pruned {
        call.add_gradients_of_forgotten(pruned, documents, &grad, &lse, &dv);
    }
    let (queries, keys) = (Heads::new(&queries), Heads::new(&keys));
    let (dq, dk) = (queries.like(), keys.like());
    let within = call.table(call.dims[2], DType::F32);
    let totals = call.table(call.tiles(), DType::F32);
    let d_gate = like(&call.gate);
    let launch = match call.gate.dtype {
        DType::BF16 => kernels::gradients::launch_unchecked::<bf16, bf16, CudaRuntime>,
        _ => kernels::gradients::launch_unchecked::<bf16, f32, CudaRuntime>,
    };
    let launch_last = match call.gate.dtype {
        DType::BF16 => kernels::gate_gradients::launch_unchecked::<bf16, CudaRuntime>,
        _ => kernels::gate_gradients::launch_unchecked::<f32, CudaRuntime>,
    };
    let client = &call.gate.client;
    // SAFETY: as in `Call::tile_sums` and `Call::ends`; gradients lie as what they are of does.
    unsafe {
        launch(
            client,
            call.by_tile(),
            call.pairs(),
            PAIR,
            buffer(&queries.tensor, PAIR),
            buffer(&keys.tensor, PAIR),
            buffer(&queries_grad, PAIR),
            buffer(&keys_grad, PAIR),
            buffer(&call.gate, 1),
            buffer(&sums, 1),
            buffer(&gates.ends, 1),
            buffer(&rests, 1),
            buffer(&dq.tensor, PAIR),
            buffer(&dk.tensor, PAIR),
            buffer(&within, PAIR),
            buffer(&totals, PAIR),
            queries.rows(),
            keys.rows(),
            call.steps(),
            call.sizes(),
            call.clamp(),
            call.options(),
        );
        kernels::after_tiles::launch_unchecked::<CudaRuntime>(
            client,
            call.by_row(),
            call.channels(),
            buffer(&totals, 1),
            call.documents(None),
            call.sizes(),
            Reach::Row,
        );
        launch_last(
            client,
            call.by_tile(),
            call.channels(),
            buffer(&within, 1),
            buffer(&totals, 1),
            buffer(&call.gate, 1),
            buffer(&d_gate, 1),
            call.steps(),
            call.sizes(),
            call.clamp(),
            call.options(),
        );
    }
    [Some(dq.tensor), Some(dk.tensor), Some(dv), Some(d_gate)]
}
