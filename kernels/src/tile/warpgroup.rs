//! Matrix products of warpgroups (four warps that hold 64 rows) by `wgmma`, which reads operand B from
//! shared memory and is twice as fast as `mma.sync` (PTX ISA, "Asynchronous warpgroup level matrix
//! multiply-accumulate instructions"); and a [`Pipeline`] of tile loads for warpgroups that do not run in
//! lockstep.
//!
//! cubecl does not support the instruction, but it emits comments verbatim: the text built here ends the
//! comment and continues with an `asm` statement. It only names local arrays and shared memory, whose
//! names do not depend on the surrounding code. A lane's fragments are those of `mma.sync`.
//!
//! Products are asynchronous. Their accumulator must not be touched before [`wait`]; they complete in the
//! order in which they were started.

use burn::tensor::bf16;
use cubecl::ir::{NonSemantic, VariableKind};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::asm::{emit, name_of};
use super::{
    AFragments, ALIGN, Accumulator, Bf16Pair, CHUNK, Chunk, PANEL, Pair, bytes, load_rows, place,
    wait_parity,
};

/// Warps of a warpgroup.
pub const GROUP_WARPS: usize = 4;

/// Threads of a warpgroup.
pub const GROUP_THREADS: usize = 32 * GROUP_WARPS;

/// Rows of a warpgroup.
pub const GROUP_ROWS: usize = 16 * GROUP_WARPS;

/// The dimension of a tile in shared memory that a product sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SummedOver {
    /// Its channels (K-major).
    Channels,
    /// Its rows (MN-major).
    Rows,
}

/// A tile of `rows` rows in shared memory as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SmemOperand {
    summed_over: SummedOver,
    rows: usize,
}

impl SmemOperand {
    /// The upper half of the matrix descriptor: the 128-byte swizzle, and the stride between groups of 8
    /// rows in units of 16 bytes.
    const UPPER: u32 = 1 << 30 | (8 * PANEL) as u32;

    /// The tile as an operand of products that sum over its channels.
    pub const fn over_channels(rows: usize) -> Self {
        SmemOperand { summed_over: SummedOver::Channels, rows }
    }

    /// The tile as an operand of products that sum over its rows.
    pub const fn over_rows(rows: usize) -> Self {
        SmemOperand { summed_over: SummedOver::Rows, rows }
    }

    /// The lower half of the descriptor without the address: for a sum over rows, the stride between
    /// panels of 64 channels.
    fn lower(self) -> usize {
        let panel = match self.summed_over {
            SummedOver::Channels => 1,
            SummedOver::Rows => self.rows * PANEL,
        };
        panel << 16
    }

    /// The address offset of the `step`-th 16 elements of the sum, in units of 16 bytes.
    fn offset(self, step: usize) -> usize {
        match self.summed_over {
            SummedOver::Channels => step / 4 * self.rows * PANEL + step % 4 * 2,
            SummedOver::Rows => step * 16 * PANEL,
        }
    }
}

/// The statements that start a product with 64 rows and 8·n columns that sums over `steps`·16 elements.
/// `sums` are the ids of the accumulator's arrays, two pairs of columns each. Operand A is in `registers`,
/// four per step, or in the tile `left`. A tile is given by its layout, the id of the shared memory and
/// the id of the array that holds the index of its first chunk.
///
/// Each step is a statement of its own, so that the compiler computes later steps' operands while the first
/// ones run.
fn wgmma_text(
    sums: &[u32],
    fresh: bool,
    registers: &[u32],
    left: Option<(SmemOperand, u32, u32)>,
    right: (SmemOperand, u32, u32),
    steps: usize,
) -> String {
    let listed = |items: Vec<String>| items.join(", ");
    let columns = 8 * sums.len();
    let count = 4 * sums.len();
    let sum_at = |i: usize| format!("reinterpret_cast<float*>(l_arr_{})[{}]", sums[i / 4], i % 4);
    let all = listed((0..count).map(|i| format!("%{i}")).collect());
    let descriptor = |(operand, memory, place): (SmemOperand, u32, u32), step: usize| {
        format!(
            "\"l\"(uint64({}u) << 32 | ({}u + ((uint32)__cvta_generic_to_shared(shared_memory_{memory}) >> 4) \
             + l_arr_{place}[0]))",
            SmemOperand::UPPER,
            operand.lower() + operand.offset(step),
        )
    };
    let mut text = format!(
        "{columns} columns:\n*/\nasm volatile(\"wgmma.fence.sync.aligned;\\n\" ::: \"memory\");\n"
    );
    for step in 0..steps {
        let adds = u8::from(step > 0 || !fresh);
        let mode = if adds == 0 { "=f" } else { "+f" };
        let outputs = listed((0..count).map(|i| format!("\"{mode}\"({})", sum_at(i))).collect());
        let transposed = u8::from(right.0.summed_over == SummedOver::Rows);
        let mut inputs = vec![descriptor(right, step)];
        let (factor, flags) = match left {
            Some(left) => {
                inputs.push(descriptor(left, step));
                let left_transposed = u8::from(left.0.summed_over == SummedOver::Rows);
                (format!("%{}", count + 1), format!("{left_transposed}, {transposed}"))
            }
            None => {
                let array = registers[step];
                inputs.extend(
                    (0..4).map(|i| format!("\"r\"(reinterpret_cast<uint32*>(l_arr_{array})[{i}])")),
                );
                let four = listed((1..5).map(|i| format!("%{}", count + i)).collect());
                (format!("{{{four}}}"), format!("{transposed}"))
            }
        };
        text += &format!(
            "asm volatile(\"{{\\n.reg .pred set;\\nsetp.ne.b32 set, {adds}, 0;\\n\
             wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{all}}}, {factor}, %{count}, \
             set, 1, 1, {flags};\\n}}\\n\" : {outputs} : {});\n",
            listed(inputs)
        );
    }
    text + "asm volatile(\"wgmma.commit_group.sync.aligned;\\n\" ::: \"memory\");\n/*"
}

