//! Rows of vectors between global and shared memory, by all threads of a block.

use burn::tensor::bf16;
use cubecl::prelude::*;

use super::copies::{copy_chunk, wait_for_chunks};
use super::matrix::Matrix;
use super::product::THREADS;
use super::{CHUNK, Chunk};

/// Rounds in which a block's threads pass over the chunks of `rows` rows of `columns` columns.
pub const fn rounds(rows: usize, columns: usize) -> usize {
    (rows * columns / CHUNK).div_ceil(THREADS)
}

/// A thread's chunk of a round.
#[derive(CubeType)]
pub struct Own {
    /// The row.
    pub row: usize,
    /// Its place in the row.
    pub chunk: usize,
    /// Whether there is one.
    pub exists: bool,
}

#[cube]
impl Own {
    /// Of `rows` rows of `columns` columns.
    pub fn new(
        #[comptime] round: usize,
        #[comptime] rows: usize,
        #[comptime] columns: usize,
    ) -> Own {
        let index = UNIT_POS as usize + comptime!(round * THREADS);
        let count = comptime!(rows * columns / CHUNK);
        Own {
            row: index / comptime!(columns / CHUNK),
            chunk: index % comptime!(columns / CHUNK),
            exists: comptime!(count.is_multiple_of(THREADS)) || index < count,
        }
    }
}

/// Starts to read rows into registers: `columns` columns of those before `count`, at least one, `stride` chunks apart,
/// from chunk `base` on. The others are those of the last row before `count`.
///
/// No read depends on a condition: the compiler would join its value with the other one, and wait for it, at once.
#[cube]
pub fn fetch(
    source: &Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) -> Array<Chunk> {
    let mut own = Array::<Chunk>::new(comptime!(rounds(rows, columns)));
    fetch_to(&mut own, source, base, stride, count, rows, columns);
    own
}

/// As [`fetch`], to these registers.
#[cube]
pub fn fetch_to(
    own: &mut Array<Chunk>,
    source: &Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        own[round] = source[base + min(at.row, count - 1) * stride + at.chunk];
    }
}

/// Writes fetched rows to shared memory; the rows from `count` on are 0.
#[cube]
pub fn put(
    arena: &mut SharedMemory<Chunk>,
    own: &Array<Chunk>,
    count: usize,
    #[comptime] to: Matrix,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        if at.exists {
            let place = to.at + at.row * to.row + at.chunk;
            if at.row < count {
                arena[place] = own[round];
            } else {
                arena[place] = Chunk::cast_from(0f32);
            }
        }
    }
}

/// As [`put`], each row times the product of its factors, rounded.
#[cube]
pub fn put_scaled(
    arena: &mut SharedMemory<Chunk>,
    own: &Array<Chunk>,
    count: usize,
    factors: &SharedMemory<f32>,
    more: &SharedMemory<f32>,
    #[comptime] to: Matrix,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        if at.exists {
            let factor = select(at.row < count, factors[at.row] * more[at.row], 0f32);
            let value = own[round];
            let mut scaled = Chunk::cast_from(0f32);
            #[unroll]
            for i in 0..CHUNK {
                scaled[i] = bf16::cast_from(f32::cast_from(value[i]) * factor);
            }
            arena[to.at + at.row * to.row + at.chunk] = scaled;
        }
    }
}

/// Starts to copy rows from global to shared memory: `columns` columns of those before `count`, `stride` chunks apart,
/// from chunk `base` on; the others are 0. [`finish_loads`] waits for them.
#[cube]
pub fn start_load(
    arena: &mut SharedMemory<Chunk>,
    source: &Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] to: Matrix,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        if at.exists {
            let from = base + min(at.row, count - 1) * stride + at.chunk;
            copy_chunk(arena, to.at + at.row * to.row + at.chunk, source, from, at.row < count);
        }
    }
}

/// Copies rows in shared memory. Each thread copies the chunks that it loads.
#[cube]
pub fn copy_rows(
    arena: &mut SharedMemory<Chunk>,
    #[comptime] from: Matrix,
    #[comptime] to: Matrix,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        if at.exists {
            arena[to.at + at.row * to.row + at.chunk] =
                arena[from.at + at.row * from.row + at.chunk];
        }
    }
}

/// Waits for what the block has started to load, and synchronises.
#[cube]
pub fn finish_loads() {
    wait_for_chunks();
    sync_cube();
}

/// Writes the rows before `count` from shared to global memory, `stride` chunks apart, from chunk `base` on.
#[cube]
pub fn store(
    arena: &SharedMemory<Chunk>,
    target: &mut Array<Chunk>,
    base: usize,
    stride: usize,
    count: usize,
    #[comptime] from: Matrix,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    #[unroll]
    for round in 0..comptime!(rounds(rows, columns)) {
        let at = Own::new(round, rows, columns);
        if at.exists && at.row < count {
            target[base + at.row * stride + at.chunk] =
                arena[from.at + at.row * from.row + at.chunk];
        }
    }
}
