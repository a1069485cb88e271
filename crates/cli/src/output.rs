//! What commands print. The reader may be gone, or its disk full, where `println!` and `eprintln!` panic.

use std::fmt;
use std::io::{self, ErrorKind, Write};

use anyhow::{Result, anyhow};

/// The exit code that a shell gives of a program that SIGPIPE ended.
pub const CLOSED: u8 = 141;

/// The reader of stdout has closed it, as `head` does when it has enough.
#[derive(Debug)]
pub struct ClosedStdout;

impl fmt::Display for ClosedStdout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stdout is closed")
    }
}

impl std::error::Error for ClosedStdout {}

/// Prints text to stdout.
///
/// # Errors
/// [`ClosedStdout`], with which the process ends quietly, and any other reason why stdout cannot be written.
pub fn print(text: fmt::Arguments<'_>) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_fmt(text).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => ClosedStdout.into(),
        _ => anyhow!("cannot write to stdout: {error}"),
    })
}

/// Prints a line to stderr, if someone reads it.
pub fn print_to_stderr(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// [`print()`] of a line, with the arguments of `println!`.
macro_rules! outln {
    ($($text:tt)+) => {
        $crate::output::print(format_args!("{}\n", format_args!($($text)+)))
    };
}

pub(crate) use outln;
