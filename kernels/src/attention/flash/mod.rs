//! FlashAttention on CUDA's tensor cores, in bf16 with f32 accumulators, in the passes of FlashAttention-2
//! (Dao, 2023):
//!
//! S_ij = score(q_iᵀk_j) + bias_ij, o_i = Σ_j weight(S_i)_j v_j,
//!
//! over the keys that the [`mask`] allows. This module implements blocks, tiles, pipelines and matrix
//! products. A kind implements [`hooks`]: how q and k enter their product, how scores are modified and
//! become weights, and further inputs. Scores are never written to memory.

// Device code has no `div_ceil`, `is_multiple_of` or `saturating_sub`, and its && does not stop early; hook states
// may be `()`.
#![allow(
    clippy::collapsible_if,
    clippy::implicit_saturating_sub,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of,
    clippy::unused_unit,
    clippy::let_unit_value
)]

mod backward;
mod cache_buffer;
pub mod candidates;
pub mod decode;
mod forward;
mod heads;
pub mod hooks;
pub mod in_order;
pub mod mask;
pub mod problem;
pub mod ragged;
pub mod search;
mod shared_values;
pub mod summed;
pub mod weight;

use burn::tensor::{DType, Element};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use self::backward::dkv::{DkvOutputs, KeyGradientsLaunch};
use self::backward::dq_sums::{self, DqSumsLaunch, dq_from_sums, vectors_per_tile};
use self::backward::{BackwardInputsLaunch, LANES_PER_ROW, dkv, dq, dqkv};
pub use self::cache_buffer::{CacheBuffer, capacity, expired};
pub use self::decode::decode;
use self::forward::QkvLaunch;
pub use self::heads::{HeadChunks, HeadChunksLaunch, HeadNumbers, HeadPairs, HeadQuads, Heads};
use self::hooks::{
    Biases, BiasesOf, GradientOf, Hooks, LaunchOf, SavedRows, Score, ScoreOf, StatisticsOf,
    sums_of_columns, sums_of_rows,
};
use self::in_order::{CarriesLaunch, SavedCarriesLaunch};
use self::mask::{Limits, MaskLaunch, Pruned, PrunedKeysLaunch};
use self::problem::{Causality, KernelConfig, ProblemShapeLaunch};
use self::ragged::RaggedKv;
use crate::cuda::{CudaTensor, buffer, empty, multiprocessors, zeros};
use crate::ops::cuda::integers;
use crate::tile::warpgroup::GROUP_WARPS;
use crate::tile::{CHUNK, PANEL_DIM};

/// Elements per vector that a kernel writes.
pub const PAIR: usize = 2;

/// Elements of a quad.
const QUAD: usize = 4;

/// Channels of a head in shared memory: `head_dim` rounded up to whole panels.
pub fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL_DIM)
}

/// A size or a stride as a kernel argument.
///
/// # Panics
/// From 2³² on.
pub fn as_u32(size: usize) -> u32 {
    u32::try_from(size).expect("sizes below 2^32")
}

/// The strides of `[batch, heads, tokens]`, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Between sequences.
    pub batch: u32,
    /// Between heads.
    pub head: u32,
    /// Between tokens.
    pub token: u32,
}

/// The strides of `[batch, heads, tokens]`, or of the rows of `[batch, heads, tokens, channels]`.
pub fn strides(x: &CudaTensor) -> StridesLaunch<CudaRuntime> {
    let strides = x.meta.strides();
    StridesLaunch::new(as_u32(strides[0]), as_u32(strides[1]), as_u32(strides[2]))
}

/// Whether the kernels serve q, k and v of type `dtype` with `batch_heads` = batch · heads, where heads of v, too,
/// have `head_dim` channels; see [`serves_values`].
pub fn serves(dtype: DType, batch_heads: usize, head_dim: usize) -> bool {
    // A grid has at most 65,535 blocks along y.
    dtype == DType::BF16 && serves_values(head_dim) && batch_heads <= 65_535
}

/// Whether the kernels serve heads of v of `value_dim` channels.
pub fn serves_values(value_dim: usize) -> bool {
    value_dim.is_multiple_of(8) && value_dim <= 256
}

/// Whether the kernels serve these q, k and v.
pub fn serves_tensors(inputs: [&CudaTensor; 3]) -> bool {
    let [batch, heads, ..]: [usize; 4] = inputs[0].meta.shape().dims();
    inputs.iter().all(|x| {
        let dims = x.meta.shape().to_vec();
        serves(x.dtype, batch * heads, dims[3]) && !dims.contains(&0)
    })
}

