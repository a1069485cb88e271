//! Pruning of forgotten key tiles. Where E_{I−1} − E_J is at most −127 in all channels, the scores of queries
//! of tile I with keys of tile J are so near 0 that their exponentials are 1 in f32. Because p never rises,
//! this also holds for the tiles before J. The attention kernels skip these keys, and their part of the
//! softmax is added afterwards: each weighs e⁰, so only their number and the sum of their values matter, and
//! their values all have the same gradient.
//!
//! In rows of several documents, the forgotten keys of a query are those of its own document: from the
//! document's start to the first remembered tile. All queries of one tile that have forgotten keys belong to
//! one document, that of the tile's first query; all keys of one tile that later tiles have forgotten belong
//! to the document of the tile's last key. So sums over tiles restart where documents begin, and nothing of
//! one document enters another's sums, not even to be subtracted again.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::kernels::{GateConfig, SumScope, WallShape, after_tiles};
use super::operands::TILE;
use super::{PAIR, WallParams};
use crate::Cuda;
use crate::attention::flash::mask::{Pruned, first_above};
use crate::attention::flash::weight::SoftmaxOutput;
use crate::attention::flash::{HeadPairs, Heads};
use crate::backend::{primitive, tensor};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::{LOG2_E, Pair, define_exp2, exp2};

impl WallParams<'_> {
    /// The first key of each query that some channel remembers, from E at the tiles' ends.
    pub(super) fn remembered(&self, ends: &CudaTensor) -> Pruned {
        let [batch, heads, tokens, _] = self.dims;
        let pruned = Pruned::uninit(&self.gate, [batch, heads, tokens]);
        // SAFETY: a warp handles a tile of one kv head, and stays within its tokens.
        unsafe {
            first_keys::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                CubeDim::new_1d(32),
                buffer(ends, 1),
                buffer(&pruned.first, 1),
                buffer(&pruned.bounds, 1),
                buffer(&pruned.least, 1),
                self.shape(),
                self.config(),
            );
        }
        pruned
    }

    /// Adds the forgotten keys to the result of a softmax over the others.
    pub(super) fn add_forgotten(
        &self,
        pruned: &Pruned,
        documents: Option<&CudaTensor>,
        v: &CudaTensor,
        result: &mut SoftmaxOutput,
    ) {
        let before = self.sums_of_tiles(&Heads::new(v), documents, None);
        let o = Heads::in_place(&result.o);
        let all = empty(&result.lse, &result.lse.meta.shape().to_vec(), DType::F32);
        // SAFETY: as in `remembered`.
        unsafe {
            add_forgotten::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                o.pairs(),
                buffer(&result.lse, 1),
                buffer(&all, 1),
                buffer(&before, PAIR),
                buffer(&pruned.least, 1),
                self.documents(documents),
                self.shape(),
                self.config(),
                documents.is_some(),
            );
        }
        let lse = std::mem::replace(&mut result.lse, all.clone());
        result.sink = result.sink.take().map(|sink| {
            // The denominator has grown.
            let [sink, lse, all] = [sink, lse, all].map(tensor::<Cuda, 3>);
            primitive(sink * ((lse - all) * std::f32::consts::LN_2).exp())
        });
    }

    /// Adds to dv the contributions of the queries that have forgotten the keys.
    pub(super) fn add_gradients_of_forgotten(
        &self,
        pruned: &Pruned,
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
        lse: &CudaTensor,
        dv: &CudaTensor,
    ) {
        let after = self.sums_of_tiles(&Heads::new(grad), documents, Some(lse));
        let dv = Heads::in_place(dv);
        // SAFETY: as in `remembered`.
        unsafe {
            add_gradients::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                dv.pairs(),
                buffer(&after, PAIR),
                buffer(&pruned.least, 1),
                self.documents(documents),
                self.shape(),
                self.config(),
                documents.is_some(),
            );
        }
    }

    /// Sums over tiles. Without `lse`, `x` is v: the sums of the tiles before each, in reverse order of tiles.
    /// With `lse`, `x` is dO: the sums of dO_t / exp(lse_t) of the tiles after each. With `documents`, only
    /// inside the document in which the tile begins (v) or ends (dO).
    fn sums_of_tiles(
        &self,
        x: &Heads,
        documents: Option<&CudaTensor>,
        lse: Option<&CudaTensor>,
    ) -> CudaTensor {
        let totals = self.table(self.tiles(), DType::F32);
        let sum_scope = match (documents, lse) {
            (None, _) => SumScope::Row,
            (Some(_), None) => SumScope::ReversedDocument,
            (Some(_), Some(_)) => SumScope::Document,
        };
        // SAFETY: as in `remembered`.
        unsafe {
            totals_of_tiles::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                x.pairs(),
                lse.map(|x| buffer(x, 1)).into(),
                self.documents(documents),
                buffer(&totals, PAIR),
                self.shape(),
                self.config(),
                lse.is_some(),
                documents.is_some(),
            );
            after_tiles::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_row(),
                self.channels(),
                buffer(&totals, 1),
                self.documents(documents),
                self.shape(),
                sum_scope,
            );
        }
        totals
    }
}

