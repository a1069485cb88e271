//! Building blocks of attention kernels for tensor cores: tiles of rows in shared memory and products of
//! fragments.
//!
//! A warp computes in fragments of `mma.sync` m16n8k16: bf16 operands, f32 accumulators. Its accumulator
//! of 16 rows by 8·n columns is a sequence of n fragments; in each, a lane holds two adjacent columns,
//! `2·(lane % 4)`, of the rows `lane / 4` and `lane / 4 + 8`.
//!
//! Tiles are loaded by the tensor memory accelerator (TMA). A tile consists of panels of 64 channels, a
//! panel of rows of eight 16-byte chunks, with chunk c of row r at c ⊕ (r mod 8) (TMA's 128-byte
//! swizzle), so that `ldmatrix` has no bank conflicts. Rows and channels past the tensor's last are zero.
//!
//! Passes over many rows multiply by [`warpgroup`]; decoding, where a warp has 16 rows, by `mma.sync`. Its
//! tiles may be reloaded after [`release_tile`], once the products with the fragments read from them have
//! been issued. `sync_cube` alone does not wait for `ldmatrix` in flight, and TMA can overtake it. A tile
//! whose fragments are kept for later products is never reloaded.

pub mod asm;
pub mod copies;
pub mod e4m3;
pub mod inverse;
pub mod lists;
pub mod matrix;
pub mod product;
pub mod roles;
pub mod rows;
pub mod turns;
pub mod votes;
pub mod warpgroup;

use burn::tensor::bf16;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use self::asm::{emit, name_of};

/// bf16 elements per 16-byte chunk.
pub const CHUNK: usize = 8;

/// A chunk of bf16 channels, in shared memory or in a tensor.
pub type Chunk = Vector<bf16, Const<CHUNK>>;

/// Two neighbouring columns of an operand's fragment.
pub type Bf16Pair = Vector<bf16, Const<2>>;

/// Four numbers.
pub type Quad = Vector<f32, Const<4>>;

/// Four numbers in bf16.
pub type Bf16Quad = Vector<bf16, Const<4>>;

/// Two neighbouring columns of an accumulator.
pub type Pair = Vector<f32, Const<2>>;

/// Fragments of operand A in registers: 16 rows per warp, 16 channels per fragment.
pub type AFragments = Sequence<Array<Bf16Pair>>;

/// An accumulator in registers: 16 rows per warp, 8 columns per fragment.
pub type Accumulator = Sequence<Array<Pair>>;

/// The score of a masked key: its softmax weight is exactly 0 in f32 beside any visible key. Finite,
/// so that a row without a visible key so far gives no NaN.
pub const MASKED: f32 = -1e30;

/// log₂ e.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// 2ˣ; requires [`define_exp2`] at the start of the kernel.
#[cube]
pub fn exp2(x: f32) -> f32 {
    Powf::powf(2f32, x)
}

/// At the start of a kernel, makes [`exp2`] one instruction; results below 2⁻¹²⁶ are 0.
///
/// Fast math turns it into `__powf(2, x)`, which takes four instructions unless denormals are flushed, and
/// the runtime has no setting for that. cubecl emits comments verbatim, so this comment contains a
/// `#define` of `__powf`. Without it, kernels are slower but equally correct.
#[cube]
pub fn define_exp2() {
    comment!(
        "of base 2:\n*/\n#define __powf(base, x) ([](float y) { float z; \
         asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(z) : \"f\"(y)); return z; }(x))\n/*"
    );
}

/// A pair as the sum of two in bf16: rounded, and the rest rounded.
#[cube]
pub fn split_pair(pair: Pair) -> (Bf16Pair, Bf16Pair) {
    let nearest = Bf16Pair::cast_from(pair);
    (nearest, Bf16Pair::cast_from(pair - Pair::cast_from(nearest)))
}