/// The id of a local array or a shared memory. Checks what the generated text assumes: elements are vectors
/// of `width`, and a local array has `length` of them.
fn variable_id(variable: cubecl::ir::Variable, width: usize, length: usize) -> u32 {
    let found = variable.ty.vector_size();
    assert_eq!(found, width, "elements of {variable:?} in a product");
    match variable.kind {
        VariableKind::LocalArray { id, length: found, .. } => {
            assert_eq!(found, length, "length of {variable:?} in a product");
            id
        }
        VariableKind::SharedArray { id, .. } => id,
        kind => panic!("{kind:?} is no local array or shared memory"),
    }
}

/// Starts a product with A in registers: acc = A · B if `fresh`, else acc += A · B.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn start_with_registers(
    acc: &mut Accumulator,
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: &Array<u32>,
    #[comptime] fresh: bool,
    #[comptime] right: SmemOperand,
) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| variable_id(*x.expand, 2, 2)).collect();
        let registers: Vec<u32> =
            a_frags.iter_cloned().map(|x| variable_id(*x.expand, 2, 4)).collect();
        let right = (right, variable_id(*tile.expand, CHUNK, 0), variable_id(*at.expand, 1, 1));
        let content = wgmma_text(&sums, fresh, &registers, None, right, registers.len());
        scope.register(NonSemantic::Comment { content });
    })
}

/// As [`start_with_registers`], with A in a tile.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn start_with_tile(
    acc: &mut Accumulator,
    left_tile: &SharedMemory<Chunk>,
    left_at: &Array<u32>,
    tile: &SharedMemory<Chunk>,
    at: &Array<u32>,
    #[comptime] fresh: bool,
    #[comptime] left: SmemOperand,
    #[comptime] right: SmemOperand,
    #[comptime] steps: usize,
) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| variable_id(*x.expand, 2, 2)).collect();
        let left =
            (left, variable_id(*left_tile.expand, CHUNK, 0), variable_id(*left_at.expand, 1, 1));
        let right = (right, variable_id(*tile.expand, CHUNK, 0), variable_id(*at.expand, 1, 1));
        let content = wgmma_text(&sums, fresh, &[], Some(left), right, steps);
        scope.register(NonSemantic::Comment { content });
    })
}

/// Waits until all products but the last `pending` have completed; those into `acc` must be among the
/// completed ones.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn wait(acc: &mut Accumulator, #[comptime] pending: usize) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| variable_id(*x.expand, 2, 2)).collect();
        let all: Vec<String> = (0..4 * sums.len())
            .map(|i| format!("\"+f\"(reinterpret_cast<float*>(l_arr_{})[{}])", sums[i / 4], i % 4))
            .collect();
        let content = format!(
            "wait:\n*/\nasm volatile(\"wgmma.wait_group.sync.aligned {pending};\\n\" : {} : : \"memory\");\n/*",
            all.join(", ")
        );
        scope.register(NonSemantic::Comment { content });
    })
}

