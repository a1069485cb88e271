//! Wall attention on CUDA's tensor cores: softmax attention on q and k that are rescaled relative to
//! their tiles' ends ([`operands`]), with kernels before and after it that rescale each token once.

// Device code has no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

pub(super) mod decode;
mod kernels;
mod key_gate;
mod operands;
mod prune;
mod rescaled;

use std::marker::PhantomData;

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::kernels::{
    GateConfig, GateLogitsLaunch, RescaledLaunch, SoftClampLaunch, SumScope, TileEndsLaunch,
    WallShapeLaunch,
};
pub use self::key_gate::logits_of_token;
pub use self::operands::TILE;
use self::operands::{GatedOperands, Gates, GatesLaunch};
use super::Wall;
use crate::attention::decay::{self, DecayBiases, DecaySums, OptionalDecay};
use crate::attention::flash::hooks::{Hooks, LaunchOf, NoBiases, ScaledScore};
use crate::attention::flash::mask::Pruned;
use crate::attention::flash::ragged::RaggedKv;
use crate::attention::flash::weight::{SoftmaxArgs, SoftmaxOutput, SoftmaxWeight, sinks};
use crate::attention::flash::{
    FlashAttention, Gradients as RelativeGradients, Heads, PAIR, decode as decode_one, padded,
    serves_tensors, strides,
};
use crate::backend::Forward;
use crate::cuda::{CudaTensor, buffer, contiguous, empty};
use crate::ops::cuda::integers;

/// The hooks and their tensors; `B` are the biases of the forget gate, if there is one.
struct GatedHooks<B> {
    /// E, `[…, rows, padded_head_dim]`, 32-bit integers; the buffer may hold more rows.
    ends: CudaTensor,
    /// Whether keys are relative to the starts of their tiles, as in decoding, rather than to the ends.
    from_starts: bool,
    /// Number of channels with a gate, the first ones.
    channels: usize,
    /// The sums of the forget gate's log decays.
    forget: Option<DecaySums>,
    /// `[heads]`
    sinks: Option<CudaTensor>,
    biases: PhantomData<B>,
}

impl<B: OptionalDecay> Hooks for GatedHooks<B> {
    type Operands = GatedOperands;
    type Biases = B;
    type Score = ScaledScore;
    type Weight = SoftmaxWeight;

    fn operands(&self) -> LaunchOf<Gates> {
        let (shape, strides) = (self.ends.meta.shape(), self.ends.meta.strides());
        let rank = shape.num_dims();
        let rows = u32::try_from(strides[rank - 3] / shape[rank - 1]);
        GatesLaunch::new(
            buffer(&self.ends, 1),
            rows.expect("tiles below 2^32"),
            self.channels.div_ceil(16),
            self.from_starts,
        )
    }

    fn biases(&self) -> LaunchOf<B::Args> {
        B::launch(self.forget.as_ref())
    }

    fn score(&self) {}

    fn weight(&self) -> LaunchOf<SoftmaxArgs> {
        sinks(self.sinks.as_ref())
    }

    /// One warpgroup per block is faster (the kernel of all gradients always has two), and tiles must not be longer
    /// than a tile of gates; with wide heads the factors take the registers of half a tile.
    fn block_shape(&self, (_, tile): (usize, usize), head_dim: usize) -> (usize, usize) {
        (1, tile.min(if head_dim > 128 { tile / 2 } else { TILE }))
    }
}

/// The attention of a call.
enum GatedFlash {
    /// Without a forget gate.
    Plain(FlashAttention<GatedHooks<NoBiases>>),
    /// With one.
    Forgetting(FlashAttention<GatedHooks<DecayBiases>>),
}

impl GatedFlash {
    fn softmax(&self, with_sinks: bool) -> SoftmaxOutput {
        match self {
            GatedFlash::Plain(flash) => flash.softmax(with_sinks),
            GatedFlash::Forgetting(flash) => flash.softmax(with_sinks),
        }
    }

    fn softmax_backward(
        &self,
        result: &SoftmaxOutput,
        grad: &CudaTensor,
    ) -> (RelativeGradients, Option<CudaTensor>) {
        match self {
            GatedFlash::Plain(flash) => flash.softmax_backward(result, grad),
            GatedFlash::Forgetting(flash) => flash.softmax_backward(result, grad),
        }
    }

