//! Kinds that decode from a cache of prepared keys, and values. They say how q and k are prepared
//! and what comes of them; [`Variant`] follows.

use burn::tensor::Tensor;

use super::cache::KvCache;
use super::dispatch::ExecPath;
use super::probe::Probe;
use super::rotation::{Rotation, rotate};
use super::{AttentionShape, DocumentStarts, Inputs, Variant, VariantSpec};
use crate::backend::OpBackend;

/// What such a kind's `Config` supplies beside its [`VariantSpec`].
pub trait KvCacheVariant: VariantSpec {
    /// The rotary positions, if there are any.
    fn rotation(&self) -> Option<Rotation>;

    /// q or k `[batch, heads, seq_len, head_dim]` of the positions `first`, `first` + 1, …, as the
    /// scores take them: rotated, unless the kind does more.
    fn prepare<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        rotate(self.rotation(), x, first)
    }

    /// The output `[batch, heads, queries, value_dim]`.
    fn output<B: OpBackend>(&self, shape: &AttentionShape, call: Prepared<'_, B>) -> Tensor<B, 4>;

    /// As [`Variant::observe`], of [`KvCacheVariant::output`] with the same arguments.
    fn observe_output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
        probe: &mut Probe,
    ) {
        let _ = (shape, call, probe);
    }
}

/// What [`KvCacheVariant::output`] takes.
#[derive(Debug)]
pub struct Prepared<'a, B: OpBackend> {
    /// Prepared queries, `[batch, views · heads, queries, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Prepared keys, `[batch, views · kv_heads, keys, head_dim]`. The queries are those of the last
    /// keys.
    pub k: Tensor<B, 4>,
    /// `[batch, kv_heads, keys, value_dim]`
    pub v: Tensor<B, 4>,
    /// The learned vectors of [`VariantSpec::parameters`].
    pub parameters: &'a [Tensor<B, 1>],
    /// The position of the first query.
    pub first: usize,
    /// Where documents start.
    pub documents: DocumentStarts<B>,
    /// What serves the call.
    pub path: ExecPath,
}

impl<C: KvCacheVariant> Variant for C {
    type State<B: OpBackend> = KvCache<B>;

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let [q, k] = [q, k].map(|x| self.prepare(x, 0));
        let parameters = &parameters;
        self.output(shape, Prepared { q, k, v, parameters, first: 0, documents, path })
    }

    fn observe<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
        probe: &mut Probe,
    ) {
        if self.metrics().is_empty() {
            return;
        }
        let [q, k] = [q, k].map(|x| self.prepare(x, 0));
        let parameters = &parameters;
        let call = Prepared { q, k, v, parameters, first: 0, documents, path };
        self.observe_output(shape, call, probe);
    }

    fn init_state<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        _path: ExecPath,
        capacity: usize,
    ) -> KvCache<B> {
        KvCache::new(shape.window, capacity)
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        cache: &mut KvCache<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let first = cache.position();
        let [q, k] = [q, k].map(|x| self.prepare(x, first));
        let [k, v] = cache.append(k, v);
        let parameters = &parameters;
        self.output(shape, Prepared { q, k, v, parameters, first, documents: None, path })
    }
}
