//! The decode state: recent tokens in a cache, older ones as sums over φ.

use burn::tensor::{Tensor, s};

use super::Power;
use super::reference::{PowerInputs, StateSums};
use crate::attention::cache::KvCache;
use crate::attention::{DecodeState, ExecPath};
use crate::backend::OpBackend;

/// Recent tokens and the sums over older ones.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    /// Keys and values, one row per kv head.
    cache: KvCache<B>,
    /// `[rows, tokens in the cache]`.
    log_decay: Option<Tensor<B, 2>>,
    past: Option<StateSums<B>>,
}

/// Tokens in the cache after `seq_len` single-token steps, when sums are used for sequences longer than
/// `switch` tokens.
pub(super) fn near(chunk: usize, switch: usize, seq_len: usize) -> usize {
    let most = switch.max(2 * chunk - 1);
    if seq_len <= most { seq_len } else { chunk + seq_len % chunk }
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        let log_decay = self.log_decay.as_ref().map_or(0, |x| x.shape().num_elements());
        let past = self
            .past
            .as_ref()
            .map_or(0, |past| past.sums.shape().num_elements() + past.mass.shape().num_elements());
        self.cache.elements() + log_decay + past
    }
}

impl<B: OpBackend> State<B> {
    pub(super) fn new(window: Option<usize>) -> Self {
        State { cache: KvCache::new(window, 0), log_decay: None, past: None }
    }

    /// The position of the next token.
    pub(super) fn position(&self) -> usize {
        self.cache.position()
    }

    /// Appends the tokens of `rows`; returns their outputs, `[rows, group, n, value_dim]`.
    /// `op` is the operation for a sequence of these tokens alone; `switch` as in [`near`], `None` for no
    /// sums.
    pub(super) fn extend(
        &mut self,
        op: &Power,
        rows: PowerInputs<B>,
        chunk: usize,
        switch: Option<usize>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        if self.position() == 0 {
            // Prefill: a forward pass, then the tokens enter the state.
            let kv = [rows.k.clone(), rows.v.clone()];
            let near = self.append(rows.q.clone(), kv, rows.log_decay.clone());
            self.fold(op, chunk, switch, &near);
            return op.of_rows(rows, path);
        }
        let n = rows.q.dims()[2];
        let mut outputs = vec![];
        let mut first = 0;
        while first < n {
            // At most to the end of the chunk, so that whole chunks enter the sums.
            let size = match switch {
                Some(_) => (chunk - self.position() % chunk).min(n - first),
                None => n,
            };
            let part = |x: &Tensor<B, 3>| x.clone().narrow(1, first, size);
            let near = self.append(
                rows.q.clone().narrow(2, first, size),
                [part(&rows.k), part(&rows.v)],
                rows.log_decay.clone().narrow(1, first, size),
            );
            outputs.push(op.attend_last(&near, self.past.as_ref()));
            self.fold(op, chunk, switch, &near);
            first += size;
        }
        Tensor::cat(outputs, 2)
    }

    /// Appends tokens to the cache; returns the new queries with all cached tokens.
    fn append(
        &mut self,
        q: Tensor<B, 4>,
        kv: [Tensor<B, 3>; 2],
        new: Tensor<B, 2>,
    ) -> PowerInputs<B> {
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
        PowerInputs { q, k, v, log_decay }
    }

    /// Moves the oldest chunks into the sums, if these are in use, except the last complete chunk and the
    /// tokens after it. `held` are all tokens in the cache.
    fn fold(&mut self, op: &Power, chunk: usize, switch: Option<usize>, held: &PowerInputs<B>) {
        let Some(switch) = switch else { return };
        let old = self.cache.len() - near(chunk, switch, self.position());
        if old == 0 {
            return;
        }
        for first in (0..old).step_by(chunk) {
            self.past = Some(op.fold(self.past.take(), held.tokens(first..first + chunk)));
        }
        self.cache.drop_oldest(old);
        self.log_decay = Some(held.log_decay.clone().slice(s![.., old..]));
    }
}
