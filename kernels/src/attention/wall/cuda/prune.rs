//! Tiles of keys that every channel has forgotten: where E_{I−1} − E_J is at most −127 in all channels, scores
//! of queries of tile I with keys of tile J are so near 0 that their exponentials are 1 in f32. Since decays
//! never rise, this holds for the tiles before J too. The attention kernels leave these keys out, and what
//! they do to the softmax is added afterwards: each weighs e⁰, so that their number and the sum of their
//! values is all that counts, and their values' gradients are one and the same.
//!
//! In rows of several documents a query has forgotten keys of its own document alone: those before the first
//! remembered tile, from where the document begins. Queries of one tile that have forgotten some are all of
//! one document, that of the tile's first; keys of one tile that are forgotten too, that of its last.

use burn::tensor::{DType, bf16};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::kernels::{Options, Sizes, after_tiles, pair_at};
use super::{Call, PAIR};
use crate::attention::softmax::cuda::{GATE_TILE as TILE, Heads, Pruned};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::ops::cuda::integers;
use crate::tile::{LOG2_E, Rows, define_exp2, exp2};

impl Call<'_> {
    /// Where queries begin to see keys that some channel remembers, from E at the tiles' ends.
    pub(super) fn remembered(&self, ends: &CudaTensor) -> Pruned {
        let [batch, heads, tokens, _] = self.dims;
        let tiles = self.tiles();
        let integers = |shape: &[usize]| empty(&self.gate, shape, DType::I32);
        let pruned = Pruned {
            starts: integers(&[batch, heads, tokens]),
            bounds: integers(&[batch, heads, tiles, 2]),
            least: integers(&[batch, heads, tiles]),
        };
        // SAFETY: a warp handles a tile of one row, and stays within its tokens.
        unsafe {
            first_keys::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                CubeDim::new_1d(32),
                buffer(ends, 1),
                buffer(&pruned.starts, 1),
                buffer(&pruned.bounds, 1),
                buffer(&pruned.least, 1),
                self.sizes(),
                self.options(),
            );
        }
        pruned
    }

    /// Adds forgotten keys' part to `o`; returns the logarithms of the softmax's sums with it.
    pub(super) fn add_forgotten(
        &self,
        pruned: &Pruned,
        documents: Option<&CudaTensor>,
        v: &CudaTensor,
        o: &CudaTensor,
        lse: &CudaTensor,
    ) -> CudaTensor {
        let v = Heads::new(v);
        let before = self.sums_of_tiles(&v, lse, false);
        let o = Heads::in_place(o);
        let all = empty(lse, &lse.meta.shape().to_vec(), DType::F32);
        // SAFETY: as in `remembered`.
        unsafe {
            add_forgotten::launch_unchecked::<bf16, CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                PAIR,
                buffer(&v.tensor, PAIR),
                buffer(&o.tensor, PAIR),
                buffer(lse, 1),
                buffer(&all, 1),
                buffer(&before, PAIR),
                buffer(&pruned.least, 1),
                self.documents(documents),
                v.rows(),
                o.rows(),
                self.sizes(),
                self.options(),
                documents.is_some(),
            );
        }
        all
    }

    /// Adds the part of queries that have forgotten them to the gradients of values.
    pub(super) fn add_gradients_of_forgotten(
        &self,
        pruned: &Pruned,
        documents: Option<&CudaTensor>,
        grad: &CudaTensor,
        lse: &CudaTensor,
        dv: &CudaTensor,
    ) {
        let grad = Heads::new(grad);
        let after = self.sums_of_tiles(&grad, lse, true);
        let dv = Heads::in_place(dv);
        // SAFETY: as in `remembered`.
        unsafe {
            add_gradients::launch_unchecked::<bf16, CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                PAIR,
                buffer(&grad.tensor, PAIR),
                buffer(lse, 1),
                buffer(&dv.tensor, PAIR),
                buffer(&after, PAIR),
                buffer(&pruned.least, 1),
                self.documents(documents),
                grad.rows(),
                dv.rows(),
                self.sizes(),
                self.options(),
                documents.is_some(),
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

    /// What the tiles before each add up to, of values, from the last tile's on; of queries' gradients, each
    /// over the softmax's sum, what those after each do.
    fn sums_of_tiles(&self, x: &Heads, lse: &CudaTensor, of_queries: bool) -> CudaTensor {
        let totals = self.table(self.tiles(), DType::F32);
        // SAFETY: as in `remembered`.
        unsafe {
            totals_of_tiles::launch_unchecked::<bf16, CudaRuntime>(
                &self.gate.client,
                self.by_tile(),
                self.pairs(),
                PAIR,
                buffer(&x.tensor, PAIR),
                buffer(lse, 1),
                buffer(&totals, PAIR),
                x.rows(),
                self.sizes(),
                self.options(),
                of_queries,
            );
            after_tiles::launch_unchecked::<CudaRuntime>(
                &self.gate.client,
                self.by_row(),
                self.channels(),
                buffer(&totals, 1),
                self.tiles() as u32,
            );
        }
        totals
    }
}

/// The first key that each query's gates remember, as [`Pruned`] has it.
///
/// - `ends`: `[batch · kv_heads, tiles + 1, dim]`
///
/// Grid: tiles, batch · kv_heads; a warp.
#[cube(launch_unchecked)]
fn first_keys(
    ends: &Array<i32>,
    starts: &mut Array<i32>,
    bounds: &mut Array<i32>,
    least: &mut Array<i32>,
    sizes: Sizes,
    #[comptime] options: Options,
) {
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (tiles, group) = (sizes.tiles(), sizes.group as usize);
    let lane = UNIT_POS as usize;
    let base = row * (tiles + 1) * options.dim;
    let own = base + tile * options.dim;
    // Forgotten tiles come first: halve the range of those that may be the first remembered.
    let mut low = 0usize;
    let mut high = tile;
    while low < high {
        let middle = (low + high) / 2;
        let end = base + (middle + 1) * options.dim;
        let mut most = i32::cast_from(i32::MIN);
        #[unroll]
        for i in 0..comptime!(options.real.div_ceil(32)) {
            let channel = i * 32 + lane;
            if channel < options.real {
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
            if t < sizes.count() {
                starts[head * sizes.tokens as usize + sizes.first() + t] = first;
            }
        }
    }
}

/// Σ_t v_t of each tile, from the last tile's on; or Σ_t dO_t / Σ of t's softmax, over the heads of the group,
/// from the first's.
///
/// - `totals`: `[batch · kv_heads, tiles, dim]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn totals_of_tiles<E: Numeric, W: Size>(
    x: &Array<Vector<E, W>>,
    lse: &Array<f32>,
    totals: &mut Array<Vector<f32, W>>,
    x_rows: Rows,
    sizes: Sizes,
    #[comptime] options: Options,
    #[comptime] of_queries: bool,
) {
    define_exp2();
    let row = CUBE_POS_Y as usize;
    let (batch, kv_head) = (row / sizes.kv_heads as usize, row % sizes.kv_heads as usize);
    let mut sum = Vector::<f32, W>::cast_from(0f32);
    let mut tile = sizes.tiles() - 1 - CUBE_POS_X as usize;
    let mut group = 1usize;
    if of_queries {
        tile = CUBE_POS_X as usize;
        group = sizes.group as usize;
    }
    if UNIT_POS as usize * 2 < options.real {
        for member in 0..group {
            let head = kv_head * group + member;
            for i in 0..sizes.count() {
                let t = sizes.first() + i;
                let own = Vector::<f32, W>::cast_from(x[pair_at(&x_rows, batch, head, t)]);
                if of_queries {
                    let at = (row * group + member) * sizes.tokens as usize + t;
                    sum += own * Vector::cast_from(exp2(-lse[at]));
                } else {
                    sum += own;
                }
            }
        }
    }
    let at = row * sizes.tiles() + tile;
    totals[at * comptime!(options.dim / 2) + UNIT_POS as usize] = sum;
}

/// o and lse over remembered keys become those over all.
///
/// - `before`: Σ v of the tiles before each, from the last tile's on, `[batch · kv_heads, tiles, dim]`
/// - `documents`: where `packed`, `[batch, tokens]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn add_forgotten<E: Numeric, W: Size>(
    v: &Array<Vector<E, W>>,
    o: &mut Array<Vector<E, W>>,
    lse: &Array<f32>,
    all_lse: &mut Array<f32>,
    before: &Array<Vector<f32, W>>,
    least: &Array<i32>,
    documents: &Array<i32>,
    v_rows: Rows,
    o_rows: Rows,
    sizes: Sizes,
    #[comptime] options: Options,
    #[comptime] packed: bool,
) {
    define_exp2();
    let unit = UNIT_POS as usize;
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (batch, kv_head) = (row / sizes.kv_heads as usize, row % sizes.kv_heads as usize);
    let (tiles, group) = (sizes.tiles(), sizes.group as usize);
    let half = comptime!(options.dim / 2);
    let tokens_at = batch * sizes.tokens as usize;
    let last = row * tiles + tiles - 1;
    // Keys from `from` to `to` are forgotten, where there are any.
    let to = least[row * group * tiles + tile] as usize;
    let mut from = 0usize;
    let mut values = before[(last - to / TILE) * half + unit];
    if packed {
        from = min(documents[tokens_at + sizes.first()] as usize, to);
        values -= before[(last - from / TILE) * half + unit];
        if unit * 2 < options.real {
            for t in from / TILE * TILE..from {
                values -= Vector::cast_from(v[pair_at(&v_rows, batch, kv_head, t)]);
            }
        }
    }
    let number = f32::cast_from((to - from) as u32);
    for member in 0..group {
        for i in 0..sizes.count() {
            let t = sizes.first() + i;
            let statistic = (row * group + member) * sizes.tokens as usize + t;
            let mut sum = lse[statistic];
            let mut forgets = to > from;
            if packed {
                // Not in a document that begins in this tile.
                forgets = (documents[tokens_at + t] as usize) < to;
            }
            if forgets {
                // Relative to the larger of both.
                let top = max(sum, Log::ln(number) * LOG2_E);
                let (own, one) = (exp2(sum - top), exp2(-top));
                let total = fma(number, one, own);
                sum = top + Log::ln(total) * LOG2_E;
                if unit * 2 < options.real {
                    let to = pair_at(&o_rows, batch, kv_head * group + member, t);
                    let mut pair = Vector::<f32, W>::cast_from(o[to]);
                    #[unroll]
                    for e in 0..2usize {
                        pair[e] = fma(values[e], one, pair[e] * own) / total;
                    }
                    o[to] = Vector::cast_from(pair);
                }
            }
            if unit == 0 {
                all_lse[statistic] = sum;
            }
        }
    }
}

