//! Ctrl-C and TERM end a run cleanly: the current step finishes, then a checkpoint is written.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// The first signal that asked this process to stop; 0 before.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// The exit code of a process that stopped because it was asked to: 130 after Ctrl-C, 143 after TERM, as
/// shells report processes that these signals end. `None` if it was not asked to.
pub fn exit_code() -> Option<u8> {
    match RECEIVED.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(exit_code_of(signal)),
    }
}

fn exit_code_of(signal: i32) -> u8 {
    128 + signal as u8
}

/// Set once the process is asked to stop.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that only [`StopFlag::raise`] sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag that the first Ctrl-C or TERM sets; the second ends the process at once, with its exit code
    /// (see [`exit_code`]).
    ///
    /// # Errors
    /// When the system refuses to register the handlers.
    pub fn install() -> io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // Order matters: on the first signal the flag is still down, so this does nothing; the next
            // handlers raise it.
            let code = i32::from(exit_code_of(signal));
            flag::register_conditional_shutdown(signal, code, Arc::clone(&stop.0))?;
            flag::register(signal, Arc::clone(&stop.0))?;
            let receive = move || {
                let _ = RECEIVED.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
            };
            // SAFETY: an atomic exchange is safe in a signal handler.
            unsafe { low_level::register(signal, receive)? };
        }
        Ok(stop)
    }

    /// Whether a stop was requested.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The flag itself, for code that polls it.
    pub fn as_atomic(&self) -> &AtomicBool {
        &self.0
    }

    /// Requests a stop.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_raises_the_flag() {
        let stop = StopFlag::install().unwrap();
        assert!(!stop.is_raised());
        assert_eq!(exit_code(), None);
        low_level::raise(SIGTERM).unwrap();
        assert!(stop.is_raised());
        assert_eq!(exit_code(), Some(143));
    }

    #[test]
    fn clones_share_the_flag() {
        let stop = StopFlag::new();
        let other = stop.clone();
        stop.raise();
        assert!(other.is_raised());
    }
}
