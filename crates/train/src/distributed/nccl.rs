//! Collectives of CUDA tensors by NCCL, and of messages by the store.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::backend::Flex;
use burn::tensor::ops::FloatTensor;
use longwall_kernels::backend::OpBackend;
use longwall_kernels::cuda::CudaTensor;
use longwall_kernels::ops::all_to_all::Peers;

use super::communicator::{Communicator, NcclError, START_HINT, UniqueId, unique_id, version};
use super::{Collective, CollectiveError, Owned, Store, Sums, World};

/// The GPUs of all ranks, connected by NCCL.
pub struct Nccl {
    communicator: Arc<Communicator>,
    store: Store,
    /// The first failure of an exchange between ranks that share rows.
    failed: Arc<OnceLock<NcclError>>,
}

/// Ranks that share rows with this one.
struct RowPeers {
    communicator: Arc<Communicator>,
    world: World,
    ranks: Range<usize>,
    failed: Arc<OnceLock<NcclError>>,
}

impl fmt::Debug for RowPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {:?}", self.world.rank, self.ranks)
    }
}

impl Peers for RowPeers {
    fn rank(&self) -> usize {
        self.world.rank - self.ranks.start
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn all_to_all_cpu(&self, _x: FloatTensor<Flex>) -> FloatTensor<Flex> {
        unreachable!("NCCL's ranks have GPUs")
    }

    fn all_to_all_cuda(&self, x: CudaTensor) -> CudaTensor {
        // After a failure the other ranks may be elsewhere.
        if self.failed.get().is_some() {
            return x;
        }
        self.communicator.all_to_all(&x, self.ranks.clone()).unwrap_or_else(|error| {
            self.failed.get_or_init(|| error);
            x
        })
    }
}

impl Nccl {
    /// Connects GPU `gpu` of this process with those of the other ranks of `store`; logs NCCL's version.
    ///
    /// # Errors
    /// When NCCL cannot be loaded on a rank, has another version there, or cannot connect the GPUs.
    pub fn connect(store: Store, gpu: usize) -> Result<Self, CollectiveError> {
        let world = store.world();
        store.watch_start("NCCL's start".to_owned(), START_HINT);
        let version = version().inspect_err(|error| store.fail(&error.to_string()))?;
        check_versions(&store, &version)?;
        if world.is_first() {
            tracing::info!("NCCL {version} connects {} GPUs", world.size);
        }
        let fail = |error: NcclError| {
            store.fail(&error.to_string());
            CollectiveError::from(error)
        };
        let own = match world.is_first() {
            true => unique_id().map_err(fail)?.0.to_vec(),
            false => vec![],
        };
        let ids = store.all_gather(own)?;
        let id = UniqueId(ids[0][..].try_into().expect("NCCL's 128 bytes from rank 0"));
        let communicator = Communicator::new(gpu, world.rank, world.size, id).map_err(fail)?;
        store.finished();
        Ok(Nccl { communicator: Arc::new(communicator), store, failed: Arc::default() })
    }

    /// Ends the connection of the GPUs. The ranks can still exchange messages.
    pub fn into_store(self) -> Store {
        self.store
    }
}

/// Compares the NCCL versions of all ranks, without the paths that follow them.
fn check_versions(store: &Store, version: &str) -> Result<(), CollectiveError> {
    let number = version.split(' ').next().unwrap_or_default();
    let all = store.all_gather(format!("{number} {}", store.host()).into_bytes())?;
    let all: Vec<_> = all.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let all: Vec<(&str, &str)> =
        all.iter().map(|text| text.split_once(' ').unwrap_or_default()).collect();
    match all.iter().position(|(number, _)| *number != all[0].0) {
        None => Ok(()),
        Some(rank) => Err(CollectiveError::Differs {
            rank,
            host: all[rank].1.to_owned(),
            what: "NCCL".to_owned(),
            theirs: all[rank].0.to_owned(),
            ours: all[0].0.to_owned(),
        }),
    }
}

fn into_cuda<B: OpBackend>((tensor, owner): Owned<B>) -> (CudaTensor, usize) {
    let tensor = B::into_cuda(tensor).expect("ranks have GPUs, and run kernels");
    (tensor, owner)
}

impl<B: OpBackend> Collective<B> for Nccl {
    fn world(&self) -> World {
        self.store.world()
    }

    fn reduce(&self, tensors: Vec<Owned<B>>) -> Result<Sums<B>, CollectiveError> {
        let tensors = tensors.into_iter().map(into_cuda::<B>).collect();
        let sums = self.communicator.reduce(tensors)?;
        Ok(Sums(sums.into_iter().map(|sum| sum.map(B::from_cuda)).collect()))
    }

    fn finish_reduce(&self, begun: Vec<Sums<B>>) -> Vec<Option<FloatTensor<B>>> {
        self.communicator.finish_reduce();
        Sums::all(begun)
    }

    fn broadcast(&self, tensors: Vec<Owned<B>>) -> Result<Vec<FloatTensor<B>>, CollectiveError> {
        let tensors = tensors.into_iter().map(into_cuda::<B>).collect();
        let values = self.communicator.broadcast(tensors)?;
        Ok(values.into_iter().map(B::from_cuda).collect())
    }

    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.store.all_gather(message)
    }

    fn peers(&self, shared: usize) -> Arc<dyn Peers> {
        let world = self.store.world();
        Arc::new(RowPeers {
            communicator: Arc::clone(&self.communicator),
            world,
            ranks: world.group(shared),
            failed: Arc::clone(&self.failed),
        })
    }

    fn check_peers(&self) -> Result<(), CollectiveError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone().into()))
    }

    fn begin_step(&self, step: u64, compiles: bool) {
        self.store.watch_step(step, compiles);
    }

    fn end_step(&self) {
        self.store.finished();
    }

    fn fail(&self, reason: &str) {
        self.store.fail(reason);
    }
}