/// One attention call: its inputs, its mask and the kind's hooks.
///
/// - q: `[batch, heads, queries, head_dim]`
/// - k: `[batch, kv_heads, keys, head_dim]`, `kv_heads` divides `heads`; key j is at position j, and query i at
///   keys − queries + i, or with [`FlashAttention::after_keys`] at keys + i
/// - v: `[batch, value heads, keys, value_dim]`, where `views` · value heads divides `kv_heads`
pub struct FlashAttention<A: Hooks> {
    q: Heads,
    k: Heads,
    v: Heads,
    scale: f32,
    views: usize,
    causality: Causality,
    rows_in: Option<[Heads; 2]>,
    window: Option<usize>,
    documents: Option<CudaTensor>,
    pruned: Option<Pruned>,
    ragged: Option<RaggedKv>,
    hooks: A,
}

/// Warpgroups per block and rows per tile, for head_dim and value_dim up to 64, up to 128 (each the fastest on an
/// H200), for larger values alone, and above (the largest that fit into registers and shared memory): in the
/// forward pass, for dq, for dk and dv, and for all three.
const FORWARD_SHAPES: [(usize, usize); 4] = [(1, 128), (2, 128), (2, 64), (1, 64)];
const DQ_SHAPES: [(usize, usize); 4] = [(1, 128), (2, 128), (2, 64), (1, 32)];
const DKV_SHAPES: [(usize, usize); 4] = [(1, 128), (1, 64), (2, 64), (1, 32)];
const DQKV_SHAPES: [(usize, usize); 2] = [(2, 128), (2, 64)];
/// With sums of dS, which need registers.
const DQKV_SHAPES_WITH_SUMS: [(usize, usize); 2] = [(2, 64), (2, 64)];

impl<A: Hooks> FlashAttention<A> {
    /// A call for q, k and v with `scale`, the factor on q·k.
    ///
    /// # Panics
    /// Unless [`serves_tensors`].
    pub fn new(inputs: [&CudaTensor; 3], scale: f32, hooks: A) -> Self {
        assert!(serves_tensors(inputs), "{:?} that the kernels do not serve", inputs[0].meta);
        let [q, k, v] = inputs.map(Heads::new);
        FlashAttention {
            q,
            k,
            v,
            scale,
            views: 1,
            causality: Causality::UpToOwn,
            rows_in: None,
            window: None,
            documents: None,
            pruned: None,
            ragged: None,
            hooks,
        }
    }

    /// For [`decode`]: q with heads of k and v that hold different numbers of tokens.
    pub fn of_ragged(q: &CudaTensor, kv: &RaggedKv, scale: f32, hooks: A) -> Self {
        let [keys, values] = kv.buffers();
        let mut flash = Self::new([q, keys, values], scale, hooks);
        let ([k_heads, v_heads, tokens], batch) = (kv.dims(), flash.q.dims[0]);
        flash.k.dims = [batch, k_heads, tokens, flash.k.dims[3]];
        flash.v.dims = [batch, v_heads, tokens, flash.v.dims[3]];
        FlashAttention { ragged: Some(kv.clone()), ..flash }
    }

    /// The backward pass with all queries after all keys. A query may then see no key.
    pub fn after_keys(self) -> Self {
        FlashAttention { causality: Causality::AllKeys, ..self }
    }

    /// The forward pass with only the keys before the query's block of 64. A query may then see no key.
    ///
    /// # Panics
    /// Unless there are as many queries as keys.
    pub fn before_blocks(self) -> Self {
        assert_eq!(self.q.dims[2], self.k.dims[2], "queries and keys");
        FlashAttention { causality: Causality::BeforeBlock, ..self }
    }

    /// The forward pass with the rows of q and k in these tensors, `[1, heads or kv_heads, rows, head_dim]`, in place
    /// of those that give the shapes: where [`Operands::queries_at`] and [`Operands::keys_at`] say.
    ///
    /// # Panics
    /// Unless they are in bf16 and their heads and channels are those of q and k.
    pub fn rows_in(self, tensors: [&CudaTensor; 2]) -> Self {
        let tensors = tensors.map(Heads::new);
        for (tensor, shape) in tensors.iter().zip([&self.q, &self.k]) {
            assert_eq!(tensor.tensor.dtype, DType::BF16);
            assert_eq!([tensor.dims[1], tensor.dims[3]], [shape.dims[1], shape.dims[3]]);
        }
        FlashAttention { rows_in: Some(tensors), ..self }
    }

