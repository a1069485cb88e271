//! Slabs of φ, made on the fly: for p = 2, φ's channels are the products of two tiles of 8 channels, and the 64
//! products of one pair of tiles are a slab. Products are rounded to bf16.

use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use crate::tile::asm::{emit, name_of};
use crate::tile::warpgroup::uninit_a_frags;
use crate::tile::{AFragments, Bf16Pair, CHUNK, Chunk, PANEL, PANEL_DIM, place};

/// Channels of a slab, and rows of its state.
pub const SLAB: usize = 64;

/// Channels of a tile of φ (§4.1.1).
const TILE: usize = 8;

/// The layout of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateLayout {
    /// Channels of a head: 32, 64 or 128.
    pub head_dim: usize,
}

impl StateLayout {
    /// Tiles of a head.
    pub const fn tiles(&self) -> usize {
        self.head_dim / TILE
    }

    /// The slabs of S, those of φ.
    pub const fn products(&self) -> usize {
        self.tiles() * (self.tiles() + 1) / 2
    }

    /// The slabs of M, after those of S.
    pub const fn moments(&self) -> usize {
        self.head_dim.div_ceil(SLAB)
    }

    /// All slabs.
    pub const fn slabs(&self) -> usize {
        self.products() + self.moments()
    }

    /// The rows of a state.
    pub const fn rows(&self) -> usize {
        self.slabs() * SLAB
    }

    /// Channels of a head in shared memory.
    pub const fn padded(&self) -> usize {
        self.head_dim.next_multiple_of(PANEL_DIM)
    }

    /// Slabs that readers load at a time, a divisor of [`StateLayout::products`]. With two panels, a slab must be a
    /// tile of its own.
    pub const fn per_load(&self) -> usize {
        match self.head_dim {
            32 => 2,
            64 => 4,
            _ => 1,
        }
    }
}

/// The two tiles of slab `slab`, the first not after the second: all pairs with the first tile 0 come first.
#[cube]
pub fn tiles_of(slab: usize, #[comptime] layout: StateLayout) -> (usize, usize) {
    let tiles = comptime!(layout.tiles());
    let mut first = usize::cast_from(0u32);
    let mut left = slab;
    while left >= tiles - first {
        left -= tiles - first;
        first += 1;
    }
    (first, first + left)
}

/// The tiles of the next slab.
#[cube]
pub fn next_tiles(first: usize, second: usize, #[comptime] layout: StateLayout) -> (usize, usize) {
    let (mut first, mut next) = (first, second + 1);
    if next == comptime!(layout.tiles()) {
        first += 1;
        next = first;
    }
    (first, next)
}

/// The place of a tile of φ of a row, in a tile of `rows` rows in shared memory.
#[cube]
pub fn place_of(row: usize, tile: usize, #[comptime] rows: usize) -> usize {
    place(row as u32, (tile % PANEL) as u32) + tile / PANEL * comptime!(rows * PANEL)
}

/// The lane's pair of channels of a tile of φ of a row.
#[cube]
pub fn own_pair(
    vectors: &SharedMemory<Chunk>,
    row: usize,
    tile: usize,
    #[comptime] rows: usize,
) -> Bf16Pair {
    let pairs = vectors.to_slice().with_vector_size::<Const<2>>();
    pairs[place_of(row, tile, rows) * comptime!(CHUNK / 2) + UNIT_POS_PLANE as usize % 4]
}

/// Operand A of a slab, to be set.
#[cube]
pub fn slab_frags() -> AFragments {
    let mut a_frags = uninit_a_frags(4usize);
    #[unroll]
    for step in 0..4usize {
        // cubecl declares what it sees used.
        a_frags.index_mut(step)[0] = Bf16Pair::cast_from(0f32);
    }
    a_frags
}

/// Sets operand A to a slab of a warp's 16 rows, from `row` on: column 8i + j of a row is x_i y_j, where x and y are
/// its two tiles.
#[cube]
pub fn expand_rows(
    a_frags: &mut AFragments,
    vectors: &SharedMemory<Chunk>,
    row: usize,
    tiles: (usize, usize),
    #[comptime] rows: usize,
) {
    #[unroll]
    for r in 0..2usize {
        let own = row + r * 8 + UNIT_POS_PLANE as usize / 4;
        let mut first = Array::<Chunk>::new(1usize);
        first[0] = vectors[place_of(own, tiles.0, rows)];
        let mut second = Array::<Bf16Pair>::new(1usize);
        second[0] = own_pair(vectors, own, tiles.1, rows);
        #[unroll]
        for step in 0..4usize {
            #[unroll]
            for half in 0..2usize {
                let to = comptime!(2 * half + r);
                set_scaled(a_frags.index_mut(step), to, &first, step, half, &second);
            }
        }
    }
}

/// The place of the lane's row of a tile of φ, in a tile of 64 tokens: see [`expand_tokens`].
#[cube]
pub fn place_of_lane(tile: usize) -> usize {
    place_of(UNIT_POS_PLANE as usize, tile, SLAB)
}

