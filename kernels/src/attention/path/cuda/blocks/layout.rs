//! Where a block's matrices lie in shared memory.

use crate::tile::{CHUNK, PANEL_DIM};

/// Tokens per block.
pub const BLOCK: usize = 64;

/// Shared memory of a multiprocessor in bytes, and what each of its blocks takes on top of its own.
const SHARED_BYTES: usize = 228 << 10;
const RESERVED_BYTES: usize = 1 << 10;

/// Chunks of a square.
const SQUARE: usize = BLOCK * BLOCK / CHUNK;

/// Bytes of a chunk, and of a block's [`Numbers`](super::memory::Numbers).
const CHUNK_BYTES: usize = 16;
const NUMBER_BYTES: usize = 12 * BLOCK * 4;

/// Whether a multiprocessor's shared memory holds two thread blocks with this many chunks.
pub const fn two_fit(chunks: usize) -> bool {
    2 * (chunks * CHUNK_BYTES + NUMBER_BYTES + RESERVED_BYTES) <= SHARED_BYTES
}

/// A matrix in bf16 in shared memory, in panels of 64 columns with the swizzle of `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Panels {
    /// The first chunk.
    pub at: usize,
    /// Rows.
    pub rows: usize,
}

/// A matrix of the block's tokens in bf16, or the sum of two: each number rounded, and the rest rounded, which leaves
/// about 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The numbers, rounded.
    pub high: Panels,
    /// The rest.
    pub low: Option<Panels>,
}

impl Operand {
    /// A matrix in bf16.
    pub const fn exact(at: usize) -> Self {
        Operand { high: Panels { at, rows: BLOCK }, low: None }
    }

    /// The sum of two, `chunks` chunks each.
    pub const fn split(at: usize, chunks: usize) -> Self {
        let low = Some(Panels { at: at + chunks, rows: BLOCK });
        Operand { low, ..Self::exact(at) }
    }

    /// The numbers without the rest.
    pub const fn rounded(self) -> Self {
        Operand { low: None, ..self }
    }

    /// The same place for a matrix of `rows` rows in bf16.
    pub const fn with_rows(self, rows: usize) -> Self {
        Operand { high: Panels { rows, ..self.high }, low: None }
    }
}

/// The compile-time configuration of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockConfig {
    /// Channels of a head, a multiple of 16.
    pub head_dim: usize,
    /// Whether there are document starts.
    pub documents: bool,
    /// Whether there is a window.
    pub window: bool,
    /// Whether there is a decay.
    pub decay: bool,
}

impl BlockConfig {
    /// Channels in products: more than 64 become 128.
    pub const fn columns(&self) -> usize {
        if self.head_dim <= PANEL_DIM { self.head_dim } else { 2 * PANEL_DIM }
    }

    /// Rows of a transform in products.
    pub const fn rows_of_transform(&self) -> usize {
        self.head_dim.div_ceil(PANEL_DIM) * PANEL_DIM
    }

    /// Chunks of vectors.
    const fn width(&self) -> usize {
        BLOCK * self.rows_of_transform() / CHUNK
    }

    /// The directions w.
    pub const fn w(&self) -> Operand {
        Operand::split(0, self.width())
    }

    /// Keys.
    pub const fn k(&self) -> Operand {
        Operand::exact(2 * self.width())
    }

    /// The factor Y of the block's transform I − Yᵀ W.
    pub const fn y(&self) -> Operand {
        Operand::split(3 * self.width(), self.width())
    }

    /// The matrix m.
    pub const fn m(&self) -> Operand {
        Operand::split(5 * self.width(), SQUARE)
    }

    /// The inverse G; later −c, then weights in the forward pass.
    pub const fn c(&self) -> Operand {
        Operand::split(5 * self.width() + 2 * SQUARE, SQUARE)
    }

    /// The first chunk behind c.
    const fn behind_c(&self) -> usize {
        5 * self.width() + 4 * SQUARE
    }

    /// Queries.
    pub const fn q(&self) -> Operand {
        Operand::exact(self.behind_c())
    }

    /// Values, in the forward pass.
    pub const fn v(&self) -> Operand {
        Operand::exact(self.behind_c() + self.width())
    }

    /// Chunks of the forward pass.
    pub const fn forward_chunks(&self) -> usize {
        self.behind_c() + 2 * self.width()
    }

    /// Gradients of vectors, in the backward pass.
    pub const fn x(&self) -> Operand {
        Operand::split(self.behind_c() + self.width(), self.width())
    }

    /// dO, in place of [`BlockConfig::x`].
    pub const fn d_o(&self) -> Operand {
        self.x().rounded()
    }

    /// Values in the backward pass, behind dO.
    pub const fn values_back(&self) -> Operand {
        Operand::exact(self.behind_c() + 2 * self.width())
    }

    /// A part of the gradient of R, in place of [`BlockConfig::x`].
    pub const fn d_r(&self) -> Operand {
        self.x().with_rows(self.rows_of_transform())
    }

    /// dS; later the gradient of m, then E.
    pub const fn ds(&self) -> Operand {
        Operand::split(self.behind_c() + 3 * self.width(), SQUARE)
    }

    /// Weights; then dc, later −D F, the gradient of A.
    pub const fn dc(&self) -> Operand {
        Operand::split(self.behind_c() + 3 * self.width() + 2 * SQUARE, SQUARE)
    }

    /// The first chunk behind dc.
    const fn behind_dc(&self) -> usize {
        self.behind_c() + 3 * self.width() + 4 * SQUARE
    }

    /// Whether the backward pass has room to read upstream gradients and G ahead, each in a place of its own.
    pub const fn reads_ahead(&self) -> bool {
        self.head_dim <= PANEL_DIM
    }

    /// The gradients of moved queries.
    pub const fn x_of_queries(&self) -> Operand {
        if self.reads_ahead() { Operand::split(self.behind_dc(), self.width()) } else { self.x() }
    }

    /// The gradients of moved keys.
    pub const fn x_of_keys(&self) -> Operand {
        if self.reads_ahead() {
            Operand::split(self.behind_dc() + 2 * self.width(), self.width())
        } else {
            self.x()
        }
    }

    /// The gradient of R, if there is room to read ahead.
    pub const fn whole_d_r(&self) -> Operand {
        Operand::split(self.behind_dc() + 4 * self.width(), self.width())
    }

    /// G, read again; later D E.
    pub const fn g_again(&self) -> Operand {
        if self.reads_ahead() {
            Operand::split(self.behind_dc() + 6 * self.width(), SQUARE)
        } else {
            self.c()
        }
    }

    /// Chunks of the backward pass.
    pub const fn backward_chunks(&self) -> usize {
        let ahead = if self.reads_ahead() { 6 * self.width() + 2 * SQUARE } else { 0 };
        self.behind_dc() + ahead
    }
}
