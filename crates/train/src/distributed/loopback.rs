//! Ranks that are threads of one process, for tests on the CPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorMetadata};
use longwall_kernels::backend::{OpBackend, primitive, tensor};

use super::{Collective, CollectiveError, Owned, Sums, World};

/// How long a rank waits for the others.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a rank gives to the others.
#[derive(Clone, Debug)]
enum Given {
    /// Tensors with their shapes and owners.
    Tensors(Vec<(TensorData, usize)>),
    Bytes(Vec<u8>),
}

#[derive(Default)]
struct State {
    given: Vec<Option<Given>>,
    /// How many ranks have taken what was given.
    taken: usize,
    /// What the ranks gave, while it is taken.
    all: Option<Arc<Vec<Given>>>,
    /// The first rank that has ended, and why.
    gone: Option<(usize, String)>,
}

struct Shared {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// A rank.
pub(crate) struct Loopback {
    rank: usize,
    shared: Arc<Shared>,
    /// The steps that it has begun, and whether they may compile kernels.
    pub begun: Mutex<Vec<(u64, bool)>>,
    /// Whether sums have begun and are not finished.
    sums: AtomicBool,
}

/// `size` ranks.
pub(crate) fn ranks(size: usize) -> Vec<Loopback> {
    let given = (0..size).map(|_| None).collect();
    let state = Mutex::new(State { given, ..State::default() });
    let shared = Arc::new(Shared { size, state, changed: Condvar::new() });
    let rank = |rank| {
        let (begun, sums) = (Mutex::default(), AtomicBool::new(false));
        Loopback { rank, shared: Arc::clone(&shared), begun, sums }
    };
    (0..size).map(rank).collect()
}

impl Loopback {
    /// # Panics
    /// When sums have begun and are not finished.
    fn check_sums(&self) {
        assert!(!self.sums.load(Ordering::Relaxed), "rank {} has not finished sums", self.rank);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        until: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, CollectiveError> {
        let waits = |state: &mut State| !until(state) && state.gone.is_none();
        let waited = self.shared.changed.wait_timeout_while(state, PATIENCE, waits);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "rank {} waits for the others", self.rank);
        match &state.gone {
            Some((rank, reason)) if !until(&state) => {
                let (host, reason) = ("this process".to_owned(), reason.clone());
                Err(CollectiveError::Lost { rank: *rank, host, reason })
            }
            _ => Ok(state),
        }
    }

    /// What all ranks give, in their order.
    fn exchange(&self, own: Given) -> Result<Arc<Vec<Given>>, CollectiveError> {
        // Until the last exchange is over.
        let mut state = self.wait(self.lock(), |state| state.given[self.rank].is_none())?;
        state.given[self.rank] = Some(own);
        if state.given.iter().all(Option::is_some) {
            state.all = Some(Arc::new(state.given.iter().flatten().cloned().collect()));
            self.shared.changed.notify_all();
        }
        let mut state = self.wait(state, |state| state.all.is_some())?;
        let all = Arc::clone(state.all.as_ref().expect("all have given"));
        state.taken += 1;
        if state.taken == self.shared.size {
            (state.taken, state.all) = (0, None);
            state.given.fill_with(|| None);
            self.shared.changed.notify_all();
        } else {
            // No rank gives again before all have taken.
            drop(self.wait(state, |state| state.all.is_none() || state.taken == 0)?);
        }
        Ok(all)
    }