    /// For one query per head, o and its log-sum-exp.
    fn decode(&self) -> [CudaTensor; 2] {
        match self {
            GatedFlash::Plain(flash) => decode_one(flash, None),
            GatedFlash::Forgetting(flash) => decode_one(flash, None),
        }
    }
}

/// What all kernels of one call share.
struct WallParams<'a> {
    op: &'a Wall,
    /// `[batch, heads, tokens, head_dim]` of q.
    dims: [usize; 4],
    kv_heads: usize,
    /// The gate's logits, `[batch, kv_heads, tokens, gated]`, [`dense`].
    gate: CudaTensor,
    /// The offset of the first token in its tile.
    tile_offset: usize,
    /// Whether keys become relative to the starts of their tiles, as decoding caches them.
    from_starts: bool,
    /// The sums of the forget gate's log decays.
    forget: Option<DecaySums>,
    /// `[heads]`
    sinks: Option<CudaTensor>,
}

impl<'a> WallParams<'a> {
    /// For whole sequences.
    fn new(op: &'a Wall, q: &CudaTensor, k: &CudaTensor, gate: &CudaTensor) -> Self {
        let dims: [usize; 4] = q.meta.shape().dims();
        let kv_heads = k.meta.shape()[1];
        let gate = if dense(gate) { gate.clone() } else { contiguous(gate) };
        let params = WallParams {
            op,
            dims,
            kv_heads,
            gate,
            tile_offset: 0,
            from_starts: false,
            forget: None,
            sinks: None,
        };
        let elements = params.rows() * dims[2] * params.config().padded_head_dim;
        assert!(u32::try_from(elements).is_ok(), "k of shape {:?}, 2^32 elements", k.meta.shape());
        params
    }

    /// Attention on q and k relative to `ends`.
    fn flash(
        &self,
        inputs: [&CudaTensor; 3],
        ends: &CudaTensor,
        documents: Option<&CudaTensor>,
        pruned: Option<&Pruned>,
    ) -> GatedFlash {
        match self.forget {
            None => GatedFlash::Plain(self.flash_with(inputs, ends, documents, pruned)),
            Some(_) => GatedFlash::Forgetting(self.flash_with(inputs, ends, documents, pruned)),
        }
    }

    fn flash_with<B: OptionalDecay>(
        &self,
        inputs: [&CudaTensor; 3],
        ends: &CudaTensor,
        documents: Option<&CudaTensor>,
        pruned: Option<&Pruned>,
    ) -> FlashAttention<GatedHooks<B>> {
        FlashAttention::new(inputs, self.op.shape.scale(), self.hooks(ends))
            .window(self.op.shape.window)
            .documents(documents)
            .pruned(pruned.cloned())
    }

    /// One query per head after heads that evicted tokens, which excludes a forget gate.
    fn flash_of_ragged(&self, q: &CudaTensor, kv: &RaggedKv, starts: &CudaTensor) -> GatedFlash {
        let scale = self.op.shape.scale();
        GatedFlash::Plain(FlashAttention::of_ragged(q, kv, scale, self.hooks(starts)))
    }

    fn hooks<B>(&self, ends: &CudaTensor) -> GatedHooks<B> {
        GatedHooks {
            ends: ends.clone(),
            from_starts: self.from_starts,
            channels: self.config().gated,
            forget: self.forget.clone(),
            sinks: self.sinks.clone(),
            biases: PhantomData,
        }
    }

    fn config(&self) -> GateConfig {
        let (head_dim, gated) = (self.dims[3], self.gate.meta.shape()[3]);
        let padded_head_dim = padded(head_dim);
        GateConfig { padded_head_dim, head_dim, gated, from_starts: self.from_starts }
    }

    fn tiles(&self) -> usize {
        (self.tile_offset + self.dims[2]).div_ceil(TILE)
    }

    /// batch · kv_heads.
    fn rows(&self) -> usize {
        self.dims[0] * self.kv_heads
    }

    fn shape(&self) -> WallShapeLaunch<CudaRuntime> {
        WallShapeLaunch::new(
            self.kv_heads as u32,
            (self.dims[1] / self.kv_heads) as u32,
            self.dims[2] as u32,
            self.tile_offset as u32,
            self.op.shape.scale(),
        )
    }

