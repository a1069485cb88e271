//! The KV cache of attention variants that keep every token.

mod cuda;

use burn::tensor::{Tensor, s};

use super::DecodeState;
use super::rotation::{Rotation, rotate};
use crate::backend::{OpBackend, primitive, tensor};
use crate::cuda::CudaTensor;

/// Keys and values of the tokens so far, in buffers that grow by doubling.
#[derive(Clone, Debug)]
pub struct KvCache<B: OpBackend> {
    /// Keys and values, `[batch, heads, capacity, channels]`, where heads and channels of the two
    /// may differ; `None` before the first token.
    buffers: Option<[Tensor<B, 4>; 2]>,
    /// Tokens held.
    len: usize,
    /// Tokens appended so far: the position of the next one.
    position: usize,
    /// Tokens that a query can see; older ones are dropped.
    window: Option<usize>,
    /// The capacity to allocate at first, in tokens; more if the first call needs more.
    capacity: usize,
}

impl<B: OpBackend> KvCache<B> {
    /// An empty cache that keeps at least the last `window` tokens, or all of them without a window.
    /// Its buffers are not reallocated up to `capacity` tokens.
    pub fn new(window: Option<usize>, capacity: usize) -> Self {
        // Under a window, tokens are dropped in batches of one window.
        let capacity = window.map_or(capacity, |w| capacity.min(2 * w));
        KvCache { buffers: None, len: 0, position: 0, window, capacity }
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends keys and values of `n` tokens, `[batch, heads, n, channels]`, after dropping tokens
    /// that none of the `n` queries can see; returns all keys and values held, oldest first.
    ///
    /// # Panics
    /// When the shapes differ from those of earlier calls.
    pub fn append(&mut self, k: Tensor<B, 4>, v: Tensor<B, 4>) -> [Tensor<B, 4>; 2] {
        let n = k.dims()[2];
        self.drop_unseen(n);
        let needed = self.len + n;
        let start = self.len;
        let buffers = match self.buffers.take() {
            None => [k, v].map(|new| grow(None, new, needed.max(self.capacity))),
            Some([keys, values]) if keys.dims()[2] < needed => {
                let held = |x: Tensor<B, 4>| Some(x.slice(s![.., .., 0..start, ..]));
                [grow(held(keys), k, 2 * needed), grow(held(values), v, 2 * needed)]
            }
            Some(old) => write(old, [k, v], start),
        };
        self.added(buffers, n)
    }

    /// Rotates q and k as the positions that follow, and appends k and v as [`KvCache::append`] does; returns the
    /// rotated q, and all keys and values held. One launch where the device supports it.
    ///
    /// # Panics
    /// As [`KvCache::append`].
    pub fn append_rotated(
        &mut self,
        rotation: Option<Rotation>,
        [q, k, v]: [Tensor<B, 4>; 3],
    ) -> [Tensor<B, 4>; 3] {
        let (first, n) = (self.position, k.dims()[2]);
        self.drop_unseen(n);
        let has_room = |buffers: &mut [Tensor<B, 4>; 2]| buffers[0].dims()[2] >= self.len + n;
        if let Some(rotation) = rotation
            && let Some(inputs) = on_cuda([&q, &k, &v])
            && let op = rotation.embedding(q.dims()[3], first)
            && cuda::serves_rotated(&op, &inputs)
            && let Some(old) = self.buffers.take_if(has_room)
        {
            let old = old.map(|x| B::into_cuda(primitive(x)).expect("where the new rows are"));
            let (q, buffers) = cuda::write_rotated(&op, old, inputs, self.len);
            let buffers = buffers.map(|x| tensor(B::from_cuda(x)));
            let [keys, values] = self.added(buffers, n);
            return [tensor(B::from_cuda(q)), keys, values];
        }
        let [q, k] = rotate(rotation, [q, k], first);
        let [keys, values] = self.append(k, v);
        [q, keys, values]
    }

    /// Keeps the buffers, to which `n` tokens have been appended; returns all keys and values held.
    fn added(&mut self, buffers: [Tensor<B, 4>; 2], n: usize) -> [Tensor<B, 4>; 2] {
        self.len += n;
        self.position += n;
        let len = self.len;
        let held = buffers.clone().map(|buffer| tensor(B::leading(primitive(buffer), 2, len)));
        self.buffers = Some(buffers);
        held
    }

    /// Drops the oldest `n` tokens and frees their memory.
    ///
    /// # Panics
    /// When fewer than `n` are held.
    pub fn drop_oldest(&mut self, n: usize) {
        assert!(n <= self.len, "dropping {n} of {} tokens", self.len);
        if n == 0 {
            return;
        }
        let (len, buffers) = (self.len, self.buffers.take());
        self.len -= n;
        self.buffers = buffers.filter(|_| n < len).map(|buffers| {
            buffers.map(|buffer| grow(None, buffer.slice(s![.., .., n..len, ..]), len - n))
        });
    }

    /// Drops the tokens that have left the window, once there are as many of them as inside it.
    fn drop_unseen(&mut self, new: usize) {
        let (Some(window), Some(buffers)) = (self.window, &self.buffers) else { return };
        let seen = window - 1;
        if self.len + new >= 2 * window && self.len > seen {
            let from = self.len - seen;
            let keep = |buffer: &Tensor<B, 4>| buffer.clone().slice(s![.., .., from..self.len, ..]);
            self.buffers = (seen > 0).then(|| [keep(&buffers[0]), keep(&buffers[1])]);
            self.len = seen;
        }
    }
}

impl<B: OpBackend> DecodeState for KvCache<B> {
    fn elements(&self) -> usize {
        self.buffers.iter().flatten().map(|buffer| buffer.shape().num_elements()).sum()
    }
}

/// Writes the new keys and values into the buffers' rows from `at` on.
fn write<B: OpBackend>(
    buffers: [Tensor<B, 4>; 2],
    new: [Tensor<B, 4>; 2],
    at: usize,
) -> [Tensor<B, 4>; 2] {
    if let Some([k, v]) = on_cuda(new.each_ref())
        && cuda::serves([&k, &v])
    {
        let buffers = buffers.map(|x| B::into_cuda(primitive(x)).expect("where the new rows are"));
        return cuda::write_rows(buffers, [k, v], at).map(|x| tensor(B::from_cuda(x)));
    }
    let end = at + new[0].dims()[2];
    let ([keys, values], [k, v]) = (buffers, new);
    [(keys, k), (values, v)].map(|(buffer, new)| buffer.slice_assign(s![.., .., at..end, ..], new))
}

/// The tensors for work on CUDA itself; `None` on other devices, and under autodiff.
fn on_cuda<B: OpBackend, const N: usize>(tensors: [&Tensor<B, 4>; N]) -> Option<[CudaTensor; N]> {
    let all = tensors.map(|x| B::into_cuda(primitive(x.clone())));
    all.iter().all(Option::is_some).then(|| all.map(|x| x.expect("all are")))
}

/// A buffer of `capacity` tokens that begins with `old` and `new`.
fn grow<B: OpBackend>(
    old: Option<Tensor<B, 4>>,
    new: Tensor<B, 4>,
    capacity: usize,
) -> Tensor<B, 4> {
    let [batch, heads, n, head_dim] = new.dims();
    let len = old.as_ref().map_or(0, |old| old.dims()[2]);
    let buffer = Tensor::zeros([batch, heads, capacity, head_dim], (&new.device(), new.dtype()));
    let buffer = match old {
        Some(old) => buffer.slice_assign(s![.., .., 0..len, ..], old),
        None => buffer,
    };
    buffer.slice_assign(s![.., .., len..len + n, ..], new)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Distribution};

