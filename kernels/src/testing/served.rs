//! A record of whether operations ran kernels or references.

use std::any::type_name;
use std::cell::RefCell;

/// The operations, by the names of their types.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Those that ran a kernel.
    pub kernels: Vec<&'static str>,
    /// Those that ran their reference.
    pub references: Vec<&'static str>,
}

thread_local! {
    static SERVED: RefCell<Served> = RefCell::default();
}

/// An operation of this thread ran a kernel.
pub fn by_kernel<O>() {
    SERVED.with_borrow_mut(|served| served.kernels.push(type_name::<O>()));
}

/// An operation of this thread ran its reference.
pub fn by_reference<O>() {
    SERVED.with_borrow_mut(|served| served.references.push(type_name::<O>()));
}

/// Runs `f`; returns its result, and what its operations ran.
pub fn served<T>(f: impl FnOnce() -> T) -> (T, Served) {
    SERVED.take();
    let result = f();
    (result, SERVED.take())
}