    /// The positions of queries and keys, from 0 on.
    fn positions(&self) -> usize {
        let [queries, keys] = [&self.q, &self.k].map(|x| x.dims[2]);
        if self.causality == Causality::AllKeys { keys + queries } else { keys }
    }

    /// With heads of q and k of several views, one view after the other, which all have v's values.
    ///
    /// # Panics
    /// Unless `views` times the heads of v divides those of k.
    pub fn views(self, views: usize) -> Self {
        let [kv_heads, value_heads] = [&self.k, &self.v].map(|x| x.dims[1]);
        let whole = kv_heads.is_multiple_of(views * value_heads);
        assert!(whole, "{kv_heads} heads of k in {views} views, {value_heads} heads of v");
        FlashAttention { views, ..self }
    }

    /// With a window w, a query attends to its own key and the w − 1 before it.
    pub fn window(self, window: Option<usize>) -> Self {
        FlashAttention { window, ..self }
    }

    /// With the start of each position's document, `[batch, positions]`.
    pub fn documents(self, documents: Option<&CudaTensor>) -> Self {
        let dims = [self.k.dims[0], self.positions()];
        FlashAttention {
            documents: documents.map(|x| integers(x, &dims, "document starts")),
            ..self
        }
    }

    /// With the first key of each query after pruning.
    pub fn pruned(self, pruned: Option<Pruned>) -> Self {
        FlashAttention { pruned, ..self }
    }

    /// The queries.
    pub fn q(&self) -> &Heads {
        &self.q
    }

    /// The keys.
    pub fn k(&self) -> &Heads {
        &self.k
    }

    /// The factor on q·k.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// An uninitialised tensor for o.
    fn output(&self) -> Heads {
        self.q.like_with(self.q.tensor.dtype, self.v.dims[3])
    }

    /// Its shape.
    fn output_dims(&self) -> [usize; 4] {
        let [batch, heads, queries, _] = self.q.dims;
        [batch, heads, queries, self.v.dims[3]]
    }

    /// Whether several heads of k share one of v.
    fn shares_values(&self) -> bool {
        self.k.dims[1] != self.v.dims[1]
    }

    /// An uninitialised statistic of every query, `[batch, heads, queries]` in f32.
    pub fn statistic(&self) -> CudaTensor {
        let [batch, heads, queries, _] = self.q.dims;
        empty(&self.q.tensor, &[batch, heads, queries], DType::F32)
    }

    /// The configuration with the fitting one of `shapes`, in the order of [`FORWARD_SHAPES`].
    fn config<const N: usize>(&self, shapes: [(usize, usize); N]) -> KernelConfig {
        let (head_dim, value_dim) = (self.q.dims[3], self.v.dims[3]);
        let widest = head_dim.max(value_dim);
        let sizes = [widest > 64, widest > 128, head_dim > 128];
        let shape = shapes[sizes.into_iter().filter(|&above| above).count()];
        let (groups, tile) = self.hooks.block_shape(shape, head_dim);
        let [changes_scores, nonlinear_scores] = self.hooks.changes_scores();
        assert!(
            !(ScoreOf::<A>::WEIGHS_PRODUCTS && BiasesOf::<A>::NEEDS_DS_SUMS),
            "weights of products: dS, by products, is not the gradient of biases"
        );
        KernelConfig {
            head_dim,
            padded_head_dim: padded(head_dim),
            value_dim,
            padded_value_dim: padded(value_dim),
            shares_values: self.shares_values(),
            warps: groups * GROUP_WARPS,
            tile,
            changes_scores,
            nonlinear_scores,
            saves_carries: false,
            causality: self.causality,
            goes_on: false,
        }
    }

    fn problem(&self) -> ProblemShapeLaunch<CudaRuntime> {
        let [heads, kv_heads, value_heads] = [&self.q, &self.k, &self.v].map(|x| x.dims[1]);
        ProblemShapeLaunch::new(
            as_u32(heads),
            as_u32(heads / kv_heads),
            as_u32(value_heads),
            as_u32(kv_heads / (self.views * value_heads)),
            as_u32(self.q.dims[2]),
            as_u32(self.k.dims[2]),
            as_u32(self.positions()),
            self.scale,
        )
    }

