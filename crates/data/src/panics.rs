//! Turns the panics of a dependency into errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether the panics of this thread are caught and become errors.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// The work panicked. The panic's message is about the code that failed, not about the input, so it is
/// only logged for debugging.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Panicked;

/// Runs `work`, and prints nothing if it panics. `work` must not leave anything half-changed that is used
/// afterwards.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                previous(info);
            }
        }));
    });
    let before = CAUGHT.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    result.map_err(|panic| {
        tracing::debug!("caught a panic: {}", message(&*panic));
        Panicked
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(without_panic(|| 3), Ok(3));
        assert_eq!(without_panic(|| panic!("value {}", 7)), Err::<(), _>(Panicked));
        // Other panics still unwind.
        assert!(panic::catch_unwind(|| panic!("printed")).is_err());
    }
}
