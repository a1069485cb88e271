//! Votes of warpgroups, by which all their warps leave out a product that would add nothing (PTX ISA, "bar.red").
//!
//! Barrier 0 is that of the block and barrier 1 that of its first threads; warpgroups have those from
//! [`FIRST_BARRIER`] on.

use cubecl::prelude::*;

use super::Accumulator;
use super::asm::{emit, name_of};
use super::warpgroup::GROUP_THREADS;

/// The barrier of the block's first warpgroup.
const FIRST_BARRIER: u32 = 2;

/// Whether an element of this warpgroup's accumulator, in the rows of any of its warps, is not 0. The warps wait for
/// one another.
#[cube]
pub fn any_nonzero(acc: &Accumulator, group: usize) -> bool {
    let mut value = Array::<u32>::new(1usize);
    value[0] = 0u32;
    join_bits(acc, &mut value);
    any(&mut value, group as u32 + FIRST_BARRIER, GROUP_THREADS)
}

/// Whether `value` is not 0 in one of the `threads` threads of a barrier.
#[cube]
fn any(value: &mut Array<u32>, barrier: u32, #[comptime] threads: usize) -> bool {
    let mut id = Array::<u32>::new(1usize);
    id[0] = barrier;
    replace_by_any(value, &id, threads);
    // The shuffle tells the compiler that the value is warp-uniform: products in a branch that might diverge would
    // run one after the other.
    plane_shuffle(value[0], 0u32) != 0
}

/// Sets `value` to the bits that are set in some element, less the signs: 0 if all elements are 0.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn join_bits(acc: &Accumulator, value: &mut Array<u32>) {
    intrinsic!(|scope| {
        let value = name_of(&value.expand);
        let names = acc.iter_cloned().map(|x| name_of(&x.expand));
        let elements = names.flat_map(|name| {
            (0..4).map(move |i| format!("reinterpret_cast<uint32*>({name})[{i}]"))
        });
        let elements: Vec<String> = elements.collect();
        let text = format!("{value}[0] = ({}) & 0x7fffffffu;", elements.join(" | "));
        emit(scope, "bits of all elements", &text);
    })
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn replace_by_any(value: &mut Array<u32>, barrier: &Array<u32>, #[comptime] threads: usize) {
    intrinsic!(|scope| {
        let (value, barrier) = (name_of(&value.expand), name_of(&barrier.expand));
        let text = format!(
            "asm volatile(\"{{\\n.reg .pred own, any;\\nsetp.ne.b32 own, %0, 0;\\n\
             bar.red.or.pred any, %1, {threads}, own;\\nselp.b32 %0, 1, 0, any;\\n}}\\n\" : \
             \"+r\"({value}[0]) : \"r\"({barrier}[0]) : \"memory\");"
        );
        emit(scope, "vote", &text);
    })
}
