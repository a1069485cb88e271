//! Blocks whose warpgroups have different roles: producers that load tiles with few registers, consumers that
//! compute with many (PTX ISA, "setmaxnreg").

use burn::tensor::bf16;
use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::asm::emit;
use super::{ALIGN, CHUNK, Chunk, bytes, load_rows, wait_parity};

/// Declares that a multiprocessor runs `blocks` blocks of `threads` threads of the kernel named `kernel` at a time, at
/// least: the compiler limits registers such that they fit, and without such a bound it ignores [`set_registers`].
/// cubecl states none, so the kernel is declared again, inside itself.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn blocks_per_multiprocessor(
    #[comptime] kernel: String,
    #[comptime] threads: usize,
    #[comptime] blocks: usize,
) {
    intrinsic!(|scope| {
        let text = format!(
            "__global__ __launch_bounds__({threads}, {blocks}) decltype({kernel}) {kernel};"
        );
        emit(scope, "blocks per multiprocessor", &text);
    })
}

/// Sets the registers per thread of this warpgroup to a multiple of 8, more or fewer than it has. All its
/// warps execute it, after [`blocks_per_multiprocessor`].
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn set_registers(#[comptime] count: usize, #[comptime] more: bool) {
    intrinsic!(|scope| {
        let way = if more { "inc" } else { "dec" };
        let text = format!("asm volatile(\"setmaxnreg.{way}.sync.aligned.u32 {count};\\n\");");
        emit(scope, "registers", &text);
    })
}

/// A barrier of the block's first `threads` threads.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn sync_first_threads(#[comptime] threads: usize) {
    intrinsic!(|scope| {
        let text = format!("asm volatile(\"bar.sync 1, {threads};\\n\" ::: \"memory\");");
        emit(scope, "barrier", &text);
    })
}

/// Stages of one tile each: a producer loads some while consumers use others.
#[derive(CubeType)]
pub struct Ring {
    full: Sequence<Shared<Barrier>>,
    empty: Sequence<Shared<Barrier>>,
    /// The tiles of all stages.
    pub tiles: SharedMemory<Chunk>,
    #[cube(comptime)]
    stages: usize,
    #[cube(comptime)]
    rows: usize,
    #[cube(comptime)]
    dim: usize,
}

#[cube]
impl Ring {
    /// Two empty stages for tiles of `rows` rows and `dim` channels. A stage is full after its load and
    /// `arrivals − 1` further arrivals, and empty once `consumers` have released it. The block must
    /// synchronise before using it.
    pub fn new(
        #[comptime] rows: usize,
        #[comptime] dim: usize,
        #[comptime] arrivals: u32,
        #[comptime] consumers: u32,
    ) -> Ring {
        Ring::of_stages(2usize, rows, dim, arrivals, consumers)
    }

    /// As [`Ring::new`], with `stages` of them.
    pub fn of_stages(
        #[comptime] stages: usize,
        #[comptime] rows: usize,
        #[comptime] dim: usize,
        #[comptime] arrivals: u32,
        #[comptime] consumers: u32,
    ) -> Ring {
        let mut full = Sequence::<Shared<Barrier>>::new();
        let mut empty = Sequence::<Shared<Barrier>>::new();
        #[unroll]
        for _ in 0..stages {
            full.push(Barrier::shared(arrivals, UNIT_POS == 0));
            empty.push(Barrier::shared(consumers, UNIT_POS == 0));
        }
        let chunks = comptime!(stages * rows * dim / CHUNK);
        let tiles = SharedMemory::<Chunk>::new_aligned(chunks, ALIGN);
        Ring { full, empty, tiles, stages, rows, dim }
    }

    /// The index of the first chunk of an iteration's tile.
    pub fn stage_offset(&self, iteration: usize) -> usize {
        iteration % self.stages * comptime!(self.rows * self.dim / CHUNK)
    }

