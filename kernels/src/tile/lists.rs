//! Lists in shared memory, in which threads keep the few values that matter of many.

use cubecl::prelude::*;

use super::asm::{emit, name_of};

/// Two lists of each thread in shared memory, which share its slots: list 0 grows from the first slot on, list 1
/// from the last one back. Only their own thread uses them.
///
/// Slots are `threads` apart, so that a warp's accesses never conflict.
#[derive(CubeType)]
pub struct TwoLists {
    memory: SharedMemory<f32>,
    /// The address of the first slot.
    first: Array<u32>,
    /// The address of each list's next slot.
    next: Array<u32>,
    /// Slots per thread.
    #[cube(comptime)]
    slots: usize,
    /// Threads per block.
    #[cube(comptime)]
    threads: usize,
}

#[cube]
impl TwoLists {
    /// Empty lists.
    pub fn new(#[comptime] slots: usize, #[comptime] threads: usize) -> TwoLists {
        let memory = SharedMemory::<f32>::new(comptime!(slots * threads));
        let mut first = Array::<u32>::new(1usize);
        first[0] = UNIT_POS * 4;
        add_address(&memory, &mut first);
        let next = Array::<u32>::new(2usize);
        let mut lists = TwoLists { memory, first, next, slots, threads };
        lists.clear(0usize);
        lists.clear(1usize);
        lists
    }

    /// Empties a list.
    pub fn clear(&mut self, #[comptime] list: usize) {
        self.next[list] =
            self.first[0] + comptime!((list * (self.slots - 1) * self.threads * 4) as u32);
    }

    /// Whether both lists together can take `count` more values.
    pub fn have_room(&self, #[comptime] count: usize) -> bool {
        self.next[0] + comptime!(((count - 1) * self.threads * 4) as u32) <= self.next[1]
    }

    /// The number of values in a list.
    pub fn count(&self, #[comptime] list: usize) -> u32 {
        let stride = comptime!(self.threads as u32 * 4);
        let last = self.first[0] + comptime!(((self.slots - 1) * self.threads * 4) as u32);
        let mut bytes = self.next[0] - self.first[0];
        if comptime!(list == 1) {
            bytes = last - self.next[1];
        }
        bytes / stride
    }

    /// The value of a list at an index below the number of slots; of no meaning past the list's last.
    pub fn at(&self, index: u32, #[comptime] list: usize) -> f32 {
        let mut slot = index;
        if comptime!(list == 1) {
            slot = comptime!(self.slots as u32 - 1) - index;
        }
        self.memory[(slot * comptime!(self.threads as u32) + UNIT_POS) as usize]
    }

    /// Appends x to a list that has room, if it is above `bound`.
    pub fn push_above(&mut self, x: f32, bound: f32, #[comptime] list: usize) {
        let mut values = Array::<f32>::new(2usize);
        values[0] = x;
        values[1] = bound;
        let stride = comptime!(self.threads as i32 * 4);
        let step = comptime!(if list == 0 { stride } else { -stride });
        store_above(&mut self.next, &values, list, step);
    }
}

#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn add_address(memory: &SharedMemory<f32>, address: &mut Array<u32>) {
    intrinsic!(|scope| {
        let (memory, address) = (name_of(&memory.expand), name_of(&address.expand));
        let text = format!("{address}[0] += (uint32)__cvta_generic_to_shared({memory});");
        emit(scope, "address", &text);
    })
}

/// Three instructions without a branch; the compiler would take several more for the address.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn store_above(
    next: &mut Array<u32>,
    values: &Array<f32>,
    #[comptime] list: usize,
    #[comptime] step: i32,
) {
    intrinsic!(|scope| {
        let (next, values) = (name_of(&next.expand), name_of(&values.expand));
        let text = format!(
            "asm volatile(\"{{\\n.reg .pred above;\\nsetp.gt.f32 above, %1, %2;\\n\
             @above st.shared.f32 [%0], %1;\\n@above add.s32 %0, %0, {step};\\n}}\\n\" : \
             \"+r\"({next}[{list}]) : \"f\"({values}[0]), \"f\"({values}[1]) : \"memory\");"
        );
        emit(scope, "store above", &text);
    })
}