/// The first key that each query's gates remember, and its bounds, as in [`Pruned`].
///
/// - `ends`: `[batch · kv_heads, tiles + 1, dim]`
///
/// Grid: tiles, batch · kv_heads; one warp per block.
#[cube(launch_unchecked)]
fn first_keys(
    ends: &Array<i32>,
    starts: &mut Array<i32>,
    bounds: &mut Array<i32>,
    least: &mut Array<i32>,
    shape: WallShape,
    #[comptime] config: GateConfig,
) {
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (tiles, group) = (shape.tiles(), shape.group as usize);
    let lane = UNIT_POS as usize;
    let base = row * (tiles + 1) * config.padded_head_dim;
    let own = base + tile * config.padded_head_dim;
    // Forgotten tiles come first: binary search for the first remembered one.
    let mut low = 0usize;
    let mut high = tile;
    while low < high {
        let middle = (low + high) / 2;
        let end = base + (middle + 1) * config.padded_head_dim;
        let mut most = i32::cast_from(i32::MIN);
        #[unroll]
        for i in 0..comptime!(config.head_dim.div_ceil(32)) {
            let channel = i * 32 + lane;
            if channel < config.head_dim {
                most = max(most, ends[own + channel] - ends[end + channel]);
            }
        }
        if plane_max(most) <= -127 {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let first = (low * TILE) as i32;
    for member in 0..group {
        let head = row * group + member;
        if lane == 0 {
            bounds[(head * tiles + tile) * 2] = first;
            bounds[(head * tiles + tile) * 2 + 1] = first;
            least[head * tiles + tile] = first;
        }
        #[unroll]
        for i in 0..comptime!(TILE / 32) {
            let t = i * 32 + lane;
            if t < shape.count() {
                starts[head * shape.tokens as usize + shape.first() + t] = first;
            }
        }
    }
}

/// Σ_t v_t of each tile, in reverse order of tiles; or with `of_queries`, Σ_t dO_t / exp(lse_t) over the heads
/// of the group, in order. If `packed`, only over the values that a later tile's queries may see, or the
/// queries that see an earlier tile's values.
///
/// - `totals`: `[batch · kv_heads, tiles, dim]`
/// - `documents`: if `packed`, `[batch, tokens]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn totals_of_tiles(
    x: &HeadPairs<bf16>,
    lse: &ComptimeOption<Array<f32>>,
    documents: &ComptimeOption<Array<i32>>,
    totals: &mut Array<Pair>,
    shape: WallShape,
    #[comptime] config: GateConfig,
    #[comptime] of_queries: bool,
    #[comptime] packed: bool,
) {
    define_exp2();
    let row = CUBE_POS_Y as usize;
    let (batch, kv_head) = (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
    let mut sum = Pair::cast_from(0f32);
    let mut tile = shape.tiles() - 1 - CUBE_POS_X as usize;
    let mut group = 1usize;
    if of_queries {
        tile = CUBE_POS_X as usize;
        group = shape.group as usize;
    }
    let (first, count) = (shape.first(), shape.count());
    let tokens_at = batch * shape.tokens as usize;
    // The first value that enters the sum.
    let mut from = 0usize;
    if comptime!(packed && !of_queries) {
        from = documents.as_ref().unwrap()[tokens_at + first + count - 1] as usize;
    }
    if UNIT_POS as usize * 2 < config.head_dim {
        for member in 0..group {
            let head = kv_head * group + member;
            for t in max(first, from)..first + count {
                let own = Pair::cast_from(x.pairs[x.at(batch, head, t, UNIT_POS as usize)]);
                if of_queries {
                    let at = (row * group + member) * shape.tokens as usize + t;
                    let mut counts = true;
                    if packed {
                        counts = (documents.as_ref().unwrap()[tokens_at + t] as usize) < first;
                    }
                    if counts {
                        sum += own * Vector::cast_from(exp2(-lse.as_ref().unwrap()[at]));
                    }
                } else {
                    sum += own;
                }
            }
        }
    }
    let at = row * shape.tiles() + tile;
    totals[at * comptime!(config.padded_head_dim / 2) + UNIT_POS as usize] = sum;
}

/// Turns o and lse over the remembered keys into those over all keys.
///
/// - `before`: Σ v of the tiles before each, in reverse order of tiles, `[batch · kv_heads, tiles, dim]`; if
///   `packed`, only of the document in which the tile before it ends
/// - `documents`: if `packed`, `[batch, tokens]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn add_forgotten(
    o: &mut HeadPairs<bf16>,
    lse: &Array<f32>,
    all_lse: &mut Array<f32>,
    before: &Array<Pair>,
    least: &Array<i32>,
    documents: &ComptimeOption<Array<i32>>,
    shape: WallShape,
    #[comptime] config: GateConfig,
    #[comptime] packed: bool,
) {
    define_exp2();
    let unit = UNIT_POS as usize;
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (batch, kv_head) = (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
    let (tiles, group) = (shape.tiles(), shape.group as usize);
    let tokens_at = batch * shape.tokens as usize;
    // Keys from `from` to `to` are forgotten; the range may be empty.
    let to = least[row * group * tiles + tile] as usize;
    let mut from = 0usize;
    if packed {
        from = min(documents.as_ref().unwrap()[tokens_at + shape.first()] as usize, to);
    }
    let at = row * tiles + tiles - 1 - to / TILE;
    let values = before[at * comptime!(config.padded_head_dim / 2) + unit];
    let number = f32::cast_from((to - from) as u32);
    for member in 0..group {
        for i in 0..shape.count() {
            let t = shape.first() + i;
            let statistic = (row * group + member) * shape.tokens as usize + t;
            let mut sum = lse[statistic];
            let mut forgets = to > from;
            if packed {
                // Not if the document begins in this tile.
                forgets = (documents.as_ref().unwrap()[tokens_at + t] as usize) < to;
            }
            if forgets {
                // Relative to the larger of both.
                let row_max = max(sum, Log::ln(number) * LOG2_E);
                let (own, one) = (exp2(sum - row_max), exp2(-row_max));
                let total = fma(number, one, own);
                sum = row_max + Log::ln(total) * LOG2_E;
                if unit * 2 < config.head_dim {
                    let to = o.at(batch, kv_head * group + member, t, unit);
                    let mut pair = Pair::cast_from(o.pairs[to]);
                    #[unroll]
                    for e in 0..2usize {
                        pair[e] = fma(values[e], one, pair[e] * own) / total;
                    }
                    o.pairs[to] = Vector::cast_from(pair);
                }
            }
            if unit == 0 {
                all_lse[statistic] = sum;
            }
        }
    }
}

/// Adds to dv the contributions of the queries that have forgotten the key.
///
/// - `after`: Σ over the queries after each tile, `[batch · kv_heads, tiles, dim]`; if `packed`, only of the
///   document in which the tile ends
/// - `documents`: if `packed`, `[batch, tokens]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn add_gradients(
    dv: &mut HeadPairs<bf16>,
    after: &Array<Pair>,
    least: &Array<i32>,
    documents: &ComptimeOption<Array<i32>>,
    shape: WallShape,
    #[comptime] config: GateConfig,
    #[comptime] packed: bool,
) {
    let unit = UNIT_POS as usize;
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (batch, kv_head) = (row / shape.kv_heads as usize, row % shape.kv_heads as usize);
    let tiles = shape.tiles();
    let base = row * shape.group as usize * tiles;
    // The first tile whose queries have forgotten this one.
    let low = first_above(least, base, tile * TILE, tile + 1, tiles);
    // Keys from `from` on are forgotten if their document has such queries.
    let mut from = 0usize;
    let mut forgotten = low < tiles;
    if packed {
        let tokens_at = batch * shape.tokens as usize;
        let last = shape.first() + shape.count() - 1;
        from = documents.as_ref().unwrap()[tokens_at + last] as usize;
        if documents.as_ref().unwrap()[tokens_at + min(low, tiles - 1) * TILE] as usize > last {
            forgotten = false;
        }
    }
    if forgotten & (unit * 2 < config.head_dim) {
        let later = after[(row * tiles + low - 1) * comptime!(config.padded_head_dim / 2) + unit];
        for i in 0..shape.count() {
            let t = shape.first() + i;
            if t >= from {
                let at = dv.at(batch, kv_head, t, unit);
                let own = Pair::cast_from(dv.pairs[at]);
                dv.pairs[at] = Vector::cast_from(own + later);
            }
        }
    }
}
