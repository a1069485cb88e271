//! The decode state: recent tokens in a cache, older ones as sums over φ. Where CUDA's kernels have no sums, their
//! state turns into the reference's when they are due.

use burn::tensor::{FloatDType, Tensor, s};

use super::Power;
use super::cuda::{PowerKvCache, PowerTokens};
use super::op::PowerAttention;
use super::reference::{PowerInputs, StateSums};
use crate::attention::cache::KvCache;
use crate::attention::decay::SPAN;
use crate::attention::dispatch::on_cuda;
use crate::attention::flash::capacity;
use crate::attention::{DecodeState, ExecPath};
use crate::backend::{OpBackend, tensor};

/// The decode state.
#[derive(Clone, Debug)]
pub enum State<B: OpBackend> {
    /// That of the CPU kernel and of the reference.
    Tensors(TensorState<B>),
    /// That of the CUDA kernels.
    Cuda(CudaState),
}

/// Recent tokens and the sums over older ones.
#[derive(Clone, Debug)]
pub struct TensorState<B: OpBackend> {
    /// Keys and values, one row per kv head.
    cache: KvCache<B>,
    /// `[rows, tokens in the cache]`.
    log_decay: Option<Tensor<B, 2>>,
    past: Option<StateSums<B>>,
}

/// Keys, values and log decays of the cached tokens, as in [`PowerInputs`].
struct HeldTokens<B: OpBackend> {
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
    log_decay: Tensor<B, 2>,
}

impl<B: OpBackend> HeldTokens<B> {
    /// With the queries of the last ones.
    fn of(self, q: Tensor<B, 4>) -> PowerInputs<B> {
        let HeldTokens { k, v, log_decay } = self;
        PowerInputs { q, k, v, log_decay }
    }
}

/// When tokens leave the cache for the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Folding {
    /// Tokens of a chunk; only whole chunks leave.
    pub chunk: usize,
    /// Longest sequence that is kept whole.
    pub switch: usize,
}

impl Folding {
    /// Most tokens in the cache after a single-token step.
    pub fn most(self) -> usize {
        self.switch.max(2 * self.chunk - 1)
    }

    /// Most tokens in the cache at any time: pieces end with a chunk.
    fn room(self) -> usize {
        (self.most() + 1).next_multiple_of(self.chunk)
    }

    /// Tokens in the cache after `seq_len` single-token steps.
    pub fn near(self, seq_len: usize) -> usize {
        if seq_len <= self.most() { seq_len } else { self.chunk + seq_len % self.chunk }
    }

    /// Of `new` tokens from `position` on, the first ones that are appended at once: at most to the end of the chunk
    /// once sequences are not kept whole, so that whole chunks leave the cache.
    pub fn piece(self, position: usize, new: usize) -> usize {
        if position + new <= self.switch {
            return new;
        }
        new.min(self.chunk - position % self.chunk)
    }
}

/// The state of the CUDA kernels.
#[derive(Clone, Debug)]
pub struct CudaState {
    /// From the first token on.
    cache: Option<Box<PowerKvCache>>,
    /// Position of the next token.
    position: usize,
    /// Tokens to reserve room for.
    capacity: usize,
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match self {
            State::Tensors(state) => state.elements(),
            State::Cuda(state) => state.cache.as_ref().map_or(0, |cache| cache.elements()),
        }
    }
}

impl<B: OpBackend> State<B> {
    /// The position of the next token.
    pub(super) fn position(&self) -> usize {
        match self {
            State::Tensors(state) => state.cache.position(),
            State::Cuda(state) => state.position,
        }
    }

    /// The CUDA kernels' state.
    ///
    /// # Panics
    /// After [`State::as_tensors`].
    pub(super) fn on_cuda(&mut self) -> &mut CudaState {
        match self {
            State::Cuda(state) => state,
            State::Tensors(_) => panic!("the state has left the CUDA kernels"),
        }
    }

    /// The state of the reference, to which that of the CUDA kernels is turned.
    pub(super) fn as_tensors(&mut self) -> &mut TensorState<B> {
        if let State::Cuda(state) = self {
            *self = State::Tensors(state.to_tensors());
        }
        match self {
            State::Tensors(state) => state,
            State::Cuda(_) => unreachable!("turned into tensors"),
        }
    }
}

impl CudaState {
    /// The state before the first token.
    pub(super) fn new(capacity: usize) -> Self {
        CudaState { cache: None, position: 0, capacity }
    }