    fn mask(&self) -> MaskLaunch<CudaRuntime> {
        let pruned = self.pruned.as_ref().map(|Pruned { first, bounds, least }| {
            PrunedKeysLaunch::new(buffer(first, 1), buffer(bounds, 1), buffer(least, 1))
        });
        let limits = Limits { pruned: pruned.is_some(), ..self.limits() };
        MaskLaunch::new(self.document_starts(), pruned.into(), self.window_size(), limits)
    }

    /// The mask of decoding, where pruned keys are a separate argument.
    fn decode_mask(&self) -> MaskLaunch<CudaRuntime> {
        let limits = self.limits();
        MaskLaunch::new(self.document_starts(), None.into(), self.window_size(), limits)
    }

    fn limits(&self) -> Limits {
        let (window, documents) = (self.window.is_some(), self.documents.is_some());
        Limits { window, documents, pruned: false }
    }

    fn document_starts(&self) -> ComptimeOptionArgs<Array<i32>, CudaRuntime> {
        self.documents.as_ref().map(|x| buffer(x, 1)).into()
    }

    fn window_size(&self) -> u32 {
        self.window.map_or(u32::MAX, as_u32)
    }

    /// The forward pass: returns o and writes the weights' `statistics`.
    pub fn forward(&self, statistics: LaunchOf<StatisticsOf<A>>) -> CudaTensor {
        self.forward_saving(statistics, None, None)
    }

    /// [`FlashAttention::forward`], which goes on from `earlier` outputs, and with `carries` also writes these.
    fn forward_saving(
        &self,
        statistics: LaunchOf<StatisticsOf<A>>,
        earlier: Option<&Heads>,
        carries: Option<SavedCarriesLaunch<CudaRuntime>>,
    ) -> CudaTensor {
        assert!(self.ragged.is_none(), "only decoding reads ragged heads");
        let [batch, heads, queries, _] = self.q.dims;
        let o = self.output();
        let [q, k] = match &self.rows_in {
            Some([q, k]) => [q, k],
            None => [&self.q, &self.k],
        };
        let (goes_on, saves_carries) = (earlier.is_some(), carries.is_some());
        let config = KernelConfig { goes_on, saves_carries, ..self.config(FORWARD_SHAPES) };
        // SAFETY: grid and configuration match the kernel, which only reads rows and chunks of the tensors
        // given here.
        unsafe {
            forward::forward::launch_unchecked::<A, CudaRuntime>(
                &self.q.tensor.client,
                grid(queries, config.rows(), batch * heads),
                CubeDim::new_1d(config.threads() as u32),
                QkvLaunch::new(
                    q.tensor_map(config.rows()),
                    k.tensor_map(config.tile),
                    self.v.tensor_map(config.tile),
                ),
                self.mask(),
                self.hooks.operands(),
                self.hooks.biases(),
                self.hooks.score(),
                self.hooks.weight(),
                earlier.map(Heads::pairs).into(),
                o.quads(),
                statistics,
                carries.into(),
                self.problem(),
                config,
            );
        }
        o.tensor
    }

    /// The gradients for dO = `grad`; `saved` gives the row statistics that the weights saved.
    pub fn backward(
        &self,
        grad: &CudaTensor,
        saved: impl Fn() -> LaunchOf<SavedRows<A>>,
    ) -> Gradients {
        let whole = self.causality != Causality::BeforeBlock && self.rows_in.is_none();
        assert!(whole, "a forward pass alone");
        let grad = Heads::new(grad);
        let sums = |rows| {
            let [batch, heads, _, _] = self.q.dims;
            zeros(&self.q.tensor, &[batch, heads, rows], DType::F32)
        };
        let ds_rows = sums_of_rows::<A>().then(|| sums(self.positions()));
        let ds_columns = sums_of_columns::<A>().then(|| sums(self.k.dims[2]));
        // Wider heads do not fit beside a block's sums of dq.
        let [dq, dk, dv] = if self.q.dims[3].max(self.v.dims[3]) <= 128 {
            self.dqkv(&grad, saved(), ds_rows.as_ref(), ds_columns.as_ref())
        } else {
            let dq = self.dq(&grad, saved(), ds_rows.as_ref(), None);
            let [dk, dv] = self.dkv(&grad, saved, ds_columns.as_ref());
            [dq, dk, dv]
        };
        Gradients { dq, dk, dv: self.of_shared_values(dv), ds_rows, ds_columns }
    }