/// Sets operand A to a slab of 64 tokens, transposed: row 8i + j of a token's column is x_i y_j. A warp of the
/// warpgroup, `warp` of 4, has i = 2 · `warp` and the next. The tile of tokens starts at chunk `at`, and `places` are
/// those of the slab's tiles for the lane.
#[cube]
pub fn expand_tokens(
    a_frags: &mut AFragments,
    vectors: &SharedMemory<Chunk>,
    at: usize,
    warp: usize,
    places: (usize, usize),
) {
    let mut lanes = Array::<u32>::new(2usize);
    lanes[0] = warp as u32 * 8 + UNIT_POS_PLANE % 4;
    lanes[1] = lanes[0] + 4;
    #[unroll]
    for tokens in 0..2usize {
        let row = at + comptime!(tokens * 32 * PANEL);
        let first = transposed(vectors, row + places.0);
        let second = transposed(vectors, row + places.1);
        #[unroll]
        for eight in 0..4usize {
            #[unroll]
            for r in 0..2usize {
                let (step, to) = comptime!((2 * tokens + eight / 2, eight % 2 * 2 + r));
                set_product(a_frags.index_mut(step), to, &first, &lanes, r, &second, eight);
            }
        }
    }
}

/// The place of the lane's row of a warp's 16 channels of a panel: see [`transpose_tokens`].
#[cube]
pub fn place_of_channels(panel: usize, warp: usize) -> usize {
    let lane = UNIT_POS_PLANE as usize;
    let chunk = panel * PANEL + warp * 2 + lane / 8 % 2;
    place_of(lane / 16 * 8 + lane % 8, chunk, SLAB)
}

/// Sets operand A to 64 channels of 64 tokens, transposed. The tile of tokens starts at chunk `at`, and `place` is that
/// of the warp's channels for the lane.
#[cube]
pub fn transpose_tokens(
    a_frags: &mut AFragments,
    vectors: &SharedMemory<Chunk>,
    at: usize,
    place: usize,
) {
    #[unroll]
    for step in 0..4usize {
        let four = transposed(vectors, at + place + comptime!(step * 16 * PANEL));
        let a_frag = a_frags.index_mut(step);
        #[unroll]
        for i in 0..4usize {
            a_frag[i] = four[i];
        }
    }
}

/// Four matrices of 8 × 8, transposed; a lane gives the place of one row.
#[cube]
fn transposed(vectors: &SharedMemory<Chunk>, place: usize) -> Array<Bf16Pair> {
    let def = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    def.load_matrix::<_, Const<2>>(&vectors.slice(place, place + 1), MatrixIdent::A, 4usize, true)
}

/// products[to] = y[0] times the element 2 · `pair` + `half` of x.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn set_scaled(
    products: &mut Array<Bf16Pair>,
    #[comptime] to: usize,
    x: &Array<Chunk>,
    #[comptime] pair: usize,
    #[comptime] half: usize,
    y: &Array<Bf16Pair>,
) {
    intrinsic!(|scope| {
        let (products, x, y) = (name_of(&products.expand), name_of(&x.expand), name_of(&y.expand));
        let element = if half == 0 { "low" } else { "high" };
        let text = format!(
            "asm(\"{{\\n.reg .b16 low, high;\\n.reg .b32 twice;\\nmov.b32 {{low, high}}, %1;\\n\
             mov.b32 twice, {{{element}, {element}}};\\nmul.rn.bf16x2 %0, twice, %2;\\n}}\\n\" : \
             \"=r\"(reinterpret_cast<uint32*>({products})[{to}]) : \
             \"r\"(reinterpret_cast<uint32*>({x})[{pair}]), \"r\"(reinterpret_cast<uint32*>({y})[0]));"
        );
        emit(scope, "products", &text);
    })
}

/// products[to] = y[i] times x[i] of the lane lanes[r].
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn set_product(
    products: &mut Array<Bf16Pair>,
    #[comptime] to: usize,
    x: &Array<Bf16Pair>,
    lanes: &Array<u32>,
    #[comptime] r: usize,
    y: &Array<Bf16Pair>,
    #[comptime] i: usize,
) {
    intrinsic!(|scope| {
        let (products, x) = (name_of(&products.expand), name_of(&x.expand));
        let (lanes, y) = (name_of(&lanes.expand), name_of(&y.expand));
        let text = format!(
            "asm(\"mul.rn.bf16x2 %0, %1, %2;\" : \"=r\"(reinterpret_cast<uint32*>({products})[{to}]) : \
             \"r\"(__shfl_sync(0xffffffff, reinterpret_cast<uint32*>({x})[{i}], {lanes}[{r}])), \
             \"r\"(reinterpret_cast<uint32*>({y})[{i}]));"
        );
        emit(scope, "products", &text);
    })
}
