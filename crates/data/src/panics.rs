//! Turns the panics of a dependency into errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether the panics of this thread are caught and become errors.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. If it panics, returns the panic's message, and nothing is printed. `work` must not
/// leave anything half-changed that is used afterwards.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
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
    result.map_err(|panic| message(&*panic))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
    // One line: assertions print their values below.
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(without_panic(|| 3), Ok(3));
        let failed = without_panic(|| panic!("value {}\nmore", 7));
        assert_eq!(failed, Err::<(), _>("value 7".into()));
        // Other panics still unwind.
        assert!(panic::catch_unwind(|| panic!("printed")).is_err());
    }
}
