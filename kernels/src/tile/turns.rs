//! Sums over blocks in a fixed order: a block adds its part of a tile when its turn has come, and passes the
//! turn on. A block may only wait for blocks that have started before it.
//!
//! Parts go from shared memory to global memory by bulk copies (PTX ISA, "cp.reduce.async.bulk"), which one
//! thread starts and awaits. A copy's completion makes it visible to the copies of those who read the turn
//! afterwards, without a further fence.

use cubecl::prelude::*;

use super::Quad;
use super::asm::{emit, name_of};

/// Waits until `turns[at]` is `turn`.
#[cube]
pub fn wait_for_turn(turns: &Array<Atomic<u32>>, at: usize, turn: usize) {
    let mut place = Array::<usize>::new(1usize);
    let mut awaited = Array::<u32>::new(1usize);
    place[0] = at;
    awaited[0] = turn as u32;
    wait_for(turns, &place, &awaited);
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn wait_for(turns: &Array<Atomic<u32>>, at: &Array<usize>, turn: &Array<u32>) {
    intrinsic!(|scope| {
        let (turns, at, turn) =
            (name_of(&turns.expand), name_of(&at.expand), name_of(&turn.expand));
        let text = format!(
            "{{ uint32 found; do {{ asm volatile(\"ld.acquire.gpu.global.u32 %0, [%1];\\n\" : \"=r\"(found) : \
             \"l\"({turns} + {at}[0]) : \"memory\"); }} while (found != {turn}[0]); }}"
        );
        emit(scope, "turn", &text);
    })
}

/// Adds 1 to `turns[at]`, after everything that this thread has done.
#[cube]
pub fn pass_turn(turns: &Array<Atomic<u32>>, at: usize) {
    let mut place = Array::<usize>::new(1usize);
    place[0] = at;
    pass(turns, &place);
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn pass(turns: &Array<Atomic<u32>>, at: &Array<usize>) {
    intrinsic!(|scope| {
        let (turns, at) = (name_of(&turns.expand), name_of(&at.expand));
        let text = format!(
            "asm volatile(\"red.release.gpu.global.add.u32 [%0], 1;\\n\" : : \"l\"({turns} + {at}[0]) : \
             \"memory\");"
        );
        emit(scope, "turn passed", &text);
    })
}

/// Starts to store `tile`, of `bytes` bytes, to `sums` from index `at` on if `stores`, else to add it to what
/// is there.
#[cube]
pub fn start_add(
    tile: &SharedMemory<Quad>,
    sums: &Array<Quad>,
    at: usize,
    stores: bool,
    #[comptime] bytes: usize,
) {
    let mut place = Array::<usize>::new(1usize);
    place[0] = at;
    if stores {
        start_copy(tile, sums, &place, false, bytes);
    } else {
        start_copy(tile, sums, &place, true, bytes);
    }
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn start_copy(
    tile: &SharedMemory<Quad>,
    sums: &Array<Quad>,
    at: &Array<usize>,
    #[comptime] adds: bool,
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        let (tile, sums, at) = (name_of(&tile.expand), name_of(&sums.expand), name_of(&at.expand));
        let (reduce, operation) = if adds { (".reduce", ".add.f32") } else { ("", "") };
        let text = format!(
            "asm volatile(\"cp{reduce}.async.bulk.global.shared::cta.bulk_group{operation} [%0], [%1], %2;\\n\
             cp.async.bulk.commit_group;\\n\" : : \"l\"({sums} + {at}[0]), \
             \"r\"((uint32)__cvta_generic_to_shared({tile})), \"r\"({bytes}u) : \"memory\");"
        );
        emit(scope, "bulk copy", &text);
    })
}

/// Waits until this thread's copies have read their tiles and, if `complete`, have been performed.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
pub fn wait_for_adds(#[comptime] complete: bool) {
    intrinsic!(|scope| {
        let read = if complete { "" } else { ".read" };
        let text =
            format!("asm volatile(\"cp.async.bulk.wait_group{read} 0;\\n\" ::: \"memory\");");
        emit(scope, "copies", &text);
    })
}