    use super::*;
    use crate::{Cpu, Cuda};

    fn tokens(n: usize) -> Tensor<Cpu, 4> {
        Tensor::random([2, 3, n, 4], Distribution::Default, &Default::default())
    }

    #[test]
    fn reserved_buffers_hold_the_same_tokens_and_do_not_grow() {
        let [mut plain, mut reserved] = [0, 9].map(|capacity| KvCache::<Cpu>::new(None, capacity));
        for n in [5, 1, 3] {
            let (k, v) = (tokens(n), tokens(n));
            let want = plain.append(k.clone(), v.clone());
            let got = reserved.append(k, v);
            for (want, got) in want.into_iter().zip(got) {
                assert_eq!(want.into_data(), got.into_data());
            }
            assert_eq!(reserved.elements(), 2 * 2 * 3 * 9 * 4, "after {n} more");
        }
        reserved.append(tokens(1), tokens(1));
        assert_eq!(reserved.elements(), 2 * 2 * 3 * 20 * 4, "twice what is needed");
    }

    #[test]
    fn rotating_and_appending_at_once_equals_one_after_the_other() {
        let rotation = Some(Rotation::new(100.0));
        for rotation in [rotation, None] {
            let [mut apart, mut together] = [3, 3].map(|w| KvCache::<Cpu>::new(Some(w), 0));
            for n in [5, 1, 1, 2, 1] {
                let (q, k, v) = (tokens(n), tokens(n), tokens(n));
                let [rotated, k_rotated] =
                    rotate(rotation, [q.clone(), k.clone()], apart.position());
                let [keys, values] = apart.append(k_rotated, v.clone());
                let got = together.append_rotated(rotation, [q, k, v]);
                for (want, got) in [rotated, keys, values].into_iter().zip(got) {
                    assert_eq!(want.into_data(), got.into_data());
                }
            }
        }
    }