    /// The gate's logits as a kernel argument.
    fn gate<Z: Numeric>(&self) -> GateLogitsLaunch<Z, CudaRuntime> {
        let most = self.op.config.g_max;
        let clamp = SoftClampLaunch::new(most, 1.0 / most);
        GateLogitsLaunch::new(buffer(&self.gate, 1), strides(&self.gate), clamp)
    }

    fn by_tile(&self) -> CubeCount {
        CubeCount::Static(self.tiles() as u32, self.rows() as u32, 1)
    }

    fn by_row(&self) -> CubeCount {
        CubeCount::Static(self.rows() as u32, 1, 1)
    }

    fn pairs(&self) -> CubeDim {
        CubeDim::new_1d((self.config().padded_head_dim / PAIR) as u32)
    }

    fn channels(&self) -> CubeDim {
        CubeDim::new_1d(self.config().padded_head_dim as u32)
    }

    /// An uninitialised tensor `[batch · kv_heads, rows, padded_head_dim]`.
    fn table(&self, rows: usize, dtype: DType) -> CudaTensor {
        empty(&self.gate, &[self.rows(), rows, self.config().padded_head_dim], dtype)
    }

    /// Σ g · log₂ e of each tile.
    fn tile_sums(&self) -> CudaTensor {
        let sums = self.table(self.tiles(), DType::F32);
        match self.gate.dtype {
            DType::BF16 => self.launch_tile_sums::<bf16>(&sums),
            _ => self.launch_tile_sums::<f32>(&sums),
        }
        sums
    }

    fn launch_tile_sums<Z: Numeric>(&self, sums: &CudaTensor) {
        // SAFETY: a block handles a tile of one kv head, and stays within its tokens.
        unsafe {
            kernels::tile_sums::launch_unchecked::<Z, CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                self.gate::<Z>(),
                buffer(sums, PAIR),
                self.shape(),
                self.config(),
            );
        }
    }

    /// [`WallParams::tile_sums`]; E and the fractions at the tiles' ends.
    fn ends(&self) -> [CudaTensor; 3] {
        let (tiles, sums) = (self.tiles(), self.tile_sums());
        let ends = self.table(tiles + 1, DType::I32);
        let fractions = self.table(tiles + 1, DType::F32);
        // SAFETY: a block handles a kv head, and stays within its tiles.
        unsafe {
            kernels::tile_ends::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_row(),
                self.channels(),
                buffer(&sums, 1),
                buffer(&ends, 1),
                buffer(&fractions, 1),
                tiles as u32,
            );
        }
        [sums, ends, fractions]
    }

    /// Writes q and k relative to `ends`, where `fractions` is p − E, to `rescaled`.
    fn rescale(&self, qk: [&Heads; 2], [ends, fractions]: [&CudaTensor; 2], rescaled: [&Heads; 2]) {
        match self.gate.dtype {
            DType::BF16 => self.launch_rescale::<bf16>(qk, [ends, fractions], rescaled),
            _ => self.launch_rescale::<f32>(qk, [ends, fractions], rescaled),
        }
    }

    fn launch_rescale<Z: Numeric>(
        &self,
        [q, k]: [&Heads; 2],
        [ends, fractions]: [&CudaTensor; 2],
        [queries, keys]: [&Heads; 2],
    ) {
        // SAFETY: as in `WallParams::launch_tile_sums`.
        unsafe {
            kernels::rescale::launch_unchecked::<Z, CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                q.pairs(),
                k.pairs(),
                self.gate::<Z>(),
                buffer(ends, 1),
                buffer(fractions, 1),
                queries.pairs(),
                keys.pairs(),
                self.shape(),
                self.config(),
            );
        }
    }

    /// The start of each token's document.
    fn documents(
        &self,
        documents: Option<&CudaTensor>,
    ) -> ComptimeOptionArgs<Array<i32>, CudaRuntime> {
        let [batch, _, tokens, _] = self.dims;
        let starts = |x| buffer(&integers(x, &[batch, tokens], "document starts"), 1);
        documents.map(starts).into()
    }
}