    /// An uninitialised tensor for the gradient of q or k.
    fn gradient(&self, of: &Heads) -> Heads {
        of.like_with(<GradientOf<A> as Element>::dtype(), of.dims[3])
    }

    /// An uninitialised tensor for the part of dv of each head of k.
    fn value_gradient(&self) -> Heads {
        self.k.like_with(self.v.tensor.dtype, self.v.dims[3])
    }

    fn dq(
        &self,
        grad: &Heads,
        saved: LaunchOf<SavedRows<A>>,
        ds_rows: Option<&CudaTensor>,
        carries: Option<CarriesLaunch<CudaRuntime>>,
    ) -> CudaTensor {
        let [batch, heads, queries, _] = self.q.dims;
        let dq = self.gradient(&self.q);
        let config = self.config(DQ_SHAPES);
        // SAFETY: as in `forward`.
        unsafe {
            dq::dq::launch_unchecked::<A, CudaRuntime>(
                &dq.tensor.client,
                grid(queries, config.rows(), batch * heads),
                CubeDim::new_1d(config.threads() as u32),
                BackwardInputsLaunch::new(
                    self.q.tensor_map(config.rows()),
                    self.k.tensor_map(config.tile),
                    self.v.tensor_map(config.tile),
                    grad.tensor_map(config.rows()),
                ),
                self.mask(),
                self.hooks.operands(),
                self.hooks.biases(),
                self.hooks.score(),
                saved,
                dq.quads(),
                ds_rows.map(|x| buffer(x, 1)).into(),
                carries.into(),
                self.problem(),
                config,
            );
        }
        dq.tensor
    }

    fn dkv(
        &self,
        grad: &Heads,
        saved: impl Fn() -> LaunchOf<SavedRows<A>>,
        ds_columns: Option<&CudaTensor>,
    ) -> [CudaTensor; 2] {
        let (dk, dv) = (self.gradient(&self.k), self.value_gradient());
        let [batch, kv_heads, keys, _] = self.k.dims;
        let config = self.config(DKV_SHAPES);
        let wide = config.padded_head_dim.max(config.padded_value_dim) > 128;
        let outputs =
            if wide { &[DkvOutputs::Dk, DkvOutputs::Dv][..] } else { &[DkvOutputs::Both] };
        for &outputs in outputs {
            // SAFETY: as in `forward`.
            unsafe {
                dkv::dkv::launch_unchecked::<A, CudaRuntime>(
                    &dk.tensor.client,
                    grid(keys, config.rows(), batch * kv_heads),
                    CubeDim::new_1d(config.threads() as u32),
                    BackwardInputsLaunch::new(
                        self.q.tensor_map(config.tile),
                        self.k.tensor_map(config.rows()),
                        self.v.tensor_map(config.rows()),
                        grad.tensor_map(config.tile),
                    ),
                    self.mask(),
                    self.hooks.operands(),
                    self.hooks.biases(),
                    self.hooks.score(),
                    saved(),
                    KeyGradientsLaunch::new(
                        dk.quads(),
                        dv.quads(),
                        ds_columns.map(|x| buffer(x, 1)).into(),
                    ),
                    self.problem(),
                    config,
                    outputs,
                );
            }
        }
        [dk.tensor, dv.tensor]
    }