    /// A prompt and steps, where the buffers have room and where they grow or drop tokens.
    #[test]
    #[ignore = "needs a GPU"]
    fn cuda_rotates_and_appends_at_once_as_one_after_the_other() {
        let random = |heads, n, channels| {
            let shape = [2, n, heads, channels];
            let x = Tensor::<Cuda, 4>::random(shape, Distribution::Default, &Default::default());
            x.cast(DType::BF16).swap_dims(1, 2)
        };
        let partial = Rotation { fraction: 0.5, ..Rotation::new(100.0) };
        for (rotation, window, [heads, kv_heads, head_dim, value_dim]) in [
            (Rotation::new(10_000.0), None, [12, 12, 64, 64]),
            (Rotation::new(10_000.0), Some(4), [6, 2, 128, 64]),
            (partial, None, [5, 1, 40, 80]),
            (partial, Some(3), [3, 3, 6, 10]),
        ] {
            let new = || KvCache::<Cuda>::new(window, 40);
            let (mut apart, mut together) = (new(), new());
            for n in [17, 1, 1, 3, 1, 16, 1, 1, 64, 1] {
                let (q, k) = (random(heads, n, head_dim), random(kv_heads, n, head_dim));
                let v = random(kv_heads, n, value_dim);
                let at = apart.position();
                let [rotated, k_rotated] = [q.clone(), k.clone()].map(|x| rotation.apply(x, at));
                let [keys, values] = apart.append(k_rotated, v.clone());
                let got = together.append_rotated(Some(rotation), [q, k, v]);
                for (want, got) in [rotated, keys, values].into_iter().zip(got) {
                    assert_eq!(want.into_data(), got.into_data(), "{n} tokens from {at} on");
                }
            }
        }
    }

    #[test]
    fn a_window_needs_no_more_than_two_of_it() {
        let mut cache = KvCache::<Cpu>::new(Some(4), 1000);
        cache.append(tokens(1), tokens(1));
        assert_eq!(cache.elements(), 2 * 2 * 3 * 8 * 4);
    }
}