/// Whether `[batch, heads, tokens, channels]` is contiguous in the memory order of heads or of tokens.
fn dense(x: &CudaTensor) -> bool {
    let [_, heads, tokens, channels]: [usize; 4] = x.meta.shape().dims();
    let head = heads * tokens * channels;
    let by_head = [head, tokens * channels, channels, 1];
    let by_token = [head, channels, heads * channels, 1];
    let strides = x.meta.strides();
    strides[..] == by_head || strides[..] == by_token
}

/// An uninitialised tensor with the shape and strides of the [`dense`] `x`.
fn like(x: &CudaTensor) -> CudaTensor {
    let mut like = empty(x, &x.meta.shape().to_vec(), x.dtype);
    like.meta = x.meta.clone();
    like
}

/// See [`Op::cuda_forward`](crate::backend::Op::cuda_forward).
pub fn forward(
    op: &Wall,
    [q, k, v, gate]: [&CudaTensor; 4],
    log_forget: Option<&CudaTensor>,
    sinks: Option<&CudaTensor>,
    documents: Option<&CudaTensor>,
) -> Option<Forward<CudaTensor>> {
    let served = serves_tensors([q, k, v])
        && matches!(gate.dtype, DType::BF16 | DType::F32)
        && log_forget.is_none_or(|x| x.dtype == DType::F32);
    if !served {
        return None;
    }
    let forget = log_forget.map(DecaySums::new);
    let params = WallParams { forget, sinks: sinks.cloned(), ..WallParams::new(op, q, k, gate) };
    let [sums, ends, fractions] = params.ends();
    let pruned = op.prunes().then(|| params.remembered(&ends));
    let (q, k) = (Heads::new(q), Heads::new(k));
    let (queries, keys) = (q.like(), k.like());
    params.rescale([&q, &k], [&ends, &fractions], [&queries, &keys]);
    let inputs = [queries.tensor, keys.tensor, v.clone()];
    let flash = params.flash(inputs.each_ref(), &ends, documents, pruned.as_ref());
    let mut result = flash.softmax(sinks.is_some());
    if let Some(pruned) = &pruned {
        params.add_forgotten(pruned, documents, v, &mut result);
    }
    let output = result.o.clone();
    let WallParams { gate, forget, sinks, .. } = params;
    let tiles = TileEndTensors { sums, ends, fractions };
    let saved = Saved { inputs, gate, tiles, forget, sinks, result, pruned };
    Some(Forward { output, saved: saved.pack() })
}

/// The gradients of all inputs from what [`forward`] saved.
pub fn backward(
    op: &Wall,
    saved: Vec<CudaTensor>,
    documents: Option<&CudaTensor>,
    grad: &CudaTensor,
) -> Gradients {
    let Saved { inputs, gate, tiles, forget, sinks, result, pruned } = Saved::unpack(op, saved);
    let [queries, keys, _] = &inputs;
    let params = WallParams { forget, sinks, ..WallParams::new(op, queries, keys, &gate) };
    let flash = params.flash(inputs.each_ref(), &tiles.ends, documents, pruned.as_ref());
    let (relative, sinks) = flash.softmax_backward(&result, grad);
    if let Some(pruned) = &pruned {
        params.add_gradients_of_forgotten(pruned, documents, grad, &result.lse, &relative.dv);
    }
    let (queries, keys) = (Heads::new(queries), Heads::new(keys));
    let (dq, dk) = (queries.like(), keys.like());
    let gate = {
        let queries = [&queries.tensor, &relative.dq];
        let keys = [&keys.tensor, &relative.dk];
        match params.gate.dtype {
            DType::BF16 => params.gradients::<bf16>(queries, keys, &tiles, [&dq, &dk]),
            _ => params.gradients::<f32>(queries, keys, &tiles, [&dq, &dk]),
        }
    };
    let RelativeGradients { dv, ds_rows, ds_columns, .. } = relative;
    let log_forget = ds_rows.zip(ds_columns).map(|(rows, columns)| decay::gradient(rows, columns));
    Gradients { q: dq.tensor, k: dk.tensor, v: dv, gate, log_forget, sinks }
}

/// The gradients of the operation's inputs.
pub struct Gradients {
    pub q: CudaTensor,
    pub k: CudaTensor,
    pub v: CudaTensor,
    pub gate: CudaTensor,
    pub log_forget: Option<CudaTensor>,
    pub sinks: Option<CudaTensor>,
}

