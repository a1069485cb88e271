//! Training over several GPUs, one process each: who the ranks are, and how they talk.
//!
//! A rank is one process with one GPU. All ranks hold the whole model. A step's rows are divided over the ranks
//! ([`World::part`]), or over groups of ranks that share them ([`World::groups`]). Each gradient is summed to the rank
//! that owns its parameter ([`owners`]), the owner alone keeps the parameter's optimiser state, updates it, and sends
//! the new value to the others (ZeRO stage 1 by whole parameters; Rajbhandari et al., 2020).
//!
//! [`Collective`] is what training needs of the ranks' connection. [`Nccl`] moves tensors between GPUs, and [`Store`]
//! small messages over TCP, by which ranks also notice that another one has ended. [`Launch`] starts the ranks of one
//! machine.

mod communicator;
mod environment;
mod facts;
mod launch;
#[cfg(test)]
pub(crate) mod loopback;
mod nccl;
pub mod owners;
mod store;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::ops::FloatTensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::ops::all_to_all::Peers;

pub use communicator::{NcclError, version as nccl_version};
pub use environment::{Environment, EnvironmentError};
pub use facts::Facts;
pub(crate) use facts::check_equal;
pub use launch::{LOST_RANK, Launch, LaunchError, RankFailure, follow_launcher};
pub use nccl::Nccl;
pub use store::{Store, StoreOptions};

/// The ranks of a run, and which of them this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// This rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
}

impl World {
    /// A single rank.
    pub const ALONE: World = World { rank: 0, size: 1 };

    /// Whether there is no other rank.
    pub fn is_alone(self) -> bool {
        self.size == 1
    }

    /// Whether this is rank 0, which alone writes the run's folder.
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// The groups of `shared` consecutive ranks that share rows, and which of them this rank is in.
    pub fn groups(self, shared: usize) -> World {
        World { rank: self.rank / shared, size: self.size / shared }
    }

    /// The ranks of this rank's group of `shared` consecutive ranks.
    pub fn group(self, shared: usize) -> Range<usize> {
        let first = self.rank / shared * shared;
        first..first + shared
    }

    /// This rank's part of `rows` rows: contiguous, and of equal size on all ranks.
    ///
    /// # Panics
    /// When the rows do not divide by the number of ranks.
    pub fn part(self, rows: usize) -> Range<usize> {
        assert!(rows.is_multiple_of(self.size), "{rows} rows for {} ranks", self.size);
        let part = rows / self.size;
        self.rank * part..(self.rank + 1) * part
    }
}

