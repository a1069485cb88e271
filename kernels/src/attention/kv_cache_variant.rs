//! Kinds that decode from a [`KvCache`]. They define how q and k enter the scores and how the output is
//! computed; [`Variant`] is implemented here for all of them.

use burn::tensor::Tensor;

use super::cache::KvCache;
use super::dispatch::ExecPath;
use super::probe::Probe;
use super::rectified::l2_normalise;
use super::rotation::{Rotation, rotate};
use super::{AttentionShape, DocumentStarts, Inputs, Variant, VariantSpec};
use crate::backend::OpBackend;

/// What the `Config` of such a kind implements beside [`VariantSpec`].
pub trait KvCacheVariant: VariantSpec {
    /// Whether q and k, once rotated, are divided by their length before they enter the scores and the cache.
    const UNIT_LENGTH: bool = false;

    /// The rotary positions; `None` without them.
    fn rotation(&self) -> Option<Rotation>;

    /// The output `[batch, heads, queries, value_dim]`.
    fn output<B: OpBackend>(&self, shape: &AttentionShape, call: Prepared<'_, B>) -> Tensor<B, 4>;

    /// As [`Variant::weigh_values`], of [`KvCacheVariant::output`] with the same arguments.
    fn weigh_prepared<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        call: Prepared<'_, B>,
    ) -> Tensor<B, 4> {
        self.output(shape, call)
    }

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

/// q and k `[batch, heads, seq_len, head_dim]` of the positions `first`, `first` + 1, …, as they enter the scores
/// and the cache.
fn prepare<C: KvCacheVariant, B: OpBackend>(
    variant: &C,
    qk: [Tensor<B, 4>; 2],
    first: usize,
) -> [Tensor<B, 4>; 2] {
    let qk = rotate(variant.rotation(), qk, first);
    if C::UNIT_LENGTH { qk.map(l2_normalise) } else { qk }
}

/// The inputs of [`KvCacheVariant::output`].
#[derive(Debug)]
pub struct Prepared<'a, B: OpBackend> {
    /// Prepared queries, `[batch, views · heads, queries, head_dim]`.
    pub q: Tensor<B, 4>,
    /// Prepared keys, `[batch, views · kv_heads, keys, head_dim]`; the queries belong to the last of
    /// them.
    pub k: Tensor<B, 4>,
    /// `[batch, kv_heads, keys, value_dim]`
    pub v: Tensor<B, 4>,
    /// The learned vectors of [`VariantSpec::parameters`].
    pub parameters: &'a [Tensor<B, 1>],
    /// The position of the first query.
    pub first: usize,
    /// Document starts, only where the queries are those of all keys.
    pub documents: DocumentStarts<B>,
    /// The path that serves the call.
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
        let [q, k] = prepare(self, [q, k], 0);
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
        let [q, k] = prepare(self, [q, k], 0);
        let parameters = &parameters;
        let call = Prepared { q, k, v, parameters, first: 0, documents, path };
        self.observe_output(shape, call, probe);
    }

    fn weigh_values<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let [q, k] = prepare(self, [q, k], 0);
        let parameters = &parameters;
        self.weigh_prepared(shape, Prepared { q, k, v, parameters, first: 0, documents, path })
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
        let [q, k, v] = if C::UNIT_LENGTH {
            let [q, k] = prepare(self, [q, k], first);
            let [k, v] = cache.append(k, v);
            [q, k, v]
        } else {
            cache.append_rotated(self.rotation(), [q, k, v])
        };
        let parameters = &parameters;
        self.output(shape, Prepared { q, k, v, parameters, first, documents: None, path })
    }
}