    /// Waits until the iteration's stage is empty.
    pub fn wait_empty(&self, iteration: usize) {
        if iteration >= self.stages {
            #[unroll]
            for stage in 0..self.stages {
                if iteration % self.stages == stage {
                    wait_parity(self.empty.index(stage), (iteration / self.stages + 1) as u32 % 2);
                }
            }
        }
    }

    /// Starts the load of an iteration's tile, rows from `first` on, into an empty stage.
    pub fn load(
        &mut self,
        iteration: usize,
        source: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
    ) {
        self.expect(iteration, comptime!(bytes(self.rows, self.dim)));
        self.load_part(iteration, source, batch, head, first, 0usize, self.rows);
    }

    /// Arrives at the iteration's stage, into which `count` bytes will be loaded by [`Ring::load_part`].
    pub fn expect(&self, iteration: usize, count: u32) {
        #[unroll]
        for stage in 0..self.stages {
            if iteration % self.stages == stage {
                self.full.index(stage).arrive_and_expect_tx(1, count);
            }
        }
    }

    /// Starts the load of `rows` rows from `first` on into an iteration's tile, `at` chunks after its start.
    pub fn load_part(
        &mut self,
        iteration: usize,
        source: &TensorMap<bf16, Tiled>,
        batch: usize,
        head: usize,
        first: usize,
        #[comptime] at: usize,
        #[comptime] rows: usize,
    ) {
        let at = self.stage_offset(iteration) + at;
        let dim = comptime!(self.dim);
        #[unroll]
        for stage in 0..self.stages {
            if iteration % self.stages == stage {
                let full = self.full.index(stage);
                load_rows(full, source, batch, head, first, &mut self.tiles, at, rows, dim);
            }
        }
    }

    /// Arrives at the iteration's stage, for what a stage holds beside its tile.
    pub fn arrive(&self, iteration: usize) {
        #[unroll]
        for stage in 0..self.stages {
            if iteration % self.stages == stage {
                self.full.index(stage).arrive();
            }
        }
    }

    /// Waits for the tile of an iteration.
    pub fn wait(&self, iteration: usize) {
        #[unroll]
        for stage in 0..self.stages {
            if iteration % self.stages == stage {
                wait_parity(self.full.index(stage), (iteration / self.stages % 2) as u32);
            }
        }
    }

    /// Releases the tile of an iteration for this consumer.
    pub fn release(&self, iteration: usize) {
        #[unroll]
        for stage in 0..self.stages {
            if iteration % self.stages == stage {
                self.empty.index(stage).arrive();
            }
        }
    }
}

/// Tickets that one thread takes and all roles of a block read. Two are kept: the one in work and the next.
#[derive(CubeType)]
pub struct Tickets {
    /// The ticket in each slot.
    pub taken: SharedMemory<u32>,
    published: Sequence<Shared<Barrier>>,
}

#[cube]
impl Tickets {
    /// No tickets. The block must synchronise before using it.
    pub fn new() -> Tickets {
        let mut published = Sequence::<Shared<Barrier>>::new();
        #[unroll]
        for _ in 0..2usize {
            published.push(Barrier::shared(1u32, UNIT_POS == 0));
        }
        Tickets { taken: SharedMemory::<u32>::new(2usize), published }
    }

    /// Publishes the ticket that is the `count`-th, from 0 on. All roles have read the one two before it.
    pub fn publish(&mut self, count: usize, ticket: usize) {
        self.taken[count % 2] = ticket as u32;
        #[unroll]
        for slot in 0..2usize {
            if count % 2 == slot {
                self.published.index(slot).arrive();
            }
        }
    }

    /// Waits for the `count`-th ticket, for a whole warp or one of its lanes.
    pub fn wait(&self, count: usize) -> usize {
        #[unroll]
        for slot in 0..2usize {
            if count % 2 == slot {
                wait_parity(self.published.index(slot), (count / 2 % 2) as u32);
            }
        }
        self.taken[count % 2] as usize
    }
}
