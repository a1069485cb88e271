//! Products of warpgroups, four warps that hold 64 rows: `wgmma`, which reads its right factor straight
//! from shared memory and is twice as fast as `mma.sync` (PTX ISA, "Asynchronous warpgroup level matrix
//! multiply-accumulate instructions"). And what such products need: tiles that are loaded while others
//! are worked on, by warpgroups each at its own pace.
//!
//! cubecl has no name for the instruction, but passes comments on as they are, and the text that is
//! written here as one is a statement after a comment. All it names are local arrays and shared
//! memory, whose names do not depend on the code around. A lane's fragments are those of `mma.sync`.
//!
//! A product runs on after it has been started. What it adds to may be touched again after [`wait`];
//! products finish in the order in which they were started.

use burn::tensor::bf16;
use cubecl::ir::{NonSemantic, VariableKind};
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::{
    AFragments, ALIGN, Accumulator, Bf16Pair, CHUNK, Chunk, PANEL, Pair, bytes, load_rows,
};

/// Warps of a warpgroup.
pub const GROUP_WARPS: usize = 4;

/// Rows of a warpgroup.
pub const GROUP_ROWS: usize = 16 * GROUP_WARPS;

/// How a tile in shared memory takes part in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Along {
    /// Its channels are summed over.
    Channels,
    /// Its rows are summed over.
    Rows,
}

/// A tile of `rows` rows as a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Factor {
    along: Along,
    rows: usize,
}

impl Factor {
    /// The upper half of the matrix descriptor: the swizzle of 128 bytes, and 8 rows from one group of
    /// rows to the next, in units of 16 bytes.
    const UPPER: u32 = 1 << 30 | (8 * PANEL) as u32;

    /// The lower half but for the address: where channels are not summed over, a panel from 64 of them
    /// to the next.
    fn lower(self) -> usize {
        let panel = match self.along {
            Along::Channels => 1,
            Along::Rows => self.rows * PANEL,
        };
        panel << 16
    }

    /// How far the `step`-th 16 of the sum are from the first.
    fn offset(self, step: usize) -> usize {
        match self.along {
            Along::Channels => step / 4 * self.rows * PANEL + step % 4 * 2,
            Along::Rows => step * 16 * PANEL,
        }
    }
}

/// The statement that starts a product of 64 rows and 8·n columns, sums over `steps`·16: `sums` are
/// the accumulator's arrays, two pairs of columns each. The left factor is in `registers`, four a step,
/// or in a tile. Tiles come as the number of a shared memory and that of the array that holds their
/// first chunk.
fn product(
    sums: &[u32],
    fresh: bool,
    registers: &[u32],
    left: Option<(Factor, u32, u32)>,
    right: (Factor, u32, u32),
    steps: usize,
) -> String {
    let listed = |items: Vec<String>| items.join(", ");
    let columns = 8 * sums.len();
    let count = 4 * sums.len();
    let sum_at = |i: usize| format!("reinterpret_cast<float*>(l_arr_{})[{}]", sums[i / 4], i % 4);
    let mode = if fresh { "=f" } else { "+f" };
    let outputs = listed((0..count).map(|i| format!("\"{mode}\"({})", sum_at(i))).collect());
    let descriptor = |(factor, memory, place): (Factor, u32, u32)| {
        format!(
            "\"r\"({}u + ((uint32)__cvta_generic_to_shared(shared_memory_{memory}) >> 4) \
             + l_arr_{place}[0])",
            factor.lower()
        )
    };
    let mut inputs = vec![descriptor(right)];
    match left {
        Some(left) => inputs.push(descriptor(left)),
        None => inputs.extend((0..4 * steps).map(|i| {
            format!("\"r\"(reinterpret_cast<uint32*>(l_arr_{})[{}])", registers[i / 4], i % 4)
        })),
    }
    let mut text =
        String::from("{\\n.reg .pred set;\\n.reg .b32 lower;\\n.reg .b64 right, left;\\n");
    let point = |name: &str, operand: usize, offset: usize| {
        format!(
            "add.u32 lower, %{operand}, {offset};\\nmov.b64 {name}, {{lower, {}}};\\n",
            Factor::UPPER
        )
    };
    text.push_str("wgmma.fence.sync.aligned;\\n");
    let all = listed((0..count).map(|i| format!("%{i}")).collect());
    for step in 0..steps {
        let adds = u8::from(step > 0 || !fresh);
        text += &format!("setp.ne.b32 set, {adds}, 0;\\n");
        text += &point("right", count, right.0.offset(step));
        let transposed = u8::from(right.0.along == Along::Rows);
        let (factor, flags) = match left {
            Some((left, ..)) => {
                text += &point("left", count + 1, left.offset(step));
                ("left".to_string(), format!("0, {transposed}"))
            }
            None => {
                let first = count + 1 + 4 * step;
                let four = listed((first..first + 4).map(|i| format!("%{i}")).collect());
                (format!("{{{four}}}"), format!("{transposed}"))
            }
        };
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{all}}}, {factor}, right, \
             set, 1, 1, {flags};\\n"
        );
    }
    text.push_str("wgmma.commit_group.sync.aligned;\\n}\\n");
    format!(
        "{columns} columns:\n*/\nasm volatile(\"{text}\" : {outputs} : {} : \"memory\");\n/*",
        listed(inputs)
    )
}

