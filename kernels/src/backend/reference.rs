//! References in place of kernels: the one switch, [`with_reference`].
//!
//! An operation runs the device's kernel if there is one for its inputs, else its reference. Under
//! [`with_reference`] every operation of the thread runs its reference, and [`OpBackend::into_cuda`]
//! returns `None`, so that code specific to CUDA takes the general path. Operations that references use
//! keep their kernels ([`Op::PART_OF_REFERENCES`]). Devices check [`kernels_allowed`] before they run a
//! kernel; nothing else depends on the switch.

use std::cell::Cell;

use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, TensorMetadata};

use super::{Op, OpBackend, StateOp};

thread_local! {
    static REFERENCES_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with every operation of this thread running its reference, on any device: the slow, obvious
/// path that kernels are compared with. Kernels are re-enabled afterwards, also if `f` panics.
pub fn with_reference<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            REFERENCES_ONLY.set(self.0);
        }
    }
    let _restore = Restore(REFERENCES_ONLY.replace(true));
    f()
}

/// Whether operations of this thread may run their kernels: not under [`with_reference`].
pub(crate) fn kernels_allowed() -> bool {
    !REFERENCES_ONLY.get()
}

/// As [`run_reference`], from the state `before` the first token; also the state after the last. Neither has a
/// gradient.
pub(super) fn run_reference_from<B: OpBackend, O: StateOp<N>, const N: usize>(
    op: &O,
    inputs: [FloatTensor<B>; N],
    ints: &[IntTensor<B>],
    before: FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    #[cfg(test)]
    crate::testing::served::by_reference::<O>();
    let dtype = inputs[0].dtype();
    let before = B::float_detach(before);
    let [output, after] = op.reference_from::<B>(inputs.map(B::to_f32), ints, before);
    let output = if dtype == DType::BF16 { B::float_cast(output, dtype.into()) } else { output };
    [output, B::float_detach(after)]
}

/// Runs the reference of `op`, in f32 if inputs are bf16; the result has the first input's type.
pub(super) fn run_reference<B: OpBackend, O: Op<N>, const N: usize>(
    op: &O,
    inputs: [FloatTensor<B>; N],
    ints: &[IntTensor<B>],
) -> FloatTensor<B> {
    #[cfg(test)]
    crate::testing::served::by_reference::<O>();
    let dtype = inputs[0].dtype();
    if inputs.iter().all(|x| x.dtype() != DType::BF16) {
        return op.reference::<B>(inputs, ints);
    }
    let result = op.reference::<B>(inputs.map(B::to_f32), ints);
    if dtype == DType::BF16 { B::float_cast(result, dtype.into()) } else { result }
}
