//! Progress reports of long-running work. The caller decides how to show them.

/// Receives the progress of [`prepare`](crate::prepare), [`train_bpe`](crate::train_bpe) and
/// [`Loader::open`](crate::Loader::open). All methods do nothing by default.
pub trait Progress: Sync {
    /// A task starts: `task` describes it, `total` is how many bytes of text it will read, if known.
    fn start(&self, _task: &str, _total: Option<u64>) {}

    /// `bytes` more of the input have been read.
    fn advance(&self, _bytes: u64) {}

    /// The task that started last has ended; `summary` describes its result.
    fn finish(&self, _summary: &str) {}

    /// Whether the user asked to stop. `prepare` then saves its state and returns
    /// [`DataError::Interrupted`](crate::DataError::Interrupted).
    fn cancelled(&self) -> bool {
        false
    }
}

/// Reports nothing and is never cancelled.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {}
