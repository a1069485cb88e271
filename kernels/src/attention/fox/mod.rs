//! FoX, forgetting attention (Lin et al., "Forgetting Transformer: softmax attention with a forget
//! gate", 2025, equation 6).
//!
//! ℓ_t = ln σ(w_fᵀx_t + b_f) per query head; S_ij = scale · q_iᵀk_j + Σ_{s=j+1..i} ℓ_s. The gate's
//! bias starts at `bias_init`, by default 0. No positions by default; `rope = true` rotates q and k as well.
//!
//! With `prune = true`, keys whose weights have decayed to nothing are skipped: those skipped in a row
//! together weigh at most 2⁻²⁴ of it (after Lin et al., "Adaptive Computation Pruning for the Forgetting
//! Transformer", 2025). The choice depends on the decay and the norms of queries and keys up to the query,
//! not on later tokens.
//!
//! | parameter | elements | initial value |
//! | --- | --- | --- |
//! | `sinks` (with `sinks`) | heads | 0 |
//!
//! Decoding caches keys, values and, per query head, the log decay of each token:
//! 2 · kv_heads · head_dim + heads elements per token.

mod cuda;
mod op;
#[cfg(test)]
mod tests;

use burn::tensor::{Tensor, s};
use longwall_config::Problems;
use serde::{Deserialize, Serialize};

use self::cuda::DecayKvCache;
use self::op::{Forgetting, forgetting};
use super::cache::KvCache;
use super::decay;
use super::dispatch::on_cuda;
use super::flash::{self, capacity};
use super::probe::{Metric, PRUNED_FRACTION, Probe};
use super::rotation::{Rotation, Scaling, rotate};
use super::softmax::{Softmax, pruned_fraction, sinks};
use super::{
    AttentionShape, DecodeState, DocumentStarts, ExecPath, Inputs, Kernel, ParameterSpec,
    ProjectionSpec, Variant, VariantSpec,
};
use crate::backend::{OpBackend, tensor};
use crate::device::DeviceKind;

/// `[model.attention]` with `kind = "fox"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Rotate q and k too; default false.
    pub rope: bool,
    /// Base of the rotary angles, above 1; default 10,000.
    pub theta: f64,
    /// Change of the angles for long contexts; default none.
    pub scaling: Scaling,
    /// Skip keys whose weights have decayed to nothing: those skipped in a row together weigh at most 2^-24
    /// of it; default false.
    pub prune: bool,
    /// Attention sinks: a learned logit per head in the softmax's denominator; default false.
    pub sinks: bool,
    /// Initial bias of the forget gate, finite; default 0.
    pub bias_init: f32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            rope: false,
            theta: 10_000.0,
            scaling: Scaling::None {},
            prune: false,
            sinks: false,
            bias_init: 0.0,
        }
    }
}

/// Keys, values and decays of the tokens so far.
#[derive(Clone, Debug)]
pub struct State<B: OpBackend> {
    cache: CacheStorage<B>,
    /// Position of the next token.
    position: usize,
    /// Tokens to reserve room for.
    capacity: usize,
}

#[derive(Clone, Debug)]
enum CacheStorage<B: OpBackend> {
    /// Keys and values, and ℓ, `[batch, heads, tokens]`.
    Tensors(KvCache<B>, Option<Tensor<B, 3>>),
    /// The cache of the CUDA kernels, from the first token on.
    Cuda(Option<Box<DecayKvCache>>),
}

impl<B: OpBackend> DecodeState for State<B> {
    fn elements(&self) -> usize {
        match &self.cache {
            CacheStorage::Tensors(cache, log_decay) => {
                cache.elements() + log_decay.as_ref().map_or(0, |x| x.shape().num_elements())
            }
            CacheStorage::Cuda(cache) => cache.as_ref().map_or(0, |cache| cache.elements()),
        }
    }

    fn observe(&self, probe: &mut Probe) {
        if let CacheStorage::Cuda(Some(cache)) = &self.cache
            && let Some(fraction) = cache.pruned_fraction()
        {
            probe.report(PRUNED_FRACTION, fraction);
        }
    }
}

impl Config {
    /// The rotation of q and k with `rope`.
    fn rotation(&self) -> Option<Rotation> {
        let Config { rope, theta, scaling, .. } = *self;
        rope.then_some(Rotation { scaling, ..Rotation::new(theta) })
    }

    fn operation(&self, shape: &AttentionShape) -> Forgetting {
        Forgetting { core: Softmax { prune: self.prune, ..Softmax::of(shape) } }
    }
}

/// The gate's logits, the only projection besides q, k and v.
fn gate<B: OpBackend>(projections: Vec<Tensor<B, 3>>) -> Tensor<B, 3> {
    projections.into_iter().next().expect("FoX projects its gate")
}

impl VariantSpec for Config {
    const SOURCE: &'static str = "forgetting attention (Lin et al., 2025)";

    const WEIGHS_VALUES: bool = true;

    const KERNELS: &'static [Kernel] = &[Kernel::CPU_F32, Kernel::CUDA_BF16];

