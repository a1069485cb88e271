//! Attention whose weights depend on the keys after them ([`Weight::IN_ORDER`]): a row carries one factor from key
//! tile to key tile, from the last to the first.
//!
//! The forward pass ends a block of queries once all its rows carry 0: all further weights are exactly 0. For the
//! backward pass it saves each row's carry at every key tile that it visits, and the first key that it reaches,
//! which the backward pass takes as pruning. `dq` goes through the key tiles from the first to the last and sums
//! weight · dWeight on its way, as the gradient of a score depends on the weights of all keys before it. It writes
//! these sums for every tile, so that `dkv` can compute the tiles of any key block on their own.

use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;

use super::backward::BackwardInputsLaunch;
use super::backward::dkv::{DkvOutputs, KeyGradientsLaunch};
use super::backward::dkv_in_order;
use super::hooks::{
    Biases, BiasesOf, GradientOf, Hooks, LaunchOf, PlainOperands, SavedRows, StatisticsOf, Weight,
    WeightOf,
};
use super::mask::Pruned;
use super::problem::{KernelConfig, ProblemShape};
use super::{DQ_SHAPES, FlashAttention, Gradients, Heads, grid};
use crate::cuda::{CudaTensor, buffer, empty};
use crate::tile::warpgroup::{GROUP_ROWS, GROUP_WARPS};

/// Rows per block and per tile in all passes. Carries are saved for each tile.
pub const TILE: usize = GROUP_ROWS;

/// What the forward pass writes for the backward pass.
#[derive(CubeType, CubeLaunch)]
pub struct SavedCarries {
    /// The carries at the ends of key tiles, `[batch, heads, key tiles, queries]`; only those of tiles that were
    /// visited.
    pub carries: Array<f32>,
    /// The first key of the last tile visited, `[batch, heads, queries]`.
    pub first: Array<i32>,
    /// The minimum and maximum of `first` of each block, `[batch, heads, blocks, 2]`.
    pub bounds: Array<i32>,
}

/// What the backward pass reads, and `dq` writes for `dkv`, `[batch, heads, key tiles, queries]`.
#[derive(CubeType, CubeLaunch)]
pub struct Carries {
    /// The carries at the ends of key tiles.
    pub carries: Array<f32>,
    /// Σ weight · dWeight over all keys before each tile.
    pub sums: Array<f32>,
}

/// The index of a query's carry at a key tile.
#[cube]
fn place(problem: &ProblemShape, batch_head: usize, query: usize, key_tile: usize) -> usize {
    let tiles = (problem.keys as usize + TILE - 1) / TILE;
    (batch_head * tiles + key_tile) * problem.queries as usize + query
}

/// A lane's row `r`, in a warp whose queries begin at `own`.
#[cube]
fn query_of_lane(own: usize, #[comptime] r: usize) -> usize {
    own + r * 8 + UNIT_POS_PLANE as usize / 4
}

#[cube]
impl Carries {
    /// Reads the carries of a lane's two rows; rows past the last query repeat it.
    pub fn read(
        &self,
        carries: &mut Array<f32>,
        problem: &ProblemShape,
        batch_head: usize,
        own: usize,
        key_tile: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let query = min(query_of_lane(own, r), problem.queries as usize - 1);
            carries[r] = self.carries[place(problem, batch_head, query, key_tile)];
        }
    }

    /// As [`Carries::read`], of the sums.
    pub fn read_sums(
        &self,
        sums: &mut Array<f32>,
        problem: &ProblemShape,
        batch_head: usize,
        own: usize,
        key_tile: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let query = min(query_of_lane(own, r), problem.queries as usize - 1);
            sums[r] = self.sums[place(problem, batch_head, query, key_tile)];
        }
    }

    /// Writes the sums of a lane's two rows.
    pub fn write_sums(
        &mut self,
        sums: &Array<f32>,
        problem: &ProblemShape,
        batch_head: usize,
        own: usize,
        key_tile: usize,
    ) {
        #[unroll]
        for r in 0..2usize {
            let query = query_of_lane(own, r);
            if (UNIT_POS_PLANE % 4 == 0) & (query < problem.queries as usize) {
                self.sums[place(problem, batch_head, query, key_tile)] = sums[r];
            }
        }
    }
}

/// Writes the carries of a lane's two rows.
#[cube]
pub fn save_carries<A: Hooks>(
    saved: &mut SavedCarries,
    rows: &<A::Weight as Weight>::RowState,
    problem: &ProblemShape,
    batch_head: usize,
    own: usize,
    key_tile: usize,
) {
    #[unroll]
    for r in 0..2usize {
        let query = query_of_lane(own, r);
        let carry = WeightOf::<A>::carry(rows, r);
        if (UNIT_POS_PLANE % 4 == 0) & (query < problem.queries as usize) {
            saved.carries[place(problem, batch_head, query, key_tile)] = carry;
        }
    }
}

