//! Row statistics and first keys of a query tile, for the kernels that loop over query tiles.

use cubecl::prelude::*;

use super::super::hooks::{Hooks, SavedRows, Weight, WeightOf, four_statistics};
use super::super::mask::Mask;
use super::super::problem::{KernelConfig, ProblemShape};
use crate::tile::stage_to_smem;

/// Registers per lane for pairs of queries.
const fn lanes(tile: usize) -> usize {
    (tile / 2).div_ceil(32)
}

/// Statistics and first keys of a tile's queries. Lanes read those of the next tile ahead, in pairs of
/// neighbouring queries, and put them into a slot of shared memory.
#[derive(CubeType)]
pub struct QueryTile {
    /// The statistics of two queries as [`Weight::saved`] gives them: both shifts, then both numbers to
    /// subtract.
    statistics: Array<Vector<f32, Const<4>>>,
    /// With [`four_statistics`], those of two queries as [`Weight::saved_more`] gives them.
    more: Array<Vector<f32, Const<4>>>,
    /// Their first keys, if the mask has limits.
    first_keys: Array<Vector<u32, Const<2>>>,
    /// The statistics of the tile in each slot.
    statistics_tile: SharedMemory<Vector<f32, Const<4>>>,
    /// Those of [`QueryTile::more`].
    more_tile: SharedMemory<Vector<f32, Const<4>>>,
    /// The first keys of the tile in each slot.
    first_keys_tile: SharedMemory<Vector<u32, Const<2>>>,
}

#[cube]
impl QueryTile {
    /// Empty slots; `four` says whether rows have four statistics.
    pub fn new(
        #[comptime] slots: usize,
        #[comptime] four: bool,
        #[comptime] config: KernelConfig,
    ) -> QueryTile {
        let count = comptime!(slots * config.tile / 2);
        let count_of_more = comptime!(if four { count } else { 1 });
        QueryTile {
            statistics: Array::<Vector<f32, Const<4>>>::new(comptime!(lanes(config.tile))),
            more: Array::<Vector<f32, Const<4>>>::new(comptime!(lanes(config.tile))),
            first_keys: Array::<Vector<u32, Const<2>>>::new(comptime!(lanes(config.tile))),
            statistics_tile: SharedMemory::<Vector<f32, Const<4>>>::new_aligned(count, 16usize),
            more_tile: SharedMemory::<Vector<f32, Const<4>>>::new_aligned(count_of_more, 16usize),
            first_keys_tile: SharedMemory::<Vector<u32, Const<2>>>::new_aligned(count, 8usize),
        }
    }

    /// Reads the tile from `first_query` on.
    pub fn read<A: Hooks>(
        &mut self,
        saved: &SavedRows<A>,
        mask: &Mask,
        problem: &ProblemShape,
        batch: usize,
        head: usize,
        first_query: usize,
        #[comptime] config: KernelConfig,
    ) {
        let queries = problem.queries as usize;
        let (offset, last) = (problem.offset(), queries - 1);
        let batch_head = batch * problem.heads as usize + head;
        #[unroll]
        for i in 0..comptime!(lanes(config.tile)) {
            let query = first_query + (i * 32 + UNIT_POS_PLANE as usize) * 2;
            if comptime!(WeightOf::<A>::HAS_STATISTICS) {
                let mut four = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for e in 0..2usize {
                    let at = batch_head * queries + min(query + e, last);
                    let (shift, delta) = WeightOf::<A>::saved(saved, at);
                    four[e] = shift;
                    four[comptime!(e + 2)] = delta;
                }
                self.statistics[i] = four;
            }
            if comptime!(four_statistics::<A>()) {
                let mut four = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for e in 0..2usize {
                    let at = batch_head * queries + min(query + e, last);
                    let (third, fourth) = WeightOf::<A>::saved_more(saved, at);
                    four[e] = third;
                    four[comptime!(e + 2)] = fourth;
                }
                self.more[i] = four;
            }
            if comptime!(mask.limits.any()) {
                let mut pair = Vector::<u32, Const<2>>::empty();
                #[unroll]
                for e in 0..2usize {
                    let own = min(query + e, last);
                    pair[e] = mask.first_key_of(problem, batch, batch_head, own, offset + own);
                }
                self.first_keys[i] = pair;
            }
        }
    }

    /// Puts the tile that was read into a slot.
    pub fn put<A: Hooks>(&mut self, mask: &Mask, slot: usize, #[comptime] config: KernelConfig) {
        let count = comptime!(config.tile / 2);
        if comptime!(WeightOf::<A>::HAS_STATISTICS) {
            stage_to_smem::<f32, Const<4>>(
                &mut self.statistics_tile,
                &self.statistics,
                slot,
                count,
            );
        }
        if comptime!(four_statistics::<A>()) {
            stage_to_smem::<f32, Const<4>>(&mut self.more_tile, &self.more, slot, count);
        }
        if comptime!(mask.limits.any()) {
            stage_to_smem::<u32, Const<2>>(
                &mut self.first_keys_tile,
                &self.first_keys,
                slot,
                count,
            );
        }
    }

    /// The statistics of a lane's queries from 8·`n` on in a slot's tile.
    pub fn statistics<A: Hooks>(
        &self,
        slot: usize,
        #[comptime] n: usize,
        #[comptime] config: KernelConfig,
    ) -> Vector<f32, Const<4>> {
        let mut four = Vector::<f32, Const<4>>::cast_from(0f32);
        if comptime!(WeightOf::<A>::HAS_STATISTICS) {
            let place = slot * comptime!(config.tile / 2) + comptime!(n * 4);
            four = self.statistics_tile[place + UNIT_POS_PLANE as usize % 4];
        }
        four
    }

    /// The further statistics of a lane's queries from 8·`n` on in a slot's tile.
    pub fn more_statistics<A: Hooks>(
        &self,
        slot: usize,
        #[comptime] n: usize,
        #[comptime] config: KernelConfig,
    ) -> Vector<f32, Const<4>> {
        let mut four = Vector::<f32, Const<4>>::cast_from(0f32);
        if comptime!(four_statistics::<A>()) {
            let place = slot * comptime!(config.tile / 2) + comptime!(n * 4);
            four = self.more_tile[place + UNIT_POS_PLANE as usize % 4];
        }
        four
    }

    /// The first keys of a lane's queries from 8·`n` on in a slot's tile.
    pub fn first_keys(
        &self,
        mask: &Mask,
        slot: usize,
        #[comptime] n: usize,
        #[comptime] config: KernelConfig,
    ) -> Vector<u32, Const<2>> {
        let mut first = Vector::<u32, Const<2>>::cast_from(0u32);
        if comptime!(mask.limits.any()) {
            let place = slot * comptime!(config.tile / 2) + comptime!(n * 4);
            first = self.first_keys_tile[place + UNIT_POS_PLANE as usize % 4];
        }
        first
    }

    /// The minimum and maximum of the first keys that were read, over the warp.
    pub fn min_and_max_first_key(&self, #[comptime] config: KernelConfig) -> (usize, usize) {
        let (mut least, mut most) = (self.first_keys[0][0], self.first_keys[0][0]);
        #[unroll]
        for i in 0..comptime!(lanes(config.tile)) {
            least = min(least, min(self.first_keys[i][0], self.first_keys[i][1]));
            most = max(most, max(self.first_keys[i][0], self.first_keys[i][1]));
        }
        // The shuffles tell the compiler that the values are warp-uniform.
        let least = plane_shuffle(plane_min(least), 0u32) as usize;
        (least, plane_shuffle(plane_max(most), 0u32) as usize)
    }
}