/// The number of a local array or a shared memory, whose elements are vectors of `width`, in an array as
/// many as `length`: what the statements above take for granted.
fn number(variable: cubecl::ir::Variable, width: usize, length: usize) -> u32 {
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

/// acc = A · Bᵀ, or acc += where it is not `fresh`, started: A in registers.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn start_with_registers(
    acc: &mut Accumulator,
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: &Array<u32>,
    #[comptime] fresh: bool,
    #[comptime] right: Factor,
) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| number(*x.expand, 2, 2)).collect();
        let registers: Vec<u32> = a_frags.iter_cloned().map(|x| number(*x.expand, 2, 4)).collect();
        let right = (right, number(*tile.expand, CHUNK, 0), number(*at.expand, 1, 1));
        let content = product(&sums, fresh, &registers, None, right, registers.len());
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
    #[comptime] left: Factor,
    #[comptime] right: Factor,
    #[comptime] steps: usize,
) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| number(*x.expand, 2, 2)).collect();
        let left = (left, number(*left_tile.expand, CHUNK, 0), number(*left_at.expand, 1, 1));
        let right = (right, number(*tile.expand, CHUNK, 0), number(*at.expand, 1, 1));
        let content = product(&sums, fresh, &[], Some(left), right, steps);
        scope.register(NonSemantic::Comment { content });
    })
}