/// An array with the index of a tile's first chunk, as the generated text reads it.
#[cube]
fn chunk_index(at: usize) -> Array<u32> {
    let mut place = Array::<u32>::new(1usize);
    place[0] = at as u32;
    place
}

/// An uninitialised accumulator of `count` fragments.
#[cube]
pub fn uninit(#[comptime] count: usize) -> Accumulator {
    let mut acc = Accumulator::new();
    #[unroll]
    for _ in 0..count {
        acc.push(Array::<Pair>::new(2usize));
    }
    acc
}

/// Starts acc += A · B, where A has the 64 rows or columns of a tile from chunk `left_at` on, and B the rows or columns
/// of a tile from chunk `at` on; the sum is over `steps`·16 elements. Columns of B that begin inside a panel end in it.
#[cube]
pub fn start_tiles(
    arena: &SharedMemory<Chunk>,
    left_at: usize,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] left: SmemOperand,
    #[comptime] right: SmemOperand,
    #[comptime] steps: usize,
) {
    let (from, to) = (chunk_index(left_at), chunk_index(at));
    start_with_tile(acc, arena, &from, arena, &to, false, left, right, steps);
}

/// Starts acc = A · Bᵀ if `fresh`, else acc += A · Bᵀ. B is the tile of 8·`n` rows that starts at chunk
/// `at`; A, 64 rows per warpgroup, is in `a_frags`.
#[cube]
pub fn start_abt(
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] fresh: bool,
    #[comptime] n: usize,
) {
    let right = comptime!(SmemOperand { summed_over: SummedOver::Channels, rows: n * 8 });
    start_with_registers(acc, a_frags, tile, &chunk_index(at), fresh, right);
}

/// [`start_abt`] with A's rows in a tile of `rows` rows, from `row` on, and `steps`·16 channels.
#[cube]
pub fn start_tile_abt(
    left_tile: &SharedMemory<Chunk>,
    row: usize,
    #[comptime] rows: usize,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] fresh: bool,
    #[comptime] n: usize,
    #[comptime] steps: usize,
) {
    let left = comptime!(SmemOperand { summed_over: SummedOver::Channels, rows });
    let right = comptime!(SmemOperand { summed_over: SummedOver::Channels, rows: n * 8 });
    let (from, to) = (chunk_index(row * PANEL), chunk_index(at));
    start_with_tile(acc, left_tile, &from, tile, &to, fresh, left, right, steps);
}

/// Starts acc = A · B if `fresh`, else acc += A · B: A's rows are in a tile of `rows` rows and `steps`·16 channels,
/// from `row` on, and B is the tile of `steps`·16 rows that starts at chunk `at`.
#[cube]
pub fn start_tile_ab(
    left_tile: &SharedMemory<Chunk>,
    row: usize,
    #[comptime] rows: usize,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] fresh: bool,
    #[comptime] steps: usize,
) {
    let left = comptime!(SmemOperand { summed_over: SummedOver::Channels, rows });
    let right = comptime!(SmemOperand { summed_over: SummedOver::Rows, rows: 16 * steps });
    let (from, to) = (chunk_index(row * PANEL), chunk_index(at));
    start_with_tile(acc, left_tile, &from, tile, &to, fresh, left, right, steps);
}

/// Starts acc = Aᵀ · B if `fresh`, else acc += Aᵀ · B, summed over the `rows` rows of two tiles: A is the panel of
/// 64 columns that starts at chunk `left_at`, and B the columns from chunk `at` on, of a panel or of whole ones.
#[cube]
pub fn start_panels_atb(
    left_tile: &SharedMemory<Chunk>,
    left_at: usize,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] fresh: bool,
    #[comptime] rows: usize,
) {
    let panel = comptime!(SmemOperand { summed_over: SummedOver::Rows, rows });
    let (from, to) = (chunk_index(left_at), chunk_index(at));
    let steps = comptime!(rows / 16);
    start_with_tile(acc, left_tile, &from, tile, &to, fresh, panel, panel, steps);
}

