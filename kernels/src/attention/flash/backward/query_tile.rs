//! What the kernel of dk and dv needs of a tile's queries beside their channels.

use cubecl::prelude::*;

use super::super::hooks::{Hooks, SavedRows, Weight, WeightOf};
use super::super::mask::Mask;
use super::super::problem::{Config, Problem};
use crate::tile::stage_to_smem;

/// Registers of pairs of queries in each lane.
const fn lanes(tile: usize) -> usize {
    (tile / 2).div_ceil(32)
}

/// Statistics and first keys of a tile's queries. A lane reads those of up to two neighbours while the tile
/// before is worked on, and passes them to the warp through shared memory.
#[derive(CubeType)]
pub struct QueryTile {
    /// The shift of scores of two queries, then what is subtracted from their weights' gradients.
    statistics: Array<Vector<f32, Const<4>>>,
    /// Their first keys, where the mask has limits.
    first_keys: Array<Vector<u32, Const<2>>>,
    /// The statistics of the tile that is worked on, for each warp.
    statistics_tile: SharedMemory<Vector<f32, Const<4>>>,
    /// Its first keys.
    first_keys_tile: SharedMemory<Vector<u32, Const<2>>>,
}

#[cube]
impl QueryTile {
    /// Nothing read yet.
    pub fn new(#[comptime] config: Config) -> QueryTile {
        let count = comptime!(config.warps * config.tile / 2);
        QueryTile {
            statistics: Array::<Vector<f32, Const<4>>>::new(comptime!(lanes(config.tile))),
            first_keys: Array::<Vector<u32, Const<2>>>::new(comptime!(lanes(config.tile))),
            statistics_tile: SharedMemory::<Vector<f32, Const<4>>>::new_aligned(count, 16usize),
            first_keys_tile: SharedMemory::<Vector<u32, Const<2>>>::new_aligned(count, 8usize),
        }
    }

    /// Reads those of the tile from `first_query` on.
    pub fn read<A: Hooks>(
        &mut self,
        saved: &SavedRows<A>,
        mask: &Mask,
        problem: &Problem,
        batch: usize,
        head: usize,
        first_query: usize,
        #[comptime] config: Config,
    ) {
        let (queries, keys) = (problem.queries as usize, problem.keys as usize);
        let (offset, last) = (keys - queries, queries - 1);
        let row = batch * problem.heads as usize + head;
        #[unroll]
        for i in 0..comptime!(lanes(config.tile)) {
            let query = first_query + (i * 32 + UNIT_POS_PLANE as usize) * 2;
            if comptime!(WeightOf::<A>::STATISTICS) {
                let mut four = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for e in 0..2usize {
                    let at = row * queries + min(query + e, last);
                    let (shift, delta) = WeightOf::<A>::saved(saved, at);
                    four[e] = shift;
                    four[comptime!(e + 2)] = delta;
                }
                self.statistics[i] = four;
            }
            if comptime!(mask.limits.any()) {
                let mut pair = Vector::<u32, Const<2>>::empty();
                #[unroll]
                for e in 0..2usize {
                    let own = min(query + e, last);
                    pair[e] = mask.first_key_of(problem, batch, row, own, offset + own);
                }
                self.first_keys[i] = pair;
            }
        }
    }

    /// Begins the tile that was read: the warp can ask for it.
    pub fn begin<A: Hooks>(&mut self, mask: &Mask, warp: usize, #[comptime] config: Config) {
        let count = comptime!(config.tile / 2);
        if comptime!(WeightOf::<A>::STATISTICS) {
            stage_to_smem::<f32, Const<4>>(
                &mut self.statistics_tile,
                &self.statistics,
                warp,
                count,
            );
        }
        if comptime!(mask.limits.any()) {
            stage_to_smem::<u32, Const<2>>(
                &mut self.first_keys_tile,
                &self.first_keys,
                warp,
                count,
            );
        }
    }

    /// The statistics of a lane's queries from 8·`n` on, of the tile that is worked on.
    pub fn statistics<A: Hooks>(
        &self,
        warp: usize,
        #[comptime] n: usize,
        #[comptime] config: Config,
    ) -> Vector<f32, Const<4>> {
        let mut four = Vector::<f32, Const<4>>::cast_from(0f32);
        if comptime!(WeightOf::<A>::STATISTICS) {
            let place = warp * comptime!(config.tile / 2) + comptime!(n * 4);
            four = self.statistics_tile[place + UNIT_POS_PLANE as usize % 4];
        }
        four
    }

    /// The first keys of a lane's queries from 8·`n` on, of the tile that is worked on.
    pub fn first_keys(
        &self,
        mask: &Mask,
        warp: usize,
        #[comptime] n: usize,
        #[comptime] config: Config,
    ) -> Vector<u32, Const<2>> {
        let mut first = Vector::<u32, Const<2>>::cast_from(0u32);
        if comptime!(mask.limits.any()) {
            let place = warp * comptime!(config.tile / 2) + comptime!(n * 4);
            first = self.first_keys_tile[place + UNIT_POS_PLANE as usize % 4];
        }
        first
    }

    /// The least and the largest of the first keys that were read, over the warp.
    pub fn least_and_most(&self, #[comptime] config: Config) -> (usize, usize) {
        let (mut least, mut most) = (self.first_keys[0][0], self.first_keys[0][0]);
        #[unroll]
        for i in 0..comptime!(lanes(config.tile)) {
            least = min(least, min(self.first_keys[i][0], self.first_keys[i][1]));
            most = max(most, max(self.first_keys[i][0], self.first_keys[i][1]));
        }
        // Shuffled, the compiler knows that they are the same for the warp.
        let least = plane_shuffle(plane_min(least), 0u32) as usize;
        (least, plane_shuffle(plane_max(most), 0u32) as usize)
    }
}
