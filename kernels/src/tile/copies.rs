//! Copies of single chunks from global to shared memory that threads do not wait for (`cp.async`).

use cubecl::prelude::*;

use super::Chunk;
use super::asm::{emit, name_of};

/// Starts to copy a chunk to index `to` of `tile` from index `from` of `source`, or, unless it `exists`, zeros.
/// [`wait_for_chunks`] waits for this thread's copies.
#[cube]
pub fn copy_chunk(
    tile: &mut SharedMemory<Chunk>,
    to: usize,
    source: &Array<Chunk>,
    from: usize,
    exists: bool,
) {
    let mut places = Array::<usize>::new(2usize);
    places[0] = to;
    places[1] = from;
    let mut bytes = Array::<u32>::new(1usize);
    bytes[0] = select(exists, 16u32, 0u32);
    start_copy(tile, source, &places, &bytes);
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn start_copy(
    tile: &SharedMemory<Chunk>,
    source: &Array<Chunk>,
    places: &Array<usize>,
    bytes: &Array<u32>,
) {
    intrinsic!(|scope| {
        let (tile, source) = (name_of(&tile.expand), name_of(&source.expand));
        let (places, bytes) = (name_of(&places.expand), name_of(&bytes.expand));
        let text = format!(
            "asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16, %2;\\n\" : : \
             \"r\"((uint32)__cvta_generic_to_shared({tile} + {places}[0])), \
             \"l\"({source} + {places}[1]), \"r\"({bytes}[0]) : \"memory\");"
        );
        emit(scope, "copy", &text);
    })
}

/// Waits for all that the block has started to copy, for products of warpgroups to read, and synchronises.
#[cube]
pub fn finish_copies() {
    wait_for_chunks();
    sync_async_proxy_shared();
    sync_cube();
}

/// Waits until this thread's copies have been performed.
#[cube]
pub fn wait_for_chunks() {
    intrinsic!(|scope| {
        emit(scope, "copies", "asm volatile(\"cp.async.wait_all;\\n\" ::: \"memory\");");
    })
}
