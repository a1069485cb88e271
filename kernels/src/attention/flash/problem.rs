//! The sizes of a problem, and what its kernels are compiled for.

use cubecl::prelude::*;

/// What a kernel is compiled for, beside its hooks and its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Channels of a head in memory, a multiple of 8.
    pub head_dim: usize,
    /// Channels of a head in shared memory, a multiple of 64.
    pub padded_head_dim: usize,
    /// Warps of a block: 16 rows each, but in decoding, where they share the rows.
    pub warps: usize,
    /// Rows of the tiles that a block passes over, a multiple of 16.
    pub tile: usize,
    /// Whether [`Score::score`](super::hooks::Score::score) changes products beyond their scale.
    pub changes_scores: bool,
    /// Whether [`Score::slope`](super::hooks::Score::slope) is not 1 everywhere.
    pub bends_scores: bool,
}

impl Config {
    /// Threads of a block.
    pub fn threads(&self) -> usize {
        32 * self.warps
    }

    /// Rows of a block.
    pub fn rows(&self) -> usize {
        16 * self.warps
    }
}

/// The sizes of a problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Problem {
    /// Query heads.
    pub heads: u32,
    /// Query heads of a kv head.
    pub group: u32,
    /// Rows of q.
    pub queries: u32,
    /// Rows of k and v, at least as many: query i stands at position keys − queries + i.
    pub keys: u32,
    /// Factor on q·k.
    pub scale: f32,
}
