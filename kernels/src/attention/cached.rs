//! Variants that decode from a cache of prepared keys, and values. They say how q and k are prepared
//! and what comes of them; whole rows, decoding, its state and the costs follow here.

use burn::tensor::Tensor;
use longwall_config::Problems;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::cache::KvCache;
use super::rotation::{Rotation, rotate};
use super::{AttentionShape, DocumentStarts, Inputs, Parameter, Variant};
use crate::backend::OpBackend;

/// What such a variant's `Config` supplies; the rest of [`Variant`] follows.
pub trait Cached:
    Clone + std::fmt::Debug + Default + PartialEq + Serialize + DeserializeOwned
{
    /// As [`Variant::SOURCE`].
    const SOURCE: &'static str;

    /// As [`Variant::KERNELS`].
    const KERNELS: &'static [&'static str] = &[];

    /// The setting that does without rotary positions.
    const WITHOUT_ROTATION: &'static str = "rope = false";

    /// The rotary positions, if there are any.
    fn rotation(&self) -> Option<Rotation>;

    /// As [`Variant::validate`]: of the rotation alone, unless the variant has more keys.
    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        self.validate_rotation(key, shape, problems);
    }

    /// Records what is wrong with the rotary positions.
    fn validate_rotation(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, Self::WITHOUT_ROTATION, shape.head_dim, problems);
        }
    }

    /// As [`Variant::views`].
    fn views(&self) -> usize {
        1
    }

    /// As [`Variant::value_dim`].
    fn value_dim(&self, shape: &AttentionShape) -> usize {
        shape.head_dim
    }

    /// As [`Variant::parameters`].
    fn parameters(&self, shape: &AttentionShape) -> Vec<Parameter> {
        let _ = shape;
        vec![]
    }

    /// q or k `[batch, heads, seq_len, head_dim]` of the positions `first`, `first` + 1, …, as the
    /// scores take them: rotated, unless the variant does more.
    fn prepare<B: OpBackend>(&self, x: Tensor<B, 4>, first: usize) -> Tensor<B, 4> {
        rotate(self.rotation(), x, first)
    }

    /// The output `[batch, heads, queries, value_dim]` for prepared q, whose first position is
    /// `first`, prepared k, and v; the queries stand at the end of the keys.
    fn output<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        qkv: [Tensor<B, 4>; 3],
        parameters: &[Tensor<B, 1>],
        first: usize,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4>;

    /// As [`Variant::flops_per_token`]: of qᵀk and a·v in each view, a multiply-add per channel and
    /// key.
    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        let channels = self.views() * (shape.head_dim + self.value_dim(shape));
        (2 * channels * shape.heads) as f64 * shape.mean_keys(seq_len)
    }

    /// As [`Variant::weight_flops_per_token`].
    fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
        let _ = shape;
        0.0
    }
}

impl<C: Cached> Variant for C {
    type State<B: OpBackend> = KvCache<B>;

    const SOURCE: &'static str = C::SOURCE;

    const KERNELS: &'static [&'static str] = C::KERNELS;

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        Cached::validate(self, key, shape, problems);
    }

    fn views(&self) -> usize {
        Cached::views(self)
    }

    fn value_dim(&self, shape: &AttentionShape) -> usize {
        Cached::value_dim(self, shape)
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<Parameter> {
        Cached::parameters(self, shape)
    }

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
    ) -> Tensor<B, 4> {
        let [q, k] = [q, k].map(|x| self.prepare(x, 0));
        self.output(shape, [q, k, v], &parameters, 0, documents)
    }

    fn init_state<B: OpBackend>(&self, shape: &AttentionShape) -> KvCache<B> {
        KvCache::new(shape.window)
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, parameters, .. }: Inputs<B>,
        state: &mut KvCache<B>,
    ) -> Tensor<B, 4> {
        let first = state.position();
        let [q, k] = [q, k].map(|x| self.prepare(x, first));
        let [k, v] = state.append(k, v);
        self.output(shape, [q, k, v], &parameters, first, None)
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        Cached::flops_per_token(self, shape, seq_len)
    }

    fn weight_flops_per_token(&self, shape: &AttentionShape) -> f64 {
        Cached::weight_flops_per_token(self, shape)
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let channels = Cached::views(self) * shape.head_dim + Cached::value_dim(self, shape);
        (channels * shape.kv_heads * shape.cached_tokens(seq_len)) as u64
    }
}