    fn exchange_tensors<B: OpBackend>(
        &self,
        tensors: Vec<Owned<B>>,
    ) -> Result<Vec<Vec<(TensorData, usize)>>, CollectiveError> {
        let read = |(x, owner): Owned<B>| {
            let shape = x.shape();
            let data = flat_data::<B>(x);
            (TensorData { shape, ..data }, owner)
        };
        let own = tensors.into_iter().map(read).collect();
        let all = self.exchange(Given::Tensors(own))?;
        let all = all.iter().map(|given| match given {
            Given::Tensors(tensors) => tensors.clone(),
            other => panic!("rank {} passes tensors, another {other:?}", self.rank),
        });
        let all: Vec<_> = all.collect();
        let shapes = |tensors: &[(TensorData, usize)]| -> Vec<_> {
            tensors.iter().map(|(x, owner)| (x.shape.clone(), x.dtype, *owner)).collect()
        };
        assert!(all.iter().all(|theirs| shapes(theirs) == shapes(&all[0])), "different tensors");
        Ok(all)
    }
}

/// `x` in one dimension, in main memory.
fn flat_data<B: OpBackend>(x: FloatTensor<B>) -> TensorData {
    let elements = x.shape().num_elements();
    tensor::<B, 1>(B::float_reshape(x, [elements].into())).into_data()
}

/// The elements of a tensor, exact in f32.
pub(super) fn elements<B: OpBackend>(x: FloatTensor<B>) -> Vec<f32> {
    flat_data::<B>(x).iter::<f32>().collect()
}

/// The inverse of [`elements`], for a tensor like `x`.
pub(super) fn of_elements<B: OpBackend>(elements: Vec<f32>, x: &FloatTensor<B>) -> FloatTensor<B> {
    of_data::<B>(TensorData::new(elements, x.shape()).convert_dtype(x.dtype()))
}

pub(super) fn of_data<B: OpBackend>(data: TensorData) -> FloatTensor<B> {
    let (shape, dtype) = (data.shape.clone(), data.dtype);
    let elements = shape.num_elements();
    let flat = TensorData { shape: [elements].into(), ..data };
    let flat = Tensor::<B, 1>::from_data(flat, (&B::Device::default(), dtype));
    B::float_reshape(primitive(flat), shape)
}

impl<B: OpBackend> Collective<B> for Loopback {
    fn world(&self) -> World {
        World { rank: self.rank, size: self.shared.size }
    }

    fn reduce(&self, tensors: Vec<Owned<B>>) -> Result<Sums<B>, CollectiveError> {
        self.sums.store(true, Ordering::Relaxed);
        let all = self.exchange_tensors::<B>(tensors)?;
        let sum = |at: usize| {
            let (first, owner) = &all[0][at];
            (*owner == self.rank).then(|| {
                let mut sum: Vec<f32> = first.to_vec().expect("sums are f32");
                for theirs in &all[1..] {
                    let term = theirs[at].0.as_slice::<f32>().expect("sums are f32");
                    sum.iter_mut().zip(term).for_each(|(sum, term)| *sum += term);
                }
                of_data::<B>(TensorData::new(sum, first.shape.clone()))
            })
        };
        Ok(Sums((0..all[0].len()).map(sum).collect()))
    }

    fn finish_reduce(&self, begun: Vec<Sums<B>>) -> Vec<Option<FloatTensor<B>>> {
        self.sums.store(false, Ordering::Relaxed);
        Sums::all(begun)
    }

    fn broadcast(&self, tensors: Vec<Owned<B>>) -> Result<Vec<FloatTensor<B>>, CollectiveError> {
        self.check_sums();
        let all = self.exchange_tensors::<B>(tensors)?;
        let of_owner = |at: usize| of_data::<B>(all[all[0][at].1][at].0.clone());
        Ok((0..all[0].len()).map(of_owner).collect())
    }

    fn all_gather(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.check_sums();
        let all = self.exchange(Given::Bytes(message))?;
        let bytes = |given: &Given| match given {
            Given::Bytes(bytes) => bytes.clone(),
            other => panic!("rank {} passes bytes, another {other:?}", self.rank),
        };
        Ok(all.iter().map(bytes).collect())
    }

    fn begin_step(&self, step: u64, compiles: bool) {
        self.begun.lock().expect("no rank panics").push((step, compiles));
    }

    fn fail(&self, reason: &str) {
        let reason = format!("failed: {reason}");
        self.lock().gone.get_or_insert((self.rank, reason));
        self.shared.changed.notify_all();
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.lock().gone.get_or_insert((self.rank, "has ended".to_owned()));
        self.shared.changed.notify_all();
        if !std::thread::panicking() {
            self.check_sums();
        }
    }
}
