//! Where a block's matrices lie in shared memory, and in the scratch memory of the backward pass.

use super::product::Place;

/// Tokens per block.
pub const BLOCK: usize = 64;

/// Tokens per tile.
pub const TILE: usize = 16;

/// Tiles per block.
pub const TILES: usize = BLOCK / TILE;

/// Rows of y: those of the tiles, and of the second tile moved to the start of the first.
const Y_ROWS: usize = BLOCK + TILE;

/// The row that y of the second tile, moved to the start of the first, begins at.
pub const Y_MOVED: usize = BLOCK;

/// Elements of a row of a `BLOCK`×`BLOCK` matrix, padded to an odd number of quads.
const SQUARE_ROW: usize = BLOCK + 4;

/// Elements of a row of a `TILE`×`TILE` matrix, padded likewise.
const TILE_ROW: usize = TILE + 4;

/// Rows of the keys of levels: the first two tiles moved to the end of the second.
pub const KEYS_32: usize = 0;

/// The rows after them: the first and the third tile, moved to their own ends.
pub const KEYS_16: usize = 2 * TILE;

/// Shared memory of a multiprocessor in bytes, and what each of its blocks takes on top of its own.
const SHARED_BYTES: usize = 228 << 10;
const RESERVED_BYTES: usize = 1 << 10;

/// Thread blocks with this many elements that a multiprocessor's shared memory holds.
pub const fn blocks_per_multiprocessor(elements: usize) -> usize {
    SHARED_BYTES / (elements * size_of::<f32>() + RESERVED_BYTES)
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
    /// Elements of a row of vectors.
    const fn row(&self) -> usize {
        self.head_dim + 4
    }

    /// Vectors, of which a batch is one for each tile.
    const fn vectors(&self, first_row: usize) -> Place {
        let row = self.row();
        Place { at: first_row * row, row, next: TILE * row }
    }

    /// The directions w.
    pub const fn w(&self) -> Place {
        self.vectors(0)
    }

    /// Keys.
    pub const fn k(&self) -> Place {
        self.vectors(BLOCK)
    }

    /// The factors y of the tiles' transforms I − Σ yᵀw, then those from [`Y_MOVED`] on.
    pub const fn y(&self) -> Place {
        self.vectors(2 * BLOCK)
    }

    /// Queries, and further vectors.
    pub const fn x(&self) -> Place {
        self.vectors(2 * BLOCK + Y_ROWS)
    }

    /// The keys of levels in the forward pass, gradients in the backward pass.
    pub const fn fifth(&self) -> Place {
        self.vectors(3 * BLOCK + Y_ROWS)
    }

    const fn small(&self) -> usize {
        (4 * BLOCK + Y_ROWS) * self.row()
    }

    const fn tiles(at: usize) -> Place {
        Place { at, row: TILE_ROW, next: TILE * TILE_ROW }
    }

    const fn square(at: usize) -> Place {
        Place { at, row: SQUARE_ROW, next: TILE * SQUARE_ROW + TILE }
    }

    /// The matrices m of the tiles.
    pub const fn m(&self) -> Place {
        Self::tiles(self.small())
    }

    /// β.
    pub const fn beta(&self) -> usize {
        self.m().at + BLOCK * TILE_ROW
    }

    /// Σ ℓ within the block, of one head.
    pub const fn decay_sums(&self) -> usize {
        self.beta() + BLOCK
    }

    /// Scores; as a batch, the tiles on the diagonal.
    pub const fn s(&self) -> Place {
        Self::square(self.decay_sums() + BLOCK)
    }

    /// Elements of the forward pass.
    pub const fn forward_elements(&self) -> usize {
        self.s().at + BLOCK * SQUARE_ROW
    }

    /// −c of all levels below and on the diagonal, dcᵀ of the levels between tiles above it.
    pub const fn c(&self) -> Place {
        Self::square(self.forward_elements())
    }

    /// dc of the tiles.
    pub const fn dc(&self) -> Place {
        Self::tiles(self.c().at + BLOCK * SQUARE_ROW)
    }

    /// The gradient of m.
    pub const fn dm(&self) -> Place {
        Self::tiles(self.dc().at + BLOCK * TILE_ROW)
    }

    /// The queries' log-sum-exps.
    pub const fn lse(&self) -> usize {
        self.dm().at + BLOCK * TILE_ROW
    }

    /// The queries' δ.
    pub const fn delta(&self) -> usize {
        self.lse() + BLOCK
    }

    /// Elements of the backward pass.
    pub const fn backward_elements(&self) -> usize {
        self.delta() + BLOCK
    }

    /// Tiles in place of the scores: the first, second or third of them.
    pub const fn spare_tiles(&self, number: usize) -> Place {
        Self::tiles(self.s().at + number * BLOCK * TILE_ROW)
    }

    /// In how many parts dR is read.
    pub const fn transform_parts(&self) -> usize {
        self.head_dim.div_ceil(BLOCK)
    }

    /// The rows of a part of dR: a multiple of 16, as products require.
    pub const fn transform_rows(&self, part: usize) -> usize {
        let left = self.head_dim - part * BLOCK;
        if left < BLOCK { left } else { BLOCK }
    }

    /// A part of dR in place of the scores and −c.
    pub const fn transform_part(&self) -> Place {
        let row = self.row();
        Place { at: self.s().at, row, next: 0 }
    }

    /// Rows of scratch memory as a place: `add_to_global` has them start at row 0.
    pub const fn scratch(&self, first_row: usize) -> Place {
        let d = self.head_dim;
        Place { at: first_row * d, row: d, next: TILE * d }
    }
}

/// The first rows of what a thread block of the backward pass keeps in scratch memory, in rows of vectors.
pub mod scratch {
    use super::{BLOCK, TILE, Y_ROWS};

    /// The keys of levels.
    pub const KEYS: usize = 0;
    /// The queries of the second and fourth tile before they move by a tile.
    pub const QUERIES_16: usize = KEYS + BLOCK;
    /// The queries of the second half before they move by it.
    pub const QUERIES_32: usize = QUERIES_16 + 2 * TILE;
    /// y of the fourth tile, moved to the start of the third.
    pub const Y_LAST: usize = QUERIES_32 + 2 * TILE;
    /// The gradient of y, with the rows of y; the first of the sums that start from zero.
    pub const D_Y: usize = Y_LAST + TILE;
    /// The gradient of the keys.
    pub const D_K: usize = D_Y + Y_ROWS;
    /// The gradient of the keys of levels.
    pub const D_KEYS: usize = D_K + BLOCK;
    /// The gradient of w.
    pub const D_W: usize = D_KEYS + BLOCK;
    /// The gradient of v.
    pub const D_V: usize = D_W + BLOCK;
    /// All rows.
    pub const ROWS: usize = D_V + BLOCK;
}