/// The results of [`WallParams::ends`].
struct TileEndTensors {
    sums: CudaTensor,
    ends: CudaTensor,
    fractions: CudaTensor,
}

/// What the forward pass keeps for the backward pass.
struct Saved {
    /// q and k relative to the tiles' ends, and v.
    inputs: [CudaTensor; 3],
    gate: CudaTensor,
    tiles: TileEndTensors,
    forget: Option<DecaySums>,
    sinks: Option<CudaTensor>,
    result: SoftmaxOutput,
    pruned: Option<Pruned>,
}

impl Saved {
    fn pack(self) -> Vec<CudaTensor> {
        let SoftmaxOutput { o, lse, sink } = self.result;
        let ([q, k, v], TileEndTensors { sums, ends, fractions }) = (self.inputs, self.tiles);
        let pruned = self.pruned.map(|Pruned { first, bounds, least }| [first, bounds, least]);
        let forget = self.forget.map(|DecaySums { within, before }| [within, before]);
        let all = [q, k, v, self.gate, sums, ends, fractions, o, lse].into_iter();
        let all = all.chain(pruned.into_iter().flatten()).chain(forget.into_iter().flatten());
        all.chain(self.sinks).chain(sink).collect()
    }

    fn unpack(op: &Wall, saved: Vec<CudaTensor>) -> Self {
        let mut saved = saved.into_iter();
        let mut next = || saved.next().expect("what the forward pass saves");
        let (inputs, gate) = ([next(), next(), next()], next());
        let tiles = TileEndTensors { sums: next(), ends: next(), fractions: next() };
        let (o, lse) = (next(), next());
        let pruned = op.prunes().then(|| Pruned { first: next(), bounds: next(), least: next() });
        let forgets = op.config.forget_gate;
        let forget = forgets.then(|| DecaySums { within: next(), before: next() });
        let (sinks, sink) = (saved.next(), saved.next());
        let result = SoftmaxOutput { o, lse, sink };
        Saved { inputs, gate, tiles, forget, sinks, result, pruned }
    }
}

impl WallParams<'_> {
    /// Writes dq and dk; returns the gradient of the gate's logits. `queries` and `keys` are the rescaled q and
    /// k, with their gradients.
    fn gradients<Z: Numeric>(
        &self,
        queries: [&CudaTensor; 2],
        keys: [&CudaTensor; 2],
        tiles: &TileEndTensors,
        [dq, dk]: [&Heads; 2],
    ) -> CudaTensor {
        let within = self.table(self.dims[2], DType::F32);
        let totals = self.table(self.tiles(), DType::F32);
        let d_gate = like(&self.gate);
        let rescaled = |[x, grad]: [&CudaTensor; 2], to: &Heads| {
            RescaledLaunch::new(buffer(x, PAIR), buffer(grad, PAIR), to.pairs())
        };
        let client = &self.gate.client;
        // SAFETY: as in `WallParams::launch_tile_sums` and `WallParams::ends`; a gradient has its tensor's
        // strides.
        unsafe {
            kernels::gradients::launch_unchecked::<Z, CudaRuntime>(
                client,
                self.by_tile(),
                self.pairs(),
                rescaled(queries, dq),
                rescaled(keys, dk),
                self.gate::<Z>(),
                TileEndsLaunch::new(
                    buffer(&tiles.sums, 1),
                    buffer(&tiles.ends, 1),
                    buffer(&tiles.fractions, 1),
                ),
                buffer(&within, PAIR),
                buffer(&totals, PAIR),
                self.shape(),
                self.config(),
            );
            kernels::after_tiles::launch_unchecked::<CudaRuntime>(
                client,
                self.by_row(),
                self.channels(),
                buffer(&totals, 1),
                self.documents(None),
                self.shape(),
                SumScope::Row,
            );
            kernels::gate_gradients::launch_unchecked::<Z, CudaRuntime>(
                client,
                self.by_tile(),
                self.channels(),
                buffer(&within, 1),
                buffer(&totals, 1),
                self.gate::<Z>(),
                buffer(&d_gate, 1),
                self.shape(),
                self.config(),
            );
        }
        d_gate
    }
}
