//! Several processes that take the samples of one evaluation together.
//!
//! All build the same batches. Rank r takes the r-th of every round of as many batches as there are ranks; then all
//! exchange what they have, and rank 0 alone writes the files, in the order of the batches. So the files do not depend
//! on the number of ranks.

use std::error::Error;

use crate::EvalError;
use crate::suite::RunContext;

/// Sends this rank's message to all; returns the messages of all ranks, in their order.
pub type Exchange<'a> = dyn Fn(Vec<u8>) -> Result<Vec<Vec<u8>>, Box<dyn Error + Send + Sync>> + 'a;

/// The ranks of an evaluation, and which of them this process is.
#[derive(Clone, Copy)]
pub struct Ranks<'a> {
    /// This rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// The connection. All ranks call it equally often.
    pub exchange: &'a Exchange<'a>,
}

impl Ranks<'_> {
    /// A single rank.
    pub const ALONE: Ranks<'static> =
        Ranks { rank: 0, size: 1, exchange: &|message| Ok(vec![message]) };

    /// Whether this is rank 0, which alone writes files.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// What rank 0 says.
    ///
    /// # Errors
    /// [`EvalError::Lost`] when a rank has ended.
    pub fn of_first(&self, own: bool) -> Result<bool, EvalError> {
        let all =
            (self.exchange)(vec![u8::from(own)]).map_err(|source| EvalError::Lost { source })?;
        Ok(all[0] == [1])
    }

    /// What all ranks have done, in their order, and the first failure; a rank that failed has done nothing. `stopped`
    /// is what this process says if a stop request ends it here.
    ///
    /// # Errors
    /// [`EvalError::Lost`] when a rank has ended.
    pub(crate) fn gather(
        &self,
        own: Result<Vec<u8>, EvalError>,
        context: &RunContext<'_>,
        stopped: &EvalError,
    ) -> Result<(Vec<Vec<u8>>, Option<EvalError>), EvalError> {
        const DONE: u8 = 0;
        const FAILED: u8 = 1;
        let message = match &own {
            Ok(done) => [&[DONE], &done[..]].concat(),
            Err(error) => [&[FAILED], error.to_string().as_bytes()].concat(),
        };
        let exchanged = context.interruptible(stopped, || (self.exchange)(message));
        let mut all = exchanged.map_err(|source| EvalError::Lost { source })?;
        let mut failure = own.err();
        for (rank, message) in all.iter_mut().enumerate() {
            if message.first() == Some(&DONE) {
                message.remove(0);
                continue;
            }
            let text = std::mem::take(message);
            let reason = String::from_utf8_lossy(text.get(1..).unwrap_or_default()).into_owned();
            failure.get_or_insert(EvalError::Rank { rank, reason });
        }
        Ok((all, failure))
    }
}
