//! The shape of a problem, and the compile-time configuration of its kernels.

use cubecl::prelude::*;

use crate::tile::warpgroup::GROUP_ROWS;

/// The keys that causality allows a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Causality {
    /// Those up to its own.
    UpToOwn,
    /// Those before its block of 64 queries, where query i is at key i.
    BeforeBlock,
    /// All, because all queries come after all keys: in the backward pass.
    AllKeys,
}

/// The compile-time configuration of a kernel, beside its hooks and its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelConfig {
    /// Channels of a head of q and k in global memory, a multiple of 8.
    pub head_dim: usize,
    /// Channels of a head of q and k in shared memory, a multiple of 64.
    pub padded_head_dim: usize,
    /// Channels of a head of v in global memory, a multiple of 8.
    pub value_dim: usize,
    /// Channels of a head of v in shared memory, a multiple of 64.
    pub padded_value_dim: usize,
    /// Whether several heads of k share one of v.
    pub shares_values: bool,
    /// Warps per block, with 16 rows each; in decoding they share the rows.
    pub warps: usize,
    /// Rows per tile of the inner loop, a multiple of 16.
    pub tile: usize,
    /// Whether [`Score::score`](super::hooks::Score::score) changes products beyond their scale.
    pub changes_scores: bool,
    /// Whether [`Score::slope`](super::hooks::Score::slope) is not 1 everywhere.
    pub nonlinear_scores: bool,
    /// Whether the forward pass writes the carries of [`Weight::IN_ORDER`](super::hooks::Weight::IN_ORDER).
    pub saves_carries: bool,
    /// The keys that causality allows a query.
    pub causality: Causality,
    /// Whether the forward pass goes on from a softmax over other keys.
    pub goes_on: bool,
}

impl KernelConfig {
    /// Threads per block.
    pub fn threads(&self) -> usize {
        32 * self.warps
    }

    /// Rows per block.
    pub fn rows(&self) -> usize {
        16 * self.warps
    }
}

/// The sizes of a problem, and its scale.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ProblemShape {
    /// Query heads.
    pub heads: u32,
    /// Query heads per kv head.
    pub group: u32,
    /// Heads of v.
    pub value_heads: u32,
    /// Neighbouring heads of k that share one of v, in each view.
    pub k_heads_per_v_head: u32,
    /// Rows of q.
    pub queries: u32,
    /// Rows of k and v: key j is at position j.
    pub keys: u32,
    /// Positions, at least `queries` and `keys`: query i is at position positions − queries + i.
    pub positions: u32,
    /// Factor on q·k.
    pub scale: f32,
}

#[cube]
impl ProblemShape {
    /// The position of query 0.
    pub fn offset(&self) -> usize {
        (self.positions - self.queries) as usize
    }

    /// The last key that causality allows the query at `position`; 0 if there is none.
    pub fn last_key(&self, position: usize, #[comptime] config: KernelConfig) -> usize {
        let mut key = position;
        if comptime!(config.causality == Causality::BeforeBlock) {
            key = position / GROUP_ROWS * GROUP_ROWS;
            if key > 0 {
                key -= 1;
            }
        }
        if comptime!(config.causality == Causality::AllKeys) {
            key = self.keys as usize - 1;
        }
        key
    }

    /// The head of v that the head `kv_head` of k shares: views, one after the other, have the same values.
    pub fn value_head(&self, kv_head: usize, #[comptime] config: KernelConfig) -> usize {
        let mut head = kv_head;
        if comptime!(config.shares_values) {
            head = kv_head / self.k_heads_per_v_head as usize % self.value_heads as usize;
        }
        head
    }
}