/// log₂ x in one instruction; −∞ below 2⁻¹²⁶.
#[cube]
pub fn log2(x: f32) -> f32 {
    let mut value = Array::<f32>::new(1usize);
    value[0] = x;
    replace_by_log2(&mut value);
    value[0]
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn replace_by_log2(value: &mut Array<f32>) {
    intrinsic!(|scope| {
        let value = name_of(&value.expand);
        let text = format!("asm(\"lg2.approx.ftz.f32 %0, %0;\" : \"+f\"({value}[0]));");
        emit(scope, "logarithm", &text);
    })
}

/// 1/x in one instruction, to one unit in the last place; 0 from 2¹²⁶ on.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    let mut value = Array::<f32>::new(1usize);
    value[0] = x;
    replace_by_reciprocal(&mut value);
    value[0]
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn replace_by_reciprocal(value: &mut Array<f32>) {
    intrinsic!(|scope| {
        let value = name_of(&value.expand);
        let text = format!("asm(\"rcp.approx.ftz.f32 %0, %0;\" : \"+f\"({value}[0]));");
        emit(scope, "reciprocal", &text);
    })
}

/// a · b + c, limited to [0, 1], in one instruction; 0 for a NaN.
#[cube]
pub fn saturated_fma(a: f32, b: f32, c: f32) -> f32 {
    let mut values = Array::<f32>::new(3usize);
    values[0] = a;
    values[1] = b;
    values[2] = c;
    replace_by_saturated_fma(&mut values);
    values[0]
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn replace_by_saturated_fma(values: &mut Array<f32>) {
    intrinsic!(|scope| {
        let values = name_of(&values.expand);
        let text = format!(
            "asm(\"fma.rn.ftz.sat.f32 %0, %0, %1, %2;\" : \"+f\"({values}[0]) : \"f\"({values}[1]), \"f\"({values}[2]));"
        );
        emit(scope, "saturated", &text);
    })
}

/// The strides of the rows of `[batch, heads, rows, channels]`, in chunks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct RowStrides {
    /// Between sequences.
    pub batch: u32,
    /// Between heads.
    pub head: u32,
    /// Between rows.
    pub row: u32,
}

#[cube]
impl RowStrides {
    /// The index of the first chunk of a head.
    pub fn base(&self, batch: usize, head: usize) -> usize {
        batch * self.batch as usize + head * self.head as usize
    }
}

/// Chunks per row of a panel.
pub const PANEL: usize = 8;

/// Channels per panel.
pub const PANEL_DIM: usize = PANEL * CHUNK;

/// The alignment of tiles in bytes that the swizzle requires.
pub const ALIGN: usize = 1024;

/// The place of a chunk of a row of a panel. Rows that are 8 apart differ by a constant, which an
/// address of 64 bits takes for nothing: kernels are compiled with such addresses.
#[cube]
pub fn place(row: u32, chunk: u32) -> usize {
    (row * comptime!(PANEL as u32) + (chunk ^ (row & 7))) as usize
}

/// Where a chunk of a tile of `rows` rows lies.
#[cube]
pub fn place_in(row: usize, chunk: usize, #[comptime] rows: usize) -> usize {
    chunk / PANEL * comptime!(rows * PANEL) + place(row as u32, (chunk % PANEL) as u32)
}

/// Starts the load of `rows` rows of a head, from `first` on, into the tile that starts at chunk
/// `to`. One unit calls it, after `arrive_and_expect_tx` with the [`bytes`].
#[cube]
pub fn load_rows(
    ready: &Barrier,
    source: &TensorMap<bf16, Tiled>,
    batch: usize,
    head: usize,
    first: usize,
    tile: &mut SharedMemory<Chunk>,
    to: usize,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
) {
    #[unroll]
    for panel in 0..comptime!(dim / PANEL_DIM) {
        let from = to + panel * rows * PANEL;
        let mut slice = tile.slice_mut(from, from + rows * PANEL);
        let channel = comptime!((panel * PANEL_DIM) as i32);
        ready.tma_load_4d(source, &mut slice, batch as i32, head as i32, first as i32, channel);
    }
}

/// Waits until the barrier has completed the phase of this parity.
///
/// In place of [`Barrier::wait_parity`], which reads the GPU's timer before it looks at the barrier.
#[cube]
pub fn wait_parity(ready: &Barrier, parity: u32) {
    let mut parities = Array::<u32>::new(1usize);
    parities[0] = parity;
    wait_parity_of(ready, &parities);
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn wait_parity_of(ready: &Barrier, parities: &Array<u32>) {
    intrinsic!(|scope| {
        let (barrier, parity) = (name_of(&ready.expand), name_of(&parities.expand));
        let text = format!(
            "asm volatile(\"{{\\n.reg .pred done;\\nagain:\\n\
             mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n@!done bra again;\\n}}\\n\" : : \
             \"r\"((uint32)__cvta_generic_to_shared(&{barrier})), \"r\"({parity}[0]) : \"memory\");"
        );
        emit(scope, "parity", &text);
    })
}

/// The sum over the four lanes that share a row of an accumulator.
#[cube]
pub fn sum_of_four(x: f32) -> f32 {
    let sum = x + plane_shuffle_xor(x, 1);
    sum + plane_shuffle_xor(sum, 2)
}

/// The product over the lanes after this one of the four that share a row of an accumulator, and over all four.
#[cube]
pub fn products_of_four(x: f32) -> (f32, f32) {
    let lane = UNIT_POS_PLANE % 4;
    let neighbour = plane_shuffle_xor(x, 1);
    let pair = x * neighbour;
    let other = plane_shuffle_xor(pair, 2);
    let after = select(lane % 2 == 1, 1f32, neighbour) * select(lane < 2, other, 1f32);
    (after, pair * other)
}

/// The sum over the lanes before this one of the four that share a row of an accumulator, and over all four.
#[cube]
pub fn sums_of_four(x: f32) -> (f32, f32) {
    let lane = UNIT_POS_PLANE % 4;
    let neighbour = plane_shuffle_xor(x, 1);
    let pair = x + neighbour;
    let other = plane_shuffle_xor(pair, 2);
    let before = select(lane % 2 == 1, neighbour, 0f32) + select(lane >= 2, other, 0f32);
    (before, pair + other)
}

/// Whether `x` holds for all units of the block, all of which wait for one another.
#[cube]
pub fn all_of_block(x: bool) -> bool {
    let mut value = Array::<u32>::new(1usize);
    value[0] = u32::cast_from(x);
    replace_by_all_of_block(&mut value);
    value[0] != 0
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn replace_by_all_of_block(value: &mut Array<u32>) {
    intrinsic!(|scope| {
        let value = name_of(&value.expand);
        emit(scope, "all", &format!("{value}[0] = __syncthreads_and({value}[0]);"));
    })
}

/// Waits until all units of the block have finished reading its tiles, so that they can be reloaded.
#[cube]
pub fn release_tile() {
    sync_async_proxy_shared();
    sync_cube();
}

/// Bytes of a bf16 tile.
pub const fn bytes(rows: usize, dim: usize) -> u32 {
    (rows * dim * 2) as u32
}

/// An accumulator of `count` fragments, all zero.
#[cube]
pub fn zeros(#[comptime] count: usize) -> Accumulator {
    let mut acc = Accumulator::new();
    #[unroll]
    for _ in 0..count {
        let mut fragment = Array::<Pair>::new(2usize);
        fragment[0] = Vector::cast_from(0f32);
        fragment[1] = Vector::cast_from(0f32);
        acc.push(fragment);
    }
    acc
}

/// Multiplies an accumulator by a number.
#[cube]
pub fn scale(acc: &mut Accumulator, factor: f32) {
    #[unroll]
    for f in 0..acc.len() {
        let fragment = acc.index_mut(f);
        #[unroll]
        for r in 0..2usize {
            fragment[r] = fragment[r] * Pair::cast_from(factor);
        }
    }
}

/// The loop that follows is not unrolled, which saves registers and time of compilation.
#[cube]
pub fn keep_loop() {
    intrinsic!(|scope| asm::emit(scope, "A loop", "#pragma unroll 1"))
}

/// A fragment of operand A: 16 rows from `row` on of a tile of `rows` rows, channels 16·`step` to
/// 16·`step` + 15.
#[cube]
pub fn load_a_frag(
    def: &MmaDefinition<bf16, bf16, f32>,
    tile: &SharedMemory<Chunk>,
    row: usize,
    #[comptime] step: usize,
    #[comptime] rows: usize,
) -> Array<Bf16Pair> {
    let lane = UNIT_POS_PLANE;
    let (panel, chunk) = comptime!((step / 4, (step % 4) as u32 * 2));
    let place = place(lane % 16, chunk + lane / 16) + (row + comptime!(panel * rows)) * PANEL;
    def.load_matrix::<_, Const<2>>(&tile.slice(place, place + 1), MatrixIdent::A, 4usize, false)
}

/// The fragments of operand A of 16 rows from `row` on and `steps`·16 channels.
#[cube]
pub fn load_a_frags(
    def: &MmaDefinition<bf16, bf16, f32>,
    tile: &SharedMemory<Chunk>,
    row: usize,
    #[comptime] steps: usize,
    #[comptime] rows: usize,
) -> AFragments {
    let mut fragments = AFragments::new();
    #[unroll]
    for step in 0..steps {
        fragments.push(load_a_frag(def, tile, row, step, rows));
    }
    fragments
}

/// One B fragment of 8 columns: half `half` of the 16 columns that `ldmatrix` loaded.
#[cube]
pub fn half(four: &Array<Bf16Pair>, #[comptime] half: usize) -> Array<Bf16Pair> {
    let mut right = Array::<Bf16Pair>::new(2usize);
    right[0] = four[half * 2];
    right[1] = four[half * 2 + 1];
    right
}

/// acc += A · Bᵀ, where A has 16 rows of `steps`·16 channels, and B is the 16 rows from `from` on of a
/// tile of `rows` rows that starts at chunk `at`.
#[cube]
pub fn add_abt_of_rows(
    def: &MmaDefinition<bf16, bf16, f32>,
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: usize,
    from: usize,
    #[comptime] rows: usize,
    acc: &mut Accumulator,
    #[comptime] steps: usize,
) {
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for step in 0..steps {
        let (panel, chunk) = comptime!((step / 4, (step % 4) as u32 * 2));
        let place = at
            + place((lane / 16) * 8 + lane % 8, chunk + (lane / 8) % 2)
            + (from + comptime!(panel * rows)) * PANEL;
        let slice = tile.slice(place, place + 1);
        let four = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::B, 4usize, false);
        #[unroll]
        for h in 0..2usize {
            def.execute_inplace(a_frags.index(step), &half(&four, h), acc.index_mut(h));
        }
    }
}

/// acc += P · B, where P, an accumulator of 16 rows by 16 columns, is rounded to bf16, and B is the 16
/// rows from `from` on of a tile of `rows` rows that starts at chunk `at`, with 8·`n` channels.
#[cube]
pub fn add_pb_of_rows(
    def: &MmaDefinition<bf16, bf16, f32>,
    p: &Accumulator,
    tile: &SharedMemory<Chunk>,
    at: usize,
    from: usize,
    #[comptime] rows: usize,
    acc: &mut Accumulator,
    #[comptime] n: usize,
) {
    let lane = UNIT_POS_PLANE;
    let mut a_frag = Array::<Bf16Pair>::new(4usize);
    a_frag[0] = Vector::cast_from(p.index(0usize)[0]);
    a_frag[1] = Vector::cast_from(p.index(0usize)[1]);
    a_frag[2] = Vector::cast_from(p.index(1usize)[0]);
    a_frag[3] = Vector::cast_from(p.index(1usize)[1]);
    #[unroll]
    for pair in 0..comptime!(n / 2) {
        let (panel, chunk) = comptime!((pair / 4, (pair % 4) as u32 * 2));
        let place =
            at + place(lane % 16, chunk + lane / 16) + (from + comptime!(panel * rows)) * PANEL;
        let slice = tile.slice(place, place + 1);
        let four = def.load_matrix::<_, Const<2>>(&slice, MatrixIdent::B, 4usize, true);
        #[unroll]
        for h in 0..2usize {
            let c = acc.index_mut(comptime!(pair * 2 + h));
            def.execute_inplace(&a_frag, &half(&four, h), c);
        }
    }
}

/// Writes an accumulator of 16 rows, a lane's two rows times `factors`, as rows of a tensor of quads.
/// `row` is the warp's first row; rows from `total` on are not written, nor channels past `chunks`. `base` and
/// `stride` are in chunks. Lanes swap pairs with their neighbours, such that each has quads of every other chunk.
#[cube]
pub fn store_rows<O: Numeric>(
    acc: &Accumulator,
    factors: &Array<f32>,
    output: &mut Array<Vector<O, Const<4>>>,
    base: usize,
    stride: usize,
    row: usize,
    total: usize,
    #[comptime] chunks: usize,
) {
    let lane = UNIT_POS_PLANE as usize;
    #[unroll]
    for r in 0..2usize {
        let row = row + r * 8 + lane / 4;
        let to = (base + row * stride) * comptime!(CHUNK / 4) + quad_in_two_chunks();
        #[unroll]
        for two in 0..comptime!(chunks.div_ceil(2)) {
            let quad = quad_of_row(acc, two, r) * Quad::cast_from(factors[r]);
            if (row < total) & has_quad(two, chunks) {
                output[to + comptime!(two * CHUNK / 2)] = Vector::cast_from(quad);
            }
        }
    }
}

/// Four channels of chunk 2·`two` or 2·`two` + 1 of the lane's row `r` of an accumulator, at [`quad_in_two_chunks`].
#[cube]
pub fn quad_of_row(acc: &Accumulator, #[comptime] two: usize, #[comptime] r: usize) -> Quad {
    let first = acc.index(comptime!(2 * two))[r];
    let mut second = Pair::cast_from(0f32);
    if comptime!(2 * two + 1 < acc.len()) {
        second = acc.index(comptime!(2 * two + 1))[r];
    }
    quad_of_two_lanes(first, second)
}

/// Whether there is such a chunk, of `chunks` in a row.
#[cube]
pub fn has_quad(#[comptime] two: usize, #[comptime] chunks: usize) -> bool {
    comptime!(2 * two + 1 < chunks) || UNIT_POS_PLANE & 1 == 0
}

/// Swaps pairs with the neighbouring lane: an even lane gets the `first` pairs of both, an odd one the `second` ones.
/// So lanes that hold pairs of two chunks write whole sectors of memory.
#[cube]
pub fn quad_of_two_lanes(first: Pair, second: Pair) -> Quad {
    let odd = UNIT_POS_PLANE % 2 == 1;
    let mut quad = Quad::empty();
    #[unroll]
    for c in 0..2usize {
        let other = plane_shuffle_xor(select(odd, first[c], second[c]), 1);
        quad[c] = select(odd, other, first[c]);
        quad[comptime!(c + 2)] = select(odd, second[c], other);
    }
    quad
}

/// Where the quad that [`quad_of_two_lanes`] gives is in two neighbouring chunks of the lane's row of an accumulator.
#[cube]
pub fn quad_in_two_chunks() -> usize {
    UNIT_POS_PLANE as usize % 2 * comptime!(CHUNK / 4) + UNIT_POS_PLANE as usize % 4 / 2
}

/// Stages `count` values, distributed over a warp's lanes, in part `part` of `smem`.
#[cube]
pub fn stage_to_smem<E: Numeric, N: Size>(
    smem: &mut SharedMemory<Vector<E, N>>,
    values: &Array<Vector<E, N>>,
    part: usize,
    #[comptime] count: usize,
) {
    sync_plane();
    #[unroll]
    for i in 0..comptime!(count.div_ceil(32)) {
        let at = i * 32 + UNIT_POS_PLANE as usize;
        if comptime!(count.is_multiple_of(32)) || at < count {
            smem[part * count + at] = values[i];
        }
    }
    sync_plane();
}
