//! How a benchmark tells what it is doing.

/// Hears of a benchmark's progress.
pub trait Progress {
    /// `total` measurements begin, each of which is one of `unit`: `steps`, or nothing to say.
    fn start(&self, total: usize, unit: &str);
    /// The measurement of `what` begins.
    fn measuring(&self, what: &str);
    /// One measurement more is done.
    fn done(&self);
    /// All are done.
    fn finish(&self);
}