/// Whether a lane's rows carry nothing on, or are past the last query.
#[cube]
pub fn nothing_carried<A: Hooks>(
    rows: &<A::Weight as Weight>::RowState,
    own: usize,
    queries: usize,
) -> bool {
    let mut nothing = true;
    #[unroll]
    for r in 0..2usize {
        let carry = WeightOf::<A>::carry(rows, r);
        nothing &= (carry == 0f32) | (query_of_lane(own, r) >= queries);
    }
    nothing
}

/// The tensors that the backward pass needs beside q, k and v.
#[derive(Clone, Debug)]
pub struct SavedOrder {
    /// As in [`SavedCarries`].
    pub carries: CudaTensor,
    /// The first keys that the forward pass reached.
    pub reached: Pruned,
}

impl<A: Hooks<Operands = PlainOperands>> FlashAttention<A> {
    /// The forward pass of weights in order, and what its backward pass needs.
    pub fn forward_in_order(
        &self,
        statistics: LaunchOf<StatisticsOf<A>>,
    ) -> (CudaTensor, SavedOrder) {
        let [batch, heads, queries, _] = self.q().dims;
        let tiles = self.k().dims[2].div_ceil(TILE);
        let carries = empty(&self.q().tensor, &[batch, heads, tiles, queries], DType::F32);
        let reached = Pruned::uninit(&self.q().tensor, [batch, heads, queries]);
        let saved = SavedCarriesLaunch::new(
            buffer(&carries, 1),
            buffer(&reached.first, 1),
            buffer(&reached.bounds, 1),
        );
        let o = self.forward_saving(statistics, None, Some(saved));
        reached.set_least();
        (o, SavedOrder { carries, reached })
    }

    /// The gradients for dO = `grad`.
    ///
    /// # Panics
    /// With biases or sums of dS, which weights in order do not have.
    pub fn backward_in_order(
        self,
        SavedOrder { carries, reached }: SavedOrder,
        grad: &CudaTensor,
        saved: LaunchOf<SavedRows<A>>,
    ) -> Gradients {
        assert!(!BiasesOf::<A>::ENABLED, "biases beside weights in order");
        let flash = self.pruned(Some(reached));
        let grad = Heads::new(grad);
        let sums = empty(&carries, &carries.meta.shape().to_vec(), DType::F32);
        let both = || CarriesLaunch::new(buffer(&carries, 1), buffer(&sums, 1));
        let dq = flash.dq(&grad, saved, None, Some(both()));
        let [dk, dv] = flash.dkv_in_order(&grad, both);
        let dv = flash.of_shared_values(dv);
        Gradients { dq, dk, dv, ds_rows: None, ds_columns: None }
    }

    fn dkv_in_order(
        &self,
        grad: &Heads,
        carries: impl Fn() -> CarriesLaunch<CudaRuntime>,
    ) -> [CudaTensor; 2] {
        let (dk, dv) = (self.gradient(self.k()), self.value_gradient());
        let [batch, kv_heads, keys, _] = self.k().dims;
        let config = KernelConfig { warps: GROUP_WARPS, tile: TILE, ..self.config(DQ_SHAPES) };
        let wide = config.padded_head_dim.max(config.padded_value_dim) > 128;
        let outputs =
            if wide { &[DkvOutputs::Dk, DkvOutputs::Dv][..] } else { &[DkvOutputs::Both] };
        for &outputs in outputs {
            // SAFETY: as in `forward`.
            unsafe {
                dkv_in_order::dkv_in_order::launch_unchecked::<A, CudaRuntime>(
                    &dk.tensor.client,
                    grid(keys, TILE, batch * kv_heads),
                    CubeDim::new_1d(config.threads() as u32),
                    BackwardInputsLaunch::new(
                        self.q().tensor_map(TILE),
                        self.k().tensor_map(TILE),
                        self.v.tensor_map(TILE),
                        grad.tensor_map(TILE),
                    ),
                    self.mask(),
                    self.hooks.score(),
                    carries(),
                    KeyGradientsLaunch::<GradientOf<A>, CudaRuntime>::new(
                        dk.quads(),
                        dv.quads(),
                        None.into(),
                    ),
                    self.problem(),
                    config,
                    outputs,
                );
            }
        }
        [dk.tensor, dv.tensor]
    }
}
