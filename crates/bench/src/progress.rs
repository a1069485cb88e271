//! Progress of a benchmark.

/// Receives a benchmark's progress.
pub trait Progress {
    /// `total` measurements begin, counted in `unit`: `steps`, or empty.
    fn start(&self, total: usize, unit: &str);
    /// The measurement of `what` begins.
    fn measuring(&self, what: &str);
    /// One more measurement is done.
    fn done(&self);
    /// All are done.
    fn finish(&self);
}
