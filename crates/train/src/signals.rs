//! Ctrl-C and TERM end a run cleanly: the current step finishes, then a checkpoint is written.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Set once the process is asked to stop.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// A flag that only [`StopFlag::raise`] sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag that the first Ctrl-C or TERM sets; the second ends the process at once, with exit
    /// code 130.
    ///
    /// # Errors
    /// When the system refuses to register the handlers.
    pub fn install() -> io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // Order matters: on the first signal the flag is still down, so this does nothing; the next
            // handler raises it.
            flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop.0))?;
            flag::register(signal, Arc::clone(&stop.0))?;
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
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert!(stop.is_raised());
    }

    #[test]
    fn clones_share_the_flag() {
        let stop = StopFlag::new();
        let other = stop.clone();
        stop.raise();
        assert!(other.is_raised());
    }
}