/// Waits until all products but the last `pending` have finished, with those that add to `acc` among
/// them.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn wait(acc: &mut Accumulator, #[comptime] pending: usize) {
    intrinsic!(|scope| {
        let sums: Vec<u32> = acc.iter_cloned().map(|x| number(*x.expand, 2, 2)).collect();
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

/// An array that tells a product its tile's place.
#[cube]
fn place_of(at: usize) -> Array<u32> {
    let mut place = Array::<u32>::new(1usize);
    place[0] = at as u32;
    place
}

/// An accumulator of `count` fragments that holds nothing yet.
#[cube]
pub fn uninit(#[comptime] count: usize) -> Accumulator {
    let mut acc = Accumulator::new();
    #[unroll]
    for _ in 0..count {
        acc.push(Array::<Pair>::new(2usize));
    }
    acc
}

/// Starts acc += A · Bᵀ, or acc = A · Bᵀ where it is `fresh`. B's rows are the 8·`n` of the tile that
/// starts at chunk `at`, and A, 64 rows a warpgroup, is in `a_frags`.
#[cube]
pub fn start_abt(
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
    #[comptime] fresh: bool,
    #[comptime] n: usize,
) {
    let right = comptime!(Factor { along: Along::Channels, rows: n * 8 });
    start_with_registers(acc, a_frags, tile, &place_of(at), fresh, right);
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
    let left = comptime!(Factor { along: Along::Channels, rows });
    let right = comptime!(Factor { along: Along::Channels, rows: n * 8 });
    let (from, to) = (place_of(row * PANEL), place_of(at));
    start_with_tile(acc, left_tile, &from, tile, &to, fresh, left, right, steps);
}

/// Starts acc += P · B, where B's rows are those of the tile that starts at chunk `at`, as many as P has
/// columns, and P, 64 rows a warpgroup, is in `a_frags`.
#[cube]
pub fn start_pb(
    a_frags: &AFragments,
    tile: &SharedMemory<Chunk>,
    at: usize,
    acc: &mut Accumulator,
) {
    let right = comptime!(Factor { along: Along::Rows, rows: 16 * a_frags.len() });
    start_with_registers(acc, a_frags, tile, &place_of(at), false, right);
}

/// A left factor of `steps`·16 columns that holds nothing yet.
#[cube]
pub fn uninit_a_frags(#[comptime] steps: usize) -> AFragments {
    let mut a_frags = AFragments::new();
    #[unroll]
    for _ in 0..steps {
        a_frags.push(Array::<Bf16Pair>::new(4usize));
    }
    a_frags
}

/// Rounds a pair of an accumulator, of its 8 columns `column` and a lane's row `row`, into a left factor.
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

/// An accumulator of 8·`n` columns, rounded, as a left factor.
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

/// Two stages of two tiles each, in turns: while one stage is worked on, the other is loaded. Warps need not
/// keep pace; the last that releases a stage has the next tiles loaded into it.
#[derive(CubeType)]
pub struct Pipeline {
    full: Sequence<Shared<Barrier>>,
    released: SharedMemory<Atomic<u32>>,
    /// The first tiles of both stages.
    pub one: SharedMemory<Chunk>,
    /// The second tiles of both stages.
    pub two: SharedMemory<Chunk>,
    /// Rows of a tile.
    #[cube(comptime)]
    rows: usize,
    /// Channels of a tile.
    #[cube(comptime)]
    dim: usize,
    /// Warps of the block.
    #[cube(comptime)]
    warps: usize,
}

#[cube]
impl Pipeline {
    /// Empty stages of tiles of `rows` rows and `dim` channels. The block synchronises before they are used.
    pub fn new(
        #[comptime] rows: usize,
        #[comptime] dim: usize,
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
        let chunks = comptime!(2 * rows * dim / CHUNK);
        Pipeline {
            full,
            released,
            one: SharedMemory::<Chunk>::new_aligned(chunks, ALIGN),
            two: SharedMemory::<Chunk>::new_aligned(chunks, ALIGN),
            rows,
            dim,
            warps,
        }
    }

    /// The first chunk of the tiles of an iteration.
    pub fn place(&self, iteration: usize) -> usize {
        iteration % 2 * comptime!(self.rows * self.dim / CHUNK)
    }

    /// Starts the load of another tile, which the iteration waits for too: [`load_rows`] into its first chunk.
    pub fn load_also(
        &self,
        iteration: usize,
        source: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
        tile: &mut SharedMemory<Chunk>,
        #[comptime] rows: usize,
    ) {
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                let full = self.full.index(stage);
                load_rows(full, source, batch, head, first, tile, 0usize, rows, self.dim);
            }
        }
    }

    /// Starts the loads of an iteration's two tiles, rows from `first` on. `others` counts the bytes that
    /// [`Pipeline::load_also`] loads for the same iteration.
    pub fn load(
        &mut self,
        iteration: usize,
        one: &TensorMap<bf16, Tiled>,
        two: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
        others: u32,
    ) {
        let at = self.place(iteration);
        let (rows, dim) = comptime!((self.rows, self.dim));
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                let full = self.full.index(stage);
                full.arrive_and_expect_tx(1, comptime!(2 * bytes(rows, dim)) + others);
                load_rows(full, one, batch, head, first, &mut self.one, at, rows, dim);
                load_rows(full, two, batch, head, first, &mut self.two, at, rows, dim);
            }
        }
    }

    /// Waits for the tiles of an iteration.
    pub fn wait(&self, iteration: usize) {
        #[unroll]
        for stage in 0..2usize {
            if iteration % 2 == stage {
                self.full.index(stage).wait_parity((iteration / 2 % 2) as u32);
            }
        }
    }

    /// Tells that this warp no longer reads the tiles of an iteration. True in one unit once all warps have
    /// done so: the stage is free for the tiles of iteration + 2. Only products may read the tiles of a
    /// stage, and they have been waited for.
    pub fn release(&self, iteration: usize) -> bool {
        let mut last = false;
        if UNIT_POS_PLANE == 0 {
            let before = self.released[iteration % 2].fetch_add(1u32);
            last = before + 1 == (iteration as u32 / 2 + 1) * comptime!(self.warps as u32);
        }
        last
    }
}