    fn serves(&self, kernel: Kernel, shape: &AttentionShape, batch: usize) -> bool {
        match kernel.device {
            DeviceKind::Cpu => true,
            DeviceKind::Cuda => flash::serves(kernel.dtype, batch * shape.heads, shape.head_dim),
        }
    }

    fn validate(&self, key: &str, shape: &AttentionShape, problems: &mut Problems) {
        if let Some(rotation) = self.rotation() {
            rotation.validate(key, "rope = false", shape.head_dim, problems);
        }
        problems.check(
            self.bias_init.is_finite(),
            format!("{key}.bias_init"),
            self.bias_init,
            "a finite number",
            "set bias_init = 0.0; above 0, the gates start more open",
        );
    }

    fn projections(&self, shape: &AttentionShape) -> Vec<ProjectionSpec> {
        vec![decay::forget_gate(shape, self.bias_init)]
    }

    fn parameters(&self, shape: &AttentionShape) -> Vec<ParameterSpec> {
        self.sinks.then(|| sinks(shape)).into_iter().collect()
    }

    fn metrics(&self) -> Vec<Metric> {
        if self.prune { vec![PRUNED_FRACTION] } else { vec![] }
    }

    fn has_retention(&self) -> bool {
        true
    }

    fn flops_per_token(&self, shape: &AttentionShape, seq_len: usize) -> f64 {
        // qᵀk and p·v, two multiply-adds per channel and key, and the bias's addition.
        (4 * shape.head_dim + 1) as f64 * shape.heads as f64 * shape.mean_keys(seq_len)
    }

    fn state_elements(&self, shape: &AttentionShape, seq_len: usize) -> u64 {
        let per_token = 2 * shape.kv_heads * shape.head_dim + shape.heads;
        (per_token * shape.cached_tokens(seq_len)) as u64
    }
}

impl Variant for Config {
    type State<B: OpBackend> = State<B>;

    fn attend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let [q, k] = rotate(self.rotation(), [q, k], 0);
        let (log_decay, sinks) =
            (decay::log_decay(gate(projections)), parameters.into_iter().next());
        forgetting(&self.operation(shape), [q, k, v], log_decay, sinks, documents, path)
    }

    fn log_retention<B: OpBackend>(
        &self,
        _shape: &AttentionShape,
        inputs: Inputs<B>,
    ) -> Option<Tensor<B, 4>> {
        Some(decay::log_decay(gate(inputs.projections)).unsqueeze_dim(3))
    }

    fn init_state<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        path: ExecPath,
        capacity: usize,
    ) -> State<B> {
        let cache = match path {
            ExecPath::Kernel(DeviceKind::Cuda) => CacheStorage::Cuda(None),
            _ => CacheStorage::Tensors(KvCache::new(shape.window, capacity), None),
        };
        State { cache, position: 0, capacity }
    }

    fn extend<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, v, projections, parameters }: Inputs<B>,
        state: &mut State<B>,
        path: ExecPath,
    ) -> Tensor<B, 4> {
        let (first, tokens) = (state.position, q.dims()[2]);
        state.position += tokens;
        let [q, k] = rotate(self.rotation(), [q, k], first);
        let logits = gate(projections);
        let op = self.operation(shape);
        let sinks = parameters.into_iter().next();
        match &mut state.cache {
            CacheStorage::Cuda(cache) => {
                let [q, k, v] = [q, k, v].map(on_cuda);
                let cache = cache.get_or_insert_with(|| {
                    let capacity = capacity(shape.window, state.capacity, tokens);
                    Box::new(DecayKvCache::new(&k, shape.heads, capacity))
                });
                let (logits, sinks) = (on_cuda(logits), sinks.map(on_cuda));
                tensor(B::from_cuda(cache.extend(&op, [&q, &k, &v], logits, sinks.as_ref())))
            }
            CacheStorage::Tensors(cache, log_decay) => {
                let [k, v] = cache.append(k, v);
                let new = decay::log_decay(logits);
                let all = match log_decay.take() {
                    Some(old) => Tensor::cat(vec![old, new], 2),
                    None => new,
                };
                // The cache may have dropped tokens that left the window.
                let dropped = all.dims()[2] - cache.len();
                let all = if dropped > 0 { all.slice(s![.., .., dropped..]) } else { all };
                *log_decay = Some(all.clone());
                forgetting(&op, [q, k, v], all, sinks, None, path)
            }
        }
    }

    /// Every kernel prunes, and the reference does not.
    fn observe<B: OpBackend>(
        &self,
        shape: &AttentionShape,
        Inputs { q, k, projections, .. }: Inputs<B>,
        documents: DocumentStarts<B>,
        path: ExecPath,
        probe: &mut Probe,
    ) {
        if self.prune && path != ExecPath::Reference {
            let [q, k] = rotate(self.rotation(), [q, k], 0);
            let (core, decay) = (self.operation(shape).core, decay::log_decay(gate(projections)));
            probe.report(PRUNED_FRACTION, pruned_fraction(&core, q, k, decay, documents));
        }
    }
}