/// dv gets the part of the queries that have forgotten its key.
///
/// - `after`: Σ of queries after each tile, `[batch · kv_heads, tiles, dim]`
/// - `documents`: where `packed`, `[batch, tokens]`
///
/// Grid: tiles, batch · kv_heads; a unit for each pair of channels.
#[cube(launch_unchecked, fast_math = FastMath::all())]
fn add_gradients<E: Numeric, W: Size>(
    grad: &Array<Vector<E, W>>,
    lse: &Array<f32>,
    dv: &mut Array<Vector<E, W>>,
    after: &Array<Vector<f32, W>>,
    least: &Array<i32>,
    documents: &Array<i32>,
    grad_rows: Rows,
    dv_rows: Rows,
    sizes: Sizes,
    #[comptime] options: Options,
    #[comptime] packed: bool,
) {
    define_exp2();
    let unit = UNIT_POS as usize;
    let (tile, row) = (CUBE_POS_X as usize, CUBE_POS_Y as usize);
    let (batch, kv_head) = (row / sizes.kv_heads as usize, row % sizes.kv_heads as usize);
    let tiles = sizes.tiles();
    let base = row * sizes.group as usize * tiles;
    // The first tile whose queries have forgotten this one.
    let mut low = tile + 1;
    let mut high = tiles;
    while low < high {
        let middle = (low + high) / 2;
        if least[base + middle] as usize > tile * TILE {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let half = comptime!(options.dim / 2);
    let tokens = sizes.tokens as usize;
    // The keys that are forgotten, from `from` on, and one past the last query that may have forgotten them.
    let mut from = 0usize;
    let mut to = tokens;
    if packed {
        let last = sizes.first() + sizes.count() - 1;
        from = documents[batch * tokens + last] as usize;
        let mut start = last + 1;
        while start < to {
            let middle = (start + to) / 2;
            if documents[batch * tokens + middle] as usize > last {
                to = middle;
            } else {
                start = middle + 1;
            }
        }
    }
    if (low * TILE < to) & (unit * 2 < options.real) {
        let mut later = after[(row * tiles + low - 1) * half + unit];
        if packed {
            later -= after[(row * tiles + to / TILE - 1) * half + unit];
            for member in 0..sizes.group as usize {
                let head = kv_head * sizes.group as usize + member;
                for t in to / TILE * TILE..to {
                    let own = Vector::<f32, W>::cast_from(grad[pair_at(&grad_rows, batch, head, t)]);
                    let at = (row * sizes.group as usize + member) * tokens + t;
                    later += own * Vector::cast_from(exp2(-lse[at]));
                }
            }
        }
        for i in 0..sizes.count() {
            let t = sizes.first() + i;
            if t >= from {
                let at = pair_at(&dv_rows, batch, kv_head, t);
                let own = Vector::<f32, W>::cast_from(dv[at]);
                dv[at] = Vector::cast_from(own + later);
            }
        }
    }
}
