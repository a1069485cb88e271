//! Ranks connected by the store alone.

use std::sync::OnceLock;

use longwall_kernels::cuda::CudaTensor;

use super::*;

/// Ranks connected by the store alone, which also carries the tensors.
pub struct OverTcp {
    pub store: Arc<Store>,
    /// The first failure of an exchange between ranks that share rows.
    failed: Arc<OnceLock<CollectiveError>>,
}

impl OverTcp {
    pub fn new(store: Store) -> Self {
        OverTcp { store: Arc::new(store), failed: Arc::default() }
    }

    /// The elements of all ranks' tensors, by rank and tensor.
    fn exchange(
        &self,
        tensors: &[Owned<TestBackend>],
    ) -> Result<Vec<Vec<Vec<f32>>>, CollectiveError> {
        let own: Vec<Vec<f32>> =
            tensors.iter().map(|(x, _)| loopback::elements::<TestBackend>(x.clone())).collect();
        let bytes = own.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        let all = self.store.all_gather(bytes)?.into_iter().map(|message| {
            let (elements, _) = message.as_chunks::<4>();
            let mut elements = elements.iter().map(|bytes| f32::from_le_bytes(*bytes));
            own.iter().map(|x| elements.by_ref().take(x.len()).collect()).collect()
        });
        Ok(all.collect())
    }
}

impl Collective<TestBackend> for OverTcp {
    fn world(&self) -> World {
        self.store.world()
    }

    fn reduce(
        &self,
        tensors: Vec<Owned<TestBackend>>,
    ) -> Result<Sums<TestBackend>, CollectiveError> {
        let all = self.exchange(&tensors)?;
        let sum = |(at, (x, owner)): (usize, &Owned<TestBackend>)| {
            (*owner == self.store.world().rank).then(|| {
                let mut sum = all[0][at].clone();
                for theirs in &all[1..] {
                    sum.iter_mut().zip(&theirs[at]).for_each(|(sum, term)| *sum += term);
                }
                loopback::of_elements::<TestBackend>(sum, x)
            })
        };
        Ok(Sums(tensors.iter().enumerate().map(sum).collect()))
    }

    fn finish_reduce(
        &self,
        begun: Vec<Sums<TestBackend>>,
    ) -> Vec<Option<FloatTensor<TestBackend>>> {
        Sums::all(begun)
    }

    fn broadcast(
        &self,
        tensors: Vec<Owned<TestBackend>>,
    ) -> Result<Vec<FloatTensor<TestBackend>>, CollectiveError> {
        let all = self.exchange(&tensors)?;
        let value = |(at, (x, owner)): (usize, &Owned<TestBackend>)| {
            loopback::of_elements::<TestBackend>(all[*owner][at].clone(), x)
        };
        Ok(tensors.iter().enumerate().map(value).collect())
    }

    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.store.all_gather(message)
    }

    fn peers(&self, shared: usize) -> Arc<dyn Peers> {
        let ranks = self.store.world().group(shared);
        Arc::new(PeersOverTcp { store: self.store.clone(), ranks, failed: self.failed.clone() })
    }

    fn check_peers(&self) -> Result<(), CollectiveError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
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

/// Ranks of [`OverTcp`] that share rows.
struct PeersOverTcp {
    store: Arc<Store>,
    ranks: Range<usize>,
    failed: Arc<OnceLock<CollectiveError>>,
}

impl std::fmt::Debug for PeersOverTcp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {:?}", self.store.world().rank, self.ranks)
    }
}

impl Peers for PeersOverTcp {
    fn rank(&self) -> usize {
        self.store.world().rank - self.ranks.start
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn all_to_all_cpu(&self, x: FloatTensor<TestBackend>) -> FloatTensor<TestBackend> {
        let own = loopback::elements::<TestBackend>(x.clone());
        let message = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let all = match self.store.all_gather(message) {
            Ok(all) => all,
            Err(error) => {
                self.failed.get_or_init(|| error);
                return x;
            }
        };
        let block = 4 * own.len() / self.size();
        let got = all[self.ranks.clone()].iter().flat_map(|message| {
            assert_eq!(message.len(), 4 * own.len(), "ranks pass equal shapes");
            let (elements, _) = message[self.rank() * block..][..block].as_chunks::<4>();
            elements.iter().map(|bytes| f32::from_le_bytes(*bytes))
        });
        loopback::of_elements::<TestBackend>(got.collect(), &x)
    }

    fn all_to_all_cuda(&self, x: CudaTensor) -> CudaTensor {
        unreachable!("a test on the CPU: {x:?}")
    }
}

/// A run of three ranks over TCP, each with its console, which do not end the process.
pub fn run_over_tcp(
    config: &RunConfig,
    limits: StoreOptions,
    console: impl for<'a> Fn(&'a Store) -> Box<dyn Console + 'a> + Sync,
) -> Vec<Result<Outcome, TrainError>> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let rank = |rank: usize| {
        let (world, address) = (World { rank, size: 3 }, "127.0.0.1".to_owned());
        let environment = Environment { world, local_rank: rank, address, port, listener: None };
        let limits = StoreOptions { exits: false, ..limits };
        let store = Store::connect(&environment, &vec![], limits).unwrap();
        let ranks = OverTcp::new(store);
        let options = options(Precision::F32, RunStart::New, StopFlag::new());
        let (mut console, device) = (console(&ranks.store), Default::default());
        let (console, none) = (console.as_mut(), &mut NoEvaluations);
        let outcome =
            train_as_rank::<TestBackend>(config, &device, &options, &ranks, console, none);
        if outcome.is_ok() {
            ranks.store.close();
        }
        outcome
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..3).map(|at| scope.spawn(move || rank(at))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

#[test]
fn ranks_over_tcp_train_as_those_in_one_process() {
    let sandbox = Sandbox::new();
    let here = run(3, &config(&sandbox, "here", &[]), RunStart::New).run_dir;
    let config = config(&sandbox, "tcp", &[]);
    let limits = StoreOptions::default();
    let outcomes = run_over_tcp(&config, limits, |_| Box::new(SilentConsole));
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(Result::unwrap).collect();
    assert_eq!(losses(&outcomes[0].run_dir), losses(&here));
    assert_eq!(weights(&outcomes[0].run_dir), weights(&here));
}

#[test]
fn a_rank_that_ends_without_a_word_ends_the_others() {
    let sandbox = Sandbox::new();
    let started = std::time::Instant::now();
    let config = config(&sandbox, "lost", &[]);
    let outcomes = run_over_tcp(&config, StoreOptions::default(), |store| {
        let step = if store.world().rank == 2 { 6 } else { u64::MAX };
        Box::new(After { step, action: || store.hang_up() })
    });
    let errors: Vec<String> = outcomes.into_iter().map(|x| x.unwrap_err().to_string()).collect();
    assert!(started.elapsed() < std::time::Duration::from_secs(60));
    for error in &errors[..2] {
        assert!(error.starts_with("rank 2 (") && error.contains("has ended"), "{errors:?}");
    }
    assert!(errors[0].contains("checkpoints/step-5; continue from it"), "{errors:?}");
}