/// Writes fragments of an operand A, 16 rows per warp, to the rows from `row` on of the tile of `rows` rows
/// that starts at chunk `at`.
#[cube]
pub fn store_a_frags(
    a_frags: &AFragments,
    tile: &mut SharedMemory<Chunk>,
    at: usize,
    row: usize,
    #[comptime] rows: usize,
) {
    let lane = UNIT_POS_PLANE;
    #[unroll]
    for step in 0..a_frags.len() {
        let (panel, chunk) = comptime!((step / 4, (step % 4) as u32 * 2));
        let place =
            at + place(lane % 16, chunk + lane / 16) + (row + comptime!(panel * rows)) * PANEL;
        store_four(a_frags.index(step), tile, &chunk_index(place));
    }
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn store_four(a_frag: &Array<Bf16Pair>, tile: &mut SharedMemory<Chunk>, at: &Array<u32>) {
    intrinsic!(|scope| {
        let (four, tile, at) =
            (name_of(&a_frag.expand), name_of(&tile.expand), name_of(&at.expand));
        let registers: Vec<String> =
            (0..4).map(|i| format!("\"r\"(reinterpret_cast<uint32*>({four})[{i}])")).collect();
        let text = format!(
            "asm volatile(\"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1, %2, %3, %4}};\\n\" : : \
             \"r\"((uint32)__cvta_generic_to_shared({tile} + {at}[0])), {} : \"memory\");",
            registers.join(", ")
        );
        emit(scope, "four matrices", &text);
    })
}

/// Starts acc += P · B. B is the tile that starts at chunk `at`, with as many rows as P has columns; P, 64
/// rows per warpgroup, is in `a_frags`.
#[cube]
pub fn start_pb(
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
) {
    let right = comptime!(SmemOperand { summed_over: SummedOver::Rows, rows: 16 * a_frags.len() });
    start_with_registers(acc, a_frags, tile, &chunk_index(at), false, right);
}

/// Uninitialised fragments of an operand A of `steps`·16 columns.
#[cube]
pub fn uninit_a_frags(#[comptime] steps: usize) -> AFragments {
    let mut a_frags = AFragments::new();
    #[unroll]
    for _ in 0..steps {
        a_frags.push(Array::<Bf16Pair>::new(4usize));
    }
    a_frags
}

/// Rounds a pair of an accumulator (fragment `column`, a lane's row `row`) into fragments of an operand A.
#[cube]
pub fn set_a_frag(
    a_frags: &mut AFragments,
    #[comptime] column: usize,
    #[comptime] row: usize,
    pair: Pair,
) {
    let (step, place) = comptime!((column / 2, column % 2 * 2 + row));
    a_frags.index_mut(step)[place] = Vector::cast_from(pair);
}

/// An accumulator of 8·`n` columns, rounded to bf16, as an operand A.
#[cube]
pub fn to_a_frags(p: &Accumulator, #[comptime] n: usize) -> AFragments {
    let mut a_frags = uninit_a_frags(comptime!(n / 2));
    #[unroll]
    for column in 0..n {
        #[unroll]
        for row in 0..2usize {
            set_a_frag(&mut a_frags, column, row, p.index(column)[row]);
        }
    }
    a_frags
}

/// Where the rows of a tile begin in a tensor `[batch, heads, rows, channels]`.
#[derive(CubeType, Clone, Copy)]
pub struct RowsAt {
    /// The sequence.
    pub batch: usize,
    /// The head.
    pub head: usize,
    /// The first row.
    pub row: usize,
}

/// A double buffer of two stages with two tiles each: one stage is loaded while the other is used. Warps do
/// not run in lockstep; the last one to release a stage loads the next tiles into it.
#[derive(CubeType)]
pub struct Pipeline {
    full: Sequence<Shared<Barrier>>,
    released: SharedMemory<Atomic<u32>>,
    /// The first tile of each stage (K, or q in dkv).
    pub first_tiles: SharedMemory<Chunk>,
    /// The second tile of each stage (V, or dO in dkv).
    pub second_tiles: SharedMemory<Chunk>,
    /// Rows per tile.
    #[cube(comptime)]
    rows: usize,
    /// Channels of the first tile and of the second.
    #[cube(comptime)]
    dims: (usize, usize),
    /// Warps per block.
    #[cube(comptime)]
    warps: usize,
}

#[cube]
impl Pipeline {
    /// Empty stages for a tile of `rows` rows and `dims.0` channels and one of `dims.1`. The block must
    /// synchronise before using them.
    pub fn new(
        #[comptime] rows: usize,
        #[comptime] dims: (usize, usize),
        #[comptime] warps: usize,
    ) -> Pipeline {
        let mut full = Sequence::<Shared<Barrier>>::new();
        #[unroll]
        for _ in 0..2usize {
            full.push(Barrier::shared(1, UNIT_POS == 0));
        }
        let released = SharedMemory::<Atomic<u32>>::new(2usize);
        if UNIT_POS < 2 {
            released[UNIT_POS as usize].store(0u32);
        }
        sync_async_proxy_shared();
        let first_chunks = comptime!(2 * rows * dims.0 / CHUNK);
        let second_chunks = comptime!(2 * rows * dims.1 / CHUNK);
        Pipeline {
            full,
            released,
            first_tiles: SharedMemory::<Chunk>::new_aligned(first_chunks, ALIGN),
            second_tiles: SharedMemory::<Chunk>::new_aligned(second_chunks, ALIGN),
            rows,
            dims,
            warps,
        }
    }

    /// The index of the first chunk of an iteration's first tile.
    pub fn first_tile(&self, iteration: usize) -> usize {
        iteration % 2 * comptime!(self.rows * self.dims.0 / CHUNK)
    }

    /// The index of the first chunk of an iteration's second tile.
    pub fn second_tile(&self, iteration: usize) -> usize {
        iteration % 2 * comptime!(self.rows * self.dims.1 / CHUNK)
    }

    /// Starts the load of a further tile that the iteration also waits for.
    pub fn load_also(
        &self,
        iteration: usize,
        source: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
        tile: &mut SharedMemory<Chunk>,
        #[comptime] rows: usize,
        #[comptime] dim: usize,
    ) {
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                let full = self.full.index(stage);
                load_rows(full, source, batch, head, first, tile, 0usize, rows, dim);
            }
        }
    }

    /// Starts the loads of an iteration's two tiles, rows from `first` on of their heads. `others` is the
    /// number of bytes that [`Pipeline::load_also`] loads for the same iteration.
    pub fn load(
        &mut self,
        iteration: usize,
        first_source: &TensorMap<bf16, Tiled>,
        second_source: &TensorMap<bf16, Tiled>,
        batch: usize,
        heads: (usize, usize),
        first: usize,
        others: u32,
    ) {
        let of_first = RowsAt { batch, head: heads.0, row: first };
        let of_second = RowsAt { batch, head: heads.1, row: first };
        self.load_each(iteration, first_source, &of_first, second_source, &of_second, others);
    }

    /// [`Pipeline::load`] of tiles that begin at different rows.
    pub fn load_each(
        &mut self,
        iteration: usize,
        first_source: &TensorMap<bf16, Tiled>,
        of_first: &RowsAt,
        second_source: &TensorMap<bf16, Tiled>,
        of_second: &RowsAt,
        others: u32,
    ) {
        let (first_at, second_at) = (self.first_tile(iteration), self.second_tile(iteration));
        let (rows, first_dim, second_dim) = comptime!((self.rows, self.dims.0, self.dims.1));
        let both = comptime!(bytes(self.rows, self.dims.0) + bytes(self.rows, self.dims.1));
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                let full = self.full.index(stage);
                full.arrive_and_expect_tx(1, both + others);
                load_rows(
                    full,
                    first_source,
                    of_first.batch,
                    of_first.head,
                    of_first.row,
                    &mut self.first_tiles,
                    first_at,
                    rows,
                    first_dim,
                );
                load_rows(
                    full,
                    second_source,
                    of_second.batch,
                    of_second.head,
                    of_second.row,
                    &mut self.second_tiles,
                    second_at,
                    rows,
                    second_dim,
                );
            }
        }
    }

    /// As [`Pipeline::load`] of the first tile alone: the second ones then take no memory.
    pub fn load_first(
        &mut self,
        iteration: usize,
        source: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
        others: u32,
    ) {
        let at = self.first_tile(iteration);
        let (rows, dim) = comptime!((self.rows, self.dims.0));
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                let full = self.full.index(stage);
                full.arrive_and_expect_tx(1, comptime!(bytes(rows, dim)) + others);
                load_rows(full, source, batch, head, first, &mut self.first_tiles, at, rows, dim);
            }
        }
    }

    /// Waits for the tiles of an iteration.
    pub fn wait(&self, iteration: usize) {
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                wait_parity(self.full.index(stage), (iteration / 2 % 2) as u32);
            }
        }
    }

    /// Releases the tiles of an iteration for this warp. Returns true in one unit, once all warps have
    /// released them: then the stage is free for the tiles of iteration + 2. Only products may read a stage's
    /// tiles, and they must have been waited for.
    pub fn release(&self, iteration: usize) -> bool {
        let mut last = false;
        if UNIT_POS_PLANE == 0 {
            let before = self.released[iteration % 2].fetch_add(1u32);
            last = before + 1 == (iteration as u32 / 2 + 1) * comptime!(self.warps as u32);
        }
        last
    }
}