    fn dqkv(
        &self,
        grad: &Heads,
        saved: LaunchOf<SavedRows<A>>,
        ds_rows: Option<&CudaTensor>,
        ds_columns: Option<&CudaTensor>,
    ) -> [CudaTensor; 3] {
        let (dq, dk) = (self.gradient(&self.q), self.gradient(&self.k));
        let dv = self.value_gradient();
        let [batch, heads, queries, _] = self.q.dims;
        let [_, kv_heads, keys, _] = self.k.dims;
        let with_sums = sums_of_rows::<A>();
        let shapes = if with_sums { DQKV_SHAPES_WITH_SUMS } else { DQKV_SHAPES };
        let config = KernelConfig { warps: dqkv::CONSUMER_WARPS, ..self.config(shapes) };
        let tiles = queries.div_ceil(config.tile);
        let vectors = vectors_per_tile(config, with_sums);
        let blocks = keys.div_ceil(config.rows());
        let processors = multiprocessors(&dq.tensor.client);
        let heads_at_once = dqkv::heads_at_once(processors, batch * kv_heads, blocks);
        let tickets = blocks * batch * kv_heads;
        // No key block adds to the sums of queries that see no key.
        let blind = self.causality == Causality::AllKeys
            && (self.window.is_some() || self.documents.is_some());
        let fill = if blind { zeros } else { empty };
        let sums = fill(&dq.tensor, &[batch * heads, tiles, vectors * 4], DType::F32);
        let turns = zeros(&dq.tensor, &[1 + batch * heads * tiles], DType::U32);
        // SAFETY: as in `forward`; the second kernel reads the sums that the first one writes.
        unsafe {
            dqkv::dqkv::launch_unchecked::<A, CudaRuntime>(
                &dq.tensor.client,
                CubeCount::new_1d(as_u32(tickets.min(processors))),
                CubeDim::new_1d(dqkv::THREADS as u32),
                BackwardInputsLaunch::new(
                    self.q.tensor_map(config.tile),
                    self.k.tensor_map(config.rows()),
                    self.v.tensor_map(config.rows()),
                    grad.tensor_map(config.tile),
                ),
                self.mask(),
                self.hooks.operands(),
                self.hooks.biases(),
                self.hooks.score(),
                saved,
                KeyGradientsLaunch::new(
                    dk.quads(),
                    dv.quads(),
                    ds_columns.map(|x| buffer(x, 1)).into(),
                ),
                DqSumsLaunch::new(
                    buffer(&sums, 4),
                    buffer(&turns, 1),
                    as_u32(tickets),
                    heads_at_once,
                ),
                self.problem(),
                config,
            );
            dq_from_sums::launch_unchecked::<A, CudaRuntime>(
                &dq.tensor.client,
                CubeCount::Static(as_u32(tiles), as_u32(batch * heads), 1),
                CubeDim::new_1d(dq_sums::THREADS as u32),
                buffer(&sums, 4),
                dq.quads(),
                ds_rows.map(|x| buffer(x, 1)).into(),
                self.problem(),
                config,
            );
        }
        [dq.tensor, dk.tensor, dv.tensor]
    }
}

/// The gradients of a backward pass.
pub struct Gradients {
    /// Of q, `[batch, heads, queries, head_dim]`.
    pub dq: CudaTensor,
    /// Of k, `[batch, kv_heads, keys, head_dim]`.
    pub dk: CudaTensor,
    /// Of v, `[batch, value heads, keys, value_dim]`.
    pub dv: CudaTensor,
    /// With [`sums_of_rows`], Σ_j dS_ij of each query at its position, `[batch, heads, positions]` in f32; 0 at
    /// positions before the queries.
    pub ds_rows: Option<CudaTensor>,
    /// With [`sums_of_columns`], Σ_i dS_ij of each key, `[batch, heads, keys]` in f32.
    pub ds_columns: Option<CudaTensor>,
}

/// A grid with one block per `rows` of `total` rows, for each of `heads` heads.
pub fn grid(total: usize, rows: usize, heads: usize) -> CubeCount {
    CubeCount::Static(total.div_ceil(rows) as u32, heads as u32, 1)
}

/// rowsum(x ⊙ y), `[batch, heads, rows]` in f32.
pub fn row_dots(x: &Heads, y: &Heads) -> CudaTensor {
    const ROWS: usize = 32;
    let [batch, heads, rows, head_dim] = x.dims;
    let sums = empty(&x.tensor, &[batch, heads, rows], DType::F32);
    // SAFETY: as in `FlashAttention::forward`.
    unsafe {
        backward::row_dots::launch_unchecked::<CudaRuntime>(
            &x.tensor.client,
            grid(rows, ROWS, batch * heads),
            CubeDim::new_1d((ROWS * LANES_PER_ROW) as u32),
            buffer(&x.tensor, CHUNK),
            buffer(&y.tensor, CHUNK),
            buffer(&sums, 1),
            heads as u32,
            rows as u32,
            x.row_strides(),
            y.row_strides(),
            head_dim / CHUNK,
        );
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_heads_of_whole_chunks_are_served() {
        for (dtype, batch_heads, head_dim, served) in [
            (DType::BF16, 128, 64, true),
            (DType::BF16, 65_535, 256, true),
            (DType::BF16, 65_536, 64, false),
            (DType::BF16, 1, 264, false),
            (DType::BF16, 1, 100, false),
            (DType::F32, 1, 64, false),
        ] {
            let found = serves(dtype, batch_heads, head_dim);
            assert_eq!(found, served, "{dtype:?}, {batch_heads} heads of {head_dim} channels");
        }
    }
}
