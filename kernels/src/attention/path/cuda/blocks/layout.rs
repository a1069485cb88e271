//! Where a block's matrices lie in shared memory.

use crate::tile::matrix::{Matrix, Product};

/// Tokens per block.
pub const BLOCK: usize = 64;

/// Shared memory of a multiprocessor in bytes, and what each of its blocks takes on top of its own.
const SHARED_BYTES: usize = 228 << 10;
const RESERVED_BYTES: usize = 1 << 10;

/// Bytes of a chunk, and of a block's [`Numbers`](super::memory::Numbers).
const CHUNK_BYTES: usize = 16;
const NUMBER_BYTES: usize = 12 * BLOCK * 4;

/// Whether a multiprocessor's shared memory holds two thread blocks with this many chunks.
pub const fn two_fit(chunks: usize) -> bool {
    2 * (chunks * CHUNK_BYTES + NUMBER_BYTES + RESERVED_BYTES) <= SHARED_BYTES
}

/// A matrix of the block's tokens in bf16, or the sum of two: each number rounded, and the rest rounded, which leaves
/// about 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The numbers, rounded.
    pub high: Matrix,
    /// The rest.
    pub low: Option<Matrix>,
}

impl Operand {
    /// A matrix in bf16.
    pub const fn exact(at: usize, columns: usize) -> Self {
        Operand { high: Matrix::new(at, columns), low: None }
    }

    /// The sum of two.
    pub const fn split(at: usize, columns: usize) -> Self {
        let high = Matrix::new(at, columns);
        Operand { high, low: Some(Matrix::new(high.end(BLOCK), columns)) }
    }

    /// The numbers without the rest.
    pub const fn rounded(self) -> Self {
        Operand { low: None, ..self }
    }

    const fn end(self) -> usize {
        match self.low {
            Some(low) => low.end(BLOCK),
            None => self.high.end(BLOCK),
        }
    }

    /// A·B.
    pub const fn ab(a: Self, b: Self, mnk: [usize; 3]) -> Product {
        Product::ab(a.high, b.high, mnk).and_low(a.low, b.low)
    }

    /// A·Bᵀ.
    pub const fn abt(a: Self, b: Self, mnk: [usize; 3]) -> Product {
        Product::abt(a.high, b.high, mnk).and_low(a.low, b.low)
    }

    /// Aᵀ·B.
    pub const fn atb(a: Self, b: Self, mnk: [usize; 3]) -> Product {
        Product::atb(a.high, b.high, mnk).and_low(a.low, b.low)
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
    const fn vectors(&self, at: usize) -> Operand {
        Operand::split(at, self.head_dim)
    }

    const fn square(at: usize) -> Operand {
        Operand::split(at, BLOCK)
    }

    /// The directions w.
    pub const fn w(&self) -> Operand {
        self.vectors(0)
    }

    /// Keys.
    pub const fn k(&self) -> Operand {
        Operand::exact(self.w().end(), self.head_dim)
    }

    /// The factor Y of the block's transform I − Yᵀ W.
    pub const fn y(&self) -> Operand {
        self.vectors(self.k().end())
    }

    /// The matrix m.
    pub const fn m(&self) -> Operand {
        Self::square(self.y().end())
    }

    /// The inverse G; later −c, and further squares.
    pub const fn c(&self) -> Operand {
        Self::square(self.m().end())
    }

    /// Queries.
    pub const fn q(&self) -> Operand {
        Operand::exact(self.c().end(), self.head_dim)
    }

    /// Values, in the forward pass.
    pub const fn v(&self) -> Operand {
        Operand::exact(self.q().end(), self.head_dim)
    }

    /// Chunks of the forward pass.
    pub const fn forward_chunks(&self) -> usize {
        self.v().end()
    }

    /// Gradients of vectors, in the backward pass.
    pub const fn x(&self) -> Operand {
        self.vectors(self.q().end())
    }

    /// dO, in place of [`BlockConfig::x`].
    pub const fn d_o(&self) -> Operand {
        self.x().rounded()
    }

    /// Values in the backward pass, behind dO.
    pub const fn values_back(&self) -> Operand {
        Operand::exact(self.d_o().end(), self.head_dim)
    }

    /// dS; later the gradient of m.
    pub const fn ds(&self) -> Operand {
        Self::square(self.x().end())
    }

    /// Weights; then dc, later the gradient of W Wᵀ.
    pub const fn dc(&self) -> Operand {
        Self::square(self.ds().end())
    }

    /// Chunks of the backward pass.
    pub const fn backward_chunks(&self) -> usize {
        self.dc().end()
    }

    /// The sizes of a product with a square as its result, over the channels.
    pub const fn over_channels(&self) -> [usize; 3] {
        [BLOCK, BLOCK, self.head_dim]
    }

    /// The sizes of a product with vectors as its result, over the tokens.
    pub const fn over_tokens(&self) -> [usize; 3] {
        [BLOCK, self.head_dim, BLOCK]
    }
}

/// The sizes of a product of squares.
pub const SQUARES: [usize; 3] = [BLOCK; 3];