/// Why ranks cannot work together, or no longer do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A rank has ended, does not answer, or has failed.
    #[error("rank {rank} ({host}) {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// Its machine.
        host: String,
        /// What happened to it.
        reason: String,
    },
    /// A step, or a part of the start, takes too long.
    #[error("rank {rank} ({host}): {what} has not finished within {seconds} s\n  hint: {hint}")]
    Hung {
        /// The rank that waited.
        rank: usize,
        /// Its machine.
        host: String,
        /// What it waited for.
        what: String,
        /// How long.
        seconds: u64,
        /// What to do.
        hint: &'static str,
    },
    /// Ranks differ in what must be equal.
    #[error(
        "rank {rank} ({host}) has {what} {theirs}, but rank 0 has {ours}\n  hint: start all ranks with the same program, configuration and WORLD_SIZE"
    )]
    Differs {
        /// The rank.
        rank: usize,
        /// Its machine.
        host: String,
        /// What differs.
        what: String,
        /// Its value there.
        theirs: String,
        /// Its value on rank 0.
        ours: String,
    },
    /// Ranks have opened what is not equal.
    #[error(
        "{what}: {theirs} on {}, but {ours} on rank 0\n  hint: all ranks need the same corpora, shards, tokenizer and checkpoints: share their folders, or copy them from rank 0's machine",
        shown_with_hosts(ranks)
    )]
    Unequal {
        /// The ranks that have another value, and their machines.
        ranks: Vec<(usize, String)>,
        /// What differs.
        what: String,
        /// Its value there.
        theirs: String,
        /// Its value on rank 0.
        ours: String,
    },
    /// Two processes have one rank.
    #[error(
        "two processes are rank {rank}: one on {first}, one on {second}\n  hint: give each its own RANK"
    )]
    Twice {
        /// The rank.
        rank: usize,
        /// The machine of the first.
        first: String,
        /// The machine of the second.
        second: String,
    },
    /// Ranks did not come.
    #[error(
        "{} did not connect to {address} within {seconds} s\n  hint: see whether they have started and reach that address (MASTER_ADDR, MASTER_PORT)",
        shown_ranks(ranks)
    )]
    Missing {
        /// Those that are missing.
        ranks: Vec<usize>,
        /// The address of rank 0.
        address: String,
        /// How long rank 0 waited.
        seconds: u64,
    },
    /// Rank 0 does not answer.
    #[error(
        "rank 0 does not answer at {address} within {seconds} s: {reason}\n  hint: see whether it has started, and whether MASTER_ADDR and MASTER_PORT name it"
    )]
    NoFirst {
        /// Its address.
        address: String,
        /// How long was tried.
        seconds: u64,
        /// What the system said last.
        reason: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen at {address}: {reason}\n  hint: if the port is in use, choose another MASTER_PORT; MASTER_ADDR must be an address of rank 0's machine"
    )]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Rank 0 refuses this rank; in its words.
    #[error("rank 0 refuses rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Why.
        reason: String,
    },
    /// NCCL fails.
    #[error("{0}")]
    Nccl(#[from] NcclError),
}

impl CollectiveError {
    /// Whether this rank ends only because another one does.
    pub fn is_of_another_rank(&self) -> bool {
        matches!(self, CollectiveError::Lost { .. })
    }
}

/// `rank 1 (node7, process 12), rank 2 (node7, process 13)`.
fn shown_with_hosts(ranks: &[(usize, String)]) -> String {
    let shown: Vec<String> =
        ranks.iter().map(|(rank, host)| format!("rank {rank} ({host})")).collect();
    shown.join(", ")
}

/// `rank 1` or `ranks 1, 2 and 5`.
fn shown_ranks(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [] => "no rank".to_owned(),
    }
}

/// A tensor, and the rank that owns it.
pub type Owned<B> = (FloatTensor<B>, usize);

/// Sums over the ranks that may not be there yet: [`Collective::finish_reduce`] returns them.
pub struct Sums<B: OpBackend>(Vec<Option<FloatTensor<B>>>);

impl<B: OpBackend> Sums<B> {
    /// The sums, of which all have ended.
    fn all(begun: Vec<Sums<B>>) -> Vec<Option<FloatTensor<B>>> {
        begun.into_iter().flat_map(|sums| sums.0).collect()
    }
}

/// What training needs of the connection between ranks. All ranks call the same functions in the same order, with
/// tensors of equal shapes, types and owners.
///
/// Each function fails when a rank has ended or failed, on all other ranks.
pub trait Collective<B: OpBackend> {
    /// The ranks.
    fn world(&self) -> World;

    /// Begins to sum f32 tensors over the ranks; the device may go on with other work meanwhile. Equal worlds add in
    /// the same order. [`Collective::finish_reduce`] must follow, also after an error.
    ///
    /// # Errors
    /// [`CollectiveError::Lost`] and others, when the ranks are not all there.
    fn reduce(&self, tensors: Vec<Owned<B>>) -> Result<Sums<B>, CollectiveError>;

    /// Lets later work wait for all sums that have begun. Returns those of `begun`, in order, that this rank owns, and
    /// `None` for the others.
    fn finish_reduce(&self, begun: Vec<Sums<B>>) -> Vec<Option<FloatTensor<B>>>;

    /// The owners' values of all tensors. What the other ranks pass may be overwritten.
    ///
    /// # Errors
    /// As [`Collective::reduce`].
    fn broadcast(&self, tensors: Vec<Owned<B>>) -> Result<Vec<FloatTensor<B>>, CollectiveError>;

