//! How many of the weights are not zero, measured for a probe.
//!
//! A row's weights are computed as the reference computes them, in f32 and block by block of queries, so that
//! memory grows with seq_len, not with its square. A weight below f32's range counts as zero, and so does one that
//! a kernel rounds to zero. Nothing is computed without a probe.

#[cfg(test)]
mod tests;

use burn::tensor::{Bool, FloatDType, Tensor};

use super::{RowwiseCall, RowwiseInputs, Weights, repeat_heads};
use crate::attention::blocks::{BLOCK_ELEMENTS, Block};
use crate::attention::probe::{Metric, Probe};
use crate::backend::OpBackend;

/// The fraction, 0 to 1, of the visible (query, key) pairs whose weight is not zero.
pub const NONZERO_FRACTION: Metric = Metric("nonzero_fraction");

/// The fraction, 0 to 1, of the tiles with such a pair, among those with a visible pair. A tile is 64 queries by 64
/// keys; the first starts at the row's first token.
pub const NONZERO_TILE_FRACTION: Metric = Metric("nonzero_tile_fraction");

/// The fraction, 0 to 1, of the queries whose weights are all zero.
pub const EMPTY_ROW_FRACTION: Metric = Metric("empty_row_fraction");

/// What [`RowwiseCall::report_sparsity`] reports.
pub const METRICS: [Metric; 3] = [NONZERO_FRACTION, NONZERO_TILE_FRACTION, EMPTY_ROW_FRACTION];

/// Queries, and keys, of a tile.
const TILE: usize = 64;

/// Of the pairs of one head that have some property.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    pairs: u64,
    /// Tiles with such a pair.
    tiles: u64,
    /// Queries with such a pair.
    rows: u64,
}

impl<B: OpBackend, W: Weights> RowwiseCall<B, W> {
    /// Reports [`METRICS`] of each head in each of `views` views, over all sequences of the batch.
    ///
    /// # Panics
    /// When the queries are not those of all keys.
    pub fn report_sparsity(self, views: usize, probe: &mut Probe) {
        let RowwiseCall { op, q, k, v, offsets, documents, .. } = self;
        let ([batch, heads, tokens, _], keys) = (q.dims(), k.dims()[2]);
        assert_eq!(tokens, keys, "queries for all keys");
        let [q, k] = [q, k].map(|x| x.cast(FloatDType::F32));
        let offsets = offsets.map(|x| x.cast(FloatDType::F32));
        let inputs = RowwiseInputs { q, k, v, offsets, documents };
        let (mut visible, mut nonzero) = (vec![Counts::default()], vec![Counts::default(); heads]);
        for block in blocks_of_tiles(batch * heads, tokens, op.window) {
            let q = op.queries(&inputs, &block);
            let k = repeat_heads(block.keys_of(&inputs.k), inputs.group());
            let (scores, mask) = op.scores(&inputs, &block, [&q, &k]);
            // The same for every head.
            add_counts(&mut visible, mask.clone().narrow(1, 0, 1).bool_not());
            let weights = op.weights.weigh(scores, mask);
            add_counts(&mut nonzero, weights.equal_elem(0.0).bool_not());
        }
        let visible = visible[0];
        let per_view = |fraction: &dyn Fn(&Counts) -> f64| -> Vec<Vec<f64>> {
            let of_view = |heads: &[Counts]| heads.iter().map(fraction).collect();
            nonzero.chunks(heads / views).map(of_view).collect()
        };
        let share = |part: u64, all: u64| part as f64 / all as f64;
        let pairs = per_view(&|head| share(head.pairs, visible.pairs));
        let tiles = per_view(&|head| share(head.tiles, visible.tiles));
        let empty = per_view(&|head| share(visible.rows - head.rows, visible.rows));
        probe.report_heads(NONZERO_FRACTION, pairs);
        probe.report_heads(NONZERO_TILE_FRACTION, tiles);
        probe.report_heads(EMPTY_ROW_FRACTION, empty);
    }
}

/// Blocks whose queries and keys start where tiles do, of about [`BLOCK_ELEMENTS`] scores, but at least one tile of
/// queries; `rows` is batch · heads · views.
fn blocks_of_tiles(
    rows: usize,
    tokens: usize,
    window: Option<usize>,
) -> impl Iterator<Item = Block> {
    let size = (BLOCK_ELEMENTS / (rows * tokens * TILE).max(1)).max(1) * TILE;
    (0..tokens).step_by(size).map(move |start| {
        let end = (start + size).min(tokens);
        let seen_from = window.map_or(0, |w| (start + 1).saturating_sub(w));
        Block { queries: start..end, keys: seen_from / TILE * TILE..end }
    })
}

/// Adds the counts of a block, whose `pairs` `[batch, heads, queries, keys]` are true where counted, to those of
/// each head.
fn add_counts<B: OpBackend>(counts: &mut [Counts], pairs: Tensor<B, 4, Bool>) {
    let [batch, heads, queries, keys] = pairs.dims();
    let (query_tiles, key_tiles) = (queries.div_ceil(TILE), keys.div_ceil(TILE));
    let pairs = padded(padded(pairs.float(), 3), 2);
    // Sums of at most seq_len ones: f32 holds them exactly. Only the sums of tiles and rows leave the device.
    let by_key_tile = pairs
        .reshape([batch * heads, query_tiles * TILE * key_tiles, TILE])
        .sum_dim(2)
        .reshape([batch * heads, query_tiles, TILE, key_tiles]);
    let tiles = by_key_tile.clone().sum_dim(2).into_data();
    let rows = by_key_tile.sum_dim(3).into_data();
    let (tiles, rows): (Vec<f32>, Vec<f32>) = (tiles.iter().collect(), rows.iter().collect());
    let nonzero = |sums: &[f32]| sums.iter().filter(|sum| **sum > 0.0).count() as u64;
    let tiles = tiles.chunks(query_tiles * key_tiles);
    for (at, (tiles, rows)) in tiles.zip(rows.chunks(query_tiles * TILE)).enumerate() {
        let head = &mut counts[at % heads];
        head.pairs += tiles.iter().map(|sum| *sum as u64).sum::<u64>();
        head.tiles += nonzero(tiles);
        head.rows += nonzero(rows);
    }
}

/// Zeros appended along `dim`, up to a multiple of [`TILE`].
fn padded<B: OpBackend>(x: Tensor<B, 4>, dim: usize) -> Tensor<B, 4> {
    let mut shape = x.dims();
    shape[dim] = shape[dim].next_multiple_of(TILE) - shape[dim];
    if shape[dim] == 0 {
        return x;
    }
    let zeros = Tensor::zeros(shape, &x.device());
    Tensor::cat(vec![x, zeros], dim)
}