    /// Appends tokens; returns their outputs, `[batch, heads, n, head_dim]`. The inputs are those of
    /// [`power_attention`](super::op::power_attention), and `op` is the attention form. `folding` is `None` where the
    /// kernels have no sums, or need none.
    pub(super) fn extend<B: OpBackend>(
        &mut self,
        op: &PowerAttention,
        folding: Option<Folding>,
        qkv: [Tensor<B, 4>; 3],
        log_decay: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 4> {
        let tokens = qkv[0].dims()[2];
        self.position += tokens;
        let new = PowerTokens { qkv: qkv.map(on_cuda), log_decay: log_decay.map(on_cuda) };
        let cache = self.cache.get_or_insert_with(|| {
            // No more tokens are kept before the oldest leave the cache, however they arrive.
            let most = folding.map_or(usize::MAX, Folding::room);
            let capacity = capacity(op.window, self.capacity.min(most), tokens.min(most));
            Box::new(PowerKvCache::new(&new, capacity))
        });
        tensor(B::from_cuda(cache.extend(op, folding, &new)))
    }

    /// The same tokens in the state of the reference, in f32: that of a state without sums or a window, which has all
    /// tokens.
    fn to_tensors<B: OpBackend>(&self) -> TensorState<B> {
        let mut state = TensorState::new(None);
        let Some(cache) = &self.cache else { return state };
        let f32 = |x| tensor::<B, 4>(B::from_cuda(x)).cast(FloatDType::F32);
        let [k, v] = cache.keys_and_values().map(f32);
        let [batch, kv_heads, tokens, head_dim] = k.dims();
        assert_eq!(tokens, self.position, "cached tokens, and all tokens so far");
        let rows = batch * kv_heads;
        let log_decay = match cache.decay_within_spans() {
            Some(within) => {
                // The heads of a group have one decay: that of the first.
                let within = tensor::<B, 3>(B::from_cuda(within));
                let group = within.dims()[1] / kv_heads;
                let first = within.reshape([rows, group, tokens]).narrow(1, 0, 1);
                steps(first.reshape([rows, tokens]))
            }
            None => Tensor::zeros([rows, tokens], &k.device()),
        };
        let kv = [k, v].map(|x| x.reshape([rows, tokens, head_dim]));
        state.append(kv, log_decay);
        state
    }
}

/// The steps `[rows, tokens]` of which `within` has the sums from the start of each span of [`SPAN`] tokens.
fn steps<B: OpBackend>(within: Tensor<B, 2>) -> Tensor<B, 2> {
    let ([rows, tokens], device) = (within.dims(), within.device());
    let spans = tokens.div_ceil(SPAN);
    let padded = Tensor::cat(vec![within, Tensor::zeros([rows, SPAN], &device)], 1);
    let sums = padded.narrow(1, 0, spans * SPAN).reshape([rows * spans, SPAN]);
    let before = sums.clone().narrow(1, 0, SPAN - 1);
    let before = Tensor::cat(vec![Tensor::zeros([rows * spans, 1], &device), before], 1);
    (sums - before).reshape([rows, spans * SPAN]).narrow(1, 0, tokens)
}

impl<B: OpBackend> TensorState<B> {
    fn elements(&self) -> usize {
        let log_decay = self.log_decay.as_ref().map_or(0, |x| x.shape().num_elements());
        let past = self
            .past
            .as_ref()
            .map_or(0, |past| past.sums.shape().num_elements() + past.mass.shape().num_elements());
        self.cache.elements() + log_decay + past
    }
}

impl<B: OpBackend> TensorState<B> {
    /// The state before the first token.
    pub(super) fn new(window: Option<usize>) -> Self {
        TensorState { cache: KvCache::new(window, 0), log_decay: None, past: None }
    }

    /// Appends the tokens of `rows`; returns their outputs, `[rows, group, n, value_dim]`.
    /// `op` is the operation for a sequence of these tokens alone; with `folding`, older tokens become sums.
    pub(super) fn extend(
        &mut self,
        op: &Power,
        rows: PowerInputs<B>,
        folding: Option<Folding>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        if self.cache.position() == 0 {
            let kv = [rows.k.clone(), rows.v.clone()];
            let near = self.append(kv, rows.log_decay.clone()).of(rows.q.clone());
            self.fold(op, folding, &near);
            return op.of_rows(rows, path);
        }
        let n = rows.q.dims()[2];
        let mut outputs = vec![];
        let mut first = 0;
        while first < n {
            let position = self.cache.position();
            let size = folding.map_or(n, |folding| folding.piece(position, n - first));
            let part = |x: &Tensor<B, 3>| x.clone().narrow(1, first, size);
            let log_decay = rows.log_decay.clone().narrow(1, first, size);
            let held = self.append([part(&rows.k), part(&rows.v)], log_decay);
            let near = held.of(rows.q.clone().narrow(2, first, size));
            outputs.push(op.attend_last(&near, self.past.as_ref()));
            self.fold(op, folding, &near);
            first += size;
        }
        Tensor::cat(outputs, 2)
    }

    /// Appends tokens to the cache; returns all cached tokens.
    fn append(&mut self, kv: [Tensor<B, 3>; 2], new: Tensor<B, 2>) -> HeldTokens<B> {
        let [k, v] = kv.map(|x| x.unsqueeze_dim::<4>(1));
        let [k, v] = self.cache.append(k, v).map(|x| x.squeeze_dim::<3>(1));
        let log_decay = match self.log_decay.take() {
            Some(old) => Tensor::cat(vec![old, new], 1),
            None => new,
        };
        // The cache may have dropped tokens that left the window.
        let dropped = log_decay.dims()[1] - self.cache.len();
        let log_decay = log_decay.slice(s![.., dropped..]);
        self.log_decay = Some(log_decay.clone());
        HeldTokens { k, v, log_decay }
    }

    /// Moves the oldest chunks into the sums, if these are in use, except the last complete chunk and the
    /// tokens after it. `held` are all tokens in the cache.
    fn fold(&mut self, op: &Power, folding: Option<Folding>, held: &PowerInputs<B>) {
        let Some(folding) = folding else { return };
        let old = self.cache.len() - folding.near(self.cache.position());
        if old == 0 {
            return;
        }
        for first in (0..old).step_by(folding.chunk) {
            let tokens = held.tokens(first..first + folding.chunk);
            self.past = Some(op.fold(self.past.take(), tokens));
        }
        self.cache.drop_oldest(old);
        self.log_decay = Some(held.log_decay.clone().slice(s![.., old..]));
    }
}
