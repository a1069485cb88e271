//! Wall attention on CUDA's tensor cores: softmax attention on q and k that are relative to their
//! tiles' ends (`softmax::cuda::gates`), with what is done once for each token before and after.

#[allow(clippy::manual_div_ceil)] // Device code has no `div_ceil`.
mod kernels;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::kernels::{ClampLaunch, Options, SizesLaunch};
use super::{GateSource, Wall};
use crate::attention::softmax::cuda::{
    GATE_TILE, Gates, Heads, StepsLaunch, backward_gated, forward_gated, padded,
};
use crate::attention::softmax::{Softmax, cuda_serves};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};

/// Channels that a unit handles.
const PAIR: usize = 2;

/// What all passes of one call share.
struct Call<'a> {
    op: &'a Wall,
    /// `[batch, heads, tokens, head_dim]` of q.
    dims: [usize; 4],
    kv_heads: usize,
    gate: CudaTensor,
}

impl<'a> Call<'a> {
    fn new(op: &'a Wall, q: &CudaTensor, k: &CudaTensor, gate: CudaTensor) -> Self {
        let dims: [usize; 4] = q.meta.shape().dims();
        let call = Call { op, dims, kv_heads: k.meta.shape()[1], gate };
        let elements = call.rows() * dims[2] * call.options().dim;
        assert!(u32::try_from(elements).is_ok(), "k of shape {:?}, 2^32 elements", k.meta.shape());
        call
    }

    fn softmax(&self) -> Softmax {
        Softmax::of(&self.op.shape)
    }

    fn options(&self) -> Options {
        let logits = self.op.config.gate_source == GateSource::Hidden;
        let real = self.dims[3];
        let gated = if logits { self.op.config.gate_dims_of(&self.op.shape) } else { real };
        Options { dim: padded(real), real, gated, logits }
    }

    fn tiles(&self) -> usize {
        self.dims[2].div_ceil(GATE_TILE)
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
            self.op.shape.scale(),
        )
    }

    fn clamp(&self) -> ClampLaunch<CudaRuntime> {
        let most = self.op.config.g_max;
        ClampLaunch::new(most, 1.0 / most)
    }

    /// Where the gate's rows lie: `[batch, tokens, kv_heads · channels]` of logits,
    /// `[batch, kv_heads, tokens, channels]` of g.
    fn steps(&self) -> StepsLaunch<CudaRuntime> {
        let (tokens, Options { gated, logits, .. }) = (self.dims[2], self.options());
        let batch = (self.kv_heads * tokens * gated) as u32;
        match logits {
            true => StepsLaunch::new(batch, gated as u32, (self.kv_heads * gated) as u32),
            false => StepsLaunch::new(batch, (tokens * gated) as u32, gated as u32),
        }
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

    /// Σ g · log₂ e of the tiles; E and the rests at their ends.
    fn ends(&self) -> [CudaTensor; 3] {
        let tiles = self.tiles();
        let sums = self.table(tiles, DType::F32);
        let ends = self.table(tiles + 1, DType::I32);
        let rests = self.table(tiles + 1, DType::F32);
        let launch = match self.gate.dtype {
            DType::BF16 => kernels::tile_sums::launch_unchecked::<bf16, CudaRuntime>,
            _ => kernels::tile_sums::launch_unchecked::<f32, CudaRuntime>,
        };
        let client = &self.gate.client;
        // SAFETY: a block handles a tile of one row, or one row, and stays within its tokens.
        unsafe {
            launch(
                client,
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
            kernels::tile_ends::launch_unchecked::<CudaRuntime>(
                client,
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

    fn gates(&self, ends: CudaTensor) -> Gates {
        Gates { ends, channels: self.options().gated }
    }
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward): saves q and k relative to the tiles'
/// ends, v, o, lse, the gate, and what [`Call::ends`] gives.
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
    let call = Call::new(op, q, k, contiguous(gate));
    let [sums, ends, rests] = call.ends();
    let (q, k) = (Heads::new(q), Heads::new(k));
    let (queries, keys) = (q.like(), k.like());
    let launch = match call.gate.dtype {
        DType::BF16 => kernels::rescale::launch_unchecked::<bf16, bf16, CudaRuntime>,
        _ => kernels::rescale::launch_unchecked::<bf16, f32, CudaRuntime>,
    };
    // SAFETY: as in `Call::ends`.
    unsafe {
        launch(
            &call.gate.client,
            call.by_tile(),
            call.pairs(),
            PAIR,
            buffer(&q.tensor, PAIR),
            buffer(&k.tensor, PAIR),
            buffer(&call.gate, 1),
            buffer(&ends, 1),
            buffer(&rests, 1),
            buffer(&queries.tensor, PAIR),
            buffer(&keys.tensor, PAIR),
            q.rows(),
            k.rows(),
            queries.rows(),
            keys.rows(),
            call.steps(),
            call.sizes(),
            call.clamp(),
            call.options(),
        );
    }
    let (queries, keys) = (queries.tensor, keys.tensor);
    let gates = call.gates(ends);
    let [o, lse] = forward_gated(&call.softmax(), [&queries, &keys, v], &gates, documents);
    let Call { gate, .. } = call;
    let saved = vec![queries, keys, v.clone(), o.clone(), lse, gate, sums, gates.ends, rests];
    Some(Forward { output: o, saved })
}

/// The gradients of q, k, v and the gate from what [`forward`] saved.
pub fn backward(
    op: &Wall,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: CudaTensor,
) -> [Option<CudaTensor>; 4] {
    let saved: [CudaTensor; 9] = saved.try_into().expect("the forward pass saves nine tensors");
    let [queries, keys, v, o, lse, gate, sums, ends, rests] = saved;
    let call = Call::new(op, &queries, &keys, gate);
    let gates = call.gates(ends);
    let [queries_grad, keys_grad, dv] = backward_gated(
        &call.softmax(),
        [&queries, &keys, &v],
        &gates,
        documents,
        [&o, &lse, &grad],
    );
    let (queries, keys) = (Heads::new(&queries), Heads::new(&keys));
    let (dq, dk) = (queries.like(), keys.like());
    let within = call.table(call.dims[2], DType::F32);
    let totals = call.table(call.tiles(), DType::F32);
    let shape = call.gate.meta.shape().to_vec();
    let d_gate = empty(&call.gate, &shape, call.gate.dtype);
    let launch = match call.gate.dtype {
        DType::BF16 => kernels::gradients::launch_unchecked::<bf16, bf16, CudaRuntime>,
        _ => kernels::gradients::launch_unchecked::<bf16, f32, CudaRuntime>,
    };
    let launch_last = match call.gate.dtype {
        DType::BF16 => kernels::gate_gradients::launch_unchecked::<bf16, CudaRuntime>,
        _ => kernels::gate_gradients::launch_unchecked::<f32, CudaRuntime>,
    };
    let client = &call.gate.client;
    // SAFETY: as in `Call::ends`; gradients lie as what they are of does.
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
            call.tiles() as u32,
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