    /// The messages of all ranks, in their order. They go over TCP through rank 0: not for tensors of a model's size.
    ///
    /// # Errors
    /// As [`Collective::reduce`].
    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Collective::reduce`].
    fn barrier(&self) -> Result<(), CollectiveError> {
        self.all_gather(vec![]).map(drop)
    }

    /// The `shared` consecutive ranks that share rows with this one, itself included: see [`World::group`]. What fails
    /// between them is kept for [`Collective::check_peers`].
    ///
    /// # Panics
    /// When the connection carries no exchanges between ranks.
    fn peers(&self, shared: usize) -> Arc<dyn Peers> {
        panic!("{shared} ranks cannot share rows over this connection")
    }

    /// Whether all exchanges between [`Collective::peers`] have succeeded. Those after one that failed are not to be
    /// relied on.
    ///
    /// # Errors
    /// The first failure, as [`Collective::reduce`].
    fn check_peers(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Says that this rank begins something that all ranks do together and that must end in limited time: step
    /// `step`, counted from 1, which has three times as long if it `compiles` kernels.
    fn begin_step(&self, step: u64, compiles: bool) {
        let _ = (step, compiles);
    }

    /// Says that it has ended.
    fn end_step(&self) {}

    /// Tells the other ranks why this one ends before they do.
    fn fail(&self, reason: &str) {
        let _ = reason;
    }
}

/// The only rank of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl<B: OpBackend> Collective<B> for Alone {
    fn world(&self) -> World {
        World::ALONE
    }

    fn reduce(&self, tensors: Vec<Owned<B>>) -> Result<Sums<B>, CollectiveError> {
        Ok(Sums(tensors.into_iter().map(|(tensor, _)| Some(tensor)).collect()))
    }

    fn finish_reduce(&self, begun: Vec<Sums<B>>) -> Vec<Option<FloatTensor<B>>> {
        Sums::all(begun)
    }

    fn broadcast(&self, tensors: Vec<Owned<B>>) -> Result<Vec<FloatTensor<B>>, CollectiveError> {
        Ok(tensors.into_iter().map(|(tensor, _)| tensor).collect())
    }

    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        Ok(vec![message])
    }
}

/// The numbers of all ranks, in the order of the ranks. Those of type f64 go as their bits.
pub(crate) fn gather_numbers<B: OpBackend>(
    collective: &dyn Collective<B>,
    own: impl IntoIterator<Item = u64>,
) -> Result<Vec<Vec<u64>>, CollectiveError> {
    let message = own.into_iter().flat_map(u64::to_le_bytes).collect();
    let numbers = |message: Vec<u8>| {
        let (words, _) = message.as_chunks::<8>();
        words.iter().map(|word| u64::from_le_bytes(*word)).collect()
    };
    Ok(collective.all_gather(message)?.into_iter().map(numbers).collect())
}

/// The sums over all ranks of `values`, as many on each: added in f64 in the order of the ranks, so that all have the
/// same bits.
pub(crate) fn sum_over_ranks<B: OpBackend>(
    collective: &dyn Collective<B>,
    values: &[f64],
) -> Result<Vec<f64>, CollectiveError> {
    let mut sums = vec![0.0; values.len()];
    for terms in gather_numbers(collective, values.iter().map(|value| value.to_bits()))? {
        assert_eq!(terms.len(), sums.len(), "values of each rank");
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += f64::from_bits(term));
    }
    Ok(sums)
}

/// Whether any rank passes true.
pub(crate) fn any_of_ranks<B: OpBackend>(
    collective: &dyn Collective<B>,
    own: bool,
) -> Result<bool, CollectiveError> {
    Ok(gather_numbers(collective, [u64::from(own)])?.concat().contains(&1))
}

/// The number that rank 0 passes.
pub(crate) fn of_first<B: OpBackend>(
    collective: &dyn Collective<B>,
    value: u64,
) -> Result<u64, CollectiveError> {
    Ok(gather_numbers(collective, [value])?[0][0])
}
