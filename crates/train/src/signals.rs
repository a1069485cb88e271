//! Ctrl-C and TERM are answered at once, and end a command cleanly: training writes a checkpoint first; an
//! evaluation, whose finished samples are on disk, ends where it is.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
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
pub struct StopFlag {
    raised: Arc<AtomicBool>,
    /// What to say if the process ends now; `None` while it must not.
    farewell: Arc<Mutex<Option<String>>>,
}

impl StopFlag {
    /// A flag that only [`StopFlag::raise`] sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag that the first Ctrl-C or TERM sets; the second ends the process at once, with its exit code
    /// (see [`exit_code`]).
    ///
    /// The first is answered at once on stderr: within [`StopFlag::interruptible`] the process ends, else the
    /// line is `announcement`, which says what the process finishes before it ends.
    ///
    /// # Errors
    /// When the system refuses to register the handlers or to start the thread that answers.
    pub fn install(announcement: &'static str) -> io::Result<Self> {
        Self::install_with(Some(announcement))
    }

    /// As [`StopFlag::install`], but the first signal is not announced, because another process does.
    ///
    /// # Errors
    /// As [`StopFlag::install`].
    pub fn install_quietly() -> io::Result<Self> {
        Self::install_with(None)
    }

    fn install_with(announcement: Option<&'static str>) -> io::Result<Self> {
        let stop = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // Order matters: on the first signal the flag is still down, so this does nothing; the next
            // handlers raise it.
            let code = i32::from(exit_code_of(signal));
            flag::register_conditional_shutdown(signal, code, Arc::clone(&stop.raised))?;
            flag::register(signal, Arc::clone(&stop.raised))?;
            let receive = move || {
                let _ = RECEIVED.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
            };
            // SAFETY: an atomic exchange is safe in a signal handler.
            unsafe { low_level::register(signal, receive)? };
        }
        // Last, so that the flag is up when the thread wakes.
        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let answering = stop.clone();
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            if signals.forever().next().is_some() {
                answering.answer(announcement);
            }
        })?;
        Ok(stop)
    }

    /// Calls `work`, which must change nothing outside this process: a signal that arrives meanwhile ends
    /// the process at once, with its exit code, after the line `stopped: {farewell}` on stderr.
    pub fn interruptible<T>(&self, farewell: impl Display, work: impl FnOnce() -> T) -> T {
        self.with_farewell(Some(farewell.to_string()), work)
    }

    /// Calls `work`, a part of [`StopFlag::interruptible`] work that writes files: a signal that arrives
    /// meanwhile only raises the flag, and the process ends when `work` returns.
    pub fn uninterruptible<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_farewell(None, work)
    }

    fn with_farewell<T>(&self, farewell: Option<String>, work: impl FnOnce() -> T) -> T {
        struct Restore<'a>(&'a StopFlag, Option<String>);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.replace_farewell(self.1.take());
            }
        }
        let _restore = Restore(self, self.replace_farewell(farewell));
        work()
    }

    /// Ends the process instead if a signal has arrived and the new farewell allows it.
    fn replace_farewell(&self, new: Option<String>) -> Option<String> {
        let mut now = self.farewell();
        if let (Some(farewell), Some(code), true) = (&new, exit_code(), self.is_raised()) {
            end(code, farewell);
        }
        std::mem::replace(&mut now, new)
    }

    /// Answers the first signal.
    fn answer(&self, announcement: Option<&str>) {
        // Held until the process has ended, so that `work` cannot return and its caller write files.
        let farewell = self.farewell();
        match (&*farewell, exit_code()) {
            (Some(farewell), Some(code)) => end(code, farewell),
            _ => {
                if let Some(announcement) = announcement {
                    say(&format!("{announcement}; Ctrl-C again ends it at once"));
                }
            }
        }
    }

    fn farewell(&self) -> MutexGuard<'_, Option<String>> {
        self.farewell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a stop was requested.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// Requests a stop.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Relaxed);
    }
}

/// Ends the process without unwinding: other threads may be in the middle of their work.
fn end(code: u8, farewell: &str) -> ! {
    say(&format!("stopped: {farewell}"));
    low_level::exit(i32::from(code))
}

/// Writes a line to stderr, over the rest of a progress bar and the terminal's `^C`.
fn say(line: &str) {
    let mut stderr = io::stderr();
    let clear = if stderr.is_terminal() { "\r\x1b[2K" } else { "" };
    // A closed stderr must not keep the process from ending.
    let _ = writeln!(stderr, "{clear}{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_raises_the_flag() {
        let stop = StopFlag::install("stopping").unwrap();
        assert!(!stop.is_raised());
        assert_eq!(exit_code(), None);
        low_level::raise(SIGTERM).unwrap();
        assert!(stop.is_raised());
        assert_eq!(exit_code(), Some(143));
    }

    #[test]
    fn work_that_nobody_interrupts_returns_its_result() {
        let stop = StopFlag::new();
        // A flag raised by the program itself ends no process.
        stop.raise();
        let result = stop.interruptible("the reason", || {
            stop.uninterruptible(|| assert_eq!(*stop.farewell(), None));
            assert_eq!(stop.farewell().as_deref(), Some("the reason"));
            42
        });
        assert_eq!(result, 42);
        assert_eq!(*stop.farewell(), None);
        let panicked = std::panic::AssertUnwindSafe(|| stop.interruptible("", || panic!("a bug")));
        assert!(std::panic::catch_unwind(panicked).is_err());
        assert_eq!(*stop.farewell(), None);
    }

    #[test]
    fn clones_share_the_flag() {
        let stop = StopFlag::new();
        let other = stop.clone();
        stop.raise();
        assert!(other.is_raised());
    }
}
